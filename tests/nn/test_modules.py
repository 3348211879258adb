"""fusedops.nn's modules are torch.nn's: constructor, parameters, state_dict, copies; only the forward differs."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch

import fusedops

MODULES = {
    "layer_norm": (fusedops.nn.LayerNorm, torch.nn.LayerNorm, (12,), {}),
    "layer_norm_of_two_dimensions": (fusedops.nn.LayerNorm, torch.nn.LayerNorm, ((3, 12),), {"eps": 1e-3}),
    "layer_norm_without_bias": (fusedops.nn.LayerNorm, torch.nn.LayerNorm, (12,), {"bias": False}),
    "layer_norm_without_parameters": (fusedops.nn.LayerNorm, torch.nn.LayerNorm, (12, 1e-5, False), {}),
    "rms_norm": (fusedops.nn.RMSNorm, torch.nn.RMSNorm, (12,), {}),
    "rms_norm_without_weight": (fusedops.nn.RMSNorm, torch.nn.RMSNorm, (12, 1e-6, False), {}),
    "group_norm": (fusedops.nn.GroupNorm, torch.nn.GroupNorm, (3, 3), {"eps": 1e-3}),
    "group_norm_without_parameters": (fusedops.nn.GroupNorm, torch.nn.GroupNorm, (1, 3, 1e-5, False), {}),
    "linear": (fusedops.nn.Linear, torch.nn.Linear, (12, 20), {}),
    "linear_without_bias": (fusedops.nn.Linear, torch.nn.Linear, (12, 20, False), {}),
    "linear_in_bfloat16": (fusedops.nn.Linear, torch.nn.Linear, (12, 20), {"dtype": torch.bfloat16}),
}


@pytest.fixture(params=MODULES)
def pair(request, runner):
    """(ours, torch's, an input): made alike, from the same seed."""
    kind, torchs, args, options = MODULES[request.param]
    made = []
    for cls in (kind, torchs):
        torch.manual_seed(0)
        made.append(cls(*args, device=runner.device, **options))
    x = torch.randn(2, 3, 12, device=runner.device, dtype=options.get("dtype", torch.float32))
    return *made, x


def test_same_parameters_and_result(pair):
    ours, theirs, x = pair
    assert isinstance(ours, type(theirs))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    tolerance = 2 * torch.finfo(x.dtype).eps
    torch.testing.assert_close(ours(x), theirs(x), rtol=8 * tolerance, atol=tolerance)


def test_state_dicts_load_into_each_other(pair):
    ours, theirs, x = pair
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    tolerance = 2 * torch.finfo(x.dtype).eps
    torch.testing.assert_close(ours(x), theirs(x), rtol=8 * tolerance, atol=8 * tolerance)
    theirs.load_state_dict(ours.state_dict())


def test_copies_and_pickles(pair):
    ours, _, x = pair
    stream = io.BytesIO()
    torch.save(ours, stream)
    stream.seek(0)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(stream, weights_only=False)):
        assert type(twin) is type(ours)
        assert torch.equal(twin(x), ours(x))


def test_shows_itself_as_torchs_does(pair):
    ours, theirs, _ = pair
    assert repr(ours) == repr(theirs)


@pytest.mark.parametrize("name", [name for name in fusedops.nn.__all__ if hasattr(torch.nn, name.removeprefix("Add"))])
def test_constructors_take_what_torchs_take(name):
    theirs = inspect.signature(getattr(torch.nn, name.removeprefix("Add"))).parameters
    ours = inspect.signature(getattr(fusedops.nn, name)).parameters
    assert [*ours][: len(theirs)] == [*theirs]
    for parameter in theirs.values():
        assert ours[parameter.name].default == parameter.default
        assert ours[parameter.name].kind == parameter.kind


def test_rms_norm_with_a_weight_offset(runner):
    gemmas = fusedops.nn.RMSNorm(12, 1e-6, weight_offset=1.0, device=runner.device)
    assert not gemmas.weight.any()
    x = torch.randn(3, 12, device=runner.device)
    torch.testing.assert_close(gemmas(x), fusedops.nn.RMSNorm(12, 1e-6, device=runner.device)(x))
    torch.nn.init.normal_(gemmas.weight)
    assert torch.equal(gemmas(x), fusedops.rms_norm(x, 12, gemmas.weight, 1e-6, weight_offset=1.0))
    assert torch.equal(copy.deepcopy(gemmas)(x), gemmas(x))
    assert repr(gemmas) == "RMSNorm((12,), eps=1e-06, elementwise_affine=True, weight_offset=1.0)"
    gemmas.reset_parameters()
    assert not gemmas.weight.any()
    with pytest.raises(TypeError, match=r"^RMSNorm: weight_offset must be a number; got 'one'"):
        fusedops.nn.RMSNorm(12, weight_offset="one")


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_linear_with_an_activation(runner, activation):
    layer = fusedops.nn.Linear(12, 20, activation=activation, device=runner.device)
    assert layer.state_dict().keys() == {"weight", "bias"}
    x = torch.randn(3, 12, device=runner.device)
    y = layer(x)
    assert torch.equal(y, fusedops.linear(x, layer.weight, layer.bias, activation))
    y.sum().backward()
    assert layer.weight.grad.shape == (20, 12)
    assert torch.equal(copy.deepcopy(layer)(x), y)
    assert ("activation" in repr(layer)) == (activation is not None)


def test_linear_names_a_wrong_activation():
    with pytest.raises(ValueError, match=r"^Linear: activation must be None or one of 'relu', .*; got 'swish'"):
        fusedops.nn.Linear(12, 20, activation="swish")
    with pytest.raises(TypeError, match=r"^Linear: activation must be None or one of"):
        fusedops.nn.Linear(12, 20, activation=torch.nn.ReLU())


def test_modules_follow_the_kernels(kernel_runner):
    """The forward calls the operators: their autograd nodes are in the graph."""
    x = torch.randn(3, 12, device=kernel_runner.device, requires_grad=True)
    for module, node in (
        (fusedops.nn.LayerNorm(12, device=kernel_runner.device), "NormBackward"),
        (fusedops.nn.RMSNorm(12, device=kernel_runner.device), "NormBackward"),
        (fusedops.nn.GroupNorm(2, 12, device=kernel_runner.device), "GroupNormBackward"),
        (fusedops.nn.Linear(12, 20, device=kernel_runner.device), "LinearBackward"),
    ):
        assert type(module(x).grad_fn).__name__ == node
