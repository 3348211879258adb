"""What is left alone, why, and that it works as before; also when it happens after patching."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, weight_norm

import fusedops
from tests.patching.models import MLP, LoRA, bert, block, classes, gpt2, inputs, twin


def _reasons(model):
    return {entry.path: entry.reason for entry in fusedops.plan(model).left}


class OwnForward(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


class Quantised(nn.Module):
    """What a quantised Linear looks like: no parameters, a name that says Linear."""

    def __init__(self):
        super().__init__()
        self.register_buffer("packed", torch.ones(12, 8, dtype=torch.int8))

    def forward(self, x):
        return F.linear(x, self.packed.to(x.dtype))


class QuantisedLinear(Quantised):
    pass


class Alias(nn.Linear):
    """A subclass that changes nothing."""


def _with(change):
    model = block()
    change(model)
    return model


def _int8(linear):
    linear.weight = nn.Parameter(linear.weight.to(torch.int8), requires_grad=False)


class Wrapped(torch.Tensor):
    pass


def _tensor_subclass(linear):
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Wrapped))


LINEARS = {
    "own forward": (lambda m: m.__setitem__(0, OwnForward(8, 12)), r"OwnForward has a forward of its own"),
    "LoRA": (lambda m: m.__setitem__(0, LoRA(nn.Linear(8, 12))), r"it carries an adapter (tests.patching.models.LoRA)"),
    "quantised": (lambda m: m.__setitem__(0, QuantisedLinear()), r"QuantisedLinear is neither nn.Linear nor"),
    "int8 weight": (lambda m: _int8(m[0]), r"its weight has dtype int8"),
    "tensor subclass": (lambda m: _tensor_subclass(m[0]), r"its weight is a Wrapped"),
    "lazy": (lambda m: m.__setitem__(0, nn.LazyLinear(12)), r"its weight is a UninitializedParameter"),
    "parametrized": (lambda m: parametrizations.weight_norm(m[0]), r"it is parametrized"),
    "weight norm": (lambda m: weight_norm(m[0]), r"it has forward pre-hooks; its weight is not a parameter"),
    "forward hook": (lambda m: m[0].register_forward_hook(lambda *_: None), r"it has forward hooks"),
    "pre-hook": (lambda m: m[0].register_forward_pre_hook(lambda *_: None), r"it has forward pre-hooks"),
    "backward hook": (lambda m: m[0].register_full_backward_hook(lambda *_: None), r"it has backward hooks"),
    "backward pre-hook": (
        lambda m: m[0].register_full_backward_pre_hook(lambda *_: None),
        r"it has backward pre-hooks",
    ),
    "hook on the activation": (
        lambda m: m[1].register_forward_hook(lambda *_: None),
        r"the activation has forward hooks",
    ),
    "forward of the instance": (
        lambda m: m[0].__dict__.update(forward=lambda x: x[..., :1].expand(-1, 12)),
        r"its forward was replaced on the instance",
    ),
    "forward of the owner": (
        lambda m: m.__dict__.update(forward=lambda x: x),
        r"its owner's forward was replaced on the instance",
    ),
    "activation": (lambda m: m.__setitem__(1, nn.Softsign()), r"patch does not fuse Softsign into a Linear"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*weight_norm.*")
@pytest.mark.parametrize(("change", "reason"), LINEARS.values(), ids=LINEARS)
def test_linear(change, reason, calls):
    model = block()
    change(model)
    plain = classes(model)
    report = fusedops.patch(model)
    assert [entry.path for entry in report.replaced] == ["2"]
    assert [entry.path for entry in report.left] == ["0"]
    assert reason.replace("\\", "") in report.left[0].reason
    changed = {name for name, kind in classes(model).items() if kind is not plain[name]}
    assert changed == {"2"}
    x = torch.randn(2, 8)
    if type(model[0]) is not nn.LazyLinear and model[0]._parameters.get("weight", x).dtype != torch.int8:
        model(x)
    assert calls["linear"] == 0


class OwnNorm(nn.LayerNorm):
    def forward(self, input):
        return super().forward(input) + 1


class LlamaRMSNorm(nn.Module):
    def forward(self, x):
        return x


NORMS = {
    "own forward": (lambda: OwnNorm(4), "it computes no norm that fusedops has"),
    "another class": (lambda: LlamaRMSNorm(), "it computes no norm that fusedops has"),
    "instance": (
        lambda: _instance_forward(nn.LayerNorm(4)),
        "its forward was replaced on the instance",
    ),
    "parametrized": (
        lambda: parametrize.register_parametrization(nn.LayerNorm(4), "weight", nn.Identity()),
        "it is parametrized (torch.nn.utils.parametrize)",
    ),
}


def _instance_forward(module):
    module.forward = lambda x: x
    return module


@pytest.mark.parametrize(("build", "reason"), NORMS.values(), ids=NORMS)
def test_norm(build, reason):
    model = build()
    before = type(model)
    report = fusedops.patch(model)
    assert not report.replaced
    assert reason in report.left[0].reason
    assert type(model) is before


def test_what_changes_nothing_is_replaced():
    class Norm(nn.RMSNorm):
        pass

    model = nn.Sequential(Alias(8, 8), nn.ReLU(), Norm(8))
    report = fusedops.patch(model)
    assert [entry.original for entry in report.replaced] == ["Alias -> ReLU", "Norm"]
    assert not report.left
    assert isinstance(model[0], Alias)


def test_norms_with_hooks_are_replaced_and_the_hooks_fire():
    norm = nn.LayerNorm(8)
    seen = []
    norm.register_forward_pre_hook(lambda module, args: seen.append("before"))
    norm.register_forward_hook(lambda module, args, output: seen.append(output))
    norm.register_full_backward_hook(lambda *_: seen.append("backward"))
    assert fusedops.patch(norm).replaced
    output = norm(torch.randn(2, 8, requires_grad=True))
    output.sum().backward()
    assert seen[0] == "before"
    assert seen[2] == "backward"
    assert seen[1].shape == (2, 8)


@pytest.mark.parametrize("which", [0, 1], ids=["linear", "activation"])
def test_a_hook_added_after_patching_sees_what_it_would_see(which, calls):
    model = block()
    plain = twin(model)
    fusedops.patch(model)
    x = torch.randn(2, 8)
    seen = []
    for part in (plain, model):
        part[which].register_forward_hook(lambda module, args, output: seen.extend([*args, output]))
        part(x)
    assert calls["linear"] == 0
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])


def test_a_hook_that_is_removed_lets_the_pair_be_fused_again(calls):
    model = block()
    fusedops.patch(model)
    handle = model[1].register_forward_hook(lambda *_: None)
    model(torch.ones(1, 8))
    assert calls["linear"] == 0
    handle.remove()
    model(torch.ones(1, 8))
    assert calls["linear"] == 1


def test_a_hook_of_all_modules_sees_every_module():
    model = block()
    plain = twin(model)
    fusedops.patch(model)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(output))
    try:
        plain(torch.ones(1, 8))
        count = len(seen)
        model(torch.ones(1, 8))
    finally:
        handle.remove()
    assert len(seen) == 2 * count
    assert all(torch.equal(a, b) for a, b in zip(seen[:count], seen[count:], strict=True))


def test_lora_put_on_a_patched_model_computes_what_it_would(calls):
    model = bert().train()
    plain = twin(model)
    fusedops.patch(model)
    loras = [LoRA(nn.Linear(32, 48)) for _ in range(2)]
    for layer in range(2):
        for part in (plain, model):
            owner = part.bert.encoder.layer[layer].intermediate
            lora = twin(loras[layer])
            lora.base_layer = owner.dense
            owner.dense = lora
    batch = inputs(model)
    results = []
    for part in (plain, model):
        torch.manual_seed(0)
        results.append(part(**batch).logits)
    torch.testing.assert_close(*results)
    assert calls["linear"] == 1  # the prediction head's
    assert "it carries an adapter" in _reasons(model)["bert.encoder.layer.0.intermediate.dense"]
    fusedops.unpatch(model)
    assert classes(model) == classes(plain)


@pytest.mark.parametrize("parametrization", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_a_parametrization_put_on_a_patched_linear_is_honoured(parametrization):
    model = block()
    plain = twin(model)
    fusedops.patch(model)
    for part in (plain, model):
        torch.manual_seed(0)
        parametrization(part[0])
    x = torch.randn(2, 8)
    torch.testing.assert_close(model(x), plain(x))
    before = classes(model)
    with pytest.raises(fusedops.PatchError, match="0 was given the class ParametrizedFusedLinear after it was patched"):
        fusedops.unpatch(model)
    assert classes(model) == before
    parametrize.remove_parametrizations(model[0], "weight")
    assert fusedops.unpatch(model) == 3
    torch.testing.assert_close(model(x), plain(x))


def test_an_exchanged_part_is_honoured():
    model = MLP().eval()
    fusedops.patch(model)
    model.up = nn.Linear(8, 12)
    model.act = nn.Tanh()
    x = torch.randn(2, 8)
    assert torch.equal(model(x), F.linear(torch.tanh(model.up(x)), model.down.weight))
    del model.act
    model.act = torch.relu  # as good as a module
    assert torch.equal(model(x), F.linear(torch.relu(model.up(x)), model.down.weight))


def test_shared_linears_and_activations_compute_what_they_did():
    """One Linear in three positions and one activation in two: no position changes what another computes."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            act = nn.GELU()
            self.linear = nn.Linear(8, 8)
            self.first = nn.Sequential(self.linear, act)
            self.second = nn.Sequential(self.linear, nn.ReLU())
            self.act = act

        def forward(self, x):
            return self.second(self.first(x)) + self.linear(x) + self.act(x)

    model = Shared()
    x = torch.randn(2, 8)
    expected = model(x)
    expected.sum().backward()
    gradient = model.linear.weight.grad.clone()
    model.zero_grad()
    report = fusedops.patch(model)
    assert [entry.path for entry in report.replaced] == ["first.0", "second.0"]
    assert torch.equal(model(x), expected)
    model(x).sum().backward()
    torch.testing.assert_close(model.linear.weight.grad, gradient)
    assert fusedops.unpatch(model) == 3


