"""A kernel that does next to nothing: what ``device_parts.py launches`` times the launch of."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_kernel(
    X,  # (n,), contiguous
    Y,  # (n,), contiguous
    OUT,  # (n,), contiguous
    n,
    BLOCK: tl.constexpr,
):
    """OUT = X + Y: each program owns BLOCK elements."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + i, tl.load(X + i, mask=i < n) + tl.load(Y + i, mask=i < n), mask=i < n)
