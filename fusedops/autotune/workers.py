"""Measures candidates in a process of its own, which one of them may hang or crash."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusedops.autotune.bench import LocalBench, default_threads, device_lock, pin
from fusedops.autotune.compiling import EACH_S, CompileReport
from fusedops.autotune.operator import Config, Operator
from fusedops.autotune.protocol import (
    Bench,
    CandidateFailed,
    CandidateWrong,
    CannotSpawn,
    Finished,
    Unmeasurable,
    ignore,
)


def reference_to(operator: Operator[Any, Any]) -> str:
    """Where another process finds an operator: ``package.module:NAME``, in the module of its problem's type.

    Raises:
        CannotSpawn: it lies in no importable module under a name of its own.
    """
    for module in dict.fromkeys((operator.problem.__module__, operator.config.__module__, operator.trials)):
        for name, value in vars(sys.modules.get(module, sys)).items():
            if value is operator and module != "__main__":
                return f"{module}:{name}"
    raise CannotSpawn(f"the operator {operator.name} lies in no module that another process could import")


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that a worker may take before it is killed.

    Attributes:
        start: until it has imported torch and found its device.
        compile: a candidate.
        prepare: to make inputs and compute the reference.
        check: a check.
        sample: one sample of a timing, preparations included.
    """

    start: float = 120.0
    compile: float = EACH_S
    prepare: float = 120.0
    check: float = 30.0
    sample: float = 30.0


class WorkerDied(Exception):  # noqa: N818
    """The worker ended, or was ended for taking too long. The message says which."""


