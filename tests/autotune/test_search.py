"""The search over a made-up device with a made-up clock: what wins, what is refused, and that two searches agree."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest

from fusedops.autotune import search as module
from fusedops.autotune.compiling import CompileReport
from fusedops.autotune.entries import Candidate, Entry
from fusedops.autotune.operator import Config, Operator, Work
from fusedops.autotune.protocol import CandidateFailed, CandidateWrong, DeviceBusy, Unmeasurable
from fusedops.autotune.search import OUT_OF_BUDGET, STOPPED, SearchInterrupted, candidates, neighbours, search
from fusedops.runtime.device import TARGETS

FACTS = TARGETS["sm_90"]


class Problem(NamedTuple):
    n: int = 1


@dataclass(frozen=True, slots=True)
class Made(Config):
    block: int = 64
    num_warps: int = 4
    num_stages: int = 2
    way: str = "a"


DEFAULT = Made()
SPACE = [Made(b, w, s) for b in (16, 32, 64, 128) for w in (2, 4, 8) for s in (1, 2, 3)]


def operator(space=SPACE, prune=lambda config, problem, facts: None, default=DEFAULT) -> Operator:
    return Operator(
        name="made", problem=Problem, config=Made, default=lambda problem, facts: default, space=lambda p: space,
        prune=prune, work=lambda config, problem, facts: Work(1, config.num_warps, scalar=config.block * 1e6),
        trials="", sources=(), bucketed=lambda problem: (),
    )  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def a_millisecond(config: Made) -> float:
    return 1e-3


@dataclass
class Bench:
    """Measures nothing: ``truth`` gives a candidate's seconds, to which noise and drift are added."""

    truth: Callable[[Made], float] = a_millisecond
    noise: float = 0.0
    seed: int = 0
    reports: dict[Made, CompileReport] = field(default_factory=dict)
    wrong: set[Made] = field(default_factory=set)
    failing: set[Made] = field(default_factory=set)
    failing_later: set[Made] = field(default_factory=set)
    drift: Callable[[int], float] = lambda sample: 1.0
    compile_s: float = 0.1
    check_s: float = 0.01
    prepare_s: float = 0.01
    on_call: Callable[[str], None] = lambda what: None

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.random = random.Random(self.seed)
        self.compiled: list[Made] = []
        self.checked: list[Made] = []
        self.timed: list[tuple[tuple[Made, ...], int]] = []
        self.samples = 0
        self.closed = 0
        self.opened: list[object] = []

    def open(self, operator, problem) -> None:
        self.opened.append(problem)

    def compile(self, configs, limit_s=None, finished=lambda config, report: None):
        end = math.inf if limit_s is None else self.clock.now + limit_s
        for number, config in enumerate(configs):
            if number and self.clock.now >= end:
                break
            self.on_call("compile")
            self.clock.now += self.compile_s
            self.compiled.append(config)
            finished(config, self.reports.get(config, CompileReport(1024, 64)))
        return {}

    def check(self, config) -> float:
        self.on_call("check")
        self.clock.now += self.check_s + self.truth(config)
        self.checked.append(config)
        if config in self.wrong:
            raise CandidateWrong("result 0 is off by 1")
        if config in self.failing:
            raise CandidateFailed("it killed its worker 2 times: signal 6")
        return self.truth(config)

    def time(self, configs, repeats):
        self.on_call("time")
        self.timed.append((tuple(configs), repeats))
        found = {config: [] for config in configs}
        self.clock.now += self.prepare_s * len(configs)
        for _ in range(repeats):
            for config in configs:
                if config not in self.checked:
                    raise AssertionError(f"{config} was timed before it was checked")
                seconds = self.truth(config) * self.drift(self.samples) * (1 + self.noise * self.random.gauss(0, 1))
                self.samples += 1
                self.clock.now += seconds
                found[config].append(seconds)
        for config in configs:
            if config in self.failing_later:
                found[config] = CandidateFailed("it hung")
        return found

    def close(self) -> None:
        self.closed += 1


def found_by(bench: Bench, op: Operator | None = None, budget_s: float = 60.0, most: int = 36, **named):
    return search(op or operator(), Problem(), FACTS, bench, budget_s=budget_s, clock=bench.clock, most=most, **named)


def winner(result) -> Made:
    assert result.refused is None
    return Made.from_json(result.entry.config)


def outcome(result, config: Made) -> Candidate:
    return next(c for c in result.candidates if Made.from_json(c.config) == config)


