"""Device functions that the attention kernels share: tiles of a head, scores, probabilities.

A tensor travels as a pointer and a tuple of its strides (batch, head, row); its last dimension has stride 1. Row, head
and batch offsets are int64: their products with a stride may pass 2³¹. Tiles are padded with zeros to powers of two.

Scores are kept in base 2, ``s = log₂e · scale · q·k``, so that the softmax needs one exp2 and no further product.
Where NATURAL they are in base e: a float mask holds values like the most negative float32, which times log₂e is −inf,
and a score_mod is written for scores as they are.

``terms`` is an operands.Terms, ``dropout`` an operands.Dropout, ``lists`` an operands.Lists: a member that is None, or
the whole being None, is decided when a kernel is compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusedops.kernels.dropout import keep_scale


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
def load_tile(
    X,  # a head: (count, SIZE); where DESCRIBED, the descriptor of (batch, heads, count, SIZE)
    place,  # (batch, head)
    first,
    count,
    stride,
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RAGGED: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """As :func:`load_rows`; a descriptor ends at each head's own last row, beyond which it gives zeros."""
    if DESCRIBED:
        batch, head = place
        tile = X.load([batch, head, first, 0]).reshape(BLOCK_ROWS, BLOCK_SIZE)
    else:
        tile = load_rows(X, first, count, stride, SIZE, BLOCK_ROWS, BLOCK_SIZE, RAGGED)
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
def bounds_of(starts, sequence, count, total):
    """(begin, length) of a packed sequence; number ``count`` is what lies past the last one.

    Whatever the numbers in ``starts``, the sequence lies inside the tensor.
    """
    begin = tl.load(starts + sequence, mask=sequence > 0, other=0)
    end = tl.load(starts + sequence + 1, mask=sequence < count, other=total)
    begin = tl.minimum(tl.maximum(begin, 0), total).to(tl.int32)
    end = tl.minimum(end, total).to(tl.int32)
    return begin, tl.maximum(end - begin, 0)


