"""Occupancy: by the rules of NVIDIA's occupancy calculator, and by AMD's."""

from __future__ import annotations

import pytest

from fusedops.inspection.occupancy import occupancy
from fusedops.runtime.device import TARGETS


@pytest.mark.parametrize(
    ("target", "warps", "registers", "shared", "blocks", "share", "limit"),
    [
        # Worked out by hand from the calculator's published granularities; no device was asked.
        ("sm_80", 8, 32, 0, 8, 1.0, "registers"),
        ("sm_80", 8, 33, 0, 6, 0.75, "registers"),  # 40 are handed out
        ("sm_80", 4, 128, 0, 4, 0.25, "registers"),
        ("sm_80", 4, 129, 0, 3, 0.1875, "registers"),  # 136: 15 warps, of which 12 on four schedulers
        ("sm_80", 4, 168, 0, 3, 0.1875, "registers"),
        ("sm_80", 8, 255, 0, 1, 0.125, "registers"),
        ("sm_80", 4, 32, 48 << 10, 3, 0.1875, "shared memory"),  # 49 KiB with what the system reserves, of 164
        ("sm_80", 4, 32, 81 << 10, 2, 0.125, "shared memory"),
        ("sm_80", 4, 32, (81 << 10) + 1, 1, 0.0625, "shared memory"),
        ("sm_80", 1, 16, 0, 32, 0.5, "blocks"),
        ("sm_75", 8, 64, 0, 4, 1.0, "registers"),
        ("sm_75", 4, 32, 32 << 10, 2, 0.25, "shared memory"),  # nothing is reserved
        ("sm_86", 8, 40, 0, 6, 1.0, "registers"),  # 48 warps
        ("sm_86", 1, 16, 0, 16, 1 / 3, "blocks"),
        ("sm_89", 1, 16, 0, 24, 0.5, "blocks"),
        ("sm_90", 4, 168, 0, 3, 0.1875, "registers"),
        ("sm_90", 8, 168, 0, 1, 0.125, "registers"),
        ("sm_90", 8, 128, 113 << 10, 2, 0.25, "registers"),  # 2 × 114 of 228 KiB
        ("sm_90", 8, 64, 232448, 1, 0.125, "shared memory"),
        ("sm_90", 32, 64, 0, 1, 0.5, "registers"),
        ("sm_90", 32, 65, 0, 0, 0.0, "registers"),  # such a block cannot be launched
        ("sm_120", 16, 16, 0, 3, 1.0, "threads"),
        # AMD: 512 vector registers a lane of each of four SIMDs, in units of 8, for at most 8 wavefronts.
        ("gfx942", 4, 64, 0, 8, 1.0, "registers"),
        ("gfx942", 4, 65, 0, 7, 0.875, "registers"),
        ("gfx942", 4, 128, 0, 4, 0.5, "registers"),
        ("gfx942", 4, 256, 0, 2, 0.25, "registers"),
        ("gfx942", 4, 264, 0, 1, 0.125, "registers"),
        ("gfx942", 8, 128, 0, 2, 0.5, "registers"),
        ("gfx942", 4, 32, 16 << 10, 4, 0.5, "shared memory"),
        ("gfx942", 4, 32, (16 << 10) + 1, 3, 0.375, "shared memory"),  # in units of 512 bytes
        ("gfx950", 4, 32, 40 << 10, 4, 0.5, "shared memory"),  # of 160 KiB
        # RDNA 3: 1,536 a lane of two SIMDs, in units of 24, for at most 16 wavefronts.
        ("gfx1100", 4, 96, 0, 8, 1.0, "registers"),
        ("gfx1100", 4, 97, 0, 6, 0.75, "registers"),
    ],
)  # fmt: skip
def test_blocks_a_multiprocessor(target, warps, registers, shared, blocks, share, limit):
    found = occupancy(target, warps, registers, shared)
    assert (found.blocks, found.limit) == (blocks, limit)
    assert found.share == pytest.approx(share)


def test_tensor_memory_has_512_columns():
    assert occupancy("sm_100", 4, 64, 0, tensor_columns=256)[::2] == (2, "tensor memory")
    assert occupancy("sm_100", 4, 64, 0, tensor_columns=512).blocks == 1
    assert occupancy("sm_100", 4, 64, 0).limit == "registers"


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_holds_a_small_program(target):
    found = occupancy(target, 1, 16, 0)
    assert found.blocks > 0
    assert 0 < found.share <= 1


@pytest.mark.parametrize("target", TARGETS)
def test_more_of_anything_holds_no_more_blocks(target):
    rows = [
        [occupancy(target, 4, registers, 0).blocks for registers in range(16, 256, 4)],
        [occupancy(target, 4, 32, shared).blocks for shared in range(0, 64 << 10, 1000)],
        [occupancy(target, warps, 32, 0).blocks for warps in range(1, 32)],
    ]
    assert all(row == sorted(row, reverse=True) for row in rows)


def test_an_unknown_target_is_named():
    with pytest.raises(ValueError, match="target must be one of sm_75"):
        occupancy("sm_1", 4, 32, 0)
