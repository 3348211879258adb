"""Dropout of softmax weights: drawn from torch's generator, the same in forward and backward and on every backend."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops.runtime.dropout import draw_seed, keep_scale
from tests.attention.problems import Problem, check, fused, gradients
from tests.harness.tensors import randn

# Several tiles of the interpreter's each way.
LONG = Problem(batch=2, heads=2, kv_heads=1, q=70, k=80, d=8)


def weights(problem, device, p, seed=5, **options):
    """(out, lse) where the values are the identity: out is the weights that are left, (batch, heads, q, k)."""
    q, k, _, _ = problem.inputs(device)
    v = torch.eye(problem.k, device=device).expand(problem.batch, problem.kv_heads, problem.k, problem.k)
    torch.manual_seed(seed)
    return fused(q.detach(), k.detach(), v, dropout_p=p, **options)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_what_is_dropped_is_a_function_of_the_seed_and_the_place(runner, p):
    """On every backend that of runtime.dropout, whatever the tiles; what is left is multiplied by 1 / (1 - p)."""
    state = torch.get_rng_state()
    full, _ = weights(LONG, runner.device, 0.0)
    torch.set_rng_state(state)
    left, lse = weights(LONG, runner.device, p)
    torch.manual_seed(5)
    keep = keep_scale(draw_seed(full), 2 * 2 * 70, 80, p).view(2, 2, 70, 80)
    assert torch.equal(left != 0, keep != 0)
    torch.testing.assert_close(left, full * keep)
    # The share that is left, of 22,400: four standard deviations.
    assert abs(float((keep != 0).float().mean()) - (1 - p)) < 4 * (p * (1 - p) / keep.numel()) ** 0.5
    assert torch.isfinite(lse).all()


def test_lse_is_that_of_all_weights(runner):
    q, k, v, _ = LONG.inputs(runner.device)
    _, lse = fused(q, k, v, dropout_p=0.5)
    _, expected = fused(q, k, v)
    assert torch.equal(lse, expected)


def test_the_seed_decides(runner):
    """Equal after one seed, other with another and in the next call; the next call after the seed is equal too."""
    q, k, v, _ = Problem().inputs(runner.device, requires_grad=False)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append([fusedops.attention(q, k, v, dropout_p=0.5) for _ in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(outs[0], outs[1], strict=True))
    assert not torch.equal(outs[0][0], outs[0][1])
    assert not torch.equal(outs[0][0], outs[2][0])


def test_batches_heads_and_rows_have_masks_of_their_own(runner):
    left, _ = weights(LONG, runner.device, 0.5)
    kept = (left != 0).flatten(0, 2).float() - 0.5
    # Products of independent signs ±0.5 of 80 keys: mean 0, standard deviation 0.25·√80 = 2.2.
    products = kept @ kept.T
    products.fill_diagonal_(0)
    assert products.abs().max() < 6 * 2.24


def test_no_dropout_draws_nothing(runner):
    q, k, v, _ = Problem().inputs(runner.device, requires_grad=False)
    before = torch.get_rng_state()
    fusedops.attention(q, k, v, dropout_p=0.0)
    assert torch.equal(torch.get_rng_state(), before)
    fusedops.attention(q, k, v, dropout_p=0.5)
    if runner.device.type == "cpu":
        assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_everything_dropped(runner, dtype):
    """p = 1: zeros, not NaN; lse and its gradient are as without."""
    inputs = Problem(kv_heads=1).inputs(runner.device, dtype)[:3]
    do, dlse = randn(1, 2, 20, 16, dtype=dtype, device=runner.device), randn(1, 2, 20, device=runner.device)
    (out, lse), grads = gradients(fused, inputs, (do, None), dropout_p=1.0)
    assert (out == 0).all()
    assert all((g == 0).all() for g in grads)
    (_, expected), of_lse = gradients(fused, inputs, (torch.zeros_like(do), dlse))
    assert torch.equal(lse, expected)
    _, grads = gradients(fused, inputs, (do, dlse), dropout_p=1.0)
    for ours, same in zip(grads, of_lse, strict=True):
        torch.testing.assert_close(ours, same)


def test_backward_has_the_forwards_mask(runner):
    """dv = (what the forward left)ᵀ do, and what it dropped has no part in the gradient of the scores."""
    q, k, _, _ = LONG.inputs(runner.device)
    v = torch.eye(80, device=runner.device).expand(2, 1, 80, 80).contiguous().requires_grad_()
    do = randn(2, 2, 70, 80, device=runner.device)
    (left, _), (dq, _, dv) = gradients(fused, (q, k, v), (do, None), dropout_p=0.4)
    torch.testing.assert_close(dv, (left.mT @ do).sum(1, keepdim=True))
    # With P the softmax and G = left ∘ do: dS = G - P · (row sums of G); q's gradient is scale · dS k.
    p = (8**-0.5 * q @ k.mT).softmax(-1)
    g = left * do
    torch.testing.assert_close(dq, 8**-0.5 * (g - p * g.sum(-1, keepdim=True)) @ k, rtol=1e-4, atol=1e-5)


PROBLEMS = {
    "grouped heads": LONG.but(batch=1, heads=3, dropout_p=0.3),
    "causal": LONG.but(batch=1, causal=True, dropout_p=0.3),
    "window": LONG.but(batch=1, window=(20, 15), dropout_p=0.3),
    "masks": LONG.but(batch=1, q=30, mask="float", dropout_p=0.3),
}


@pytest.mark.parametrize("which", PROBLEMS)
def test_gradients(runner, which):
    check(PROBLEMS[which], runner, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.25, 0.9])
def test_sixteen_bits(runner, p, dtype):
    """1 / (1 - p) is no number of 16 bits: weights must not be rounded to them after they were multiplied by it."""
    check(LONG.but(batch=1, q=33, causal=True, dropout_p=p), runner, dtype)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(runner, use_reentrant):
    inputs = Problem(kv_heads=1).inputs(runner.device)[:3]

    def function(q, k, v):
        return fusedops.attention(q.sin(), k, v, causal=True, dropout_p=0.5).cos()

    torch.manual_seed(7)
    grads = torch.autograd.grad(function(*inputs).sum(), inputs)
    torch.manual_seed(7)
    checkpoint(function, *inputs, use_reentrant=use_reentrant).sum().backward()
    for tensor, grad in zip(inputs, grads, strict=True):
        assert torch.equal(tensor.grad, grad)


def test_scaled_dot_product_attention_is_the_same_operator(kernel_runner):
    q, k, v, _ = Problem().inputs(kernel_runner.device)
    outs = []
    for function, options in (
        (fusedops.attention, {"causal": True}),
        (fusedops.scaled_dot_product_attention, {"is_causal": True}),
    ):
        torch.manual_seed(3)
        out = function(q, k, v, dropout_p=0.4, **options)
        outs.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def test_compiled_draws_as_eager(kernel_runner):
    inputs = Problem(kv_heads=1, q=9, k=11).inputs(kernel_runner.device)[:3]

    def function(q, k, v):
        return fusedops.attention(q, k, v, dropout_p=0.5)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for run in (function, compiled, compiled):
        torch.manual_seed(4)
        out = run(*inputs)
        results.append((out, *torch.autograd.grad(out.sum(), inputs)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
