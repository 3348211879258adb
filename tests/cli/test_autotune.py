"""``fusedops autotune``: where problems come from, what is told, exit codes, and a ranking for an absent GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from fusedops.autotune import lookup, tuner
from fusedops.autotune.entries import Candidate
from fusedops.autotune.identity import Identity
from fusedops.autotune.record import record
from fusedops.autotune.roofline import PRODUCTS
from fusedops.autotune.search import Progress, Result, SearchInterrupted
from fusedops.cli.app import app
from fusedops.cli.durations import human, seconds
from fusedops.norm.tuning import NORM, NormConfig, NormProblem
from tests.autotune.test_resolve import CONFIG, H100, PROBLEM, entry, settings  # noqa: F401 (a fixture)
from tests.harness.compile import ROOT, compiling_environment

PROBLEMS = [NormProblem(width, 4, "forward", rows=16, dtype="float32") for width in (32, 64)]


@pytest.fixture(autouse=True)
def own_store(settings, monkeypatch):  # noqa: F811
    monkeypatch.setattr(lookup, "shipped_files", lambda: ())
    return settings


@pytest.fixture
def recorded(tmp_path):
    for problem in PROBLEMS:
        record(NORM, problem, H100, tmp_path / "met.jsonl")
    return str(tmp_path / "met.jsonl")


def run(*arguments: str, code: int = 0):
    result = CliRunner().invoke(app, ["autotune", *arguments])
    assert result.exit_code == code, result.output
    return result


def words(result) -> str:
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--offline"], "--offline ranks for a GPU that is not here: name it"),
        (["--target", "H100"], "--target names a GPU that is not here"),
        (["--offline", "--target", "H100", "--each", "5s"], "--each is for searches"),
        (["--dtype", "fp64"], "--dtype must be one of bf16"),
        (["--budget", "soon"], "takes a duration such as 90s"),
        (["--each", "0s"], "more than no time"),
        (["--hf", "a.json", "--shapes", "b.yaml"], "one of --model, --hf, --from and --shapes"),
        (["--jobs", "0"], "--jobs"),
    ],
)
def test_wrong_usage(arguments, message):
    assert message in words(run(*arguments, code=2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--offline", "--target", "H1000"], "target must be one of T4"),
        (["--from", "missing.jsonl"], "missing.jsonl: No such file"),
        (["--op", "nonsense"], "op must be one of norm"),
        (["--model", "nowhere"], "--model must be module:factory; got 'nowhere'"),
        (["--model", "no.such:factory"], "No module named 'no'"),
        (["--model", "math:pi"], "math:pi must be callable"),
        (["--model", "math:tau.x"], "has no attribute"),
        (["--model", "builtins:list"], "must return a torch.nn.Module"),
    ],
)
@pytest.mark.interpreter
def test_what_cannot_be_searched(arguments, message):
    assert message in words(run(*arguments, code=1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "shapes.yaml:"),
        ("[" * 5000, "shapes.yaml: maximum recursion depth"),
        ("op: norm", "a list of calls"),
        ("- {op: norm, rows: 1}", "needs width"),
    ],
)
@pytest.mark.interpreter
def test_shapes_that_are_none(tmp_path, text, message):
    path = tmp_path / "shapes.yaml"
    path.write_text(text)
    assert message in words(run("--shapes", str(path), code=1))


def test_a_dry_run_says_what_would_be_searched(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"hidden_size": 256, "num_attention_heads": 4, "hidden_act": "gelu"}))
    arguments = ("--hf", str(path), "--batch", "1", "--length", "128", "--offline", "--target", "H100", "--dry-run")
    found = json.loads(run(*arguments, "--op", "norm", "--json").stdout)
    assert found["device"] == "H100"
    assert [row["served_by"] for row in found["problems"]] == ["default", "default"]
    assert all(row["candidates"] > 4 for row in found["problems"])
    assert "2 of 2 problems would be ranked. Nothing was done." in words(run(*arguments, "--op", "norm"))
    assert len(json.loads(run(*arguments, "--inference", "--json").stdout)["problems"]) < 8


@pytest.mark.interpreter
def test_what_is_found_is_told(recorded, monkeypatch):
    def tune(problems, *, found, progress, **options):
        assert options == {"budget_s": 600.0, "key_budget_s": 5.0, "jobs": 2, "again": False}
        for item in problems:
            progress(Progress("norm", NORM.key(item.problem), "time", 9, 9, 1, 3, 1e-5, 2e-5, 4.0, "left out: 3 wide"))
            tried = (Candidate(CONFIG.to_json(), "timed", 1e-5, 1e-7), Candidate({}, "wrong", reason="off"))
            found(Result("norm", NORM.key(item.problem), entry(item.problem, candidates=tried), tried, seconds=2.0))

    monkeypatch.setattr(tuner, "tune", tune)
    result = run("--from", recorded, "--budget", "10m", "--each", "5s", "-j", "2")
    assert "[2/2] norm width=64" in result.output
    assert "2.00×, 1 of 2 tried, 1 failed or were wrong" in words(result)
    assert "2 of 2 problems have a configuration, 2 of them another than the default" in words(result)
    found = json.loads(run("--from", recorded, "--budget", "10m", "--each", "5s", "-j", "2", "--json").stdout)
    assert [item["entry"]["config"] for item in found["results"]] == [CONFIG.to_json()] * 2


@pytest.mark.interpreter
def test_a_failure_exits_with_1_and_a_spent_budget_does_not(recorded, monkeypatch):
    reasons = iter(["every candidate failed", "the budget is spent"])

    def tune(problems, *, found, **options):
        reason = next(reasons)
        for item in problems:
            found(Result.not_searched(NORM, item.problem, reason))

    monkeypatch.setattr(tuner, "tune", tune)
    assert "every candidate failed" in words(run("--from", recorded, code=1))
    assert "The same command goes on with what is left." in words(run("--from", recorded))


@pytest.mark.interpreter
def test_an_interruption_shows_what_there_is(recorded, monkeypatch):
    def tune(problems, *, found, **options):
        found(Result("norm", NORM.key(PROBLEMS[0]), entry(PROBLEMS[0])))
        raise SearchInterrupted(Result("norm", NORM.key(PROBLEMS[1]), None))

    monkeypatch.setattr(tuner, "tune", tune)
    assert "1 of 2 problems have a configuration" in words(run("--from", recorded, code=130))


@pytest.mark.interpreter
def test_a_line_that_is_no_problem_is_told_of(recorded, monkeypatch):
    monkeypatch.setattr(tuner, "tune", lambda problems, **options: None)
    with open(recorded, "a") as file:
        file.write("{\n")
    assert "left out: " in words(run("--from", recorded))


PROGRAM = """
import torch, fusedops
def tiny():
    return torch.nn.Sequential(torch.nn.LayerNorm(64)), torch.randn(16, 64)
