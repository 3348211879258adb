"""``benchmarks/attention.py`` without a device: its providers, its timed path, its report, what it reads from code."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import attention, attention_providers, attention_static, compare
from benchmarks.attention_providers import DIRECTIONS, KINDS, Inputs, Problem, Provider
from benchmarks.attention_static import TEXTBOOK, WHOLE, StaticResult
from benchmarks.compare import CLOSE
from benchmarks.measure import Sample
from benchmarks.report import OURS
from tests.harness.compile import ROOT, compiling_environment

CPU = torch.device("cpu")
MATH = attention_providers.PROVIDERS["SDPA math"]()


def problem(kind: str = "causal", dtype: torch.dtype = torch.bfloat16, size: int = 64) -> Problem:
    found = Problem.of(kind, size, 2048, dtype)
    assert found is not None
    return found.tiny()


def seen(case: Problem) -> torch.Tensor:
    """(tokens, tokens) bool of all sequences together, from what the kinds are described to be."""
    sequence = torch.tensor([n for n, length in enumerate(case.lengths) for _ in range(length)])
    position = torch.arange(sum(case.lengths))
    pairs = sequence[:, None] == sequence
    distance = position[:, None] - position
    if case.causal:
        pairs &= distance >= 0
    if case.window is not None:
        pairs &= distance < case.window
    return pairs


def by_the_mask(case: Problem, device: torch.device) -> attention_providers.Function:
    """Attention of all tokens with that mask, in the tensors' own dtype."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        flat = [t.flatten(0, -3).transpose(0, 1) for t in (q, k, v)]
        out = F.scaled_dot_product_attention(*(t[None] for t in flat), seen(case), enable_gqa=True)[0]
        return out.transpose(0, 1).reshape(q.shape)

    return function


# --- problems --------------------------------------------------------------------------------------------------------


def test_there_are_as_many_tokens_at_every_length() -> None:
    for length in attention.LENGTHS:
        for kind in KINDS:
            case = Problem.of(kind, 128, length, torch.float16)
            if case is not None:
                assert sum(case.lengths) == 16384
                assert case.length == length
                assert len(set(case.lengths)) > 1 or not case.packed


def test_what_would_be_another_kind_is_left_out() -> None:
    assert Problem.of("window", 64, 1024, torch.float16) is None  # every key is in the window
    assert Problem.of("packed", 64, 16384, torch.float16) is None  # one sequence
    assert Problem.of("window", 64, 2048, torch.float16) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_the_operations_are_those_of_the_keys_that_are_seen(kind: str) -> None:
    case = problem(kind)
    assert case.pairs() == int(seen(case).sum())
    assert case.flops("forward") == 4 * int(seen(case).sum()) * case.heads * case.size
    assert case.flops("backward") == 2.5 * case.flops("forward")


def test_the_operations_are_torchs_where_it_counts_them() -> None:
    case = problem("all")
    with FlopCounterMode(display=False) as counted:
        attention_providers.run_in("forward", MATH, Inputs.of(case, CPU))()
    assert counted.get_total_flops() == case.flops("forward")


# --- providers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_attention_in_pieces_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs.of(problem(kind, torch.float64, 16), CPU)
    leaves = [t.clone().requires_grad_() for t in inputs.tensors]
    out = by_the_mask(inputs.problem, CPU)(*leaves)
    expected = (out, *torch.autograd.grad(out, leaves, inputs.gradient))
    monkeypatch.setattr(attention_providers, "_CHUNK", 4 * 40 * 11)  # eleven queries or so
    for found, right in zip(inputs.exact, expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", CLOSE, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_right_results_are_close_and_slightly_wrong_ones_are_not(dtype: torch.dtype) -> None:
    inputs = Inputs.of(problem("window", dtype), CPU)
    right = Provider(by_the_mask)
    assert attention_providers.distance(right, inputs) <= CLOSE[dtype]
    assert attention_providers.distance(right, inputs) <= CLOSE[dtype]  # the reference is as it was

    def offer(case: Problem, device: torch.device) -> attention_providers.Function:
        function = by_the_mask(case, device)
        return lambda *tensors: function(*tensors) * (1 + 4 * CLOSE[dtype])

    assert attention_providers.distance(Provider(offer), inputs) > CLOSE[dtype]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not KINDS[kind].packed])
def test_torchs_masks_are_the_kinds(kind: str) -> None:
    assert attention_providers.distance(MATH, Inputs.of(problem(kind), CPU)) <= CLOSE[torch.bfloat16]


