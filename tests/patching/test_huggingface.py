"""Hugging Face models: the results that they had, in all that they are used for."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import transformers

import fusedops
from tests.harness.errors import check_error
from tests.patching.models import (
    FAMILIES,
    PADDINGS,
    attended,
    bert,
    gpt2,
    inputs,
    logits_and_gradients,
    twin,
)

# Rounding of float32 values of about 1.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def rules_of(report):
    return Counter(entry.rule for entry in report.replaced)


def same_model(plain, patched, batch, seed=0):
    expected, expected_gradients = logits_and_gradients(plain, batch, seed)
    actual, gradients = logits_and_gradients(patched, batch, seed)
    torch.testing.assert_close(attended(actual, batch), attended(expected, batch), **CLOSE)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        scale = expected_gradients[name].abs().max().clamp_min(1.0)
        torch.testing.assert_close(gradient / scale, expected_gradients[name] / scale, **CLOSE)


@pytest.mark.parametrize("mode", ["evaluation", "training"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_what_it_did(family, mode, calls):
    plain = FAMILIES[family]()
    patched = twin(plain)
    report = fusedops.patch(patched, strict=True)
    layers, cross = 2, 2 if getattr(plain.config, "add_cross_attention", False) else 0
    assert rules_of(report)["attention"] == layers + cross
    assert rules_of(report)["linear+activation"] >= layers
    assert all(hasattr(patched.get_submodule(entry.path), "fused_rule") for entry in report.replaced)
    plain.train(mode == "training"), patched.train(mode == "training")
    same_model(plain, patched, inputs(plain))
    assert calls["scaled_dot_product_attention"] == layers + cross
    assert calls["linear"] == rules_of(report)["linear+activation"]
    assert calls["layer_norm"] == rules_of(report)["norm"]


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("build", [bert, gpt2])
def test_padding_and_implementations(build, attn, padding):
    plain = build(attn)
    patched = twin(plain)
    report = fusedops.patch(patched, strict=True)
    assert any(f"for {attn!r}" in entry.calls for entry in report.replaced)
    same_model(plain, patched, inputs(plain, padding))


def test_kernels_in_whole_models(kernel_runner):
    """Interpreted or on a GPU: as near to float64 as the plain model is."""
    for plain in (gpt2(n_layer=1), bert(num_hidden_layers=1)):
        plain = plain.to(kernel_runner.device)
        patched, exact = twin(plain), twin(plain).double()
        fusedops.patch(patched)
        batch = {name: value.to(kernel_runner.device) for name, value in inputs(plain).items()}
        results = [logits_and_gradients(model, batch) for model in (patched, exact, plain)]
        check_error(*(attended(logits, batch) for logits, _ in results), what="logits")
        # All gradients as one: those that are zero but for rounding (a key's bias) have no scale of their own.
        names = list(results[0][1])
        check_error(
            *(torch.cat([gradients[name].flatten() for name in names]) for _, gradients in results),
            gradient=True,
            what="gradients",
        )


@pytest.mark.parametrize("cache", ["dynamic", "static", None])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_greedy_generation_gives_the_same_tokens(attn, cache):
    plain = gpt2(attn, initializer_range=0.3, tie_word_embeddings=False)
    patched = twin(plain)
    fusedops.patch(patched)
    batch = inputs(plain, "left")
    options = {"max_new_tokens": 12, "do_sample": False, "use_cache": cache is not None}
    if cache is not None:
        options["cache_implementation"] = cache
    expected, actual = (model.generate(**batch, **options) for model in (plain, patched))
    assert actual.shape == (2, 19)
    assert torch.equal(actual, expected)
    assert actual[:, 7:].unique().numel() > 3


def test_a_prompt_in_a_static_cache_does_not_attend_to_its_empty_room(calls):
    plain = gpt2()
    patched = twin(plain)
    fusedops.patch(patched)
    ids = inputs(plain, "no mask")["input_ids"]
    results = []
    for model in (plain, patched):
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        # Room that holds something: what nobody may see.
        model(ids.flip(1), cache=cache)
        cache.reset()
        for layer in cache.layers:
            layer.keys[:, :, 7:] = 1e4
        results.append(model(ids, cache=cache).logits)
    torch.testing.assert_close(*results, **CLOSE)
    assert calls["scaled_dot_product_attention"] == 4


@pytest.mark.parametrize("family", ["bert", "gpt2-cross"])
def test_eager_attention_weights_are_returned_when_asked_for(family, calls):
    plain = FAMILIES[family]("eager")
    patched = twin(plain)
    report = fusedops.patch(patched)
    assert "output_attentions" in str(report)
    batch = inputs(plain)
    expected = plain(**batch, output_attentions=True)
    actual = patched(**batch, output_attentions=True)
    kinds = ["attentions"] + ["cross_attentions"] * (family == "gpt2-cross")
    for kind in kinds:
        assert len(actual[kind]) == 2
        for weights, expected_weights in zip(actual[kind], expected[kind], strict=True):
            torch.testing.assert_close(weights, expected_weights, **CLOSE)
    assert calls["scaled_dot_product_attention"] == 0
    assert calls["layer_norm"] > 0


def test_output_attentions_of_sdpa_and_hidden_states_are_as_transformers_has_them():
    plain = bert()
    patched = twin(plain)
    fusedops.patch(patched)
    batch = inputs(plain)
    expected, actual = (m(**batch, output_attentions=True, output_hidden_states=True) for m in (plain, patched))
    assert actual.attentions == expected.attentions
    assert not actual.attentions
    assert len(actual.hidden_states) == 3
    for states, expected_states in zip(actual.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(attended(states, batch), attended(expected_states, batch), **CLOSE)


def test_reordered_upcast_attention_is_left_alone():
    model = gpt2("eager", reorder_and_upcast_attn=True)
    report = fusedops.patch(model)
    assert {entry.reason for entry in report.left} == {
        "its eager attention computes the scores in float32 (reorder_and_upcast_attn)"
    }
    assert type(model.transformer.h[0].attn).__name__ == "GPT2Attention"


def test_eager_weights_that_no_hook_would_show_keep_attention_unfused(monkeypatch):
    """A version of transformers whose GPT-2 collects its attention weights from what the modules return."""
    model = gpt2("eager")
    for base in (type(model), *type(model).__mro__):
        if "_can_record_outputs" in vars(base):
            monkeypatch.setattr(base, "_can_record_outputs", {"hidden_states": type(model.transformer.h[0])})
    reasons = {entry.reason for entry in fusedops.plan(model).left}
    assert reasons == {"this version of transformers takes its eager attention weights from every call"}
    assert not fusedops.plan(gpt2("sdpa")).left


def test_scales_of_gpt2(calls):
    plain = gpt2(scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False, initializer_range=0.3)
    patched = twin(plain)
    fusedops.patch(patched)
    same_model(plain, patched, inputs(plain))
    assert calls["scaled_dot_product_attention"] == 2


@pytest.mark.parametrize("name", [*transformers.activations.ACT2CLS])
def test_activations_of_configs(name):
    plain = gpt2(activation_function=name, n_layer=1)
    patched = twin(plain)
    report = fusedops.patch(patched)
    unknown = {"gelu_10", "laplace", "linear", "relu6", "sqrtsoftplus", "prelu", "xielu"}
    assert (rules_of(report)["linear+activation"] == 1) == (name not in unknown)
    same_model(plain, patched, inputs(plain))


def test_grouped_heads_and_position_bias_of_other_models():
    """What the attention function is asked by models beyond those that patch() changes."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from fusedops.patching.attention import attend

    module = torch.nn.Module()
    module.num_key_value_groups = 3
    module.is_causal = True
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.rand(2, 1, 5, 5) > 0.3
    mask[..., 0] = True
    cases = [
        {"attention_mask": None},
        {"attention_mask": mask},
        {"attention_mask": None, "is_causal": False},
        {"attention_mask": None, "scaling": 0.7},
        {"attention_mask": None, "position_bias": torch.randn(1, 6, 5, 5)},
    ]
    for case in cases:
        expected, actual = (function(module, q, k, v, **case) for function in (sdpa_attention_forward, attend))
        torch.testing.assert_close(actual, expected, **CLOSE)
        assert actual[0].is_contiguous()
    with pytest.raises(ValueError, match="softcap"):
        attend(module, q, k, v, None, softcap=1.0)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_gradient_checkpointing():
    for build in (bert, gpt2):
        plain = build()
        patched = twin(plain)
        fusedops.patch(patched)
        for model in (plain, patched):
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        same_model(plain, patched, inputs(plain))


