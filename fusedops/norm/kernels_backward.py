"""Triton kernels of the norms' backward, and their launcher.

With ``x̂ = (x - mean) rstd`` and ``g = dy (weight + offset)``, the gradient of what was normalised is
``rstd (g - x̂ c₁ - c₂)``, ``c₁ = mean(g x̂)`` and ``c₂ = mean(g)``; RMS norm has no c₂, and L2 norm a sum for the mean.
x and dy are read once where a program can hold a row; wider rows are read twice, first for c₁ and c₂.

The sums over rows, dweight = Σ dy x̂ and dbias = Σ dy, are made by a fixed number of programs that share the rows, each
with a float32 partial sum; a second kernel adds the partials in a fixed order: the same to the bit on every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.autotune.resolve import resolve
from fusedops.kernels.dropout import keep_scale
from fusedops.norm.kernels_forward import row_offset
from fusedops.norm.kernels_sums import accumulate, sum_partials
from fusedops.norm.rows import as_rows
from fusedops.norm.tuning import NORM, NormProblem
from fusedops.runtime.device import device_facts, device_guard
from fusedops.runtime.dropout import threshold_and_scale
from fusedops.runtime.launch import ceil_div, options


@triton.jit
def _scaled(W, cols, mask, weight_offset):
    """weight + offset in float32, (1, cols); 1 without a weight."""
    w = 1.0
    if W is not None:
        w = tl.load(W + cols[None, :], mask=mask[None, :], other=0.0).to(tl.float32) + weight_offset
    return w


@triton.jit
def _normalised(
    x, B, MEAN, row, row_mask, cols, col_mask, w, rstd, KIND: tl.constexpr, FROM_OUTPUT: tl.constexpr
):  # fmt: skip
    """x̂ of a tile, 0 outside it. ``FROM_OUTPUT``: x holds y, and ``x̂ = (y - bias) / (weight + offset)``."""
    x = x.to(tl.float32)
    if FROM_OUTPUT:
        if B is not None:
            x = x - tl.load(B + cols[None, :], mask=col_mask[None, :], other=0.0).to(tl.float32)
        xhat = x / w
    else:
        if KIND == "layer":
            x = x - tl.load(MEAN + row, mask=row_mask, other=0.0)[:, None]
        xhat = x * rstd[:, None]
    return tl.where(row_mask[:, None] & col_mask[None, :], xhat, 0.0)


@triton.jit
def _c1(sum_gx, rstd, width, eps, KIND: tl.constexpr):
    """c₁ from Σ g x̂. Where L2 norm divided by eps instead of the norm, the norm has no gradient."""
    if KIND == "l2":
        c1 = tl.where(rstd * eps < 0.999999, sum_gx, 0.0)  # rstd is 1 / eps up to rounding there
    else:
        c1 = sum_gx / width
    return c1


@triton.jit
def _leave(
    grad, GRAD_RESIDUAL, DX, DRESIDUAL, SEED, residual_at, row, first, width, mask, threshold, scale,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the gradient that arrives at residual_out; store what belongs to the residual and to the input."""
    at = row[:, None] * width + first + tl.arange(0, BLOCK_N)[None, :]
    if GRAD_RESIDUAL is not None:
        grad += tl.load(GRAD_RESIDUAL + residual_at, mask=mask, other=0.0).to(tl.float32)
    if DRESIDUAL is not None:
        tl.store(DRESIDUAL + at, grad.to(DRESIDUAL.dtype.element_ty), mask=mask)
    if DX is not None:
        if SEED is not None:
            grad = grad * keep_scale(SEED, row, first, threshold, scale, BLOCK_N)
        tl.store(DX + at, grad.to(DX.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "size_b", "size_c"])  # a new row count must not compile again
