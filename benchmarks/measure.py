"""Timing, statistics and tables that the benchmarks share. Everything but the timer itself runs without a GPU."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Sample:
    """Durations of one thing, in seconds.

    Attributes:
        median, low, high: the median and the quartiles.
        count: how many were measured.
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Sample:
        if not seconds:
            raise ValueError("seconds must hold at least one duration; got none")
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0], 1)
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high, len(seconds))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """An interval that holds the true median with a probability of about 95 %, whatever the distribution.

    The number of values below the median is binomial(n, 1/2): the interval ends at the order statistics that are 1.96
    of its standard deviations, √n / 2, from the middle.
    """
    ordered = sorted(values)
    reach = len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))
    rank = max(0, math.floor(reach))
    return ordered[rank], ordered[-1 - rank]


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Sample:
    """Ratios of durations that were measured next to each other, so that a slow moment hits both alike."""
    return Sample.of([a / b for a, b in zip(numerators, denominators, strict=True)])


def interleave(runs: dict[str, Run], repeats: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Time each of ``runs`` on the host's clock ``repeats`` times, in turn, each round in the opposite order.

    Turning the order round takes out what running second costs or saves.
    """
    for run in runs.values():
        for _ in range(warm_up):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats):
        names = list(runs) if repeat % 2 == 0 else list(reversed(runs))
        for name in names:
            begin = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


class GpuTimer:
    """Times work on a GPU by its own clock (events), with the L2 cache flushed before every repeat.

    Before each measured call the queue is filled with flushes that take longer than the host needs to launch the
    call: so the events enclose the device's work alone, not the host's.

    Args:
        device: a CUDA or ROCm device.
    """

    # Four times the L2 of any device so far (H200: 60 MB); a smaller device gives what it can spare.
    _FLUSH_BYTES = 512 << 20

    def __init__(self, device: torch.device) -> None:
        free, _ = torch.cuda.mem_get_info(device)
        self._device = device
        self._flush = torch.empty(min(self._FLUSH_BYTES, free // 8) // 4, dtype=torch.int32, device=device)
        self._flush.zero_()
        torch.cuda.synchronize(device)
        begin, end = self._event(), self._event()
        begin.record()
        for _ in range(10):
            self._flush.zero_()
        end.record()
        torch.cuda.synchronize(device)
        self._flush_seconds = begin.elapsed_time(end) / 10e3

    def measure(self, runs: dict[str, Run], seconds: float, most: int = 50, least: int = 7) -> dict[str, Sample]:
        """Time ``runs`` in turn until about ``seconds`` are spent, between ``least`` and ``most`` repeats of each."""
        flushes = {name: self._flushes_for(run) for name, run in runs.items()}
        pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
        began = time.perf_counter()
        for repeat in range(most):
            names = list(runs) if repeat % 2 == 0 else list(reversed(runs))
            for name in names:
                begin, end = self._event(), self._event()
                for _ in range(flushes[name]):
                    self._flush.zero_()
                begin.record()
                runs[name]()
                end.record()
                pairs[name].append((begin, end))
                torch.cuda.synchronize(self._device)
            if repeat + 1 >= least and time.perf_counter() - began > seconds:
                break
        return {name: Sample.of([a.elapsed_time(b) / 1e3 for a, b in events]) for name, events in pairs.items()}

    def _flushes_for(self, run: Run) -> int:
        """How many flushes outlast the host's launch of ``run`` (also warms it up)."""
        host = []
        for _ in range(4):
            torch.cuda.synchronize(self._device)
            begin = time.perf_counter()
            run()
            host.append(time.perf_counter() - begin)
        torch.cuda.synchronize(self._device)
        # The first calls compile; the last are launches. Two of them, and a margin of a half.
        return min(64, 1 + int(1.5 * max(host[-2:]) / self._flush_seconds))

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)


def copy_of(moved: int, device: torch.device) -> Run:
    """A copy that moves so many bytes, read and written ones together: what memory-bound work is compared with."""
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def ceilings(timer: GpuTimer, device: torch.device) -> dict[str, float]:
    """What this device reaches with the simplest work: a copy (bytes read and written), a bfloat16 product.

    Returns:
        ``copy_bytes_per_second`` and ``product_flops_per_second``.
    """
    free, _ = torch.cuda.mem_get_info(device)
    source = torch.empty(min(1 << 30, free // 8), dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    size = 8192 if free > 4 << 30 else 4096
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    copy = timer.measure({"copy": lambda: target.copy_(source)}, 0.2)["copy"].median
    product = timer.measure({"product": lambda: a @ b}, 0.2)["product"].median
    return {"copy_bytes_per_second": 2 * source.numel() / copy, "product_flops_per_second": 2 * size**3 / product}


# --- work of an operator: floating-point operations, and the least bytes that must move -------------------------------


def linear_flops(rows: int, inputs: int, outputs: int, backward: bool) -> int:
    """``2 M K N`` for the product; the backward makes two products of that size (gradients of input and weight)."""
    return 2 * rows * inputs * outputs * (2 if backward else 1)


def norm_bytes(elements: int, itemsize: int, parameters: int, backward: bool, residual: bool = False) -> int:
    """Read x, write y; backward: read x and dy, write dx. Each of ``parameters`` is read (and its gradient written).

    With a residual the forward also reads it and writes the sum, and the backward also reads the sum's gradient (the
    gradient of the residual is that of x).

    Args:
        elements: of x.
        parameters: elements of weight and bias together.
    """
    tensors = (3 if backward else 2) + ((1 if backward else 2) if residual else 0)
    return itemsize * (tensors * elements + parameters * (2 if backward else 1))


# --- tables ----------------------------------------------------------------------------------------------------------


def human_seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1 or unit == "µs":
            return f"{seconds * scale:.3g} {unit}"
    raise AssertionError("the last unit takes every duration")


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is aligned left, the others right.

    Example:
        >>> print(markdown_table(("operator", "time"), [("norm", "3 µs")]))
        | operator | time |
        | --- | ---: |
        | norm | 3 µs |
    """
    lines = [columns, ["---", *("---:" for _ in columns[1:])], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
