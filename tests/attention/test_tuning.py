"""Configurations: every device gets one that fits for every problem, and the choice is pure."""

from __future__ import annotations

import itertools

import pytest

from fusedops.attention.tuning import DEFAULTS, PASSES, SPACE, AttentionProblem, default_config, prune
from fusedops.runtime.device import INTERPRETER, TARGETS, DeviceFacts

UNKNOWN = [
    DeviceFacts("nvidia", "sm_87", "a small board", 16, 166912),
    DeviceFacts("nvidia", "sm_103", "a newer one", 160, 232448),
    DeviceFacts("nvidia", "sm_130", "what comes", 200, 101376),
    DeviceFacts("nvidia", "sm_90", "with little", 132, 101376),
    DeviceFacts("amd", "gfx1201", "a card", 64, 65536, 32),
]
DEVICES = [*TARGETS.values(), *UNKNOWN, INTERPRETER]


def problems():
    for kernel, d, dv, rows, keys, itemsize, causal, mask in itertools.product(
        PASSES, (1, 40, 64, 128, 192, 256), (16, 128, 256), (1, 50, 2048), (1, 2048), (2, 4), (False, True),
        ("none", "bool", "float"),
    ):  # fmt: skip
        yield AttentionProblem.of(kernel, d, dv, rows, keys, itemsize, causal, mask)


@pytest.mark.parametrize("facts", DEVICES, ids=lambda f: f"{f.arch}_{f.shared_memory}")
def test_every_problem_has_a_configuration_that_fits(facts):
    for problem in {*problems()}:
        config = default_config(problem, facts)
        assert config.shared_memory(problem, facts) <= facts.shared_memory, (problem, config)
        assert config.num_warps * facts.warp_size <= 1024
        assert config.block_m >= 16
        assert config.block_n >= 16
        assert config == default_config(problem, facts)


@pytest.mark.parametrize("arch", DEFAULTS)
def test_the_tables_are_whole(arch):
    assert set(DEFAULTS[arch]) == {*itertools.product(PASSES, (2, 4), (64, 128, 256))}


@pytest.mark.parametrize("facts", TARGETS.values(), ids=lambda f: f.arch)
def test_the_space_holds_something_for_every_problem(facts):
    for problem in {*problems()}:
        assert any(prune(config, problem, facts) is None for config in SPACE), problem
