"""Rank configurations for a GPU that is not here, by what the compiler makes of them and the roofline model."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from fusedops.autotune.compiling import CompileReport, compile_configs, with_issue
from fusedops.autotune.entries import Candidate, Entry, utc_now
from fusedops.autotune.modes import look_up_only
from fusedops.autotune.operator import Config, Operator
from fusedops.autotune.record import Recorded
from fusedops.autotune.roofline import estimate
from fusedops.autotune.search import BUDGET_SPENT, MARGIN, Progress, Result, candidates
from fusedops.autotune.versions import current_versions
from fusedops.runtime.device import DeviceFacts

# Candidates a problem.
MOST = 16
# A candidate displaces the default where the model takes it for so much faster; what is less may be the model's error.
CERTAIN = 0.25


def rank(
    problems: Iterable[Recorded],
    facts: DeviceFacts,
    *,
    budget_s: float | None = None,
    jobs: int | None = None,
    most: int = MOST,
    progress: Callable[[Progress], None] | None = None,
    found: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Rank each problem's candidates for a device without running any; entries say ``heuristic``.

    The candidates are compiled for the device. One that spills registers, or whose matrix instructions are serialised,
    wins only where all do. Of the others the one wins that :func:`fusedops.autotune.roofline.estimate` takes for the
    fastest; the default stays unless that is more than 25 % faster. Whether torch's own product serves is left as the
    default has it: how fast that is, no model of our kernels tells. Same problems, same compiler: same result.

    Args:
        problems: what to rank for.
        facts: of the device.
        budget_s: seconds for all of them; None: no limit. Problems that it does not reach have a result with
            ``refused``.
        jobs: candidates that are compiled at once; default: as many as there are CPU cores.
        most: candidates a problem.
        progress: called after every step.
        found: called with each result when it is there.

    Raises:
        RuntimeError: Triton is missing, or interprets kernels in this process.
    """
    wanted = list(problems)
    end = None if budget_s is None else time.monotonic() + budget_s
    results = []
    with look_up_only():
        for number, (operator, problem, _) in enumerate(wanted):
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                result = Result.not_searched(operator, problem, BUDGET_SPENT)
            else:
                run = _Ranking(operator, problem, facts, number, len(wanted), end, progress)
                try:
                    result = run.run(jobs or os.cpu_count() or 1, most)
                except NotImplementedError as error:
                    result = Result.not_searched(operator, problem, str(error))
            results.append(result)
            found(result)
    return results


def _by_torch(config: Config) -> bool:
    return getattr(config, "kernel", "") == "torch"


class _Ranking:
    def __init__(
        self,
        operator: Operator[Any, Any],
        problem: Any,
        facts: DeviceFacts,
        number: int,
        of: int,
        end: float | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._operator, self._problem, self._facts = operator, problem, facts
        self._number, self._of, self._end, self._progress = number, of, end, progress
        self._began = time.monotonic()
        self._total = self._compiled = self._pruned = 0
        self._note = ""

    def run(self, jobs: int, most: int) -> Result:
        operator, problem, facts = self._operator, self._problem, self._facts
        default = operator.default(problem, facts)
        configs, self._note = candidates(operator, problem, facts, most=most)
        configs = [config for config in configs if _by_torch(config) == _by_torch(default)]
        self._total = len(configs)
        self._emit("compile")
        limit_s = None if self._end is None else max(0.0, self._end - time.monotonic())
        reports = compile_configs(
            operator, problem, facts, configs, threads=jobs, limit_s=limit_s, finished=self._finished
        )
        tried = {config: self._judged(config, reports[config]) for config in configs if config in reports}
        usable = {config: seconds for config, (seconds, _, doubt) in tried.items() if seconds is not None and not doubt}
        usable = usable or {config: seconds for config, (seconds, _, _) in tried.items() if seconds is not None}
        told = tuple(candidate for _, candidate, _ in tried.values())
        if not usable:
            return self._done(Result(operator.name, operator.key(problem), None, told, "no candidate compiles", False))
        best = min(usable.values())
        near = [config for config, seconds in usable.items() if seconds <= best * (1 + MARGIN)]
        chosen = min(near, key=lambda c: self._simplicity(c, configs))
        if usable.get(default, math.inf) <= best * (1 + CERTAIN):
            chosen = default
        entry = Entry(
            op=operator.name,
            problem=operator.problem_json(problem),
            config=chosen.to_json(),
            source="heuristic",
            median=None,
            spread=None,
            default=default.to_json(),
            default_median=None,
            date=utc_now(),
            versions={**current_versions(operator), "driver": None},
            candidates=told,
        )
        complete = len(tried) == len(configs)
        return self._done(Result(operator.name, operator.key(problem), entry, told, None, complete), usable, default)

    def _simplicity(self, config: Config, configs: list[Config]) -> tuple[int, int, int]:
        return getattr(config, "num_warps", 0), getattr(config, "num_stages", 0), configs.index(config)

    def _judged(self, config: Config, report: CompileReport) -> tuple[float | None, Candidate, bool]:
        """(estimated seconds, or None where it cannot be used; what is told of it; whether it is in doubt)."""
        plain = config.to_json()
        if report.error is not None:
            return None, Candidate(plain, "failed", reason=f"it does not compile: {report.error}"), True
        if report.shared > self._facts.shared_memory:
            reason = f"{report.shared} bytes of shared memory; the device has {self._facts.shared_memory}"
            return None, Candidate(plain, "pruned", reason=reason), True
        work = self._operator.work(config, self._problem, self._facts)
        # A product of torch's is no kernel of ours: nothing was compiled of it.
        seconds = estimate(work, self._facts, with_issue(report) if report.kernels else None)
        doubts = [f"{report.spill_bytes} bytes of registers spilt a thread"] * (report.spill_bytes > 0)
        doubts += report.warnings
        reason = f"estimated at {seconds * 1e6:.3g} µs, {report.registers} registers, {report.shared} bytes shared"
        outcome = "demoted" if doubts else "estimated"
        return seconds, Candidate(plain, outcome, reason="; ".join([reason, *doubts])), bool(doubts)  # type: ignore[arg-type]

    def _finished(self, config: Config, report: CompileReport) -> None:
        self._compiled += 1
        self._pruned += report.error is not None
        self._emit("compile")

    def _done(self, result: Result, usable: dict[Config, float] | None = None, default: Config | None = None) -> Result:
        seconds = usable or {}
        best = min(seconds.values(), default=None)
        self._emit("done", best, None if default is None else seconds.get(default))
        return Result(
            result.op, result.problem, result.entry, result.candidates, result.refused, result.complete,
            time.monotonic() - self._began,
        )  # fmt: skip

    def _emit(self, stage: str, best: float | None = None, default: float | None = None) -> None:
        if self._progress is not None:
            left = 0.0 if self._end is None else max(0.0, self._end - time.monotonic())
            self._progress(
                Progress(
                    self._operator.name, self._operator.key(self._problem), stage, self._total, self._compiled,
                    self._pruned, 0, best, default, left, self._note, self._number, self._of,
                )
            )  # fmt: skip
