"""Patched models run on torch's operators here, except in tests that take the ``runner`` fixture."""

from __future__ import annotations

import os

# Nothing is downloaded: models are made from configs or read from an installed package.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import contextlib
from collections import Counter

import pytest

import fusedops
from fusedops.patching import attention, attention_bloom, attention_eager, linears, norms


@pytest.fixture(autouse=True)
def torch_backend(request):
    held = {"runner", "kernel_runner"} & set(request.fixturenames)
    with contextlib.nullcontext() if held else fusedops.backend("torch"):
        yield


@pytest.fixture
def calls(monkeypatch):
    """How often each fused function has been called by patched modules."""
    counter = Counter()

    trying = []

    def watch(module, name):
        function = getattr(module, name)

        def counted(*args, **kwargs):
            counter[name] += not trying
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    watch(linears, "linear")
    watch(linears, "gated_linear")
    for name, function in linears.FUNCTIONS.items():
        # Those that stand in for torch's inside a module's own methods.
        def stands_in(*args, name=name, function=function, **kwargs):
            counter[f"F.{name}"] += 1
            return function(*args, **kwargs)

        monkeypatch.setitem(linears.FUNCTIONS, name, stands_in)
    for module in (attention, attention_eager, attention_bloom):
        watch(module, "scaled_dot_product_attention")
    watch(attention_eager, "attention")
    for module in (attention_eager, attention_bloom):  # what patch tries out is no call of a model's
        compare = module._compare

        def tried(*args, compare=compare):
            trying.append(True)
            try:
                return compare(*args)
            finally:
                trying.pop()

        monkeypatch.setattr(module, "_compare", tried)
    watch(norms, "layer_norm")
    watch(norms, "rms_norm")
    return counter
