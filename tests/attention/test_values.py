"""Attention gives the definition's results, forward and backward, for every shape, alignment, scale and layout."""

from __future__ import annotations

import pytest
import torch

import fusedops
from tests.attention.problems import Problem, check, double, exact, fused, gradients, plain
from tests.harness.errors import check_error
from tests.harness.tensors import randn


@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
@pytest.mark.parametrize("lengths", [(90, 70), (2, 90), (65, 64), (64, 130), (69, 70)], ids=str)
def test_causal_alignment_with_unequal_lengths(runner, causal, lengths):
    check(Problem(heads=1, kv_heads=1, q=lengths[0], k=lengths[1], causal=causal), runner, torch.float32)


def test_causal_alignments_by_hand(runner):
    """Equal scores: each query gets the mean of the values it sees."""
    zeros = torch.zeros(1, 1, 2, 1, device=runner.device)
    k = torch.zeros(1, 1, 3, 1, device=runner.device)
    v = torch.tensor([3.0, 9.0, 30.0], device=runner.device).view(1, 1, 3, 1)
    for causal, means in ((False, [14, 14]), (True, [3, 6]), ("top_left", [3, 6]), ("bottom_right", [6, 14])):
        out = fusedops.attention(zeros, k, v, causal=causal)
        torch.testing.assert_close(out.flatten(), torch.tensor(means, device=runner.device).float())


@pytest.mark.parametrize("heads", [(3, 3), (3, 1), (8, 1)], ids=lambda h: f"{h[0] // h[1]}")
def test_query_heads_a_key_head(runner, heads):
    check(Problem(heads=heads[0], kv_heads=heads[1], causal=True), runner, torch.float32)


# (head size, head size of v, dtype)
SIZES = [
    (1, 1, torch.float32),
    (16, 256, torch.float16),
    (40, 40, torch.bfloat16),
    (64, 72, torch.float16),
    (72, 72, torch.float16),
    (96, 96, torch.float32),
    (111, 40, torch.bfloat16),
    (192, 128, torch.float32),
    (256, 256, torch.bfloat16),
    (8, 5, torch.float32),
]


@pytest.mark.parametrize(("d", "dv", "dtype"), SIZES, ids=lambda v: str(v).removeprefix("torch."))
def test_head_sizes(runner, d, dv, dtype):
    check(Problem(heads=1, kv_heads=1, d=d, dv=dv), runner, dtype)


@pytest.mark.parametrize("scale", [0.0, -0.7, 1, 1e-3], ids=str)
@pytest.mark.parametrize("causal", [False, "bottom_right"], ids=str)
def test_any_scale(runner, scale, causal):
    check(Problem(heads=1, kv_heads=1, q=36, k=70, scale=scale, causal=causal), runner, torch.float32)


@pytest.mark.parametrize("lengths", [(1, 50), (50, 2), (17, 129), (128, 64)], ids=str)
def test_lengths(runner, lengths):
    check(Problem(heads=1, kv_heads=1, q=lengths[0], k=lengths[1]), runner, torch.float32)


@pytest.mark.parametrize(("q", "k", "causal"), [(1, 1, False), (50, 1, False), (1, 90, True)], ids=str)
def test_a_single_key(runner, q, k, causal):
    """Its probability is one whatever the scores: the output is its value, the scores get the gradient of lse alone."""
    problem = Problem(heads=1, kv_heads=1, q=q, k=k, causal=causal)
    inputs = problem.inputs(runner.device)
    do, dlse = randn(1, 1, q, 16, device=runner.device), randn(1, 1, q, device=runner.device)
    (out, _), (dq, dk, dv) = gradients(fused, inputs, (do, dlse), causal=causal)
    queries, key, value = (t.detach() for t in inputs[:3])
    assert torch.equal(out, value[:, :, :1].expand_as(out))
    assert (dv[:, :, 1:] == 0).all()
    assert (dk[:, :, 1:] == 0).all()
    torch.testing.assert_close(dv[:, :, :1], do.sum(2, keepdim=True))
    # do·v and do·out are equal but for the order of their sums: 2·16 roundings of terms of that size.
    noise = 32 * torch.finfo(torch.float32).eps * (do.abs() * value[:, :, :1].abs()).sum(-1)
    tolerance = 0.25 * noise[..., None] * key[:, :, :1].abs() + 1e-6 * dlse.abs()[..., None]
    assert ((dq - 0.25 * dlse[..., None] * key[:, :, :1]).abs() <= tolerance).all()
    tolerance = (0.25 * noise[..., None] * queries.abs() + 1e-6 * dlse.abs()[..., None]).sum(2)
    assert ((dk[:, :, 0] - 0.25 * (dlse[..., None] * queries).sum(2)).abs() <= tolerance).all()


@pytest.mark.parametrize("layout", ["transposed", "sliced", "strided", "expanded", "offset"])
def test_layouts(runner, layout):
    """``sliced`` and ``strided`` have NaN all around: nothing outside the tensors may be read into a result."""
    check(Problem(batch=2, q=37, k=43, d=24, causal=True, layout=layout), runner, torch.float32, grad_layout=layout)


def test_heads_that_lie_beside_each_other(runner):
    """As models hold them: (batch, length, 3, heads, size), and the gradient in the layout of the output."""
    packed = randn(2, 37, 3, 2, 24, device=runner.device)
    q, k, v = (t.transpose(1, 2).requires_grad_() for t in packed.unbind(2))
    check(Problem(causal=True), runner, torch.float32, inputs=(q, k, v, None))


def test_large_scores_do_not_overflow(runner):
    """exp of the scores, about e±4000 here, overflows unless the maximum is taken off."""
    problem = Problem(heads=1, kv_heads=1, q=36, k=70, scale=300.0)
    q, k, v, _ = problem.inputs(runner.device)
    outputs = fused(q, k, v, None, scale=300.0)
    truth = exact(*(double(t) for t in (q, k, v)), None, scale=300.0)
    for name, *results in zip(("out", "lse"), outputs, truth, plain(q, k, v, None, scale=300.0), strict=True):
        check_error(*results, what=name)
    for grad in torch.autograd.grad(outputs[0].sum(), (q, k, v)):
        assert torch.isfinite(grad).all()


def test_output_lies_as_models_hold_it(kernel_runner):
    """(batch, heads, length, size) in the memory of (batch, length, heads, size): a model's transpose is free."""
    q, k, v, _ = Problem(batch=2).inputs(kernel_runner.device)
    out = fusedops.attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous()
    out.sum().backward()
    assert q.grad is not None
    assert torch.isfinite(q.grad).all()
