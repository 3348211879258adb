"""Triton kernels of the forward of layer norm, RMS norm and L2 norm, with dropout and a residual, and their launcher.

Tensors are read as rows (:mod:`fusedops.norm.rows`), each with unit column stride and any row strides. A row, or
several short ones, is held by one program and read once; wider rows are walked twice in blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.autotune.resolve import resolve
from fusedops.kernels.dropout import keep_scale
from fusedops.norm.reference import residual_dtype
from fusedops.norm.rows import as_rows
from fusedops.norm.tuning import NORM, NormProblem
from fusedops.runtime.device import device_guard
from fusedops.runtime.dropout import threshold_and_scale
from fusedops.runtime.launch import ceil_div, empty_contiguous, options


@triton.jit
def row_offset(row, size_b, size_c, strides, SPLIT: tl.constexpr, UNIT: tl.constexpr):
    """Where rows begin, in elements; ``row`` is int64, see :class:`fusedops.norm.rows.Rows`."""
    if SPLIT:
        index = row.to(tl.int32)  # divisions of int64 are many times slower
        c = (index % size_c).to(tl.int64)
        rest = index // size_c
        a, b = (rest // size_b).to(tl.int64), (rest % size_b).to(tl.int64)
        offset = a * strides[0] + b * strides[1] + c * strides[2]
    else:
        offset = row * strides[2]
    return offset * UNIT


@triton.jit
def _affine(x, W, B, cols, mask, weight_offset):
    """x (rows, cols) times (weight + weight_offset) plus bias, in float32."""
    if W is not None:
        x = x * (tl.load(W + cols[None, :], mask=mask[None, :], other=0.0).to(tl.float32) + weight_offset)
    if B is not None:
        x = x + tl.load(B + cols[None, :], mask=mask[None, :], other=0.0).to(tl.float32)
    return x


@triton.jit
def _entering(
    X, RESIDUAL, SEED, RESIDUAL_OUT, row, first, offsets, width, mask, threshold, scale, BLOCK_N: tl.constexpr
):  # fmt: skip
    """What is normalised: dropout(x) + residual, rounded to what RESIDUAL_OUT holds and stored there; (rows, cols).

    ``offsets`` are the beginnings of the rows in X and RESIDUAL; columns begin at ``first``.
    """
    cols = (first + tl.arange(0, BLOCK_N))[None, :]
    x = tl.load(X + offsets[0][:, None] + cols, mask=mask, other=0.0).to(tl.float32)
    if SEED is not None:
        x = x * keep_scale(SEED, row, first, threshold, scale, BLOCK_N)
    if RESIDUAL is not None:
        x += tl.load(RESIDUAL + offsets[1][:, None] + cols, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(RESIDUAL_OUT.dtype.element_ty)
        tl.store(RESIDUAL_OUT + row[:, None] * width + cols, rounded, mask=mask)
        x = rounded.to(tl.float32)
    return x


@triton.jit
def _reciprocal(square, width, eps, KIND: tl.constexpr):
    """What rows are multiplied by, from their sums of squares."""
    if KIND == "l2":
        rstd = 1.0 / tl.maximum(tl.sqrt(square), eps)
    else:
        rstd = tl.rsqrt(square / width + eps)
    return rstd


@triton.jit(do_not_specialize=["rows", "size_b", "size_c"])  # a new row count must not compile again
def norm_forward_kernel(
    X,  # (rows, width)
    RESIDUAL,  # (rows, width) or None
    W,  # (width,) or None
    B,  # (width,) or None
    SEED,  # (1,) int64, or None without dropout
    Y,  # (rows, width), contiguous
    RESIDUAL_OUT,  # (rows, width), contiguous; None without a residual
    MEAN,  # (rows,) float32; written by layer norm
    RSTD,  # (rows,) float32
    rows,
    width,
    size_b,
    size_c,
    x_strides,
    residual_strides,
    eps,
    weight_offset,
    threshold,
    scale,
    KIND: tl.constexpr,
    SPLIT: tl.constexpr,
    UNIT: tl.constexpr,  # width and strides are counted in it
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program i owns rows i·BLOCK_M …; each row fits in BLOCK_N columns."""
    width = width * UNIT
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    row_mask = row < rows
    col_mask = cols < width
    mask = row_mask[:, None] & col_mask[None, :]
    offsets = (
        row_offset(row, size_b, size_c, x_strides, SPLIT, UNIT),
        row_offset(row, size_b, size_c, residual_strides, SPLIT, UNIT),
    )
    x = _entering(X, RESIDUAL, SEED, RESIDUAL_OUT, row, 0, offsets, width, mask, threshold, scale, BLOCK_N)
    if KIND == "layer":
        mean = tl.sum(x, axis=1) / width
        # The padded tail must be zero again after centring, or it would count as (0 - mean)².
        x = tl.where(mask, x - mean[:, None], 0.0)
        tl.store(MEAN + row, mean, mask=row_mask)
        rest = tl.sum(x, axis=1) / width  # what rounding left out of the mean
        square = tl.sum(x * x, axis=1) - rest * rest * width
        x = x - rest[:, None]
    else:
        square = tl.sum(x * x, axis=1)
    rstd = _reciprocal(square, width, eps, KIND)
    tl.store(RSTD + row, rstd, mask=row_mask)
    y = _affine(x * rstd[:, None], W, B, cols, col_mask, weight_offset)
    tl.store(Y + row[:, None] * width + cols[None, :], y.to(Y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "size_b", "size_c"])  # a new row count must not compile again