class Worker:
    """A process that measures on one device. It is started on first use, and again after it died.

    Args:
        device: where; ``cpu`` for the interpreter.
        limits: how long it may take.

    Examples:
        >>> import torch
        >>> from fusedops.autotune.workers import Worker
        >>> with Worker(torch.device("cpu")) as worker:
        ...     worker.running
        False
    """

    def __init__(self, device: torch.device, limits: Limits | None = None) -> None:
        self.device = device
        self.limits = limits or Limits()
        self.starts = 0
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None
        self._busy = False  # has not answered in full
        self._errors: Any = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Make sure that it runs.

        Raises:
            CannotSpawn: it does not come up.
        """
        if self.running and not self._busy:
            return
        self.kill()  # what is in the midst of an answer that nobody waited for as well
        answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._answers = answers
        if not sys.executable:  # Python runs inside another program
            raise CannotSpawn("no process can be started: it is unknown where Python's executable lies")
        try:
            self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (open as long as the worker)
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "fusedops.autotune.worker"],
                env=worker_environment(self.device),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                start_new_session=True,  # a Ctrl-C is for us, who end the worker
            )
        except (OSError, ValueError) as error:
            raise CannotSpawn(f"no process can be started: {error}") from error
        self._reader = threading.Thread(target=_forward, args=(process, answers), name="fusedops worker", daemon=True)
        self._reader.start()
        self.starts += 1
        try:
            self.send(device=self.device.type)
            ready = self.receive(self.limits.start)
        except WorkerDied as death:
            raise CannotSpawn(f"the worker does not start: {death}") from death
        except BaseException:  # Ctrl-C: nobody else knows of the process yet
            self.kill()
            raise
        if "error" in ready:
            self.kill()
            raise CannotSpawn(f"the worker does not start: {ready['error']}")

    def send(self, **request: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._busy = True
        with contextlib.suppress(BrokenPipeError):  # it is dead, which shows when the answer does not come
            print(json.dumps(request), file=self._process.stdin, flush=True)

    def receive(self, limit_s: float) -> dict[str, Any]:
        """Its next message.

        Raises:
            WorkerDied: there is none, and no worker any more.
        """
        try:
            line = self._answers.get(timeout=limit_s)
        except queue.Empty:
            self.kill()
            raise WorkerDied(f"no answer within {limit_s:g} s") from None
        if line is None:
            raise WorkerDied(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        self._busy = answer.get("more", False)
        return answer

    def _last_words(self) -> str:
        process, errors = self._process, self._errors
        assert process is not None
        code = process.wait()
        errors.seek(0)
        said = [line.strip() for line in errors.read()[-4000:].splitlines() if line.strip()]
        self.kill()
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"the worker ended with {cause}" + (f": {said[-1][:300]}" if said else "")

    def kill(self) -> None:
        """End the process, if there is one. It holds nothing that would have to be saved."""
        process, self._process = self._process, None
        self._busy = False
        if process is not None:
            with contextlib.suppress(OSError):  # with the assemblers that it runs, where there are process groups
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
            if self._reader is not None:
                self._reader.join(5)
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError, ValueError):
                    assert pipe is not None
                    pipe.close()
        if self._errors is not None:
            self._errors.close()
            self._errors = None


def _forward(process: subprocess.Popen[str], answers: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    with contextlib.suppress(OSError, ValueError):  # the pipe was closed
        for line in process.stdout:
            answers.put(line)
    answers.put(None)


def worker_environment(device: torch.device) -> dict[str, str]:
    """Of a worker: sees one device, searches and records nothing, finds the modules that this process finds."""
    left_out = {"FUSEDOPS_BACKEND", "FUSEDOPS_RECORD_FILE", "TRITON_INTERPRET"}
    pinned = pin(device)
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {
        **kept,
        **pinned,
        **({} if device.type == "cuda" else {"TRITON_INTERPRET": "1"}),
        "FUSEDOPS_AUTOTUNE": "cached",
        # Imports pass over what is no string.
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path if isinstance(path, str)),
        "PYTHONSAFEPATH": "1",  # not also what happens to lie in the working folder
    }


# A candidate that kills its worker so many times is never run again. Once may have been an accident.
KILLS = 2


class WorkerBench:
    """Measures in a :class:`Worker`, which a candidate may hang or crash.

    Args:
        device: where; ``cpu`` for the interpreter.
        threads: how many candidates are compiled at once.
        limits: how long the worker may take.

    Raises:
        CannotSpawn: there can be no worker.
    """

    def __init__(self, device: torch.device, *, threads: int | None = None, limits: Limits | None = None) -> None:
        self._worker = Worker(device, limits)
        self._threads = threads or default_threads()
        self._about: dict[str, Any] | None = None
        self._kills: dict[Config, list[str]] = {}
        self._opened = 0  # the worker, by the number of its start, that has the problem in hand
        self._worker.start()

    def open(self, operator: Operator[Any, Any], problem: tuple) -> None:
        self._about = {"operator": reference_to(operator), "problem": operator.problem_json(problem)}
        self._kills = {}
        self._opened = 0
        self._ready()

    def compile(
        self, configs: Sequence[Config], limit_s: float | None = None, finished: Finished = ignore
    ) -> dict[Config, CompileReport]:
        began = time.monotonic()
        reports: dict[Config, CompileReport] = {}
        todo, threads = list(configs), self._threads
        while todo:
            left = None if limit_s is None else limit_s - (time.monotonic() - began)
            if left is not None and left <= 0 and reports:
                break
            # Of those that were compiled together when the worker died, each is tried alone: one of them did it.
            batch = todo if threads > 1 else todo[:1]
            running: set[Config] = set()
            try:
                self._compile(batch, left, threads, running, reports, finished)
            except WorkerDied as death:
                if not running:  # no candidate is to blame
                    raise Unmeasurable(f"the worker died before anything was compiled: {death}") from death
                for config in running if len(running) == 1 else ():
                    self._killed(config, str(death))
                    if self._is_bad(config):
                        reports[config] = CompileReport(error=self._reason(config))
                        finished(config, reports[config])
                first = [config for config in batch if config in running]
                threads = 1
                todo = first + [config for config in todo if config not in running]
            else:
                if threads > 1 or (left is not None and left <= 0):
                    break
            todo = [config for config in todo if config not in reports]
        return reports

    def _compile(
        self,
        batch: Sequence[Config],
        limit_s: float | None,
        threads: int,
        running: set[Config],
        reports: dict[Config, CompileReport],
        finished: Finished,
    ) -> None:
        self._ask("compile", configs=[c.to_json() for c in batch], limit_s=limit_s, threads=threads,
                  each_s=self._worker.limits.compile)  # fmt: skip
        stuck = False
        while True:
            answer = self._receive(self._worker.limits.compile + 30)
            if "began" in answer:
                running.add(batch[answer["began"]])
            elif "finished" in answer:
                config = batch[answer["finished"]]
                running.discard(config)
                reports[config] = CompileReport.from_json(answer["report"])
                finished(config, reports[config])
            else:
                stuck = answer["stuck"]
                break
        if stuck:  # a compiler that does not end would disturb the timing
            self._worker.kill()

    def check(self, config: Config) -> float:
        while True:
            if self._is_bad(config):
                raise CandidateFailed(self._reason(config))
            self._ask("check", config=config.to_json())
            self._prepared()
            try:
                answer = self._receive(self._worker.limits.check)
            except WorkerDied as death:
                self._killed(config, str(death))
                continue
            if answer.get("lost"):
                self._worker.kill()
                self._killed(config, answer["failed"])
                continue
            if "failed" in answer:
                raise (CandidateWrong if answer["wrong"] else CandidateFailed)(answer["failed"])
            return float(answer["seconds"])

    def time(self, configs: Sequence[Config], repeats: int) -> dict[Config, list[float] | CandidateFailed]:
        found: dict[Config, list[float] | CandidateFailed] = {}
        seconds: dict[Config, list[float]] = {config: [] for config in configs}
        with device_lock(self._worker.device):
            while True:
                for config in configs:
                    if self._is_bad(config):
                        found[config] = CandidateFailed(self._reason(config))
                left = [c for c in configs if c not in found and len(seconds[c]) < repeats]
                if not left:
                    break
                self._time(left, repeats, seconds, found)
        return {config: found.get(config, seconds[config]) for config in configs}

    def _time(
        self,
        configs: Sequence[Config],
        repeats: int,
        seconds: dict[Config, list[float]],
        found: dict[Config, list[float] | CandidateFailed],
    ) -> None:
        """As far as the worker lives."""
        counts = [repeats - len(seconds[config]) for config in configs]
        self._ask("time", configs=[config.to_json() for config in configs], counts=counts)
        self._prepared()
        running: Config | None = None
        try:
            while True:
                answer = self._receive(self._worker.limits.sample)
                if "began" in answer:
                    running = configs[answer["began"]]
                elif "seconds" in answer:
                    seconds[configs[answer["sampled"]]].append(answer["seconds"])
                elif answer.get("lost"):
                    self._worker.kill()
                    raise WorkerDied(answer["failed"])
                elif "failed" in answer:
                    found[configs[answer["sampled"]]] = CandidateFailed(answer["failed"])
                else:
                    return
        except WorkerDied as death:
            if running is None:
                raise Unmeasurable(f"the worker died before anything was timed: {death}") from death
            self._killed(running, str(death))

    def close(self) -> None:
        self._worker.kill()

    def _ready(self) -> None:
        """Make sure that a worker runs and has the problem in hand.

        Raises:
            CannotSpawn: it does not come up, or does not find the operator.
            Unmeasurable: it died.
        """
        if self._about is None:
            raise RuntimeError("the bench has no problem: open(operator, problem) comes first")
        try:
            self._worker.start()
            if self._opened == self._worker.starts:
                return
            self._worker.send(do="open", **self._about)
            answer = self._worker.receive(self._worker.limits.start)
        except WorkerDied as error:
            raise Unmeasurable(str(error)) from error
        if "error" in answer:
            raise CannotSpawn(f"the worker cannot {answer['error']}")
        self._opened = self._worker.starts

    def _ask(self, do: str, **request: Any) -> None:
        try:
            self._ready()
        except CannotSpawn as error:
            raise Unmeasurable(str(error)) from error
        self._worker.send(do=do, **request)

    def _prepared(self) -> None:
        """Wait for inputs and reference, which are no candidate's."""
        try:
            self._receive(self._worker.limits.prepare)
        except WorkerDied as death:
            raise Unmeasurable(f"inputs and a reference cannot be had: {death}") from death

    def _receive(self, limit_s: float) -> dict[str, Any]:
        answer = self._worker.receive(limit_s)
        if "unmeasurable" in answer:
            raise Unmeasurable(answer["unmeasurable"])
        if "error" in answer:
            raise RuntimeError(f"the worker does not understand: {answer['error']}")
        return answer

    def _killed(self, config: Config, reason: str) -> None:
        self._kills.setdefault(config, []).append(reason)

    def _is_bad(self, config: Config) -> bool:
        return len(self._kills.get(config, ())) >= KILLS

    def _reason(self, config: Config) -> str:
        return f"it killed its worker {KILLS} times: {self._kills[config][-1]}"


