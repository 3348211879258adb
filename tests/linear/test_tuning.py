"""Configurations: every device gets one that fits, the choice is pure, and the derivative goes where it costs less."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest

from fusedops.linear.activations import ACTIVATIONS
from fusedops.linear.tuning import (
    DEFAULTS,
    TORCH,
    LinearConfig,
    LinearProblem,
    default_config,
    linear_space,
    prune,
    tiled_config,
)
from fusedops.runtime.device import INTERPRETER, TARGETS, DeviceFacts

UNKNOWN = [
    DeviceFacts("nvidia", "sm_87", "a small board", 16, 166912),
    DeviceFacts("nvidia", "sm_103", "a newer one", 160, 232448),
    DeviceFacts("nvidia", "sm_110", "another board", 20, 232448),
    DeviceFacts("nvidia", "sm_121", "a workstation", 48, 101376),
    DeviceFacts("nvidia", "sm_130", "what comes", 200, 232448),
    DeviceFacts("nvidia", "sm_90", "with little", 132, 49152),
    DeviceFacts("amd", "gfx1201", "a card", 64, 65536, 32),
    DeviceFacts("amd", "gfx908", "an older one", 120, 65536, 64),
]
DEVICES = [*TARGETS.values(), *UNKNOWN, INTERPRETER]
SIZES = (0, 1, 16, 33, 64, 100, 768, 50257)


@functools.cache
def problems():
    """Each once: several calls are one problem."""
    calls = itertools.product(
        ("forward", "grad_input", "grad_weight"),
        itertools.product(SIZES, SIZES, (0, 4096)),
        (("bfloat16", "ieee"), ("float32", "ieee"), ("float32", "tf32"), ("float32", "tf32x3")),
        (None, "relu", "gelu"),
        (True, False),
    )
    found = (
        LinearProblem.of(product, *sizes, dtype=dtype, activation=activation, precision=precision, aligned=aligned)
        for product, sizes, (dtype, precision), activation, aligned in calls
    )
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("facts", DEVICES, ids=lambda f: f"{f.arch}_{f.shared_memory}")
def test_every_problem_has_a_configuration_that_fits(facts):
    for problem in problems():
        config = tiled_config(problem, facts)
        own = default_config(problem._replace(torch_serves=False), facts)
        assert default_config(problem, facts) in (own, TORCH)
        assert own == config or (own.kernel == "skinny" and prune(own, problem, facts) is None), (problem, own)
        assert config.shared_memory(problem) <= facts.shared_memory, (problem, config)
        assert config.num_warps * facts.warp_size <= 1024
        for size in (config.rows, config.cols, config.depth):
            assert size >= 16
            assert size & (size - 1) == 0
        # Where the table has a tile of the size at all, it is one that a search would try too.
        if min(problem.rows, problem.cols) >= 64:
            assert prune(config, problem, facts) is None, (problem, config)


def test_the_space_holds_something_for_every_problem_and_the_defaults_of_every_gpu():
    problem = LinearProblem.of("forward", 64, 64, 64, dtype="float32", activation="gelu")
    space = set(linear_space(problem))
    for facts in TARGETS.values():
        assert any(prune(config, problem, facts) is None for config in space)
    for name, defaults in DEFAULTS.items():
        if name == "interpreter":
            continue
        for field in ("half", "tf32", "full", "derive_half", "derive_full"):
            for config in getattr(defaults, field):
                assert config in space, (name, field, config)


def test_near_sizes_are_one_problem():
    a, b, c = (LinearProblem.of("forward", m, 768, 3072) for m in (1025, 1500, 1537))
    assert a == b != c
    assert a != LinearProblem.of("forward", 1025, 769, 3072)
    assert LinearProblem.of("grad_weight", 768, 3072, 1025).depth == 1536  # here the rows are summed over


def test_few_rows_get_a_thin_tile():
    for rows, tile in ((1, 16), (16, 16), (17, 32), (64, 64)):
        problem = LinearProblem.of("forward", rows, 4096, 4096)
        assert tiled_config(problem, TARGETS["sm_90"]).rows == tile


def test_a_small_result_gets_small_tiles_so_that_no_multiprocessor_idles():
    large = LinearProblem.of("forward", 8192, 8192, 8192, activation="gelu")
    small = LinearProblem.of("forward", 512, 1024, 4096, activation="gelu")
    facts = TARGETS["sm_90"]
    assert tiled_config(large, facts).rows * tiled_config(large, facts).cols == 128 * 256
    assert tiled_config(small, facts).rows * tiled_config(small, facts).cols == 64 * 64


def test_the_derivative_is_computed_in_the_prologue_where_few_block_columns_repeat_it():
    facts = TARGETS["sm_90"]

    def prologue(activation, in_features, rows=2**15):
        problem = LinearProblem.of("grad_input", rows, in_features, 4096, activation=activation)
        return tiled_config(problem, facts).prologue

    assert prologue("relu", 128)
    assert not prologue("gelu", 4096)
    assert prologue("gelu", 64, rows=16)  # a launch costs more
    cheap = sum(prologue("relu", k) for k in (64, 128, 256, 512, 1024))
    dear = sum(prologue("gelu", k) for k in (64, 128, 256, 512, 1024))
    assert cheap > dear


def test_costs_are_ordered_as_the_formulas_are():
    costs = [ACTIVATIONS[name].cost for name in ("relu", "silu", "gelu_tanh", "gelu")]
    assert costs == sorted(costs)


def test_prune_names_what_does_not_fit():
    problem = LinearProblem.of("forward", 4096, 4096, 4096)
    config = LinearConfig(128, 256, 64, 3, 8)
    assert prune(config, problem, TARGETS["sm_90"]) is None
    assert "shared memory" in prune(config, problem, TARGETS["sm_86"])
    assert "sums a thread" in prune(replace(config, num_warps=4), problem, TARGETS["sm_90"])
    assert "padding" in prune(config, problem._replace(cols=64), TARGETS["sm_90"])
    assert "threads" in prune(replace(config, num_warps=32), problem, TARGETS["gfx950"])
    assert prune(replace(config, prologue=False), problem, TARGETS["sm_90"]) is not None


def test_torchs_product_is_a_candidate_wherever_it_gives_what_is_asked_for():
    problem = LinearProblem.of("forward", 4096, 4096, 4096, activation="gelu")
    assert TORCH in set(linear_space(problem))
    assert prune(TORCH, problem, TARGETS["sm_90"]) is None
    assert "dtype or precision" in prune(TORCH, problem._replace(torch_serves=False), TARGETS["sm_90"])


def test_the_default_is_torchs_product_where_the_fusion_saves_less_than_a_slower_product_costs():
    def default(target, m, n, k, product="forward", **fields):
        return default_config(LinearProblem.of(product, m, n, k, **fields), TARGETS[target])

    for target in TARGETS:
        assert default(target, 8192, 8192, 65536, activation="gelu") == TORCH  # a deep product: little to save
        assert default(target, 8192, 8192, 65536, activation="gelu", torch_serves=False).kernel == "tiled"
        assert default(target, 8192, 8192, 4096) == TORCH  # nothing to save
        assert default(target, 1, 4096, 4096).kernel == "skinny"  # bound by the weight, whoever reads it
        assert default(target, 128, 256, 128, activation="gelu").kernel == "tiled"  # a launch is saved
    for target in ("sm_80", "sm_90", "sm_100", "gfx942"):
        assert default(target, 8192, 4096, 256, activation="gelu").kernel == "tiled"  # a shallow one: much to save
    assert default("sm_75", 8192, 4096, 1024, activation="gelu") == TORCH  # Triton has no tensor cores there


def test_a_deep_product_with_a_small_result_has_several_programs_a_tile():
    facts = TARGETS["sm_90"]
    tall = LinearProblem.of("grad_weight", 256, 256, 2**17)
    config = tiled_config(tall, facts)
    assert config.splits > 1
    tiles = -(-256 // config.rows) * -(-256 // config.cols)
    assert tiles * config.splits <= facts.multiprocessor_count
    assert prune(config, tall, facts) is None
    assert tiled_config(tall._replace(depth=64), facts).splits == 1
    assert tiled_config(LinearProblem.of("grad_weight", 8192, 8192, 2**17), facts).splits == 1
    assert "steps" in prune(replace(config, splits=16), tall._replace(depth=512), facts)


def test_each_kernel_is_a_candidate_only_where_it_can_serve():
    facts = TARGETS["sm_90"]
    few, many = (LinearProblem.of("forward", rows, 4096, 4096) for rows in (8, 4096))
    skinny, persistent = (
        LinearConfig(16, 64, 64, 3, 4, kernel="skinny"),
        LinearConfig(128, 256, 64, 3, 8, kernel="persistent"),
    )
    assert replace(skinny, group=1) in set(linear_space(few))
    assert persistent in set(linear_space(many._replace(descriptors=True)))
    assert prune(skinny, few, facts) is None
    assert "16 rows" in prune(skinny, many, facts)
    assert "descriptor" in prune(persistent, many, facts)
    assert prune(persistent, many._replace(descriptors=True), facts) is None
    specialized = replace(persistent, specialize=True)
    assert "specialises" in prune(specialized, many._replace(descriptors=True), facts)
    assert prune(specialized, many._replace(descriptors=True), TARGETS["sm_100"]) is None
    one = LinearConfig(1, 32, 64, 3, 4, group=1, kernel="skinny")
    assert prune(one, few._replace(rows=1), facts) is None
    assert "one row" in prune(one, few, facts)
    assert "one program" in prune(replace(persistent, splits=2), many._replace(descriptors=True), facts)
    gradient = LinearProblem.of("grad_input", 8, 4096, 4096, descriptors=True)
    for config in (skinny, persistent):
        assert "forward" in prune(config, gradient, facts)


@pytest.mark.parametrize(
    "config",
    [
        replace(TORCH, prologue=True),  # it would leave out the derivative
        LinearConfig(8, 64, 64, 3, 4),
        LinearConfig(64, 64, 8, 3, 4),
        LinearConfig(64, 64, 64, 3, 0),
        LinearConfig(64, 64, 64, 3, 4, group=0),
        LinearConfig(64, 64, 64, 3, 4, splits=0),
    ],
    ids=str,
)
def test_what_no_kernel_can_run_is_refused_wherever_it_comes_from(config):
    problem = LinearProblem.of("grad_input", 4096, 4096, 4096, activation="gelu")
    assert prune(config, problem, TARGETS["sm_90"]) is not None


def test_a_pass_before_the_product_is_one_candidate():
    """Its tile is not launched: the product of what the pass wrote is a problem of its own."""
    problem = LinearProblem.of("grad_input", 4096, 4096, 4096, activation="gelu")
    assert sum(not config.prologue for config in linear_space(problem)) == 2  # with torch's product
    assert all(config.prologue for config in linear_space(problem._replace(activation=None)) if config != TORCH)
