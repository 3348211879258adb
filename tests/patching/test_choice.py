"""What ``include``, ``exclude`` and ``strict`` choose, and patches inside patches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import fusedops
from tests.patching.models import classes


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc, self.act = nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()

    def forward(self, x):
        return F.layer_norm(self.act(self.fc(self.norm(x))), (8,))


def model():
    return nn.ModuleDict({"body": nn.Sequential(Block(), Block()), "head": nn.Sequential(nn.Linear(8, 8), nn.ReLU())})


EVERYTHING = {f"body.{i}{part}" for i in (0, 1) for part in ("", ".norm", ".fc")} | {"head.0"}


@pytest.mark.parametrize(
    ("options", "paths"),
    [
        ({}, EVERYTHING),
        ({"include": "head"}, {"head.0"}),
        ({"include": ["body.0", "head*"]}, {"body.0", "body.0.norm", "body.0.fc", "head.0"}),
        ({"include": "*.norm"}, {"body.0.norm", "body.1.norm"}),
        ({"include": "*.norm", "exclude": "body.1"}, {"body.0.norm"}),
        ({"exclude": "*norm"}, EVERYTHING - {"body.0.norm", "body.1.norm"}),
        # The function in a method that is rewritten for the linear layer goes with it.
        ({"include": ["body.0.fc", "body.0.act"]}, {"body.0.fc", "body.0"}),
        # An activation that is to stay keeps its linear layer.
        ({"exclude": "*.act"}, EVERYTHING - {"body.0.fc", "body.1.fc"}),
        ({"exclude": "*"}, set()),
    ],
)
def test_patterns(options, paths, calls):
    chosen = model()
    report = fusedops.patch(chosen, **options)
    assert {entry.path for entry in report.replaced} == paths
    ruled_out = {entry.path for entry in report.left}
    assert ruled_out == EVERYTHING - paths
    assert {entry.reason for entry in report.left} <= {"ruled out by include and exclude"}
    chosen["head"](chosen["body"](torch.randn(2, 8)))
    assert sum(calls.values()) == len(paths)
    assert not fusedops.plan(chosen, **options).replaced
    # What is ruled out is not left alone against one's will.
    if paths:
        fusedops.patch(model(), strict=True, **options)


def test_what_was_replaced_before_stays_although_it_is_ruled_out():
    chosen = model()
    fusedops.patch(chosen)
    report = fusedops.patch(chosen, exclude="head")
    assert len(report.already) == len(EVERYTHING)
    assert any("unpatch it first" in note for note in report.notes)


@pytest.mark.parametrize("function", [fusedops.patch, fusedops.plan])
@pytest.mark.parametrize("argument", ["include", "exclude"])
@pytest.mark.parametrize(
    ("pattern", "error", "message"),
    [
        ("norm", ValueError, r"did you mean '\*.norm'"),
        ("body.7", ValueError, "fits the name of no module of the model"),
        ("", ValueError, "holds no pattern"),
        ([], ValueError, "holds no pattern"),
        (3, TypeError, "got int"),
        ([nn.Linear], TypeError, "got type"),
    ],
)
def test_wrong_patterns(function, argument, pattern, error, message):
    chosen = model()
    before = classes(chosen)
    with pytest.raises(error, match=message):
        function(chosen, **{argument: pattern})
    assert classes(chosen) == before


def test_strict_is_a_bool():
    with pytest.raises(TypeError, match="strict must be a bool; got str"):
        fusedops.patch(model(), strict="no")


def test_a_class_is_no_model():
    with pytest.raises(TypeError, match="got the class Block: make an instance"):
        fusedops.patch(Block)


def test_patches_inside_patches():
    chosen = model()
    plain = classes(chosen)
    with fusedops.patched(chosen["head"]):
        head = classes(chosen)
        with fusedops.patched(chosen) as report:
            assert [entry.path for entry in report.already] == ["head.0"]
            with fusedops.patched(chosen) as inner:
                assert not inner.replaced
            assert len(report.replaced) == len(EVERYTHING) - 1
        assert classes(chosen) == head
    assert classes(chosen) == plain


def test_a_class_put_on_top_inside_is_named_and_the_rest_is_put_back():
    chosen = model()
    plain = classes(chosen)
    with pytest.raises(fusedops.PatchError, match="ParametrizedFusedLayerNorm"), fusedops.patched(chosen):
        parametrize.register_parametrization(chosen["body"][0].norm, "weight", nn.Identity())
    changed = {path for path, kind in classes(chosen).items() if kind is not plain.get(path)}
    assert {path for path in changed if "parametrizations" not in path} == {"body.0.norm"}


def test_an_exception_inside_puts_everything_back():
    chosen = model()
    plain = classes(chosen)
    with pytest.raises(KeyError), fusedops.patched(chosen):
        raise KeyError
    assert classes(chosen) == plain


def test_it_is_said_where_torchs_operators_run():
    notes = fusedops.plan(model()).notes
    assert any("run torch's operators" in note for note in notes)
