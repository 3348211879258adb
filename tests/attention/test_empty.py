"""Empty tensors: right shapes, zeros, and zero gradients rather than none."""

from __future__ import annotations

import pytest
import torch

import fusedops
from tests.attention.problems import Problem

EMPTY = {
    "batch": {"batch": 0},
    "heads": {"heads": 0, "kv_heads": 0},
    "queries": {"q": 0},
    "keys": {"k": 0},
    "queries and keys": {"q": 0, "k": 0},
}


@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("causal", [False, "bottom_right"], ids=str)
@pytest.mark.parametrize("which", EMPTY)
def test_empty(runner, which, causal, mask):
    problem = Problem(heads=4, kv_heads=2, q=3, k=5, d=8, dv=6, mask=mask).but(**EMPTY[which])
    for shape in (None, (1, 1, 1, problem.k), (1, 1, 1, 1)):
        q, k, v, m = problem.but(mask_shape=shape).inputs(runner.device)
        out, lse = fusedops.attention(q, k, v, attn_mask=m, causal=causal, return_lse=True)
        alone = fusedops.attention(q, k, v, attn_mask=m, causal=causal)
        assert out.shape == alone.shape == (problem.batch, problem.heads, problem.q, 6)
        assert lse.shape == out.shape[:3]
        assert (out == 0).all()
        assert (alone == 0).all()
        assert (lse == float("-inf")).all()
        leaves = [t for t in (q, k, v, m) if t is not None and t.requires_grad]
        for outputs in ([out, lse.exp()], [alone]):
            grads = torch.autograd.grad([o.sum() for o in outputs], leaves)
            for grad, leaf in zip(grads, leaves, strict=True):
                assert grad.shape == leaf.shape
                assert (grad == 0).all()


@pytest.mark.parametrize("sizes", [(8, 0), (0, 8)], ids=str)
def test_empty_heads(sizes):
    """No kernel takes a head size of zero; torch's operator does."""
    q, k, v = (torch.randn(1, 2, 3, d, requires_grad=True) for d in (sizes[0], sizes[0], sizes[1]))
    reasons = fusedops.explain(fusedops.attention, q, k, v).reasons
    assert any("head size 0" in reason for reason in reasons)
    with fusedops.backend("torch"):
        out = fusedops.attention(q, k, v)
        with_lse, _ = fusedops.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand(1, 2, 3, sizes[1]))
    torch.testing.assert_close(with_lse, out)
