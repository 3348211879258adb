"""Defaults and space of the norms' configurations: pure functions of a problem and a device."""

from __future__ import annotations

import itertools

import pytest

from fusedops.norm.tuning import NORM, NormConfig, NormProblem, default_config, held, norm_space, prune
from fusedops.runtime.device import INTERPRETER, TARGETS

WIDTHS = (1, 16, 64, 100, 256, 1000, 4096, 8192, 8193, 16384, 32768, 32769, 262144, 2**30)
PROBLEMS = [
    NormProblem(width, itemsize, direction, dropout, sums)
    for width, itemsize, dropout in itertools.product(WIDTHS, (2, 4), (False, True))
    for direction, sums in (("forward", 0), ("backward", 0), ("backward", 2))
]


@pytest.mark.parametrize("facts", [*TARGETS.values(), INTERPRETER], ids=lambda facts: facts.arch)
def test_defaults_can_serve_every_problem(facts):
    for problem in PROBLEMS:
        config = default_config(problem, facts)
        assert NORM.unfit(config, problem, facts) is None, problem
        assert config.looped or config.block_n >= problem.width
        assert config.num_ctas == 1
        assert config.looped == (max(16, problem.width) > held(problem)), problem


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_the_space_holds_the_default_and_is_small(target):
    facts = TARGETS[target]
    for problem in PROBLEMS:
        left = [config for config in norm_space(problem) if prune(config, problem, facts) is None]
        assert default_config(problem, facts) in left, problem
        assert len(left) == len(set(left)) <= 2000, problem


def test_rows_up_to_64_kb_are_held_by_the_forward():
    for itemsize, width in ((2, 32768), (4, 16384)):
        for target in TARGETS.values():
            assert not default_config(NormProblem(width, itemsize, "forward"), target).looped
            assert default_config(NormProblem(width + 1, itemsize, "forward"), target).looped


@pytest.mark.parametrize(
    ("changes", "problem", "target", "reason"),
    [
        ({"block_n": 64}, NormProblem(100, 2, "forward"), "sm_90", "narrower than the row"),
        ({"num_warps": 32}, NormProblem(4096, 2, "forward"), "gfx942", "more than 1024 threads"),
        ({"block_m": 8}, NormProblem(4096, 2, "backward"), "sm_90", "elements held"),
        ({"num_warps": 1}, NormProblem(8192, 2, "forward"), "sm_90", "more than 128 elements held in a thread"),
        ({"num_warps": 2}, NormProblem(8192, 2, "backward"), "sm_90", "more than 64 elements held in a thread"),
        ({"num_stages": 2}, NormProblem(4096, 2, "forward"), "sm_90", "one step"),
        ({"num_ctas": 2}, NormProblem(16384, 2, "backward"), "sm_80", "clusters of blocks begin with sm_90"),
        ({"num_ctas": 2}, NormProblem(16384, 2, "backward"), "gfx942", "clusters of blocks begin with sm_90"),
        ({"num_ctas": 2, "looped": True}, NormProblem(16384, 2, "backward"), "sm_90", "one wide row"),
    ],
)
def test_why_a_configuration_is_pruned(changes, problem, target, reason):
    values = {"block_m": 1, "block_n": problem.width, "looped": False, "num_warps": 16, **changes}
    assert reason in prune(NormConfig(**values), problem, TARGETS[target])


def test_a_cluster_may_hold_a_row_that_one_multiprocessor_cannot():
    problem = NormProblem(32768, 2, "backward", sums=2)
    assert prune(NormConfig(1, 32768, False, 16, num_ctas=4), problem, TARGETS["sm_90"]) is None
    assert "elements held" in prune(NormConfig(1, 32768, False, 16, num_ctas=2), problem, TARGETS["sm_90"])
