"""Patched models run on torch's operators here, except in tests that take the ``runner`` fixture."""

from __future__ import annotations

import os

# Nothing is downloaded: models are made from configs or read from an installed package.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import contextlib
from collections import Counter

import pytest

import fusedops
from fusedops.patching import attention, chains, rules


@pytest.fixture(autouse=True)
def torch_backend(request):
    held = {"runner", "kernel_runner"} & set(request.fixturenames)
    with contextlib.nullcontext() if held else fusedops.backend("torch"):
        yield


@pytest.fixture
def calls(monkeypatch):
    """How often each fused function has been called by patched modules."""
    counter = Counter()

    def watch(module, name):
        function = getattr(module, name)

        def counted(*args, **kwargs):
            counter[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    watch(chains, "linear")
    watch(attention, "scaled_dot_product_attention")
    watch(rules, "layer_norm")
    watch(rules, "rms_norm")
    return counter
