"""Searching what is named: arguments, what is kept, budgets, and a whole search that a second process uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import UserDict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fusedops
from fusedops.autotune import lookup, resolve, tuner
from fusedops.autotune.entries import Candidate
from fusedops.autotune.identity import Identity
from fusedops.autotune.operator import forget
from fusedops.autotune.search import OUT_OF_BUDGET, Result, SearchInterrupted
from fusedops.norm.tuning import NORM, NormConfig, NormProblem
from fusedops.runtime.device import INTERPRETER
from tests.autotune.test_resolve import entry, settings  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.usefixtures("settings"), pytest.mark.interpreter]

CPU = torch.device("cpu")
PROBLEMS = [NormProblem(width, 4, "forward", rows=16, dtype="float32") for width in (32, 64, 128)]
MINE = NormConfig(2, 32, False, 4)


@pytest.fixture
def searched(monkeypatch):
    """Searches answer at once: what was asked for, with which options."""
    asked = []

    def search(operator, problem, facts, bench, **options):
        asked.append((problem, options))
        found = entry(problem, MINE)
        return Result(operator.name, operator.key(problem), found, found.candidates, seconds=1.0)

    class Bench:
        def __init__(self, device, threads=None):
            pass

        def close(self):
            asked.append("closed")

    monkeypatch.setattr(tuner, "search", search)
    monkeypatch.setattr(tuner, "Switching", Bench)
    return asked


def test_problems_are_searched_once_each_and_stored(searched):
    results = fusedops.autotune.tune([*PROBLEMS, PROBLEMS[0], ("norm", PROBLEMS[1]), (NORM, PROBLEMS[2])])
    assert [problem for problem, _ in searched[:-1]] == PROBLEMS
    assert searched[-1] == "closed"
    assert [result.problem for result in results] == [NORM.key(problem) for problem in PROBLEMS]
    assert set(lookup.store().get(Identity.of(INTERPRETER), "norm")) == {NORM.key(problem) for problem in PROBLEMS}
    assert resolve.resolve(NORM, PROBLEMS[0], CPU) == MINE


def test_what_was_searched_before_is_kept_unless_again(searched):
    fusedops.autotune.tune(PROBLEMS[:1])
    del searched[:]
    (result,) = fusedops.autotune.tune(PROBLEMS[:1])
    assert searched == []
    assert result.entry.config == MINE.to_json()
    fusedops.autotune.tune(PROBLEMS[:1], again=True)
    assert len(searched) == 2


def test_timings_of_other_kernels_are_not_reused(searched):
    tried = (Candidate(MINE.to_json(), "timed", 1e-5, 1e-7),)
    old = entry(PROBLEMS[0], MINE, candidates=tried)
    lookup.store().put(Identity.of(INTERPRETER), [replace(old, versions={**old.versions, "kernels": "0" * 16})])
    fusedops.autotune.tune(PROBLEMS[:1])
    _, options = searched[0]
    # It is tried early, and timed anew.
    assert options["known"] == ()
    assert MINE in options["seeds"]
    fusedops.autotune.tune(PROBLEMS[:1], again=True)


def test_winners_of_near_problems_are_tried_early(searched):
    lookup.store().put(Identity.of(INTERPRETER), [entry(PROBLEMS[0]._replace(rows=32), MINE)])
    fusedops.autotune.tune(PROBLEMS[:1])
    assert searched[0][1]["seeds"] == [MINE]


def test_a_budget_that_is_spent_leaves_the_rest(searched, monkeypatch):
    clock = iter([0.0, 0.0, 5.0, 30.0, 30.0, 30.0])
    monkeypatch.setattr(tuner.time, "monotonic", lambda: next(clock))
    results = fusedops.autotune.tune(PROBLEMS, budget_s=10)
    assert [result.refused for result in results] == [None, None, "the budget is spent"]
    assert [options["budget_s"] for _, options in searched[:-1]] == [10, 5]


def test_an_interruption_keeps_what_there_is(searched, monkeypatch):
    def search(operator, problem, *_, **__):
        if problem == PROBLEMS[1]:
            raise SearchInterrupted(Result(operator.name, operator.key(problem), entry(problem, MINE)))
        return Result(operator.name, operator.key(problem), entry(problem, MINE))

    monkeypatch.setattr(tuner, "search", search)
    with pytest.raises(KeyboardInterrupt):
        fusedops.autotune.tune(PROBLEMS)
    assert searched == ["closed"]
    assert set(lookup.store().get(Identity.of(INTERPRETER), "norm")) == {NORM.key(p) for p in PROBLEMS[:2]}


@pytest.mark.parametrize(
    ("problems", "options", "error", "message"),
    [
        ([1], {}, TypeError, "problems must hold a family's problems"),
        ([("norm", (1, 2))], {}, TypeError, "a problem of norm is a NormProblem; got tuple"),
        ([("nonsense", PROBLEMS[0])], {}, ValueError, "op must be one of norm"),
        (PROBLEMS, {"budget_s": 0}, ValueError, "budget_s must be a positive number of seconds; got 0"),
        (PROBLEMS, {"key_budget_s": "1"}, ValueError, "key_budget_s must be"),
        (PROBLEMS, {"jobs": 0}, ValueError, "jobs must be a positive integer or None; got 0"),
        (PROBLEMS, {"device": "meta"}, ValueError, "device must be one that kernels run on; got 'meta'"),
    ],
)
def test_wrong_arguments(problems, options, error, message):
    with pytest.raises(error, match=message):
        fusedops.autotune.tune(problems, **options)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = fusedops.nn.LayerNorm(32)
        self.batch = torch.nn.BatchNorm1d(32)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x, scale=1.0):
        return {"out": self.drop(self.batch(self.norm(x))) * scale}


def test_a_model_is_run_forward_and_backward_and_left_as_it_was():
    model, x = Model(), torch.randn(4, 32, requires_grad=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    for inputs in (x, [x], {"x": x, "scale": 2.0}):
        with fusedops.backend("triton"):
            met = fusedops.autotune.problems_of_model(model, inputs)
        assert [item.problem.direction for item in met] == ["forward", "backward"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert x.grad is None
    assert torch.equal(torch.random.get_rng_state(), state)
    with fusedops.backend("triton"):
        assert len(fusedops.autotune.problems_of_model(model, x, training=False)) == 1
        assert len(fusedops.autotune.problems_of_model(model.eval(), x)) == 1


def test_tune_model_searches_what_it_meets(searched):
    with fusedops.backend("triton"):
        results = fusedops.autotune.tune_model(Model(), torch.randn(4, 32))
    assert len(results) == 2
    with pytest.warns(UserWarning, match="met none of fusedops' kernels"):
        assert fusedops.autotune.tune_model(torch.nn.Linear(2, 2), torch.randn(1, 2)) == []


def test_a_search_that_was_cut_short_is_taken_up_again(searched):
    tried = (
        Candidate(MINE.to_json(), "timed", 1e-5, 1e-7),
        Candidate(NormConfig(4, 32, False, 4).to_json(), "demoted", reason=OUT_OF_BUDGET),
    )
    lookup.store().put(Identity.of(INTERPRETER), [entry(PROBLEMS[0], MINE, candidates=tried)])
    # It serves meanwhile.
    assert lookup.look_up(NORM, PROBLEMS[0], INTERPRETER).tuned
    fusedops.autotune.tune(PROBLEMS[:1])
    assert [problem for problem, _ in searched[:-1]] == PROBLEMS[:1]
    assert searched[0][1]["known"] == tried


def test_an_interruption_is_told_as_a_result(searched, monkeypatch):
    def search(operator, problem, *_, **__):
        raise SearchInterrupted(Result(operator.name, operator.key(problem), entry(problem, MINE)))

    monkeypatch.setattr(tuner, "search", search)
    told = []
    with pytest.raises(KeyboardInterrupt):
        fusedops.autotune.tune(PROBLEMS, found=told.append)
    assert [result.problem for result in told] == [NORM.key(PROBLEMS[0])]


def command(*arguments, folder, **environment):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "FUSEDOPS_CACHE_DIR": str(folder), **environment}
    result = subprocess.run(
        [sys.executable, "-m", "fusedops", *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


SECOND = """
import json, torch, fusedops
from fusedops.autotune import tuner
from fusedops.autotune.lookup import look_up
from fusedops.norm.tuning import NORM
from fusedops.runtime.device import INTERPRETER

