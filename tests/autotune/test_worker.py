"""A worker process that candidates hang and crash, and the search that goes on."""

from __future__ import annotations

import signal

import pytest
import torch

from fusedops.autotune import bench as module
from fusedops.autotune.compiling import CompileReport
from fusedops.autotune.protocol import CandidateFailed, CandidateWrong, Unmeasurable
from fusedops.autotune.search import search
from fusedops.autotune.workers import Limits, WorkerBench
from fusedops.runtime.device import INTERPRETER
from fusedops.runtime.settings import Settings
from tests.autotune.made_up import DOUBLING, Doubling, DoublingConfig

CPU = torch.device("cpu")
RIGHT = DoublingConfig(block=1)


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SETTINGS", Settings(cache_dir=tmp_path))


@pytest.fixture(scope="module")
def bench():
    """One for all tests of this module: a worker takes seconds to start."""
    made = WorkerBench(CPU, limits=Limits(check=2.0, sample=2.0))
    yield made
    made.close()


@pytest.fixture
def opened(bench):
    bench.open(DOUBLING, Doubling(16))
    return bench


def test_a_worker_compiles_checks_and_times(opened):
    slow = DoublingConfig(block=4)
    finished = []
    assert opened.compile([RIGHT, slow], None, lambda config, report: finished.append(config)) == {
        RIGHT: CompileReport(), slow: CompileReport(),
    }  # fmt: skip
    assert finished == [RIGHT, slow]
    opened.check(RIGHT)
    found = opened.time([RIGHT, slow], 3)
    assert [len(found[config]) for config in (RIGHT, slow)] == [3, 3]
    assert min(found[RIGHT]) >= 0.001
    assert min(found[slow]) >= 0.004


def test_what_candidates_print_is_no_answer(opened):
    opened.check(DoublingConfig("prints"))
    with pytest.raises(CandidateWrong):
        opened.check(DoublingConfig("wrong"))


def test_a_worker_survives_what_raises_and_what_is_wrong(opened):
    starts = opened._worker.starts
    with pytest.raises(CandidateFailed, match="ValueError: this configuration raises"):
        opened.check(DoublingConfig("raises"))
    with pytest.raises(CandidateWrong, match=r"off by 0\.01"):
        opened.check(DoublingConfig("wrong"))
    with pytest.raises(CandidateWrong, match="nan"):
        opened.check(DoublingConfig("nothing"))
    raising = DoublingConfig("raises")
    found = opened.time([raising, RIGHT], 2)
    assert isinstance(found[raising], CandidateFailed)
    assert len(found[RIGHT]) == 2
    assert opened._worker.starts == starts


def test_no_inputs(bench):
    bench.open(DOUBLING, Doubling(1, "no inputs"))
    with pytest.raises(Unmeasurable, match="nobody can make inputs for it"):
        bench.check(RIGHT)


def test_a_crash_while_timing_costs_the_others_nothing(opened):
    """It is timed again in a new worker, crashes that as well, and is out; the others' samples are all there."""
    starts = opened._worker.starts
    crashing, other = DoublingConfig("aborts"), DoublingConfig(block=2)
    found = opened.time([RIGHT, crashing, other], 2)
    assert str(found[crashing]) == f"it killed its worker 2 times: the worker ended with signal {signal.SIGABRT}"
    assert [len(found[config]) for config in (RIGHT, other)] == [2, 2]
    assert opened._worker.starts == starts + 2  # the one that follows the second crash included
    with pytest.raises(CandidateFailed, match="killed its worker"):
        opened.check(crashing)  # and never again
    assert opened._worker.starts == starts + 2


def test_one_crash_may_be_an_accident(bench, tmp_path):
    bench.open(DOUBLING, Doubling(16, str(tmp_path / "crashed")))
    starts = bench._worker.starts
    bench.check(DoublingConfig("once"))
    assert bench._worker.starts == starts + 1


def test_an_interrupted_request_does_not_answer_the_next(opened):
    opened._worker.send(do="check", config=DoublingConfig("wrong").to_json())
    opened.check(RIGHT)


def test_a_search_in_a_worker(bench):
    """None of those that raise, hang, end or abort their process, or compute wrongly wins, and each is reported."""
    result = search(DOUBLING, Doubling(16), INTERPRETER, bench, budget_s=300.0)
    assert result.refused is None
    assert DoublingConfig.from_json(result.entry.config) == DoublingConfig(block=2)
    outcomes = {(c.config["way"], c.config["block"]): c for c in result.candidates}
    for way, outcome, reason in [
        ("raises", "failed", "this configuration raises"),
        ("wrong", "wrong", "off by 0.01"),
        ("nothing", "wrong", "nan"),
        ("hangs", "failed", "no answer within 2 s"),
        ("exits", "failed", "exit code 3"),
    ]:
        assert outcomes[way, 8].outcome == outcome
        assert reason in outcomes[way, 8].reason
    assert outcomes["right", 2].outcome == "timed"
    assert not any(way == "impossible" for way, _ in outcomes)


def test_an_operator_that_a_worker_cannot_import(bench):
    bench._about = {"operator": "tests.autotune.nothing:DOUBLING", "problem": {}}
    bench._opened = 0
    with pytest.raises(Unmeasurable, match=r"open: ModuleNotFoundError: No module named 'tests\.autotune\.nothing'"):
        bench.check(RIGHT)


def test_a_worker_ends_with_its_input_whatever_it_is_doing(opened):
    process = opened._worker._process
    opened._worker.send(do="check", config=DoublingConfig("hangs").to_json())
    process.stdin.close()
    assert process.wait(20) == 0
    opened._worker.kill()
