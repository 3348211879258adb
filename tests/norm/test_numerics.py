"""Numbers at the edges: large means, large and tiny values, many rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fusedops
from fusedops.norm import kernels_backward, kernels_forward
from tests.harness.errors import check_error
from tests.norm.problems import NORMS, gradients

WIDTHS = pytest.mark.parametrize("width", [96, 20000], ids=["held", "looped"])


# Where squares vanish and eps is 0, a row is divided by zero: signs of infinities then hang on the mean's last bit.
@pytest.mark.parametrize(
    ("scale", "eps"),
    [(scale, 1e-5) for scale in (1e30, 1e18, 1e-18, 1e-30, 1e-42)] + [(scale, 0.0) for scale in (1e30, 1e18, 1e-16)],
)
@WIDTHS
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_as_torch_at_the_ends_of_float32(runner, norm, width, scale, eps):
    """Squares overflow or vanish, and results are torch's."""
    x = torch.randn(4, width, dtype=torch.float64).mul(scale).float().to(runner.device)
    ours, theirs = norm.fused(x, (width,), None, None, eps), norm.plain(x, (width,), None, None, eps)
    if norm.center and scale == 1e30:
        # The variance overflows; on the way there torch's blocks, as ours, may or may not subtract infinities.
        ours, theirs = ours.nan_to_num(0.0), theirs.nan_to_num(0.0)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@WIDTHS
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_a_row_of_infinity_or_nan_spoils_no_other(runner, norm, width):
    x = torch.randn(5, width, device=runner.device)
    clean = norm.fused(x, (width,), None, None)
    x[1, 7], x[3, 8] = float("inf"), float("nan")
    spoilt = norm.fused(x, (width,), None, None)
    assert torch.equal(spoilt[[0, 2, 4]], clean[[0, 2, 4]])
    assert not spoilt[3].isfinite().any()
    assert not spoilt[1].isfinite().all()


@WIDTHS
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_a_constant_row(runner, norm, width):
    x = torch.full((3, width), 0.1, device=runner.device, requires_grad=True)
    y = norm.fused(x, (width,), None, None)
    check_error(y, norm.exact(x, (width,), None, None), norm.plain(x, (width,), None, None))
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize(
    ("mean", "dtype"),
    [(1e4, torch.float32), (100.0, torch.bfloat16)],
    ids=["mean_10000_float32", "mean_100_bfloat16"],
)
@WIDTHS
def test_a_large_mean_behind_a_residual(runner, width, mean, dtype):
    """The sum has the large mean; its terms cancel or not."""
    x, r = ((torch.randn(3, width, device=runner.device) + m).to(dtype) for m in (3 * mean, -2 * mean))
    output, stream = fusedops.add_layer_norm(x, r, width)
    assert torch.equal(stream, x + r)
    check_error(output, NORMS[0].exact(stream, (width,), None, None), F.layer_norm(stream, (width,)))


def sum_as_a_tree(self, input):
    """Halves of a power of two are added until one is left, as threads of a GPU do."""
    values, axis = input.handle.data, self.axis
    while values.shape[axis] > 1:
        values = np.add(*np.split(values, 2, axis))
    return self.to_tensor(values if self.keep_dims else values.squeeze(axis), input.dtype)


def test_gradients_of_parameters_summed_over_a_million_rows(kernel_runner, monkeypatch):
    """Each lane of a partial sum takes as many rows as on an H200: 10⁶ / (528 programs · 16 rows a step) = 118."""
    rows, width = 1_000_000, 16
    if kernel_runner.device.type == "cpu":
        # The interpreter has 16 programs, and a step costs the same whatever its rows. It would add a tile's rows one
        # after the other, as no GPU does: the 512 lanes here would lose more than the sums that are tested.
        monkeypatch.setattr("triton.runtime.interpreter.ReduceOps.sum", sum_as_a_tree)
        for module, block_m in ((kernels_forward, 1 << 14), (kernels_backward, 512)):

            def resolve(*arguments, original=module.resolve, block_m=block_m):
                return dataclasses.replace(original(*arguments), block_m=block_m)

            monkeypatch.setattr(module, "resolve", resolve)
    x = torch.randn(rows, width, device=kernel_runner.device)
    weight, bias = (torch.randn(width, device=kernel_runner.device, requires_grad=True) for _ in range(2))
    norm, tensors = NORMS[0], (x, weight, bias)
    grad = torch.randn_like(x) + 1
    ours = gradients(lambda *t: norm.fused(t[0], (width,), *t[1:]), tensors, grad)[1][1:]
    theirs = gradients(lambda *t: norm.plain(t[0], (width,), *t[1:]), tensors, grad)[1][1:]
    doubles = [t if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    exact = gradients(lambda *t: norm.exact(t[0], (width,), *t[1:]), doubles, grad.double())[1][1:]
    for name, a, b, c in zip(("weight", "bias"), ours, exact, theirs, strict=True):
        check_error(a, b, c, gradient=True, what=f"gradient of {name}")
        assert ((a - b).abs() / b.abs().clamp_min(1e3)).max() < 1e-6


def test_a_width_that_float32_does_not_hold(kernel_runner, monkeypatch):
    """The last block has one element: float32(2²⁴ + 1) - 2²⁴ would count none."""
    width = 2**24 + 1
    if kernel_runner.name == "interpreter":  # whose cost is an operation's, whatever the block
        resolve = kernels_forward.resolve
        monkeypatch.setattr(kernels_forward, "resolve", lambda *a: dataclasses.replace(resolve(*a), block_n=2**20))
    x = torch.randn(1, width, dtype=torch.bfloat16, device=kernel_runner.device)
    ours = fusedops.layer_norm(x, width)
    torch.testing.assert_close(ours, F.layer_norm(x, (width,)), rtol=2**-7, atol=1e-6)
