"""The product of few rows is right, with any number of programs a tile; its default suits the device."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from fusedops.linear.reference import keeps_output
from fusedops.linear.tuning import LinearConfig, LinearProblem
from fusedops.linear.tuning_skinny import skinny_config
from fusedops.runtime.device import TARGETS
from fusedops.runtime.dropout import keep_scale
from tests.harness.errors import check_error
from tests.harness.tensors import randn
from tests.linear.problems import DTYPES, TORCHS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

CONFIG = LinearConfig(16, 64, 64, 2, 4, group=1)


def run(x, w, bias=None, residual=None, activation=None, seed=None, p=0.0, config=CONFIG, out_dtype=None):
    """(output, saved) of the launcher."""
    from fusedops.linear.kernels_skinny import skinny_forward

    shape = (x.shape[0], w.shape[0])
    y = torch.empty(shape, dtype=out_dtype or x.dtype, device=x.device)
    z = None if activation is None else torch.empty(shape, dtype=x.dtype, device=x.device)
    skinny_forward(x, w, bias, residual, seed, y, z, activation, p, "ieee", config)
    return y, z


def check(x, w, bias=None, residual=None, activation=None, *, seed=None, p=0.0, config=CONFIG, out_dtype=None):
    """Output and saved tensor by the error rule; returns them."""
    y, z = run(x, w, bias, residual, activation, seed, p, config, out_dtype)
    kept = 1.0 if seed is None else keep_scale(seed, *y.shape, p)

    def composed(dtype):
        x_, w_, b_, r_ = (t if t is None else t.to(dtype) for t in (x, w, bias, residual))
        before = torch.nn.functional.linear(x_, w_, b_)
        after = TORCHS[activation](before)
        output = (after * kept).to(dtype)
        return output if r_ is None else output + r_, after if keeps_output(activation) else before

    (exact, exact_saved), (plain, plain_saved) = composed(torch.float64), composed(x.dtype)
    check_error(y, exact, plain.to(y.dtype), what="output")
    if z is not None:
        check_error(z, exact_saved, plain_saved, what="saved")
    return y, z


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("M", "rows"), [(16, 16), (1, 16), (1, 1)], ids=["16_rows", "one_row", "one_row_multiplied"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(kernel_runner, dtype, M, rows, splits):
    config = replace(CONFIG, rows=rows, splits=splits)
    device = kernel_runner.device
    x, w = randn(M, 200, dtype=dtype, device=device), randn(100, 200, dtype=dtype, device=device)
    check(x, w, randn(100, device=device), randn(M, 100, dtype=dtype, device=device), "gelu", config=config)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("M", "N", "K"), [(1, 1, 1), (1, 129, 63), (2, 15, 17), (15, 17, 129), (16, 100, 100), (3, 64, 128), (7, 63, 2)]
)
def test_any_size(kernel_runner, M, N, K, splits):
    """With three programs a tile the short depths leave some of them nothing."""
    device = kernel_runner.device
    x, w = randn(M, K, dtype=torch.bfloat16, device=device), randn(N, K, dtype=torch.bfloat16, device=device)
    for rows in (16, 1) if M == 1 else (16,):
        check(x, w, activation="silu", config=replace(CONFIG, rows=rows, splits=splits))


@pytest.mark.parametrize("rows", [16, 1])
@pytest.mark.parametrize("layout", ["transposed", "sliced", "strided", "expanded", "offset"])
def test_any_strides_between_nan(kernel_runner, layout, rows):
    M, device = 1 if rows == 1 else 5, kernel_runner.device
    config = replace(CONFIG, rows=rows, splits=2)
    for layouts in ((layout, "contiguous"), ("contiguous", layout)):
        x = randn(M, 81, dtype=torch.float16, device=device, layout=layouts[0])
        w = randn(70, 81, dtype=torch.float16, device=device, layout=layouts[1])
        check(x, w, randn(70, device=device), randn(M, 70, device=device, layout=layout), "relu", config=config)


@pytest.mark.parametrize("splits", [1, 3])
def test_dropout_another_result_dtype_and_a_kept_output(kernel_runner, splits):
    device = kernel_runner.device
    x, w = randn(4, 300, dtype=torch.float16, device=device), randn(50, 300, dtype=torch.float16, device=device)
    seed = torch.tensor([11], device=device)
    config = replace(CONFIG, cols=16, splits=splits)
    check(x, w, activation="sigmoid", seed=seed, p=0.4, config=config, out_dtype=torch.float32)


def test_two_runs_are_equal_to_the_bit(kernel_runner):
    x, w = randn(3, 500, device=kernel_runner.device), randn(40, 500, device=kernel_runner.device)
    config = replace(CONFIG, splits=4)
    first, second = (run(x, w, activation="mish", config=config) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


SIZES = [(1, 1, 1), (2, 17, 33), (1, 4096, 4096), (16, 14336, 4096), (8, 1024, 8192), (4, 128256, 4096)]
SIZES += [(16, 64, 1 << 20)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("M", "N", "K"), SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "ieee"), ("float32", "ieee"), ("float32", "tf32")])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
def test_the_default_fits_and_occupies_the_device(target, M, N, K, dtype, precision, aligned):
    facts = TARGETS[target]
    problem = LinearProblem.of("forward", M, N, K, dtype=dtype, precision=precision, aligned=aligned)
    config = skinny_config(problem, facts)
    step = (config.rows + config.cols) * config.depth * problem.itemsize
    assert config.num_stages * step <= facts.shared_memory
    assert config.rows >= M
    programs = problem.cols // config.cols * config.splits
    if config.splits > 1:  # none too many, and each with work
        assert programs / 2 < 0.75 * facts.multiprocessor_count
        assert problem.depth >= 4 * config.splits * config.depth
    elif problem.depth >= 8 * config.depth and config.cols <= problem.cols:
        assert programs >= 0.75 * facts.multiprocessor_count


@pytest.mark.parametrize(("target", "least"), [("sm_80", 32 << 10), ("sm_90", 40 << 10), ("sm_100", 40 << 10)])
@pytest.mark.parametrize(("N", "K"), [(4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096), (1024, 8192)])
def test_enough_bytes_are_on_their_way(target, least, N, K):
    """Little's law, a multiprocessor: all steps but the one being multiplied, of the programs that it holds."""
    facts = TARGETS[target]
    config = skinny_config(LinearProblem.of("forward", 1, N, K), facts)
    step = config.cols * config.depth * 2
    held = facts.shared_memory // (config.num_stages * (config.rows + config.cols) * config.depth * 2)
    given = -(-N // config.cols) * config.splits / facts.multiprocessor_count
    assert (config.num_stages - 1) * step * min(held, max(given, 1)) >= least


def test_an_h100_by_hand():
    """N = K = 4096 in 16 bits: 128 programs of 32 columns, three steps of 16 KB each on their way."""
    config = skinny_config(LinearProblem.of("forward", 1, 4096, 4096), TARGETS["sm_90"])
    assert config == LinearConfig(16, 32, 256, 4, 4, group=1, kernel="skinny")
