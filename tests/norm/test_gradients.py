"""What autograd asks of the norms: only the gradients wanted, the same to the bit every time, nothing overwritten."""

from __future__ import annotations

import itertools

import pytest
import torch

import fusedops
from tests.harness.tensors import randn
from tests.norm.problems import NORMS

SUBSETS = [s for s in itertools.product((False, True), repeat=3) if any(s)]
X, WB, X_B = (True, False, False), (False, True, True), (True, False, True)


def named(subset):
    return "".join(name for name, wanted in zip("xwb", subset, strict=True) if wanted)


def leaves(device, subset, width=24, rows=3):
    x = randn(rows, width, device=device, requires_grad=subset[0])
    weight = randn(width, device=device, requires_grad=subset[1])
    bias = randn(width, device=device, requires_grad=subset[2])
    return x, weight, bias


@pytest.mark.parametrize(
    ("norm", "subset", "width"),
    # rms_norm has no bias. Looped: the three ways that its second kernel is launched.
    [pytest.param(n, s, 24, id=f"{n}-{named(s)}-held") for n in NORMS for s in SUBSETS if n.center or not s[2]]
    + [pytest.param(NORMS[0], s, 20000, id=f"layer_norm-{named(s)}-looped") for s in (X, WB, X_B)],
)
def test_every_subset_of_inputs_that_require_gradients(runner, norm, subset, width):
    tensors = leaves(runner.device, subset, width)
    grad = torch.randn(3, width, device=runner.device)
    if not norm.center:
        tensors = (*tensors[:2], None)
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    everything = [t if t is None else t.detach().requires_grad_() for t in tensors]
    full = torch.autograd.grad(
        norm.fused(everything[0], (width,), *everything[1:]), [e for e in everything if e is not None], grad
    )
    full = [f for f, t in zip(full, (t for t in tensors if t is not None), strict=True) if t.requires_grad]
    for ours, same in zip(
        torch.autograd.grad(norm.fused(tensors[0], (width,), *tensors[1:]), wanted, grad), full, strict=True
    ):
        torch.testing.assert_close(ours, same, rtol=0, atol=0)


@pytest.mark.parametrize("width", [24, 20000], ids=["held", "looped"])
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_backward_is_deterministic_and_leaves_its_inputs_alone(runner, norm, width):
    x, weight, bias = leaves(runner.device, (True, True, True), width, rows=40 if width < 100 else 6)
    bias = bias if norm.center else None
    wanted = [t for t in (x, weight, bias) if t is not None]
    before = [t.detach().clone() for t in wanted]
    versions = [t._version for t in wanted]
    y = norm.fused(x, (width,), weight, bias)
    grad = torch.randn_like(y)
    kept = grad.clone()
    first = torch.autograd.grad(y, wanted, grad, retain_graph=True)
    second = torch.autograd.grad(y, wanted, grad)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(grad, kept)
    for tensor, value, version in zip(wanted, before, versions, strict=True):
        assert torch.equal(tensor, value)
        assert tensor._version == version


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_no_gradient_keeps_no_graph(runner, norm):
    x, weight, bias = leaves(runner.device, (True, True, True))
    with torch.no_grad():
        assert norm.fused(x, (24,), weight, bias if norm.center else None).grad_fn is None


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_second_derivative_names_the_way_out(kernel_runner, norm):
    x = randn(4, 24, device=kernel_runner.device, requires_grad=True)
    message = r'no second derivative.*fusedops\.backend\("torch"\)'
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(norm.fused(x, (24,), None, None).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.functional.hessian(lambda z: norm.fused(z, (24,), None, None).square().sum(), x[0].detach())


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_second_derivative_on_the_torch_backend(norm):
    import fusedops

    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    with fusedops.backend("torch"):
        assert torch.autograd.gradgradcheck(lambda t: norm.fused(t, (5,), None, None), (x,))


@pytest.mark.parametrize("adds", [False, True], ids=["layer_norm", "add_layer_norm"])
def test_a_float32_bias_without_a_weight(runner, adds):
    """torch's own backward fails at it."""
    x = randn(3, 8, dtype=torch.float16, device=runner.device, requires_grad=True)
    bias = randn(8, device=runner.device, requires_grad=True)
    y = fusedops.add_layer_norm(x, x, 8, None, bias)[0] if adds else fusedops.layer_norm(x, 8, None, bias)
    y.float().sum().backward()
    assert y.dtype == x.grad.dtype == torch.float16
    torch.testing.assert_close(bias.grad, torch.full_like(bias, 3.0))
