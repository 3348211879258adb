"""What follows the product of a linear layer: a device function for the kernels, and a kernel of its own.

The kernel serves products whose sums lie in memory: those of torch's own product, and those of several programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.kernels.dropout import keep_scale
from fusedops.linear.kernels_activations import device_functions
from fusedops.runtime.dropout import threshold_and_scale
from fusedops.runtime.launch import ceil_div, next_power_of_2, options


@triton.jit
def halves(tile):
    """The left and the right half of a tile's columns."""
    return tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def quarters(tile):
    """Four blocks of a tile's columns, from left to right."""
    left, right = halves(tile)
    first, second = halves(left)
    third, fourth = halves(right)
    return first, second, third, fourth


@triton.jit
def put(OUT, tile, at, mask, first_m, first_n):
    """Store a tile at its offsets, or, where first_m is given, at (first_m, first_n) of the descriptor OUT."""
    if first_m is None:
        tl.store(OUT + at, tile.to(OUT.dtype.element_ty), mask=mask)
    else:
        OUT.store([first_m, first_n.to(tl.int32)], tile.to(OUT.dtype))


@triton.jit
def finish(
    z,  # (rows, cols) float32
    B,  # (N,) or None
    R,  # (M, N), any strides, or None: the residual
    SEED,  # (1,) int64, or None without dropout
    Y,  # (M, N), contiguous, or None: only Z is wanted
    Z,  # (M, N), contiguous, or None: what the backward needs
    m,  # the tile's rows and its first column, int64
    first_n,
    M,
    N,
    stride_rm,
    stride_rn,
    threshold,
    scale,
    ACTIVATION: tl.constexpr,  # a function of kernels_activations.py, or None
    KEEP_OUTPUT: tl.constexpr,  # Z takes the activation's output, else its input
    first_m=None,  # given: Y and Z are tensor descriptors of blocks as large as z, and this is the tile's first row
):
    """Bias, activation, dropout, residual and stores of a tile whose product is z, rounded when it is stored."""
    n = first_n + tl.arange(0, z.shape[1])
    mask = (m < M)[:, None] & (n < N)[None, :]
    at = m[:, None] * N + n[None, :]
    if B is not None:
        z += tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if Z is not None and not KEEP_OUTPUT:
        put(Z, z, at, mask, first_m, first_n)
    if Y is not None or KEEP_OUTPUT:
        if ACTIVATION is not None:
            z = ACTIVATION(z)
        if Z is not None and KEEP_OUTPUT:
            put(Z, z, at, mask, first_m, first_n)
        if Y is not None:
            if SEED is not None:
                z *= keep_scale(SEED, m, first_n, threshold, scale, z.shape[1])
            if R is not None:
                r = tl.load(R + m[:, None] * stride_rm + n[None, :] * stride_rn, mask=mask, other=0.0)
                z += r.to(tl.float32)
            put(Y, z, at, mask, first_m, first_n)


@triton.jit
def epilogue_kernel(
    P,  # (splits, M, N), contiguous: sums of the product
    B,
    R,
    SEED,
    Y,
    Z,
    M,
    N,
    splits,
    stride_rm,
    stride_rn,
    threshold,
    scale,
    ACTIVATION: tl.constexpr,
    KEEP_OUTPUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """:func:`finish` of what the splits' sums add up to, in their order; a program owns one tile."""
    blocks_n = tl.cdiv(N, BLOCK_N)
    m = (tl.program_id(0) // blocks_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_n = (tl.program_id(0) % blocks_n).to(tl.int64) * BLOCK_N
    n = first_n + tl.arange(0, BLOCK_N)
    mask = (m < M)[:, None] & (n < N)[None, :]
    at = P + m[:, None] * N + n[None, :]
    step = tl.full((), 1, tl.int64) * M * N
    z = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(splits):
        z += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        at += step
    finish(
        z, B, R, SEED, Y, Z, m, first_n, M, N, stride_rm, stride_rn, threshold, scale, ACTIVATION, KEEP_OUTPUT
    )  # fmt: skip


@triton.jit
def sum_splits_kernel(
    P,  # (splits, rows, cols) float32, contiguous
    OUT,  # (rows, cols), any strides
    rows,
    cols,
    splits,
    stride_row,
    stride_col,
    ACCUMULATE: tl.constexpr,  # add to what OUT holds
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """What the splits' sums add up to, in their order; a program owns one tile."""
    blocks = tl.cdiv(cols, BLOCK_COLS)
    row = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    at = P + row[:, None] * cols + col[None, :]
    out_at = OUT + row[:, None] * stride_row + col[None, :] * stride_col
    step = tl.full((), 1, tl.int64) * rows * cols
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype=tl.float32)
    for _ in range(splits):
        total += tl.load(at, mask=mask, other=0.0)
        at += step
    if ACCUMULATE:
        total += tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_at, total.to(OUT.dtype.element_ty), mask=mask)


def _blocks(rows: int, cols: int) -> tuple[int, int, tuple[int]]:
    """(rows, columns) of an elementwise pass' tile, of 2048 elements or as few as there are, and the grid."""
    block_cols = min(256, max(16, next_power_of_2(cols)))
    block_rows = min(2048 // block_cols, next_power_of_2(rows))
    return block_rows, block_cols, (ceil_div(rows, block_rows) * ceil_div(cols, block_cols),)


def epilogue(
    sums: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    seed: torch.Tensor | None,
    output: torch.Tensor | None,
    saved: torch.Tensor | None,
    activation: str | None,
    dropout_p: float,
    keep_output: bool,
) -> None:
    """Write ``dropout(activation(Σ sums + bias)) + residual``, and what the backward needs.

    Args:
        sums: (splits, M, N), contiguous.
        bias: (N,), contiguous.
        residual: (M, N), any strides.
        output, saved: (M, N), contiguous, written; None: not wanted.
        keep_output: ``saved`` takes the activation's output, else its input.
    """
    splits, M, N = sums.shape
    block_m, block_n, grid = _blocks(M, N)
    epilogue_kernel[grid](
        sums, bias, residual, seed, output, saved, M, N, splits,
        *((0, 0) if residual is None else residual.stride()), *threshold_and_scale(dropout_p),
        ACTIVATION=device_functions(activation)[0], KEEP_OUTPUT=keep_output, BLOCK_M=block_m, BLOCK_N=block_n,
        **options(4),
    )  # fmt: skip


def sum_splits(sums: torch.Tensor, out: torch.Tensor, accumulate: bool = False) -> None:
    """Write, or add, the sum over ``splits`` of a contiguous (splits, rows, cols) to a matrix of any strides."""
    splits, rows, cols = sums.shape
    block_rows, block_cols, grid = _blocks(rows, cols)
    sum_splits_kernel[grid](
        sums, out, rows, cols, splits, *out.stride(), ACCUMULATE=accumulate,
        BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, **options(4),
    )  # fmt: skip
