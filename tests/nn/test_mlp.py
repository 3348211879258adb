"""GatedLinear, GatedMLP and MLP equal torch's Linears put together, and call them where somebody could tell."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import fusedops
from fusedops.linear.activations import ACTIVATIONS
from fusedops.nn.mlp import MLP, GatedLinear, GatedMLP
from tests.harness.errors import check_error

KINDS = {
    "gated_linear": (GatedLinear, {}),
    "gated_linear_packed": (GatedLinear, {"packed": True, "bias": False, "activation": "gelu"}),
    "gated_mlp": (GatedMLP, {}),
    "gated_mlp_packed": (GatedMLP, {"packed": True, "bias": True, "activation": None, "out_features": 7}),
    "mlp": (MLP, {}),
    "mlp_without_bias": (MLP, {"bias": False, "activation": "relu", "out_features": 7}),
}


def plainly(module, x):
    """What the module computes, by calls of its Linears and torch's functions."""
    activation = (lambda z: z) if module.activation is None else ACTIVATIONS[module.activation].forward
    if isinstance(module, MLP):
        return module.fc2(activation(module.fc1(x)))
    g, u = module.gate_up_proj(x).chunk(2, -1) if module.packed else (module.gate_proj(x), module.up_proj(x))
    y = activation(g) * u
    return module.down_proj(y) if isinstance(module, GatedMLP) else y


def make(name, runner=None, **options):
    kind, own = KINDS[name]
    if runner is not None:
        options["device"] = runner.device
    return kind(12, 20, **{**own, **options})


@pytest.fixture(params=KINDS)
def module(request, runner):
    return make(request.param, runner)


