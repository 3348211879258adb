"""attn_implementation="fusedops", its masks, and the Trainer's callback."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import transformers
from torch import nn
from transformers import masking_utils
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask, sdpa_mask

import fusedops
from fusedops.integrations import transformers as integration
from fusedops.integrations.transformers import FusedOpsCallback, StructuredMask, fused_attention, fused_mask
from tests.patching.attention_models import (
    DECODERS,
    ENCODERS,
    VOCABULARY,
    check_same,
    decoder,
    encoder_inputs,
)
from tests.patching.models import classes

PADDING = {
    "none": None,
    "full": torch.ones(2, 9, dtype=torch.bool),
    "right": torch.tensor([[1] * 9, [1] * 5 + [0] * 4]).bool(),
    "left": torch.tensor([[0] * 4 + [1] * 5, [1] * 9]).bool(),
}


def chosen(plain):
    other = copy.deepcopy(plain)
    other.set_attn_implementation("fusedops")
    return other


def ids(*shape):
    return torch.randint(3, VOCABULARY, shape)


def batch_of(padding):
    batch = {"input_ids": ids(2, 9)}
    return batch if PADDING[padding] is None else {**batch, "attention_mask": PADDING[padding].long()}


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name):
    plain = decoder(name)
    for padding in ("none", "left"):
        check_same(plain, chosen(plain), batch_of(padding))


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name):
    plain = ENCODERS[name]()
    check_same(plain, chosen(plain), encoder_inputs(name))


def test_it_is_chosen_when_a_model_is_made(tmp_path):
    model = decoder("gemma2", "fusedops")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="fusedops")
    assert loaded.config._attn_implementation == "fusedops"
    batch = batch_of("right")
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gemma2", "gpt_oss"])
def test_left_padded_generation(name, cache):
    plain = decoder(name)
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache, "eos_token_id": None}
    batch = batch_of("left")
    expected, actual = (
        model.generate(**batch, **options, output_logits=True, return_dict_in_generate=True)
        for model in (plain, chosen(plain))
    )
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(actual.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


def test_a_prompt_in_pieces_with_a_cache():
    plain = decoder("mistral")
    other, tokens = chosen(plain), ids(2, 9)
    results = []
    for model in (plain, other):
        cache = transformers.DynamicCache(config=model.config)
        pieces = [model(part, cache=cache).logits for part in tokens.split([4, 3, 2], 1)]
        results.append(torch.cat(pieces, 1))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_the_kernels_take_padding_windows_and_packing(kernel_runner):
    """Interpreted or on a GPU, against sdpa with the mask written out."""
    device = kernel_runner.device
    q, k, v = (torch.randn(2, heads, 9, 16, device=device) for heads in (2, 1, 1))
    packed = masking_utils.packed_sequence_mask_function(torch.tensor([[0] * 5 + [1] * 4, [0] * 9], device=device))
    masks = [
        fused_mask(
            2, 9, 9, attention_mask=PADDING["left"].to(device), mask_function=FUNCTIONS["window"], device=device
        ),
        fused_mask(2, 9, 9, mask_function=masking_utils.and_masks(FUNCTIONS["causal"], packed), device=device),
    ]
    for mask in masks:
        assert isinstance(mask, StructuredMask)
        out = fused_attention(nn.Module(), q, k, v, mask)[0].transpose(1, 2)
        expected = nn.functional.scaled_dot_product_attention(
            q, k.expand_as(q), v.expand_as(q), mask.dense(), enable_gqa=False
        )
        seen = mask.dense().any(-1, keepdim=True).expand_as(out)
        torch.testing.assert_close(out[seen], expected[seen], rtol=1e-4, atol=1e-5)


# The masks.

FUNCTIONS = {
    "causal": masking_utils.causal_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(3),
    "both sides": masking_utils.sliding_window_bidirectional_mask_function(2),
    "all": masking_utils.bidirectional_mask_function,
    "chunks": masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int)),
    "or": masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k < 2),
    "and": masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k != 3),
}


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_masks_written_out_are_sdpas(name, padding):
    """Also with keys of earlier calls, of which a window's cache has forgotten the first."""
    structured = 0
    places = [(9, 0, 0), (3, 6, 0), (1, 8, 0), (3, 6, 4), (4, 0, 0), (3, torch.tensor(6), 0)]
    for queries, q_offset, kv_offset in places:
        keys = 9 - kv_offset
        given = {
            "batch_size": 2, "q_length": queries, "kv_length": keys, "q_offset": q_offset, "kv_offset": kv_offset,
            "mask_function": FUNCTIONS[name], "attention_mask": PADDING[padding],
            "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "device": "cpu",
        }  # fmt: skip
        expected, mask = sdpa_mask(**given), fused_mask(**given)
        assert mask.shape == expected.shape
        assert mask.dtype == torch.bool
        assert torch.equal(mask & True, expected)
        assert type(mask & True) is torch.Tensor
        structured += isinstance(mask, StructuredMask)
    # Not: queries that stand elsewhere than at the last keys, or at a place that only the device knows.
    assert structured == (4 if name in ("causal", "window", "both sides") else 0)


