"""Adapters, parametrizations, quantised layers, tied weights, saving and compiling, around patched models."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import fusedops
from tests.patching import zoo
from tests.patching.models import classes, twin

# Of transformers, about what PEFT calls.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

CLOSE = {"rtol": 1e-4, "atol": 1e-5}

# Where LoRA goes: into the fused MLPs and into attention.
TARGETS = {"llama": ["gate_proj", "down_proj", "q_proj"], "bert": ["intermediate.dense", "query"]}


def with_lora(model, name):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=TARGETS[name], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def same(model, plain, batch):
    torch.testing.assert_close(zoo.results(model, batch), zoo.results(plain, batch), **CLOSE)
    gradients, expected = zoo.gradients_of(model, batch), zoo.gradients_of(plain, batch)
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[key], **CLOSE, msg=lambda text, key=key: f"{key}: {text}")
    return gradients


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", TARGETS)
def test_lora(name, when):
    """LoRA put on before or after patching: same outputs and gradients, only the adapters train, all goes back."""
    batch = zoo.batch_of(name)
    plain = with_lora(zoo.build(name), name)
    if when == "after":
        base = zoo.build(name)
        fusedops.patch(base)
        model = with_lora(base, name)
    else:
        model = with_lora(zoo.build(name), name)
        report = fusedops.patch(model)
        # The MLPs that LoRA wraps are named, and everything else is fused.
        assert zoo.functions(report)["attention"] == zoo.ZOO[name].fused["attention"]
        assert sum("lora" in entry.reason.lower() for entry in report.left) >= 2, str(report)
    gradients = same(model, plain, batch)
    assert gradients
    assert all("lora_" in key for key in gradients)
    merged, expected = model.merge_and_unload(), plain.merge_and_unload()
    assert merged.state_dict().keys() == expected.state_dict().keys()
    torch.testing.assert_close(zoo.results(merged, batch), zoo.results(expected, batch), **CLOSE)
    fusedops.unpatch(merged)
    assert classes(merged) == classes(expected)
    assert torch.equal(zoo.results(merged, batch), zoo.results(expected, batch))


@pytest.mark.parametrize("name", TARGETS)
def test_merged_adapters_are_fused_when_patched_again(name):
    """What LoRA had kept apart can be fused once it is merged."""
    model = with_lora(zoo.build(name), name)
    fusedops.patch(model)
    merged = model.merge_and_unload()
    assert zoo.functions(fusedops.patch(merged)) == zoo.ZOO[name].fused


def test_adapters_of_lora_train_in_a_patched_model():
    model = zoo.build("llama")
    fusedops.patch(model)
    model = with_lora(model, "llama").train()
    batch = zoo.batch_of("llama")
    base = {key: value.clone() for key, value in model.state_dict().items() if "lora_" not in key}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = zoo.loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    assert all(torch.equal(model.state_dict()[key], value) for key, value in base.items())


def test_adapters_are_disabled_and_switched_in_a_patched_model():
    plain = with_lora(zoo.build("bert"), "bert")
    model = with_lora(zoo.build("bert"), "bert")
    fusedops.patch(model)
    batch = zoo.batch_of("bert")
    with model.disable_adapter(), plain.disable_adapter():
        bare = zoo.results(model, batch)
        torch.testing.assert_close(bare, zoo.results(plain, batch), **CLOSE)
    assert (zoo.results(model, batch) - bare).abs().max() > 0.1


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("which", ["up", "gate", "norm"])
def test_parametrized_parts_of_a_gated_mlp(which, when):
    """Half of a gated pair, or a norm, with a weight that is computed."""
    plain = zoo.build("llama")
    model = twin(plain)
    if when == "after":
        fusedops.patch(model)
    for one in (plain, model):
        layer = one.model.layers[0]
        part = {"up": layer.mlp.up_proj, "gate": layer.mlp.gate_proj, "norm": layer.input_layernorm}[which]
        if which == "norm":
            parametrize.register_parametrization(part, "weight", Doubled())
        else:
            parametrizations.weight_norm(part)
    if when == "before":
        report = fusedops.patch(model)
        named = " ".join(entry.reason for entry in report.left)
        assert "parametrized" in named, str(report)
        assert sum(zoo.functions(report).values()) == sum(zoo.ZOO["llama"].fused.values()) - 1
    batch = zoo.batch_of("llama")
    with_gradients = zoo.gradients_of(plain, batch)
    torch.testing.assert_close(zoo.results(model, batch), zoo.results(plain, batch), **CLOSE)
    for key, gradient in zoo.gradients_of(model, batch).items():
        torch.testing.assert_close(gradient, with_gradients[key], **CLOSE)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize("name", ["gemma3", "t5", "bert"])
def test_tied_weights_stay_tied(name):
    plain = zoo.build(name)
    model = twin(plain)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    assert embedding.weight is output.weight
    fusedops.patch(model)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight is embedding.weight
    loaded = copy.deepcopy(model)
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    batch = zoo.batch_of(name)
    torch.testing.assert_close(
        zoo.gradients_of(model, batch), zoo.gradients_of(plain, batch), **CLOSE, msg="gradients of tied weights"
    )


# ---- quantised layers -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_dynamically_quantised_linears_are_left_alone_and_named(name):
    quantised = torch.ao.quantization.quantize_dynamic(zoo.build(name), {nn.Linear}, dtype=torch.qint8)
    plain = copy.deepcopy(quantised)
    before = classes(quantised)
    report = fusedops.patch(quantised)
    found = zoo.functions(report)
    norms = "rms_norm" if name == "llama" else "layer_norm"
    assert dict(found) == {norms: 5, "attention": 2}, str(report)
    reasons = [entry.reason for entry in report.left]
    assert len(reasons) == 2, str(report)
    assert all("torch.ao.nn.quantized.dynamic.modules.linear.Linear" in reason for reason in reasons)
    changed = {path for path, kind in classes(quantised).items() if kind is not before[path]}
    assert not any("Linear" in before[path].__name__ for path in changed)
    batch = zoo.batch_of(name)
    with torch.no_grad():
        # Activations are quantised too: a last bit of difference may move one by a step of 8 bits.
        expected = zoo.results(plain, batch)
        torch.testing.assert_close(zoo.results(quantised, batch), expected, rtol=0, atol=0.05 * expected.std().item())


class Linear4bit(nn.Linear):
    """As bitsandbytes has it: a subclass of nn.Linear that computes with packed weights in a forward of its own."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.load_state_dict(linear.state_dict())

    def forward(self, x):
        step = self.weight.abs().amax(1, keepdim=True) / 7
        return nn.functional.linear(x, (self.weight / step).round() * step, self.bias)


