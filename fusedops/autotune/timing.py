"""How long one run takes on a device, in seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

import torch

from fusedops.runtime.device import device_facts

# Takes one sample: seconds a run.
Sampler = Callable[[], float]
Run = Callable[[], object]


class Timer(Protocol):
    def prepare(self, run: Run) -> Sampler:
        """Warm up, and return what takes one sample after the other. What ``run`` raises passes."""


class HostTimer:
    """Times what is finished when it returns: kernels in the interpreter, by the processor's time that they take.

    Other processes share the processor: by the clock, most of what is measured may be theirs.
    """

    _LEAST = 1e-6  # below what the clock tells apart

    def prepare(self, run: Run) -> Sampler:
        run()

        def sample() -> float:
            begin = time.process_time()
            run()
            return max(time.process_time() - begin, self._LEAST)

        return sample


class GraphTimer:
    """Times a GPU's work by its own clock, without the host: runs are captured in a CUDA graph and replayed.

    A sample is one replay of as many runs as take a millisecond, beginning with a cold L2 cache: a buffer of twice
    its size is written first. Where a run cannot be captured, the same number of runs is launched one by one.

    Args:
        device: a CUDA or ROCm device with an index, the current one whenever this timer is used.
    """

    SECONDS = 1e-3
    MOST_RUNS = 256
    _WARM_UP = 3

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Captures need a stream other than the default one, and of this device.
        self._stream = torch.cuda.Stream(device)
        self._flush = torch.empty(2 * device_facts(device).cache, dtype=torch.int8, device=device)

    def prepare(self, run: Run) -> Sampler:
        torch.cuda.synchronize(self._device)
        # The outer context: a capture that fails does not leave its own.
        with torch.cuda.stream(self._stream):
            for _ in range(self._WARM_UP):
                run()
            runs = self._runs(run)
            graph = self._captured(run, runs)
        torch.cuda.synchronize(self._device)

        def launch() -> None:
            for _ in range(runs):
                run()

        replay = launch if graph is None else graph.replay
        return lambda: self._timed(replay) / runs

    def _runs(self, run: Run) -> int:
        """How many fill a sample. The host's launches count here, so the guess is refined with as many runs."""
        guess = 1
        for _ in range(2):

            def launch(count: int = guess) -> None:
                for _ in range(count):
                    run()

            seconds = self._timed(launch) / guess
            guess = min(self.MOST_RUNS, max(1, math.ceil(self.SECONDS / max(seconds, 1e-9))))
        return guess

    def _captured(self, run: Run, runs: int) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads of the process may go on allocating memory meanwhile.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                for _ in range(runs):
                    run()
            graph.replay()  # the first replay uploads it
            torch.cuda.synchronize(self._device)
        except RuntimeError:  # something in it waits for the device, or is not allowed in a graph
            torch.cuda.synchronize(self._device)  # raises where the device itself is lost
            return None
        return graph

    def _timed(self, work: Run) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def timer_for(device: torch.device) -> Timer:
    return GraphTimer(device) if device.type == "cuda" else HostTimer()