def test_what_is_plainly_causal_is_no_mask():
    for padding in (None, PADDING["full"]):
        assert fused_mask(2, 9, 9, attention_mask=padding) is None
        assert fused_mask(2, 1, 9, 8, attention_mask=padding) is None
        window = masking_utils.sliding_window_causal_mask_function(9)
        assert fused_mask(2, 9, 9, mask_function=window, local_size=9, attention_mask=padding) is None
    for given in ({"attention_mask": PADDING["left"]}, {"allow_is_causal_skip": False}):
        mask = fused_mask(2, 9, 9, **given)
        assert (mask.left, mask.right, mask.documents) == (None, 0, None)
        with torch._C.DisableTorchFunctionSubclass():
            assert mask.untyped_storage().nbytes() <= 18
    window = masking_utils.sliding_window_causal_mask_function(4)
    mask = fused_mask(2, 9, 9, mask_function=window, local_size=4, attention_mask=PADDING["left"])
    assert (mask.left, mask.right) == (3, 0)


def test_a_structured_mask_is_the_dense_one_in_anybodys_hands():
    mask = fused_mask(2, 9, 9, attention_mask=PADDING["left"])
    dense = sdpa_mask(2, 9, 9, attention_mask=PADDING["left"])
    assert isinstance(mask, StructuredMask)
    assert (mask.shape, mask.ndim, mask.dim(), mask.device) == (dense.shape, 4, 4, dense.device)
    for use in (
        lambda m: m[:, :, :, :5],
        lambda m: m.clone(),
        lambda m: m.detach(),
        lambda m: torch.cat([m, m], 0),
        lambda m: torch.where(m, 0.0, -1.0),
        lambda m: m.to(torch.float32),
        copy.deepcopy,
        lambda m: m.sum(-1),
    ):
        assert type(use(mask)) is torch.Tensor
        assert torch.equal(use(mask), use(dense))
    q = torch.randn(2, 3, 9, 8)
    expected, actual = (nn.functional.scaled_dot_product_attention(q, q, q, m) for m in (dense, mask))
    assert torch.equal(actual, expected)


