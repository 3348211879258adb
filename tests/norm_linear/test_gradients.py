"""What autograd asks: only the gradients wanted, only what they need kept, the same to the bit, nothing overwritten."""

from __future__ import annotations

import itertools

import pytest
import torch

import fusedops
from tests.norm_linear.problems import BOTH, NAMES, tensors

LAYER, RMS = BOTH
SUBSETS = [frozenset(s) for n in range(1, 6) for s in itertools.combinations(NAMES, n)]
# Each alone, each left out, and pairs of one tensor of either layer.
SAMPLED = [s for s in SUBSETS if len(s) in (1, 4) or s in ({"input", "weight"}, {"norm_bias", "bias"})]


def subset_id(subset):
    return "_".join(name for name in NAMES if name in subset)


def only(leaves, subset):
    return [t if t is None else t.detach().requires_grad_(n in subset) for n, t in zip(NAMES, leaves, strict=True)]


def kept_by(y):
    """What the graph keeps for the backward, as addresses."""
    return {t.data_ptr() for t in y.grad_fn.saved_tensors if t is not None}


@pytest.mark.parametrize("subset", SAMPLED, ids=subset_id)
@pytest.mark.parametrize("activation", [None, "gelu"], ids=str)
def test_every_subset_of_inputs_that_require_gradients(kernel_runner, activation, subset):
    leaves = tensors(kernel_runner, LAYER, (9, 20), 12)
    grad = torch.randn(9, 12, device=kernel_runner.device)
    full = torch.autograd.grad(LAYER.fused(*leaves, activation), leaves, grad)
    some = only(leaves, subset)
    LAYER.fused(*some, activation).backward(grad)
    for name, leaf, right in zip(NAMES, some, full, strict=True):
        if name in subset:
            # The bias's gradient alone is summed in another order than beside the weight's.
            torch.testing.assert_close(leaf.grad, right, rtol=1e-6, atol=2e-6)
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("subset", SUBSETS, ids=subset_id)
def test_only_what_the_backward_reads_is_kept(kernel_runner, monkeypatch, subset):
    """Of the tensors given; of those made, the statistics and the pre-activation, but no normalised tensor."""
    from fusedops.norm_linear import functional

    made = []
    op = functional.norm_linear_op
    monkeypatch.setattr(functional, "norm_linear_op", lambda *args: made.append(op(*args)) or made[-1])
    leaves = only(tensors(kernel_runner, LAYER, (9, 20), 12), subset)
    y = LAYER.fused(*leaves, "gelu")
    ((_, preactivation, mean, rstd),) = made
    x, norm_weight, norm_bias, weight, _ = leaves
    through = subset & {"input", "norm_weight", "norm_bias"}
    expected = [
        (preactivation, True),
        (x, subset & {"input", "norm_weight", "weight"}),
        (norm_weight, subset & {"input", "weight"}),
        (norm_bias, subset & {"weight"}),
        (weight, through),
        (mean, through),
        (rstd, through),
    ]
    assert kept_by(y) == {tensor.data_ptr() for tensor, wanted in expected if wanted}


def test_relu_keeps_the_output_and_no_activation_keeps_nothing_more(kernel_runner):
    leaves = tensors(kernel_runner, LAYER, (9, 20), 12)
    y = LAYER.fused(*leaves, "relu")
    plain = LAYER.fused(*leaves)
    assert y.data_ptr() in kept_by(y)
    assert len(kept_by(y)) == len(kept_by(plain)) + 1


@pytest.mark.parametrize("subset", [{"input"}, {"weight"}, {"bias"}, {"norm_weight", "norm_bias"}], ids=subset_id)
def test_the_norm_is_computed_again_for_the_weights_gradient_only(kernel_runner, monkeypatch, subset):
    from fusedops.norm_linear import autograd

    y = LAYER.fused(*only(tensors(kernel_runner, LAYER, (9, 20), 12), subset), "silu")
    calls = []
    op = autograd.norm_op
    monkeypatch.setattr(autograd, "norm_op", lambda *args: calls.append(args) or op(*args))
    y.sum().backward()
    assert len(calls) == ("weight" in subset)


