"""Sums over rows: what the norms' backward kernels add up in, and the kernel that adds their partial sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.runtime.launch import ceil_div, next_power_of_2, options


@triton.jit
def accumulate(total, low, term, COMPENSATED: tl.constexpr):
    """total + term, and by how much the totals so far are too large (Kahan 1965, doi 10.1145/363707.363723)."""
    if COMPENSATED:
        term = term - low
        new = total + term
        low = (new - total) - term
    else:
        new = total + term
    return new, low


@triton.jit(do_not_specialize=["count"])
def sum_partials_kernel(
    FIRST,  # (count, width) float32
    SECOND,  # (count, width) float32, or None
    FIRST_OUT,  # (width,)
    SECOND_OUT,  # (width,), or None
    count,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The second stage: each OUT is its partial sums' Σ over rows, in a fixed order. Programs own BLOCK_N columns."""
    blocks = tl.cdiv(width, BLOCK_N)
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < width
    is_first = tl.program_id(0) < blocks
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    low = total
    for top in range(0, count, BLOCK_M):
        row = top + tl.arange(0, BLOCK_M)
        at = row[:, None].to(tl.int64) * width + cols[None, :]
        tile = (row < count)[:, None] & mask[None, :]
        if SECOND is None:
            term = tl.load(FIRST + at, mask=tile, other=0.0)
        else:
            term = tl.load(tl.where(is_first, FIRST, SECOND) + at, mask=tile, other=0.0)
        total, low = accumulate(total, low, term, True)
    summed = tl.sum(total, axis=0) - tl.sum(low, axis=0)
    if is_first:
        tl.store(FIRST_OUT + cols, summed.to(FIRST_OUT.dtype.element_ty), mask=mask)
    if SECOND is not None:  # noqa: SIM102 (decided when compiling)
        if not is_first:
            tl.store(SECOND_OUT + cols, summed.to(SECOND_OUT.dtype.element_ty), mask=mask)


def sum_partials(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Sum each (count, width) float32 tensor over its rows into the (width,) tensor beside it, of any dtype.

    Args:
        pairs: one or two, of the same count and width.
    """
    count, width = pairs[0][0].shape
    (first, first_out), (second, second_out) = (*pairs, (None, None))[:2]
    block_n = min(64, max(16, next_power_of_2(width)))
    sum_partials_kernel[(ceil_div(width, block_n) * len(pairs),)](
        first, second, first_out, second_out, count, width, BLOCK_M=32, BLOCK_N=block_n, **options(4)
    )  # fmt: skip