def _packed(name, **options):
    config = getattr(transformers, f"{DECODERS[name][0]}Config")(**DECODERS[name][1])
    config._attn_implementation = "fusedops"
    create = create_sliding_window_causal_mask if name == "mistral" else create_causal_mask
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
    mask = create(config, torch.randn(2, 9, 32), None, None, position_ids=positions, **options)
    return mask, config, create, positions


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_masks_of_packed_sequences(name):
    mask, config, create, positions = _packed(name)
    assert isinstance(mask, StructuredMask)
    assert mask.documents.tolist() == [[0, 0, 0, 0, 0, 1, 1, 2, 2], [0] * 9]
    assert mask.blocks() is mask.blocks()
    config._attn_implementation = "sdpa"
    expected = create(config, torch.randn(2, 9, 32), None, None, position_ids=positions)
    assert torch.equal(mask & True, expected)
    custom, *_ = _packed(name, and_mask_function=lambda b, h, q, k: k != 3)
    assert type(custom) is torch.Tensor


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_sequences_are_attended_to_one_by_one(name):
    plain = decoder(name)
    other = chosen(plain)
    # With a cache, transformers takes positions for nothing but positions.
    batch = {"input_ids": ids(1, 9), "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]]), "use_cache": False}
    check_same(plain, other, batch)
    alone = [other(part).logits for part in batch["input_ids"].split([5, 4], 1)]
    torch.testing.assert_close(other(**batch).logits, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_padding_free_batches(name, positions, monkeypatch):
    calls = []
    own = integration.attention_varlen
    monkeypatch.setattr(integration, "attention_varlen", lambda *a, **k: calls.append(1) or own(*a, **k))
    model = chosen(decoder(name, max_position_embeddings=16))
    features = [{"input_ids": ids(length).tolist()} for length in (5, 4)]
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collator(features)
    batch.pop("labels")
    if not positions:  # then nothing but the lengths tells sequences apart
        batch["position_ids"] = torch.arange(9)[None]
    output = model(**batch, use_cache=False).logits
    assert len(calls) == 2
    alone = [model(torch.tensor([feature["input_ids"]])).logits for feature in features]
    torch.testing.assert_close(output, torch.cat(alone, 1), rtol=1e-3, atol=1e-3)
    output.sum().backward()


def test_wrong_packed_batches_raise():
    module, q, ends = nn.Module(), torch.randn(2, 2, 6, 8), torch.tensor([0, 4, 6])
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    with pytest.raises(ValueError, match="a batch of 1 is needed with cu_seq_lens_q; got 2"):
        fused_attention(module, q, q, q, None, **packed)
    with pytest.raises(ValueError, match="position_bias must be None"):
        fused_attention(module, q[:1], q[:1], q[:1], None, position_bias=torch.zeros(1, 1, 6, 6), **packed)
    padded = fused_mask(1, 6, 6, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]))
    with pytest.raises(ValueError, match="must have no padding"):
        fused_attention(module, q[:1], q[:1], q[:1], padded, **packed)


@pytest.mark.parametrize("padding", ["none", "right"])
def test_position_bias_softcap_and_sinks_together(padding):
    """All that any model asks for, against its definition."""
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    bias, sinks = torch.randn(1, 4, 9, 9, requires_grad=True), torch.randn(4, requires_grad=True)
    mask = fused_mask(2, 9, 9, attention_mask=PADDING[padding], allow_is_causal_skip=False)
    options = {"position_bias": bias, "softcap": 1.5, "s_aux": sinks, "scaling": 0.4}
    out, weights = fused_attention(nn.Module(), q, k, v, mask, **options)
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.4
    scores = (1.5 * torch.tanh(scores / 1.5) + bias).masked_fill(~mask.dense(), float("-inf"))
    probabilities = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(2, 4, 9, 1)], -1).softmax(-1)[..., :-1]
    expected = (probabilities @ v.repeat_interleave(2, 1)).transpose(1, 2)
    assert weights is None
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    grads = (torch.autograd.grad(x.sin().sum(), [bias, sinks]) for x in (out, expected))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_modules_sinks_are_heeded_where_their_model_does_not_pass_them():
    module, q = nn.Module(), torch.randn(1, 2, 4, 8)
    module.sinks = nn.Parameter(torch.randn(2))
    one, other = fused_attention(module, q, q, q, None)[0], fused_attention(nn.Module(), q, q, q, None)[0]
    torch.testing.assert_close(one, fused_attention(nn.Module(), q, q, q, None, s_aux=module.sinks)[0])
    assert not torch.allclose(one, other)


