"""The modules that torch.nn has no counterpart of equal a composition of its modules with the same weights."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import fusedops
from tests.harness.errors import check_error

TORCHS_ACTIVATIONS = {
    None: nn.Identity,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
}
NORMALIZATIONS = ["LayerNorm", "RMSNorm"]


def torchs_norm(name, size, eps=1e-5, **options):
    return getattr(nn, name)(size, eps, **options)


def randomized(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def gradients(module, *inputs):
    """Output (the first, of several) and gradients of inputs and parameters, from a fixed gradient."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    outputs = module(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.manual_seed(1)
    grads = [torch.randn_like(y, dtype=torch.float32).to(y.dtype) for y in outputs]
    return outputs, torch.autograd.grad(outputs, [*inputs, *module.parameters()], grads)


def check_against(ours, theirs, *inputs):
    """By the error rule, output and every gradient; ``theirs`` has the same parameters in the same order."""
    outputs, grads = gradients(ours, *inputs)
    baseline, plain_grads = gradients(theirs, *inputs)
    truth, exact_grads = gradients(copy.deepcopy(theirs).double(), *(t.double() for t in inputs))
    for y, right, plain in zip(outputs, truth, baseline, strict=True):
        check_error(y, right, plain, what="output")
    for grad, right, plain in zip(grads, exact_grads, plain_grads, strict=True):
        check_error(grad, right, plain, gradient=True, what="gradient")


# AddLayerNorm, AddRMSNorm


class TorchsAdd(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, input, residual):
        stream = input + residual
        return self.norm(stream), stream


ADDS = {
    "layer": (fusedops.nn.AddLayerNorm, nn.LayerNorm, (12,), {}),
    "layer_of_two_dimensions": (fusedops.nn.AddLayerNorm, nn.LayerNorm, ((3, 12), 1e-3), {}),
    "layer_without_bias": (fusedops.nn.AddLayerNorm, nn.LayerNorm, (12,), {"bias": False}),
    "layer_without_parameters": (fusedops.nn.AddLayerNorm, nn.LayerNorm, (12, 1e-5, False), {}),
    "rms": (fusedops.nn.AddRMSNorm, nn.RMSNorm, (12,), {}),
    "rms_without_weight": (fusedops.nn.AddRMSNorm, nn.RMSNorm, (12, 1e-6, False), {}),
}


@pytest.fixture(params=ADDS)
def add(request, runner):
    """(ours, torch's composition, two inputs), with the same random parameters."""
    kind, torchs, args, options = ADDS[request.param]
    ours, norm = (cls(*args, device=runner.device, **options) for cls in (kind, torchs))
    assert isinstance(ours, torchs)
    assert ours.state_dict().keys() == norm.state_dict().keys()
    for a, b in zip(ours.parameters(), norm.parameters(), strict=True):
        assert torch.equal(a, b)
    ours.load_state_dict(randomized(norm).state_dict())
    return ours, TorchsAdd(norm), *torch.randn(2, 2, 3, 12, device=runner.device)


def test_add_equals_torchs_composition(add):
    check_against(*add)


