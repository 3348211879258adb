"""The product by tensor descriptors is right, and refuses the matrices that a descriptor cannot stand for."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from fusedops.linear.reference import keeps_output
from fusedops.linear.tuning import LinearConfig
from fusedops.runtime.device import DeviceFacts, pretend
from fusedops.runtime.dropout import keep_scale
from tests.harness.errors import check_error
from tests.harness.tensors import randn
from tests.linear.problems import DTYPES, TORCHS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

CONFIG = LinearConfig(64, 64, 64, 2, 4)


def between_nan(rows, cols, dtype, device):
    """NaN in a matrix whose rows begin at multiples of 16 bytes, NaN between them too."""
    return torch.full((rows, -(-cols // 8) * 8 + 8), float("nan"), dtype=dtype, device=device)[:, :cols]


def aligned(runner, rows, cols, dtype, transposed=False):
    """Random numbers so laid out, or the transpose of such a matrix."""
    if transposed:
        return aligned(runner, cols, rows, dtype).t()
    return between_nan(rows, cols, dtype, runner.device).copy_(torch.randn(rows, cols))


def run(x, w, bias=None, residual=None, activation=None, seed=None, p=0.0, config=CONFIG, out_dtype=None):
    """(output, saved) of the launcher; what lies between their rows stays as it was."""
    from fusedops.linear.kernels_persistent import descriptors_reason, persistent_forward

    rows, cols = x.shape[0], w.shape[0]
    y = between_nan(rows, cols, out_dtype or x.dtype, x.device)
    z = None if activation is None else between_nan(rows, cols, x.dtype, x.device)
    assert not any(descriptors_reason(matrix) for matrix in (x, w, y, z) if matrix is not None)
    persistent_forward(x, w, bias, residual, seed, y, z, activation, p, "ieee", config)
    for result in (y, z):
        if result is not None:
            assert result._base[:, cols:].isnan().all()
    return y, z


def check(x, w, bias=None, residual=None, activation=None, *, seed=None, p=0.0, config=CONFIG, out_dtype=None):
    """Output and saved tensor by the error rule; returns them."""
    y, z = run(x, w, bias, residual, activation, seed, p, config, out_dtype)
    kept = 1.0 if seed is None else keep_scale(seed, *y.shape, p)

    def composed(dtype):
        operands = (t if t is None else t.to(dtype) for t in (x, w, bias, residual))
        x_, w_, b_, r_ = operands
        before = torch.nn.functional.linear(x_, w_, b_)
        after = TORCHS[activation](before)
        output = (after * kept).to(dtype)
        return output if r_ is None else output + r_, after if keeps_output(activation) else before

    (exact, exact_saved), (plain, plain_saved) = composed(torch.float64), composed(x.dtype)
    check_error(y, exact, plain.to(y.dtype), what="output")
    if z is not None:
        check_error(z, exact_saved, plain_saved, what="saved")
    return y, z


@pytest.mark.parametrize("transposed", [False, True], ids=["weight", "transposed_weight"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(kernel_runner, dtype, transposed):
    bias = randn(129, dtype=dtype, device=kernel_runner.device)
    residual = randn(100, 129, dtype=dtype, device=kernel_runner.device, layout="strided")
    x, w = aligned(kernel_runner, 100, 63, dtype), aligned(kernel_runner, 129, 63, dtype, transposed)
    check(x, w, bias, residual, "gelu")


@pytest.mark.parametrize("transposed", [False, True], ids=["input", "transposed_input"])
@pytest.mark.parametrize(
    ("M", "N", "K"), [(1, 1, 1), (15, 17, 100), (17, 15, 129), (63, 100, 17), (129, 63, 15), (64, 128, 64), (2, 129, 1)]
)
def test_any_size_between_nan(kernel_runner, M, N, K, transposed):
    x, w = aligned(kernel_runner, M, K, torch.bfloat16, transposed), aligned(kernel_runner, N, K, torch.bfloat16)
    check(x, w, activation="relu")


@pytest.mark.parametrize(
    ("rows", "cols", "num_warps"), [(32, 32, 4), (64, 128, 4), (64, 128, 1)], ids=["whole", "halves", "quarters"]
)
def test_a_tile_is_finished_in_parts(kernel_runner, rows, cols, num_warps):
    config = LinearConfig(rows, cols, 32, 2, num_warps, group=2)
    device = kernel_runner.device
    x, w = aligned(kernel_runner, 70, 40, torch.float16), aligned(kernel_runner, 117, 40, torch.float16)
    bias, residual, seed = randn(117, device=device), randn(70, 117, device=device), torch.tensor([-7], device=device)
    for activation in ("gelu", "sigmoid"):  # one keeps the pre-activation, the other its output
        check(x, w, bias, residual, activation, seed=seed, p=0.3, config=config)
    check(x, w, bias, activation="silu", config=config, out_dtype=torch.float32)


def test_few_programs_share_many_tiles(kernel_runner):
    """A device of two multiprocessors: each program has three or four of the seven tiles."""
    x, w = aligned(kernel_runner, 100, 24, torch.float32), aligned(kernel_runner, 200, 24, torch.float32)
    config = LinearConfig(16, 256, 16, 2, 8)
    expected = run(x, w, activation="tanh", config=config)
    with pretend(DeviceFacts("interpreter", "interpreter", "small", 2, 1 << 14)):
        found = check(x, w, activation="tanh", config=config)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.empty(16, 32), None),
        (lambda: torch.empty(16, 32).t(), None),
        (lambda: torch.empty(16, 32)[3:9, 4:23], None),
        (lambda: torch.empty(16, 32)[:, 1:], "not at a multiple of 16 bytes"),
        (lambda: torch.empty(16, 31), "124 bytes apart"),
        (lambda: torch.empty(17, 16, dtype=torch.float16)[:, :12].t(), None),
        (lambda: torch.empty(12, 12, dtype=torch.float16), "24 bytes apart"),
        (lambda: torch.empty(16, 32)[:, ::2], "no dimension has stride 1"),
        (lambda: torch.empty(2, 16, 8)[:, 3], None),
        (lambda: torch.empty(1, 32).expand(16, 32), "overlap"),
        (lambda: torch.empty(16, 1).expand(16, 32), "overlap"),
        (lambda: torch.empty(64).as_strided((8, 16), (4, 1)), "overlap"),
        (lambda: torch.empty(0, 32), "empty"),
        (lambda: torch.empty(16, 0), "empty"),
        (lambda: torch.empty(2, 1 << 31, device="meta", dtype=torch.float16), "too large"),
        (lambda: torch.empty_strided((2, 32), (1 << 38, 1), device="meta"), "too large"),
    ],
)
def test_what_a_descriptor_can_stand_for(make, reason):
    from fusedops.linear.kernels_persistent import descriptors_reason

    found = descriptors_reason(make())
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(("arch", "served"), [("sm_80", False), ("sm_90", True), ("sm_120", True), ("gfx942", False)])
def test_which_devices(arch, served):
    from fusedops.linear.kernels_persistent import persistent_reason
    from fusedops.runtime.device import TARGETS

    with pretend(TARGETS[arch]):
        reason = persistent_reason(torch.empty(16, 32), torch.empty(64, 32), torch.float32)
        assert reason is None if served else arch in reason


@pytest.mark.parametrize(("name", "place"), [("input", 0), ("weight", 1)])
def test_the_reason_names_the_matrix(name, place):
    from fusedops.linear.kernels_persistent import persistent_reason

    matrices = [torch.empty(16, 32), torch.empty(64, 32)]
    assert persistent_reason(*matrices, torch.float32) is None
    rows, cols = matrices[place].shape
    matrices[place] = torch.empty(rows, cols + 1)[:, :cols]
    reason = persistent_reason(*matrices, torch.float32)
    assert reason.startswith(f"{name}: its rows are {4 * cols + 4} bytes apart")


@pytest.mark.parametrize(
    ("cols", "dtype", "out_dtype", "bytes_apart"),
    [
        (62, torch.float32, torch.float32, 248),
        (4, torch.float32, torch.bfloat16, 8),
        (4, torch.bfloat16, torch.float32, 8),
    ],
    ids=str,
)
def test_results_whose_rows_are_no_multiple_of_16_bytes(cols, dtype, out_dtype, bytes_apart):
    """The output's, and those of what is kept for the backward, in the input's dtype."""
    from fusedops.linear.kernels_persistent import persistent_reason

    x, w = torch.empty(16, 32, dtype=dtype), torch.empty(cols, 32, dtype=dtype)
    assert persistent_reason(x, w, out_dtype) == f"output: its rows are {bytes_apart} bytes apart, not a multiple of 16"
