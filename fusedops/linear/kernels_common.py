"""What the linear family's forward and backward kernels share: device functions, and helpers of the launchers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.autotune.resolve import resolve
from fusedops.linear.tuning import LinearConfig, LinearProblem, Product, default_config
from fusedops.runtime.launch import ceil_div


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


def aligned(matrix: torch.Tensor) -> bool:
    """Whether Triton can read a matrix in vectors: it specialises a launch on pointers and integers divisible by 16."""
    if matrix.data_ptr() % 16:
        return False
    (rows, cols), (row_stride, col_stride) = matrix.shape, matrix.stride()
    return (col_stride == 1 and not (row_stride % 16 or cols % 16)) or (
        row_stride == 1 and not (col_stride % 16 or rows % 16)
    )


def config_for(
    product: Product,
    sizes: tuple[int, int, int],
    operands: tuple[torch.Tensor | None, ...],
    activation: str | None,
    allow_tf32: bool,
) -> LinearConfig:
    """The configuration of a product whose result is (rows, cols), summed over depth.

    Args:
        product: which of the three.
        sizes: (rows, cols, depth).
        operands: the matrices that are read; the first decides the dtype and the device.
    """
    first = operands[0]
    assert first is not None
    problem = LinearProblem.of(
        product,
        *sizes,
        itemsize=first.element_size(),
        activation=activation,
        tf32=allow_tf32,
        aligned=all(matrix is None or aligned(matrix) for matrix in operands),
    )
    return resolve(problem, first.device, default_config)


def tiles(config: LinearConfig, rows: int, cols: int) -> tuple[int]:
    """The grid: a program for each tile of the result."""
    return (ceil_div(rows, config.rows) * ceil_div(cols, config.cols),)
