"""The search for a problem's fastest launch configuration; what it measures with is given.

What a timing says: a candidate and the default are timed in the same rounds, one after the other, and of each pair the
ratio is kept: a slow moment hits both alike. A candidate's score is the median of its ratios, below 1 where it is
faster than the default. Its deviation is σ √(π / 2n), that of the median of n samples of a normal distribution, where σ
is 1.4826 times the median absolute deviation of the ratios, which a few outliers do not change. Fewer than ten samples
do not tell their own σ: there it is at least that of two timings of the default.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import Any

from fusedops.autotune.compiling import CompileReport
from fusedops.autotune.entries import Candidate, Entry, Outcome, Plain, utc_now
from fusedops.autotune.operator import Config, Operator
from fusedops.autotune.protocol import Bench, CandidateFailed, CandidateWrong, Unmeasurable
from fusedops.autotune.versions import current_versions
from fusedops.runtime.device import DeviceFacts

# A winner takes less than the default by more than this part of it, and by more than twice the deviation.
MARGIN = 0.02
DEVIATIONS = 2.0
# A simpler candidate is not dropped while it may be as fast as the fastest, by so many deviations: of many that are
# equally fast, the one that seems the fastest has had luck.
DOUBTS = 3.0
# The device is busy where the default's time changes by more than this part between two rounds. The interpreter's is
# always shared with others.
DRIFT = 0.05
DRIFT_INTERPRETER = 0.5
# So many times a round is done again on a busy device.
AGAIN = 3
# Repeats of the rounds of successive halving, and of each round of the finalists.
REPEATS = (3, 10, 30)
FINALISTS = 3
# The finalists are timed again until their deviation is a fifth of the margin: then equals look equal.
FINAL_ROUNDS = 6
ENOUGH = MARGIN / 5
# Samples of the default alone that follow each round.
PULSE = 10
# Parts of the budget by whose end nothing more is compiled, and nothing more is checked.
COMPILED_BY = 0.5
CHECKED_BY = 0.7

# Why a candidate that would have been timed was not.
OUT_OF_BUDGET = "not timed: the budget ended before"
STOPPED = "not timed: the search was stopped before"
# Why a problem was not searched at all.
BUDGET_SPENT = "the budget is spent"


def unfinished(entry: Entry) -> bool:
    """Whether a search ended before it had timed what it meant to: a later one goes on with the rest."""
    return any(candidate.reason in (OUT_OF_BUDGET, STOPPED) for candidate in entry.candidates)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a search stands.

    Attributes:
        op: the operator's name.
        problem: the problem in one line.
        stage: ``compile``, ``check``, ``time``, ``final`` or ``done``.
        total: candidates.
        compiled, pruned, timed: of them.
        best, default: seconds, as far as is known.
        seconds_left: of the budget.
        note: for people: why candidates were pruned, that the device is busy, …
        number, of: of several problems, which one this is.
    """

    op: str
    problem: str
    stage: str
    total: int
    compiled: int
    pruned: int
    timed: int
    best: float | None
    default: float | None
    seconds_left: float
    note: str = ""
    number: int = 0
    of: int = 1


@dataclass(frozen=True, slots=True)
class Result:
    """What a search came to.

    Attributes:
        op: the operator's name.
        problem: the problem in one line.
        entry: what is to be stored; its configuration is the default where nothing is faster. None: ``refused`` says
            why there is nothing.
        candidates: what was tried, and what became of it.
        refused: why there is no entry: all candidates failed, the device is busy, the budget was too short.
        complete: neither the budget nor Ctrl-C kept a candidate from being timed.
        seconds: that the search took.
    """

    op: str
    problem: str
    entry: Entry | None
    candidates: tuple[Candidate, ...] = ()
    refused: str | None = None
    complete: bool = True
    seconds: float = 0.0

    @classmethod
    def kept(cls, operator: Operator[Any, Any], problem: Any, entry: Entry) -> Result:
        """Of a problem that need not be searched."""
        return cls(operator.name, operator.key(problem), entry, entry.candidates)

    @classmethod
    def not_searched(cls, operator: Operator[Any, Any], problem: Any, reason: str) -> Result:
        return cls(operator.name, operator.key(problem), None, refused=reason, complete=False)


