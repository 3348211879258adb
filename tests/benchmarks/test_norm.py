"""``benchmarks/norm.py`` without a device: its providers, its timed path, its report, and what it reads from code."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import compare, norm, norm_providers, norm_static
from benchmarks.compare import CLOSE
from benchmarks.measure import Sample
from benchmarks.norm_providers import DIRECTIONS, OPERATORS, Inputs, Problem
from benchmarks.norm_static import KernelReport, StaticResult
from benchmarks.report import OURS
from tests.harness.compile import ROOT, compiling_environment

CPU = torch.device("cpu")


def problem(operator: str = "layer_norm", dtype: torch.dtype = torch.bfloat16) -> Problem:
    return Problem(operator, 64 if operator == "group_norm" else 6, 40, dtype)


# --- providers -------------------------------------------------------------------------------------------------------


def test_providers_that_are_not_installed_are_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> dict[str, Any]:
        import no_such_library

        return no_such_library

    def outdated() -> dict[str, Any]:
        return {"layer_norm": F.no_such_function}

    monkeypatch.setitem(norm_providers.PROVIDERS, "apex", absent)
    monkeypatch.setitem(norm_providers.PROVIDERS, "quack", outdated)
    found, left_out = compare.load(norm_providers.PROVIDERS, ["fusedops", "torch", "apex", "quack"])
    assert list(found) == ["fusedops", "torch"]
    assert left_out["apex"] == "no_such_library is not installed"
    assert left_out["quack"].startswith("AttributeError")


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", CLOSE, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_right_results_are_close_and_slightly_wrong_ones_are_not(operator: str, dtype: torch.dtype) -> None:
    inputs = Inputs.of(problem(operator, dtype), CPU)
    right = compare.load(norm_providers.PROVIDERS, ["torch"])[0]["torch"][operator]
    assert norm_providers.distance(problem(operator, dtype), right, inputs) <= CLOSE[dtype]

    def wrong(x, residual, weight, bias):  # type: ignore[no-untyped-def]
        output, *rest = right(x, residual, weight, bias)
        return output + output.detach() * 4 * CLOSE[dtype], *rest

    assert norm_providers.distance(problem(operator, dtype), wrong, inputs) > CLOSE[dtype]


def test_a_wrong_gradient_and_nan_are_seen() -> None:
    inputs = Inputs.of(problem(), CPU)

    def detached(x, residual, weight, bias):  # type: ignore[no-untyped-def]
        return (F.layer_norm(x, weight.shape, weight, bias) + 0.1 * (bias - bias.detach()),)

    def poisoned(x, residual, weight, bias):  # type: ignore[no-untyped-def]
        return (F.layer_norm(x, weight.shape, weight, bias) * float("nan"),)

    assert norm_providers.distance(problem(), detached, inputs) == pytest.approx(0.1, rel=0.1)
    assert norm_providers.distance(problem(), poisoned, inputs) == math.inf


def test_the_reference_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs.of(problem("add_layer_norm"), CPU)
    function = compare.load(norm_providers.PROVIDERS, ["torch"])[0]["torch"]["add_layer_norm"]
    whole = norm_providers.distance(problem("add_layer_norm"), function, inputs)
    monkeypatch.setattr(norm_providers, "_CHUNK", 80)  # two rows
    assert norm_providers.distance(problem("add_layer_norm"), function, inputs) == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("operator", OPERATORS)
def test_each_direction_gives_what_it_is_named_for(operator: str) -> None:
    inputs = Inputs.of(problem(operator), CPU)
    function = compare.load(norm_providers.PROVIDERS, ["torch"])[0]["torch"][operator]
    forward, backward, both = (norm_providers.run_in(direction, function, inputs)() for direction in DIRECTIONS)
    shapes = [tensor.shape for tensor in inputs.tensors if tensor is not None]
    assert [output.shape for output in forward] == [inputs.x.shape] * len(inputs.gradients)
    assert not forward[0].requires_grad
    for gradients in (backward, both):
        assert [gradient.shape for gradient in gradients] == shapes
    torch.testing.assert_close(backward, both)


def test_least_bytes_of_forward_and_backward_add_up() -> None:
    case = problem("add_layer_norm")
    assert case.least_bytes("forward") == 2 * (4 * 6 * 40 + 2 * 40)  # x, residual, y, their sum; weight, bias
    assert case.least_bytes("both") == case.least_bytes("forward") + case.least_bytes("backward")


# --- timed -----------------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert norm.main(["--providers", "torch"]) == 1
    assert "--static" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--widths", "0"], ["--mib", "0"], ["--operators", "batch_norm"]])
def test_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        norm.main(arguments)
    assert ended.value.code == 2


def test_a_dry_run_compares_every_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert norm.main(["--dry-run", "--providers", "torch"]) == 0
    printed = capsys.readouterr().out
    for operator in OPERATORS:
        for name in (OURS, "torch"):
            assert f"{operator}: {name}: agrees with float64" in printed


def test_a_dry_run_finds_a_wrong_operator(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    genuine = norm_providers.PROVIDERS[OURS]()
    broken = {"rms_norm": lambda *tensors: (genuine["rms_norm"](*tensors)[0] * 1.05,)}
    monkeypatch.setitem(norm_providers.PROVIDERS, OURS, lambda: broken)
    assert norm.main(["--dry-run", "--operators", "rms_norm", "--providers", "torch"]) == 1
    assert "rms_norm: fusedops: WRONG" in capsys.readouterr().out


@pytest.mark.interpreter
def test_from_timing_to_files(
    pretended_gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--operators", "rms_norm", "--widths", "32", "48", "--mib", "0.0004", "--seconds", "0"]
    options = norm._options([*arguments, "--output", str(tmp_path)])
    providers = compare.load(norm_providers.PROVIDERS, [OURS, "torch"])[0]
    providers["broken"] = {"rms_norm": lambda x, r, w, b: (x * w,)}
    providers["failing"] = {"rms_norm": lambda x, r, w, b: (1 / 0,)}
    providers["narrow"] = {"layer_norm": lambda x, r, w, b: (x,)}  # has no such operator
    assert norm.timed(providers, {"apex": "apex is not installed"}, pretended_gpu, options) == 0
    assert "rms_norm, backward" in capsys.readouterr().out
    report = json.loads((tmp_path / "norm-triton-interpreter.json").read_text())
    results = report["results"]
    assert report["left_out"] == {"apex": "apex is not installed"}
    assert len(results) == 2 * 3 * 4  # widths, directions, providers that have it
    for result in results:
        assert result["rows"] * result["width"] * 2 >= 0.0004 * 2**20
        if result["provider"] in (OURS, "torch"):
            assert result["error"] is None
            assert result["seconds_median"] > 0
            assert result["count"] >= 7
            rate = result["least_bytes"] / result["seconds_median"] / 1e9
            assert result["gigabytes_per_second"] == pytest.approx(rate)
            percent = 100 * result["copy_seconds"] / result["seconds_median"]
            assert result["percent_of_copy"] == pytest.approx(percent)
        else:
            assert result["error"].startswith("WRONG" if result["provider"] == "broken" else "ZeroDivisionError")
            assert result["seconds_median"] is None
    with (tmp_path / "norm-triton-interpreter.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["provider"] for line in lines] == [result["provider"] for result in results]
    assert (tmp_path / "norm-triton-interpreter.png").stat().st_size > 10_000


def test_a_failure_of_ours_is_the_exit_code(pretended_gpu: torch.device, tmp_path: Path) -> None:
    arguments = ["--operators", "rms_norm", "--widths", "32", "--mib", "0.0004", "--seconds", "0", "--output"]
    options = norm._options([*arguments, str(tmp_path), "--directions", "forward", "--json"])
    providers = {OURS: {"rms_norm": lambda x, r, w, b: (x * w,)}}
    assert norm.timed(providers, {}, pretended_gpu, options) == 1


def test_a_size_that_does_not_fit_costs_only_its_own_results(
    pretended_gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = compare.GpuTimer.measure

    def measure(self, runs, seconds):  # type: ignore[no-untyped-def]
        if not failures:
            failures.append(torch.OutOfMemoryError("made up"))
            raise failures[0]
        return genuine(self, runs, seconds, least=1)

    failures: list[Exception] = []
    monkeypatch.setattr(compare.GpuTimer, "measure", measure)
    arguments = ["--operators", "rms_norm", "--widths", "32", "48", "--directions", "both", "--mib", "0.0004"]
    options = norm._options([*arguments, "--seconds", "0", "--output", str(tmp_path)])
    assert norm.timed(compare.load(norm_providers.PROVIDERS, ["torch"])[0], {}, pretended_gpu, options) == 0
    first, second = json.loads((tmp_path / "norm-triton-interpreter.json").read_text())["results"]
    assert "made up" in first["error"]
    assert second["seconds_median"] > 0


def made_up(provider: str, width: int = 1024, seconds: float | None = 2e-4, **changes: Any) -> norm.Result:
    sample = Sample.of([seconds]) if seconds else None
    fields: dict[str, Any] = {
        "operator": "rms_norm",
        "direction": "forward",
        "provider": provider,
        "rows": 8,
        "width": width,
        "dtype": "bfloat16",
        "least_bytes": 400_000_000,
        "distance": 1e-3,
        "sample": sample,
        "copy": Sample.of([1e-4]) if sample else None,
    }
    return norm.Result(**{**fields, **changes})


def test_the_table_tells_rates_and_what_was_not_timed() -> None:
    results = [made_up(OURS), made_up("torch", seconds=None, error="WRONG: 1.0e-01 from float64"), made_up(OURS, 2048)]
    table = norm.table(results)
    assert "| 8 x 1024 | 4.00 TB/s | 200 µs, 50% | WRONG: 1.0e-01 from float64 |" in table
    assert "| 8 x 2048 | 4.00 TB/s | 200 µs, 50% | – |" in table
    assert made_up(OURS).rate == pytest.approx(2e12)
    assert made_up("torch", seconds=None).row()["percent_of_copy"] is None


# --- static ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_static_reads_the_kernels_of_both_directions(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/norm.py", "--static", "--operators", "layer_norm", "rms_norm"]
    command += ["--widths", "2048", "--targets", "sm_90", "gfx942", "--providers", "fusedops", "--json"]
    run = subprocess.run(
        [*command, "--output", str(tmp_path)], cwd=ROOT, env=compiling_environment(), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    results = json.loads(run.stdout)["results"]
    assert json.loads((tmp_path / "norm-static.json").read_text())["results"] == results
    assert len(results) == 2 * 2 * 2
    for result in results:
        assert result["loaded"] == result["least_loaded"] == (2 if result["direction"] == "forward" else 4)
        assert result["stored"] == result["least_stored"] == 2
        assert result["bits"] == [128, 128]
        assert all(kernel["spill_bytes"] == 0 < kernel["registers"] for kernel in result["kernels"])
        assert not any(kernel["all_arguments"] for kernel in result["kernels"])
    with (tmp_path / "norm-static.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["target"], line["direction"], line["widest_bits"]) for line in lines] == [
        (result["target"], result["direction"], "128") for result in results
    ]


@pytest.mark.interpreter
def test_static_needs_a_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    assert norm.main(["--static"]) == 1
    assert "TRITON_INTERPRET" in capsys.readouterr().err


def kernel(**changes: Any) -> KernelReport:
    fields: dict[str, Any] = {
        "name": "norm_kernel",
        "num_warps": 4,
        "registers": 32,
        "spill_bytes": 0,
        "shared": 64,
        "tile": 4096,
        "loaded": 2.0,
        "stored": 2.0,
        "bits": (128, 128),
        "all_arguments": False,
    }
    return KernelReport(**{**fields, **changes})


def test_the_static_table_adds_up_an_operators_kernels() -> None:
    names = {"provider": "liger", "operator": "rms_norm", "direction": "backward", "width": 256, "dtype": "bfloat16"}
    least = {"least_loaded": 4, "least_stored": 2}
    sums = kernel(name="sums", loaded=0.0, stored=0.0, bits=None, registers=40)
    more = kernel(loaded=4.0, stored=0.0, bits=(32, 64), spill_bytes=8)
    results = [
        StaticResult("sm_90", **names, **least, kernels=(kernel(), more, sums)),
        StaticResult("gfx942", **names, **least, kernels=(kernel(all_arguments=True),)),
        StaticResult("sm_80", **names, **least, error="CompilationError: too wide"),
    ]
    table = norm_static.table(results).splitlines()
    assert table[2] == "| sm_90 | rms_norm | 256 | backward | liger | 6 | 2 | 4+2 | 32 to 128 | 40 | 8 | 64 |"
    assert table[3] == "| gfx942 | rms_norm | 256 | backward | liger | 2* | 2* | 4+2 | 128 | 32 | 0 | 64 |"
    assert "CompilationError: too wide" in table[4]
    assert results[2].row()["loaded"] is None
    assert results[0].row()["kernels"] == 3