def test_torchs_nested_tensors_are_the_packed_sequences() -> None:
    inputs = Inputs.of(replace(problem("packed", torch.float32), causal=False), CPU)  # on a CPU not the causal ones
    assert attention_providers.distance(MATH, inputs) <= CLOSE[torch.float32]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", KINDS)
def test_flex_attentions_masks_are_the_kinds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.compare.compiled", lambda function: function)  # as it is defined
    inputs = Inputs.of(problem(kind, torch.float32), CPU)
    flex = attention_providers.PROVIDERS["FlexAttention"]()
    forward: Any = attention_providers.run_in("forward", flex, inputs)()  # on a CPU there is no backward
    torch.testing.assert_close(forward.double(), inputs.exact[0], rtol=1e-5, atol=1e-5)


def test_a_backend_without_the_kind_is_left_out() -> None:
    flash = attention_providers.PROVIDERS["SDPA flash"]()
    assert flash.offer(problem("window"), CPU) is None
    assert flash.offer(problem("causal"), CPU) is not None
    assert MATH.offer(problem("packed"), CPU) is None


@pytest.mark.parametrize("kind", ["grouped", "packed"])
def test_each_direction_gives_what_it_is_named_for(kind: str) -> None:
    inputs = Inputs.of(problem(kind), CPU)
    ours = Provider(by_the_mask)
    forward: Any = attention_providers.run_in("forward", ours, inputs)()
    run = attention_providers.run_in("backward", ours, inputs)
    first, second = run(), run()  # it is timed more than once
    assert forward.shape == inputs.gradient.shape == inputs.tensors[0].shape
    assert not forward.requires_grad
    for gradients in (first, second):
        assert isinstance(gradients, tuple)
        assert [gradient.shape for gradient in gradients] == [t.shape for t in inputs.tensors]


@pytest.mark.interpreter
@pytest.mark.parametrize("whole", [False, True], ids=["any length", "whole tiles"])
def test_the_textbook_forward_is_right(whole: bool) -> None:
    from fusedops.inspection.textbook import attention as textbook_attention

    length = 64 if whole else 53
    q, k, v = (torch.randn(1, heads, length, 16).half() for heads in (4, 2, 2))
    for causal in (False, True):
        options = {"num_warps": 4, "num_stages": 2}
        found, lse = textbook_attention.launch(q, k, v, causal, (32, 16), options, whole)
        s = q.double() @ k.double().repeat_interleave(2, 1).transpose(2, 3) / 4
        if causal:
            s = s.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        right = s.softmax(-1) @ v.double().repeat_interleave(2, 1)
        torch.testing.assert_close(found.double(), right, rtol=2**-9, atol=2**-10)
        torch.testing.assert_close(lse.double(), s.logsumexp(-1), rtol=1e-4, atol=1e-4)


