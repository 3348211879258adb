"""Layer and RMS norm's forward as textbooks write it in Triton: what the norm family's kernel is compared with.

A program a row, which it holds whole: one load, the statistics, one store. It takes rows that are contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl


@triton.jit
def textbook_norm_kernel(
    X,  # (rows, width), contiguous
    WEIGHT,  # (width,) or None
    BIAS,  # (width,) or None
    Y,  # (rows, width), contiguous
    width,
    eps,
    RMS: tl.constexpr,
    BLOCK: tl.constexpr,  # at least width
):
    """y = (x - mean) / sqrt(var + eps) · weight + bias; RMS: without the mean. Each program owns one row."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(X + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if not RMS:
        x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    y = x / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    if WEIGHT is not None:
        y *= tl.load(WEIGHT + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS is not None:
        y += tl.load(BIAS + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + row * width + at, y.to(Y.dtype.element_ty), mask=inside)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    rms: bool,
    options: Mapping[str, int | bool],
    eps: float = 1e-5,
) -> torch.Tensor:
    """The norm of each row.

    Args:
        x: (rows, width), contiguous.
        weight, bias: (width,) or None.
        rms: RMS norm instead of layer norm.
        options: of the launch: warps.
    """
    rows, width = x.shape
    y = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    textbook_norm_kernel[(rows,)](x, weight, bias, y, width, eps, RMS=rms, BLOCK=block, **options)
    return y
