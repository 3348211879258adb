"""Other libraries' loops run on torch's operators here, and nothing is downloaded."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

import fusedops


@pytest.fixture(autouse=True)
def torch_backend():
    with fusedops.backend("torch"):
        yield
