"""Kernels are right with any tile shape: a configuration changes the speed alone."""

from __future__ import annotations

import pytest
import torch

from fusedops.attention.operands import Operands, _describable
from fusedops.attention.tuning import AttentionConfig, copies_by_descriptors
from fusedops.runtime.device import device_facts
from tests.attention.problems import Problem, check

# Queries and keys a tile; the second mask shape sums over tiles of queries.
TILES = [(16, 64), (64, 16), (128, 32), (32, 128)]


@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t[0]}x{t[1]}")
@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
def test_every_tile_shape(kernel_runner, monkeypatch, tile, causal):
    """Lengths that no tile divides, diagonals that cross tiles in every way."""
    monkeypatch.setattr(Operands, "config", lambda self, kernel, *moving: AttentionConfig(*tile, 4, 1))
    check(Problem(heads=2, kv_heads=1, q=70, k=90, causal=causal), kernel_runner, torch.float32)


@pytest.mark.parametrize("tile", TILES[:2], ids=lambda t: f"{t[0]}x{t[1]}")
@pytest.mark.parametrize("shape", [(1, 1, 40, 70), (1, 1, 1, 70)], ids=["per query", "broadcast"])
def test_the_gradient_of_a_mask(kernel_runner, monkeypatch, tile, shape):
    monkeypatch.setattr(Operands, "config", lambda self, kernel, *moving: AttentionConfig(*tile, 4, 1))
    problem = Problem(heads=1, kv_heads=1, q=40, k=70, mask="float", mask_shape=shape, causal=True)
    check(problem, kernel_runner, torch.float32)


VARIANTS = {
    "descriptors": {},
    "persistent": {"persistent": True},
    "specialized": {"persistent": True, "specialize": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("window", [None, (30, 0)], ids=["", "window"])
def test_tiles_copied_by_descriptors(kernel_runner, monkeypatch, variant, window):
    """A descriptor ends at each head's last row: NaN beyond, lengths that no tile divides, groups, any head size."""
    if kernel_runner.name == "gpu" and not copies_by_descriptors(device_facts(kernel_runner.device)):
        pytest.skip("this GPU has no tensor descriptors")

    def config(self, kernel, *moving):
        descriptors = bool(moving)
        assert all(map(_describable, moving))
        forward = VARIANTS[variant] if kernel == "forward" else {}
        return AttentionConfig(64, 32, 4, 2, descriptors, **forward)

    monkeypatch.setattr(Operands, "config", config)
    problem = Problem(batch=2, heads=2, kv_heads=1, q=70, k=100, d=24, causal="bottom_right", window=window)
    inputs = problem.inputs(kernel_runner.device, torch.float16)
    inputs = [t if t is None else _among_nan(t) for t in inputs]
    check(problem, kernel_runner, torch.float16, inputs=inputs)


def _among_nan(tensor):
    """The same rows with rows of NaN after those of each head."""
    batch, heads, length, size = tensor.shape
    memory = torch.full((batch, heads, length + 40, size), float("nan"), dtype=tensor.dtype, device=tensor.device)
    view = memory[:, :, :length]
    return view.copy_(tensor.detach()).requires_grad_()


def _halves(*shape):
    return torch.empty(shape, dtype=torch.float16)


@pytest.mark.parametrize(
    ("make", "described"),
    [
        (lambda: _halves(2, 3, 70, 64), True),
        (lambda: _halves(2, 70, 3, 64).transpose(1, 2), True),
        (lambda: _halves(2, 3, 70, 20), False),
        (lambda: _halves(2, 3, 70, 65)[..., :64], False),
        (lambda: _halves(2, 3, 70, 72)[..., 1:65], False),
        (lambda: _halves(1, 3, 70, 64).expand(2, -1, -1, -1), False),
    ],
    ids=["plain", "transposed", "rows of 40 bytes", "rows 130 bytes apart", "misaligned", "expanded"],
)
def test_what_a_descriptor_can_stand_for(make, described):
    assert _describable(make()) == described