def faster(**speeds: float) -> Callable[[Made], float]:
    """A millisecond for all but those named ``block_warps_stages``."""
    by = {tuple(map(int, name.strip("_").split("_"))): seconds for name, seconds in speeds.items()}
    return lambda config: 1e-3 * by.get((config.block, config.num_warps, config.num_stages), 1.0)


# ---------------------------------------------------------------------------------------------------- what wins


def test_the_fastest_wins_and_is_written_down():
    bench = Bench(faster(_128_8_3=0.5, _128_8_2=0.6))
    result = found_by(bench)
    assert winner(result) == Made(128, 8, 3)
    entry = result.entry
    assert (entry.op, entry.problem, entry.source, result.complete) == ("made", {"n": 1}, "tuned", True)
    assert entry.median == pytest.approx(0.5e-3)
    assert entry.default_median == pytest.approx(1e-3)
    assert Entry.from_json(entry.to_json()) == entry
    assert bench.opened == [Problem()]
    assert bench.closed == 0  # it serves the next problem
    assert 0 < result.seconds <= 60


@pytest.mark.parametrize(("speed", "wins"), [(0.985, False), (0.97, True), (1.0, False), (1.5, False)])
def test_a_winner_is_more_than_two_percent_faster(speed, wins):
    result = found_by(Bench(faster(_128_8_3=speed)))
    assert winner(result) == (Made(128, 8, 3) if wins else DEFAULT)
    if not wins:
        assert result.entry.config == result.entry.default
        assert result.entry.median == result.entry.default_median


def test_a_winner_is_faster_by_twice_the_deviation():
    """Equals whose times scatter by a tenth differ by two per cent by chance, but seldom by twice the deviation."""
    results = [found_by(Bench(noise=0.1, seed=seed)) for seed in range(40)]
    assert sum(result.refused is None for result in results) >= 35
    assert sum(winner(result) != DEFAULT for result in results if result.refused is None) <= 4


def test_of_equals_the_one_with_fewest_warps_then_stages_wins():
    speeds = dict.fromkeys(("_128_8_1", "_128_4_3", "_128_4_2", "_128_4_1", "_32_8_1"), 0.7)
    assert winner(found_by(Bench(faster(**speeds)))) == Made(128, 4, 1)
    assert winner(found_by(Bench(faster(**speeds, _64_8_1=0.6)))) == Made(64, 8, 1)  # no equal


def test_the_slowest_are_dropped_and_the_last_three_are_timed_again():
    bench = Bench(lambda config: 1e-3 * (1 + SPACE.index(config) / 100))
    found_by(bench, most=33)
    rounds = [(len(configs), repeats) for configs, repeats in bench.timed if len(configs) > 1]
    assert [repeats for _, repeats in rounds] == [3, 10, 30, 30]
    assert [count - 1 for count, _ in rounds][:3] in ([32, 16, 8], [32, 17, 9])
    assert rounds[3] == (4, 30)
    assert all(DEFAULT in configs for configs, _ in bench.timed)


@pytest.mark.parametrize(
    ("noise", "grid"),
    [
        pytest.param(0.03, [0.7, 0.8, 0.9, 1.0, 1.2], id="few_equals_much_noise"),
        pytest.param(0.05, [0.6, 0.9, 1.0, 1.1, 1.5], id="few_equals_very_much_noise"),
        pytest.param(0.01, [0.8, 0.8, 0.8, 0.85, 0.9, 1.0, 1.1, 1.3, 2.0], id="a_third_equally_fast"),
    ],
)
def test_two_cold_searches_agree(noise, grid):
    """Differences of five per cent and more, and none at all, are told apart whatever the noise."""
    ranked = candidates(operator(), Problem(), FACTS, most=36)[0]
    for landscape in range(8):
        pick = random.Random(landscape)
        speeds = {config: 1e-3 * pick.choice(grid) for config in SPACE} | {DEFAULT: 1e-3}
        fastest = [config for config in SPACE if speeds[config] == min(speeds.values())]
        expected = min(fastest, key=lambda c: (c.num_warps, c.num_stages, ranked.index(c)))
        for seed in range(12):
            assert winner(found_by(Bench(speeds.__getitem__, noise, seed))) == expected