class Switching:
    """Measures in a worker process, and in this one what cannot be measured there.

    Args:
        device: where candidates run; ``cpu`` for the interpreter.
        threads: how many are compiled at once; default: as many as there are CPU cores, up to 8.

    Attributes:
        note: why it is this process; None while it is not.
    """

    def __init__(self, device: torch.device, threads: int | None = None) -> None:
        self.note: str | None = None
        self._device, self._threads = device, threads
        self._worker: WorkerBench | None = None
        self._local: LocalBench | None = None
        self._bench: Bench | None = None
        try:
            self._worker = WorkerBench(device, threads=threads)
        except CannotSpawn as error:
            self.note = str(error)

    def open(self, operator: Operator[Any, Any], problem: tuple) -> None:
        if self._worker is not None:
            try:
                self._worker.open(operator, problem)
            except CannotSpawn as error:
                self.note = str(error)
            else:
                self._bench, self.note = self._worker, None
                return
        self._local = self._local or LocalBench(self._device, threads=self._threads)
        self._local.open(operator, problem)
        self._bench = self._local

    def compile(
        self, configs: Sequence[Config], limit_s: float | None = None, finished: Finished = ignore
    ) -> dict[Config, CompileReport]:
        return self._opened.compile(configs, limit_s, finished)

    def check(self, config: Config) -> float:
        return self._opened.check(config)

    def time(self, configs: Sequence[Config], repeats: int) -> dict[Config, list[float] | CandidateFailed]:
        return self._opened.time(configs, repeats)

    def close(self) -> None:
        for bench in (self._worker, self._local):
            if bench is not None:
                bench.close()

    @property
    def _opened(self) -> Bench:
        if self._bench is None:
            raise RuntimeError("the bench has no problem: open(operator, problem) comes first")
        return self._bench
