"""``benchmarks/device_check.py`` without a device: its parts, what becomes of those that hang or crash, its report."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fusedops
from benchmarks import device_check, device_parts, device_report
from benchmarks.device_check import BENCHMARKS, SHARES, Check, Run
from benchmarks.measure import GpuTimer
from benchmarks.report import OURS
from fusedops.autotune.bundles import read_bundle
from tests.benchmarks.conftest import CEILINGS


@pytest.fixture
def check(tmp_path: Path) -> Check:
    folder = tmp_path / "parts"
    folder.mkdir()
    return Check(folder, tmp_path / "configs", False, device_check._environment(folder, False))


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


# --- usage -----------------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_check.main([]) == 2
    printed = capsys.readouterr().err
    assert "no CUDA or ROCm device" in printed
    assert "--dry-run" in printed


@pytest.mark.parametrize("arguments", [["--parts", "convolution"], ["--budget", "0"]])
def test_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        device_check.main(["--dry-run", *arguments])
    assert ended.value.code == 2


@pytest.mark.interpreter
def test_a_dry_run_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--dry-run", "--parts", "tune", "decode", "--budget", "300"]
    output, configs = tmp_path / "results", tmp_path / "configs"
    code = device_check.main([*arguments, "--output", str(output), "--configs", str(configs)])
    printed = capsys.readouterr().out
    assert code == 0, printed
    (path,) = (output / "dry-run").glob("*[0-9].json")
    report = json.loads(path.read_text())
    assert report["dry_run"]
    assert list(report["parts"]) == ["tune", "decode"]
    assert {part["result"] for part in report["parts"].values()} == {"done"}
    (problem,) = report["parts"]["tune"]["data"]["problems"]
    assert problem["seconds"] > 0
    ((_, operators),) = read_bundle(configs / "triton_interpreter.json")
    (entry,) = operators["norm"].values()
    assert (entry.source, entry.median) == ("tuned", problem["seconds"])
    page = path.with_suffix(".md").read_text()
    assert "nothing here is a measurement" in page
    assert "0 wrong; nothing was timed" in page


# --- parts that fail -------------------------------------------------------------------------------------------------


def test_a_command_that_hangs_is_stopped_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_check, "_GRACE", 1.0)
    beat = tmp_path / "beat"
    child = f"import time\nwhile True: open({str(beat)!r}, 'w').write(str(time.time())); time.sleep(0.05)"
    hanging = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        f"subprocess.Popen([sys.executable, '-c', {child!r}]); print('begun', flush=True); time.sleep(60)"
    )
    run = device_check.run_command(script(hanging), 3.0, {})
    assert run.result == "timed out"
    assert run.output == "begun\n"
    assert run.seconds < 10
    before = beat.read_text()
    time.sleep(0.5)
    assert beat.read_text() == before


def test_a_command_may_say_what_it_has_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "_GRACE", 2.0)
    slow = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('3 of 5')"
    run = device_check.run_command(script(slow), 4.0, {})
    assert (run.result, run.output) == ("timed out", "3 of 5\n")


@pytest.mark.parametrize(
    ("text", "result"), [("print(1)", "done"), ("1 / 0", "failed"), ("import os; os.abort()", "failed")]
)
def test_a_command_that_ends_by_itself(text: str, result: str) -> None:
    run = device_check.run_command(script(text), 60.0, {})
    assert run.result == result
    assert ("ZeroDivisionError" in run.output) == ("1 / 0" in text)


def test_a_benchmark_that_hangs_leaves_what_it_has_written(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "_GRACE", 0.5)
    written = str(check.folder / "norm-gpu.json")
    hanging = f"import time\nwith open({written!r}, 'w') as f: f.write({json.dumps(benchmark())!r})\ntime.sleep(60)"
    monkeypatch.setattr(device_check, "command_of", lambda *arguments: [script(hanging)])
    part = device_check.run_part(check, "norm", 3.0)
    assert part["result"] == "timed out"
    assert part["summary"] == "2 results, 1 problems not reached"
    assert part["data"]["results"][0]["provider"] == OURS
    assert not device_check.right({"parts": {"norm": part}})


def test_the_other_parts_still_run(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {}

    def run_part(check: Check, name: str, limit: float) -> dict[str, Any]:
        limits[name] = limit
        if name == "tune":
            raise OSError("made up")
        data = benchmark(ratio=3.0 if name == "decode" else 0.5) if name in BENCHMARKS else None
        return {"result": "done", "summary": "fine", "seconds": 0.0, "data": data}

    monkeypatch.setattr(device_check, "run_part", run_part)
    monkeypatch.setattr(device_check, "_device", lambda: {"name": "Made-up GPU"})
    monkeypatch.setattr(device_check, "_start", lambda *arguments: pytest.fail("no part is a process here"))
    parts = [name for name in SHARES if name != "tests"]
    report = device_check.run_parts(check, parts, 240.0)
    assert list(report["parts"]) == parts
    assert report["parts"]["tune"]["summary"] == "OSError: made up"
    assert all(report["parts"][name]["result"] == "done" for name in parts if name != "tune")
    # Nothing took any time: the last part may use all that is left.
    assert limits["tune"] == pytest.approx(240 * SHARES["tune"] / sum(SHARES[name] for name in parts), rel=0.05)
    assert limits[parts[-1]] == pytest.approx(240, rel=0.05)
    assert report["worst"][0]["case"].startswith("decode: ")
    assert report["worst"][0]["ratio"] == pytest.approx(3.0)


def test_what_the_budget_leaves_out_is_listed(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "_device", lambda: {"name": "Made-up GPU"})
    report = device_check.run_parts(check, ["norm", "trace"], 1.0)
    assert {part["result"] for part in report["parts"].values()} == {"left out"}
    assert "the time was up" in device_report.markdown(report)


def test_the_benchmarks_warm_the_compilers_caches_while_the_tests_run(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def start(command: list[str], *more: Any) -> subprocess.Popen[Any]:
        started.append(command)
        return subprocess.Popen(script("import time; time.sleep(60)"), start_new_session=True)

    monkeypatch.setattr(device_check, "_start", start)
    with device_check.warming(check, ["tests", "norm", "decode"]):
        assert [Path(command[1]).stem for command in started] == ["decode", "norm"]
    for command in started:
        assert command[command.index("--seconds") + 1] == "0"
        assert command[command.index("--output") + 1] == str(check.folder / "warm-up")


def test_the_tests_part_tells_pytests_closing_line(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(command: list[str], limit: float, environment: dict[str, str]) -> Run:
        asked.append(command)
        return Run("failed", 1, "F\n1 failed, 3 passed in 2.00s\n", 2.0)

    monkeypatch.setattr(device_check, "run_command", run)
    part = device_check.run_part(check, "tests", 60.0)
    assert (part["result"], part["summary"]) == ("failed", "1 failed, 3 passed in 2.00s")
    assert asked[0][asked[0].index("-m", 3) + 1] == "gpu"


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("....\n=== 312 passed, 2 skipped in 40.11s ===\n", "312 passed, 2 skipped in 40.11s"),
        ("F\n1 failed, 3 passed in 2.00s (0:00:02)\nbye", "1 failed, 3 passed in 2.00s (0:00:02)"),
        ("ImportError: x\n", "ImportError: x"),
        ("", "no output"),
    ],
)
def test_closing_line(output: str, line: str) -> None:
    assert device_check.closing_line(output) == line


def test_parts_have_a_store_of_their_own(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    environment = device_check._environment(check.folder, False)
    assert Path(environment["FUSEDOPS_CACHE_DIR"]).parent == check.folder
    assert "TRITON_INTERPRET" not in environment


@pytest.mark.parametrize("limit", [3.0, 20.0, 120.0])
def test_a_part_begins_nothing_when_its_time_is_nearly_up(limit: float) -> None:
    assert 0 < device_check.soft(limit) < limit


# --- parts' own work -------------------------------------------------------------------------------------------------


@pytest.mark.interpreter
def test_launches_are_timed_beside_torchs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert device_parts.main(["launches", "--dry-run", "--output", str(tmp_path / "a.json")]) == 0
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["failed"] == {}
    launched = found["host_us"]
    assert {"a Triton kernel", "attention, fusedops", "attention, torch"} <= set(launched)
    assert all(us > 0 for us in launched.values())
    assert "a Triton launch takes the host" in capsys.readouterr().out


@pytest.mark.interpreter
def test_an_operator_that_fails_is_listed_and_the_others_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusedops, "linear", lambda *args: 1 / 0)
    assert device_parts.main(["launches", "--dry-run", "--output", str(tmp_path / "a.json")]) == 0
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["failed"] == {"linear, fusedops": "ZeroDivisionError: division by zero"}
    assert "attention, fusedops" in found["host_us"]
    assert found["summary"].endswith("1 failed")


def test_a_trace_is_of_a_patched_models_steps(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert device_parts.main(["trace", "--dry-run", "--output", str(tmp_path / "a.json")]) == 0
    found = json.loads((tmp_path / "a.json").read_text())
    assert any("mm" in row["name"] for row in found["kernels"])
    assert json.loads(gzip.decompress((tmp_path / found["file"]).read_bytes()))["traceEvents"]


def test_every_operator_has_its_turn() -> None:
    found = device_parts.in_turn(["a1", "a2", "b1", "a3", "c1", "c2"], lambda item: item[0])
    assert found == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_a_trace_tells_the_devices_kernels_the_longest_first() -> None:
    kinds = torch.autograd.DeviceType
    events = [
        SimpleNamespace(key=k, device_type=d, self_device_time_total=us, self_cpu_time_total=us + 1, count=2)
        for k, d, us in (
            ("op", kinds.CPU, 9.0),
            ("short", kinds.CUDA, 1.0),
            ("long", kinds.CUDA, 5.0),
            ("idle", kinds.CUDA, 0.0),
        )
    ]
    assert [row["name"] for row in device_parts.kernels_of(events, on_gpu=True)] == ["long", "short"]
    assert [row["us"] for row in device_parts.kernels_of(events, on_gpu=False)] == [10.0, 6.0, 2.0, 1.0]


def test_the_timer_flushes_longer_than_the_host_launches(pretended_gpu: torch.device) -> None:
    timer = GpuTimer(pretended_gpu)
    timer._flush_seconds = 2e-3
    quick, slow = (timer._flushes_for(lambda seconds=seconds: time.sleep(seconds)) for seconds in (0.0, 0.05))
    assert 1 <= quick < slow
    samples = timer.measure({"a": lambda: time.sleep(0.002), "b": lambda: None}, seconds=0.0, least=3)
    assert samples["a"].count == samples["b"].count == 3
    assert samples["a"].median >= 0.002 > samples["b"].median


# --- the page --------------------------------------------------------------------------------------------------------


def benchmark(ratio: float = 2.0) -> dict[str, Any]:
    common = {"operator": "rms_norm", "width": 1024, "error": None}
    return {
        "case": ["operator", "width"], "dtype": "bfloat16", "ceilings": CEILINGS, "left_out": {"apex": "not installed"},
        "not_reached": ["layer_norm 4096"],
        "results": [
            {**common, "provider": OURS, "seconds_median": ratio * 1e-5},
            {**common, "provider": "torch", "seconds_median": 1e-5},
        ],
    }  # fmt: skip


def part(result: str = "done", data: Any = None, **changes: Any) -> dict[str, Any]:
    return {"result": result, "summary": "made up", "seconds": 3.2, "data": data, **changes}


def made_up_report(**parts: dict[str, Any]) -> dict[str, Any]:
    report: dict[str, Any] = {
        "date": "2026-01-01T00:00:00+00:00", "dry_run": False, "seconds": 12.0,
        "device": {"name": "Made-up GPU", "arch": "sm_90", "multiprocessor_count": 132},
        "versions": {"torch": "2.13.0", "rocm": None}, "parts": parts,
    }  # fmt: skip
    return {**report, "worst": device_report.worst_of(report)}


def test_the_page_tells_what_ran_and_how_fast(check: Check, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = {"op": "norm", "problem": "width=1024", "seconds": 1e-5, "default_seconds": 2e-5, "gain": 2.0}
    report = made_up_report(
        tests=part("failed", output=["E   assert 1 == 2"]),
        tune=part(data={"problems": [problem, {**problem, "gain": None}]}),
        norm=part(data=benchmark()),
        launches=part(data={"host_us": {"a Triton kernel": 8.4}, "graph_us": 1.5, "failed": {"linear, torch": "E: x"}}),
        trace=part(data={"steps": 3, "kernels": [{"name": "norm_kernel", "us": 1234.0, "count": 6}]}),
    )
    page = device_report.markdown(report)
    assert page.startswith("# Made-up GPU\n")
    assert "sm_90, 132 multiprocessors, torch 2.13.0" in page.replace("; ", ", ")
    assert "A copy reaches 4.00 TB/s, a bfloat16 product 700 TFLOP/s." in page
    assert "| tests | failed | 3 s | made up |" in page
    assert "E   assert 1 == 2" in page
    assert "norm: rms_norm, width 1024: 2.00 times the time of torch" in page
    assert "| rms_norm, width 1024 | 20 µs | torch | 10 µs | 2.00 |" in page
    assert "Left out: apex: not installed." in page
    assert "Not reached: layer_norm 4096." in page
    assert page.count("| norm width=1024 | 10 µs | 20 µs | 2.00 |") == 1
    assert "- linear, torch: E: x" in page
    assert "A launch in a replayed CUDA graph: 1.50 µs." in page
    assert "| norm_kernel | 6 | 1.23 ms |" in page
    (check.folder / "norm-gpu.png").write_bytes(b"png")
    (check.folder / "trace.json.gz").write_bytes(b"gz")
    assert device_check.finish(check, report, tmp_path / "results") == 1
    written = tmp_path / "results" / "made-up-gpu"
    assert sorted(path.name for path in written.iterdir()) == [
        "2026-01-01-0000-norm-gpu.png", "2026-01-01-0000-trace.json.gz", "2026-01-01-0000.json",
        "2026-01-01-0000.md",
    ]  # fmt: skip
    assert capsys.readouterr().out.rstrip().endswith("norm: rms_norm, width 1024: 2.00 times the time of torch")


@pytest.mark.parametrize(
    ("result", "right"), [("done", True), ("left out", True), ("failed", False), ("timed out", False)]
)
def test_verdict(result: str, right: bool) -> None:
    assert device_check.right(made_up_report(norm=part(), trace=part(result))) is right