@pytest.mark.parametrize("noise", [0.005, 0.03])
def test_the_winner_is_hardly_slower_than_the_fastest(noise):
    """Whatever the times: within the margin of two per cent, and what noise hides beyond it."""
    for landscape in range(40):
        pick = random.Random(landscape)
        speeds = {config: 1e-3 * pick.lognormvariate(0, 0.25) for config in SPACE} | {DEFAULT: 1e-3}
        found = winner(found_by(Bench(speeds.__getitem__, noise, landscape)))
        assert speeds[found] <= (1.02 + noise / 2) * min(speeds.values())


@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_cold_searches_agree_on_the_default(noise):
    for seed in range(30):
        assert winner(found_by(Bench(noise=noise, seed=seed))) == DEFAULT


def test_the_same_measurements_give_the_same_result():
    runs = [found_by(Bench(faster(_128_8_3=0.9), 0.03, seed=7)) for _ in range(2)]
    assert replace(runs[0].entry, date="") == replace(runs[1].entry, date="")


# -------------------------------------------------------------------------------------------------- what is left out


def test_wrong_and_failing_candidates_never_win_and_are_reported():
    wrong, failing, later = Made(128, 8, 3), Made(128, 8, 2), Made(128, 8, 1)
    bench = Bench(
        faster(_128_8_3=0.1, _128_8_2=0.2, _128_8_1=0.3, _128_4_3=0.8),
        wrong={wrong}, failing={failing}, failing_later={later},
    )  # fmt: skip
    result = found_by(bench)
    assert winner(result) == Made(128, 4, 3)
    assert outcome(result, wrong) == Candidate(wrong.to_json(), "wrong", reason="result 0 is off by 1")
    assert outcome(result, failing).outcome == "failed"
    assert "killed its worker" in outcome(result, failing).reason
    assert outcome(result, later).outcome == "failed"
    assert outcome(result, later).reason == "it hung"


def test_what_does_not_compile_or_fit_is_not_run():
    broken, large = Made(128, 8, 3), Made(128, 8, 2)
    bench = Bench(
        faster(_128_8_3=0.1, _128_8_2=0.1),
        reports={
            broken: CompileReport(error="PassManager::run failed"),
            large: CompileReport(shared=FACTS.shared_memory + 1),
        },
    )
    result = found_by(bench)
    assert winner(result) == DEFAULT
    assert outcome(result, broken).outcome == "failed"
    assert "PassManager" in outcome(result, broken).reason
    assert outcome(result, large).outcome == "pruned"
    assert "232449 bytes of shared memory; the device has 232448" in outcome(result, large).reason
    assert not {broken, large} & set(bench.checked)


def test_what_spills_is_timed_last_and_only_if_there_is_time():
    spilling, serial = Made(128, 8, 3), Made(128, 8, 2)
    reports = {
        spilling: CompileReport(1024, 255, spill_bytes=64),
        serial: CompileReport(1024, 200, warnings=("k: the assembler serialises wgmma (C7510)",)),
    }
    truth = faster(_128_8_3=0.5, _128_8_2=0.8)
    bench = Bench(truth, reports=reports)
    result = found_by(bench)
    assert winner(result) == spilling  # it is the fastest after all
    assert set(bench.checked[-2:]) == {spilling, serial}
    assert outcome(result, spilling).reason == "64 bytes of registers spilt a thread"
    short = Bench(truth, reports=reports, compile_s=0.01, check_s=0.001)
    result = found_by(short, budget_s=2.0)
    assert winner(result) == DEFAULT
    assert outcome(result, spilling) == Candidate(
        spilling.to_json(), "demoted", reason="64 bytes of registers spilt a thread"
    )
    assert outcome(result, serial).reason == "k: the assembler serialises wgmma (C7510)"


def test_times_that_are_no_times_never_win():
    for seconds in (math.inf, math.nan, 0.0, -1.0):
        bench = Bench()
        time = bench.time
        bad = Made(128, 8, 3)

        def broken(configs, repeats, time=time, bad=bad, seconds=seconds):
            return {c: [seconds] * repeats if c == bad else t for c, t in time(configs, repeats).items()}

        bench.time = broken
        result = found_by(bench)
        assert winner(result) == DEFAULT
        assert outcome(result, bad).outcome == "failed"
        assert math.isfinite(result.entry.median)


def test_all_fail():
    result = found_by(Bench(failing=set(SPACE), wrong={DEFAULT}))
    assert result.entry is None
    assert result.refused == (
        f"no candidate can be used (1 wrong, {len(result.candidates) - 1} failed). The default: result 0 is off by 1"
    )