class SearchInterrupted(KeyboardInterrupt):
    """Ctrl-C in a search. What had been measured is not lost.

    Attributes:
        result: what the search had come to; its entry, if any, is as good as the timings so far.
    """

    def __init__(self, result: Result) -> None:
        super().__init__(f"the search of {result.op} {result.problem} was stopped")
        self.result = result


def search(
    operator: Operator[Any, Any],
    problem: Any,
    facts: DeviceFacts,
    bench: Bench,
    *,
    budget_s: float,
    seeds: Iterable[Config] = (),
    known: Iterable[Candidate] = (),
    progress: Callable[[Progress], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    most: int = 32,
) -> Result:
    """Find the fastest configuration that computes what it should.

    Candidates are the default, the seeds, the default's neighbours and the operator's space. Those that the device
    could not run are left out; the others are ranked by what they should cost. They are compiled; those over the
    device's shared memory are pruned, those that spill registers or whose matrix instructions are serialised demoted:
    timed last, if at all. Each is compared with the reference before it is timed. Half of them is dropped after each
    round of 3, 10 and 30 repeats; the last three and the default are timed again. The winner takes less than the
    default by more than 2 % and twice the deviation, else the default wins. Of those that are as fast as the fastest,
    within 2 % or twice the deviation, the one with the fewest warps, then stages wins. The same measurements give the
    same result.

    Args:
        operator, problem: what is searched.
        facts: of the device.
        bench: compiles, checks and times; it is opened for the problem, and closed only by an interruption.
        budget_s: seconds for all of it. No stage is begun that would not end in time.
        seeds: configurations that are likely to be good, such as the winners of neighbouring problems.
        known: what an earlier search found of candidates, with the same kernels: it is not measured again, but for
            the finalists.
        progress: called after every step.
        clock: seconds from any beginning.
        most: candidates.

    Raises:
        SearchInterrupted: a KeyboardInterrupt came.
    """
    run = _Search(operator, problem, facts, bench, budget_s, progress, clock)
    try:
        return run.run(list(seeds), list(known), most)
    except KeyboardInterrupt:
        bench.close()
        raise SearchInterrupted(run.result(STOPPED)) from None


@dataclass(eq=False)
class _Tried:
    """A candidate and what has become of it.

    Attributes:
        outcome: None while nothing is decided.
        doubt: why it was demoted.
        ratios: of its times to those of the default in the same rounds.
        final: of these, those of the last stage.
        known: the ratio that an earlier search found.
        before: what that search wrote down.
        run_s: seconds that it ran in its check; None: it has not been checked in this search.
    """

    config: Config
    rank: int
    report: CompileReport | None = None
    outcome: Outcome | None = None
    reason: str | None = None
    doubt: str | None = None
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    final: list[float] = field(default_factory=list)
    known: float | None = None
    before: Candidate | None = None
    run_s: float | None = None

    @property
    def score(self) -> float:
        for ratios in (self.final, self.ratios):
            if ratios:
                return median(ratios)
        return math.inf if self.known is None else self.known

    @property
    def simplicity(self) -> tuple[int, int, int]:
        return getattr(self.config, "num_warps", 0), getattr(self.config, "num_stages", 0), self.rank

    def fail(self, error: CandidateFailed) -> None:
        self.outcome = "wrong" if isinstance(error, CandidateWrong) else "failed"
        self.reason = str(error)


def _sigma(samples: Sequence[float]) -> float:
    middle = median(samples)
    return 1.4826 * median([abs(sample - middle) for sample in samples])


def _json(config: Config) -> dict[str, Plain]:
    return {**config.to_json()}


class _OutOfBudget(Exception):  # noqa: N818
    pass


class _Refused(Exception):  # noqa: N818
    pass


class _Search:
    def __init__(
        self,
        operator: Operator[Any, Any],
        problem: Any,
        facts: DeviceFacts,
        bench: Bench,
        budget_s: float,
        progress: Callable[[Progress], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self._operator, self._problem, self._facts, self._bench = operator, problem, facts, bench
        self._progress, self._clock = progress, clock
        self._budget_s, self._began = budget_s, clock()
        self._default: Config = operator.default(problem, facts)
        self._tried: list[_Tried] = []
        # What the others are compared with: the default, or where that fails the first that does not.
        self._base: _Tried | None = None
        self._reference = 0.0  # seconds that it took when it was last timed
        self._noise = 0.0  # σ of the ratio of two of its timings
        self._pulse = PULSE
        # Seconds of the clock that a sample of the base takes, and what comes before a candidate's first.
        self._sample_s = self._prepare_s = 0.0
        self._check_s = 0.0  # of the clock that the longest check took
        self._stage, self._finished = "compile", False

    # ------------------------------------------------------------------------------------------------- the stages

    def run(self, seeds: list[Config], known: list[Candidate], most: int) -> Result:
        try:
            self._list(seeds, known, most)
            self._bench.open(self._operator, self._problem)
            self._compile()
            self._check()
            self._time()
        except _OutOfBudget:
            return self.result(OUT_OF_BUDGET)
        except (_Refused, Unmeasurable) as error:
            return self._done(Result(self._operator.name, self._operator.key(self._problem), None,
                                     tuple(self._candidates(OUT_OF_BUDGET)), str(error), False))  # fmt: skip
        return self.result(OUT_OF_BUDGET)

    def _list(self, seeds: list[Config], known: list[Candidate], most: int) -> None:
        configs, left_out = candidates(self._operator, self._problem, self._facts, seeds, most)
        self._tried = [_Tried(config, rank) for rank, config in enumerate(configs)]
        before: dict[Config, Candidate] = {}
        for candidate in known:
            try:
                before[self._operator.config.from_json(candidate.config)] = candidate
            except ValueError:
                continue  # of another version
        default = before.get(self._default)
        default_s = default.median if default is not None and default.outcome == "timed" else None
        for tried in self._tried:
            earlier = before.get(tried.config)
            if earlier is None or tried.config == self._default:
                continue  # the default is always measured
            if earlier.outcome in ("wrong", "failed"):
                tried.before, tried.outcome, tried.reason = earlier, earlier.outcome, earlier.reason
            elif earlier.outcome == "timed" and earlier.median is not None and default_s is not None:
                tried.before, tried.known = earlier, earlier.median / default_s
        self._emit(left_out)

    def _compile(self) -> None:
        todo = {tried.config: tried for tried in self._tried if tried.before is None}

        def finished(config: Config, report: CompileReport) -> None:
            self._judge(todo[config], report)
            self._emit(todo[config].reason or "")

        left = COMPILED_BY * self._budget_s - self._spent()
        self._bench.compile(list(todo), max(0.0, left), finished)

    def _judge(self, tried: _Tried, report: CompileReport) -> None:
        tried.report = report
        if report.error is not None:
            tried.fail(CandidateFailed(f"it does not compile: {report.error}"))
        elif report.shared > self._facts.shared_memory:
            tried.outcome = "pruned"
            tried.reason = f"{report.shared} bytes of shared memory; the device has {self._facts.shared_memory}"
        elif tried.config != self._default:
            doubts = [f"{report.spill_bytes} bytes of registers spilt a thread"] * (report.spill_bytes > 0)
            tried.doubt = "; ".join([*doubts, *report.warnings]) or None

    def _check(self) -> None:
        self._stage = "check"
        for tried in self._tried:
            if tried.outcome is None and tried.report is not None and tried.doubt is None:
                if self._base is not None and self._spent() > CHECKED_BY * self._budget_s:
                    break
                self._check_one(tried)
        if self._base is None:  # the demoted are all that is left
            for tried in self._tried:
                if tried.outcome is None and tried.report is not None and self._check_one(tried):
                    break
        if self._base is None:
            raise _Refused(self._all_failed())

    def _check_one(self, tried: _Tried) -> bool:
        if self._left() <= 0:
            raise _OutOfBudget
        began = self._clock()
        try:
            tried.run_s = self._bench.check(tried.config)
        except CandidateFailed as error:
            tried.fail(error)
        else:
            if self._base is None:
                self._base = tried
            else:  # the base's check also makes inputs and reference
                self._check_s = max(self._check_s, self._clock() - began)
        self._emit(f"{tried.outcome}: {tried.reason}" if tried.outcome else "")
        return tried.outcome is None

    def _time(self) -> None:
        self._stage = "time"
        self._baseline()
        ready = [tried for tried in self._tried if self._is_ready(tried) and tried.doubt is None]
        others = [t for t in self._tried if t.outcome is None and (t.known is not None or t.doubt)]
        for repeats in REPEATS if len(ready) > FINALISTS else (REPEATS[1],):
            # Few need no choice among them, unless there are others to choose from.
            if not ready or len(ready) + len(others) <= FINALISTS:
                break
            affordable = self._affordable(ready, repeats, self._final_cost(REPEATS[1]))
            if not affordable:
                if repeats == REPEATS[0]:
                    raise _OutOfBudget
                break  # the finalists are chosen by what there is
            ready = affordable
            self._round(ready, repeats)
            ready = self._better_half([tried for tried in ready if tried.outcome is None])
            if len(ready) <= FINALISTS:
                break
        self._time_demoted()
        self._stage = "final"
        self._finals()

    def _is_ready(self, tried: _Tried) -> bool:
        return tried.outcome is None and tried.run_s is not None and tried is not self._base

    def _baseline(self) -> None:
        """Time the base alone: what a sample takes, and what drift is measured from."""
        base = self._the_base
        began = self._clock()
        first = self._times([base], 1)
        once = self._clock() - began
        if not first:
            raise _Refused(f"the default cannot be timed: {base.reason}")
        pulse_s = max(once, 1e-9)
        # A tenth of what is left, no more, goes into one.
        self._pulse = max(3, min(PULSE, int(0.1 * self._left() / pulse_s)))
        if self._left() < self._pulse * pulse_s:
            raise _OutOfBudget
        base.seconds += self._beats()
        self._reference = median(base.seconds)
        self._prepare_s = max(0.0, once - self._sample_s)
        self._emit()

    def _time_demoted(self) -> None:
        """As many as the budget has room for beside the finalists."""
        demoted = [t for t in self._tried if t.outcome is None and t.doubt and t is not self._base]
        finals = self._final_cost(REPEATS[2])
        checked: list[_Tried] = []
        for tried in demoted:
            if self._left() - finals < self._check_s + self._cost([*checked, tried], REPEATS[1]):
                break
            if self._check_one(tried):
                checked.append(tried)
        if checked:
            self._round(checked, REPEATS[1])

    def _finals(self) -> None:
        while True:
            chosen = self._by_merit([t for t in self._tried if t.outcome is None and math.isfinite(t.score)], DOUBTS)
            pool = chosen + [t for t in self._tried if self._is_ready(t) and t not in chosen]
            finalists = [tried for tried in pool if tried is not self._base][:FINALISTS]
            unchecked = [tried for tried in finalists if tried.run_s is None]
            if not unchecked:
                break
            for tried in unchecked:  # known from an earlier search
                if self._left() < self._cost([tried], REPEATS[2]):
                    raise _OutOfBudget
                self._check_one(tried)
        for number in range(FINAL_ROUNDS):
            finalists = [tried for tried in finalists if tried.outcome is None]
            if not finalists or (number and max(map(self._deviation, finalists)) <= ENOUGH):
                break
            repeats = next((n for n in (REPEATS[2], REPEATS[1]) if self._cost(finalists, n) <= self._left()), 0)
            if not repeats:
                if number:
                    break
                raise _OutOfBudget
            self._round(finalists, repeats, final=True)
        self._finished = True

    # ------------------------------------------------------------------------------------------------- timing

    def _round(self, ready: Sequence[_Tried], repeats: int, final: bool = False) -> None:
        """Time candidates together with the base; again where the device was busy meanwhile."""
        base = self._the_base
        limit = DRIFT_INTERPRETER if self._facts.vendor == "interpreter" else DRIFT
        for _ in range(1 + AGAIN):
            group = [base, *(tried for tried in ready if tried.outcome is None)]
            if self._left() < self._cost(group[1:], repeats):
                raise _OutOfBudget
            found = self._times(group, repeats)
            if base.outcome is not None:
                raise _Refused(f"the default failed while it was timed: {base.reason}")
            now = median([*found[base.config], *self._beats()])
            before, self._reference = self._reference, now
            drift = abs(now / before - 1)
            if drift <= limit:
                self._accept(group, found, final)
                self._emit()
                return
            self._emit(f"the device is busy: the default's time changed by {100 * drift:.0f} %; timing again")
        raise _Refused(
            f"the device is busy: the default's time changed by more than {100 * limit:.0f} % in each of {1 + AGAIN}"
            " rounds; nothing is stored"
        )

    def _accept(self, group: Sequence[_Tried], found: dict[Config, list[float]], final: bool) -> None:
        base = self._the_base
        for tried in group:
            seconds = found.get(tried.config)
            if seconds is None:
                continue
            tried.seconds += seconds
            if tried is not base:
                ratios = [mine / others for mine, others in zip(seconds, found[base.config], strict=True)]
                tried.ratios += ratios
                if final:
                    tried.final += ratios

    def _times(self, group: Sequence[_Tried], repeats: int) -> dict[Config, list[float]]:
        """Seconds of those that did not fail meanwhile."""
        by_config = {tried.config: tried for tried in group}
        good: dict[Config, list[float]] = {}
        for config, seconds in self._bench.time(list(by_config), repeats).items():
            if isinstance(seconds, CandidateFailed):
                by_config[config].fail(seconds)
            elif len(seconds) != repeats or not all(math.isfinite(s) and s > 0 for s in seconds):
                by_config[config].fail(CandidateFailed(f"its times are no times: {seconds[:3]}"))
            else:
                good[config] = seconds
        return good

    def _beats(self) -> list[float]:
        base, began = self._the_base, self._clock()
        found = self._times([base], self._pulse)
        if base.outcome is not None:
            raise _Refused(f"the default failed while it was timed: {base.reason}")
        self._sample_s = max(1e-9, (self._clock() - began) / self._pulse)
        beats = found[base.config]
        self._noise = math.sqrt(2) * _sigma(beats) / median(beats)
        return beats

    # ------------------------------------------------------------------------------------------------- budget

    def _spent(self) -> float:
        return self._clock() - self._began

    def _left(self) -> float:
        return self._budget_s - self._spent()

    def _cost(self, ready: Sequence[_Tried], repeats: int) -> float:
        """Seconds that a round should take, the base's part and what follows it included."""
        samples = sum(map(self._sample_cost, ready)) + self._sample_s
        return (repeats + self._prepare_s / self._sample_s) * samples + self._pulse * self._sample_s

    def _final_cost(self, repeats: int) -> float:
        """Of a round of finalists, whoever they will be: they are not slower than the base."""
        return ((FINALISTS + 1) * repeats + self._pulse) * self._sample_s + (FINALISTS + 2) * self._prepare_s

    def _sample_cost(self, tried: _Tried) -> float:
        """Seconds that a sample should take.

        A check's run prepares the candidate as well: by so much longer than the shortest as another took, it may be
        slower than the base.
        """
        if tried.seconds:
            return self._sample_s * (max(1.0, tried.score) if tried.ratios else 1.0)
        runs = [other.run_s for other in self._tried if other.run_s is not None]
        return self._sample_s + (0.0 if tried.run_s is None else max(0.0, tried.run_s - min(runs, default=0.0)))

    def _affordable(self, ready: list[_Tried], repeats: int, reserve: float) -> list[_Tried]:
        """Those that there is time for, with ``reserve`` left over: less the slow ones, then the last ones."""
        left = self._left() - reserve
        while ready and self._cost(ready, repeats) > left:
            slowest = max(ready, key=self._sample_cost)
            out = slowest if self._sample_cost(slowest) > 4 * self._sample_s else ready[-1]
            ready = [tried for tried in ready if tried is not out]
        return ready

    # ------------------------------------------------------------------------------------------------- judgement

    def _better_half(self, ready: list[_Tried]) -> list[_Tried]:
        """The better half by time alone, and the simplest few of those that may be as fast as the fastest."""
        if not ready:
            return []
        ordered = sorted(ready, key=lambda tried: (tried.score, tried.rank))
        half = ordered[: math.ceil(len(ordered) / 2)]
        return list(dict.fromkeys([*half, *self._by_merit(ready, DOUBTS)[:FINALISTS]]))

    def _by_merit(self, pool: Sequence[_Tried], deviations: float) -> list[_Tried]:
        """The fastest, unless simpler ones are as fast, as far as that can be told."""
        others = [tried for tried in pool if tried is not self._base]
        if not others:
            return []
        best = min(others, key=lambda tried: (tried.score, tried.rank))
        equal = [tried for tried in others if self._ties(tried, best, deviations)]
        rest = [tried for tried in others if tried not in equal]
        equal.sort(key=lambda tried: tried.simplicity)
        # The fastest itself comes second: the simplest may only seem to be as fast.
        first = list(dict.fromkeys([equal[0], best, *equal]))
        return first + sorted(rest, key=lambda tried: (tried.score, tried.rank))

    def _ties(self, tried: _Tried, best: _Tried, deviations: float) -> bool:
        deviation = math.hypot(self._deviation(tried), self._deviation(best))
        return tried.score - best.score <= max(MARGIN * best.score, deviations * deviation)

    def _beats_the_default(self, tried: _Tried) -> bool:
        if self._the_base.config != self._default:  # there is no default to beat
            return True
        # Where it was not timed again it is the luckiest of many.
        deviations = DEVIATIONS if tried.final else DOUBTS
        return 1 - tried.score > max(MARGIN, deviations * self._deviation(tried))

    def _deviation(self, tried: _Tried) -> float:
        ratios = tried.final or tried.ratios
        if not ratios:
            return 0.0
        sigma = _sigma(ratios) if len(ratios) >= 10 else max(_sigma(ratios), self._noise)
        return sigma * math.sqrt(math.pi / (2 * len(ratios)))

    def _winner(self) -> _Tried:
        base = self._the_base
        # Those of the last stage, if it came so far: the others' timings helped to choose them.
        pool = [t for t in self._tried if t.final and t.outcome is None]
        pool = pool or [t for t in self._tried if t.ratios and t.outcome is None]
        pool = [tried for tried in pool if self._beats_the_default(tried)]
        if base.config != self._default and all(t.score >= 1 for t in pool):
            return base
        return self._by_merit(pool, DEVIATIONS)[0] if pool else base

    @property
    def _the_base(self) -> _Tried:
        assert self._base is not None
        return self._base

    # ------------------------------------------------------------------------------------------------- results

    def result(self, missing: str) -> Result:
        """What there is. ``missing``: why candidates that were not timed were not."""
        open_ = any(self._is_open(tried) for tried in self._tried)
        found = Result(
            self._operator.name,
            self._operator.key(self._problem),
            None,
            tuple(self._candidates(missing)),
            complete=self._finished and not open_,
        )
        timed = any(tried.ratios for tried in self._tried)
        if self._base is None or not self._base.seconds or not (timed or (self._finished and not open_)):
            when = "the search was stopped" if missing == STOPPED else f"the budget of {self._budget_s:g} s ended"
            return self._done(replace(found, refused=f"{when} before a candidate was timed"))
        return self._done(replace(found, entry=self._entry(found.candidates)))

    def _is_open(self, tried: _Tried) -> bool:
        """Whether it should have been timed and was not. The demoted need not be."""
        return tried.outcome is None and tried.doubt is None and not tried.seconds and tried.before is None

    def _entry(self, found: tuple[Candidate, ...]) -> Entry:
        winner, default = self._winner(), next(t for t in self._tried if t.config == self._default)
        return Entry(
            op=self._operator.name,
            problem=self._operator.problem_json(self._problem),
            config=_json(winner.config),
            source="tuned",
            median=self._seconds(winner),
            spread=_sigma(winner.seconds),
            default=_json(self._default),
            default_median=median(default.seconds) if default.seconds else None,
            date=utc_now(),
            versions=current_versions(self._operator),
            candidates=found,
        )

    def _seconds(self, tried: _Tried) -> float:
        """What a candidate takes, by its ratio to the base, which it is judged by: the base's seconds times that."""
        if not (tried.ratios and self._base is not None and self._base.seconds):
            return median(tried.seconds)
        return median(self._base.seconds) * tried.score

    def _candidates(self, missing: str) -> Iterable[Candidate]:
        for tried in self._tried:
            config = _json(tried.config)
            if tried.outcome is not None:
                yield Candidate(config, tried.outcome, reason=tried.reason)
            elif tried.seconds:
                yield Candidate(config, "timed", self._seconds(tried), _sigma(tried.seconds), tried.doubt)
            elif tried.before is not None:
                yield tried.before
            else:
                yield Candidate(config, "demoted", reason=tried.doubt or missing)

    def _all_failed(self) -> str:
        tried = [t for t in self._tried if t.outcome is not None]
        if not tried:
            return f"the budget of {self._budget_s:g} s ended before a candidate was checked"
        counts = Counter(t.outcome for t in tried)
        default = next((t for t in tried if t.config == self._default), tried[0])
        kinds = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        return f"no candidate can be used ({kinds}). The default: {default.reason}"

    def _done(self, result: Result) -> Result:
        self._stage = "done"
        self._emit(result.refused or "")
        return replace(result, seconds=self._spent())

    def _emit(self, note: str = "") -> None:
        if self._progress is None:
            return
        timed = [tried for tried in self._tried if tried.seconds]
        default = next((t for t in timed if t.config == self._default), None)
        self._progress(
            Progress(
                op=self._operator.name,
                problem=self._operator.key(self._problem),
                stage=self._stage,
                total=len(self._tried),
                compiled=sum(t.report is not None for t in self._tried),
                pruned=sum(t.outcome is not None for t in self._tried),
                timed=len(timed),
                best=min((median(t.seconds) for t in timed), default=None),
                default=median(default.seconds) if default is not None else None,
                seconds_left=max(0.0, self._left()),
                note=note,
            )
        )


# ------------------------------------------------------------------------------------------------- what is tried


def candidates(
    operator: Operator[Any, Any], problem: Any, facts: DeviceFacts, seeds: Iterable[Config] = (), most: int = 32
) -> tuple[list[Config], str]:
    """What is worth trying for a problem, the default first, then seeds, then by rank; and what was left out, in words.

    Args:
        operator, problem, facts: what is searched, and where.
        seeds: configurations that are likely to be good.
        most: how many at most. A quarter of them is kept for the default's neighbours: the ranking may be wrong.
    """
    default = operator.default(problem, facts)
    space = list(operator.space(problem))
    near = neighbours(default, space)
    left_out: Counter[str] = Counter()
    fit: dict[Config, None] = {}
    for config in dict.fromkeys((*near, *space)):
        if config == default:
            continue
        reason = operator.unfit(config, problem, facts)
        if reason is None:
            fit[config] = None
        else:
            left_out[reason] += 1
    first = {default: None}
    for seed in seeds:
        if len(first) < max(2, most // 2) and operator.unfit(seed, problem, facts) is None:
            first[seed] = None
    ranked = [config for config in _ranked(operator, problem, facts, list(fit)) if config not in first]
    beside = [config for config in ranked if config in near][: most // 4]
    rest = [config for config in ranked if config not in beside]
    chosen = set(beside + rest[: max(0, most - len(first) - len(beside))])
    told = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common(4))
    return [*first, *(config for config in ranked if config in chosen)][:most], f"left out: {told}" if told else ""


def neighbours(config: Config, space: Sequence[Config]) -> list[Config]:
    """Configurations that differ in one field, by one step among the values that the field has in the space."""
    found: list[Config] = []
    for part in fields(config):  # type: ignore[arg-type]
        value = getattr(config, part.name)
        values = sorted({getattr(other, part.name) for other in space} - {value})
        if isinstance(value, bool | str):
            steps = values
        else:
            lower = [other for other in values if other < value]
            steps = lower[-1:] + [other for other in values if other > value][:1]
        found += [replace(config, **{part.name: step}) for step in steps]  # type: ignore[type-var]
    return found


def _ranked(operator: Operator[Any, Any], problem: Any, facts: DeviceFacts, configs: list[Config]) -> list[Config]:
    from fusedops.autotune.roofline import ranked

    return ranked(operator, problem, facts, configs)
