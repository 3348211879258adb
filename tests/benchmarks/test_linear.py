"""``benchmarks/linear.py`` without a device: its providers, its timed path, its report, and what it reads from code."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import fusedops
from benchmarks import compare, linear, linear_providers, linear_static
from benchmarks.compare import CLOSE
from benchmarks.linear_providers import DIRECTIONS, KERNELS, LAYERS, Inputs, Layer, Problem, Provider
from benchmarks.linear_static import StaticResult
from benchmarks.measure import Sample
from benchmarks.norm_memory import kept_storages
from benchmarks.report import OURS
from fusedops.linear import tuning, tuning_gated
from fusedops.runtime.device import TARGETS
from tests.harness.compile import ROOT, compiling_environment

CPU = torch.device("cpu")
# One of each operator.
SOME = {
    "linear": Layer("linear", 24, 40, "gelu", residual=True),
    "gated_linear": Layer("gated_linear", 24, 40, "silu", bias=False),
    "mlp": Layer("mlp", 24, 40, "gelu_tanh"),
}
TORCH = linear_providers.PROVIDERS["torch"]()


def problem(operator: str = "linear", dtype: torch.dtype = torch.bfloat16) -> Problem:
    return Problem(operator, SOME[operator], 6, dtype)


# --- providers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", SOME)
@pytest.mark.parametrize("dtype", CLOSE, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_right_results_are_close_and_slightly_wrong_ones_are_not(operator: str, dtype: torch.dtype) -> None:
    case = problem(operator, dtype)
    inputs = Inputs.of(case, CPU)
    assert linear_providers.distance(case, TORCH, inputs) <= CLOSE[dtype]

    def offer(case: Problem) -> linear_providers.Function:
        right = TORCH.offer(case)
        assert right is not None
        return lambda *tensors: right(*tensors) + right(*tensors).detach() * 4 * CLOSE[dtype]

    assert linear_providers.distance(case, Provider(offer), inputs) > CLOSE[dtype]


def test_the_reference_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs.of(problem(), CPU)
    whole = linear_providers.distance(problem(), TORCH, inputs)
    monkeypatch.setattr(linear_providers, "_CHUNK", 130)  # two rows
    assert linear_providers.distance(problem(), TORCH, inputs) == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("operator", SOME)
def test_each_direction_gives_what_it_is_named_for(operator: str) -> None:
    case = problem(operator)
    inputs = Inputs.of(case, CPU)
    forward: Any = linear_providers.run_in("forward", TORCH, case, inputs)()
    both: Any = linear_providers.run_in("both", TORCH, case, inputs)()
    assert forward.shape == inputs.gradient.shape
    assert not forward.requires_grad
    assert [gradient.shape for gradient in both] == [t.shape for t in inputs.tensors if t is not None]


@pytest.mark.parametrize("operator", SOME)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_yardstick_makes_the_layers_products_and_no_more(operator: str, direction: str) -> None:
    case = problem(operator)
    run = linear_providers.products(direction, case, CPU)
    with FlopCounterMode(display=False) as bare:
        run()
    layer = linear_providers.run_in(direction, TORCH, case, Inputs.of(case, CPU))
    with FlopCounterMode(display=False) as whole:
        layer()
    assert bare.get_total_flops() == whole.get_total_flops() == case.flops(direction)


def test_every_candidate_kernel_is_compared() -> None:
    assert set(KERNELS) == {*get_args(tuning.Kernel), *get_args(tuning_gated.Kernel)}


@pytest.mark.interpreter
@pytest.mark.parametrize("operator", ["linear", "gated_linear"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_candidate_kernel_is_taken_where_it_serves(operator: str, kernel: str) -> None:
    case = replace(problem(operator, torch.float16), rows=6 if kernel == "skinny" else 40)
    inputs = Inputs.of(case, CPU)
    default = linear_providers.PROVIDERS[OURS]()
    provider = linear_providers.PROVIDERS[f"{OURS}, {kernel}"]()
    first = "gated" if operator == "gated_linear" else "forward"
    with fusedops.backend("triton"):
        serves = linear_providers.serves(case, provider, inputs)
        assert serves == (operator == "linear" or kernel in get_args(tuning_gated.Kernel))
        if serves:
            with linear_providers.launching(kernel) as taken:
                linear_providers.run_in("both", default, case, inputs)()
            assert next(iter(taken)) == f"{first} {kernel}"
            # The gradients' products have no skinny and no persistent kernel.
            assert f"grad_weight {kernel if kernel in ('tiled', 'torch') else 'tiled'}" in taken
        assert linear_providers.distance(case, provider, inputs) <= CLOSE[case.dtype]
        linear_providers.run_in("both", provider, case, inputs)()
        assert linear_providers.choices(case, "forward", inputs) == f"{first} tiled"  # the interpreter's own


@pytest.mark.interpreter
def test_a_kernel_for_few_rows_is_left_out_where_there_are_many() -> None:
    provider = linear_providers.PROVIDERS[f"{OURS}, skinny"]()
    with fusedops.backend("triton"):
        for rows, serves in ((16, True), (17, False)):
            case = replace(problem("linear", torch.float16), rows=rows)
            assert linear_providers.serves(case, provider, Inputs.of(case, CPU)) is serves


@pytest.mark.interpreter
def test_the_textbook_product_is_right() -> None:
    from fusedops.inspection.textbook import product as textbook

    a, b, bias = torch.randn(33, 40).half(), torch.randn(24, 40).half().t(), torch.randn(24).half()
    options = {"num_warps": 4, "num_stages": 2}
    for with_bias in (None, bias):
        found = textbook.launch(a, b, with_bias, (16, 16, 16), options)
        right = a.float() @ b.float() if with_bias is None else F.gelu(a.float() @ b.float() + bias)
        torch.testing.assert_close(found, right.half(), rtol=2**-10, atol=2**-14)


# --- timed -----------------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert linear.main(["--quick"]) == 1
    captured = capsys.readouterr()
    assert "--static" in captured.err
    assert not captured.out


@pytest.mark.parametrize("arguments", [["--rows", "0"], ["--layers", "gpt5.fc1"], ["--providers", "fusedops"]])
def test_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        linear.main(arguments)
    assert ended.value.code == 2


def test_quick_is_a_part_of_the_whole() -> None:
    whole, quick = linear._options([]), linear._options(["--quick"])
    assert set(quick.layers) < set(whole.layers) == set(LAYERS)
    assert set(quick.rows) < set(whole.rows)
    assert set(whole.providers) - set(quick.providers) == {"torch.compile"}
    assert linear._options(["--quick", "--rows", "7"]).rows == [7]


def test_a_dry_run_compares_every_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert linear.main(["--dry-run", "--providers", "torch"]) == 0
    printed = capsys.readouterr().out
    for layer in LAYERS:
        for name in (OURS, "torch"):
            assert f"{layer}: {name}: agrees with float64" in printed


def test_a_dry_run_finds_a_wrong_layer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(case: Problem) -> linear_providers.Function:
        return lambda x, r, w, b, *_: F.linear(x, w, b) * 1.05 + r

    monkeypatch.setitem(linear_providers.PROVIDERS, OURS, lambda: Provider(broken))
    assert linear.main(["--dry-run", "--layers", "gpt2.fc2", "--providers", "torch"]) == 1
    assert "gpt2.fc2: fusedops: WRONG" in capsys.readouterr().out


@pytest.mark.interpreter
def test_from_timing_to_files(
    pretended_gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(LAYERS, "some.fc1", Layer("linear", 24, 40, "gelu", residual=True))
    arguments = ["--layers", "some.fc1", "--rows", "3", "40", "--dtype", "float16", "--seconds", "0", "--output"]
    options = linear._options([*arguments, str(tmp_path)])
    names = [OURS, *(f"{OURS}, {kernel}" for kernel in KERNELS), "torch"]
    providers = compare.load(linear_providers.PROVIDERS, names)[0]
    providers["broken"] = Provider(lambda case: lambda x, r, w, b, *_: F.linear(x, w, b) + r)
    providers["failing"] = Provider(lambda case: 1 / 0)  # type: ignore[arg-type,return-value]
    providers["narrow"] = Provider(lambda case: None)  # has no such layer
    assert linear.timed(providers, {"apex": "apex is not installed"}, pretended_gpu, options) == 0
    printed = capsys.readouterr().out
    assert "some.fc1 (24 -> 40, gelu), both" in printed
    assert "of 4." in printed  # the summary has compared every size in every direction
    report = json.loads((tmp_path / "linear-triton-interpreter.json").read_text())
    assert report["left_out"] == {"apex": "apex is not installed"}
    assert {"torch", "commit", "triton"} <= set(report["versions"])
    results = report["results"]
    # Rows, directions, providers: the skinny kernel has only the 3 rows, the persistent one only the 40.
    assert len(results) == 2 * 2 * (len(names) + 2 - 1)
    for result in results:
        assert result["flops"] == 2 * result["rows"] * 24 * 40 * (3 if result["direction"] == "both" else 1)
        if result["provider"] in names:
            assert result["error"] is None
            assert result["seconds_median"] > 0
            assert result["count"] >= 7
            assert result["teraflops"] == pytest.approx(result["flops"] / result["seconds_median"] / 1e12)
            ratio = result["product_seconds"] / result["seconds_median"]
            assert result["percent_of_product"] / 100 == pytest.approx(ratio)
        else:
            assert result["error"].startswith("WRONG" if result["provider"] == "broken" else "ZeroDivisionError")
            assert result["seconds_median"] is result["teraflops"] is result["percent_of_product"] is None
        assert (result["kernels"] is not None) == (result["provider"] == OURS)
    with (tmp_path / "linear-triton-interpreter.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["provider"] for line in lines] == [result["provider"] for result in results]


def test_a_failure_of_ours_is_the_exit_code(
    pretended_gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LAYERS, "some.fc1", Layer("linear", 24, 40))
    arguments = ["--layers", "some.fc1", "--rows", "3", "--seconds", "0", "--directions", "forward", "--json"]
    options = linear._options([*arguments, "--output", str(tmp_path)])
    providers = {OURS: Provider(lambda case: lambda x, r, w, b, *_: F.linear(x, w))}
    assert linear.timed(providers, {}, pretended_gpu, options) == 1


def made_up(provider: str, rows: int = 16, seconds: float | None = 2e-4, **changes: Any) -> linear.Result:
    sample = Sample.of([seconds]) if seconds else None
    fields: dict[str, Any] = {
        "layer": "gpt2.fc1",
        "direction": "forward",
        "provider": provider,
        "rows": rows,
        "inputs": 768,
        "outputs": 3072,
        "activation": "gelu_tanh",
        "dtype": "bfloat16",
        "flops": 40_000_000_000,
        "kernels": None,
        "distance": 1e-3,
        "sample": sample,
        "product": Sample.of([1e-4]) if sample else None,
    }
    return linear.Result(**{**fields, **changes})


def test_the_table_tells_rates_and_what_was_not_timed() -> None:
    results = [
        made_up(OURS, kernels="forward torch"),
        made_up("torch", seconds=None, error="WRONG: 1.0e-01 from float64"),
        made_up(OURS, 128, kernels="forward torch, grad_input tiled"),
        made_up(OURS, 1024, seconds=None, error="OutOfMemoryError: made up"),
    ]
    table = linear.table(results)
    assert "| 16 | 100 µs, 400 | 200 µs, 200, 0.50 | WRONG: 1.0e-01 from float64 | torch |" in table
    assert "| 128 | 100 µs, 400 | 200 µs, 200, 0.50 | – | forward torch, grad_input tiled |" in table
    assert "| 1024 | – | OutOfMemoryError: made up | – | – |" in table
    assert made_up("torch", seconds=None).row()["percent_of_product"] is None
    assert math.isnan(made_up("torch", seconds=None).rate)


def test_the_summary_names_where_the_default_is_not_the_best_candidate() -> None:
    results = [
        made_up(OURS, 16, seconds=2.0e-4), made_up(f"{OURS}, tiled", 16, seconds=1.6e-4),
        made_up(f"{OURS}, torch", 16, seconds=1.0e-4), made_up("liger", 16, seconds=1e-6),
        made_up(OURS, 128, seconds=1.01e-4), made_up(f"{OURS}, torch", 128, seconds=1.0e-4),
        made_up(OURS, 1024), made_up("torch", 1024, seconds=1e-6),  # no candidate was timed
    ]  # fmt: skip
    summary = linear.summary(results).splitlines()
    assert summary[0].endswith("in 1 of 2.")
    assert summary[1:] == [f"gpt2.fc1, 16 rows, forward: 2.00 times the time of {OURS}, torch"]


# --- static ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_static_reads_a_kernel_and_the_textbook_product(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/linear.py", "--static", "--targets", "sm_80", "--kernels", "skinny", "fp8"]
    run = subprocess.run(
        [*command, "--json", "--output", str(tmp_path)],
        cwd=ROOT, env=compiling_environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    results = json.loads(run.stdout)["results"]  # none of float8, which sm_80 has not
    assert json.loads((tmp_path / "linear-static.json").read_text())["results"] == results
    ours, textbook = results
    assert (ours["source"], textbook["source"]) == (OURS, "textbook")
    assert ours["tile"] == textbook["tile"]
    for result in results:
        rows, cols, depth = map(int, result["tile"].split(" x "))
        products = rows * cols * depth // (16 * 8 * 16)  # of an HMMA.16816 of one warp
        assert result["matrix"] == "HMMA"
        assert result["matrix_count"] == products // result["num_warps"]
        assert result["others_per_matrix"] == result["others"] / result["matrix_count"]
        assert result["copies"] > 0
        assert result["serialised"] is False
    assert ours["spill_bytes"] == 0 < ours["registers"]
    with (tmp_path / "linear-static.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["source"] for line in lines] == [OURS, "textbook"]


@pytest.mark.interpreter
def test_static_needs_a_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    assert linear.main(["--static"]) == 1
    assert "TRITON_INTERPRET" in capsys.readouterr().err


def test_the_static_table_marks_what_is_serialised_or_failed() -> None:
    ours = StaticResult(
        "sm_90", "forward", OURS, "linear_forward_kernel", "bfloat16", "128 x 256 x 64", 8, 3, "HGMMA", 4, 19, 9, 120,
        202, 0, 147456, False,
    )  # fmt: skip
    textbook = replace(ours, source="textbook", others=104, registers=255, spill_bytes=88)
    failed = StaticResult("sm_90", "fp8", OURS, "fp8_linear_kernel", "bfloat16", error="CompilationError: no")
    alone = replace(ours, case="gated", serialised=True)
    table = linear_static.table([ours, textbook, failed, alone]).splitlines()
    head = "| sm_90 | forward | 128 x 256 x 64 | 8, 3 | 4 HGMMA | 19 / 19 | 9 / 9 | 30.00 / 26.00 |"
    assert table[2] == f"{head} 202 / 255 | 0 / 88 | 147456 / 147456 |"
    assert table[3] == "| sm_90 | fp8 | – | – | CompilationError: no | – | – | – | – | – | – |"
    assert "| 4 HGMMA serialised | 19 | 9 | 30.00 |" in table[4]
    assert failed.row()["others_per_matrix"] is None


# --- docs/linear.md --------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "linear.md").read_text()


def page_rows(heading: str) -> list[list[str]]:
    """The cells of the table whose first heading this is, less that row and the next."""
    lines = PAGE[PAGE.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), ids=lambda code: code[:24])
def test_the_pages_examples_run(code: str) -> None:
    exec(compile(code, "docs/linear.md", "exec"), {})


@pytest.mark.parametrize("row", page_rows("| | c | s |"), ids=lambda row: row[0])
def test_the_pages_bounds_are_those_of_the_rule(row: list[str]) -> None:
    arch, *bounds = row
    balance, slower, inference, training = (float(bound.replace(",", "")) for bound in bounds)
    defaults = tuning.DEFAULTS[arch]
    assert (balance, slower) == (defaults.balance, defaults.slower[0])
    for bound, keeps in ((inference, False), (training, True)):
        assert bound == pytest.approx((2 if keeps else 4) * balance / (2 * (slower - 1)), abs=1)
        depth = 2 ** math.floor(math.log2(bound))
        for one, torchs in ((depth, False), (2 * depth, True)):
            asked = tuning.LinearProblem.of("forward", 1 << 15, 1 << 15, one, activation="gelu", keeps=keeps)
            assert (tuning.default_config(asked, TARGETS[arch]).kernel == "torch") is torchs


@pytest.mark.interpreter
@pytest.mark.parametrize("row", page_rows("| kept besides x and parameters |"), ids=lambda row: row[0].strip("`"))
def test_the_page_tells_what_is_kept(row: list[str]) -> None:
    call, *cells = row
    in_torch, ours, recomputed = (int(cell[0]) for cell in cells)

    def kept(rows: int, code: str, backend: str) -> int:
        tensors = [torch.randn(size, dtype=torch.float16) for size in ((rows, 8), (rows, 64), (64, 8), (64,), (64, 8))]
        named: dict[str, Any] = {
            n: t.requires_grad_() for n, t in zip(("x", "r", "w", "b", "w2"), tensors, strict=True)
        }
        functions = {"linear": fusedops.linear, "gated_linear": fusedops.gated_linear}
        with fusedops.backend(backend):
            storages = kept_storages(lambda: eval(code, {**functions, **named}))
        return sum(size for storage, size in storages.items() if storage != named["x"].untyped_storage()._cdata)

    def each(code: str, backend: str) -> float:
        return (kept(48, code, backend) - kept(16, code, backend)) / (32 * 64)

    code = call.strip("`")
    assert each(code, "triton") == ours
    assert each(code[:-1] + ", recompute=True)", "triton") == recomputed
    if "dropout" not in code:  # torch's own is another one on a CPU
        assert each(code, "torch") == in_torch
