"""The process behind :class:`fusedops.autotune.workers.Worker`: ``python -m fusedops.autotune.worker``.

Requests come on standard input, answers go to what was standard output; a line of JSON each. Every answer but the last
to a request has ``"more": true``. The process ends with its input, whatever it is doing.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

import torch

from fusedops.autotune.bench import LocalBench, _told
from fusedops.autotune.compiling import CompileReport
from fusedops.autotune.operator import Config, Operator
from fusedops.autotune.protocol import CandidateFailed, CandidateWrong, Unmeasurable


class _Server:
    """Answers the requests of one other process."""

    def __init__(self, requests: Iterator[dict[str, Any]], answers: TextIO) -> None:
        self._requests, self._answers = requests, answers
        self._writing = threading.Lock()
        self._device = torch.device("cpu")
        self._operator: Operator[Any, Any] | None = None
        self._bench = LocalBench(self._device)

    def serve(self) -> None:
        self._greet(next(self._requests)["device"])
        for request in self._requests:
            do = request.pop("do")
            try:
                answer = getattr(self, f"_do_{do}")(**request)
            except Unmeasurable as error:
                answer = {"unmeasurable": str(error)}
            except Exception as error:
                answer = {"error": f"{do}: {_told(error)}"}
            self._say(answer)

    def _greet(self, device: str) -> None:
        try:
            # The environment shows no other GPU.
            self._device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
            torch.empty(1, device=self._device)
            self._bench = LocalBench(self._device)
            self._say({"ready": os.getpid()})
        except Exception as error:
            self._say({"error": _told(error)})

    def _say(self, answer: dict[str, Any]) -> None:
        with self._writing:  # compiling threads speak too
            print(json.dumps(answer), file=self._answers, flush=True)

    def _do_open(self, operator: str, problem: dict[str, Any]) -> dict[str, Any]:
        module, _, name = operator.partition(":")
        found: Operator[Any, Any] = getattr(importlib.import_module(module), name)
        self._operator = found
        self._bench.open(found, found.problem_from_json(problem))
        return {"opened": operator}

    def _do_compile(self, configs: list[Any], limit_s: float | None, threads: int, each_s: float) -> dict[str, Any]:
        candidates = self._read(configs)
        index = {config: i for i, config in enumerate(candidates)}

        def started(config: Config) -> None:
            self._say({"began": index[config], "more": True})

        def finished(config: Config, report: CompileReport) -> None:
            self._say({"finished": index[config], "report": report.to_json(), "more": True})

        reports = self._bench.compile(candidates, limit_s, finished, threads=threads, each_s=each_s, started=started)
        return {"stuck": any(report.timed_out for report in reports.values())}

    def _do_check(self, config: Any) -> dict[str, Any]:
        (candidate,) = self._read([config])
        self._bench.prepare()
        self._say({"prepared": True, "more": True})
        try:
            seconds = self._bench.check(candidate)
        except CandidateFailed as error:
            wrong = isinstance(error, CandidateWrong)
            return {"failed": str(error), "wrong": wrong, "lost": self._bench.lost()}
        return {"seconds": seconds}

    def _do_time(self, configs: list[Any], counts: list[int]) -> dict[str, Any]:
        candidates = self._read(configs)
        index = {config: i for i, config in enumerate(candidates)}
        self._bench.prepare(reference=False)
        self._say({"prepared": True, "more": True})
        for config, sample in self._bench.samples(candidates, counts):
            if sample is None:
                self._say({"began": index[config], "more": True})
            elif isinstance(sample, CandidateFailed):
                lost = self._bench.lost()
                self._say({"sampled": index[config], "failed": str(sample), "lost": lost, "more": True})
            else:
                self._say({"sampled": index[config], "seconds": sample, "more": True})
        return {"timed": len(candidates)}

    def _read(self, configs: list[Any]) -> list[Config]:
        if self._operator is None:
            raise ValueError("no problem has been opened")
        return [self._operator.config.from_json(config) for config in configs]


def _requests() -> Iterator[dict[str, Any]]:
    """Lines of standard input, read by a thread of its own: it notices the end though a kernel hangs."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)  # whoever asked is gone

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield json.loads(lines.get())


def main() -> None:
    # The compiler's libraries and the kernels print to the process's standard output: answers get a pipe of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _Server(_requests(), answers).serve()


if __name__ == "__main__":
    main()
