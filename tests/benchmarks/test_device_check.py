"""``benchmarks/device_check.py`` without a device: its cases, its report, its exit codes."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fusedops
from benchmarks import cases, device_check
from benchmarks.cases import OURS, Case, all_cases
from benchmarks.measure import GpuTimer, Sample


def test_a_dry_run_runs_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert device_check.main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "DIFFERS" not in printed
    for operator in ("layer_norm", "rms_norm", "linear", "attention"):
        for direction in ("forward", "backward"):
            assert any(line.startswith(operator) and direction in line for line in printed.splitlines())


def test_a_dry_run_finds_a_wrong_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = fusedops.rms_norm
    monkeypatch.setattr(fusedops, "rms_norm", lambda *args: genuine(*args) * 1.05)
    assert device_check.main(["--dry-run", "--only", "rms"]) == 1


def test_without_a_gpu_it_says_so_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_check.main([]) == 2
    assert "no CUDA or ROCm device" in capsys.readouterr().err


def test_an_unknown_operator_is_wrong_usage() -> None:
    with pytest.raises(SystemExit) as ended:
        device_check.main(["--dry-run", "--only", "convolution"])
    assert ended.value.code == 2


def test_cases_have_distinct_names_and_alternate_the_families() -> None:
    found = all_cases()
    assert len({case.name for case in found}) == len(found)
    assert {case.operator for case in found[:3]} == {"attention", "linear", "layer_norm"}
    assert all(case.work > 0 for case in found)


def test_largest_distance_is_relative_and_sees_nan() -> None:
    exact = torch.tensor([3.0, 4.0])
    runs = {OURS: lambda: (exact * 1.1, exact), "torch": lambda: (exact, exact)}
    assert device_check.largest_distance(runs) == pytest.approx(0.1, rel=1e-4)
    runs[OURS] = lambda: (exact, exact * float("nan"))
    assert device_check.largest_distance(runs) == float("inf")


@pytest.fixture
def pretended_gpu(pretended_gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1 << 20))
    limits = made_up_report()["ceilings"]
    monkeypatch.setattr(device_check, "ceilings", lambda timer, device: limits)
    return pretended_gpu


@pytest.mark.interpreter
def test_a_check_from_end_to_end(pretended_gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = all_cases(tiny=True)[:3]
    broken = replace(chosen[-1], problem="broken", prepare=lambda device: {OURS: lambda: 1 / 0})
    assert device_check.check([*chosen, broken], pretended_gpu, 60.0, tmp_path, tests=False) == 1
    report = json.loads((tmp_path / "triton-interpreter.json").read_text())
    assert [case["operator"] for case in report["cases"]] == [case.operator for case in chosen]
    assert all(case["agrees"] and case["speedup"] > 0 for case in report["cases"])
    assert all(sample["count"] >= 7 for case in report["cases"] for sample in case["seconds"].values())
    assert [failure["case"] for failure in report["failed"]] == [broken.name]
    assert "ZeroDivisionError" in report["failed"][0]["error"]
    assert (tmp_path / "triton-interpreter.md").read_text() == device_check.markdown(report)


def test_what_the_budget_leaves_out_is_listed(pretended_gpu: torch.device, tmp_path: Path) -> None:
    chosen = all_cases(tiny=True)
    assert device_check.check(chosen, pretended_gpu, 0.0, tmp_path, tests=False) == 0
    report = json.loads((tmp_path / "triton-interpreter.json").read_text())
    assert report["left_out"] == [case.name for case in chosen]
    assert report["cases"] == []


def test_the_timer_flushes_longer_than_the_host_launches(pretended_gpu: torch.device) -> None:
    timer = GpuTimer(pretended_gpu)
    quick, slow = (timer._flushes_for(lambda seconds=seconds: time.sleep(seconds)) for seconds in (0.0, 0.01))
    assert 1 <= quick < slow
    samples = timer.measure({"a": lambda: time.sleep(0.002), "b": lambda: None}, seconds=0.0, least=3)
    assert samples["a"].count == samples["b"].count == 3
    assert samples["a"].median >= 0.002 > samples["b"].median


def case_result(**changes: Any) -> dict[str, Any]:
    case = Case(
        "linear", "8 x 8 -> 8 relu", "forward", 2_000_000_000, "flop", cases._Linear(8, 8, 8, "relu", "forward")
    )
    samples = {OURS: Sample.of([1e-5]), "slow": Sample.of([4e-5]), "addmm + activation": Sample.of([2e-5])}
    return {**device_check.result_of(case, samples, 0.001), **changes}


def made_up_report(**changes: Any) -> dict[str, Any]:
    return {
        "date": "2026-01-01T00:00:00+00:00",
        "device": {"name": "Made-up GPU", "arch": "sm_90", "multiprocessor_count": 132, "memory": 1},
        "versions": {"torch": "2.13.0", "rocm": None},
        "tests": {"result": "passed", "summary": "3 passed in 1.0s", "seconds": 1.0},
        "ceilings": {"copy_bytes_per_second": 4e12, "product_flops_per_second": 7e14},
        "cases": [case_result(), case_result(operator="rms_norm", unit="byte", rate=2e12)],
        "failed": [],
        "left_out": [],
        **changes,
    }


def test_a_result_compares_with_the_best_of_torchs_ways() -> None:
    result = case_result()
    assert result["best_torch"] == "addmm + activation"
    assert result["speedup"] == pytest.approx(2.0)
    assert result["rate"] == pytest.approx(2e14)
    assert result["agrees"]


def test_the_page_tells_what_ran_and_how_fast() -> None:
    page = device_check.markdown(
        made_up_report(left_out=["attention x"], failed=[{"case": "norm y", "error": "E: z\nq"}])
    )
    assert page.startswith("# Made-up GPU\n")
    assert "| linear | 8 x 8 -> 8 relu | forward | 10 µs | 20 µs (addmm + activation) | 2.00 | 200 TFLOP/s |" in page
    assert "2.00 TB/s (50% of a copy)" in page
    assert "passed (3 passed in 1.0s)" in page
    assert "Left out, the time was up: attention x." in page
    assert "Failed: norm y: E: z\n" in page
    json.dumps(made_up_report())


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({}, True),
        ({"tests": None}, True),
        ({"tests": {"result": "failed"}}, False),
        ({"tests": {"result": "unfinished"}}, False),
        ({"failed": [{"case": "x", "error": "y"}]}, False),
        ({"cases": [case_result(agrees=False)]}, False),
    ],
    ids=["all right", "tests left out", "tests failed", "tests unfinished", "a case failed", "a case is wrong"],
)
def test_verdict(changes: dict[str, Any], right: bool) -> None:
    assert device_check.right(made_up_report(**changes)) is right


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("....\n=== 312 passed, 2 skipped in 40.11s ===\n", "312 passed, 2 skipped in 40.11s"),
        ("F\n1 failed, 3 passed in 2.00s (0:00:02)\nbye", "1 failed, 3 passed in 2.00s (0:00:02)"),
        ("ImportError: x\n", "ImportError: x"),
        ("", "no output"),
    ],
)
def test_summary_is_pytests_closing_line(output: str, line: str) -> None:
    assert device_check.summary(output) == line


def test_file_name() -> None:
    assert device_check.file_name("NVIDIA H200") == "nvidia-h200"
    assert device_check.file_name("AMD Instinct MI300X (gfx942)") == "amd-instinct-mi300x-gfx942"