class Quantised(torch.Tensor):
    """As torchao has it: a plain nn.Linear whose weight is a tensor subclass, which knows what products do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            plain = [a.as_subclass(torch.Tensor) if isinstance(a, Quantised) else a for a in args]
            return func(plain[0], (plain[1] * 8).round() / 8, *plain[2:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _packed(owner, name):
    setattr(owner, name, Linear4bit(getattr(owner, name)))


def _subclassed(owner, name):
    linear = getattr(owner, name)
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Quantised), requires_grad=False)


QUANTISED = {"subclass of Linear": (_packed, "Linear4bit"), "tensor subclass": (_subclassed, "Quantised")}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("quantise", "reason"), QUANTISED.values(), ids=QUANTISED)
@pytest.mark.parametrize("part", ["gate_proj", "up_proj"])
def test_a_gated_mlp_with_a_quantised_half(part, quantise, reason, when):
    plain = zoo.build("llama")
    model = twin(plain)
    if when == "after":
        fusedops.patch(model)
    for one in (plain, model):
        quantise(one.model.layers[0].mlp, part)
    batch = zoo.batch_of("llama")
    with torch.no_grad():
        assert (zoo.results(plain, batch) - zoo.results(zoo.build("llama"), batch)).abs().max() > 0.01
        if when == "before":
            report = fusedops.patch(model)
            assert zoo.functions(report)["gated_linear"] == 1
            assert any(reason in entry.reason for entry in report.left), str(report)
        torch.testing.assert_close(zoo.results(model, batch), zoo.results(plain, batch), **CLOSE)


# ---- hooks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["mlp.gate_proj", "mlp.up_proj", "mlp.act_fn", "mlp.down_proj", "mlp", "self_attn"])
def test_hooks_see_in_a_patched_decoder_what_they_would_see(path):
    plain = zoo.build("llama")
    model = twin(plain)
    fusedops.patch(model)
    seen = []
    for one in (plain, model):
        part = one.model.layers[1].get_submodule(path)
        part.register_forward_hook(lambda module, args, output: seen.append(output))
        zoo.results(one, zoo.batch_of("llama"))
    assert len(seen) == 2
    expected, actual = (output[0] if isinstance(output, tuple) else output for output in seen)
    torch.testing.assert_close(actual, expected, **CLOSE)


# ---- saving, moving, compiling --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "t5-gated", "vit"])
def test_saved_and_loaded_as_safetensors(name, tmp_path):
    model, batch = zoo.build(name), zoo.batch_of(name)
    fusedops.patch(model)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert "fused" not in (tmp_path / "config.json").read_text().lower()
    loaded = type(zoo.build(name)).from_pretrained(tmp_path).eval()
    assert not any(type(module).__name__.startswith("Fused") for module in loaded.modules())
    torch.testing.assert_close(zoo.results(loaded, batch), zoo.results(model, batch), **CLOSE)


@pytest.mark.parametrize("name", ["llama", "whisper", "timm-swin", "transformer-encoder"])
def test_saved_whole_and_loaded(name, tmp_path):
    model, batch = zoo.build(name), zoo.batch_of(name)
    fusedops.patch(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert classes(loaded) == classes(model)
    assert torch.equal(zoo.results(loaded, batch), zoo.results(model, batch))
    assert fusedops.unpatch(loaded)
    torch.testing.assert_close(zoo.results(loaded, batch), zoo.results(model, batch), **CLOSE)


@pytest.mark.parametrize("name", ["llama", "t5", "timm-vit", "multihead-attention"])
def test_moved_to_other_dtypes_and_devices(name):
    model = zoo.build(name)
    fusedops.patch(model)
    kinds = classes(model)
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert classes(half) == kinds
    assert zoo.results(half, zoo.batch_of(name, torch.bfloat16)).dtype == torch.bfloat16
    meta = copy.deepcopy(model).to("meta")
    assert classes(meta) == kinds
    empty = meta.to_empty(device="cpu")
    assert classes(empty) == kinds
    empty.load_state_dict(model.state_dict())
    for path, buffer in model.named_buffers():
        empty.get_buffer(path).copy_(buffer)
    batch = zoo.batch_of(name)
    assert torch.equal(zoo.results(empty, batch), zoo.results(model, batch))


@pytest.mark.parametrize("name", ["llama", "timm-eva", "transformer-decoder"])
def test_compiled(name):
    """In one graph."""
    torch._dynamo.reset()
    model, batch = zoo.build(name), zoo.batch_of(name)
    fusedops.patch(model)
    with torch.no_grad():
        expected = zoo.results(model, batch)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(zoo.results(compiled, batch), expected, **CLOSE)
    torch._dynamo.reset()