"""


def offline(tmp_path, *arguments):
    (tmp_path / "tiny_model.py").write_text(PROGRAM)
    environment = {
        **compiling_environment(),
        "FUSEDOPS_CACHE_DIR": str(tmp_path / "cache"),
        "FUSEDOPS_AUTOTUNE": "cached",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    result = subprocess.run(
        [sys.executable, "-m", "fusedops", *arguments],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


def test_ranking_for_a_gpu_that_is_not_here(tmp_path):
    pytest.importorskip("triton")
    arguments = ("--model", "tiny_model:tiny", "--offline", "--target", "H100", "--inference", "--json")
    (result,) = offline(tmp_path, "autotune", *arguments)["results"]
    found = result["entry"]
    assert (found["source"], found["median"], found["default_median"]) == ("heuristic", None, None)
    assert {candidate["outcome"] for candidate in found["candidates"]} <= {"estimated", "demoted", "pruned", "failed"}
    assert any("estimated at" in candidate["reason"] for candidate in found["candidates"])
    NormConfig.from_json(found["config"])
    (listed,) = offline(tmp_path, "cache", "list", "--json")["entries"]
    assert listed["source"] == "heuristic"
    assert listed["device"] == Identity.of(PRODUCTS["H100"].facts).key


@pytest.mark.parametrize(
    ("text", "value"), [("90", 90), ("90s", 90), ("10m", 600), ("1h30m", 5400), ("2 h", 7200), ("0.5m", 30)]
)
def test_durations(text, value):
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "m", "10x", "-5s", "5s5", "1e3", "0", "99999999999999d"])
def test_durations_that_are_none(text):
    with pytest.raises(typer.BadParameter):
        seconds(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (8.12e-7, "812 ns"), (1.234e-5, "12.3 µs"), (4.56e-3, "4.56 ms"), (7.84, "7.84 s"),
        (750, "12 m 30 s"), (3900, "1 h 5 m"), (9.999e-4, "1 ms"),
    ],
)  # fmt: skip
def test_times_as_people_write_them(value, text):
    assert human(value) == text


def test_the_problem_of_the_other_tests_is_one():
    assert NORM.problem_from_json(NORM.problem_json(PROBLEM)) == PROBLEM
