"""Ranks agree: one searches, all use what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import fusedops
from fusedops.autotune import ranks, resolve
from fusedops.norm.tuning import NORM, NormProblem
from tests.autotune.test_resolve import CONFIG, entry, settings  # noqa: F401 (a fixture)

pytestmark = pytest.mark.interpreter

PROGRAM = """
import json, sys, torch, torch.distributed as dist
import fusedops
from fusedops.autotune import ranks, resolve
from fusedops.autotune.identity import Identity
from fusedops.autotune.lookup import store
from fusedops.autotune.search import Result
from fusedops.norm.tuning import NORM, NormConfig, NormProblem
from fusedops.runtime.device import INTERPRETER
from tests.autotune.test_resolve import entry

rank, path, fails = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "fails"
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
searched = []

def tune(wanted, **options):
    if fails:
        raise ValueError("nothing fits")
    results = []
    for operator, problem, _ in wanted:
        searched.append(problem.width)
        found = entry(problem, NormConfig(4, 4096, False, 8))
        store().put(Identity.of(INTERPRETER), [found])
        results.append(Result(operator.name, operator.key(problem), found))
    return results

ranks.tune = tune
cpu = torch.device("cpu")
problem = NormProblem(64 * (rank + 1), 4, "forward", rows=16, dtype="float32")
shared = NormProblem(32, 4, "forward", rows=16, dtype="float32")
with fusedops.autotune.mode("on"):
    before = [resolve.resolve(NORM, p, cpu).block_m for p in (problem, shared)]
    try:
        entries = fusedops.autotune.sync(problems=["norm"] if sys.argv[3] == "wrong" and rank else None)
    except (RuntimeError, TypeError) as error:
        print(json.dumps({"error": str(error)}))
        raise SystemExit
    after = [resolve.resolve(NORM, NormProblem(w, 4, "forward", rows=16, dtype="float32"), cpu).block_m
             for w in (32, 64, 128)]
print(json.dumps({"searched": searched, "after": after, "entries": [e.problem["width"] for e in entries]}))
dist.destroy_process_group()
"""


def run_both(tmp_path, fails="works"):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "meeting"), fails],
            env={**os.environ, "FUSEDOPS_CACHE_DIR": str(tmp_path / f"rank {rank}")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    answers = []
    for process in processes:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        answers.append(json.loads(out.splitlines()[-1]))
    return answers


def test_the_first_rank_searches_what_any_has_missed(tmp_path):
    first, second = run_both(tmp_path)
    assert first["searched"] == [64, 32, 128]
    assert second["searched"] == []
    # Ranks have stores of their own, and use the same configurations afterwards.
    assert first["after"] == second["after"] == [4, 4, 4]
    assert first["entries"] == second["entries"] == [64, 32, 128]


def test_a_search_that_fails_fails_on_every_rank(tmp_path):
    for answer in run_both(tmp_path, "fails"):
        assert answer["error"] == "sync: the search on the group's first rank failed: ValueError: nothing fits"


def test_a_wrong_argument_on_one_rank_keeps_none_waiting(tmp_path):
    first, second = run_both(tmp_path, "wrong")
    assert second["error"].startswith("tune: problems must hold")
    assert first["error"] == f"sync: rank 1 of the group has no problems to search: TypeError: {second['error']}"


def test_where_nothing_was_missed_no_gpu_is_needed(settings, monkeypatch):  # noqa: F811
    def none(device):
        raise RuntimeError("no GPU")

    monkeypatch.setattr("fusedops.autotune.tuner.tunable_device", none)
    assert fusedops.autotune.sync() == []
    with pytest.warns(UserWarning, match="met none of fusedops' kernels"):
        assert fusedops.autotune.tune_model(torch.nn.Identity(), torch.ones(2)) == []


def test_without_a_process_group_it_searches_what_was_missed(settings, monkeypatch):  # noqa: F811
    from fusedops.autotune.search import Result

    asked = []

    def tune(wanted, **options):
        asked.extend(item.problem for item in wanted)
        return [Result("norm", "", entry(item.problem, CONFIG)) for item in wanted]

    monkeypatch.setattr(ranks, "tune", tune)
    problem = NormProblem(64, 4, "forward", rows=16, dtype="float32")
    resolve.resolve(NORM, problem, torch.device("cpu"))
    assert [found.problem for found in fusedops.autotune.sync()] == [NORM.problem_json(problem)]
    assert asked == [problem]
    assert fusedops.autotune.sync() == []
