"""Attention of models that ask transformers' registry for it: no list of models, what their code does decides."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.llama.modeling_llama import LlamaAttention

import fusedops
from fusedops.patching.attention import attend, reading
from fusedops.patching.attention_eager import Eager, learn
from tests.patching.attention_models import (
    DECODERS,
    EAGER_ONLY,
    ENCODERS,
    VOCABULARY,
    check_same,
    decoder,
    encoder_inputs,
)

PADDING = {"right": torch.tensor([[1] * 9, [1] * 5 + [0] * 4]), "left": torch.tensor([[0] * 4 + [1] * 5, [1] * 9])}


def twins(plain):
    """A model and a patched copy; every attention module of it must have been replaced."""
    patched = copy.deepcopy(plain)
    report = fusedops.patch(patched)
    assert not [entry for entry in report.left if "ttention" in entry.original], report
    assert any(entry.rule == "attention" for entry in report.replaced)
    return plain, patched, report


def batch_of(padding=None):
    batch = {"input_ids": torch.randint(3, VOCABULARY, (2, 9))}
    return batch if padding is None else {**batch, "attention_mask": PADDING[padding]}


_CASES = [(name, "sdpa") for name in DECODERS if name not in EAGER_ONLY]
_CASES += [(name, "eager") for name in ("llama", "opt", "gemma3", *EAGER_ONLY)]


@pytest.mark.parametrize(("name", "attn"), _CASES, ids=["-".join(case) for case in _CASES])
def test_decoders(name, attn):
    plain, patched, _ = twins(decoder(name, attn))
    check_same(plain, patched, batch_of())
    check_same(plain, patched, batch_of("left"))


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_and_what_attends_to_them(name, attn):
    plain, patched, _ = twins(ENCODERS[name](attn))
    check_same(plain, patched, encoder_inputs(name))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
def test_left_padded_generation(name, cache):
    plain, patched, _ = twins(decoder(name))
    batch = batch_of("left")
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache, "eos_token_id": None}
    expected, actual = (
        model.generate(**batch, **options, output_logits=True, return_dict_in_generate=True)
        for model in (plain, patched)
    )
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(actual.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


def test_extras_of_eager_attention_go_to_the_kernels_function():
    for name, called in (("gemma2", "attention"), ("gpt_oss", "attention"), ("llama", "scaled_dot_product_attention")):
        _, _, report = twins(decoder(name, "eager"))
        calls = {entry.calls for entry in report.replaced if entry.rule == "attention"}
        assert calls == {f"fusedops.{called} (for 'eager')"}


def test_sinks_and_softcaps_get_gradients():
    _, patched, _ = twins(decoder("gpt_oss"))
    patched(**batch_of()).logits.sum().backward()
    assert patched.model.layers[0].self_attn.sinks.grad.abs().min() > 0


def test_eager_weights_are_given_when_asked_for_and_fused_again_afterwards(calls):
    plain, patched, _ = twins(decoder("gpt_oss"))
    batch = batch_of("right")
    expected, actual = (model(**batch, output_attentions=True).attentions for model in (plain, patched))
    assert len(actual) == 2
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    # transformers' hooks remain, and are idle.
    assert patched.model.layers[0].self_attn._forward_hooks
    assert not calls["attention"]
    patched(**batch)
    assert calls["attention"] == 2
    patched(**batch, output_attentions=True)
    assert calls["attention"] == 2


def test_weights_that_a_holder_of_the_attention_passes_on():
    plain, patched, _ = twins(ENCODERS["t5"]("eager"))
    batch = encoder_inputs("t5")
    expected, actual = (model(**batch, output_attentions=True) for model in (plain, patched))
    for kind in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        torch.testing.assert_close(actual[kind], expected[kind], rtol=1e-4, atol=1e-5)


_MODULE = nn.Module()
_MODULE.num_key_value_groups, _MODULE.is_causal = 3, True


class Plain(nn.Module):
    """An attention module without the two attributes."""


class Derived(nn.Module):
    is_causal = False

    @property
    def num_key_value_groups(self):
        return 3


def _masks(queries, keys):
    seen = torch.rand(2, 1, queries, keys) > 0.3
    seen[..., 0] = True
    return {"none": None, "bool": seen, "float": torch.randn(2, 1, queries, keys), "heads": seen.expand(2, 6, -1, -1)}


@pytest.mark.parametrize("module", [_MODULE, Plain(), Derived()], ids=["attributes", "plain", "property"])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (1, 7)])
def test_attend_is_sdpa_whatever_it_is_given(module, queries, keys):
    heads = 6 if isinstance(module, Plain) else 2
    q, k, v = torch.randn(2, 6, queries, 8), torch.randn(2, heads, keys, 8), torch.randn(2, heads, keys, 4)
    bias = torch.randn(1, 6, queries, keys)
    extras = [
        {}, {"is_causal": True}, {"is_causal": False}, {"scaling": 0.7}, {"position_bias": bias},
        {"position_bias": bias, "is_causal": True}, {"position_bias": bias, "is_causal": False},
        {"output_attentions": True, "sliding_window": 2, "cu_seq_lens_q": torch.tensor([0, 2]), "s_aux": q[0, :, 0, 0]},
    ]  # fmt: skip
    for name, mask in _masks(queries, keys).items():
        for extra in extras:
            results = []
            for function in (sdpa_attention_forward, attend):
                leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
                given = {**extra, "position_bias": leaves[3]} if "position_bias" in extra else extra
                out, weights = function(module, *leaves[:3], mask, **given)
                assert weights is None
                assert out.is_contiguous()
                grads = torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True)
                results.append([out, *(g for g in grads if g is not None)])
            assert len(results[0]) == len(results[1])
            torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5, msg=f"{name} {list(extra)}")


def test_attend_broadcasts_a_batch_of_queries_and_can_be_traced():
    q, k, v = torch.randn(1, 2, 4, 8), torch.randn(3, 2, 6, 8), torch.randn(3, 2, 6, 8)
    for options in ({"is_causal": False}, {"is_causal": True}, {"position_bias": torch.randn(1, 2, 4, 6)}):
        expected, actual = (f(Plain(), q, k, v, None, **options)[0] for f in (sdpa_attention_forward, attend))
        assert actual.shape == (3, 4, 2, 8)
        torch.testing.assert_close(actual, expected)
    module = Plain()
    with pytest.warns(torch.jit.TracerWarning):
        traced = torch.jit.trace(lambda q, k, v: attend(module, q, k, v, None)[0], (k, k, v), check_trace=False)
    torch.testing.assert_close(traced(k, k, v), sdpa_attention_forward(module, k, k, v, None)[0])


def test_a_softcap_is_refused_as_sdpa_refuses_it():
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="softcap"):
        attend(_MODULE, q, q, q, None, softcap=1.0)


def test_what_eager_functions_compute_is_found_out():
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss
    from transformers.models.granite_swa.modeling_granite_swa import eager_attention_forward as scaled_by_lse
    from transformers.models.llama.modeling_llama import eager_attention_forward as llama
    from transformers.models.t5.modeling_t5 import eager_attention_forward as t5

    assert learn(llama) == Eager(grouped=True)
    assert learn(gemma2) == Eager(grouped=True, head_dim=True, arguments=frozenset({"softcap"}))
    # Another formula, the same function.
    assert learn(gpt_oss) == learn(scaled_by_lse) == Eager(grouped=True, sinks=True)
    assert learn(t5) == Eager(arguments=frozenset({"position_bias"}))


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """What most models have; the cases below each differ from it."""
    weights = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = nn.functional.dropout(weights.softmax(-1), p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def no_mask(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    return eager_attention_forward(module, query, key, value, None, scaling, dropout)


def own_scale(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    return eager_attention_forward(module, query, key, value, attention_mask, scaling * module.temperature, dropout)


def strange_scale(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    return eager_attention_forward(module, query, key, value, attention_mask, scaling * 1.01, dropout)


def another_argument(module, query, key, value, attention_mask, scaling, dropout=0.0, head_mask=None, **kwargs):
    return eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout)


def hidden_argument(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    return eager_attention_forward(module, query, key, value + kwargs.get("shift", 0), attention_mask, scaling, dropout)


def no_dropout(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    return eager_attention_forward(module, query, key, value, attention_mask, scaling, 0.0)


def always_drops(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    out, weights = eager_attention_forward(module, query, key, value, attention_mask, scaling)
    return nn.functional.dropout(out, dropout), weights


def stopped_gradient(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    return eager_attention_forward(module, query, key.detach(), value, attention_mask, scaling, dropout)


def maybe_another(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    factor = 2.0 if hasattr(module, "twice") else 1.0
    return eager_attention_forward(module, query, key, value, attention_mask, scaling * factor, dropout)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (no_mask, "computes something else with a mask"),
        (own_scale, "could not be tried: AttributeError: temperature"),
        (strange_scale, "computes something else"),
        (another_argument, "takes head_mask"),
        (hidden_argument, "reads further arguments"),
        (no_dropout, "does not drop attention weights"),
        (always_drops, "computes something else"),
        (stopped_gradient, "computes something else"),
        (maybe_another, "reads twice of its module"),
    ],
)
def test_eager_functions_that_compute_something_else_are_left_alone(function, reason):
    state = torch.get_rng_state()
    assert reason in learn(function)
    assert torch.equal(torch.get_rng_state(), state)
    assert learn(eager_attention_forward) == Eager()


ALL_ATTENTION_FUNCTIONS = AttentionInterface()


class Own(nn.Module):
    """A user's attention module that goes through transformers' registry."""

    def __init__(self, implementation="sdpa"):
        super().__init__()
        self.config = transformers.LlamaConfig()
        self.config._attn_implementation = implementation
        self.is_causal = True

    def forward(self, x, mask=None):
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = function(self, x, x, x, mask, dropout=0.0, scaling=0.3)
        return out, weights


class Compares(Own):
    def forward(self, x, mask=None):
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = function(self, x, x, x, mask, dropout=0.0, scaling=0.3)
        return (out if self.config._attn_implementation in ("sdpa", "eager") else -out), weights


class ComparesElsewhere(Own):
    def forward(self, x, mask=None):
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = function(self, x, x, x, mask, dropout=0.0, scaling=0.3)
        return out * self.factor(), weights

    def factor(self):
        return 1 if self.config._attn_implementation == "sdpa" else 2


class OtherConfig(Own):
    def forward(self, x, mask=None):
        config = self.config
        function = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager_attention_forward)
        out, weights = function(self, x, x, x, mask, dropout=0.0, scaling=0.3)
        return out, weights


class UsesWeights(Own):
    def forward(self, x, mask=None):
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = function(self, x, x, x, mask, dropout=0.0, scaling=0.3)
        return out, weights.mean(1)


class Recording(nn.Module):
    _can_record_outputs: ClassVar = {"attentions": [Own, UsesWeights]}


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Compares(), "asks whether its attention is 'sdpa'"),
        (Compares("eager"), "asks whether its attention is 'eager'"),
        (ComparesElsewhere(), "asks whether its attention is 'sdpa'"),
        (OtherConfig(), "reads the name of its attention function elsewhere than in self.config"),
        (UsesWeights("eager"), "uses the attention weights"),
        (Own("flex_attention"), "it runs 'flex_attention'; 'sdpa' and 'eager' are replaced"),
    ],
)
def test_modules_left_alone(module, reason):
    report = fusedops.patch(module)
    assert not report.replaced
    assert reason in report.left[0].reason


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_users_module_is_replaced(attn, calls):
    module, x = Own(attn), torch.randn(2, 4, 6, 8)
    expected = module(x)[0]
    fusedops.patch(module, strict=True)
    assert type(module).__name__ == "FusedOwn"
    torch.testing.assert_close(module(x)[0], expected)
    assert module.__dict__["config"]._attn_implementation == attn
    assert calls["scaled_dot_product_attention"] == 1
    assert fusedops.unpatch(module) == 1
    assert torch.equal(module(x)[0], expected)


def test_another_sdpa_is_honoured_before_and_after_patching():
    def zeros(module, query, key, value, mask, **kwargs):
        return torch.zeros_like(query).transpose(1, 2), None

    module, x = Own(), torch.randn(2, 4, 6, 8)
    expected = module(x)[0]
    fusedops.patch(module)
    ALL_ATTENTION_FUNCTIONS["sdpa"] = zeros
    try:
        assert not module(x)[0].any()
        assert "another function is registered as 'sdpa'" in fusedops.plan(Own()).left[0].reason
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    torch.testing.assert_close(module(x)[0], expected)


def test_what_is_read_from_transformers_own_classes():
    llama, gpt_oss = reading(LlamaAttention), reading(GptOssAttention)
    assert llama.always == llama.of_sdpa == llama.of_eager == ()
    assert llama.eager == Eager(grouped=True)
    assert gpt_oss.eager == Eager(grouped=True, sinks=True)
    assert reading(nn.Linear) is None


def test_a_whole_model_keeps_its_class_and_what_it_records():
    """ALBERT's model calls its pooler and the tanh behind it itself; its class names what output_attentions records."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "embedding_size": 16}
    config = transformers.AlbertConfig(**sizes, num_hidden_layers=2, vocab_size=40, attn_implementation="eager")
    model = transformers.AlbertModel(config).eval()
    ids = torch.randint(3, 40, (2, 7))
    expected = model(ids, output_attentions=True).attentions
    report = fusedops.patch(model)
    assert type(model) is transformers.AlbertModel
    assert any("whose class transformers goes by" in entry.reason for entry in report.left)
    torch.testing.assert_close(model(ids, output_attentions=True).attentions, expected)


def test_gradients_where_a_mask_hides_everything_from_a_row():
    """Eager attention adds finfo.min to scores of padding: whole rows of it are an average over all keys."""
    tensors = [torch.randn(1, 2, 5, 8) for _ in range(3)]
    mask = torch.zeros(1, 1, 5, 5).index_fill(2, torch.tensor([0, 1]), torch.finfo(torch.float32).min)

    def composed(q, k, v):
        return (q @ k.mT / 8**0.5 + mask).softmax(-1) @ v

    def ours(q, k, v):
        return fusedops.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    results = []
    for attention in (ours, composed):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out = attention(*leaves)
        out.square().sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
