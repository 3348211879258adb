"""Compile an operator's candidates, many at once: what they occupy, before anything runs.

Launches are captured on CPU tensors and compiled as :mod:`fusedops.inspection.offline` does, so this works with and
without the GPU. With it, Triton finds the machine code in its disk cache when the kernel is launched for the first
time: the cache's key consists of the kernel's source, the signature with its specialisations (dtypes, divisibility by
16, ones), the constants, the options and the target, of which none depends on where a tensor lies.
"""

from __future__ import annotations

import atexit
import queue
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch

from fusedops.autotune.operator import Config, Operator
from fusedops.autotune.resolve import using
from fusedops.autotune.trial import Trial, make_trial
from fusedops.inspection.offline import CompilationError, Compiled, capture_launches, compile_launch
from fusedops.inspection.resources import ToolError, ptxas_report
from fusedops.runtime.backend import backend
from fusedops.runtime.device import DeviceFacts

J = TypeVar("J")
R = TypeVar("R")

# Seconds that one candidate may take.
EACH_S = 60.0


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What a candidate's kernels compile to, or why they do not.

    Attributes:
        shared: bytes of shared memory a program, of the kernel that takes most; 0 where nothing is compiled.
        registers: a thread, likewise.
        spill_bytes: bytes a thread that do not fit into registers, likewise.
        warnings: what the assembler warns of: serialised matrix instructions.
        error: why it does not compile.
        timed_out: it took too long, and may be at it still.
        kernels: all of it, in the order of the launches; empty where another process compiled.
        issue: cycles of a multiprocessor to issue a step of the main loop; None where that was not asked for, or is not
            to be told (:func:`with_issue`).
    """

    shared: int = 0
    registers: int = 0
    spill_bytes: int = 0
    warnings: tuple[str, ...] = ()
    error: str | None = None
    timed_out: bool = False
    kernels: tuple[Compiled, ...] = field(default=(), repr=False, compare=False)
    issue: float | None = None

    def to_json(self) -> dict[str, Any]:
        names = ("shared", "registers", "spill_bytes", "warnings", "error", "timed_out")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> CompileReport:
        return cls(**{**value, "warnings": tuple(value["warnings"])})


def compile_configs(
    operator: Operator[Any, Any],
    problem: tuple,
    facts: DeviceFacts,
    configs: Sequence[Config],
    *,
    threads: int,
    limit_s: float | None = None,
    each_s: float = EACH_S,
    started: Callable[[Config], None] = lambda config: None,
    finished: Callable[[Config, CompileReport], None] = lambda config, report: None,
) -> dict[Config, CompileReport]:
    """Compile candidates for a device, which need not be there.

    Args:
        operator, problem: what the candidates are for.
        facts: of the device.
        configs: the candidates, the most promising first.
        threads: how many are compiled at once.
        limit_s: after so many seconds none is begun; those are missing from the result.
        each_s: a candidate that takes longer is given up; its thread cannot be stopped, and goes on in the background.
        started: called as a candidate is begun, in a compiling thread.
        finished: called with each candidate that is done with, in this thread.

    Raises:
        RuntimeError: Triton is missing, or interprets kernels in this process.
        NotImplementedError: the operator cannot make a trial of this problem.
    """
    trial = make_trial(operator, problem, torch.device("cpu"), empty=True)
    with capture_launches(facts):  # whatever keeps every candidate from being compiled is said once
        pass

    def work(config: Config) -> CompileReport:
        return compile_config(operator, problem, facts, config, trial)

    pool = _Pool(configs, work, started, limit_s, each_s)
    reports: dict[Config, CompileReport] = {}
    for config, report in pool.results(threads):
        if report is None:
            report = CompileReport(error=f"did not compile within {each_s:g} s", timed_out=True)
        reports[config] = report
        finished(config, report)
    return reports


def compile_config(
    operator: Operator[Any, Any], problem: tuple, facts: DeviceFacts, config: Config, trial: Trial
) -> CompileReport:
    """Compile one candidate in this thread. ``trial``: one of CPU tensors made with ``empty=True``."""
    try:
        with backend("triton"), using(operator, problem, config), capture_launches(facts) as launches:
            trial.run()
        kernels = tuple(compile_launch(launch, facts) for launch in launches)
        warnings = tuple(dict.fromkeys(text for kernel in kernels for text in _warnings(kernel, facts)))
    except (CompilationError, ToolError) as error:
        return CompileReport(error=str(error))
    except Exception as error:  # a launcher or the compiler may raise anything
        return CompileReport(error=f"{type(error).__name__}: {error}"[:2000])
    return replace(report_of(kernels), warnings=warnings)


def report_of(kernels: Sequence[Compiled]) -> CompileReport:
    return CompileReport(
        shared=max((kernel.shared for kernel in kernels), default=0),
        registers=max((kernel.registers for kernel in kernels), default=0),
        spill_bytes=max((kernel.spill_bytes for kernel in kernels), default=0),
        kernels=tuple(kernels),
    )


def with_issue(report: CompileReport) -> CompileReport:
    """A report that tells what its main loop takes to be issued: that of the kernel with the longest one."""
    from fusedops.inspection.figures import figures

    def cycles(kernel: Compiled) -> float:
        found = figures(kernel)
        if found.bound is None or found.loop is None or not found.loop.matrix or not found.loop.steps:
            return 0.0
        of_a_turn = found.bound.cycles.get("issue") or found.bound.cycles.get("vector units") or 0.0
        return of_a_turn / found.loop.steps

    return replace(report, issue=max(map(cycles, report.kernels), default=0.0) or None)


# "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to …"; the code tells the cause.
_SERIALISED = re.compile(r"\((C\d+)\)[^\n]*wgmma[^\n]*serialized[^\n]*")


def _warnings(kernel: Compiled, facts: DeviceFacts) -> Iterator[str]:
    # Triton does not keep what the assembler said, so it is asked again, where it may have something to say.
    if facts.vendor != "nvidia" or "wgmma.mma_async" not in kernel.asm["ptx"]:
        return
    for found in _SERIALISED.finditer(ptxas_report(kernel.asm["ptx"], facts.capability)):
        yield f"{kernel.name}: the assembler serialises wgmma ({found.group(1)})"


# Those that may be at work.
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_EXIT_S = 30.0


@atexit.register
def _wait() -> None:
    """Give what was given up time to end: Python aborts where a thread returns from C++ after its own end."""
    end = time.monotonic() + _EXIT_S
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))


class _Pool(Generic[J, R]):
    """Threads that work on jobs, each of which may take too long.

    Not a ThreadPoolExecutor, which would wait for a stuck thread when the process ends.
    """

    def __init__(
        self,
        jobs: Sequence[J],
        work: Callable[[J], R],
        started: Callable[[J], None],
        limit_s: float | None,
        each_s: float,
    ) -> None:
        self._jobs = jobs
        self._waiting = deque(range(len(jobs)))
        self._work, self._each_s = work, each_s
        self._started = started
        self._end = None if limit_s is None else time.monotonic() + limit_s
        self._began: dict[int, float] = {}
        self._lost: set[int] = set()
        self._lock = threading.Lock()
        # (job, result, what went wrong); (None, …) where a thread has nothing more to do.
        self._done: queue.SimpleQueue[tuple[int | None, R | None, BaseException | None]] = queue.SimpleQueue()

    def results(self, threads: int) -> Iterator[tuple[J, R | None]]:
        """Each job that was begun, as it is finished, with its result; None: it took too long."""
        running = 0
        try:
            for _ in range(max(1, min(threads, len(self._jobs)))):
                self._spawn()
                running += 1
            while running:
                try:
                    job, result, error = self._done.get(timeout=self._patience())
                except queue.Empty:
                    for lost in self._overdue():
                        yield self._jobs[lost], None
                        self._spawn()  # takes the stuck thread's place
                    continue
                if error is not None:
                    raise error
                if job is None:
                    running -= 1
                elif result is not None:
                    yield self._jobs[job], result
        finally:
            self._waiting.clear()

    def _spawn(self) -> None:
        # A daemon: the process may end while it is stuck.
        thread = threading.Thread(target=self._run, name="fusedops compiling", daemon=True)
        _threads.add(thread)
        thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                late = self._end is not None and time.monotonic() >= self._end
                # The first is always begun: the default comes first.
                if not self._waiting or (late and self._waiting[0] != 0):
                    break
                job = self._waiting.popleft()
                self._began[job] = time.monotonic()
                self._started(self._jobs[job])
            try:
                result = self._work(self._jobs[job])
            except BaseException as error:  # handed to the caller's thread
                if job not in self._lost:
                    self._done.put((job, None, error))
                return
            with self._lock:
                if job in self._lost:
                    return  # another thread has taken over
                del self._began[job]
            self._done.put((job, result, None))
        self._done.put((None, None, None))

    def _patience(self) -> float:
        with self._lock:
            oldest = min(self._began.values(), default=time.monotonic())
        return max(0.01, oldest + self._each_s - time.monotonic())

    def _overdue(self) -> list[int]:
        with self._lock:
            now = time.monotonic()
            overdue = [job for job, began in self._began.items() if now - began >= self._each_s]
            for job in overdue:
                del self._began[job]
                self._lost.add(job)
        return overdue
