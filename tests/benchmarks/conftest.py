"""What the benchmarks ask of a GPU, answered for the CPU."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks import compare

CEILINGS = {"copy_bytes_per_second": 4e12, "product_flops_per_second": 7e14}


class Event:
    """``torch.cuda.Event`` by the host's clock."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, later: Event) -> float:
        return (later.seconds - self.seconds) * 1e3


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that :class:`benchmarks.measure.GpuTimer` can time."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 20))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(compare, "ceilings", lambda timer, device: CEILINGS)
    return torch.device("cpu")
