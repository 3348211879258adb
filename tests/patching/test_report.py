"""The report, the plan, and when patching refuses."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections import OrderedDict

import pytest
import torch
from rich.console import Console
from torch import nn

import fusedops
from fusedops.patching import CheckResult, Left, PatchReport
from tests.patching.models import MLP, bert, block, classes, gpt2


def test_what_was_replaced():
    report = fusedops.patch(block())
    assert report.applied
    assert [(x.path, x.original, x.rule, x.calls) for x in report.replaced] == [
        ("0", "Linear -> GELU", "linear+activation", 'fusedops.linear(activation="gelu")'),
        ("2", "LayerNorm", "norm", "fusedops.layer_norm"),
    ]
    assert report.left == report.already == ()
    (note,) = report.notes
    assert note == "on cpu, here, fusedops' functions run torch's operators: the backend in force is torch"
    assert report.check is None


def test_text():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8)) for _ in range(12)))
    model.append(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    model[-1][1].register_forward_hook(lambda *_: None)
    report = fusedops.patch(model)
    assert str(report) == "\n".join(
        [
            "fusedops: 24 replaced, 1 left alone",
            "replaced:",
            '   12 x Linear -> ReLU => fusedops.linear(activation="relu")',
            "        0.0, 1.0, 2.0, ..., 11.0",
            "   12 x LayerNorm => fusedops.layer_norm",
            "        0.2, 1.2, 2.2, ..., 11.2",
            "left alone:",
            "    1 x Linear -> Tanh: the activation has forward hooks",
            "        12.0",
            "note: on cpu, here, fusedops' functions run torch's operators: the backend in force is torch",
        ]
    )


def test_text_of_a_deep_model_is_short():
    report = fusedops.plan(bert(num_hidden_layers=12))
    assert len(str(report).splitlines()) < 15
    assert "bert.encoder.layer.*.attention.self" in str(report)
    assert str(report).startswith("fusedops: 51 to replace, 0 left alone")


def test_places_known_by_numbers_alone_are_written_out():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
    assert "\n        0, 2" in str(fusedops.plan(model))
    assert "body.0, body.2" in str(fusedops.plan(nn.Sequential(OrderedDict(body=model))))
    assert "0, 2" in shown(fusedops.plan(model))
    many = nn.Sequential(*(nn.LayerNorm(8) for _ in range(9)))
    assert "\n        0, 1, 2, ..., 8" in str(fusedops.plan(many))
    assert "        body.*" in str(fusedops.plan(nn.Sequential(OrderedDict(body=many))))


def test_a_report_taken_for_the_model_says_so():
    report = fusedops.patch(block())
    with pytest.raises(TypeError, match=r"cannot be called: .* changes the model in place and returns a report"):
        report(torch.randn(2, 8))
    for name in ("eval", "parameters", "to"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}': .* in place and returns a report"):
            getattr(report, name)
    # What looks for protocols is told nothing of that, and finds none.
    for name in ("__array__", "_repr_html_"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'$"):
            getattr(report, name)
    assert copy.copy(report) == copy.deepcopy(report) == pickle.loads(pickle.dumps(report)) == report
    assert "LayerNorm" in shown(report)


def test_text_of_the_model_itself():
    assert "(the model itself)" in str(fusedops.plan(nn.LayerNorm(4)))
    assert str(fusedops.plan(nn.Identity())) == "fusedops: 0 to replace, 0 left alone"


def test_dictionary_is_json():
    model = block()
    report = fusedops.patch(model, check=(torch.randn(2, 8),))
    model.append(nn.LayerNorm(8))
    model[4].weight = nn.Parameter(torch.ones(8, dtype=torch.complex64))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["replaced"][1] == {
        "path": "2",
        "original": "LayerNorm",
        "rule": "norm",
        "calls": "fusedops.layer_norm",
    }
    assert data["check"]["max_abs_error"] == report.check.max_abs_error
    assert data["check"]["noise_floor"] == report.check.noise_floor > 0
    assert data["check"]["explained"] is True
    assert json.loads(json.dumps(fusedops.plan(model).to_dict()))["left"][0]["path"] == "4"


def test_plan_changes_nothing():
    for model in (block(), gpt2(), MLP()):
        before, attributes = classes(model), [dict(module.__dict__) for module in model.modules()]
        report = fusedops.plan(model)
        assert report.replaced
        assert not report.applied
        assert classes(model) == before
        assert [dict(module.__dict__) for module in model.modules()] == attributes
        assert fusedops.patch(model) == PatchReport(report.replaced, report.left, notes=report.notes)


def test_patching_twice_changes_nothing_more():
    model = gpt2()
    first = fusedops.patch(model)
    before = classes(model)
    second = fusedops.patch(model, strict=True)
    assert second.replaced == ()
    assert second.already == first.replaced
    assert classes(model) == before
    assert "already replaced" in str(second)


def test_patching_again_replaces_what_is_new():
    model = block()
    handle = model[1].register_forward_hook(lambda *_: None)
    fusedops.patch(model)
    handle.remove()
    model.append(nn.LayerNorm(8))
    report = fusedops.patch(model)
    assert [entry.path for entry in report.replaced] == ["0", "4"]
    assert [entry.path for entry in report.already] == ["2"]


def test_strict_raises_when_something_is_left_alone():
    model = block()
    model[1].register_forward_hook(lambda *_: None)
    before = classes(model)
    with pytest.raises(fusedops.PatchError, match=r"1 modules would be left alone: 0 \(the activation has forward"):
        fusedops.patch(model, strict=True)
    assert classes(model) == before
    assert issubclass(fusedops.PatchError, ValueError)


def test_strict_raises_when_nothing_can_be_replaced():
    with pytest.raises(fusedops.PatchError, match="nothing in this model can be replaced"):
        fusedops.patch(nn.Conv2d(1, 1, 1), strict=True)
    assert fusedops.patch(nn.Conv2d(1, 1, 1)).replaced == ()


@pytest.mark.parametrize("function", [fusedops.patch, fusedops.unpatch, fusedops.plan])
def test_models_only(function):
    with pytest.raises(TypeError, match=f"{function.__name__}: model must be a torch.nn.Module; got dict"):
        function({})
    with pytest.raises(TypeError, match=r"torch\.nn\.Module; got the class LayerNorm: make an instance"):
        function(nn.LayerNorm)


def test_context_manager():
    model = block()
    before = classes(model)
    with fusedops.patched(model) as report:
        assert len(report.replaced) == 2
        assert classes(model) != before
    assert classes(model) == before
    with pytest.raises(KeyError), fusedops.patched(model):
        raise KeyError
    assert classes(model) == before
    with pytest.raises(TypeError), fusedops.patched(None):
        pass


def test_context_manager_leaves_what_was_patched_before():
    model = block()
    fusedops.patch(model[2])
    with fusedops.patched(model) as report:
        assert [entry.path for entry in report.replaced] == ["0"]
    assert type(model[0]) is nn.Linear
    assert type(model[2]).__name__ == "FusedLayerNorm"
    with fusedops.patched(model):
        fusedops.unpatch(model)
    assert type(model[2]) is nn.LayerNorm


def test_a_failure_half_way_leaves_the_model_as_it_was(monkeypatch):
    from fusedops.patching import patcher

    model = gpt2()
    before = classes(model)
    count = 0

    def fuse(module, rule, original=patcher.fuse):
        nonlocal count
        count += 1
        if count == 7:
            raise KeyboardInterrupt
        return original(module, rule)

    monkeypatch.setattr(patcher, "fuse", fuse)
    with pytest.raises(KeyboardInterrupt):
        fusedops.patch(model)
    assert count == 7
    assert classes(model) == before


def test_compiled_and_distributed_models_are_patched_inside():
    model = torch.compile(block(), backend="eager")
    report = fusedops.patch(model)
    assert [entry.path for entry in report.replaced] == ["_orig_mod.0", "_orig_mod.2"]
    assert "the model is compiled" in report.notes[0]
    assert "note: the model is compiled" in str(report)


def shown(report, width=160):
    console = Console(width=width, file=io.StringIO())
    console.print(report)
    return console.file.getvalue()


def test_table():
    model = bert(num_hidden_layers=3)
    model.bert.encoder.layer[1].intermediate.dense.register_forward_hook(lambda *_: None)
    plan = shown(fusedops.plan(model))
    assert "to replace" in plan
    report = fusedops.patch(model, check=(torch.tensor([[3, 4, 5]]),))
    text = shown(report)
    for part in ("where", "count", "original", "calls", "why", "left alone", "noise floor"):
        assert part in text
    assert "bert.encoder.layer.*.output.LayerNorm" in text
    assert "bert.encoder.layer.1.intermediate" in text  # alone: by its own path
    again = shown(fusedops.patch(model))
    assert "already replaced" in again
    # Nothing of a path or a class is taken for Rich's markup, and a narrow terminal loses none of it.
    odd = PatchReport(left=(Left("a[bold].*", "[red]Odd[/red]", "it has [/] in it"),))
    assert "a[bold].*" in shown(odd)
    assert "[red]Odd[/red]" in shown(odd)
    assert "[/] in it" in shown(odd)
    narrow = "".join(line.split("│")[1].strip() for line in shown(report, 60).splitlines() if line.startswith("│"))
    assert "bert.encoder.layer.*.attention.output.LayerNorm" in narrow


def test_a_large_difference_is_remarked_on():
    explained = PatchReport(check=CheckResult(3e-6, 1.0, "output.logits", 1, 2e-6))
    assert "check: largest difference 3e-06 in output.logits (noise floor 2e-06; 1 tensors" in str(explained)
    assert "note" not in str(explained)
    strange = PatchReport(check=CheckResult(3e-4, 1.0, "output", 1, 2e-6))
    for text in (str(strange), shown(strange)):
        assert "150 times the noise floor of 2e-06: more than rounding explains" in " ".join(text.split())
    assert not strange.check.explained
    unknown = PatchReport(check=CheckResult(3e-4, 1.0, "output", 1))
    assert "noise floor not measured" in str(unknown)
    assert unknown.check.explained
