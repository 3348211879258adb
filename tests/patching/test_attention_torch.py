"""torch.nn's multi-head attention, encoder layers and the stacks that are made of them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import fusedops
from tests.patching.models import LoRA

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(6)


def twins(plain):
    patched = copy.deepcopy(plain)
    return plain, patched, fusedops.patch(patched, strict=True)


def gradients(module, output):
    module.zero_grad()
    (output.sin() * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def check_same(plain, patched, function, rows=slice(None)):
    expected, actual = function(plain)[rows], function(patched)[rows]
    torch.testing.assert_close(actual, expected, **CLOSE)
    of_plain = gradients(plain, expected)
    assert of_plain
    for name, gradient in gradients(patched, actual).items():
        torch.testing.assert_close(gradient, of_plain[name], **CLOSE, msg=name)


def paths(report, rule="attention"):
    return {entry.path for entry in report.replaced if entry.rule == rule}


CALLS = {
    "plain": {},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "padding": {"key_padding_mask": PADDING},
    "both": {"key_padding_mask": PADDING, "attn_mask": CAUSAL.isinf()},
}


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_multihead_attention(call, need_weights):
    plain, patched, report = twins(nn.MultiheadAttention(16, 4, batch_first=True))
    assert paths(report) == {""}
    assert isinstance(patched, nn.MultiheadAttention)
    x = torch.randn(2, 6, 16)
    check_same(plain, patched, lambda module: module(x, x, x, need_weights=need_weights, **CALLS[call])[0])
    weights = [module(x, x, x, need_weights=need_weights, **CALLS[call])[1] for module in (plain, patched)]
    if need_weights:
        torch.testing.assert_close(*weights, **CLOSE)
    else:
        assert weights == [None, None]


def test_multihead_attention_of_other_sizes():
    plain, patched, _ = twins(nn.MultiheadAttention(16, 4, kdim=5, vdim=7))
    q, k, v = (torch.randn(length, 2, size) for length, size in ((3, 16), (6, 5), (6, 7)))
    check_same(plain, patched, lambda module: module(q, k, v)[0])


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_attention_with_an_added_key_is_left_alone(option):
    """torch's own ways differ in which queries see that key."""
    attention = nn.MultiheadAttention(16, 4, **{option: True})
    (left,) = fusedops.plan(attention).left
    assert "adds a key of its own" in left.reason
    layer = nn.TransformerEncoderLayer(16, 4, 24)
    layer.self_attn = attention
    assert {entry.path for entry in fusedops.plan(layer).left} == {"", "self_attn"}


def test_a_query_that_sees_nothing_gets_zeros_from_its_heads():
    _, patched, _ = twins(nn.MultiheadAttention(16, 4, batch_first=True))
    x, hidden = torch.randn(2, 6, 16), torch.ones(2, 6, dtype=torch.bool)
    out = patched(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
    torch.testing.assert_close(out, patched.out_proj.bias.expand(2, 6, 16))


LAYERS = {
    "post-norm": {},
    "pre-norm": {"norm_first": True},
    "gelu": {"activation": "gelu"},
    "module": {"activation": nn.GELU(), "norm_first": True},
    "function": {"activation": torch.sin},
    "no bias": {"bias": False},
    "length first": {"batch_first": False},
}


@pytest.mark.parametrize("mode", ["training", "evaluation"])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_encoder_layer(options, mode, monkeypatch):
    layer = nn.TransformerEncoderLayer(16, 4, 24, **{"dropout": 0.0, "batch_first": True, **options})
    for norm in (layer.norm1, layer.norm2):
        nn.init.normal_(norm.weight)
    plain, patched, report = twins(layer.train(mode == "training"))
    # The layer does its linear layers itself: no other rule rewrites it.
    assert paths(report) == {"", "self_attn"}
    assert paths(report, "linear+activation") == set()
    x = torch.randn(2, 6, 16)
    check_same(plain, patched, lambda module: module(x))
    with torch.no_grad():
        expected = plain(x)
        monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", None)  # the fast path must not be taken
        torch.testing.assert_close(patched(x), expected, **CLOSE)


def test_an_encoder_layers_norms_and_sums_are_one_call(monkeypatch):
    from fusedops.nn import transformer

    calls = []
    for name in ("linear", "add_layer_norm"):
        own = getattr(transformer, name)
        monkeypatch.setattr(transformer, name, lambda *a, own=own, name=name, **k: calls.append(name) or own(*a, **k))
    _, patched, report = twins(nn.TransformerEncoderLayer(16, 4, 24, batch_first=True))
    assert paths(report, "norm") == {"norm1", "norm2"}
    patched(torch.randn(2, 6, 16))
    assert calls == ["add_layer_norm", "linear", "linear", "add_layer_norm"]


@pytest.mark.parametrize("mode", ["training", "evaluation", "inference"])
def test_encoder_with_padding(mode):
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
    plain, patched, _ = twins(nn.TransformerEncoder(layer, 2, nn.LayerNorm(16)).train(mode == "training"))
    x = torch.randn(2, 6, 16)
    if mode == "inference":  # nested tensors, and torch's fast path
        with torch.no_grad():
            expected, actual = (module(x, src_key_padding_mask=PADDING) for module in (plain, patched))
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual[~PADDING], expected[~PADDING], **CLOSE)
    else:
        check_same(plain, patched, lambda module: module(x, src_key_padding_mask=PADDING), ~PADDING)
        check_same(plain, patched, lambda module: module(x, mask=CAUSAL, is_causal=True))


