"""Decoding: attention of a sequence's last tokens to a cache, its keys divided among programs.

As in Flash-Decoding (Dao et al. 2023), each of SPLITS programs of a key head takes a range of the keys that there are,
computes softmax and sum within it, and a second kernel merges them in a fixed order. The query heads that share a key
head, and the queries, are the rows of one matrix, so that keys and values are read once. Lengths are read on the
device: a captured launch serves sequences that grow.

Scores are kept in base 2, as kernels_tiles has them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.attention.cache import Cache, for_tokens, scale_strides
from fusedops.attention.kernels_tiles import tanh
from fusedops.attention.operands import LOG2E, unit_stride
from fusedops.attention.options import empty_heads
from fusedops.attention.tuning_decode import DECODE, DecodeProblem, splits_for
from fusedops.autotune.resolve import resolve
from fusedops.runtime.device import device_facts, device_guard
from fusedops.runtime.launch import DTYPE_NAMES, ceil_div, next_power_of_2, options
from fusedops.runtime.precision import dot_precision


@triton.jit
def cache_rows(batch, table, table_stride, j, inside, pages, SIZE, PAGE: tl.constexpr, RING: tl.constexpr):
    """(first index, row, whether there is such a page) of tokens j in a cache; ``inside`` says which one may ask for.

    Whatever the numbers in the table, the place lies inside the cache.
    """
    known = inside
    if PAGE > 0:
        page = tl.load(table + batch.to(tl.int64) * table_stride + j // PAGE, mask=inside, other=0)
        known = inside & (page >= 0) & (page < pages)
        outer = tl.minimum(tl.maximum(page, 0), pages - 1).to(tl.int64)
        row = j % PAGE
    else:
        outer = batch.to(tl.int64) + j * 0
        row = j
        if RING:
            row = j % SIZE
    return outer, row, known


@triton.jit
def scale_of(scales, strides, head, outer, row, inside, TOKENS: tl.constexpr):
    """What stored numbers are multiplied with: a number of the head, or of each token where TOKENS."""
    if TOKENS:
        at = scales + outer * strides[0] + head.to(tl.int64) * strides[1] + row.to(tl.int64) * strides[2]
        value = tl.load(at, mask=inside, other=0.0)
    else:
        value = tl.load(scales + head)
    return value


@triton.jit(do_not_specialize=["added", "seqlen_q", "left", "size", "pages", "table_stride"])
def decode_kernel(
    Q,  # (batch, heads, seqlen_q, D_K), any strides but 1 in the last dimension
    K,  # (batch, kv_heads, size, D_K) or (pages, kv_heads, PAGE, D_K)
    V,  # the same with D_V
    SEQLENS,  # (batch,)
    TABLE,  # (batch, most pages) or None
    K_SCALES,  # (kv_heads,), or as K without its last dimension, or None
    V_SCALES,
    SLOPES,  # (batch or 1, heads) or None
    SINKS,  # (heads,) or None
    OUT,  # (batch, heads, seqlen_q, D_V) or, where SPLITS > 1, float32 with SPLITS before D_V
    LSE,  # (batch, heads, seqlen_q) float32 or, where SPLITS > 1, with SPLITS at the end, in base 2
    q_strides,
    k_strides,
    v_strides,
    k_scale_strides,
    v_scale_strides,
    out_strides,  # of OUT's first three dimensions
    slope_stride,
    table_stride,
    added,  # tokens of a sequence besides SEQLENS
    heads,
    kv_heads,
    seqlen_q,
    left,
    size,  # tokens of a sequence that there is room for
    pages,
    scale,  # of q·k, in base 2; where softcap, divided by it
    softcap,  # in base 2
    GROUP: tl.constexpr,  # query heads a key head
    ROWS: tl.constexpr,  # tiles of BLOCK_M rows that GROUP · seqlen_q rows take
    SPLITS: tl.constexpr,
    PAGE: tl.constexpr,  # 0: not paged
    RING: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    K_TOKENS: tl.constexpr,  # K_SCALES has one for each token
    V_TOKENS: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (batch, key head, tile of rows, split) attends to its share of the keys."""
    program = tl.program_id(0)
    split = program % SPLITS
    tile = program // SPLITS % ROWS
    kv_head = program // (SPLITS * ROWS) % kv_heads
    batch = program // (SPLITS * ROWS) // kv_heads

    length = tl.load(SEQLENS + batch).to(tl.int32) + added
    if not RING:
        length = tl.minimum(length, size)
    first = length * 0
    oldest = first
    if WINDOW:
        oldest = tl.maximum(length - seqlen_q - left, 0)
        # A multiple of the tile, so that a tile lies within a page wherever it can.
        first = oldest // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(tl.maximum(length - first, 0), SPLITS), BLOCK_N) * BLOCK_N
    begin = first + split * share
    end = tl.minimum(begin + share, length)

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < GROUP * seqlen_q
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    own = length - seqlen_q + query  # the token that a query is

    d_k = tl.arange(0, BLOCK_DK)
    d_v = tl.arange(0, BLOCK_DV)
    of_row = batch.to(tl.int64) * q_strides[0] + head.to(tl.int64) * q_strides[1] + query.to(tl.int64) * q_strides[2]
    q = tl.load(Q + of_row[:, None] + d_k[None, :], mask=real[:, None] & (d_k < D_K)[None, :], other=0.0)
    if SLOPES is not None:
        slope = tl.load(SLOPES + batch.to(tl.int64) * slope_stride + head, mask=real, other=0.0).to(tl.float32)
        slope = slope * 1.4426950408889634

    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if SINKS is not None:
        # In the first share alone: the merge adds up what the shares have.
        sink = tl.load(SINKS + head, mask=real & (split == 0), other=float("-inf")).to(tl.float32)
        top = sink * 1.4426950408889634
        total = tl.where(top == float("-inf"), 0.0, 1.0)

    for start in tl.range(begin, end, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        inside = j < end
        if WINDOW:  # what is older may be gone
            inside = inside & (j >= oldest)
        if PAGE > 0 and PAGE % BLOCK_N == 0:
            outer, of_tile, _ = cache_rows(batch, TABLE, table_stride, start, start < end, pages, size, PAGE, RING)
            at_row = of_tile + tl.arange(0, BLOCK_N)
        else:
            outer, at_row, _ = cache_rows(batch, TABLE, table_stride, j, inside, pages, size, PAGE, RING)
        at = outer * k_strides[0] + kv_head.to(tl.int64) * k_strides[1] + at_row.to(tl.int64) * k_strides[2]
        k = tl.load(K + at[:, None] + d_k[None, :], mask=inside[:, None] & (d_k < D_K)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * scale
        if K_SCALES is not None:
            k_scale = scale_of(K_SCALES, k_scale_strides, kv_head, outer, at_row, inside, K_TOKENS)
            s = s * (k_scale[None, :] if K_TOKENS else k_scale)
        if SOFTCAP:
            s, _ = tanh(s)
            s = s * softcap
        distance = own[:, None] - j[None, :]
        if SLOPES is not None:
            s = s - slope[:, None] * tl.abs(distance).to(tl.float32)
        seen = (distance >= 0) & (j < end)[None, :]
        if WINDOW:
            seen = seen & (distance <= left)
        s = tl.where(seen, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s - base[:, None])
        alpha = tl.exp2(top - base)
        total = total * alpha + tl.sum(p, axis=1)
        at = outer * v_strides[0] + kv_head.to(tl.int64) * v_strides[1] + at_row.to(tl.int64) * v_strides[2]
        v = tl.load(V + at[:, None] + d_v[None, :], mask=inside[:, None] & (d_v < D_V)[None, :], other=0.0)
        if V_TOKENS:
            # Relative to the tile's largest scale: a weight times a small scale would vanish in 16 bits.
            v_scale = scale_of(V_SCALES, v_scale_strides, kv_head, outer, at_row, inside, V_TOKENS)
            unit = tl.max(tl.abs(v_scale), axis=0)
            unit = tl.where(unit == 0.0, 1.0, unit)
            p = p * (v_scale / unit)[None, :]
            acc = acc * alpha[:, None] + tl.dot(p.to(q.dtype), v.to(q.dtype), input_precision=PRECISION) * unit
        else:
            acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None], input_precision=PRECISION)
        top = new_top

    if V_SCALES is not None and not V_TOKENS:
        acc = acc * tl.load(V_SCALES + kv_head)
    divisor = tl.where(total == 0.0, 1.0, total)
    out = acc / divisor[:, None]
    lse = top + tl.log2(divisor)
    at = batch.to(tl.int64) * out_strides[0] + head.to(tl.int64) * out_strides[1] + query.to(tl.int64) * out_strides[2]
    of_lse = (batch.to(tl.int64) * heads + head) * seqlen_q + query
    if SPLITS > 1:
        at += split * D_V
        of_lse = of_lse * SPLITS + split
    else:
        lse = lse * 0.6931471805599453
    tl.store(OUT + at[:, None] + d_v[None, :], out.to(OUT.dtype.element_ty), mask=real[:, None] & (d_v < D_V)[None, :])
    tl.store(LSE + of_lse, lse, mask=real)


