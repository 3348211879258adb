"""What the tuner knows of the operators: keys, configurations and problems that pass through JSON unharmed."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from fusedops.autotune.operator import operator_named, operators
from fusedops.autotune.workloads import problems_of, usual
from fusedops.norm.tuning import NORM, NormConfig, NormProblem
from fusedops.runtime.device import TARGETS

OPERATORS = operators()
MORE = {
    "group_norm": {"batch": 8, "channels": 64, "groups": 8, "spatial": 256},
    "grouped_linear": {"rows": 512, "groups": 4, "in_features": 64, "out_features": 64},
    "quantized_linear": {"rows": 4, "in_features": 256, "out_features": 256, "bits": 4, "group_size": 64},
    "fp8_linear": {"rows": 64, "in_features": 256, "out_features": 256},
    "attention_decode": {"batch": 2, "heads": 8, "kv_heads": 2, "room": 1024, "d": 64},
}


def met(facts):
    yield from usual(facts, batch=1)
    yield from usual(facts, dtype="float32", batch=1, length=16)
    for op, sizes in MORE.items():
        yield from problems_of(op, facts, **sizes)


@pytest.mark.parametrize("target", TARGETS)
def test_problems_and_defaults_pass_through_json(target):
    facts = TARGETS[target]
    seen = set()
    for operator, problem in met(facts):
        text = json.dumps([operator.problem_json(problem), operator.default(problem, facts).to_json()])
        plain_problem, plain_config = json.loads(text)
        assert operator.problem_from_json(plain_problem) == problem
        assert operator.config.from_json(plain_config) == operator.default(problem, facts)
        seen.add(operator.name)
    by_torch = {"attention"} if target == "gfx1100" else set()
    if target in ("sm_75", "sm_80", "sm_86", "gfx90a", "gfx1100"):  # they multiply no float8
        by_torch |= {"fp8_linear"}
    assert seen == set(OPERATORS) - by_torch


@pytest.mark.parametrize("name", OPERATORS)
def test_configurations_hold_nothing_but_ints_bools_and_strings(name):
    operator = operator_named(name)
    for part in fields(operator.config):
        assert "int" in str(part.type) or "bool" in str(part.type) or part.name == "kernel"


def test_different_problems_have_different_keys():
    keys = {}
    for operator, problem in met(TARGETS["sm_90"]):
        assert keys.setdefault((operator.name, operator.key(problem)), problem) == problem


def test_a_key_reads_aloud():
    key = NORM.key(NormProblem(4096, 2, "forward", kind="rms", dtype="float16", rows=64))
    assert key.startswith("width=4096 itemsize=2 direction=forward dropout=no sums=0 rows=64 kind=rms dtype=float16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_m": 3}, "block_m: 3 is no size"),
        ({"block_m": -1}, "block_m: -1"),
        ({"block_n": 1 << 17}, "block_n: 131072"),
        ({"num_warps": 4.0}, "NormConfig.num_warps: 4.0 is not int"),
        ({"num_warps": True}, "num_warps: True is not int"),
        ({"looped": 1}, "looped: 1 is not bool"),
        ({"more": 1}, "unknown: more"),
        ({"block_m": None}, "block_m: None"),
    ],
)
def test_a_configuration_from_anywhere_is_checked(change, message):
    plain = NormConfig(1, 64, False, 4).to_json()
    with pytest.raises(ValueError, match=message):
        NormConfig.from_json(plain | change)


@pytest.mark.parametrize("value", [None, [], "block_m=1", 3, {}])
def test_what_is_no_configuration(value):
    with pytest.raises(ValueError, match="NormConfig"):
        NormConfig.from_json(value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "batch"}, "kind: 'batch'"),
        ({"width": "64"}, "width: '64' is not int"),
        ({"dropout": 0}, "dropout: 0 is not bool"),
        ({"depth": 3}, "unknown: depth"),
    ],
)
def test_a_problem_from_anywhere_is_checked(change, message):
    plain = NORM.problem_json(NormProblem(64, 2, "forward"))
    with pytest.raises(ValueError, match=message):
        NORM.problem_from_json(plain | change)


def test_an_unknown_operator_names_the_known():
    with pytest.raises(ValueError, match=r"op must be one of norm, group_norm, linear.*got 'conv'"):
        operator_named("conv")


def test_a_device_that_cannot_hold_the_threads_is_told():
    problem = NormProblem(4096, 2, "forward")
    assert NORM.unfit(NormConfig(1, 4096, False, 32), problem, TARGETS["gfx942"]) == "more than 1024 threads a program"