def test_transformer_with_both_stacks():
    options = {"num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 24, "dropout": 0.0}
    plain, patched, report = twins(nn.Transformer(16, 4, **options, batch_first=True))
    decoder = "decoder.layers.0"
    assert {f"{decoder}.self_attn", f"{decoder}.multihead_attn", "encoder.layers.0"} <= paths(report)
    assert paths(report, "linear+activation") == {f"{decoder}.linear1"}
    x, y = torch.randn(2, 6, 16), torch.randn(2, 6, 16)
    masks = {"src_key_padding_mask": PADDING, "memory_key_padding_mask": PADDING, "tgt_mask": CAUSAL}
    check_same(plain, patched, lambda module: module(x, y, **masks))


def test_copies_pickles_states_and_the_way_back():
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True).eval()
    plain, patched, _ = twins(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    x = torch.randn(2, 6, 16)
    expected = patched(x)
    for copied in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        assert type(copied.layers[0]) is type(patched.layers[0])
        assert torch.equal(copied(x), expected)
    assert patched.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(patched.state_dict())
    assert not fusedops.patch(patched).replaced
    fusedops.unpatch(patched)
    assert {type(module) for module in patched.modules()} == {type(module) for module in plain.modules()}
    assert torch.equal(patched(x), plain(x))


class Named(nn.MultiheadAttention):
    """A subclass with its own constructor and no forward of its own."""

    def __init__(self, width):
        super().__init__(width, 2, batch_first=True)
        self.width = width


def test_a_subclass_keeps_its_constructor():
    module = Named(8)
    assert fusedops.patch(module).replaced
    assert isinstance(module, Named)
    assert type(module)(4).width == 4


class OwnForward(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class OwnBlock(nn.TransformerEncoderLayer):
    def _ff_block(self, x):
        return super()._ff_block(x) * 2


class OwnName(nn.MultiheadAttention):
    def _heads(self):
        return self.num_heads


class Quantised(nn.Parameter):
    pass


def _wrapped(module, name, wrapper):
    setattr(module, name, wrapper(getattr(module, name)))
    return module


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (OwnForward(8, 2), "OwnForward has a forward of its own"),
        (OwnName(8, 2), "OwnName has a _heads of its own"),
        (OwnBlock(8, 2, 8), "OwnBlock has a _ff_block of its own"),
        (_wrapped(nn.MultiheadAttention(8, 2), "out_proj", LoRA), "its out_proj is a LoRA"),
        (_wrapped(nn.MultiheadAttention(8, 2), "in_proj_weight", Quantised), "its in_proj_weight is a Quantised"),
    ],
    ids=["forward", "name", "block", "LoRA", "parameter"],
)
def test_left_alone(module, reason):
    before = type(module)
    report = fusedops.patch(module)
    assert reason in {entry.path: entry.reason for entry in report.left}[""]
    assert type(module) is before


def test_a_layer_with_a_block_of_its_own_is_fused_in_its_parts():
    plain, x = OwnBlock(16, 4, 24, dropout=0.0, batch_first=True), torch.randn(2, 6, 16)
    patched = copy.deepcopy(plain)
    assert paths(fusedops.patch(patched)) == {"self_attn"}
    check_same(plain, patched, lambda module: module(x))


def test_fusedops_own_modules_are_nothing_to_replace():
    report = fusedops.plan(fusedops.nn.TransformerEncoderLayer(16, 4, 24))
    assert not {entry.path for entry in (*report.replaced, *report.left)} & {"", "self_attn"}


def test_a_hooked_part_is_called():
    _, patched, _ = twins(nn.TransformerEncoderLayer(16, 4, 24, batch_first=True))
    seen = []
    for part in (patched.norm1, patched.linear1):
        part.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    patched(torch.randn(2, 6, 16))
    assert seen == [(2, 6, 16), (2, 6, 24)]
