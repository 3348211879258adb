"""Offsets past 2**31 elements: batch, head or row times stride must not wrap in the kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fusedops
from tests.attention.problems import Problem
from tests.harness.tensors import randn

FAR = 2**29 + 16
NAMES = ("batch", "head", "row")


def far_apart(shape: tuple[int, ...], dim: int) -> torch.Tensor:
    """Random float16 numbers, the parts along ``dim`` FAR elements apart in memory that is reserved but not touched."""
    rest = [1 if i == dim else size for i, size in enumerate(shape)]
    strides = list(torch.empty(rest).stride())
    strides[dim] = FAR
    memory = torch.from_numpy(np.empty((shape[dim] - 1) * FAR + int(np.prod(rest)), dtype=np.int16)).view(torch.float16)
    return memory.as_strided(shape, strides).copy_(torch.randn(shape))


@pytest.mark.interpreter
@pytest.mark.parametrize("dim", range(3), ids=NAMES.__getitem__)
def test_far_apart(kernel_runner, dim):
    """Each stride fits in an int32, its product with the index does not; the interpreter reports an overflow."""
    shape = [1, 1, 5, 4]
    shape[dim] = 5
    inputs = [far_apart(tuple(shape), dim) for _ in range(3)]
    mask_shape = [*shape[:2], 5, 5]
    mask = far_apart(tuple(mask_shape), dim)
    grad = far_apart(tuple(shape), dim)
    results = []
    for tensors in ((*inputs, mask), [t.contiguous() for t in (*inputs, mask)]):
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = fusedops.attention(*leaves[:3], attn_mask=leaves[3])
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    for far, near in zip(*results, strict=True):
        assert torch.equal(far, near)


@pytest.mark.interpreter
def test_grouped_heads_far_apart(kernel_runner):
    """The heads of a group are walked inside one program."""
    q = far_apart((1, 5, 4, 4), 1)
    k, v = (randn(1, 1, 6, 4, dtype=torch.float16) for _ in range(2))
    results = []
    for queries in (q, q.contiguous()):
        leaves = [t.detach().requires_grad_() for t in (queries, k, v)]
        out = fusedops.attention(*leaves)
        results.append(torch.autograd.grad(out.float().square().sum(), leaves))
    for far, near in zip(*results, strict=True):
        assert torch.equal(far, near)


def test_an_expanded_batch_of_keys(runner):
    """Stride 0: one key and value set for all, as a prefix shared between sequences."""
    problem = Problem(batch=3, q=5, k=6, d=4)
    q, k, v, _ = problem.inputs(runner.device)
    k, v = (t.detach()[:1].requires_grad_() for t in (k, v))
    out = fusedops.attention(q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1))
    expected = torch.cat([fusedops.attention(q[i : i + 1], k, v) for i in range(3)])
    torch.testing.assert_close(out, expected)
    grads, wanted = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (out, expected))
    torch.testing.assert_close(grads, wanted)
