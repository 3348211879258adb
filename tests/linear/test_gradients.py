"""What autograd asks of linear: only the gradients wanted, the same to the bit every time, nothing overwritten."""

from __future__ import annotations

import itertools

import pytest
import torch

import fusedops
from fusedops.linear.activations import ACTIVATIONS
from tests.linear.problems import EVERY_ACTIVATION, tensors, use_config

SUBSETS = [s for s in itertools.product((False, True), repeat=3) if any(s)]


@pytest.fixture(params=["prologue", "pass"])
def placement(request, monkeypatch):
    """Where the derivative is computed; on the torch backend it makes no difference."""
    use_config(monkeypatch, prologue=request.param == "prologue")


@pytest.mark.usefixtures("placement")
@pytest.mark.parametrize("subset", SUBSETS, ids=lambda s: "".join(n for n, w in zip("xwb", s, strict=True) if w))
@pytest.mark.parametrize("activation", [None, "relu", "gelu"], ids=str)
def test_every_subset_of_inputs_that_require_gradients(kernel_runner, activation, subset):
    leaves = tensors(kernel_runner, (9, 20), 12)
    grad = torch.randn(9, 12, device=kernel_runner.device)
    full = torch.autograd.grad(fusedops.linear(*leaves, activation), leaves, grad)
    some = [t.detach().requires_grad_(wanted) for t, wanted in zip(leaves, subset, strict=True)]
    fusedops.linear(*some, activation).backward(grad)
    for leaf, wanted, right in zip(some, subset, full, strict=True):
        if wanted:
            # The bias's gradient alone is summed in another order than beside the weight's.
            torch.testing.assert_close(leaf.grad, right, rtol=1e-6, atol=2e-6)
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("subset", SUBSETS, ids=lambda s: "".join(n for n, w in zip("xwb", s, strict=True) if w))
def test_torch_backend_gives_every_subset(subset):
    leaves = [torch.randn(s, requires_grad=w) for s, w in zip(((9, 20), (12, 20), (12,)), subset, strict=True)]
    with fusedops.backend("torch"):
        fusedops.linear(*leaves, "silu").sum().backward()
    assert [t.grad is not None for t in leaves] == list(subset)


@pytest.mark.usefixtures("placement")
@pytest.mark.parametrize("activation", [None, "relu", "gelu"], ids=str)
def test_backward_is_deterministic_and_leaves_its_inputs_alone(runner, activation):
    leaves = tensors(runner, (70, 20), 12, torch.bfloat16)
    before = [t.detach().clone() for t in leaves]
    versions = [t._version for t in leaves]
    y = fusedops.linear(*leaves, activation)
    output = y.detach().clone()
    grad = torch.randn_like(y)
    kept = grad.clone()
    first = torch.autograd.grad(y, leaves, grad, retain_graph=True)
    second = torch.autograd.grad(y, leaves, grad)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    again = torch.autograd.grad(fusedops.linear(*leaves, activation), leaves, grad)
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(grad, kept)
    assert torch.equal(y, output)
    for tensor, value, version in zip(leaves, before, versions, strict=True):
        assert torch.equal(tensor, value)
        assert tensor._version == version


def kept_by(y):
    """What the graph keeps for the backward, as addresses."""
    return {t.data_ptr() for t in y.grad_fn.saved_tensors if t is not None}


@pytest.mark.parametrize("activation", EVERY_ACTIVATION, ids=str)
def test_only_what_the_backward_reads_is_kept(kernel_runner, activation):
    x, weight, bias = (t.detach() for t in tensors(kernel_runner, (9, 20), 12))
    # The pre-activation, which nobody else holds, or the output, which the caller does.
    of_output = activation is not None and ACTIVATIONS[activation].derivative_of == "output"
    extra = 0 if activation is None or of_output else 1
    for needs in SUBSETS:
        leaves = [t.clone().requires_grad_(need) for t, need in zip((x, weight, bias), needs, strict=True)]
        y = fusedops.linear(*leaves, activation)
        kept = kept_by(y)
        assert (leaves[0].data_ptr() in kept) == needs[1]
        assert (leaves[1].data_ptr() in kept) == needs[0]
        assert (y.data_ptr() in kept) == of_output
        named = {t.data_ptr() for t in (*leaves, y)}
        assert len(kept - named) == extra


@pytest.mark.parametrize("activation", EVERY_ACTIVATION, ids=str)
def test_without_a_gradient_nothing_is_kept(kernel_runner, monkeypatch, activation):
    from fusedops.linear import functional

    results = []
    op = functional.linear_op
    monkeypatch.setattr(functional, "linear_op", lambda *args: results.append(op(*args)) or results[-1])
    leaves = tensors(kernel_runner, (9, 20), 12)
    with torch.no_grad():
        fusedops.linear(*leaves, activation)
    fusedops.linear(*(t.detach() for t in leaves), activation)
    for output, saved in results:
        assert output.grad_fn is None
        assert saved.shape == (0,)


def test_what_was_kept_may_come_back_with_other_strides(kernel_runner):
    """As from a saved-tensor hook that packed it in another layout."""
    leaves = tensors(kernel_runner, (9, 20), 12)
    right = torch.autograd.grad(fusedops.linear(*leaves, "gelu").sum(), leaves)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.t().contiguous(), lambda t: t.t()):
        y = fusedops.linear(*leaves, "gelu")
    for ours, same in zip(torch.autograd.grad(y.sum(), leaves), right, strict=True):
        torch.testing.assert_close(ours, same, rtol=1e-6, atol=1e-6)


def test_a_residual_branch_sees_the_output_it_was_given(runner):
    """``y`` is used twice and its gradient arrives as a shared tensor."""
    leaves = tensors(runner, (9, 12), 12)
    y = fusedops.linear(*leaves, "gelu")
    grads = torch.autograd.grad((y + y * y).sum(), leaves)
    z = torch.nn.functional.gelu(torch.nn.functional.linear(*leaves))
    for ours, theirs in zip(grads, torch.autograd.grad((z + z * z).sum(), leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", [None, "gelu"], ids=str)
def test_second_derivative_names_the_way_out(kernel_runner, activation):
    x, weight, bias = tensors(kernel_runner, (4, 20), 12)
    with pytest.raises(RuntimeError, match=r'Linear: .*no second derivative.*fusedops\.backend\("torch"\)'):
        torch.autograd.grad(fusedops.linear(x, weight, bias, activation).sum(), x, create_graph=True)


def test_second_derivative_on_the_torch_backend():
    x, weight = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 5), (3, 5)))
    with fusedops.backend("torch"):
        assert torch.autograd.gradgradcheck(lambda *t: fusedops.linear(*t, None, "gelu_tanh"), (x, weight))


def test_the_tables_derivatives_are_those_of_the_functions():
    z = torch.linspace(-9, 9, 101, dtype=torch.float64, requires_grad=True)
    for activation in ACTIVATIONS.values():
        # torch multiplies by 1 / 6 in float32 there.
        y = (z + 3).clamp(0, 6) / 6 if activation.name == "hardsigmoid" else activation.forward(z)
        (right,) = torch.autograd.grad(y.sum(), z)
        ours = activation.derivative(z if activation.derivative_of == "preactivation" else y)
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)