def gradients(function, module, x):
    x = x.detach().requires_grad_()
    y = function(x)
    torch.manual_seed(1)
    grad = torch.randn(y.shape).to(y)
    return y, torch.autograd.grad(y, [x, *module.parameters()], grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_torchs_linears(module, runner, dtype):
    module.to(dtype)
    x = torch.randn(2, 9, 12, device=runner.device).to(dtype)
    y, grads = gradients(module, module, x)
    theirs, plain_grads = gradients(lambda t: plainly(module, t), module, x)
    wide = copy.deepcopy(module).double()
    exact, exact_grads = gradients(lambda t: plainly(wide, t), wide, x.double())
    check_error(y, exact, theirs, what="output")
    for ours, right, plain in zip(grads, exact_grads, plain_grads, strict=True):
        check_error(ours, right, plain, gradient=True, what="gradient")


STATE = {
    "gated_linear": ["gate_proj.weight", "gate_proj.bias", "up_proj.weight", "up_proj.bias"],
    "gated_linear_packed": ["gate_up_proj.weight"],
    "gated_mlp": ["gate_proj.weight", "up_proj.weight", "down_proj.weight"],
    "gated_mlp_packed": ["gate_up_proj.weight", "gate_up_proj.bias", "down_proj.weight", "down_proj.bias"],
    "mlp": ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"],
    "mlp_without_bias": ["fc1.weight", "fc2.weight"],
}


@pytest.mark.parametrize("name", KINDS)
def test_begins_as_torchs_linears_with_their_names(name):
    torch.manual_seed(0)
    module = make(name)
    assert [*module.state_dict()] == STATE[name]
    linears = dict(module.named_children())
    assert all(type(child) is nn.Linear for child in linears.values())
    torch.manual_seed(0)
    for child in linears.values():
        theirs = nn.Linear(child.in_features, child.out_features, child.bias is not None)
        assert torch.equal(child.weight, theirs.weight)


class Llamas(nn.Module):
    """A feed-forward layer as models have it."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(12, 20, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(20, 12, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def test_loads_a_checkpoint_of_torchs_model(runner):
    theirs = Llamas().to(runner.device)
    ours = make("gated_mlp", runner)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 12, device=runner.device)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
    theirs.load_state_dict(ours.state_dict())
    packed = make("gated_mlp_packed", runner, bias=False, activation="silu", out_features=None)
    both = torch.cat((theirs.gate_proj.weight, theirs.up_proj.weight))
    packed.load_state_dict({"gate_up_proj.weight": both, "down_proj.weight": theirs.down_proj.weight})
    torch.testing.assert_close(packed(x), theirs(x), rtol=1e-5, atol=1e-6)
    mlp = make("mlp", runner)
    fc1, fc2 = nn.Linear(12, 20, device=runner.device), nn.Linear(20, 12, device=runner.device)
    mlp.load_state_dict({f"fc{i}.{k}": v for i, fc in ((1, fc1), (2, fc2)) for k, v in fc.state_dict().items()})
    torch.testing.assert_close(mlp(x), fc2(nn.functional.gelu(fc1(x))), rtol=1e-5, atol=1e-6)


def test_copies_and_pickles(module, runner):
    x = torch.randn(3, 12, device=runner.device)
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(stream, weights_only=False)):
        assert type(twin) is type(module)
        assert torch.equal(twin(x), module(x))
        assert repr(twin) == repr(module)


def test_tied_weights_stay_tied(runner):
    module = make("mlp", runner, bias=False)
    module.fc2.weight = nn.Parameter(module.fc1.weight.detach().t().contiguous())
    x = torch.randn(3, 12, device=runner.device)
    other = make("mlp", runner, bias=False)
    other.fc1.weight, other.fc2.weight = module.fc1.weight, module.fc2.weight
    assert torch.equal(other(x), module(x))
    with torch.no_grad():
        module.fc1.weight.mul_(2)
    assert torch.equal(other(x), module(x))


# The Linears are read where nobody can tell the difference, and called where somebody could.


def nodes_of(y):
    found, todo = set(), [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            found.add(type(node).__name__)
            todo += [n for n, _ in node.next_functions]
    return found


@pytest.mark.parametrize("name", KINDS)
def test_follows_the_kernels(kernel_runner, name):
    module = make(name, kernel_runner)
    nodes = nodes_of(module(torch.randn(3, 12, device=kernel_runner.device)))
    assert ("GatedLinearBackward" in nodes) == (not isinstance(module, MLP))
    assert ("LinearBackward" in nodes) == (not isinstance(module, GatedLinear))
    assert "AddmmBackward0" not in nodes
    assert "MmBackward0" not in nodes


class Adapted(nn.Module):
    """A wrapper as LoRA's."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.extra = nn.Linear(base.in_features, base.out_features, False, device=base.weight.device)

    def forward(self, x):
        return self.base(x) + self.extra(x)


class Doubled(nn.Linear):
    """A subclass with a forward of its own, as a quantised layer's."""

    def forward(self, x):
        return 2 * super().forward(x)


def _hook(module, name):
    getattr(module, name).register_forward_hook(lambda m, args, output: 2 * output)


def _pre_hook(module, name):
    getattr(module, name).register_forward_pre_hook(lambda m, args: (3 * args[0],))


def _adapter(module, name):
    setattr(module, name, Adapted(getattr(module, name)))


def _subclass(module, name):
    getattr(module, name).__class__ = Doubled


def _own_forward(module, name):
    layer = getattr(module, name)
    forward = layer.forward
    layer.forward = lambda x: 2 * forward(x)


def _parametrized(module, name):
    nn.utils.parametrizations.weight_norm(getattr(module, name))
    with torch.no_grad():
        getattr(module, name).parametrizations.weight.original0.mul_(2)


class Scaled(torch.Tensor):
    """A weight of a class of its own, as a quantised one: torch's linear computes something else with it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        y = super().__torch_function__(function, types, args, kwargs)
        return 2 * y.as_subclass(torch.Tensor) if function is nn.functional.linear else y


def _tensor_subclass(module, name):
    layer = getattr(module, name)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Scaled))


CHANGES = [_hook, _pre_hook, _adapter, _subclass, _own_forward, _parametrized, _tensor_subclass]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("name", ["gated_linear", "gated_linear_packed", "gated_mlp", "mlp"])
def test_a_layer_that_was_changed_is_called(runner, name, change):
    x = torch.randn(3, 12, device=runner.device)
    for child in dict(make(name).named_children()):
        module = make(name, runner)
        before = module(x)
        change(module, child)
        after = module(x)
        assert not torch.allclose(after, before, rtol=1e-3)
        torch.testing.assert_close(after, plainly(module, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gated_mlp", "mlp"])
def test_backward_hooks_see_their_gradients(runner, name):
    module = make(name, runner)
    seen = []
    for child in module.children():
        child.register_full_backward_hook(lambda m, grad_in, grad_out: seen.append(grad_out[0].shape))
    module(torch.randn(3, 12, device=runner.device, requires_grad=True)).sum().backward()
    assert sorted(seen) == sorted((3, child.out_features) for child in module.children())


def test_global_hooks_see_every_layer(runner):
    module = make("gated_mlp", runner)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, output: seen.append(type(m).__name__))
    try:
        module(torch.randn(3, 12, device=runner.device))
    finally:
        handle.remove()
    assert seen == ["Linear", "Linear", "Linear", "GatedMLP"]


def test_a_removed_hook_leaves_no_trace(kernel_runner):
    module = make("gated_mlp", kernel_runner)
    handle = module.up_proj.register_forward_hook(lambda *args: None)
    x = torch.randn(3, 12, device=kernel_runner.device)
    assert "GatedLinearBackward" not in nodes_of(module(x))
    handle.remove()
    assert "GatedLinearBackward" in nodes_of(module(x))


# Dropout


def test_dropout_in_training_mode_only(runner):
    module = MLP(64, 64, activation=None, dropout=0.25, device=runner.device)
    for layer in (module.fc1, module.fc2):
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
    x = torch.ones(40, 64, device=runner.device)
    assert torch.equal(module.eval()(x), x)
    module.train()
    torch.manual_seed(0)
    y = module(x)
    # Two masks, one after each layer: 2,560 draws of what passes both, within 4.5 standard deviations.
    kept = 0.75**2
    assert abs((y != 0).double().mean() - kept) < 4.5 * (kept * (1 - kept) / 2560) ** 0.5
    torch.testing.assert_close(y.unique(), torch.tensor([0.0, 1 / kept], device=runner.device))
    assert not torch.equal(module(x), y)
    torch.manual_seed(0)
    assert torch.equal(module(x), y)
    module.fc1.register_forward_hook(lambda *args: None)
    assert abs((module(x) != 0).double().mean() - kept) < 4.5 * (kept * (1 - kept) / 2560) ** 0.5


# torch's other ways to run a module


@pytest.mark.parametrize("name", ["gated_mlp", "gated_linear_packed", "mlp"])
def test_compiled_equals_eager(runner, name):
    module = make(name, runner)
    x = torch.randn(3, 12, device=runner.device, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    eager, traced = module(x), compiled(x)
    assert torch.equal(eager, traced)
    parameters = [x, *module.parameters()]
    for a, b in zip(*(torch.autograd.grad(y.sum(), parameters) for y in (eager, traced)), strict=True):
        assert torch.equal(a, b)


def test_compiled_with_dropout_and_a_hooked_layer(runner):
    module = make("mlp", runner, dropout=0.5)
    module.fc1.register_forward_hook(lambda m, args, output: output + 1)
    x = torch.randn(3, 12, device=runner.device)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert compiled(x).shape == (3, 12)
    assert torch.equal(compiled.eval()(x), module.eval()(x))


@pytest.mark.parametrize("name", KINDS)
def test_on_the_meta_device_first(name):
    module = make(name, dtype=torch.bfloat16, device="meta")
    assert all((p.device.type, p.dtype) == ("meta", torch.bfloat16) for p in module.parameters())
    assert module(torch.empty(3, 12, dtype=torch.bfloat16, device="meta")).device.type == "meta"
    module.to_empty(device="cpu")
    for child in module.children():
        child.reset_parameters()
    assert all(p.isfinite().all() for p in module.parameters())


def test_shows_itself():
    assert repr(GatedLinear(12, 20, False, "relu")).splitlines() == [
        "GatedLinear(",
        "  activation='relu'",
        "  (gate_proj): Linear(in_features=12, out_features=20, bias=False)",
        "  (up_proj): Linear(in_features=12, out_features=20, bias=False)",
        ")",
    ]
    assert "activation='silu'" in repr(GatedMLP(12, 20))
    assert "activation='gelu', dropout=0.1" in repr(MLP(12, 20, dropout=0.1))


@pytest.mark.parametrize("kind", [GatedLinear, GatedMLP, MLP])
def test_wrong_arguments_are_named(kind):
    with pytest.raises(ValueError, match=rf"^{kind.__name__}: activation must be None or one of .*; got 'swish'"):
        kind(12, 20, activation="swish")
    with pytest.raises(TypeError, match=rf"^{kind.__name__}: activation must be None or one of"):
        kind(12, 20, activation=nn.ReLU())
    with pytest.raises(ValueError, match=r"^(gated_)?linear: weight(_gate)? must be of shape \(out_features, 8\)"):
        kind(12, 20)(torch.ones(3, 8))


def test_wrong_dropout_is_named():
    with pytest.raises(ValueError, match=r"^MLP: dropout must be a probability from 0 to 1; got 1.5"):
        MLP(12, 20, dropout=1.5)
    with pytest.raises(TypeError, match=r"^MLP: dropout must be a number; got 'half'"):
        MLP(12, 20, dropout="half")


def test_the_modules_are_in_nn():
    for kind in (GatedLinear, GatedMLP, MLP):
        assert getattr(fusedops.nn, kind.__name__) is kind


@pytest.mark.parametrize("strict", [False, True])
def test_exported_modules_stay_fused(kernel_runner, strict):
    model = fusedops.nn.GatedMLP(8, 16, device=kernel_runner.device).eval()
    exported = torch.export.export(model, (torch.randn(4, 8, device=kernel_runner.device),), strict=strict)
    called = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert {"fusedops.gated_linear.default", "fusedops.linear.default"} <= called


def test_packed_is_a_flag():
    with pytest.raises(TypeError, match="GatedLinear: packed must be a bool; got 'no'"):
        fusedops.nn.GatedLinear(4, 8, packed="no")


WRONG_SIZE = {
    "text": (TypeError, "bias must be a bool", lambda: fusedops.nn.GatedLinear(8, 8, "gelu")),
    "activation for bias": (TypeError, "bias must be a bool", lambda: fusedops.nn.Linear(8, 8, "gelu")),
    "activation for out_features": (TypeError, "out_features must be an int", lambda: fusedops.nn.MLP(8, 32, "gelu")),
    "gated": (TypeError, "out_features must be an int", lambda: fusedops.nn.GatedMLP(8, 32, "silu")),
    "negative": (ValueError, "hidden_features must be 0 or more; got -8", lambda: fusedops.nn.MLP(8, -8)),
    "fraction": (TypeError, "hidden_features must be an int", lambda: fusedops.nn.GatedMLP(8, 64 / 3)),
}


@pytest.mark.parametrize("case", WRONG_SIZE)
def test_wrong_sizes_are_named(case):
    error, message, make = WRONG_SIZE[case]
    with pytest.raises(error, match=message):
        make()