@pytest.mark.parametrize("function", BOTH, ids=str)
def test_without_a_gradient_nothing_is_kept(kernel_runner, monkeypatch, function):
    from fusedops.norm_linear import functional

    results = []
    op = functional.norm_linear_op
    monkeypatch.setattr(functional, "norm_linear_op", lambda *args: results.append(op(*args)) or results[-1])
    leaves = tensors(kernel_runner, function, (9, 20), 12)
    with torch.no_grad():
        function.fused(*leaves, "gelu")
    function.fused(*(t if t is None else t.detach() for t in leaves), "gelu")
    assert len(results) == 2
    for output, saved, *_ in results:
        assert output.grad_fn is None
        assert saved.shape == (0,)


@pytest.mark.parametrize("subset", [s for s in SUBSETS if len(s) < 3], ids=subset_id)
def test_torch_backend_gives_every_subset(subset):
    sizes = ((9, 20), (20,), (20,), (12, 20), (12,))
    leaves = [torch.randn(s, requires_grad=n in subset) for n, s in zip(NAMES, sizes, strict=True)]
    with fusedops.backend("torch"):
        LAYER.fused(*leaves, "silu").sum().backward()
    assert {n for n, t in zip(NAMES, leaves, strict=True) if t.grad is not None} == subset


@pytest.mark.parametrize("activation", [None, "relu", "gelu"], ids=str)
@pytest.mark.parametrize("function", BOTH, ids=str)
def test_backward_is_deterministic_and_leaves_its_inputs_alone(runner, function, activation):
    leaves = tensors(runner, function, (70, 20), 12, torch.bfloat16)
    given = [t for t in leaves if t is not None]
    before = [t.detach().clone() for t in given]
    versions = [t._version for t in given]
    y = function.fused(*leaves, activation)
    output = y.detach().clone()
    grad = torch.randn_like(y)
    kept = grad.clone()
    first = torch.autograd.grad(y, given, grad, retain_graph=True)
    second = torch.autograd.grad(y, given, grad)
    third = torch.autograd.grad(function.fused(*leaves, activation), given, grad)
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert torch.equal(grad, kept)
    assert torch.equal(y, output)
    for tensor, value, version in zip(given, before, versions, strict=True):
        assert torch.equal(tensor, value)
        assert tensor._version == version


def test_an_input_overwritten_before_the_backward_is_noticed(kernel_runner):
    leaves = tensors(kernel_runner, LAYER, (9, 20), 12)
    x = leaves[0].detach().requires_grad_() * 1.0
    y = LAYER.fused(x, *leaves[1:])
    x.detach().add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_was_kept_may_come_back_with_other_strides(kernel_runner):
    """As from a saved-tensor hook that packed it in another layout."""
    leaves = tensors(kernel_runner, LAYER, (9, 20), 12)
    right = torch.autograd.grad(LAYER.fused(*leaves, "gelu").sum(), leaves)

    def pack(t):
        return t.t().contiguous() if t.ndim == 2 else t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.t() if t.ndim == 2 else t):
        y = LAYER.fused(*leaves, "gelu")
    for ours, same in zip(torch.autograd.grad(y.sum(), leaves), right, strict=True):
        torch.testing.assert_close(ours, same, rtol=1e-6, atol=1e-6)


def test_a_transposed_weights_gradient_lies_as_it_does(kernel_runner):
    leaves = list(tensors(kernel_runner, LAYER, (9, 20), 12))
    leaves[3] = leaves[3].detach().t().contiguous().t().requires_grad_()
    (gradient,) = torch.autograd.grad(LAYER.fused(*leaves).sum(), leaves[3])
    assert gradient.stride() == leaves[3].stride()


@pytest.mark.parametrize("function", BOTH, ids=str)
def test_second_derivative_names_the_way_out(kernel_runner, function):
    leaves = tensors(kernel_runner, function, (4, 20), 12)
    with pytest.raises(RuntimeError, match=r'NormLinear: .*no second derivative.*fusedops\.backend\("torch"\)'):
        torch.autograd.grad(function.fused(*leaves, "gelu").sum(), leaves[0], create_graph=True)


@pytest.mark.parametrize("function", BOTH, ids=str)
def test_second_derivative_on_the_torch_backend(function):
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 5), (5,), (5,), (3, 5), (3,))]
    with fusedops.backend("torch"):
        assert torch.autograd.gradgradcheck(lambda *t: function.fused(*t, "gelu_tanh"), leaves)
