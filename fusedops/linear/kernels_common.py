"""What the linear family's kernels share: device functions, and helpers of the launchers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.autotune.resolve import resolve
from fusedops.linear.tuning import LINEAR, LinearConfig, LinearProblem, Product
from fusedops.runtime.launch import DTYPE_NAMES, ceil_div
from fusedops.runtime.precision import float32_precision


@triton.jit
def tile_of(program, rows, cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, GROUP: tl.constexpr):
    """(block row, block column) of the result tile that a program owns.

    Programs that run at the same time cover a patch of GROUP block rows, column by column, so that the operands'
    tiles they read are shared in the cache.
    """
    block_rows = tl.cdiv(rows, BLOCK_ROWS)
    block_cols = tl.cdiv(cols, BLOCK_COLS)
    patch = program // (GROUP * block_cols)
    first = patch * GROUP
    height = tl.minimum(block_rows - first, GROUP)
    inside = program % (GROUP * block_cols)
    return first + inside % height, inside // height


@triton.jit
def share_of(
    program,
    rows,
    cols,
    depth,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """(tile, split, first, end): which tile a program works on, and from where to where it sums the depth.

    The SPLITS programs of a tile have equal shares of whole blocks; the last ones of a short depth may have nothing.
    """
    if SPLITS == 1:
        tile = program
        split = 0
        first = 0
        end = depth
    else:
        tiles = tl.cdiv(rows, BLOCK_ROWS) * tl.cdiv(cols, BLOCK_COLS)
        tile = program % tiles
        split = program // tiles
        share = tl.cdiv(tl.cdiv(depth, BLOCK_DEPTH), SPLITS) * BLOCK_DEPTH
        first = tl.minimum(split * share, depth)
        end = tl.minimum(first + share, depth)
    return tile, split, first, end


@triton.jit
def load_block(at, in_rows, in_cols, EVEN_ROWS: tl.constexpr, EVEN_COLS: tl.constexpr):
    """A block, zero outside; the EVEN_ dimensions need no mask."""
    if EVEN_ROWS and EVEN_COLS:
        block = tl.load(at)
    elif EVEN_ROWS:
        block = tl.load(at, mask=in_cols, other=0.0)
    elif EVEN_COLS:
        block = tl.load(at, mask=in_rows, other=0.0)
    else:
        block = tl.load(at, mask=in_rows & in_cols, other=0.0)
    return block


@triton.jit
def multiply(
    total,  # (rows, cols) float32: what is added to
    A,  # (R, D), any strides
    B,  # (D, C), any strides
    row,  # int64 indices of the tile's rows
    col,
    R,
    C,
    first,
    end,
    stride_ar,
    stride_ad,
    stride_bd,
    stride_bc,
    A_ROW_MAJOR: tl.constexpr,  # the elements of a row of A are neighbours in memory
    B_COL_MAJOR: tl.constexpr,  # those of a column of B
    EVEN: tl.constexpr,  # BLOCK divides end - first
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """total + A[row, first:end] B[first:end, col], of which what is outside of the matrices means nothing."""
    d = first + tl.arange(0, BLOCK).to(tl.int64)
    in_r = (row < R)[:, None]
    in_c = (col < C)[None, :]
    # Rows past the end are the last one again, without a mask in the loop. Not where the compiler would lose sight of
    # elements being neighbours.
    if A_ROW_MAJOR:
        row = tl.minimum(row, R - 1)
    if B_COL_MAJOR:
        col = tl.minimum(col, C - 1)
    a_at = A + row[:, None] * stride_ar + d[None, :] * stride_ad
    b_at = B + d[:, None] * stride_bd + col[None, :] * stride_bc
    a_step = tl.full((), BLOCK, tl.int64) * stride_ad
    b_step = tl.full((), BLOCK, tl.int64) * stride_bd
    for at in range(first, end, BLOCK):
        in_d = at + tl.arange(0, BLOCK) < end
        a = load_block(a_at, in_r, in_d[None, :], A_ROW_MAJOR, EVEN)
        b = load_block(b_at, in_d[:, None], in_c, EVEN, B_COL_MAJOR)
        total = tl.dot(a.to(b.dtype), b, total, input_precision=PRECISION)
        a_at += a_step
        b_at += b_step
    return total


def aligned(matrix: torch.Tensor) -> bool:
    """Whether Triton can read a matrix in vectors: it specialises a launch on pointers and integers divisible by 16.

    Of several matrices, (..., rows, cols), each.
    """
    *apart, row_stride, col_stride = matrix.stride()
    if matrix.data_ptr() % 16 or (apart and any(stride % 16 for stride in apart)):
        return False
    *_, rows, cols = matrix.shape
    return (col_stride == 1 and not (row_stride % 16 or cols % 16)) or (
        row_stride == 1 and not (col_stride % 16 or rows % 16)
    )


def torch_multiplies(operand: torch.Tensor, result_dtype: torch.dtype, precision: str) -> bool:
    """Whether torch's own product gives the result that was asked for: its dtype, and float32 as precise as asked."""
    return result_dtype == operand.dtype and precision == float32_precision(operand)


def config_for(
    product: Product,
    sizes: tuple[int, int, int],
    operands: tuple[torch.Tensor | None, ...],
    activation: str | None,
    precision: str,
    result_dtype: torch.dtype,
    **more: bool | int,
) -> LinearConfig:
    """The configuration of a product whose result is (rows, cols), summed over depth.

    Args:
        product: which of the three.
        sizes: (rows, cols, depth).
        operands: the matrices that are read; the first decides the dtype and the device.
        result_dtype: of the result.
        more: what else the problem has that is not as usual, by the names of :class:`LinearProblem`.
    """
    first, last = operands[0], operands[-1]
    assert first is not None
    assert last is not None
    problem = LinearProblem.of(
        product,
        *sizes,
        dtype=DTYPE_NAMES[first.dtype],
        out_dtype=DTYPE_NAMES[result_dtype],
        layout=("r" if first.stride(1) == 1 else "c") + ("r" if last.stride(1) == 1 else "c"),
        activation=activation,
        precision=precision,
        aligned=all(matrix is None or aligned(matrix) for matrix in operands),
        torch_serves=torch_multiplies(first, result_dtype, precision),
        **more,  # type: ignore[arg-type]
    )
    return resolve(LINEAR, problem, first.device)


def tiles(config: LinearConfig, rows: int, cols: int) -> tuple[int]:
    """The grid: a program for each tile of the result and each of its splits."""
    return (ceil_div(rows, config.rows) * ceil_div(cols, config.cols) * config.splits,)


def partial_sums(config: LinearConfig, rows: int, cols: int, like: torch.Tensor) -> torch.Tensor | None:
    """Where the splits of a product leave their sums: (splits, rows, cols) float32; None where it has but one."""
    if config.splits == 1:
        return None
    return like.new_empty((config.splits, rows, cols), dtype=torch.float32)
