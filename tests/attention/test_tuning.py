"""Configurations: every device gets one that fits for every problem, and the choice is pure."""

from __future__ import annotations

import itertools

import pytest
import torch

import fusedops
from fusedops.attention.tuning import (
    ATTENTION,
    DEFAULTS,
    PASSES,
    SPACE,
    AttentionConfig,
    AttentionProblem,
    default_config,
    prune,
    serves_queries,
    too_small,
)
from fusedops.runtime.device import INTERPRETER, TARGETS, DeviceFacts, pretend

UNKNOWN = [
    DeviceFacts("nvidia", "sm_87", "a small board", 16, 166912),
    DeviceFacts("nvidia", "sm_103", "a newer one", 160, 232448),
    DeviceFacts("nvidia", "sm_130", "what comes", 200, 101376),
    DeviceFacts("nvidia", "sm_90", "with little", 132, 101376),
    DeviceFacts("amd", "gfx1201", "a card", 64, 65536, 32),
]
DEVICES = [*TARGETS.values(), *UNKNOWN, INTERPRETER]


def problems():
    for kernel, d, dv, rows, keys, dtype, causal, features in itertools.product(
        PASSES, (1, 40, 64, 128, 192, 256), (16, 128, 256), (1, 50, 2048), (1, 2048), ("bfloat16", "float32"),
        (False, True), ("", "mask"),
    ):  # fmt: skip
        yield AttentionProblem.of(kernel, d, dv, rows, keys, dtype=dtype, causal=causal, features=features)


@pytest.mark.parametrize("facts", DEVICES, ids=lambda f: f"{f.arch}_{f.shared_memory}")
def test_every_problem_has_a_configuration_that_fits(facts):
    for problem in {*problems()}:
        if too_small(facts, problem.block_dk, problem.block_dv, problem.itemsize):
            continue
        config = default_config(problem, facts)
        assert ATTENTION.unfit(config, problem, facts) is None, (problem, config)
        assert config.shared_memory(problem, facts) <= facts.shared_memory, (problem, config)
        assert config.num_warps * facts.warp_size <= 1024
        assert config.block_m >= 16
        assert config.block_n >= 16
        assert config == default_config(problem, facts)


@pytest.mark.parametrize("facts", [*TARGETS.values(), INTERPRETER], ids=lambda f: f.arch)
def test_a_default_for_keys_serves_queries_too(facts):
    """Few tiles: one launch for all gradients, with the configuration of the gradients of keys and values."""
    for problem in {*problems()}:
        if problem.kernel == "backward_kv" and not too_small(
            facts, problem.block_dk, problem.block_dv, problem.itemsize
        ):
            config = default_config(problem, facts)
            assert serves_queries(config, problem._replace(kernel="backward_q"), facts), (problem, config)


def test_a_configuration_for_keys_that_does_not_fit_serves_no_queries():
    keys = AttentionProblem.of("backward_kv", 128, 128, 256, 256)
    large, facts = AttentionConfig(16, 64, 8, 4), TARGETS["sm_86"]
    assert ATTENTION.unfit(large, keys, facts) is None
    assert not serves_queries(large, keys._replace(kernel="backward_q"), facts)


def test_modified():
    """What is done to every score decides between the tables' two columns; what ends or adds to a row does not."""
    modify = {"softcap", "dropout", "mask", "bool_mask", "alibi", "score_mod", "mask_mod"}
    for features, modified in [("", False), ("sinks", False), ("packed", False), ("sinks+packed", False)] + [
        (f"{name}+sinks", True) for name in modify
    ]:
        assert AttentionProblem.of("forward", 64, 64, 64, 64, features=features).modified == modified, features


@pytest.mark.parametrize("arch", DEFAULTS)
def test_the_tables_are_whole(arch):
    assert set(DEFAULTS[arch]) == {*itertools.product(PASSES, (2, 4), (64, 128, 256))}


@pytest.mark.parametrize("facts", TARGETS.values(), ids=lambda f: f.arch)
def test_the_space_holds_something_for_every_problem(facts):
    for problem in {*problems()}:
        if too_small(facts, problem.block_dk, problem.block_dv, problem.itemsize):
            continue
        assert any(prune(config, problem, facts) is None for config in SPACE), problem


def test_what_a_device_is_too_small_for():
    assert "registers" in too_small(TARGETS["gfx1100"], 64, 64, 2)
    assert "shared memory" in too_small(TARGETS["sm_75"], 256, 256, 4)
    assert too_small(TARGETS["sm_75"], 256, 256, 2) is None
    assert too_small(TARGETS["gfx942"], 256, 256, 4) is None
    assert too_small(INTERPRETER, 256, 256, 4) is None


@pytest.mark.parametrize(
    ("arch", "size", "reason"),
    [
        ("gfx1100", 64, "gfx1100: the backward does not fit in its registers"),
        ("sm_75", 256, "sm_75: float32 heads of more than 128 do not fit in its shared memory"),
        ("sm_75", 128, None),
        ("sm_90", 256, None),
    ],
)
@pytest.mark.interpreter
def test_a_device_that_is_too_small_is_a_reason(arch, size, reason):
    q = torch.empty(1, 1, 4, size)
    with pretend(TARGETS[arch]):
        explanation = fusedops.explain(fusedops.attention, q, q, q)
    assert explanation.reasons == (() if reason is None else (reason,))