def norm_forward_looped_kernel(
    X,
    RESIDUAL,
    W,
    B,
    SEED,
    Y,
    RESIDUAL_OUT,
    MEAN,
    RSTD,
    rows,
    width,
    size_b,
    size_c,
    x_strides,
    residual_strides,
    eps,
    weight_offset,
    threshold,
    scale,
    KIND: tl.constexpr,
    SPLIT: tl.constexpr,
    UNIT: tl.constexpr,  # width and strides are counted in it
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program i owns row i (BLOCK_M is 1), walked in blocks: once for the statistics, once for the output.

    The mean and the centred sum of squares of the blocks are combined by the pairwise update of Chan, Golub,
    LeVeque 1983 (equation 2.1), which stays exact where E[x²] - E[x]² would cancel. The mean is carried as a sum of
    two floats: rounding it once a block would cost an ulp of a mean that may be far larger than the deviation.
    """
    width = width * UNIT
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    offsets = (
        row_offset(row, size_b, size_c, x_strides, SPLIT, UNIT),
        row_offset(row, size_b, size_c, residual_strides, SPLIT, UNIT),
    )
    mean = tl.zeros((1,), dtype=tl.float32)
    mean_low = tl.zeros((1,), dtype=tl.float32)
    square = tl.zeros((1,), dtype=tl.float32)
    for first in range(0, width, BLOCK_N):
        mask = (first + tl.arange(0, BLOCK_N) < width)[None, :]
        x = _entering(X, RESIDUAL, SEED, RESIDUAL_OUT, row, first, offsets, width, mask, threshold, scale, BLOCK_N)
        if KIND == "layer":
            seen = first * 1.0
            count = tl.minimum(width - first, BLOCK_N) * 1.0
            block_mean = tl.sum(x, axis=1) / count
            centred = tl.where(mask, x - block_mean[:, None], 0.0)
            rest = tl.sum(centred, axis=1) / count  # what rounding left out of block_mean
            delta = (block_mean - mean) + (rest - mean_low)
            change = delta * (count / (seen + count))
            new_mean = mean + change
            mean_low += change - (new_mean - mean)
            mean = new_mean
            block_square = tl.sum(centred * centred, axis=1) - rest * rest * count
            square += block_square + delta * delta * (seen * count / (seen + count))
        else:
            square += tl.sum(x * x, axis=1)
    rstd = _reciprocal(square, width, eps, KIND)
    if KIND == "layer":
        tl.store(MEAN + row, mean)
    tl.store(RSTD + row, rstd)
    if RESIDUAL is not None:
        tl.debug_barrier()  # the second walk reads what other threads of this program have stored
    for first in range(0, width, BLOCK_N):
        cols = first + tl.arange(0, BLOCK_N)
        col_mask = cols < width
        mask = col_mask[None, :]
        if RESIDUAL is not None:
            at = RESIDUAL_OUT + row[:, None] * width + cols[None, :]
            x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        else:
            x = _entering(X, None, SEED, None, row, first, offsets, width, mask, threshold, scale, BLOCK_N)
        if KIND == "layer":
            x = (x - mean[:, None]) - mean_low[:, None]
        y = _affine(x * rstd[:, None], W, B, cols, col_mask, weight_offset)
        tl.store(Y + row[:, None] * width + cols[None, :], y.to(Y.dtype.element_ty), mask=mask)


def norm_forward(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    dims: int,
    eps: float,
    weight_offset: float,
    kind: str,
    dropout_p: float,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate and launch; arguments and results as :func:`fusedops.norm.reference.norm`, statistics in float32."""
    device = input.device
    lead = input.shape[: input.dim() - dims]
    output = empty_contiguous(input, out_dtype)
    summed = input.new_empty(0) if residual is None else empty_contiguous(input, residual_dtype(input, residual))
    rstd = input.new_empty(lead, dtype=torch.float32)
    mean = torch.empty_like(rstd) if kind == "layer" else rstd.new_empty(0)
    if input.numel() == 0:
        # No element, but perhaps rows: their statistics are of nothing, and the gradients of nothing need none.
        return output, summed, mean.fill_(float("nan")), rstd.fill_(float("nan"))
    view = as_rows((input, residual), dims)
    itemsize = max(input.element_size(), summed.element_size())
    problem = NormProblem.of(
        view.width, itemsize, "forward", seed is not None, 0, view.rows, kind, input.dtype,
        weight is not None, bias is not None, residual is not None,
    )  # fmt: skip
    config = resolve(NORM, problem, device)
    kernel = norm_forward_looped_kernel if config.looped else norm_forward_kernel
    unit, width, strides = view.counted()
    threshold, scale = threshold_and_scale(dropout_p)
    with device_guard(input):
        kernel[(ceil_div(view.rows, config.block_m),)](
            *view.tensors, None if weight is None else weight.contiguous(), None if bias is None else bias.contiguous(),
            seed, output, None if residual is None else summed, mean, rstd, view.rows, width, *view.sizes,
            *strides, eps, weight_offset, threshold, scale,
            KIND=kind, SPLIT=view.split, UNIT=unit, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            **options(config.num_warps),
        )  # fmt: skip
    return output, summed, mean, rstd