def test_layers_that_share_one_activation_from_their_config():
    act = nn.GELU()
    model = bert(hidden_act="gelu")
    for layer in model.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = act
    batch = inputs(model)
    expected = model(**batch).logits
    report = fusedops.patch(model)
    assert sum(entry.rule == "linear+activation" for entry in report.replaced) == 3
    torch.testing.assert_close(model(**batch).logits, expected)


def test_a_sequential_with_its_own_forward_is_left_alone():
    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    model = Residual(nn.Linear(8, 8), nn.ReLU())
    report = fusedops.patch(model)
    assert not report.replaced
    assert type(model) is Residual


def test_a_class_that_cannot_be_subclassed_is_left_alone():
    class Final(nn.LayerNorm):
        def __init_subclass__(cls):
            raise TypeError("Final is final")

    model = nn.Sequential(Final(8), nn.LayerNorm(8))
    report = fusedops.patch(model)
    assert [entry.path for entry in report.replaced] == ["1"]
    assert "cannot be subclassed: Final is final" in report.left[0].reason


def test_a_module_that_two_rules_want_gets_one():
    class Both(nn.LayerNorm):
        def __init__(self):
            super().__init__(8)
            self.up, self.act = nn.Linear(8, 8), nn.ReLU()

        def mlp(self, x):
            return self.act(self.up(x))

    model = Both()
    x = torch.randn(2, 8)
    expected = model(x), model.mlp(x)
    report = fusedops.patch(model)
    assert [entry.rule for entry in report.replaced] == ["norm"]
    assert report.left[0].reason == "another rule replaces this module"
    assert torch.equal(model(x), expected[0])
    assert torch.equal(model.mlp(x), expected[1])
    assert "was replaced by the 'norm' rule" in fusedops.patch(model).left[0].reason


def test_eager_attention_with_hooks_is_left_alone():
    model = gpt2("eager")
    attention = model.transformer.h[0].attn
    weights = []
    attention.register_forward_hook(lambda module, args, output: weights.append(output[1]))
    report = fusedops.patch(model)
    assert [entry.path for entry in report.left] == ["transformer.h.0.attn"]
    assert type(attention).__name__ == "GPT2Attention"
    model(**inputs(model))
    assert weights[0].shape == (2, 2, 7, 7)


def test_an_eager_hook_added_after_patching_gets_its_weights():
    model = gpt2("eager")
    fusedops.patch(model)
    weights = []
    model.transformer.h[1].attn.register_forward_hook(lambda module, args, output: weights.append(output[1]))
    model(**inputs(model))
    assert weights[0].shape == (2, 2, 7, 7)