def test_where_the_default_fails_the_best_of_the_others_wins():
    result = found_by(Bench(faster(_128_8_3=0.99), failing={DEFAULT}))
    assert winner(result).num_warps == 2  # all are equal
    assert result.entry.default_median is None
    assert outcome(result, DEFAULT).outcome == "failed"
    assert winner(found_by(Bench(faster(_128_8_3=0.5), failing={DEFAULT}))) == Made(128, 8, 3)


def test_nothing_can_be_measured():
    bench = Bench()
    bench.check = lambda config: (_ for _ in ()).throw(Unmeasurable("no inputs can be made for this problem"))
    result = found_by(bench)
    assert (result.entry, result.refused) == (None, "no inputs can be made for this problem")
    assert not result.complete


def test_another_process_times():
    bench = Bench()
    bench.time = lambda configs, repeats: (_ for _ in ()).throw(DeviceBusy("another process has been timing"))
    result = found_by(bench)
    assert (result.entry, result.refused) == (None, "another process has been timing")


# ---------------------------------------------------------------------------------------------------- a busy device


def test_a_busy_device_is_not_stored():
    events = []
    result = found_by(
        Bench(faster(_128_8_3=0.5), drift=lambda sample: 1.0 + 0.02 * (sample // 8)), progress=events.append
    )
    assert result.entry is None
    assert "the device is busy" in result.refused
    assert sum("timing again" in event.note for event in events) == 4


def test_a_round_in_which_the_device_was_busy_is_repeated():
    """A step: a clock that falls once stays where it is."""
    events = []
    bench = Bench(faster(_128_8_3=0.5), drift=lambda sample: 1.0 if sample < 150 else 1.2)
    result = found_by(bench, progress=events.append)
    assert winner(result) == Made(128, 8, 3)
    assert sum("timing again" in event.note for event in events) == 1


# -------------------------------------------------------------------------------------------------------- budget


@pytest.mark.parametrize("budget_s", [0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 10.0])
@pytest.mark.parametrize("slowness", [1.0, 30.0])
def test_the_budget_holds(budget_s, slowness):
    truth = faster(_128_8_3=0.5)
    bench = Bench(lambda config: slowness * truth(config), check_s=0.05)
    result = found_by(bench, budget_s=budget_s)
    assert result.seconds <= 1.05 * budget_s
    for candidate in result.candidates:
        assert candidate.outcome in ("timed", "demoted")
        if candidate.outcome == "demoted":
            assert candidate.reason == OUT_OF_BUDGET
    if result.refused is None:
        assert winner(result) in (Made(128, 8, 3), DEFAULT)
        timed = [c for c in result.candidates if c.outcome == "timed"]
        assert len(timed) >= 2
        if len(timed) < len(result.candidates):
            assert not result.complete
    else:
        assert f"budget of {budget_s:g} s" in result.refused


def test_a_slow_candidate_does_not_break_the_budget():
    slow = Made(32, 2, 1)  # ranked in the midst of the others
    truth = faster(_128_8_3=0.5)
    result = found_by(Bench(lambda config: 3.0 if config == slow else truth(config)), budget_s=12.0)
    assert result.seconds <= 12.0
    assert outcome(result, slow).reason == OUT_OF_BUDGET
    assert winner(result) == Made(128, 8, 3)


# ----------------------------------------------------------------------------------------------------- interruption


@pytest.mark.parametrize(("what", "call"), [("compile", 3), ("check", 5), ("time", 1), ("time", 3), ("time", 5)])
def test_ctrl_c_keeps_what_there_is(what, call):
    calls = []

    def on_call(kind):
        calls.append(kind)
        if calls.count(what) == call:
            raise KeyboardInterrupt

    bench = Bench(faster(_128_8_3=0.5), on_call=on_call)
    with pytest.raises(KeyboardInterrupt) as stopped:
        found_by(bench)
    assert isinstance(stopped.value, SearchInterrupted)
    assert bench.closed == 1
    result = stopped.value.result
    assert not result.complete
    assert all(c.outcome == "timed" or c.reason == STOPPED for c in result.candidates)
    if (what, call) == ("time", 5):  # after a round
        assert winner(result) == Made(128, 8, 3)
    else:
        assert result.entry is None
        assert result.refused == "the search was stopped before a candidate was timed"


# -------------------------------------------------------------------------------------------- what was known before


def test_what_is_known_is_not_measured_again_but_for_the_finalists():
    truth = faster(_128_8_3=0.5, _128_8_2=0.6, _128_8_1=0.7, _32_8_1=0.8)
    first = found_by(Bench(truth))
    bench = Bench(truth)
    second = found_by(bench, known=first.entry.candidates)
    assert winner(second) == Made(128, 8, 3)
    assert bench.compiled == [DEFAULT]
    assert set(bench.checked) == {DEFAULT, Made(128, 8, 3), Made(128, 8, 2), Made(128, 8, 1)}
    assert outcome(second, Made(32, 8, 1)) == outcome(first, Made(32, 8, 1))
    assert second.seconds < first.seconds / 4


def test_a_new_candidate_times_only_itself():
    first = found_by(Bench(), operator(SPACE[:10]))
    bench = Bench(faster(_128_8_3=0.5))
    result = found_by(bench, operator([*SPACE[:10], Made(128, 8, 3)]), known=first.entry.candidates)
    assert winner(result) == Made(128, 8, 3)
    assert set(bench.compiled) - {c for c in bench.compiled if c in neighbours(DEFAULT, SPACE)} <= {
        DEFAULT, Made(128, 8, 3),
    }  # fmt: skip


def test_what_was_wrong_before_is_not_tried_again():
    bad = Made(128, 8, 3)
    bench = Bench(faster(_128_8_3=0.5))
    result = found_by(bench, known=[Candidate(bad.to_json(), "wrong", reason="off"), Candidate({"x": 1}, "failed")])
    assert bad not in bench.compiled
    assert outcome(result, bad) == Candidate(bad.to_json(), "wrong", reason="off")
    assert winner(result) == DEFAULT


def test_a_known_finalist_that_is_wrong_now_does_not_win():
    truth = faster(_128_8_3=0.5, _128_8_2=0.6)
    first = found_by(Bench(truth))
    second = found_by(Bench(truth, wrong={Made(128, 8, 3)}), known=first.entry.candidates)
    assert winner(second) == Made(128, 8, 2)
    assert outcome(second, Made(128, 8, 3)).outcome == "wrong"


# -------------------------------------------------------------------------------------------------------- candidates


def test_the_default_comes_first_then_seeds():
    seeds = [Made(32, 8, 3), Made(16, 2, 1)]
    chosen, _ = candidates(operator(), Problem(), FACTS, seeds, most=8)
    assert chosen[:3] == [DEFAULT, *seeds]
    assert len(chosen) == len(set(chosen)) == 8
    assert len(set(chosen) & set(neighbours(DEFAULT, SPACE))) >= 2


def test_unfit_candidates_are_left_out_and_told_of():
    op = operator(prune=lambda config, problem, facts: "too wide" if config.block > 64 else None)
    chosen, told = candidates(op, Problem(), FACTS, [Made(128, 4, 2)])
    assert all(config.block <= 64 for config in chosen)
    assert told == "left out: 9 too wide"


def test_neighbours_are_one_step_away():
    found = set(neighbours(DEFAULT, SPACE))
    assert found == {Made(32), Made(128), Made(64, 2), Made(64, 8), Made(64, 4, 1), Made(64, 4, 3)}
    assert Made(way="b") in neighbours(DEFAULT, [*SPACE, Made(way="b")])
    assert set(neighbours(Made(48), SPACE)) >= {Made(32), Made(64)}


def test_a_seed_that_does_not_fit_is_left_out():
    op = operator(prune=lambda config, problem, facts: "no" if config.block == 128 else None)
    bench = Bench()
    found_by(bench, op, seeds=[Made(128, 8, 3)])
    assert all(config.block != 128 for config in bench.compiled)


# ---------------------------------------------------------------------------------------------------------- progress


def test_progress_tells_every_stage():
    events = []
    found_by(Bench(faster(_128_8_3=0.5)), progress=events.append)
    stages = list(dict.fromkeys(event.stage for event in events))
    assert stages == ["compile", "check", "time", "final", "done"]
    last = events[-1]
    assert (last.op, last.problem) == ("made", "n=1")
    assert last.compiled == last.timed == last.total
    assert last.best == pytest.approx(0.5e-3)
    assert last.default == pytest.approx(1e-3)
    lefts = [event.seconds_left for event in events]
    assert lefts == sorted(lefts, reverse=True)


def test_the_ranking_is_the_rooflines(monkeypatch):
    monkeypatch.setattr(module, "_ranked", lambda operator, problem, facts, configs: list(reversed(configs)))
    chosen, _ = candidates(operator(), Problem(), FACTS, most=5)
    assert chosen[0] == DEFAULT
    assert SPACE[-1] in chosen
