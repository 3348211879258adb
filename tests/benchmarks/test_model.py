"""``benchmarks/model.py`` on the CPU: its variants, what it calls wrong, its report."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import fusedops
from benchmarks import model, models
from benchmarks.measure import Sample
from benchmarks.model import PLAIN, Check, Result
from benchmarks.models import TINY, NotOfferedError, Stepper
from benchmarks.report import OURS

CPU = torch.device("cpu")


def stepper(name: str, variant: models.Variant = lambda model: model, dtype: torch.dtype = torch.float32) -> Stepper:
    return Stepper.of(TINY[name], variant, dtype, CPU)


@pytest.mark.parametrize("name", TINY)
def test_the_same_weights_and_tokens_every_time_and_a_step_changes_them(name: str) -> None:
    first, second = stepper(name), stepper(name)
    assert models.distance(first.results(), second.results(), CPU) == 0
    assert first.batch.shape == (TINY[name].batch, TINY[name].length)
    second()
    changed = models.distance(first.results(), second.results(), CPU) > 0
    assert changed == TINY[name].training


@pytest.mark.parametrize("name", TINY)
def test_shapes_are_those_of_the_models_they_are_named_for(name: str) -> None:
    assert replace(models.QUICK[name], layers=models.FULL[name].layers) == models.FULL[name]
    built = TINY[name].build(torch.float32, CPU)
    assert built.config.num_hidden_layers == TINY[name].layers
    assert built.config.model_type == name
    assert built.training == (name != "bert")


def test_a_wrong_gradient_is_far_however_small_it_is() -> None:
    right, wrong = stepper("gpt2"), stepper("gpt2")
    name, parameter = list(wrong.called.named_parameters())[-1]
    assert "ln_f" in name
    parameter.register_hook(lambda gradient: gradient * 1.5)
    exact, found = right.results(), wrong.results()
    assert exact[0] == found[0]
    assert models.distance(found, exact, CPU) == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("name", TINY)
def test_a_model_that_is_off_is_called_wrong(name: str) -> None:
    check = Check(TINY[name], torch.bfloat16, CPU)

    def off(model: Any) -> Any:
        *_, layer = (m for m in model.modules() if "Norm" in type(m).__name__)
        layer.register_forward_hook(lambda module, inputs, output: output * 1.5)
        return model

    assert check.judge(PLAIN, stepper(name, dtype=torch.bfloat16))[1] is None
    assert check.judge(OURS, stepper(name, models.VARIANTS[OURS], torch.bfloat16))[1] is None
    found, reason = check.judge(OURS, stepper(name, off, torch.bfloat16))
    assert found > 0.1
    assert reason is not None
    assert reason.startswith("WRONG")
    assert models.distance((torch.tensor([float("nan")]),), (torch.ones(1),), CPU) == float("inf")


def test_patching_that_replaces_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="replaced nothing"):
        models.VARIANTS[OURS](torch.nn.Identity())


def test_liger_takes_its_own_models_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    patched: list[Any] = []
    library = ModuleType("liger_kernel.transformers")
    library.monkey_patch = SimpleNamespace(  # type: ignore[attr-defined]
        MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": None},
        _apply_liger_kernel_to_instance=lambda model: patched.append(model),
    )
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", library)
    taken = stepper("llama", models.VARIANTS["liger"])
    assert patched == [taken.called]
    with pytest.raises(NotOfferedError, match="gpt2"):
        stepper("gpt2", models.VARIANTS["liger"])


# --- ways to run it --------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert model.main(["--quick"]) == 1
    assert "--device cpu" in capsys.readouterr().err


def test_without_transformers_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: None)
    assert model.main(["--dry-run"]) == 1
    assert "transformers is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--models", "t5"], ["--device", "cpu", "--providers", "liger"], ["--static"]])
def test_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        model.main(arguments)
    assert ended.value.code == 2


def test_a_dry_run_compares_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert model.main(["--dry-run", "--providers", "liger"]) == 0
    printed = capsys.readouterr().out
    for name in TINY:
        for provider in (PLAIN, OURS):
            assert f"{name}: {provider}: agrees with float64" in printed


def test_a_dry_run_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    compiled = ["torch.compile", f"{OURS}, compiled", f"{OURS}, backend"]
    assert model.main(["--dry-run", "--models", "bert", "--providers", *compiled]) == 0
    printed = capsys.readouterr().out
    for provider in compiled:
        assert f"bert: {provider}: agrees with float64" in printed


def test_a_dry_run_finds_a_wrong_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    genuine = models.VARIANTS[OURS]

    def off(model: Any) -> Any:
        model.get_input_embeddings().weight.data *= 1.5
        return genuine(model)

    monkeypatch.setitem(models.VARIANTS, OURS, off)
    assert model.main(["--dry-run", "--models", "llama", "--providers", "liger"]) == 1
    assert "llama: fusedops: WRONG" in capsys.readouterr().out


def test_from_timing_on_the_cpu_to_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "SMALL", TINY)
    assert model.main(["--device", "cpu", "--quick", "--models", "gpt2", "bert", "--output", str(tmp_path)]) == 0
    assert "none of its kernels was timed" in capsys.readouterr().out
    report = json.loads((tmp_path / "model-cpu.json").read_text())
    assert report["kernels"] is False
    assert report["versions"]["transformers"]
    results = report["results"]
    assert [(r["model"], r["provider"]) for r in results] == [(m, p) for m in ("gpt2", "bert") for p in (PLAIN, OURS)]
    for result in results:
        assert result["error"] is None
        assert result["tokens_per_second"] == pytest.approx(2 * 12 / result["seconds_median"])
        assert result["peak_bytes"] is None
    assert results[0]["percent_of_plain"] == pytest.approx(100)
    assert (tmp_path / "model-cpu.png").stat().st_size > 5000
    assert (tmp_path / "model-cpu.csv").read_text().count("\n") == 5


def test_each_variant_of_all_models_before_the_next_and_one_failure_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure_steps(step: Any, device: torch.device, seconds: float) -> tuple[Sample, int]:
        step()
        return Sample.of([0.5]), 1 << 30

    def failing(model: Any) -> Any:
        raise torch.OutOfMemoryError("made up")

    def missing(model: Any) -> Any:
        raise NotOfferedError("liger_kernel is not installed")

    monkeypatch.setattr(model, "measure_steps", measure_steps)
    variants = {PLAIN: lambda m: m, OURS: models.VARIANTS[OURS], "liger": missing, "torch.compile": failing}
    monkeypatch.setattr(model, "VARIANTS", variants)
    asked = model._options(["--models", "gpt2", "bert", "--dtype", "float32"])
    asked.providers = list(variants)
    report: dict[str, Any] = {"left_out": {}, "not_reached": []}
    checks = {name: Check(TINY[name], torch.float32, CPU) for name in ("gpt2", "bert")}
    with fusedops.backend("torch"):
        found = list(model._alone(checks, report, asked))
    assert [(r.provider, r.model) for r in found] == [
        (provider, name) for provider in (PLAIN, OURS, "torch.compile") for name in ("gpt2", "bert")
    ]
    assert report["left_out"] == dict.fromkeys(("gpt2 liger", "bert liger"), "liger_kernel is not installed")
    assert "made up" in (found[-1].error or "")
    assert found[2].peak_bytes == 1 << 30
    assert found[2].percent_of_plain == pytest.approx(100)
    asked.budget = 1e-9
    assert list(model._alone(checks, report, asked)) == []
    assert report["not_reached"][0] == "gpt2 plain"


def test_the_table_tells_speed_and_memory() -> None:
    names: dict[str, Any] = {"model": "gpt2", "training": True, "layers": 12, "batch": 8, "length": 1024}
    names |= {"dtype": "bfloat16", "distance": 1e-3, "plain": 0.2}
    results = [
        Result(provider=PLAIN, sample=Sample.of([0.2]), peak_bytes=3 << 30, **names),
        Result(provider=OURS, sample=Sample.of([0.1]), peak_bytes=3 << 29, **names),
        Result(provider="liger", error="WRONG: made up", **names),
    ]
    table = model.table(results)
    assert "| model | plain | fusedops | liger |" in table
    assert "gpt2, 12 layers, training, 8 x 1024 | 40,960, 200 ms, 1.00x, 3.00 GiB |" in table
    assert "| 81,920, 100 ms, 2.00x, 1.50 GiB |" in table
    assert "WRONG: made up" in table
