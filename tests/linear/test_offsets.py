"""Offsets past 2**31 elements: no index times a stride may wrap in the kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fusedops
from tests.linear.problems import use_config


def far_apart(rows: int, cols: int, strides: tuple[int, int]) -> torch.Tensor:
    """A bfloat16 matrix with these strides in elements, in memory that is reserved but not touched between them."""
    size = (rows - 1) * strides[0] + (cols - 1) * strides[1] + 1
    memory = torch.from_numpy(np.empty(size, dtype=np.int16)).view(torch.bfloat16)
    return memory.as_strided((rows, cols), strides).copy_(torch.randn(rows, cols))


@pytest.mark.interpreter
@pytest.mark.parametrize("prologue", [True, False], ids=["prologue", "pass"])
@pytest.mark.parametrize("which", ["rows", "columns"])
def test_matrices_far_apart(kernel_runner, monkeypatch, which, prologue):
    """Each stride fits in an int32, its product with an index or a step does not; the interpreter reports a wrap."""
    use_config(monkeypatch, prologue=prologue)
    stride = 2**28 + 16

    def matrix(rows, cols):
        return far_apart(rows, cols, (stride, 1) if which == "rows" else (1, stride))

    # Nine rows (or columns) of each: 4.5 GB of addresses a matrix.
    x, weight, grad = matrix(9, 9), matrix(9, 9), matrix(9, 9)
    results = []
    for operands in ((x, weight, grad), tuple(t.contiguous() for t in (x, weight, grad))):
        leaves = [t.detach().requires_grad_() for t in operands[:2]]
        y = fusedops.linear(*leaves, None, "gelu")
        results.append((y, *torch.autograd.grad(y, leaves, operands[2])))
    for far, near in zip(*results, strict=True):
        assert torch.equal(far, near)
