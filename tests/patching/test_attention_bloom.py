"""BLOOM: attention with ALiBi whose scores its forward writes out."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fusedops
from fusedops.patching import attention_bloom
from tests.patching.attention_models import VOCABULARY, bloom, check_same


def twins():
    plain = bloom()
    patched = copy.deepcopy(plain)
    report = fusedops.patch(patched)
    assert sum(entry.original == "BloomAttention" for entry in report.replaced) == 2
    return plain, patched


MASKS = {
    "none": None,
    "right": torch.tensor([[1] * 9, [1] * 5 + [0] * 4]),
    "left": torch.tensor([[0] * 4 + [1] * 5, [1] * 9]),
    "holes": torch.tensor([[1, 1, 0, 1, 0, 1, 1, 1, 1], [1] * 9]),
}


def batch_of(padding):
    batch = {"input_ids": torch.randint(3, VOCABULARY, (2, 9))}
    return batch if MASKS[padding] is None else {**batch, "attention_mask": MASKS[padding]}


@pytest.mark.parametrize("padding", MASKS)
def test_logits_and_gradients(padding, calls):
    plain, patched = twins()
    check_same(plain, patched, batch_of(padding))
    assert calls["scaled_dot_product_attention"] == 2


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(cache):
    plain, patched = twins()
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache, "eos_token_id": None}
    batch = batch_of("left")
    expected, actual = (model.generate(**batch, **options) for model in (plain, patched))
    assert torch.equal(actual, expected)


def test_weights_are_returned_when_asked_for(calls):
    plain, patched = twins()
    batch = batch_of("right")
    expected, actual = (model(**batch, output_attentions=True).attentions for model in (plain, patched))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert not calls["scaled_dot_product_attention"]
    weights = []
    patched.transformer.h[0].self_attention.register_forward_hook(lambda m, a, output: weights.append(output[1]))
    patched(**batch)
    torch.testing.assert_close(weights[0], expected[0], rtol=1e-4, atol=1e-5)
    assert calls["scaled_dot_product_attention"] == 1


def test_dropout_is_drawn_in_training_alone(monkeypatch):
    _, patched = twins()
    drawn = []
    own = attention_bloom.scaled_dot_product_attention
    monkeypatch.setattr(
        attention_bloom,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: drawn.append(kwargs["dropout_p"]) or own(*args, **kwargs),
    )
    for block in patched.transformer.h:
        block.self_attention.attention_dropout.p = 0.5
    batch = batch_of("none")
    patched.eval()(**batch)
    patched.train()(**batch)
    assert drawn == [0.0, 0.0, 0.5, 0.5]


def test_mask_and_alibi_are_added_once_for_all_layers(monkeypatch):
    _, patched = twins()
    biases = []
    own = attention_bloom._bias
    monkeypatch.setattr(attention_bloom, "_bias", lambda *args: biases.append(own(*args)) or biases[-1])
    patched(**batch_of("right"))
    patched(**batch_of("left"))
    assert biases[0] is biases[1]
    assert biases[2] is biases[3]
    assert not torch.equal(biases[0], biases[2])


def test_a_mask_that_was_written_to_is_added_again():
    alibi, mask = torch.randn(4, 1, 5), torch.zeros(2, 1, 5, 5)
    first = attention_bloom._bias(alibi, mask, 2)
    assert attention_bloom._bias(alibi, mask, 2) is first
    mask[..., 0] = 1.0
    torch.testing.assert_close(attention_bloom._bias(alibi, mask, 2), alibi.view(2, 2, 1, 5) + mask)


def test_another_forward_is_left_alone(monkeypatch):
    """As a version of transformers might have it."""
    kind = type(bloom().transformer.h[0].self_attention)
    own = kind.forward

    def forward(
        self, hidden_states, residual, alibi, attention_mask, layer_past=None, use_cache=False,
        output_attentions=False, **kwargs,
    ):  # fmt: skip
        return own(self, hidden_states, residual, 2 * alibi, attention_mask, layer_past)

    def other_arguments(self, hidden_states, alibi):
        return own(self, hidden_states, hidden_states, alibi, None)

    for changed, reason in (
        (forward, "computes something else in this version of transformers"),
        (other_arguments, "its forward takes hidden_states, alibi"),
    ):
        monkeypatch.setattr(kind, "forward", changed)
        assert reason in attention_bloom._learn.__wrapped__(kind)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.__dict__.update(pretraining_tp=2, slow_but_exact=True), "slow_but_exact"),
        (lambda m: setattr(m, "beta", 0.5), "its beta is not 1"),
        (lambda m: setattr(m, "attention_dropout", nn.Identity()), "attention_dropout"),
        (lambda m: m.register_forward_hook(lambda *_: None), "it has forward hooks"),
    ],
    ids=["slices", "beta", "dropout", "hook"],
)
def test_left_alone(change, reason):
    model = bloom()
    change(model.transformer.h[1].self_attention)
    left = {entry.path: entry.reason for entry in fusedops.plan(model).left}
    assert reason in left["transformer.h.1.self_attention"]
    assert "transformer.h.0.self_attention" not in left


def test_unpatch_and_pickle():
    plain, patched = twins()
    batch = batch_of("right")
    copied = copy.deepcopy(patched)
    assert type(copied.transformer.h[0].self_attention) is type(patched.transformer.h[0].self_attention)
    fusedops.unpatch(patched)
    assert torch.equal(patched(**batch).logits, plain(**batch).logits)