def tune(*_, **__):
    raise AssertionError("a search")

tuner.tune = tune
with fusedops.autotune.mode("on"):
    y = fusedops.rms_norm(torch.ones(2, 16), 16, torch.ones(16))
    (problem, config), = NORM.memory[INTERPRETER].items()
found = look_up(NORM, problem, INTERPRETER)
print(json.dumps({"y": y.sum().item(), "config": config.to_json(), "source": found.source, "tuned": found.tuned}))
"""


def test_a_search_fills_a_store_that_another_process_uses(tmp_path):
    shapes = tmp_path / "shapes.yaml"
    shapes.write_text("- {op: norm, rows: 2, width: 16, kind: rms, dtype: float32, training: false}\n")
    told = command("autotune", "--shapes", str(shapes), "--each", "15s", "--json", folder=tmp_path / "cache")
    (result,) = json.loads(told.stdout)["results"]
    assert result["refused"] is None
    outcomes = [candidate["outcome"] for candidate in result["entry"]["candidates"]]
    assert outcomes.count("timed") > 1
    assert "[1/1] norm" in told.stderr
    environment = {**os.environ, "TRITON_INTERPRET": "1", "FUSEDOPS_CACHE_DIR": str(tmp_path / "cache")}
    second = subprocess.run([sys.executable, "-c", SECOND], env=environment, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    answer = json.loads(second.stdout)
    assert answer["tuned"]
    assert answer["source"] == "your store"
    assert answer["config"] == result["entry"]["config"]
    assert answer["y"] == pytest.approx(2 * 16, rel=1e-4)
    # Nothing is left to search.
    told = command("autotune", "--shapes", str(shapes), "--dry-run", folder=tmp_path / "cache")
    assert "0 of 1 problems would be searched" in told.stdout
    forget()


class Strange(torch.nn.Module):
    """``kind``: of its output, or what it does beside."""

    def __init__(self, kind=""):
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.register_buffer("steps", torch.zeros(1))
        self.kind = kind

    def forward(self, x):
        self.steps = self.steps + 1  # another tensor, not other numbers
        made = []
        if self.kind == "thread":
            thread = threading.Thread(target=lambda: made.append(self.norm(x)))
            thread.start()
            thread.join()
        y = made[0] if made else self.norm(x)
        return SimpleNamespace(logits=y) if self.kind == "object" else UserDict(y=y) if self.kind == "mapping" else y


@pytest.mark.parametrize("kind", ["", "object", "mapping"])
def test_outputs_of_any_kind_are_differentiated_and_buffers_put_back(kind):
    model = Strange(kind)
    fusedops.patch(model)
    before = model.steps
    met = tuner.problems_of_model(model, torch.randn(4, 32))
    assert [problem.direction for _, problem, _ in met] == ["forward", "backward"]
    assert model.steps is before
    assert before.item() == 0


def test_a_model_can_be_run_inside_inference_mode():
    model = Strange()
    fusedops.patch(model)
    x = torch.randn(4, 32)
    with torch.inference_mode():
        assert len(tuner.problems_of_model(model, x, training=True)) == 2


def test_threads_of_a_model_that_is_run_search_nothing(searched):
    model = Strange("thread")  # on a GPU autograd has threads of its own
    fusedops.patch(model)
    with fusedops.autotune.mode("on"):
        assert len(tuner.problems_of_model(model, torch.randn(4, 32), training=False)) == 1
    assert searched == []


@pytest.mark.parametrize("changes", [{"dtype": "floaty"}, {"itemsize": 0}, {"width": "x"}, {"width": 1 << 70}])
def test_a_problem_that_no_call_meets_costs_the_others_nothing(searched, changes):
    wrong, right = fusedops.autotune.tune([PROBLEMS[0]._replace(**changes), PROBLEMS[1]])
    assert wrong.refused.startswith("no call meets such a problem")
    assert wrong.entry is None
    assert right.entry is not None
