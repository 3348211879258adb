"""Offsets past 2**31 elements: row times stride must not wrap in the kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.norm.problems import NORMS


def far_apart(rows: int, width: int, stride: int) -> torch.Tensor:
    """A bfloat16 matrix whose rows lie ``stride`` elements apart, in memory that is reserved but not touched."""
    memory = torch.from_numpy(np.empty((rows - 1) * stride + width, dtype=np.int16)).view(torch.bfloat16)
    matrix = memory.as_strided((rows, width), (stride, 1))
    return matrix.copy_(torch.randn(rows, width))


@pytest.mark.interpreter
@pytest.mark.parametrize("width", [20, 33000], ids=["held", "looped"])
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_rows_far_apart(kernel_runner, norm, width):
    """The stride fits in an int32, row times stride does not; the interpreter reports an int32 that overflows."""
    x, grad = far_apart(3, width, 2**30 + 16), far_apart(3, width, 2**30 + 48)
    weight = torch.randn(width, dtype=torch.bfloat16, requires_grad=True)
    results = []
    for tensor, incoming in ((x, grad), (x.contiguous(), grad.contiguous())):
        leaf = tensor.detach().requires_grad_()
        y = norm.fused(leaf, (width,), weight, None)
        results.append((y, *torch.autograd.grad(y, (leaf, weight), incoming)))
    for far, near in zip(*results, strict=True):
        assert torch.equal(far, near)
