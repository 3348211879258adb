"""A patched module is the same object: its class is a subclass of its own, and all goes back exactly."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.pytorch_utils import Conv1D

import fusedops
from tests.patching.models import MLP, bert, block, classes, gpt2, inputs

MODELS = {"sequential": block, "module": MLP, "bert": bert, "gpt2": gpt2}


def _run(model):
    return model(**inputs(model)).logits if hasattr(model, "config") else model.eval()(torch.ones(2, 8))


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_everything_goes_back_exactly(build):
    model = build()
    before = {name: (module, type(module), dict(module.__dict__)) for name, module in model.named_modules()}
    fusedops.patch(model)
    patched = classes(model)
    fused = [name for name, kind in patched.items() if kind is not before[name][1]]
    assert fused
    assert all(issubclass(kind, before[name][1]) for name, kind in patched.items())
    # Whoever only calls fused parts keeps its name, by which device maps and FSDP's policies look for layers.
    for name in fused:
        own = before[name][1].__name__
        assert patched[name].__name__ == (own if patched[name].fused_rule == "owner" else f"Fused{own}")
    assert fusedops.unpatch(model) == len(fused)
    for name, module in model.named_modules():
        same, kind, attributes = before[name]
        assert module is same
        assert type(module) is kind
        assert module.__dict__.keys() == attributes.keys()
        assert all(module.__dict__[key] is value for key, value in attributes.items())
    assert fusedops.unpatch(model) == 0


def test_parameters_state_and_flags_are_untouched():
    model = gpt2().train()
    model.transformer.h[0].requires_grad_(False)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    needs = {name: p.requires_grad for name, p in parameters.items()}
    fusedops.patch(model)
    assert dict(model.named_parameters(remove_duplicate=False)).keys() == parameters.keys()
    assert all(p is parameters[name] for name, p in model.named_parameters(remove_duplicate=False))
    assert all(b is buffers[name] for name, b in model.named_buffers())
    assert {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)} == needs
    assert model.lm_head.weight is model.transformer.wte.weight
    assert all(module.training for module in model.modules())
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(state)
    plain = gpt2()
    plain.load_state_dict(model.state_dict())


def test_isinstance_and_attributes():
    model = gpt2()
    fusedops.patch(model)
    part = model.transformer.h[0]
    assert isinstance(part.ln_1, nn.LayerNorm)
    assert isinstance(part.attn, GPT2Attention)
    assert isinstance(part.mlp.c_fc, Conv1D)
    assert part.ln_1.normalized_shape == (32,)
    assert part.ln_1.extra_repr() == "(32,), eps=1e-05, elementwise_affine=True, bias=True"
    assert "FusedLayerNorm((32,), eps=1e-05, elementwise_affine=True, bias=True)" in repr(model)
    assert type(part.ln_1).__module__ == nn.LayerNorm.__module__


def test_one_class_for_all_modules_of_a_class():
    first, second = block(), block()
    fusedops.patch(first)
    fusedops.patch(second)
    assert classes(first) == classes(second)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("build", [block, MLP, gpt2])
def test_pickled_and_loaded(build, protocol):
    model = build()
    fusedops.patch(model)
    loaded = pickle.loads(pickle.dumps(model, protocol))
    assert classes(loaded) == classes(model)
    torch.manual_seed(0)
    expected = _run(model)
    torch.manual_seed(0)
    assert torch.equal(_run(loaded), expected)
    assert fusedops.unpatch(loaded)


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_copied(build):
    model = build()
    fusedops.patch(model)
    twin = copy.deepcopy(model)
    assert classes(twin) == classes(model)
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
    if hasattr(model, "config"):
        assert twin.config is not model.config
    torch.manual_seed(0)
    expected = _run(model)
    torch.manual_seed(0)
    assert torch.equal(_run(twin), expected)
    fusedops.unpatch(twin)
    assert classes(twin) != classes(model)
    assert type(copy.copy(model)) is type(model)


class Reduced(nn.LayerNorm):
    """A class that pickles itself in a way of its own."""

    def __reduce__(self):
        return type(self), (self.normalized_shape,), {**self.__dict__, "marked": True}


def test_a_class_with_its_own_pickling_keeps_it():
    model = Reduced(4)
    fusedops.patch(model)
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded) is type(model)
    assert loaded.marked


def test_a_class_that_no_longer_matches_loads_unfused(monkeypatch):
    from fusedops.patching import classes, linears

    model = MLP()
    fusedops.patch(model)
    data = pickle.dumps(model)
    monkeypatch.setattr(classes, "_classes", {})
    monkeypatch.setattr(linears, "rewritten_methods", lambda kind, helpers: ({}, frozenset()))
    monkeypatch.setattr(linears, "_rewritten", {})
    loaded = pickle.loads(data).eval()
    assert type(loaded) is MLP
    x = torch.randn(2, 8)
    assert torch.equal(loaded(x), model.eval()(x))


def test_the_pickle_names_original_classes():
    model = block()
    fusedops.patch(model)
    stream = io.BytesIO()
    torch.save(model, stream)
    assert b"torch.nn.modules.normalization" in stream.getvalue()
    assert b"FusedLayerNorm" not in stream.getvalue()


def test_an_optimizer_made_before_patching_trains_on():
    plain, patched = gpt2().train(), None
    patched = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, patched)]
    fusedops.patch(patched)
    ids = inputs(plain, "no mask")["input_ids"]
    losses = []
    for model, optimizer in zip((plain, patched), optimizers, strict=True):
        torch.manual_seed(0)
        losses.append([])
        for step in range(4):
            if step == 2 and model is patched:
                fusedops.unpatch(model)
            loss = model(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


def test_a_module_in_two_models_is_patched_in_both():
    shared = nn.LayerNorm(8)
    first, second = nn.Sequential(shared), nn.Sequential(shared, nn.ReLU())
    fusedops.patch(first)
    assert type(second[0]).__name__ == "FusedLayerNorm"
    x = torch.randn(2, 8)
    assert torch.equal(second(x), first(x).relu())
    fusedops.unpatch(second)
    assert type(first[0]) is nn.LayerNorm
