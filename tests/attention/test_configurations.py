"""Kernels are right with any tile shape: a configuration changes the speed alone."""

from __future__ import annotations

import pytest
import torch

from fusedops.attention.operands import Operands
from fusedops.attention.tuning import AttentionConfig
from tests.attention.problems import Problem, check

# Queries and keys a tile; the second mask shape sums over tiles of queries.
TILES = [(16, 64), (64, 16), (128, 32), (32, 128)]


@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t[0]}x{t[1]}")
@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
def test_every_tile_shape(kernel_runner, monkeypatch, tile, causal):
    """Lengths that no tile divides, diagonals that cross tiles in every way."""
    monkeypatch.setattr(Operands, "config", lambda self, kernel: AttentionConfig(*tile, 4, 1))
    check(Problem(heads=2, kv_heads=1, q=70, k=90, causal=causal), kernel_runner, torch.float32)


@pytest.mark.parametrize("tile", TILES[:2], ids=lambda t: f"{t[0]}x{t[1]}")
@pytest.mark.parametrize("shape", [(1, 1, 40, 70), (1, 1, 1, 70)], ids=["per query", "broadcast"])
def test_the_gradient_of_a_mask(kernel_runner, monkeypatch, tile, shape):
    monkeypatch.setattr(Operands, "config", lambda self, kernel: AttentionConfig(*tile, 4, 1))
    problem = Problem(heads=1, kv_heads=1, q=40, k=70, mask="float", mask_shape=shape, causal=True)
    check(problem, kernel_runner, torch.float32)
