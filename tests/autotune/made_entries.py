"""Devices and entries for tests of the store: nothing was measured."""

from __future__ import annotations

from typing import Any

from fusedops.autotune.entries import Candidate, Entry
from fusedops.autotune.identity import Identity
from fusedops.autotune.versions import VERSIONS
from fusedops.runtime.device import TARGETS

H100 = Identity.of(TARGETS["sm_90"])
MI300X = Identity.of(TARGETS["gfx942"])

CANDIDATES = (
    Candidate({"block_m": 64, "looped": False}, "timed", 1e-5, 2e-7),
    Candidate({"block_m": 32, "looped": False}, "timed", 2e-5, 2e-7),
    Candidate({"block_m": 128, "looped": False}, "demoted", reason="96 bytes of registers are spilled"),
    Candidate({"block_m": 256, "looped": True}, "failed", reason="out of shared memory\nline two"),
)


def entry(width: int = 64, **changes: Any) -> Entry:
    values: dict[str, Any] = {
        "op": "norm",
        "problem": {"width": width, "dtype": "bfloat16", "dropout": False, "mask": None},
        "config": {"block_m": 64, "looped": False},
        "source": "tuned",
        "median": 1e-5,
        "spread": 2e-7,
        "default": {"block_m": 32, "looped": False},
        "default_median": 2e-5,
        "date": "2025-06-01T12:00:00Z",
        "versions": dict.fromkeys(VERSIONS, "1.2.3"),
        "candidates": CANDIDATES,
    }
    return Entry(**{**values, **changes})


def by_key(*entries: Entry) -> dict[str, Entry]:
    return {entry.key: entry for entry in entries}
