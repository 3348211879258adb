"""The generation example gives transformers' own greedy text, with every kind of cache and with speculation."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import fusedops

pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed")

EXAMPLE = Path(__file__).parents[2] / "examples" / "generate_gpt2.py"
PROMPT = [5, 9, 11, 5, 9] * 5


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("generate_gpt2", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def expected(example):
    """Greedy, by transformers, with its margins: how far the best token is above the second."""
    model = example.random_model()
    with torch.no_grad():
        ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
        top = model(ids).logits[0, len(PROMPT) - 1 : -1].topk(2).values
    return ids[0].tolist(), float((top[:, 0] - top[:, 1]).min())


@pytest.mark.parametrize("speculate", [0, 4])
@pytest.mark.parametrize("cache", ["contiguous", "paged"])
def test_greedy_text_is_transformers(example, expected, cache, speculate):
    ids, margin = expected
    assert margin > 1e-3  # far more than rounding moves a logit
    model = example.random_model()
    fusedops.patch(model)
    found, steps = example.generate(model, PROMPT, 12, cache=cache, speculate=speculate)
    assert found == ids
    assert steps <= 12 if speculate else steps == 12


def test_speculation_takes_fewer_steps_where_text_repeats(example):
    """A model that says after each token what has followed it before: every proposal is right."""
    model = example.random_model()
    follows = {5: 9, 9: 11, 11: 5}

    def step(_, ids, cache):
        logits = torch.zeros(1, ids.shape[1], 512)
        for place, token in enumerate(ids[0].tolist()):
            logits[0, place, follows[token]] = 1.0
        cache._appended = ids.shape[1]
        return logits

    original, example.step = example.step, step
    try:
        plain, many = example.generate(model, [5, 9, 11, 5], 12)
        quick, few = example.generate(model, [5, 9, 11, 5], 12, speculate=3)
    finally:
        example.step = original
    assert plain == quick
    assert (many, few) == (12, 4)


@pytest.mark.parametrize("cache", ["int8", "fp8"])
def test_quantised_caches_move_logits_little(example, cache):
    model = example.random_model()
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        logits = model(ids).logits
        kept = example.make_cache(model, 1, len(PROMPT), cache)
        example.step(model, ids[:, :20], kept)
        kept.advance(20)
        found = example.step(model, ids[:, 20:], kept)
    difference = (found - logits[:, 20:]).abs().max()
    assert 0 < difference < (0.05 if cache == "int8" else 0.2) * logits.std()


def test_the_command(example, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["generate_gpt2.py", "--tokens", "5", "--cache", "paged", "--speculate", "2"])
    example.main()
    out = capsys.readouterr().out
    assert "replaced" in out
    assert "5 tokens in" in out
    monkeypatch.setattr(sys, "argv", ["generate_gpt2.py", "--speculate", "16"])
    with pytest.raises(SystemExit):
        example.main()
    assert "--speculate takes 0 to 15" in capsys.readouterr().err