def norm_backward_kernel(
    DY,  # (rows, width)
    GRAD_RESIDUAL,  # (rows, width): gradient of residual_out, or None
    SAVED,  # (rows, width): what was normalised, or the output; None if only the bias wants a gradient
    W,  # (width,) or None
    B,  # (width,) or None; read if SAVED holds the output
    MEAN,  # (rows,) float32
    RSTD,  # (rows,) float32
    SEED,  # (1,) int64, or None without dropout
    DX,  # (rows, width), contiguous; None: not wanted
    DRESIDUAL,  # (rows, width), contiguous; None: not wanted
    DW,  # (programs, width) float32 partial sums; None: not wanted
    DB,  # (programs, width) float32 partial sums; None: not wanted
    rows,
    width,
    size_b,
    size_c,
    dy_strides,
    residual_strides,
    saved_strides,
    eps,
    weight_offset,
    threshold,
    scale,
    KIND: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
    SPLIT: tl.constexpr,
    UNIT: tl.constexpr,  # width and strides are counted in it
    COMPENSATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program i owns rows i·BLOCK_M …, (i + programs)·BLOCK_M …, and partial sum i; rows fit in BLOCK_N columns."""
    width = width * UNIT
    program = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK_M
    cols = tl.arange(0, BLOCK_N)
    col_mask = cols < width
    w = _scaled(W, cols, col_mask, weight_offset)
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    dw_low, db, db_low = dw, dw, dw
    for top in tl.range(program * BLOCK_M, rows, step, num_stages=STAGES):
        row = top + tl.arange(0, BLOCK_M)
        row_mask = row < rows
        mask = row_mask[:, None] & col_mask[None, :]
        dy_at = row_offset(row, size_b, size_c, dy_strides, SPLIT, UNIT)[:, None] + cols[None, :]
        dy = tl.load(DY + dy_at, mask=mask, other=0.0).to(tl.float32)
        if SAVED is not None:
            at = row_offset(row, size_b, size_c, saved_strides, SPLIT, UNIT)[:, None] + cols[None, :]
            saved = tl.load(SAVED + at, mask=mask, other=0.0)
            rstd = tl.load(RSTD + row, mask=row_mask, other=0.0)
            xhat = _normalised(saved, B, MEAN, row, row_mask, cols, col_mask, w, rstd, KIND, FROM_OUTPUT)
        if DX is not None or DRESIDUAL is not None:
            g = dy * w
            grad = g - xhat * _c1(tl.sum(g * xhat, axis=1), rstd, width, eps, KIND)[:, None]
            if KIND == "layer":
                grad = grad - (tl.sum(g, axis=1) / width)[:, None]
            residual_at = row_offset(row, size_b, size_c, residual_strides, SPLIT, UNIT)[:, None] + cols[None, :]
            _leave(
                grad * rstd[:, None], GRAD_RESIDUAL, DX, DRESIDUAL, SEED, residual_at, row, 0, width, mask,
                threshold, scale, BLOCK_N,
            )  # fmt: skip
        if DW is not None:
            dw, dw_low = accumulate(dw, dw_low, dy * xhat, COMPENSATED)
        if DB is not None:
            db, db_low = accumulate(db, db_low, dy, COMPENSATED)
    if DW is not None:
        tl.store(DW + program * width + cols, tl.sum(dw, axis=0) - tl.sum(dw_low, axis=0), mask=col_mask)
    if DB is not None:
        tl.store(DB + program * width + cols, tl.sum(db, axis=0) - tl.sum(db_low, axis=0), mask=col_mask)


@triton.jit(do_not_specialize=["size_b", "size_c"])
def norm_backward_means_kernel(
    DY,
    SAVED,
    W,
    B,
    MEAN,
    RSTD,
    C1,  # (rows,) float32
    C2,  # (rows,) float32; written for layer norm
    width,
    size_b,
    size_c,
    dy_strides,
    saved_strides,
    eps,
    weight_offset,
    KIND: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
    SPLIT: tl.constexpr,
    UNIT: tl.constexpr,  # width and strides are counted in it
    BLOCK_N: tl.constexpr,
):
    """c₁ and c₂ of wide rows: program i owns row i, walked in blocks."""
    width = width * UNIT
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    row_mask = row >= 0
    dy_row = DY + row_offset(row, size_b, size_c, dy_strides, SPLIT, UNIT)[:, None]
    saved_row = row_offset(row, size_b, size_c, saved_strides, SPLIT, UNIT)[:, None]
    rstd = tl.load(RSTD + row)
    sum_gx = tl.zeros((1,), dtype=tl.float32)
    sum_g = tl.zeros((1,), dtype=tl.float32)
    for first in range(0, width, BLOCK_N):
        cols = first + tl.arange(0, BLOCK_N)
        col_mask = cols < width
        w = _scaled(W, cols, col_mask, weight_offset)
        g = tl.load(dy_row + cols[None, :], mask=col_mask[None, :], other=0.0).to(tl.float32) * w
        saved = tl.load(SAVED + saved_row + cols[None, :], mask=col_mask[None, :], other=0.0)
        xhat = _normalised(saved, B, MEAN, row, row_mask, cols, col_mask, w, rstd, KIND, FROM_OUTPUT)
        sum_gx += tl.sum(g * xhat, axis=1)
        if KIND == "layer":
            sum_g += tl.sum(g, axis=1)
    tl.store(C1 + row, _c1(sum_gx, rstd, width, eps, KIND))
    if KIND == "layer":
        tl.store(C2 + row, sum_g / width)


@triton.jit(do_not_specialize=["rows", "size_b", "size_c"])  # a new row count must not compile again
def norm_backward_columns_kernel(
    DY,
    GRAD_RESIDUAL,
    SAVED,
    W,
    B,
    MEAN,
    RSTD,
    SEED,
    C1,
    C2,
    DX,
    DRESIDUAL,
    DW,  # (splits, width) float32 partial sums; None: not wanted
    DB,  # (splits, width) float32 partial sums; None: not wanted
    rows,
    width,
    size_b,
    size_c,
    dy_strides,
    residual_strides,
    saved_strides,
    weight_offset,
    threshold,
    scale,
    KIND: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
    SPLIT: tl.constexpr,
    UNIT: tl.constexpr,  # width and strides are counted in it
    COMPENSATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The rest for wide rows: program (block, split) owns BLOCK_N columns of its share of the rows, and a partial sum.

    Rows are taken from the last to the first: those that the kernel before has read last may still be in the cache.
    """
    width = width * UNIT
    splits = tl.num_programs(0) // tl.cdiv(width, BLOCK_N)
    split = (tl.program_id(0) % splits).to(tl.int64)
    first = tl.program_id(0) // splits * BLOCK_N
    cols = first + tl.arange(0, BLOCK_N)
    col_mask = cols < width
    w = _scaled(W, cols, col_mask, weight_offset)
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    dw_low, db, db_low = dw, dw, dw
    step = splits.to(tl.int64) * BLOCK_M
    for below in range(split * BLOCK_M, rows, step):
        row = rows - 1 - below - tl.arange(0, BLOCK_M)
        row_mask = row >= 0
        mask = row_mask[:, None] & col_mask[None, :]
        dy_at = row_offset(row, size_b, size_c, dy_strides, SPLIT, UNIT)[:, None] + cols[None, :]
        dy = tl.load(DY + dy_at, mask=mask, other=0.0).to(tl.float32)
        if SAVED is not None:
            at = row_offset(row, size_b, size_c, saved_strides, SPLIT, UNIT)[:, None] + cols[None, :]
            saved = tl.load(SAVED + at, mask=mask, other=0.0)
            rstd = tl.load(RSTD + row, mask=row_mask, other=0.0)
            xhat = _normalised(saved, B, MEAN, row, row_mask, cols, col_mask, w, rstd, KIND, FROM_OUTPUT)
        if DX is not None or DRESIDUAL is not None:
            grad = dy * w - xhat * tl.load(C1 + row, mask=row_mask, other=0.0)[:, None]
            if KIND == "layer":
                grad = grad - tl.load(C2 + row, mask=row_mask, other=0.0)[:, None]
            residual_at = row_offset(row, size_b, size_c, residual_strides, SPLIT, UNIT)[:, None] + cols[None, :]
            _leave(
                grad * rstd[:, None], GRAD_RESIDUAL, DX, DRESIDUAL, SEED, residual_at, row, first, width, mask,
                threshold, scale, BLOCK_N,
            )  # fmt: skip
        if DW is not None:
            dw, dw_low = accumulate(dw, dw_low, dy * xhat, COMPENSATED)
        if DB is not None:
            db, db_low = accumulate(db, db_low, dy, COMPENSATED)
    if DW is not None:
        tl.store(DW + split * width + cols, tl.sum(dw, axis=0) - tl.sum(dw_low, axis=0), mask=col_mask)
    if DB is not None:
        tl.store(DB + split * width + cols, tl.sum(db, axis=0) - tl.sum(db_low, axis=0), mask=col_mask)


def norm_backward(
    grad_output: torch.Tensor,
    grad_residual: torch.Tensor | None,
    saved: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    seed: torch.Tensor | None,
    dims: int,
    eps: float,
    weight_offset: float,
    kind: str,
    dropout_p: float,
    from_output: bool,
    needs: tuple[bool, ...],
    dtypes: tuple[torch.dtype, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate and launch; arguments and results as :func:`fusedops.norm.reference.norm_backward`."""
    device = grad_output.device
    shape = grad_output.shape
    inner = shape[len(shape) - dims :]
    grads = tuple(
        [
            grad_output.new_empty(size if need else (0,), dtype=dtype)
            for size, need, dtype in zip((shape, shape, inner, inner), needs, dtypes, strict=True)
        ]
    )
    if grad_output.numel() == 0:
        for grad in grads[2:]:
            grad.zero_()
        return grads  # type: ignore[return-value]
    dx, dresidual, dw, db = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    view = as_rows((grad_output, grad_residual, saved), dims)
    (dy, dr, x), (unit, units, (dy_strides, dr_strides, x_strides)) = view.tensors, view.counted()
    rows, width = view.rows, view.width
    w = None if weight is None else weight.contiguous()
    b = bias.contiguous() if bias is not None and from_output else None
    sums = needs[2] + needs[3]
    itemsize = max(t.element_size() for t in (dy, dr, x) if t is not None)
    problem = NormProblem.of(
        width, itemsize, "backward", seed is not None, sums, rows, kind, grad_output.dtype,
        w is not None, b is not None, dr is not None, from_output,
    )  # fmt: skip
    config = resolve(NORM, problem, device)
    count = blocks = ceil_div(width, config.block_n)
    if sums:
        # The number of partial sums depends on the device, and on the rows only while they are few.
        programs = device_facts(device).multiprocessor_count * config.programs_per_multiprocessor // config.num_ctas
        count = max(1, min(programs // blocks, ceil_div(rows, config.block_m)))
    else:
        count = ceil_div(rows, config.block_m)
    partials = [
        None if grad is None else grad_output.new_empty((count, width), dtype=torch.float32) for grad in (dw, db)
    ]
    threshold, scale = threshold_and_scale(dropout_p)
    flags = {"KIND": kind, "FROM_OUTPUT": from_output, "SPLIT": view.split, "UNIT": unit}
    tile = {"COMPENSATED": config.compensated, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    launch = options(config.num_warps, num_ctas=config.num_ctas)
    with device_guard(grad_output):
        if not config.looped:
            norm_backward_kernel[(count,)](
                dy, dr, x, w, b, mean, rstd, seed, dx, dresidual, *partials, rows, units, *view.sizes,
                dy_strides, dr_strides, x_strides, eps, weight_offset, threshold, scale,
                **flags, **tile, STAGES=config.num_stages, **launch,
            )  # fmt: skip
        else:
            c1 = c2 = None
            if dx is not None or dresidual is not None:
                c1, c2 = torch.empty((2, rows), dtype=torch.float32, device=device).unbind()
                norm_backward_means_kernel[(rows,)](
                    dy, x, w, b, mean, rstd, c1, c2, units, *view.sizes, dy_strides, x_strides, eps, weight_offset,
                    **flags, BLOCK_N=config.block_m * config.block_n, **launch,
                )  # fmt: skip
            norm_backward_columns_kernel[(count * blocks,)](
                dy, dr, x, w, b, mean, rstd, seed, c1, c2, dx, dresidual, *partials, rows, units, *view.sizes,
                dy_strides, dr_strides, x_strides, weight_offset, threshold, scale,
                **flags, **tile, **launch,
            )  # fmt: skip
        pairs = [(parts, out) for parts, out in zip(partials, (dw, db), strict=True) if parts is not None]
        if pairs:
            sum_partials(pairs)  # type: ignore[arg-type]
    return grads  # type: ignore[return-value]
