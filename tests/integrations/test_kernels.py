"""Hugging Face's ``kernels`` finds fusedops' layers under the names that layers bear."""

from __future__ import annotations

import pytest

kernels = pytest.importorskip("kernels", reason="Hugging Face's kernels is not installed")

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import nn  # noqa: E402
from transformers.models.gemma.modeling_gemma import GemmaMLP  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm  # noqa: E402

from fusedops.integrations import kernels as ours  # noqa: E402

TRAINING = kernels.Mode.TRAINING


@pytest.fixture
def calls(monkeypatch):
    seen = []

    def watch(name):
        function = getattr(ours, name)
        monkeypatch.setattr(ours, name, lambda *a, **k: seen.append(name) or function(*a, **k))

    for name in ("rms_norm", "layer_norm", "gated_linear"):
        watch(name)
    return seen


def results(module, x):
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = module(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def named(kind, name):
    """A subclass that bears a name; the class itself is not touched."""
    return kernels.use_kernel_forward_from_hub(name)(type(kind.__name__, (kind,), {}))


class ZeroCentered(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(width)), 1e-6

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


def llama_config():
    return transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, hidden_act="silu", mlp_bias=True, num_attention_heads=2
    )


LAYERS = {
    "RMSNorm": (lambda: named(LlamaRMSNorm, "RMSNorm")(16), "rms_norm"),
    "RMSNormZeroCentered": (lambda: named(ZeroCentered, "RMSNormZeroCentered")(16), "rms_norm"),
    "LayerNorm": (lambda: named(nn.LayerNorm, "LayerNorm")(16), "layer_norm"),
    "SwiGLUMLP": (lambda: named(LlamaMLP, "SwiGLUMLP")(llama_config()), "gated_linear"),
    "GeGLUMLP": (
        lambda: named(GemmaMLP, "GeGLUMLP")(
            transformers.GemmaConfig(hidden_size=16, intermediate_size=24, hidden_act="gelu_pytorch_tanh")
        ),
        "gated_linear",
    ),
}


@pytest.mark.parametrize("mode", [TRAINING, TRAINING | kernels.Mode.TORCH_COMPILE, kernels.Mode.INFERENCE], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_kernelize_picks_ours_with_the_values_it_had(layer, mode, calls):
    make, function = LAYERS[layer]
    module = make()
    x = torch.randn(3, 5, 16)
    expected = results(module, x)
    with ours.use(devices=["cpu"]):
        kernels.kernelize(module, mode=mode, device="cpu", use_fallback=False)
    assert calls == []
    found = results(module, x)
    assert calls == [function]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_every_layer_is_tried():
    assert set(LAYERS) == set(ours.LAYERS) == set(ours.mapping())


def test_a_model_of_transformers(calls, monkeypatch):
    # transformers gives its classes names only with the versions of kernels that it knows.
    monkeypatch.setattr(LlamaRMSNorm, "kernel_layer_name", "RMSNorm", raising=False)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=40
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 40, (2, 6))
    expected = model(ids).logits
    with ours.use(devices=["cpu"], layers=["RMSNorm"]):
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")
    torch.testing.assert_close(model(ids).logits, expected)
    assert calls == ["rms_norm"] * 5


def test_the_context_ends():
    with ours.use(devices=["cpu"]):
        pass
    module = LAYERS["RMSNorm"][0]()
    kernels.kernelize(module, mode=TRAINING, device="cpu")
    assert module.forward.__func__ is LlamaRMSNorm.forward


def test_registered_for_good(calls):
    from kernels.layer.globals import _KERNEL_MAPPING

    token = _KERNEL_MAPPING.set({})
    try:
        ours.register(devices=["cpu"])
        module = LAYERS["RMSNorm"][0]()
        kernels.kernelize(module, mode=TRAINING, device="cpu")
        module(torch.randn(2, 16))
        assert calls == ["rms_norm"]
    finally:
        _KERNEL_MAPPING.reset(token)


def test_what_our_layers_cannot_take_computes_as_it_did(calls):
    norm = LAYERS["RMSNorm"][0]()
    mlp = LAYERS["SwiGLUMLP"][0]()
    with ours.use(devices=["cpu"]):
        for module in (norm, mlp):
            kernels.kernelize(module, mode=TRAINING, device="cpu")
    x = torch.randn(2, 16, dtype=torch.bfloat16)
    assert norm(x).dtype == LlamaRMSNorm.forward(norm, x).dtype == torch.float32  # the weight's
    seen = []
    mlp.gate_proj.register_forward_hook(lambda *_: seen.append(1))
    mlp(torch.randn(2, 16))
    assert seen == [1]
    assert calls == []


def test_mappings():
    assert set(ours.mapping()["RMSNorm"]) == {"cuda", "rocm"}
    assert str(ours.mapping(["cpu"], ["RMSNorm"])["RMSNorm"]["cpu"]) == "fusedops, layer RMSNorm"
    with pytest.raises(ValueError, match=r"mapping: layers are RMSNorm, .*; got 'Softmax'"):
        ours.mapping(layers=["Softmax"])
