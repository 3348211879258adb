"""Group norm's configurations: the default is one that may be searched, for every problem and device."""

from __future__ import annotations

import itertools

import pytest

from fusedops.norm.tuning import (
    GROUP_NORM,
    GroupNormProblem,
    default_group_config,
    group_held,
    group_space,
    prune_group,
)
from fusedops.runtime.device import INTERPRETER, TARGETS

PROBLEMS = [
    GroupNormProblem(channels, spatial, last and spatial > 1, itemsize, direction)
    for channels, spatial, last, itemsize, direction in itertools.product(
        (1, 3, 10, 64, 5000), (1, 16, 4096, 2**20), (False, True), (2, 4), ("forward", "backward")
    )
]


@pytest.mark.parametrize("device", [*TARGETS, "interpreter"])
def test_the_default_is_never_pruned(device):
    facts = TARGETS.get(device, INTERPRETER)
    for problem in PROBLEMS:
        config = default_group_config(problem, facts)
        assert GROUP_NORM.unfit(config, problem, facts) is None, (problem, config)
        assert config.looped == (config.block_c < problem.channels or config.block_s < problem.spatial)
        # A tile is a power of two of at least a group's size, or of at most what a program holds.
        assert config.block_n * config.block_c * config.block_s <= max(1024, group_held(problem))


@pytest.mark.parametrize("problem", PROBLEMS[::7], ids=str)
def test_the_default_is_in_the_space(problem):
    config = default_group_config(problem, TARGETS["sm_90"])
    assert any(config == other for other in group_space(problem))


def test_pruning_says_why():
    problem, facts = GroupNormProblem(16, 4096, False, 4, "forward"), TARGETS["sm_90"]
    reasons = {prune_group(config, problem, facts) for config in group_space(problem)}
    assert None in reasons
    assert "the tile is smaller than the group" in reasons
    assert "more than 16384 elements held in registers" in reasons
    assert "more than 128 elements held in a thread's registers" in reasons