@pytest.mark.parametrize("regional", [False, True])
def test_compiled_models(regional):
    plain = decoder("mistral", num_hidden_layers=1)
    other, batch = chosen(plain), batch_of("left")
    if regional:  # the mask is made outside, and goes in
        for layer in other.model.layers:
            layer.compile(backend="eager", fullgraph=True)
        compiled = other
    else:
        compiled = torch.compile(other, backend="eager", fullgraph=True)
    expected, actual = (model(**batch, use_cache=False).logits[PADDING["left"]] for model in (plain, compiled))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_checkpointed_layers_get_the_mask():
    plain = decoder("mistral").train()
    for reentrant in (False, True):
        other = chosen(plain)
        other.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            other.enable_input_require_grads()
        check_same(plain, other, batch_of("left"))


def test_patch_has_nothing_to_do_there_and_replaces_the_rest():
    model = decoder("llama", "fusedops")
    before = classes(model)
    report = fusedops.patch(model, strict=True)
    running = [entry for entry in report.already if entry.rule == "attention"]
    assert [entry.calls for entry in running] == ["fusedops.attention (for 'fusedops')"] * 2
    assert any(entry.rule == "norm" for entry in report.replaced)
    kind = type(model.model.layers[0].self_attn)
    assert kind is before["model.layers.0.self_attn"]
    plain = copy.deepcopy(model)
    fusedops.unpatch(plain)
    plain.set_attn_implementation("sdpa")
    check_same(plain, model, batch_of("right"))


def test_a_patched_model_may_choose_it_later():
    plain = decoder("llama")
    patched = copy.deepcopy(plain)
    fusedops.patch(patched)
    patched.set_attn_implementation("fusedops")
    attention = patched.model.layers[0].self_attn
    assert attention.config is patched.config
    check_same(plain, patched, batch_of("left"))


# The Trainer.


def _train(model, folder, callbacks, **options):
    tokens = torch.arange(3, 3 + 8 * 6).remainder(VOCABULARY - 3).add(3).view(8, 6)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, seed=3, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Spy(transformers.TrainerCallback):
    def __init__(self):
        self.kinds = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.kinds.append(type(model.model.layers[0].self_attn).__name__)


@pytest.mark.parametrize("unpatch", [True, False])
def test_trainer(unpatch, tmp_path, caplog):
    plain = decoder("llama")
    model, spy, callback = copy.deepcopy(plain), Spy(), FusedOpsCallback(unpatch=unpatch, exclude="*.norm")
    before = classes(model)
    expected = _train(plain, tmp_path, [])
    with caplog.at_level(logging.INFO, "fusedops"):
        losses = _train(model, tmp_path, [callback, spy])
    assert losses == pytest.approx(expected, abs=2e-3)
    assert losses[0] != losses[-1]
    assert spy.kinds == ["FusedLlamaAttention"] * 4
    assert (classes(model) == before) is unpatch
    assert "model.norm" not in {entry.path for entry in callback.report.replaced}
    logged = [record for record in caplog.records if record.name == integration.__name__]
    assert len(logged) == 1
    assert "LlamaAttention" in logged[0].getMessage()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_trainer_leaves_what_was_patched_before(tmp_path):
    model = decoder("llama")
    fusedops.patch(model, include="*.self_attn")
    before = classes(model)
    _train(model, tmp_path, [FusedOpsCallback(unpatch=True, verbose=False)])
    assert classes(model) == before


def test_trainer_strict(tmp_path):
    model = decoder("llama")
    attention = model.model.layers[0].self_attn
    attention.forward = lambda *args, **kwargs: type(attention).forward(attention, *args, **kwargs)
    with pytest.raises(fusedops.PatchError, match="replaced on the instance"):
        _train(model, tmp_path, [FusedOpsCallback(strict=True)])