@triton.jit
def tile_of(program, programs, starts, count, heads, total, section, REVERSED: tl.constexpr, BLOCK: tl.constexpr):
    """(batch, sequence, head, first, begin, length): which BLOCK rows of a head a program owns.

    Dense tensors (``starts`` is None): all tiles of a head come one after the other, so that the programs that run at
    a time read the same keys and values. With ``section`` > 1 that many heads take turns, a tile of each: where tiles
    differ in length, the longest of all of them then come first.

    Packed sequences: sequence s has the tiles from ``starts[s] // BLOCK + s`` on, which is room enough for each, since
    ⌊b / BLOCK⌋ - ⌊a / BLOCK⌋ + 1 ≥ ⌈(b - a) / BLOCK⌉. So neither the longest length nor a prefix sum of tiles is
    needed. A program without rows has first ≥ length. What lies past the last sequence is sequence ``count``.

    Returns:
        batch: where the head lies in memory. sequence: which sequence it is. first: of its rows. begin: where its rows
        begin along the tensor's length. length: its rows.
    """
    if starts is None:
        blocks = tl.cdiv(total, BLOCK)
        pairs = programs // blocks
        group = program // (section * blocks)
        rest = program % (section * blocks)
        members = tl.minimum(section, pairs - group * section)
        block = rest // members
        pair = group * section + rest % members
        batch = pair // heads
        sequence = batch
        head = pair % heads
        begin = head * 0
        length = begin + total
    else:
        tiles = total // BLOCK + count + 1
        slot = program % tiles
        head = program // tiles
        batch = head * 0
        low = head * 0
        high = head * 0 + count
        while low < high:
            middle = (low + high + 1) // 2
            start, _ = bounds_of(starts, middle, count, total)
            if start // BLOCK + middle <= slot:
                low = middle
            else:
                high = middle - 1
        sequence = low
        begin, length = bounds_of(starts, sequence, count, total)
        block = slot - (begin // BLOCK + sequence)
        blocks = tl.cdiv(length, BLOCK)
    if REVERSED:
        block = tl.where(block < blocks, blocks - 1 - block, block)
    return batch, sequence, head, block * BLOCK, begin, length


@triton.jit
def tanh(x):
    """(tanh x, its derivative), both without cancellation."""
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    x2 = x * x
    near = x * (1.0 + x2 * (-0.3333333333 + x2 * (0.1333333333 + x2 * (-0.0539682540 + x2 * 0.0218694885))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far)), 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def scores(
    qk,  # q·k of queries i (a column, or a row where the tile is transposed) and keys j
    terms,
    place,  # (sequence, head)
    i,
    j,
    shape,  # (seqlen_q, seqlen_k)
    band,  # (low, high, shift)
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    EDGE: tl.constexpr,
    ASK: tl.constexpr,
):
    """(s, plain, slope of the cap): s is −inf where query i does not see key j; plain is what a score_mod takes.

    EDGE: the tile may reach over the last key or, where LEFT or RIGHT, out of the band i + low ≤ j ≤ i + high.
    ASK: the mask_mod must be asked.
    """
    sequence, head = place
    seqlen_q, seqlen_k = shape
    low, high, shift = band
    s = qk * scale
    slope = s
    if SOFTCAP:
        s, slope = tanh(s)
        s = s * softcap
    plain = s
    if terms.score_mod is not None:
        inside_i = tl.minimum(i, seqlen_q - 1)
        inside_j = tl.minimum(j, seqlen_k - 1)
        s = terms.score_mod.function(s, sequence, head, inside_i, inside_j, terms.score_mod.args)
    if terms.mask is not None:
        at = head_of(terms.mask, sequence, head, terms.mask_strides) + j.to(tl.int64) * terms.mask_strides[2]
        inside = j < seqlen_k
        if terms.mask_row_stride is not None:
            at = at + i.to(tl.int64) * terms.mask_row_stride
            inside = inside & (i < seqlen_q)
        if terms.mask_shape is not None:
            inside = inside & (j < terms.mask_shape[1]) & (i < terms.mask_shape[0])
        if terms.mask.dtype.element_ty == tl.uint8:
            s = tl.where(tl.load(at, mask=inside, other=0) != 0, s, float("-inf"))
        else:
            s = s + tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if terms.slopes is not None:
        slope_of_head = tl.load(terms.slopes + sequence.to(tl.int64) * terms.slope_strides[0] + head)
        s = s - slope_of_head * tl.abs(j - i - shift).to(tl.float32)
    if ASK and terms.mask_mod is not None:
        inside_i = tl.minimum(i, seqlen_q - 1)
        inside_j = tl.minimum(j, seqlen_k - 1)
        seen = terms.mask_mod.function(sequence, head, inside_i, inside_j, terms.mask_mod.args)
        s = tl.where(seen, s, float("-inf"))
    if EDGE:
        seen = j < seqlen_k
        if RIGHT:
            seen = seen & (j <= i + high)
        if LEFT:
            seen = seen & (j >= i + low)
        s = tl.where(seen, s, float("-inf"))
    return s, plain, slope


@triton.jit
def through_scores(ds, s, plain, slope, terms, place, i, j, shape, SOFTCAP: tl.constexpr):
    """The gradient of scale · q·k, given that of s; s, plain and slope as :func:`scores` gave them."""
    if terms.score_mod is not None:
        sequence, head = place
        seqlen_q, seqlen_k = shape
        inside_i = tl.minimum(i, seqlen_q - 1)
        inside_j = tl.minimum(j, seqlen_k - 1)
        ds = terms.score_mod.gradient(ds, plain, sequence, head, inside_i, inside_j, terms.score_mod.args)
        ds = tl.where(s == float("-inf"), 0.0, ds)  # whatever the rule's derivative is where a score is hidden
    if SOFTCAP:
        ds = ds * slope
    return ds


@triton.jit
def exponential(x, NATURAL: tl.constexpr):
    """eˣ, or 2ˣ where scores are in base 2."""
    if NATURAL:
        power = tl.exp(x)
    else:
        power = tl.exp2(x)
    return power


@triton.jit
def softmax_of_row(TOP, WEIGHT, rows, length):
    """(top, weight) of each row as kernels_backward.rows_kernel left them; rows past the end get probabilities of zero.

    WEIGHT is None where the weights are one.
    """
    top = tl.load(TOP + rows, mask=rows < length, other=float("inf"))
    weight = top
    if WEIGHT is not None:
        weight = tl.load(WEIGHT + rows, mask=rows < length, other=0.0)
    return top, weight


@triton.jit
def probabilities(s, top, weight, NATURAL: tl.constexpr, EXACT: tl.constexpr):
    """P = exponential(s - top) · weight of a tile, weighted where EXACT; ``top`` and ``weight`` lie as it does."""
    p = exponential(s - top, NATURAL)
    if EXACT:
        p = p * weight
    return p


@triton.jit
def keys_of_queries(
    first, seqlen_k, low, high, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """(begin, inner, whole, end): of queries first … first + BLOCK_M, none sees a key before ``begin`` or from ``end``
    on, and all see those from ``inner`` to ``whole``. All but ``end`` are multiples of BLOCK_N.
    """
    begin = first * 0
    inner = begin
    whole = seqlen_k // BLOCK_N * BLOCK_N
    end = seqlen_k
    if RIGHT:
        whole = tl.minimum(whole, tl.maximum(first + high + 1, 0) // BLOCK_N * BLOCK_N)
        end = tl.minimum(end, tl.maximum(first + BLOCK_M + high, 0))
    if LEFT:
        begin = tl.maximum(first + low, 0) // BLOCK_N * BLOCK_N
        inner = tl.cdiv(tl.maximum(first + BLOCK_M - 1 + low, 0), BLOCK_N) * BLOCK_N
    return begin, inner, whole, end


@triton.jit
def queries_of_keys(
    first, seqlen_q, low, high, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """As :func:`keys_of_queries`, the queries that see keys first … first + BLOCK_N; ``whole`` may be ``seqlen_q``."""
    begin = first * 0
    inner = begin
    whole = seqlen_q
    end = seqlen_q
    if RIGHT:
        begin = tl.maximum(first - high, 0) // BLOCK_M * BLOCK_M
        inner = tl.cdiv(tl.maximum(first + BLOCK_N - 1 - high, 0), BLOCK_M) * BLOCK_M
    if LEFT:
        end = tl.minimum(end, tl.maximum(first + BLOCK_N - low, 0))
        whole = tl.minimum(seqlen_q, tl.maximum(first - low + 1, 0)) // BLOCK_M * BLOCK_M
    return begin, inner, whole, end


@triton.jit
def start_of(step, index, TILES: tl.constexpr, BLOCK: tl.constexpr, LISTED: tl.constexpr):
    """Where a tile begins: ``step`` itself or, where LISTED, tile number ``step`` of blocks that have TILES each."""
    if LISTED:
        start = (tl.load(index + step // TILES) * TILES + step % TILES) * BLOCK
    else:
        start = step
    return start


@triton.jit
def listed(lists, sequence, head, block):
    """(index, partly, wholly): the blocks that a block is to meet: first those seen in part, then those seen whole."""
    at = sequence.to(tl.int64)
    index = (
        lists.blocks
        + at * lists.block_strides[0]
        + head.to(tl.int64) * lists.block_strides[1]
        + block * lists.block_strides[2]
    )
    count = lists.counts + at * lists.count_strides[0] + head.to(tl.int64) * lists.count_strides[1] + block * 2
    return index, tl.load(count), tl.load(count + 1)


@triton.jit
def band_of(seqlen_q, seqlen_k, align, left, right):
    """(low, high, shift): query i sees keys from i + low to i + high, around the diagonal j = i + shift."""
    shift = (seqlen_k - seqlen_q) * align
    return shift - left, shift + right, shift


@triton.jit
def kept(dropout, row, first, BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """1 / (1 - p) where dropout keeps a weight and 0 where it drops it: rows ``row`` …, keys ``first`` …"""
    rows = row + tl.arange(0, BLOCK_ROWS)
    return keep_scale(dropout.seed, rows, first, dropout.threshold, dropout.scale, BLOCK_N)
