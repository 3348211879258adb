"""torch.func's transforms and forward-mode differentiation: torch's operators serve them, to any order."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusedops
from tests.harness.operators import MODULES, OPERATORS

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop.*batching rule:UserWarning")

DIFFERENTIABLE = [operator for operator in OPERATORS if operator.differentiable]
SEED = 5


@pytest.fixture(autouse=True, params=["torch", "auto"])
def backend(request):
    """``auto``: the kernels would serve a plain call, in Triton's interpreter or on a GPU."""
    with fusedops.backend(request.param):
        yield request.param


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


def first(result):
    return result[0] if isinstance(result, tuple) else result


def called(operator, tensors):
    """The floating results, added up in one number that depends on each element in another way."""
    torch.manual_seed(SEED)
    results = operator.function(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    return sum((r * torch.linspace(0.5, 1.5, r.numel(), device=r.device).view(r.shape)).sum() for r in results)


def of_some(operator, tensors):
    """(a function of the differentiable tensors, those tensors)."""

    def function(*given):
        whole = list(tensors)
        for place, tensor in zip(operator.differentiable, given, strict=True):
            whole[place] = tensor
        return called(operator, whole)

    return function, [tensors[place] for place in operator.differentiable]


def gradients(operator, tensors):
    """By autograd, on torch's operators."""
    function, leaves = of_some(operator, tensors)
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    with fusedops.backend("torch"):
        return torch.autograd.grad(function(*leaves), leaves)


def close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=str)
def test_grad(operator, device):
    tensors = operator.make(device, torch.float32, 3)
    function, leaves = of_some(operator, tensors)
    everything = tuple(range(len(leaves)))
    close(torch.func.grad(function, everything)(*leaves), gradients(operator, tensors))


@pytest.mark.parametrize("operator", [o for o in DIFFERENTIABLE if not o.random], ids=str)
def test_gradients_of_each_sample(operator, device):
    """vmap(grad): per-sample gradients, the other tensors shared."""
    samples = [operator.make(device, torch.float32, 3) for _ in range(2)]
    shared = samples[0][1:]
    grad = torch.func.grad(lambda x: called(operator, (x, *shared)))
    found = torch.func.vmap(grad)(torch.stack([sample[0] for sample in samples]))
    for sample, gradient in zip(samples, found, strict=True):
        close((gradient,), gradients(operator, (sample[0], *shared))[:1])


@pytest.mark.parametrize("operator", [o for o in OPERATORS if not o.random], ids=str)
def test_vmap(operator, device):
    samples = [operator.make(device, torch.float32, 3) for _ in range(2)]
    others = samples[0][1:]
    batch = torch.stack([sample[0] for sample in samples])
    found = torch.func.vmap(lambda x: first(operator.function(x, *others)))(batch)
    for sample, result in zip(samples, found, strict=True):
        torch.testing.assert_close(result, first(operator.function(sample[0], *others)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["func", "dual"])
@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=str)
def test_forward_mode(operator, device, mode):
    """A tangent is that of the gradient: never silently zero."""
    tensors = operator.make(device, torch.float32, 3)
    function, leaves = of_some(operator, tensors)
    tangents = [torch.randn_like(leaf) for leaf in leaves]
    expected = sum((g * t).sum() for g, t in zip(gradients(operator, tensors), tangents, strict=True))
    if mode == "func":
        _, found = torch.func.jvp(function, tuple(leaves), tuple(tangents))
    else:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(leaf, tangent) for leaf, tangent in zip(leaves, tangents, strict=True)]
            found = forward_ad.unpack_dual(function(*duals)).tangent
    assert expected.abs() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["layer_norm", "rms_norm", "linear:gelu", "gated_linear", "attention", "attention:options"]
)
def test_second_derivatives(name, device):
    """A Hessian times a vector, forward over reverse, against reverse over reverse in float64."""
    (operator,) = [o for o in OPERATORS if o.name == name]
    tensors = operator.make(device, torch.float32, 2)
    function, leaves = of_some(operator, tensors)
    tangents = [torch.randn_like(leaf) for leaf in leaves]
    everything = tuple(range(len(leaves)))
    _, found = torch.func.jvp(torch.func.grad(function, everything), tuple(leaves), tuple(tangents))
    wide = [tensor.double() for tensor in tensors]
    exact, leaves = of_some(operator, wide)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    with fusedops.backend("torch"), sdpa_kernel(SDPBackend.MATH):
        first_order = torch.autograd.grad(exact(*leaves), leaves, create_graph=True)
    expected = torch.autograd.grad(first_order, leaves, [t.double() for t in tangents], materialize_grads=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=str)
def test_gradients_of_many_directions_at_once(operator, device):
    """``is_grads_batched``, and so ``jacobian(vectorize=True)``: the forward saw no transform, the backward does."""
    tensors = operator.make(device, torch.float32, 2)
    function, leaves = of_some(operator, tensors)
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    result = function(*leaves)
    directions = torch.tensor([1.0, -2.0, 0.0], device=device)
    found = torch.autograd.grad(result, leaves, directions, is_grads_batched=True, retain_graph=True)
    for at, direction in enumerate(directions):
        close([grad[at] for grad in found], torch.autograd.grad(result, leaves, direction, retain_graph=True))


@pytest.mark.parametrize("name", ["layer_norm", "linear:gelu", "attention"])
def test_compiled_transforms(name, device):
    (operator,) = [o for o in OPERATORS if o.name == name]
    tensors = operator.make(device, torch.float32, 3)
    function, leaves = of_some(operator, tensors)
    everything = tuple(range(len(leaves)))

    def gradient(*leaves):
        return torch.func.grad(function, everything)(*leaves)

    torch.compiler.reset()
    close(torch.compile(gradient, backend="aot_eager")(*leaves), gradients(operator, tensors))


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_functional_call(module, device):
    model = module.build(device)
    inputs = module.make(device, torch.float32, 3)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, *inputs):
        result = torch.func.functional_call(model, parameters, inputs, module.call)
        return first(result).square().sum()

    found = torch.func.grad(loss)(parameters, *inputs)
    with fusedops.backend("torch"):
        first(model(*inputs, **module.call)).square().sum().backward()
    for name, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-4)


def test_the_reason_is_told(backend, device, monkeypatch):
    x = torch.ones(2, 8, device=device)
    told = []

    def function(x):
        told.append(fusedops.explain(fusedops.layer_norm, x, 8))
        return fusedops.layer_norm(x, 8).sum()

    torch.func.grad(function)(x)
    with forward_ad.dual_level():
        function(x)
    function(x)
    assert [found.backend for found in told[:2]] == ["torch", "torch"]
    assert "torch.func's transforms" in str(told[0])
    assert "forward-mode" in str(told[1])
    assert "the kernels have no rules" not in str(told[2])
    if backend == "auto":
        assert told[2].backend == "triton"


def test_demanded_kernels_say_why_they_do_not_serve(device):
    with fusedops.backend("triton"), pytest.raises(fusedops.BackendError, match=r"torch\.func's transforms"):
        torch.func.vmap(lambda x: fusedops.rms_norm(x, 8))(torch.ones(2, 8, device=device))