# --- timed -----------------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert attention.main(["--quick"]) == 1
    captured = capsys.readouterr()
    assert "--static" in captured.err
    assert "left out" not in captured.err
    assert not captured.out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lengths", "0"], ["--lengths", "32768"], ["--kinds", "some"], ["--providers", "fusedops"],
        ["--static", "--seconds", "1"], ["--static", "--sizes", "256"], ["--static", "--kinds", "window"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        attention.main(arguments)
    assert ended.value.code == 2


def test_quick_is_a_part_of_the_whole() -> None:
    whole, quick = attention._options([]), attention._options(["--quick"])
    assert set(quick.sizes) < set(whole.sizes)
    assert set(quick.lengths) < set(whole.lengths)
    assert set(whole.providers) - set(quick.providers) == {"FlexAttention"}
    assert attention._options(["--quick", "--lengths", "7"]).lengths == [7]
    assert set(attention._problems(quick)) < set(attention._problems(whole))


def test_a_dry_run_compares_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.main(["--dry-run", "--sizes", "64", "--providers", "SDPA math", "flash-attn 2"]) == 0
    printed = capsys.readouterr()
    for kind in KINDS:
        assert f"{kind} D 64: {OURS}: agrees with float64" in printed.out
        assert (f"{kind} D 64: SDPA math: agrees with float64" in printed.out) == (kind != "packed")
    if importlib.util.find_spec("flash_attn") is None:
        assert "left out: flash-attn 2: flash_attn is not installed" in printed.err


def test_a_dry_run_finds_a_wrong_provider(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def off_by_one(case: Problem, device: torch.device) -> attention_providers.Function:
        return by_the_mask(replace(case, window=(case.window or 0) + 1), device)

    monkeypatch.setitem(attention_providers.PROVIDERS, OURS, lambda: Provider(off_by_one))
    arguments = ["--dry-run", "--kinds", "window", "--sizes", "64", "--providers", "SDPA math"]
    assert attention.main(arguments) == 1
    assert "window D 64: fusedops: WRONG" in capsys.readouterr().out


@pytest.mark.interpreter
def test_from_timing_to_files(
    pretended_gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = replace(problem("causal", torch.float16), heads=2, kv_heads=1, lengths=(40,))
    monkeypatch.setattr(attention, "_problems", lambda options: [one])
    options = attention._options(["--dtype", "float16", "--seconds", "0", "--output", str(tmp_path)])
    names = [OURS, "SDPA math"]
    providers = compare.load(attention_providers.PROVIDERS, names)[0]
    providers["broken"] = Provider(lambda case, device: lambda q, k, v: by_the_mask(case, device)(q, k, v) + q)
    providers["failing"] = Provider(lambda case, device: 1 / 0)  # type: ignore[arg-type,return-value]
    providers["narrow"] = Provider(lambda case, device: None)  # has no such kind
    assert attention.timed(providers, {"xformers": "xformers is not installed"}, pretended_gpu, options) == 0
    printed = capsys.readouterr().out
    assert "causal (D 64, 2 heads on 1), backward" in printed
    assert "of 2." in printed  # the summary has compared both directions
    report = json.loads((tmp_path / "attention-triton-interpreter.json").read_text())
    assert report["left_out"] == {"xformers": "xformers is not installed"}
    assert {"torch", "commit", "triton"} <= set(report["versions"])
    results = report["results"]
    assert [result["provider"] for result in results] == [*names, "broken", "failing"] * len(DIRECTIONS)
    for result in results:
        assert result["flops"] == 2 * 820 * 2 * 64 * (5 if result["direction"] == "backward" else 2)
        if result["provider"] in names:
            assert result["error"] is None
            assert result["count"] >= 7
            assert result["percent_of_product"] == pytest.approx(100 * result["teraflops"] * 1e12 / 7e14)
            assert result["teraflops"] == pytest.approx(result["flops"] / result["seconds_median"] / 1e12)
            same = [other for other in results if other["direction"] == result["direction"]]
            best = min(other["seconds_median"] for other in same if other["seconds_median"])
            assert result["ratio_to_best"] == pytest.approx(result["seconds_median"] / best)
        else:
            assert result["error"].startswith("WRONG" if result["provider"] == "broken" else "ZeroDivisionError")
            assert result["seconds_median"] is result["teraflops"] is result["ratio_to_best"] is None
    with (tmp_path / "attention-triton-interpreter.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["provider"] for line in lines] == [result["provider"] for result in results]


@pytest.mark.interpreter
def test_a_failure_of_ours_is_the_exit_code(
    pretended_gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_problems", lambda options: [problem("causal")])
    options = attention._options(["--seconds", "0", "--directions", "forward", "--json", "--output", str(tmp_path)])
    wrong = Provider(lambda case, device: by_the_mask(replace(case, causal=False), device))
    assert attention.timed({OURS: wrong}, {}, pretended_gpu, options) == 1


def made_up(provider: str, length: int = 2048, seconds: float | None = 2e-4, **changes: Any) -> attention.Result:
    fields: dict[str, Any] = {
        "kind": "window",
        "direction": "forward",
        "provider": provider,
        "size": 128,
        "length": length,
        "batch": 8,
        "heads": 32,
        "kv_heads": 8,
        "window": 1024,
        "dtype": "bfloat16",
        "flops": 40_000_000_000,
        "distance": 1e-3,
        "sample": Sample.of([seconds]) if seconds else None,
        "best": 1e-4 if seconds else None,
    }
    return attention.Result(**{**fields, **changes})


def test_the_table_tells_rates_and_what_was_not_timed() -> None:
    results = [
        made_up(OURS),
        made_up("xformers", seconds=None, error="WRONG: 1.0e-01 from float64"),
        made_up(OURS, 4096, batch=4, seconds=1e-4),
    ]
    table = attention.table(results)
    assert "window of 1024 (D 128, 32 heads on 8), forward" in table
    assert "| 8 x 2048 | 200 µs, 200, 2.00 | WRONG: 1.0e-01 from float64 |" in table
    assert "| 4 x 4096 | 100 µs, 400, 1.00 | – |" in table
    assert made_up("xformers", seconds=None).row()["ratio_to_best"] is None
    assert math.isnan(made_up("xformers", seconds=None).rate)


# --- static ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_static_reads_our_forward_and_the_textbooks(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/attention.py", "--static", "--targets", "sm_80", "--sizes", "64"]
    command += ["--kinds", "all", "--dtype", "bfloat16"]
    run = subprocess.run(
        [*command, "--json", "--output", str(tmp_path)],
        cwd=ROOT, env=compiling_environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    results = json.loads(run.stdout)["results"]
    assert json.loads((tmp_path / "attention-static.json").read_text())["results"] == results
    assert [(result["source"], result["causal"]) for result in results] == [
        (source, False) for source in (OURS, TEXTBOOK, WHOLE)
    ]
    for result in results:
        queries, keys = map(int, result["tile"].split(" x "))
        # Of an HMMA.16816 of one warp; as many for scores as for the output.
        assert result["matrix"] == "HMMA"
        assert result["matrix_a_step"] == 2 * queries * keys * 64 // (16 * 8 * 16) // result["num_warps"]
        # A thread's scores, and the factors by which it corrects its rows' sums.
        scores = queries * keys // (32 * result["num_warps"])
        assert scores < result["exponentials_a_step"] <= scores + queries
        assert result["others_per_matrix"] == result["others"] / result["matrix_count"]
        assert 0 < result["copies"] + result["barriers"] < result["others"]
        assert result["spill_bytes"] == 0 < result["registers"]
        # Ours has a loop without masks besides; the textbook has one loop for all.
        assert (result["edge_others_per_matrix"] is None) == (result["source"] != OURS)
    ours, textbook, _ = results
    assert ours["others_a_step"] < textbook["others_a_step"]  # no mask in the main loop
    with (tmp_path / "attention-static.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["source"] for line in lines] == [result["source"] for result in results]


@pytest.mark.interpreter
def test_static_needs_a_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.main(["--static"]) == 1
    assert "TRITON_INTERPRET" in capsys.readouterr().err


def test_a_turn_of_the_loop_may_be_several_steps() -> None:
    ours = some_code(steps=2, matrix_count=128, exponentials=68, others=500)
    once = some_code(source=TEXTBOOK, matrix_count=64, exponentials=34, others=250)
    assert attention_static.verdict([ours, once]) == "no more"
    assert not attention_static.more(once, ours)


def some_code(**changes: Any) -> StaticResult:
    fields: dict[str, Any] = {
        "target": "sm_80", "size": 64, "causal": True, "dtype": "bfloat16", "source": OURS, "kernel": "some_kernel",
        "tile": "128 x 64", "num_warps": 8, "num_stages": 3, "matrix": "HMMA", "steps": 1, "matrix_count": 64,
        "exponentials": 34, "others": 268, "copies": 41, "barriers": 5, "edge_matrix": 64, "edge_others": 368,
        "registers": 174, "spill_bytes": 0, "shared": 49152, "serialised": False,
    }  # fmt: skip
    return StaticResult(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "no more"),
        ({"others": 269, "registers": 175}, "others 269 > 268, registers 175 > 174"),
        ({"matrix_count": 128}, "matrix 128 > 64"),  # its others a matrix instruction are fewer: that does not help
        ({"spill_bytes": 8, "exponentials": 66}, "exponentials 66 > 34, spilled B 8 > 0"),
        ({"others": 200, "registers": 100}, "no more"),
        ({"steps": None}, "–"),
        ({"error": "CompilationError: no", "registers": None}, "–"),
    ],
)  # fmt: skip
def test_the_verdict_names_what_ours_has_more_of(changes: dict[str, Any], said: str) -> None:
    group = [some_code(**changes), some_code(source=TEXTBOOK), some_code(source=WHOLE, others=200)]
    assert attention_static.verdict(group) == said
    assert (attention_static.verdict(group, WHOLE) == "no more") == (changes.get("others") == 200)


def test_the_static_table_tells_what_failed() -> None:
    alone: dict[str, Any] = {"edge_matrix": None, "edge_others": None}
    textbook = some_code(source=TEXTBOOK, others=364, registers=181, **alone)
    whole = some_code(source=WHOLE, others=254, registers=163, **alone)
    failed = StaticResult("sm_90", 64, False, "bfloat16", OURS, error="CompilationError: no")
    table = attention_static.table([some_code(), textbook, whole, failed]).splitlines()
    assert table[2] == (
        "| sm_80 | 64 | causal | bfloat16 | 128 x 64 | 8, 3 | 64 HMMA | 34 / 34 / 34 | 268 / 364 / 254 |"
        " 4.19 / 5.69 / 3.97 | 5.75 / – / – | 174 / 181 / 163 | 0 / 0 / 0 | no more |"
        " others 268 > 254, registers 174 > 163 |"
    )
    assert table[3].startswith("| sm_90 | 64 | all | bfloat16 | – | – | CompilationError: no |")
    assert table[3].endswith("| – | – |")
    summary = attention_static.summary([some_code(), textbook, whole, failed])
    assert "textbook's in 1 of 2;" in summary
    assert summary.endswith("in 0.")
