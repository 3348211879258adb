"""``fusedops plan``: what it shows, how it finds a model, and what it says of one that cannot be found."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fusedops
from fusedops.cli.app import app

MODELS = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    last = nn.Sequential(nn.Linear(32, 8), nn.LayerNorm(8))
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), last)

def pair():
    return nn.Sequential(nn.Conv1d(3, 8, 1), nn.GroupNorm(2, 8), nn.LayerNorm(5)), [torch.randn(2, 3, 5)]

def noisy():
    print("noise of the factory")
    class Noisy(nn.LayerNorm):
        def forward(self, x):
            print("noise of the forward")
            return super().forward(x)
    return nn.Sequential(nn.LayerNorm(8), Noisy(8))

def wrong_pair(): return model(), "x"
def unknown(): return nn.Sequential(nn.Conv1d(3, 8, 1), nn.GroupNorm(2, 8))
def ends(): raise SystemExit("no such option")
def broken(): raise RuntimeError("no weights here")
def needs(size): return model()
def number(): return 3
built = model()
value = 3

class Holder:
    make = staticmethod(model)
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    name = f"models_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return name


@pytest.fixture(autouse=True)
def torch_backend():
    with fusedops.backend("torch"):
        yield


def run(*arguments: str, code: int = 0):
    result = CliRunner().invoke(app, ["plan", *arguments], terminal_width=200)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def words(result) -> str:
    return " ".join(result.output.replace("│", " ").split())


def data(result):
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", ["model", "built", "Holder.make"], ids=["function", "model", "dotted name"])
def test_table(models, name):
    text = words(run(f"{models}:{name}"))
    assert "fusedops: 3 to replace, 0 left alone" in text
    assert "Linear -> GELU" in text
    assert "activation memory" not in text


def test_json_is_the_plan(models):
    found = data(run(f"{models}:model", "--json"))
    expected = fusedops.plan(sys.modules[models].built).to_dict()
    assert expected["replaced"]
    assert {**expected, "memory": None} == found
    assert found["applied"] is False


def test_what_a_model_prints_is_no_part_of_the_json(models):
    result = run(f"{models}:noisy", "--json", "--check", "--batch", "2", "--sequence", "4")
    assert data(result)["check"]["explained"]
    assert "noise of the factory" in result.stderr
    assert "noise of the forward" in result.stderr
    assert "noise of the factory" in run(f"{models}:noisy").stdout


@pytest.mark.parametrize("option", [["--check"], ["--batch", "2"]], ids=["check", "memory"])
def test_inputs_that_are_none(models, option):
    result = run(f"{models}:wrong_pair", *option, "--json", code=1)
    assert "the pair's inputs must be a tuple of arguments" in words(result)
    assert result.stdout == ""


def test_a_missing_estimate_says_why_and_what_to_do(models):
    text = words(run(f"{models}:unknown", "--batch", "2", code=1))
    assert "no estimate of the memory: what the model is called with cannot be told from it" in text
    assert "name a function that returns a pair (model, inputs)" in text
    assert data(run(f"{models}:unknown", "--batch", "2", "--json", code=1))["memory"]["unpatched"] is None


@pytest.mark.parametrize("error", [KeyError("weight"), ValueError("odd"), RuntimeError("one\ntwo")], ids=repr)
def test_a_model_that_cannot_be_examined(models, monkeypatch, error):
    def plan(*args, **kwargs):
        raise error

    monkeypatch.setattr(fusedops, "plan", plan)
    text = words(run(f"{models}:model", code=1))
    assert f"the model cannot be examined: {type(error).__name__}: " in text


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("models.py:build", 1, "a module, not a file: models:build"),
        ("src/models.py", 2, "a module, not a file: src.models:FACTORY"),
        ("models.build", 2, "models:build?"),
        ("gpt2", 2, "--hf with its config.json"),
        ("owner/model-7.5b", 2, "--hf with its config.json"),
        ("config.json", 2, "--hf with its config.json"),
    ],
)
def test_what_was_probably_meant(name, code, message):
    # An error of usage is shown in a box, whose lines are broken anywhere.
    text = "".join(run(name, code=code).output.replace("│", "").split())
    assert "".join(message.split()) in text


def test_memory(models):
    found = data(run(f"{models}:model", "--json", "--batch", "4", "--sequence", "16", "--dtype", "fp16"))["memory"]
    model = nn.Sequential(
        nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Sequential(nn.Linear(32, 8), nn.LayerNorm(8))
    )
    assert found == fusedops.plan(model).activation_memory(4, 16, torch.float16).to_dict()
    assert "activation memory (8 x 32, bfloat16)" in words(run(f"{models}:model", "--sequence", "32"))
    assert "activation memory (2 x 512, bfloat16)" in words(run(f"{models}:model", "--batch", "2"))
    # What the model is called with comes with it.
    assert data(run(f"{models}:pair", "--json", "--batch", "2"))["memory"]["unpatched"] > 0


def test_include_and_exclude(models):
    found = data(run(f"{models}:model", "--json", "--include", "3", "--include", "2", "--exclude", "3.*"))
    assert [entry["path"] for entry in found["replaced"]] == ["2"]
    assert "fits the name of no module" in words(run(f"{models}:model", "--include", "encoder.*", code=2))


def test_check(models, monkeypatch):
    found = data(run(f"{models}:model", "--json", "--check"))
    assert found["check"]["max_abs_error"] < 1e-5
    assert found["check"]["noise_floor"] > 0
    assert found["applied"] is False
    assert "largest difference" in words(run(f"{models}:pair", "--check"))
    monkeypatch.setattr("fusedops.patching.norms.layer_norm", lambda x, *a: nn.functional.layer_norm(x, *a) + 0.1)
    assert "more than rounding explains" in words(run(f"{models}:model", "--check", code=1))


def test_a_check_without_inputs_is_refused():
    text = words(run("torch.nn:LazyBatchNorm1d", "--check", code=1))
    assert "let the factory return a pair (model, inputs)" in text


def test_config(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=4096, n_layer=1, n_head=32, architectures=["GPT2LMHeadModel"])
    config.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        found = data(run("--hf", str(path), "--json", "--batch", "2", "--sequence", "64"))
        assert "transformer.h.0.attn" in [entry["path"] for entry in found["replaced"]]
        assert found["memory"]["saved"] > 0
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "num_hidden_layers": 1}))
    assert any("encoder.layer.0" in e["path"] for e in data(run("--hf", str(tmp_path), "--json"))["replaced"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
        ("[]", "a JSON object with a model_type"),
        ("{}", "a JSON object with a model_type"),
        ('{"model_type": "no such"}', "no such"),
    ],
)
def test_configs_that_are_none(tmp_path, content, message):
    pytest.importorskip("transformers")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    text = words(run("--hf", str(tmp_path), code=1))
    assert message in text
    assert len(text) < 600  # no list of all that the library knows


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:model", "No module named 'no_such_module'"),
        ("{}:no_such", "has no attribute 'no_such'"),
        ("{}:broken", "raised RuntimeError: no weights here"),
        ("{}:needs", "raised TypeError: needs() missing 1 required positional argument: 'size'"),
        ("{}:ends", "raised SystemExit: no such option"),
        ("{}:number", "must return a torch.nn.Module, or a pair (model, inputs); got int"),
        ("{}:value", "must be a model or a function that returns one; it is a int"),
        ("{}:Holder", "must be a model or a function that returns one; it is a type"),
    ],
)
def test_models_that_are_none(models, name, message):
    assert message in words(run(name.format(models), code=1))


def test_a_module_that_fails_when_imported(tmp_path, monkeypatch):
    (tmp_path / "fails_on_import.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    assert "raised ZeroDivisionError: division by zero" in words(run("fails_on_import:model", code=1))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["torch.nn"],
        ["torch.nn:"],
        ["torch.nn:Transformer", "--hf", "."],
        ["torch.nn:Transformer", "--dtype", "int8"],
        ["torch.nn:Transformer", "--batch", "0"],
        ["--hf", ".", "--check"],
    ],
    ids=["nothing", "no factory", "empty factory", "two models", "dtype", "batch", "check without weights"],
)
def test_wrong_usage(arguments):
    run(*arguments, code=2)
