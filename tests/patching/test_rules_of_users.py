"""``register_rule``: rules of one's own beside fusedops'."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import fusedops
from fusedops.patching import register_rule, unregister_rule


class Scale(nn.Module):
    """An RMS norm that no rule knows: nothing in its name says so."""

    def __init__(self, size=8, offset=0.0):
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, size))
        self.offset = offset

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain + self.offset


def fused(self, x):
    fused.calls += 1
    return fusedops.rms_norm(x, self.gain.shape, self.gain, 1e-6)


def inputs(module):
    return (torch.randn(4, *module.gain.shape),)


@pytest.fixture
def register():
    names = []
    fused.calls = 0

    def add(name="scale", kind=Scale, forward=fused, calls="fusedops.rms_norm", **options):
        register_rule(name, kind, forward, calls=calls, **options)
        names.append(name)

    yield add
    for name in names:
        unregister_rule(name)


def test_a_rule_replaces_and_is_undone(register):
    register(check=inputs)
    model = nn.Sequential(Scale(), nn.Linear(8, 8))
    x = torch.randn(3, 8)
    plain = model(x)
    report = fusedops.patch(model, check=x)
    (entry,) = report.replaced
    assert (entry.path, entry.original, entry.rule, entry.calls) == ("0", "Scale", "scale", "fusedops.rms_norm")
    fused.calls = 0
    torch.testing.assert_close(model(x), plain)
    assert fused.calls == 1
    assert isinstance(model[0], Scale)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(copied(x), plain)
    assert fused.calls == 3
    assert fusedops.patch(model).already == (entry,)
    assert fusedops.unpatch(model) == 1
    assert type(model[0]) is Scale


def test_a_check_that_finds_other_results_says_how_far_off(register):
    register(check=lambda module: torch.randn(4, 8))
    (left,) = fusedops.patch(nn.Sequential(Scale(offset=0.5))).left
    assert "its check found other results" in left.reason
    assert "Greatest absolute difference: 0.5" in left.reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"reasons": lambda module: ["too small"]}, "too small"),
        ({"reasons": lambda module: None}, "the reasons of rule 'scale' failed: TypeError"),
        ({"reasons": lambda module: "no"}, "are no list of texts: 'no'"),
        ({"reasons": lambda module: [1]}, r"are no list of texts: \[1\]"),
        ({"check": lambda module: 1 / 0}, "its check failed: ZeroDivisionError"),
        ({"check": lambda module: ()}, "its check failed: TypeError"),
    ],
)
def test_what_a_rule_itself_has_against_a_module(register, options, reason):
    import re

    register(**options)
    (left,) = fusedops.patch(nn.Sequential(Scale())).left
    assert re.search(reason, left.reason)


def test_a_forward_of_its_own_hooks_and_parametrizations_are_seen_as_ever(register):
    register()

    class Other(Scale):
        def forward(self, x):
            return -x

    model = nn.Sequential(Other(), Scale(), Scale())
    model[1].forward = lambda x: x
    nn.utils.parametrize.register_parametrization(model[2], "gain", nn.Identity())
    report = fusedops.patch(model)
    assert not report.replaced
    assert [reason for entry in report.left if (reason := entry.reason)] == [
        f"{Other.__module__}.{Other.__qualname__} has a forward of its own",
        "its forward was replaced on the instance",
        "it is parametrized (torch.nn.utils.parametrize)",
    ]


def test_it_comes_before_the_rules_that_are_there(register):
    register("mine", nn.Linear, lambda self, x: nn.functional.linear(x, self.weight, self.bias), calls="mine")
    report = fusedops.patch(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    assert [entry.calls for entry in report.replaced] == ["mine"]
    assert not report.left


def test_the_last_registered_is_asked_first(register):
    register("first")
    register("second", calls="second")
    assert [entry.calls for entry in fusedops.plan(Scale()).replaced] == ["second"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"name": ""}, TypeError, "name must be a text"),
        ({"name": "norm"}, ValueError, "there is a rule 'norm'"),
        ({"name": "linear"}, ValueError, "there is a rule 'linear'"),
        ({"kind": "Scale"}, TypeError, "kind must be a class of modules"),
        ({"kind": ()}, ValueError, "got none"),
        ({"kind": int}, TypeError, "kind must be a class of modules"),
        ({"forward": None}, TypeError, "forward must be a function"),
        ({"calls": None}, TypeError, "calls must be a text"),
        ({"reasons": []}, TypeError, "reasons must be a function"),
        ({"check": (1,)}, TypeError, "check must be a function"),
    ],
)
def test_wrong_arguments(change, error, message):
    arguments = {"name": "scale", "kind": Scale, "forward": fused, "calls": "fusedops.rms_norm", **change}
    with pytest.raises(error, match=message):
        register_rule(**arguments)
    assert not fusedops.plan(Scale()).replaced


def test_one_name_one_rule(register):
    register()
    with pytest.raises(ValueError, match="there is a rule 'scale'"):
        register_rule("scale", Scale, fused, calls="x")


@pytest.mark.parametrize("name", ["nobody", [], None])
def test_only_registered_rules_are_taken_back(name):
    with pytest.raises(ValueError, match="was registered"):
        unregister_rule(name)


def test_without_its_rule_a_pickled_model_loads_as_it_was(register):
    register()
    model = Scale()
    fusedops.patch(model)
    data = pickle.dumps(model)
    unregister_rule("scale")
    loaded = pickle.loads(data)
    assert type(loaded) is Scale
    register_rule("scale", Scale, fused, calls="x")  # for the fixture
