"""What autograd asks of attention: only the gradients wanted, the same to the bit every time, nothing overwritten."""

from __future__ import annotations

import pytest
import torch

import fusedops
from tests.attention.problems import Problem, double, exact, fused, gradients, plain
from tests.harness.errors import check_error
from tests.harness.tensors import randn

SMALL = Problem(heads=2, kv_heads=1, q=9, k=11, mask="float", mask_shape=(1, 1, 9, 11))
LONG = Problem(heads=2, kv_heads=1, q=70, k=80, mask="float", mask_shape=(1, 1, 1, 80), causal=True)


def test_gradient_of_lse_alone(runner):
    inputs = SMALL.inputs(runner.device)[:3]
    dlse = randn(1, 2, 9, device=runner.device)

    def lse_of(function):
        return lambda q, k: (function(q, k, inputs[2].detach(), None)[1],)

    _, grads = gradients(lse_of(fused), inputs[:2], (dlse,))
    _, base = gradients(lse_of(plain), inputs[:2], (dlse,))
    doubled = [double(t) for t in inputs]
    inputs = doubled
    _, truth = gradients(lse_of(exact), doubled[:2], (dlse.double(),))
    for name, *results in zip("qk", grads, truth, base, strict=True):
        check_error(*results, gradient=True, what=f"gradient of {name}")


def test_backward_is_deterministic_and_leaves_its_inputs_alone(runner):
    inputs = LONG.inputs(runner.device)
    before = [t.detach().clone() for t in inputs]
    versions = [t._version for t in inputs]
    out, lse = fused(*inputs, causal=True)
    grads = [torch.randn_like(out), torch.randn_like(lse)]
    kept = [g.clone() for g in grads]
    first = torch.autograd.grad([out, lse], inputs, grads, retain_graph=True)
    second = torch.autograd.grad([out, lse], inputs, grads)
    again = torch.autograd.grad(list(fused(*inputs, causal=True)), inputs, grads)
    for a, b, c in zip(first, second, again, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert all(torch.equal(g, k) for g, k in zip(grads, kept, strict=True))
    for tensor, value, version in zip(inputs, before, versions, strict=True):
        assert torch.equal(tensor, value)
        assert tensor._version == version


def test_a_summed_output_sends_one_number(runner):
    """``out.sum().backward()``: the incoming gradient has stride 0 everywhere."""
    inputs = SMALL.inputs(runner.device)
    summed = torch.autograd.grad(fusedops.attention(*inputs[:3], attn_mask=inputs[3]).sum(), inputs)
    out = fusedops.attention(*inputs[:3], attn_mask=inputs[3])
    ones = torch.autograd.grad(out, inputs, torch.ones_like(out))
    for a, b in zip(summed, ones, strict=True):
        assert torch.equal(a, b)


def test_gradients_have_their_own_memory(kernel_runner):
    """q, k and v may be one tensor; each use gets its gradient."""
    x = randn(1, 2, 20, 16, device=kernel_runner.device, requires_grad=True)
    fusedops.attention(x, x, x).sum().backward()
    q, k, v = (x.detach().clone().requires_grad_() for _ in range(3))
    grads = torch.autograd.grad(fusedops.attention(q, k, v).sum(), (q, k, v))
    assert torch.equal(x.grad, sum(grads[1:], grads[0]))


def test_no_gradient_keeps_no_graph(runner):
    inputs = SMALL.inputs(runner.device)
    with torch.no_grad():
        assert fusedops.attention(*inputs[:3], attn_mask=inputs[3]).grad_fn is None


def test_second_derivative_names_the_way_out(kernel_runner):
    q, k, v, _ = SMALL.inputs(kernel_runner.device)
    with pytest.raises(RuntimeError, match=r'no second derivative.*fusedops\.backend\("torch"\)'):
        torch.autograd.grad(fusedops.attention(q, k, v).sum(), q, create_graph=True)


@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_second_derivative_on_the_torch_backend(mask):
    problem = Problem(heads=2, kv_heads=1, q=3, k=4, d=2, mask=mask, mask_shape=(1, 1, 3, 4), causal=True)
    q, k, v, m = (t if t is None else double(t) for t in problem.inputs(torch.device("cpu")))
    leaves = (q, k, v, m) if mask == "float" else (q, k, v)
    if mask == "float":
        leaves[3].data.clamp_(min=-5)  # a finite difference of -inf is NaN

    def function(q, k, v, attn_mask=m):
        with fusedops.backend("torch"):
            return fusedops.attention(q, k, v, attn_mask=attn_mask, causal=True, return_lse=True)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_a_nan_that_arrives_for_a_row_that_sees_nothing(runner):
    """Merging two lse of -inf (torch.logaddexp, as ring attention does) sends NaN back: it must not spread."""
    q, k, v, _ = Problem(q=5, k=6).inputs(runner.device)
    mask = torch.ones(5, 6, dtype=torch.bool, device=runner.device)
    mask[2] = False
    out, lse = fused(q, k, v, mask)
    merged = torch.logaddexp(lse, lse)
    loss = torch.where(merged.isinf(), 0.0, merged).sum() + out.sum()
    for grad in torch.autograd.grad(loss, (q, k, v)):
        assert torch.isfinite(grad).all()


def test_a_loss_of_lse_alone_gives_v_zeros(runner):
    q, k, v, _ = SMALL.inputs(runner.device)
    grads = torch.autograd.grad(fused(q, k, v)[1].sum(), (q, k, v))
    assert (grads[2] == 0).all()
    assert grads[0].any()