def test_two_models_of_one_config_are_patched_one_by_one(calls):
    config = gpt2().config
    first, second = (transformers.GPT2LMHeadModel(config).eval() for _ in range(2))
    before = copy.deepcopy(config.__dict__)
    fusedops.patch(first)
    second(**inputs(second))
    assert not calls
    assert first.config is second.config is config
    assert config.__dict__ == before
    assert config._attn_implementation == "sdpa"
    first(**inputs(first))
    assert calls["scaled_dot_product_attention"] == 2


def test_the_attention_modules_config_is_the_models_config():
    model = bert()
    fusedops.patch(model)
    attention = model.bert.encoder.layer[0].attention.self
    assert isinstance(attention.config, object)
    assert attention.config == model.config
    assert attention.config.hidden_size == 32
    assert attention.config.to_dict() == model.config.to_dict()
    assert repr(attention.config) == repr(model.config)
    assert type(copy.deepcopy(attention.config)) is type(model.config)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = attention.config.no_such_name
    attention.config.name_for_a_test = 3
    assert model.config.name_for_a_test == 3
    other = copy.deepcopy(model.config)
    attention.config = other
    assert attention.config == other
    assert fusedops.unpatch(model)
    assert attention.config is other


def test_another_implementation_chosen_after_patching_is_honoured(calls):
    model = bert()
    fusedops.patch(model)
    batch = inputs(model)
    expected = model(**batch).logits
    calls.clear()
    model.set_attn_implementation("flex_attention")
    assert model.bert.encoder.layer[0].attention.self.config is model.config
    model.set_attn_implementation("eager")
    torch.testing.assert_close(attended(model(**batch).logits, batch), attended(expected, batch), **CLOSE)
    assert calls["scaled_dot_product_attention"] == 2


def test_other_implementations_are_left_alone():
    model = gpt2()
    model.config._attn_implementation = "flash_attention_2"
    report = fusedops.plan(model)
    assert {entry.reason for entry in report.left} == {"it runs 'flash_attention_2'; 'sdpa' and 'eager' are replaced"}


def test_a_subclass_with_its_own_attention_is_left_alone():
    model = gpt2()
    attention = model.transformer.h[0].attn

    class Mine(type(attention)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class Renamed(type(attention)):
        pass

    attention.__class__ = Mine
    model.transformer.h[1].attn.__class__ = Renamed
    report = fusedops.patch(model)
    assert type(attention) is Mine
    assert type(model.transformer.h[1].attn).__name__ == "FusedRenamed"
    assert not any(entry.path == "transformer.h.0.attn" for entry in report.replaced)