def test_add_copies_and_pickles(add):
    ours, _, *inputs = add
    for twin in copies(ours):
        for a, b in zip(twin(*inputs), ours(*inputs), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("kind", [fusedops.nn.AddLayerNorm, fusedops.nn.AddRMSNorm])
def test_dropout_in_training_mode_only(runner, kind):
    module = kind(64, dropout=0.25, device=runner.device)
    x, residual = torch.ones(40, 64, device=runner.device), torch.zeros(40, 64, device=runner.device)
    assert torch.equal(module.eval()(x, residual)[1], x)
    module.train()
    torch.manual_seed(0)
    stream = module(x, residual)[1]
    torch.testing.assert_close(stream.unique(), torch.tensor([0.0, 1 / 0.75], device=runner.device))
    # 2,560 draws: their mean is within 4.5 standard deviations of a quarter.
    assert abs((stream == 0).double().mean() - 0.25) < 4.5 * (0.25 * 0.75 / 2560) ** 0.5
    assert not torch.equal(module(x, residual)[1], stream)
    torch.manual_seed(0)
    assert torch.equal(module(x, residual)[1], stream)
    assert torch.equal(kind(64, device=runner.device).train()(x, residual)[1], x)
    assert "dropout=0.25" in repr(module)


def test_add_rms_norm_takes_a_weight_offset(runner):
    module = fusedops.nn.AddRMSNorm(12, weight_offset=1.0, device=runner.device)
    assert not module.weight.any()
    randomized(module)
    x, residual = torch.randn(2, 3, 12, device=runner.device)
    ours = module(x, residual)
    right = fusedops.add_rms_norm(x, residual, 12, module.weight, weight_offset=1.0)
    for a, b in zip(ours, right, strict=True):
        assert torch.equal(a, b)
    assert repr(module) == "AddRMSNorm((12,), eps=None, elementwise_affine=True, weight_offset=1.0, dropout=0.0)"


@pytest.mark.parametrize("kind", [fusedops.nn.AddLayerNorm, fusedops.nn.AddRMSNorm])
def test_add_names_a_wrong_argument(kind):
    with pytest.raises(ValueError, match=rf"^{kind.__name__}: dropout must be a probability from 0 to 1; got 1.5"):
        kind(12, dropout=1.5)
    with pytest.raises(TypeError, match=rf"^{kind.__name__}: dropout must be a number; got 'half'"):
        kind(12, dropout="half")
    with pytest.raises(ValueError, match=r"^add_\w+: residual must be of input's shape \(2, 12\)"):
        kind(12)(torch.ones(2, 12), torch.ones(12))
    with pytest.raises(ValueError, match="normalized_shape must be the last dimensions of input"):
        kind(12)(torch.ones(2, 8), torch.ones(2, 8))


# LayerNormLinear, LayerNormMLP


def linear_pair(normalization, activation, bias, **options):
    torch.manual_seed(0)
    ours = fusedops.nn.LayerNormLinear(12, 20, 1e-3, bias, normalization, activation, **options)
    torch.manual_seed(0)
    norm = torchs_norm(normalization, 12, 1e-3, **options)
    return ours, nn.Sequential(norm, nn.Linear(12, 20, bias, **options), TORCHS_ACTIVATIONS[activation]())


def mlp_pair(normalization, activation, bias, **options):
    torch.manual_seed(0)
    ours = fusedops.nn.LayerNormMLP(12, 40, 1e-3, bias, normalization, activation, **options)
    torch.manual_seed(0)
    norm = torchs_norm(normalization, 12, 1e-3, **options)
    first, second = nn.Linear(12, 40, bias, **options), nn.Linear(40, 12, bias, **options)
    return ours, nn.Sequential(norm, first, TORCHS_ACTIVATIONS[activation](), second)


PAIRS = pytest.mark.parametrize("make", [linear_pair, mlp_pair], ids=["LayerNormLinear", "LayerNormMLP"])


@PAIRS
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_begins_as_torchs_layers_from_the_same_seed(make, normalization, bias):
    ours, theirs = make(normalization, "gelu", bias)
    parameters = [*ours.parameters()]
    for a, b in zip(parameters, theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    randomized(ours)
    torch.manual_seed(0)
    ours.reset_parameters()
    # The norm draws nothing: from one seed the layers are drawn alike again.
    for a, b in zip(parameters, make(normalization, "gelu", bias)[1].parameters(), strict=True):
        assert torch.equal(a, b)


@PAIRS
@pytest.mark.parametrize("activation", TORCHS_ACTIVATIONS, ids=str)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_equals_torchs_modules(runner, make, normalization, activation):
    ours, theirs = make(normalization, activation, True, device=runner.device)
    copy_parameters(ours, randomized(theirs))
    check_against(ours, theirs, torch.randn(2, 3, 12, device=runner.device))


@PAIRS
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_equals_torchs_modules_in_bfloat16_without_biases(runner, make, normalization):
    ours, theirs = make(normalization, "gelu", False, device=runner.device, dtype=torch.bfloat16)
    copy_parameters(ours, randomized(theirs))
    check_against(ours, theirs, torch.randn(7, 12, device=runner.device, dtype=torch.bfloat16))


def copy_parameters(ours, theirs):
    with torch.no_grad():
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.copy_(b)


NORM_NAMES = {"LayerNorm": ["layer_norm_weight", "layer_norm_bias"], "RMSNorm": ["layer_norm_weight"]}


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_parameters_are_named_as_transformer_engines(normalization):
    norm = NORM_NAMES[normalization]
    layer = fusedops.nn.LayerNormLinear(12, 20, normalization=normalization)
    assert [*layer.state_dict()] == [*norm, "weight", "bias"]
    assert [*fusedops.nn.LayerNormLinear(12, 20, bias=False).state_dict()] == [*NORM_NAMES["LayerNorm"], "weight"]
    mlp = fusedops.nn.LayerNormMLP(12, 20, normalization=normalization)
    assert [*mlp.state_dict()] == [*norm, "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"]
    assert {n: tuple(p.shape) for n, p in mlp.named_parameters() if n.startswith("fc")} == {
        "fc1_weight": (20, 12),
        "fc1_bias": (20,),
        "fc2_weight": (12, 20),
        "fc2_bias": (12,),
    }
    mlp.load_state_dict(randomized(fusedops.nn.LayerNormMLP(12, 20, normalization=normalization)).state_dict())


def copies(module):
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    twins = (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(stream, weights_only=False))
    assert all(type(twin) is type(module) for twin in twins)
    return twins


@PAIRS
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_copies_and_pickles(runner, make, normalization):
    ours, _ = make(normalization, "silu", normalization == "LayerNorm", device=runner.device)
    x = torch.randn(3, 12, device=runner.device)
    for twin in copies(ours):
        assert torch.equal(twin(x), ours(x))
        assert repr(twin) == repr(ours)


def test_shows_itself():
    assert repr(fusedops.nn.LayerNormLinear(12, 20, activation="gelu")) == (
        "LayerNormLinear(in_features=12, out_features=20, eps=1e-05, bias=True, normalization='LayerNorm',"
        " activation='gelu')"
    )
    assert repr(fusedops.nn.LayerNormMLP(12, 20, 1e-6, False, "RMSNorm", "silu")) == (
        "LayerNormMLP(hidden_size=12, ffn_hidden_size=20, eps=1e-06, bias=False, normalization='RMSNorm',"
        " activation='silu')"
    )
    text = nn.LayerNorm(12).extra_repr()
    assert repr(fusedops.nn.AddLayerNorm(12)) == f"AddLayerNorm({text}, dropout=0.0)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (fusedops.nn.AddLayerNorm, (12,)),
        (fusedops.nn.AddRMSNorm, (12,)),
        (fusedops.nn.LayerNormLinear, (12, 20)),
        (fusedops.nn.LayerNormMLP, (12, 20)),
    ],
)
def test_on_the_meta_device_first(kind, sizes, dtype):
    """As large models are made: no memory, then somewhere else, then the parameters."""
    module = kind(*sizes, device="meta", dtype=dtype)
    assert all((p.device.type, p.dtype) == ("meta", dtype) for p in module.parameters())
    module.to_empty(device="cpu").reset_parameters()
    assert all(p.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("kind", [fusedops.nn.LayerNormLinear, fusedops.nn.LayerNormMLP])
def test_wrong_arguments_are_named(kind):
    name = kind.__name__
    with pytest.raises(ValueError, match=rf"^{name}: normalization must be 'LayerNorm' or 'RMSNorm'; got 'BatchNorm'"):
        kind(12, 20, normalization="BatchNorm")
    with pytest.raises(ValueError, match=rf"^{name}: activation must be None or one of .*; got 'swish'"):
        kind(12, 20, activation="swish")
    with pytest.raises(ValueError, match=r"^layer_norm_linear: weight must be of shape \(out_features, 8\)"):
        kind(12, 20)(torch.ones(3, 8))
    with pytest.raises(TypeError, match=r"^rms_norm_linear: weight must be of input's dtype"):
        kind(12, 20, normalization="RMSNorm")(torch.ones(3, 12, dtype=torch.float64))


@PAIRS
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_follow_the_kernels(kernel_runner, make, normalization):
    """The forward calls the operator, and the compiled module equals it."""
    ours, _ = make(normalization, "gelu", True, device=kernel_runner.device)
    x = torch.randn(3, 12, device=kernel_runner.device, requires_grad=True)
    y = ours(x)
    nodes, seen = [y.grad_fn], set()
    while nodes:
        node = nodes.pop()
        seen.add(type(node).__name__)
        nodes.extend(n for n, _ in node.next_functions if n is not None)
    assert "NormLinearBackward" in seen
    assert "NormBackward" not in seen
    torch._dynamo.reset()
    assert torch.equal(torch.compile(ours, fullgraph=True, backend="aot_eager")(x), y)