@triton.jit(do_not_specialize=["rows", "heads", "seqlen_q"])
def merge_kernel(
    PARTS,  # (rows, SPLITS, D_V) float32: each share's softmax of the values
    PART_LSE,  # (rows, SPLITS) float32, in base 2
    OUT,  # (batch, heads, seqlen_q, D_V)
    LSE,  # (rows,) float32
    out_strides,
    rows,
    heads,
    seqlen_q,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """out = Σ_s w_s out_s / Σ_s w_s with w_s = 2^(lse_s - max), in the order of the shares; a program is one row."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, BLOCK_SPLITS)
    lse = tl.load(PART_LSE + row * SPLITS + splits, mask=splits < SPLITS, other=float("-inf"))
    top = tl.max(lse, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(lse - base)
    total = tl.sum(weights, axis=0)
    divisor = tl.where(total == 0.0, 1.0, total)
    d_v = tl.arange(0, BLOCK_DV)
    at = PARTS + (row * SPLITS + splits)[:, None] * D_V + d_v[None, :]
    parts = tl.load(at, mask=(splits < SPLITS)[:, None] & (d_v < D_V)[None, :], other=0.0)
    out = tl.sum(parts * weights[:, None], axis=0) / divisor
    query = row % seqlen_q
    head = row // seqlen_q % heads
    batch = row // seqlen_q // heads
    to = OUT + batch * out_strides[0] + head * out_strides[1] + query * out_strides[2] + d_v
    tl.store(to, out.to(OUT.dtype.element_ty), mask=d_v < D_V)
    tl.store(LSE + row, (base + tl.log2(divisor)) * 0.6931471805599453 + tl.where(total == 0.0, float("-inf"), 0.0))


def attention_decode(
    q: torch.Tensor,
    cache: Cache,
    added: int,
    left: int | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    softcap: float,
    scale: float,
    num_splits: int | None,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate and launch; arguments and results as :func:`fusedops.attention.reference_decode.attention_decode`."""
    batch, heads, seqlen_q, d_k = q.shape
    pages, kv_heads, page, d_v = cache.values.shape
    out = empty_heads(q, (batch, heads, seqlen_q, d_v))
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    q, keys, values = unit_stride(q), unit_stride(cache.keys), unit_stride(cache.values)
    facts = device_facts(q.device)
    group, size = heads // kv_heads, cache.size
    # A limit that no token is further away than is none; a ring holds no others.
    window = left is not None and (cache.ring or left < size)
    problem = DecodeProblem.of(
        d_k,
        d_v,
        size if left is None else min(size, left + seqlen_q),
        # A fixed division promises the same bits in any batch: tiles must not depend on it either.
        heads=batch * kv_heads if num_splits is None else kv_heads,
        queries=group * seqlen_q,
        dtype=DTYPE_NAMES[q.dtype],
        cache_dtype=DTYPE_NAMES[keys.dtype],
        precision=dot_precision(q, precision),
        page=0 if cache.block_table is None else page,
    )
    config = resolve(DECODE, problem, q.device)
    block_m = min(config.block_m, max(16, next_power_of_2(group * seqlen_q)))
    tiles = ceil_div(group * seqlen_q, block_m)
    splits = num_splits or splits_for(config, problem, tiles, facts)
    parts, part_lse = out, lse
    strides = out.stride()[:3]
    if splits > 1:
        parts = q.new_empty((batch, heads, seqlen_q, splits, d_v), dtype=torch.float32)
        part_lse = q.new_empty((batch, heads, seqlen_q, splits), dtype=torch.float32)
        strides = parts.stride()[:3]
    table = cache.block_table
    with device_guard(q):
        decode_kernel[(batch * kv_heads * tiles * splits,)](
            q, keys, values, cache.seqlens, table, cache.key_scales, cache.value_scales, alibi_slopes, sinks,
            parts, part_lse, q.stride()[:3], keys.stride()[:3], values.stride()[:3],
            scale_strides(cache.key_scales), scale_strides(cache.value_scales), strides,
            0 if alibi_slopes is None or alibi_slopes.shape[0] == 1 else alibi_slopes.stride(0),
            0 if table is None else table.stride(0), added, heads, kv_heads, seqlen_q, left or 0, size, pages,
            scale / softcap if softcap else scale * LOG2E, softcap * LOG2E,
            GROUP=group, ROWS=tiles, SPLITS=splits, PAGE=0 if table is None else page, RING=cache.ring, WINDOW=window,
            SOFTCAP=softcap != 0.0, K_TOKENS=for_tokens(cache.key_scales), V_TOKENS=for_tokens(cache.value_scales),
            D_K=d_k, D_V=d_v, BLOCK_DK=problem.block_dk, BLOCK_DV=problem.block_dv, BLOCK_M=block_m,
            BLOCK_N=config.block_n, PRECISION=problem.precision, **options(config.num_warps, config.num_stages),
        )  # fmt: skip
        if splits > 1:
            rows = batch * heads * seqlen_q
            block_splits = next_power_of_2(splits)
            warps = 4 if block_splits * problem.block_dv <= 8192 else 8  # registers hold all shares of a row
            merge_kernel[(rows,)](
                parts, part_lse, out, lse, out.stride()[:3], rows, heads, seqlen_q,
                SPLITS=splits, BLOCK_SPLITS=block_splits, D_V=d_v, BLOCK_DV=problem.block_dv, **options(warps),
            )  # fmt: skip
    return out, lse
