"""Norms give torch's results, forward and backward, for every width, layout, dtype and choice of parameters."""

from __future__ import annotations

import pytest
import torch

import fusedops
from tests.harness.errors import check_error
from tests.harness.tensors import randn
from tests.norm.problems import NORMS, gradients

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def check(norm, x, shape, weight, bias, grad, eps=1e-5, offset=0.0):
    output, grads = gradients(lambda *t: norm.fused(t[0], shape, *t[1:], eps, offset), (x, weight, bias), grad)
    _, plain = gradients(lambda *t: norm.plain(t[0], shape, *t[1:], eps, offset), (x, weight, bias), grad)
    exact_output, exact = gradients(
        lambda *t: norm.exact(t[0], shape, *t[1:], eps, offset),
        [t if t is None else t.double().detach().requires_grad_(t.requires_grad) for t in (x, weight, bias)],
        grad.double(),
    )
    baseline = norm.plain(x, shape, weight, bias, eps, offset)
    assert output.dtype == x.dtype
    assert output.shape == x.shape
    check_error(output, exact_output, baseline, what="output")
    for name, tensor, ours, theirs, truth in zip(
        ("input", "weight", "bias"), (x, weight, bias), grads, plain, exact, strict=True
    ):
        if tensor is not None and tensor.requires_grad:
            assert ours.dtype == tensor.dtype
            assert ours.shape == tensor.shape
            check_error(ours, truth, theirs, gradient=True, what=f"gradient of {name}")


def tensors(runner, rows, width, dtype, parameter_dtype=None, layout="contiguous"):
    parameter_dtype = parameter_dtype or dtype
    x = randn(*rows, width, dtype=dtype, device=runner.device, layout=layout, requires_grad=True)
    weight = randn(width, dtype=parameter_dtype, device=runner.device, requires_grad=True)
    bias = randn(width, dtype=parameter_dtype, device=runner.device, requires_grad=True)
    return x, weight, bias


@pytest.mark.parametrize(
    ("width", "dtype"),
    [(width, dtype) for width in (1, 7, 64, 100, 1000) for dtype in DTYPES]
    # Around the widest row that a backward holds; beyond the widest of the forward, in 32 and in 16 bits.
    + [(8192, torch.bfloat16), (8193, torch.float32), (20000, torch.float32), (33000, torch.float16)],
    ids=str,
)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_any_width(runner, norm, width, dtype):
    rows = (2, 3) if width <= 8192 else (1, 3)  # a looped backward's programs take two at once
    x, weight, bias = tensors(runner, rows, width, dtype)
    check(norm, x, (width,), weight, bias if norm.center else None, torch.randn_like(x))


@pytest.mark.parametrize("rows", [1, 17, 70])
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_more_rows_than_programs(runner, norm, rows):
    x, weight, bias = tensors(runner, (rows,), 40, torch.float32)
    check(norm, x, (40,), weight, bias if norm.center else None, torch.randn_like(x))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "expanded"])
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_any_strides(runner, norm, layout):
    x = randn(4, 6, 24, device=runner.device, layout=layout, requires_grad=True)
    weight = randn(24, device=runner.device, layout="sliced", requires_grad=True)
    for grad_layout in ("contiguous", "transposed", "expanded"):
        check(norm, x, (24,), weight, None, randn(4, 6, 24, device=runner.device, layout=grad_layout))


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_any_normalized_shape(runner, norm, shape):
    x = randn(2, 3, 5, device=runner.device, layout="transposed", requires_grad=True)
    weight, bias = (randn(*shape, device=runner.device, requires_grad=True) for _ in range(2))
    check(norm, x, shape, weight, bias if norm.center else None, torch.randn_like(x))


@pytest.mark.parametrize("width", [24, 20000], ids=["held", "looped"])
@pytest.mark.parametrize(
    ("norm", "parameters"),
    [(n, p) for n in NORMS for p in ("none", "weight", "bias", "both") if n.center or p in ("none", "weight")],
    ids=str,
)
def test_missing_parameters(runner, norm, parameters, width):
    x, weight, bias = tensors(runner, (3,), width, torch.float32)
    weight = weight if parameters in ("weight", "both") else None
    bias = bias if parameters in ("bias", "both") else None
    check(norm, x, (width,), weight, bias, torch.randn_like(x))


@pytest.mark.parametrize("parameter_dtype", DTYPES, ids=lambda d: f"parameters_{d}")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: f"input_{d}")
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_parameters_of_another_dtype(runner, norm, dtype, parameter_dtype):
    x, weight, bias = tensors(runner, (5,), 48, dtype, parameter_dtype)
    check(norm, x, (48,), weight, bias if norm.center else None, torch.randn_like(x))


@pytest.mark.parametrize("width", [24, 20000], ids=["held", "looped"])
def test_weight_offset(runner, width):
    x, weight, _ = tensors(runner, (5,), width, torch.float32)
    check(NORMS[1], x, (width,), weight, None, torch.randn_like(x), offset=1.0)


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-3, 1.0])
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_eps(runner, norm, eps):
    x, weight, bias = tensors(runner, (5,), 24, torch.float32)
    check(norm, (x * 0.01).detach().requires_grad_(), (24,), weight, bias if norm.center else None, x.detach(), eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_default_eps_of_rms_norm_is_torchs(runner, dtype):
    x = torch.full((3, 8), 1e-4, dtype=dtype, device=runner.device)
    expected = torch.nn.functional.rms_norm(x, (8,))
    torch.testing.assert_close(fusedops.rms_norm(x, 8), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize(
    ("mean", "dtype"),
    [(1e4, torch.float32), (100.0, torch.bfloat16)],
    ids=["mean_10000_float32", "mean_100_bfloat16"],
)
@pytest.mark.parametrize("width", [500, 20000], ids=["held", "looped"])
def test_a_large_mean_costs_no_accuracy(runner, width, mean, dtype):
    x = (torch.randn(3, width, device=runner.device) + mean).to(dtype).requires_grad_()
    check(NORMS[0], x, (width,), None, None, torch.randn_like(x))


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_the_neighbours_of_a_row_are_not_read(runner, norm):
    """The input lies inside a larger buffer of NaN; a load past a row's end would show."""
    buffer = torch.full((9, 90), float("nan"), device=runner.device)
    buffer[2:7, 11:48] = torch.randn(5, 37)
    x = buffer[2:7, 11:48].detach().requires_grad_()
    grads = torch.full((9, 90), float("nan"), device=runner.device)
    grads[1:6, 3:40] = torch.randn(5, 37)
    check(norm, x, (37,), None, None, grads[1:6, 3:40])


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_empty(runner, norm, shape):
    x = torch.empty(shape, device=runner.device, requires_grad=True)
    weight, bias = (torch.ones(shape[-1], device=runner.device, requires_grad=True) for _ in range(2))
    y = norm.fused(x, shape[-1:], weight, bias if norm.center else None)
    assert y.shape == shape
    wanted = (x, weight, bias) if norm.center else (x, weight)
    for tensor, grad in zip(wanted, torch.autograd.grad(y.sum(), wanted), strict=True):
        assert grad.shape == tensor.shape
        assert not grad.any()
