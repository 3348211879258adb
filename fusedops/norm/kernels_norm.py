"""Triton kernels of layer norm and RMS norm, and their launchers.

Rows are viewed as a matrix X of (rows, width) with any row stride and unit column stride. Forward: a row (or several
short ones) is held by one program, read once; wider rows are walked twice in blocks. Backward: a fixed number of
programs share the rows, each keeps one float32 partial sum of the weight's and bias's gradients, and a second kernel
adds the partials in a fixed order, so that the result is the same to the bit on every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.autotune.resolve import resolve
from fusedops.norm.tuning import NormConfig, NormProblem, default_config
from fusedops.runtime.device import device_facts, device_guard
from fusedops.runtime.launch import ceil_div, next_power_of_2, options


@triton.jit
def _affine(x, W, B, cols, mask, weight_offset, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """x (rows, cols) times (weight + weight_offset) plus bias, in float32."""
    if HAS_WEIGHT:
        w = tl.load(W + cols, mask=mask, other=0.0).to(tl.float32) + weight_offset
        x = x * w[None, :]
    if HAS_BIAS:
        b = tl.load(B + cols, mask=mask, other=0.0).to(tl.float32)
        x = x + b[None, :]
    return x


@triton.jit
def norm_forward_kernel(
    X,  # (rows, width), row stride stride_x
    W,  # (width,)
    B,  # (width,)
    Y,  # (rows, width), contiguous
    MEAN,  # (rows,) float32
    RSTD,  # (rows,) float32
    rows,
    width,
    stride_x,
    eps,
    weight_offset,
    CENTER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program i owns rows i·BLOCK_M …; each row fits in BLOCK_N columns."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    row_mask = row < rows
    col_mask = cols < width
    mask = row_mask[:, None] & col_mask[None, :]
    x = tl.load(X + row[:, None] * stride_x + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if CENTER:
        mean = tl.sum(x, axis=1) / width
        # The padded tail must be zero again after centring, or it would count as (0 - mean)².
        x = tl.where(mask, x - mean[:, None], 0.0)
        tl.store(MEAN + row, mean, mask=row_mask)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)
    tl.store(RSTD + row, rstd, mask=row_mask)
    y = _affine(x * rstd[:, None], W, B, cols, col_mask, weight_offset, HAS_WEIGHT, HAS_BIAS)
    tl.store(Y + row[:, None] * width + cols[None, :], y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def norm_forward_looped_kernel(
    X,
    W,
    B,
    Y,
    MEAN,
    RSTD,
    width,
    stride_x,
    eps,
    weight_offset,
    CENTER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program i owns row i, walked in blocks: once for the statistics, once for the output.

    The mean and the centred sum of squares of the blocks are combined by the pairwise update of Chan, Golub,
    LeVeque 1983 (equation 2.1), which stays exact where E[x²] - E[x]² would cancel. The mean is carried as a sum of
    two floats: rounding it once a block would cost an ulp of a mean that may be far larger than the deviation.
    """
    row = tl.program_id(0).to(tl.int64)
    mean = 0.0
    mean_low = 0.0
    square = 0.0
    for start in range(0, width, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < width
        x = tl.load(X + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
        if CENTER:
            seen = start * 1.0
            count = tl.minimum(start + BLOCK_N, width) * 1.0 - seen
            block_mean = tl.sum(x, axis=0) / count
            centred = tl.where(mask, x - block_mean, 0.0)
            rest = tl.sum(centred, axis=0) / count  # what rounding left out of block_mean
            delta = (block_mean - mean) + (rest - mean_low)
            change = delta * (count / (seen + count))
            new_mean = mean + change
            mean_low += change - (new_mean - mean)
            mean = new_mean
            block_square = tl.sum(centred * centred, axis=0) - rest * rest * count
            square += block_square + delta * delta * (seen * count / (seen + count))
        else:
            square += tl.sum(x * x, axis=0)
    rstd = tl.rsqrt(square / width + eps)
    if CENTER:
        tl.store(MEAN + row, mean)
    tl.store(RSTD + row, rstd)
    for start in range(0, width, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < width
        x = tl.load(X + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
        if CENTER:
            x = (x - mean) - mean_low
        y = _affine((x * rstd)[None, :], W, B, cols, mask, weight_offset, HAS_WEIGHT, HAS_BIAS)
        tl.store(Y + row * width + cols[None, :], y.to(Y.dtype.element_ty), mask=mask[None, :])


@triton.jit
def norm_backward_kernel(
    DY,  # (rows, width), row stride stride_dy
    X,  # (rows, width), row stride stride_x
    W,  # (width,)
    MEAN,  # (rows,) float32
    RSTD,  # (rows,) float32
    DX,  # (rows, width), contiguous
    DW,  # (programs, width) float32 partial sums
    DB,  # (programs, width) float32 partial sums
    rows,
    width,
    stride_dy,
    stride_x,
    weight_offset,
    CENTER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEED_DX: tl.constexpr,
    NEED_DW: tl.constexpr,
    NEED_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program i owns rows i·BLOCK_M …, (i + programs)·BLOCK_M …, and partial sum i.

    ``dx = rstd (g - x̂ mean(g x̂) - mean(g))`` with ``g = dy (weight + offset)``, as in reference.norm_backward.
    """
    program = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK_M
    cols = tl.arange(0, BLOCK_N)
    col_mask = cols < width
    if HAS_WEIGHT:
        w = tl.load(W + cols, mask=col_mask, other=0.0).to(tl.float32) + weight_offset
    dw = tl.zeros((BLOCK_N,), dtype=tl.float32)
    db = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for first in range(program * BLOCK_M, rows, step):
        row = first + tl.arange(0, BLOCK_M)
        row_mask = row < rows
        mask = row_mask[:, None] & col_mask[None, :]
        dy = tl.load(DY + row[:, None] * stride_dy + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if NEED_DX or NEED_DW:
            x = tl.load(X + row[:, None] * stride_x + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            rstd = tl.load(RSTD + row, mask=row_mask, other=0.0)
            if CENTER:
                x = x - tl.load(MEAN + row, mask=row_mask, other=0.0)[:, None]
            xhat = tl.where(mask, x * rstd[:, None], 0.0)
        if NEED_DX:
            g = dy
            if HAS_WEIGHT:
                g = dy * w[None, :]
            dx = g - xhat * (tl.sum(g * xhat, axis=1) / width)[:, None]
            if CENTER:
                dx = dx - (tl.sum(g, axis=1) / width)[:, None]
            dx = dx * rstd[:, None]
            tl.store(DX + row[:, None] * width + cols[None, :], dx.to(DX.dtype.element_ty), mask=mask)
        if NEED_DW:
            dw += tl.sum(dy * xhat, axis=0)
        if NEED_DB:
            db += tl.sum(dy, axis=0)
    if NEED_DW:
        tl.store(DW + program * width + cols, dw, mask=col_mask)
    if NEED_DB:
        tl.store(DB + program * width + cols, db, mask=col_mask)


@triton.jit
def norm_backward_looped_kernel(
    DY,
    X,
    W,
    MEAN,
    RSTD,
    DX,
    width,
    stride_dy,
    stride_x,
    weight_offset,
    CENTER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dx of one wide row: program i owns row i, walked once for the two means and once for the output."""
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(RSTD + row)
    mean = 0.0
    if CENTER:
        mean = tl.load(MEAN + row)
    mean_gx = 0.0
    mean_g = 0.0
    for start in range(0, width, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < width
        g = tl.load(DY + row * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(X + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g = g * (tl.load(W + cols, mask=mask, other=0.0).to(tl.float32) + weight_offset)
        mean_gx += tl.sum(tl.where(mask, g * ((x - mean) * rstd), 0.0), axis=0)
        if CENTER:
            mean_g += tl.sum(g, axis=0)
    mean_gx = mean_gx / width
    mean_g = mean_g / width
    for start in range(0, width, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < width
        g = tl.load(DY + row * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(X + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g = g * (tl.load(W + cols, mask=mask, other=0.0).to(tl.float32) + weight_offset)
        dx = (g - (x - mean) * rstd * mean_gx - mean_g) * rstd
        tl.store(DX + row * width + cols, dx.to(DX.dtype.element_ty), mask=mask)


@triton.jit
def norm_backward_columns_kernel(
    DY,
    X,
    MEAN,
    RSTD,
    DW,  # (splits, width) float32 partial sums
    DB,  # (splits, width) float32 partial sums
    rows,
    width,
    stride_dy,
    stride_x,
    splits,
    CENTER: tl.constexpr,
    NEED_DW: tl.constexpr,
    NEED_DB: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gradients of weight and bias for wide rows: program (block, split) owns BLOCK_N columns of some rows."""
    program = tl.program_id(0)
    split = (program % splits).to(tl.int64)
    cols = (program // splits) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < width
    dw = tl.zeros((BLOCK_N,), dtype=tl.float32)
    db = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for row in range(split, rows, splits):
        dy = tl.load(DY + row * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        if NEED_DW:
            x = tl.load(X + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
            if CENTER:
                x = x - tl.load(MEAN + row)
            dw += dy * (x * tl.load(RSTD + row))
        if NEED_DB:
            db += dy
    if NEED_DW:
        tl.store(DW + split * width + cols, dw, mask=mask)
    if NEED_DB:
        tl.store(DB + split * width + cols, db, mask=mask)


@triton.jit
def sum_partials_kernel(
    PARTIALS,  # (count, width) float32
    OUT,  # (width,)
    count,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The second stage: OUT = Σ PARTIALS over its rows, in a fixed order. Program i owns BLOCK_N columns."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < width
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, count, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        at = PARTIALS + row[:, None].to(tl.int64) * width + cols[None, :]
        total += tl.load(at, mask=(row < count)[:, None] & mask[None, :], other=0.0)
    tl.store(OUT + cols, tl.sum(total, axis=0).to(OUT.dtype.element_ty), mask=mask)


def _as_rows(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """(rows, width) with unit column stride: a view where the strides allow one, else a copy."""
    matrix = tensor.reshape(-1, width)
    return matrix if matrix.stride(1) == 1 or width == 1 else matrix.contiguous()


def _config(matrix: torch.Tensor, backward: bool) -> NormConfig:
    problem = NormProblem(matrix.shape[1], matrix.element_size(), backward)
    return resolve(problem, matrix.device, default_config)


def norm_forward(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dims: int,
    eps: float,
    weight_offset: float,
    center: bool,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate and launch; arguments and results as :func:`fusedops.norm.reference.norm`, statistics in float32."""
    lead = input.shape[: input.dim() - dims]
    output = torch.empty(input.shape, dtype=out_dtype, device=input.device)
    rstd = torch.empty(lead, dtype=torch.float32, device=input.device)
    mean = torch.empty(lead if center else (0,), dtype=torch.float32, device=input.device)
    if input.numel() == 0:
        # No element, but perhaps rows: their statistics are of nothing, and the gradients of nothing need none.
        return output, mean.fill_(float("nan")), rstd.fill_(float("nan"))
    rows = rstd.numel()
    width = input.numel() // rows
    x = _as_rows(input, width)
    w = None if weight is None else weight.contiguous()
    b = None if bias is None else bias.contiguous()
    config = _config(x, backward=False)
    flags = {"CENTER": center, "HAS_WEIGHT": w is not None, "HAS_BIAS": b is not None}
    with device_guard(input):
        if config.looped:
            norm_forward_looped_kernel[(rows,)](
                x, w, b, output, mean, rstd, width, x.stride(0), eps, weight_offset,
                **flags, BLOCK_N=config.block_n, **options(config.num_warps),
            )  # fmt: skip
        else:
            norm_forward_kernel[(ceil_div(rows, config.block_m),)](
                x, w, b, output, mean, rstd, rows, width, x.stride(0), eps, weight_offset,
                **flags, BLOCK_M=config.block_m, BLOCK_N=config.block_n, **options(config.num_warps),
            )  # fmt: skip
    return output, mean, rstd


def norm_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    dims: int,
    weight_offset: float,
    center: bool,
    needs: tuple[bool, bool, bool],
    bias_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of (input, weight, bias), each in its tensor's dtype; one that is not needed has shape (0,)."""
    need_dx, need_dw, need_db = needs
    device = input.device
    shape = input.shape[input.dim() - dims :]
    weight_dtype = input.dtype if weight is None else weight.dtype
    dx = torch.empty(input.shape if need_dx else (0,), dtype=input.dtype, device=device)
    dw = torch.empty(shape if need_dw else (0,), dtype=weight_dtype, device=device)
    db = torch.empty(shape if need_db else (0,), dtype=bias_dtype, device=device)
    if input.numel() == 0:
        return dx, dw.zero_(), db.zero_()
    rows = rstd.numel()
    width = input.numel() // rows
    dy, x = _as_rows(grad_output, width), _as_rows(input, width)
    w = None if weight is None else weight.contiguous()
    config = _config(x, backward=True)
    facts = device_facts(device)
    # The number of partial sums depends on the device and on the rows only while they are few.
    count = min(facts.multiprocessor_count * config.programs_per_multiprocessor, ceil_div(rows, config.block_m))
    if config.looped:
        blocks = ceil_div(width, config.block_n)
        count = min(max(1, ceil_div(count, blocks)), rows)
    dw_parts = torch.empty((count, width) if need_dw else (0,), dtype=torch.float32, device=device)
    db_parts = torch.empty((count, width) if need_db else (0,), dtype=torch.float32, device=device)
    launch = options(config.num_warps)
    with device_guard(input):
        if not config.looped:
            norm_backward_kernel[(count,)](
                dy, x, w, mean, rstd, dx, dw_parts, db_parts,
                rows, width, dy.stride(0), x.stride(0), weight_offset,
                CENTER=center, HAS_WEIGHT=w is not None, NEED_DX=need_dx, NEED_DW=need_dw, NEED_DB=need_db,
                BLOCK_M=config.block_m, BLOCK_N=config.block_n, **launch,
            )  # fmt: skip
        else:
            if need_dx:
                norm_backward_looped_kernel[(rows,)](
                    dy, x, w, mean, rstd, dx, width, dy.stride(0), x.stride(0), weight_offset,
                    CENTER=center, HAS_WEIGHT=w is not None, BLOCK_N=config.block_n, **launch,
                )  # fmt: skip
            if need_dw or need_db:
                norm_backward_columns_kernel[(count * blocks,)](
                    dy, x, mean, rstd, dw_parts, db_parts, rows, width, dy.stride(0), x.stride(0), count,
                    CENTER=center, NEED_DW=need_dw, NEED_DB=need_db, BLOCK_N=config.block_n, **launch,
                )  # fmt: skip
        for needed, parts, out in ((need_dw, dw_parts, dw), (need_db, db_parts, db)):
            if needed:
                block_n = min(64, max(16, next_power_of_2(width)))
                sum_partials_kernel[(ceil_div(width, block_n),)](
                    parts, out, count, width, BLOCK_M=32, BLOCK_N=block_n, **options(4)
                )  # fmt: skip
    return dx, dw, db
