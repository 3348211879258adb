"""Dropout inside a kernel. :func:`fusedops.runtime.dropout.keep_scale` is the same in plain torch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keep_scale(SEED, row, first_col, threshold, scale, BLOCK_N: tl.constexpr):
    """``scale`` where an element is kept and 0 where it is dropped, for rows ``row`` and columns from ``first_col``.

    Element (row, col) is kept if the upper 31 bits of word ``col % 4`` of Philox4x32-10 (Salmon et al. 2011,
    "Parallel Random Numbers: As Easy as 1, 2, 3") with key ``seed`` and counter (col // 4, row mod 2³², row >> 32, 0)
    are at least ``threshold`` = p·2³¹. So the mask depends on the seed and the position alone, not on tiles.

    Args:
        SEED: pointer to one int64.
        row: (BLOCK_M,) int64.
        first_col: a multiple of 4.

    Returns:
        (BLOCK_M, BLOCK_N) float32.
    """
    quad = (first_col // 4 + tl.arange(0, BLOCK_N // 4))[None, :].to(tl.int32)
    row = row.to(tl.int64)  # Triton's own interpreter counts loops in int32
    low = (row & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)[:, None]
    high = (row >> 32).to(tl.int32)[:, None]
    zero = tl.zeros_like(quad + low)
    word0, word1, word2, word3 = tl.philox(tl.load(SEED), quad + zero, low + zero, high + zero, zero)
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    words = tl.reshape(words, (zero.shape[0], BLOCK_N))
    return tl.where((words.to(tl.uint32, bitcast=True) >> 1).to(tl.int32) >= threshold, scale, 0.0)
