"""Device functions that the attention kernels share: tiles of a head, scores, probabilities.

A tensor travels as a pointer and a tuple of its strides (batch, head, row); its last dimension has stride 1. Row, head
and batch offsets are int64: their products with a stride may pass 2³¹. Tiles are padded with zeros to powers of two.

Scores are kept in base 2, ``s = log₂e · scale · q·k``, so that the softmax needs one exp2 and no further product.
With a float mask they are ``s = scale · q·k + mask`` in base e: masks hold values like the most negative float32,
which times log₂e is −inf.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def head_of(X, batch, head, strides):
    """Address of row 0 of one head."""
    return X + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]


@triton.jit
def load_rows(
    X,  # a head: (count, SIZE)
    first,
    count,
    stride,
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Rows first … first + BLOCK_ROWS; zero past column SIZE and, where RAGGED, past row ``count``."""
    rows = first + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_SIZE)
    at = X + rows[:, None].to(tl.int64) * stride + columns[None, :]
    if RAGGED:
        if SIZE < BLOCK_SIZE:
            tile = tl.load(at, mask=(rows < count)[:, None] & (columns < SIZE)[None, :], other=0.0)
        else:
            tile = tl.load(at, mask=(rows < count)[:, None], other=0.0)
    else:
        if SIZE < BLOCK_SIZE:
            tile = tl.load(at, mask=(columns < SIZE)[None, :], other=0.0)
        else:
            tile = tl.load(at)
    return tile


@triton.jit
def store_rows(
    X, tile, first, count, stride, SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """What :func:`load_rows` is for a load, rounded to the dtype of X."""
    rows = first + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_SIZE)
    at = X + rows[:, None].to(tl.int64) * stride + columns[None, :]
    tl.store(at, tile.to(X.dtype.element_ty), mask=(rows < count)[:, None] & (columns < SIZE)[None, :])


@triton.jit
def scores(
    qk,  # q·k of queries i (a column, or a row where the tile is transposed) and keys j
    MASK,  # the head's mask: (seqlen_q, seqlen_k)
    mask_strides,  # (batch, head, query, key)
    i,
    j,
    seqlen_q,
    seqlen_k,
    shift,
    scale,
    MASK_KIND: tl.constexpr,
    MASK_PER_QUERY: tl.constexpr,
    CAUSAL: tl.constexpr,
    EDGE: tl.constexpr,
):
    """s, −inf where query i does not see key j.

    EDGE: the tile may reach over the last key or, where CAUSAL, over the diagonal j = i + shift.
    """
    s = qk * scale
    if MASK_KIND != "none":
        at = MASK + j.to(tl.int64) * mask_strides[3]
        inside = j < seqlen_k
        if MASK_PER_QUERY:
            at = at + i.to(tl.int64) * mask_strides[2]
            inside = inside & (i < seqlen_q)
        if MASK_KIND == "bool":
            s = tl.where(tl.load(at, mask=inside, other=0) != 0, s, float("-inf"))
        else:
            s = s + tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if EDGE:
        seen = j < seqlen_k
        if CAUSAL:
            seen = seen & (j <= i + shift)
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def exponential(x, MASK_KIND: tl.constexpr):
    """eˣ, or 2ˣ where scores are in base 2."""
    if MASK_KIND == "float":
        power = tl.exp(x)
    else:
        power = tl.exp2(x)
    return power


@triton.jit
def softmax_of_row(TOP, TOTAL, rows, seqlen_q, MASK_KIND: tl.constexpr, EXACT: tl.constexpr):
    """(top, weight) of each row, so that its probabilities are ``exponential(s - top) · weight``.

    TOP and TOTAL are the forward's: the row's maximum and its Σ exponential(s - maximum). A row that sees no key, and
    one past the end, gets top = inf: its probabilities are zero.

    Where not EXACT, the total goes into top and the weight is one. That rounds top, whose error is then the relative
    error of all probabilities: nothing beside what 16-bit operands cost, but too much for float32, and for a float
    mask, which may put every score of a row at -3e38.
    """
    inside = rows < seqlen_q
    top = tl.load(TOP + rows, mask=inside, other=float("-inf"))
    total = tl.load(TOTAL + rows, mask=inside, other=1.0)
    total = tl.where(top == float("-inf"), 1.0, total)
    weight = 1.0 / total
    if not EXACT:
        top += tl.log2(total)
    return tl.where(top == float("-inf"), float("inf"), top), weight


@triton.jit
def probabilities(s, top, weight, MASK_KIND: tl.constexpr, EXACT: tl.constexpr):
    """P = softmax(s) of a tile; ``top`` and ``weight`` of its rows, broadcast as the tile lies."""
    p = exponential(s - top, MASK_KIND)
    if EXACT:
        p = p * weight
    return p


@triton.jit
def keys_of_queries(first, seqlen_k, shift, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(whole, end): queries first … first + BLOCK_M all see the keys before ``whole``, none sees one from ``end`` on.

    ``whole`` is a multiple of BLOCK_N. Tiles between the two need a mask.
    """
    whole = seqlen_k // BLOCK_N * BLOCK_N
    end = seqlen_k
    if CAUSAL:
        whole = tl.minimum(whole, tl.maximum(first + shift + 1, 0) // BLOCK_N * BLOCK_N)
        end = tl.minimum(end, tl.maximum(first + BLOCK_M + shift, 0))
    return whole, end
