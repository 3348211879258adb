"""The forward pass of attention: FlashAttention-2 (Dao 2023, algorithm 1) in Triton, and its launcher."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.attention.kernels_tiles import (
    band_of,
    bounds_of,
    exponential,
    head_of,
    kept,
    keys_of_queries,
    listed,
    load_rows,
    load_tile,
    scores,
    start_of,
    store_rows,
    tile_of,
)
from fusedops.attention.operands import Operands, strides_of
from fusedops.attention.options import Options, empty_heads
from fusedops.runtime.device import device_facts, device_guard


@triton.jit
def _attend(
    acc,  # (BLOCK_M, BLOCK_DV) float32: Σ_j exp(s_ij - top_i) v_j over the keys seen so far
    total,  # (BLOCK_M,) float32: Σ_j exp(s_ij - top_i)
    top,  # (BLOCK_M,) float32: max_j s_ij
    q,
    K,
    V,
    of_keys,
    index,
    first,
    last,
    rows,
    row,  # of dropout's mask, that of the tile's first query
    k_stride,
    v_stride,
    terms,
    dropout,
    place,
    shape,
    band,
    scale,
    softcap,
    NATURAL: tl.constexpr,
    PLAIN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    TILES: tl.constexpr,
    LISTED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    SPECIALIZE: tl.constexpr,
    EDGE: tl.constexpr,
):
    """The online softmax over the key tiles first … last."""
    STEP: tl.constexpr = 1 if LISTED else BLOCK_N
    # Without a band the edge is at most one tile: nothing to keep in flight, and fewer registers.
    STAGES: tl.constexpr = 1 if EDGE and DESCRIBED and not (LEFT or RIGHT or LISTED) else None
    for step in tl.range(first, last, STEP, num_stages=STAGES, warp_specialize=SPECIALIZE and not EDGE):
        start = start_of(step, index, TILES, BLOCK_N, LISTED)
        k = load_tile(K, of_keys, start, shape[1], k_stride, D_K, BLOCK_N, BLOCK_DK, EDGE, DESCRIBED)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if EDGE or not PLAIN:
            j = start + tl.arange(0, BLOCK_N)
            s, _, _ = scores(
                qk, terms, place, rows[:, None], j[None, :], shape, band, scale, softcap,
                SOFTCAP, LEFT, RIGHT, EDGE, EDGE or not LISTED,
            )  # fmt: skip
            new_top = tl.maximum(top, tl.max(s, axis=1))
            # A row that has seen no key yet has top = -inf, and inf - inf is NaN.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = exponential(s - base[:, None], NATURAL)
            alpha = exponential(top - base, NATURAL)
        else:
            # scale ≥ 0, so the maximum may be taken before it, and scaling and subtraction are one fused operation.
            new_top = tl.maximum(top, tl.max(qk, axis=1) * scale)
            p = tl.exp2(qk * scale - new_top[:, None])
            alpha = tl.exp2(top - new_top)
        total = total * alpha + tl.sum(p, axis=1)
        if dropout is not None:
            # What is kept is scaled after the sum: a scaled p would be rounded once more.
            p = tl.where(kept(dropout, row, start, BLOCK_M, BLOCK_N) != 0.0, p, 0.0)
        v = load_tile(V, of_keys, start, shape[1], v_stride, D_V, BLOCK_N, BLOCK_DV, EDGE, DESCRIBED)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        top = new_top
    return acc, total, top


@triton.jit
def output_of_queries(
    program,
    programs,
    Q,  # (batch, heads, seqlen_q, D_K)
    K,  # (batch, heads / group, seqlen_k, D_K)
    V,  # (batch, heads / group, seqlen_k, D_V)
    OUT,  # (batch, heads, seqlen_q, D_V)
    LSE,  # (batch, heads, seqlen_q) float32, contiguous
    TOP,  # as LSE: the maximum of a row's scores
    TOTAL,  # as LSE: Σ exponential(s - TOP)
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    terms,
    sinks,  # (heads,) or None
    dropout,
    starts_q,  # (count + 1,): where each packed sequence begins; None: dense
    starts_k,
    lists,  # operands.Lists of key blocks or None
    heads,
    group,
    count,
    seqlen_q,
    seqlen_k,
    align,
    left,
    right,
    section,
    scale,  # ≥ 0
    softcap,
    sink_scale,  # from base e to that of the scores
    NEGATE: tl.constexpr,  # the scale is -scale
    NATURAL: tl.constexpr,
    PLAIN: tl.constexpr,  # a score is scale · q·k: no term, cap or rule, but a mask_mod that lists answer
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    DESCRIBED: tl.constexpr,  # K and V are tensor descriptors
    SPECIALIZE: tl.constexpr,  # loads and products in warps of their own
):
    """What one program does, which owns BLOCK_M queries of one head: out = softmax(s) v and lse = log Σ exp(s)."""
    batch, sequence, head, first, begin, length = tile_of(
        program, programs, starts_q, count, heads, seqlen_q, section, RIGHT, BLOCK_M
    )
    rows = first + tl.arange(0, BLOCK_M)
    q_head = head_of(Q, batch, head, q_strides) + begin.to(tl.int64) * q_strides[2]
    if DESCRIBED:
        k_head = K
        v_head = V
    else:
        k_head = head_of(K, batch, head // group, k_strides)
        v_head = head_of(V, batch, head // group, v_strides)
    keys = seqlen_k
    if starts_k is not None:
        begin_k, keys = bounds_of(starts_k, sequence, count, seqlen_k)
        k_head += begin_k.to(tl.int64) * k_strides[2]
        v_head += begin_k.to(tl.int64) * v_strides[2]
        keys = tl.where((sequence < count) & (first < length), keys, 0)
    q = load_rows(q_head, first, length, q_strides[2], D_K, BLOCK_M, BLOCK_DK, True)
    if NEGATE:
        q = -q
    row = (batch.to(tl.int64) * heads + head) * seqlen_q + begin
    low, high, shift = band_of(length, keys, align, left, right)

    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * sink_scale
        sink = tl.where(sequence < count, sink, float("-inf"))
        top = tl.zeros((BLOCK_M,), tl.float32) + sink
        total += tl.where(sink == float("-inf"), 0.0, 1.0)
    TILES: tl.constexpr = BLOCK // BLOCK_N
    LISTED: tl.constexpr = lists is not None
    index = LSE
    if LISTED:
        index, partly, wholly = listed(lists, sequence, head, first // BLOCK)
        edge, end = partly * 0, partly * TILES
        inner, whole = end, (partly + wholly) * TILES
    else:
        near, inner, whole, end = keys_of_queries(first, keys, low, high, LEFT, RIGHT, BLOCK_M, BLOCK_N)
        edge = whole
        if LEFT:
            edge = tl.maximum(whole, inner)
            acc, total, top = _attend(
                acc, total, top, q, k_head, v_head, (batch, head // group), index,
                near, tl.minimum(inner, end), rows, row + first, k_strides[2], v_strides[2], terms, dropout,
                (sequence, head), (length, keys), (low, high, shift), scale, softcap,
                NATURAL, PLAIN, SOFTCAP, LEFT, RIGHT,
                D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, TILES, LISTED,
                DESCRIBED, SPECIALIZE, EDGE=True,
            )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, q, k_head, v_head, (batch, head // group), index, inner, whole, rows, row + first,
        k_strides[2], v_strides[2], terms, dropout, (sequence, head), (length, keys), (low, high, shift),
        scale, softcap, NATURAL, PLAIN, SOFTCAP, LEFT, RIGHT,
        D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, TILES, LISTED,
        DESCRIBED, SPECIALIZE, EDGE=False,
    )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, q, k_head, v_head, (batch, head // group), index, edge, end, rows, row + first,
        k_strides[2], v_strides[2], terms, dropout, (sequence, head), (length, keys), (low, high, shift),
        scale, softcap, NATURAL, PLAIN, SOFTCAP, LEFT, RIGHT,
        D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, TILES, LISTED,
        DESCRIBED, SPECIALIZE, EDGE=True,
    )  # fmt: skip

    # A row that sees no key has top = -inf and total = 0: out = 0, lse = -inf.
    divisor = tl.where(total == 0.0, 1.0, total)
    if NATURAL:
        lse = top + tl.log(divisor)
    else:
        lse = (top + tl.log2(divisor)) * 0.6931471805599453
    tl.store(LSE + row + rows, lse, mask=rows < length)
    tl.store(TOP + row + rows, top, mask=rows < length)
    tl.store(TOTAL + row + rows, total, mask=rows < length)
    out_head = head_of(OUT, batch, head, out_strides) + begin.to(tl.int64) * out_strides[2]
    if dropout is not None:
        acc = acc * dropout.scale
    store_rows(out_head, acc / divisor[:, None], first, length, out_strides[2], D_V, BLOCK_M, BLOCK_DV)


@triton.jit(
    do_not_specialize=["heads", "count", "seqlen_q", "seqlen_k", "align", "left", "right", "section", "programs"]
)
def forward_kernel(
    Q, K, V, OUT, LSE, TOP, TOTAL, q_strides, k_strides, v_strides, out_strides,
    terms, sinks, dropout, starts_q, starts_k, lists,
    heads, group, count, seqlen_q, seqlen_k, align, left, right, section, programs, scale, softcap, sink_scale,
    NEGATE: tl.constexpr, NATURAL: tl.constexpr, PLAIN: tl.constexpr, SOFTCAP: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    DESCRIBED: tl.constexpr, SPECIALIZE: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """out and lse; arguments as of :func:`output_of_queries`. PERSISTENT: each program takes one tile after another."""
    if PERSISTENT:
        for program in range(tl.program_id(0), programs, tl.num_programs(0)):
            output_of_queries(
                program, programs, Q, K, V, OUT, LSE, TOP, TOTAL, q_strides, k_strides, v_strides, out_strides,
                terms, sinks, dropout, starts_q, starts_k, lists,
                heads, group, count, seqlen_q, seqlen_k, align, left, right, section, scale, softcap, sink_scale,
                NEGATE, NATURAL, PLAIN, SOFTCAP, LEFT, RIGHT,
                D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, BLOCK, DESCRIBED, SPECIALIZE,
            )  # fmt: skip
    else:
        output_of_queries(
            tl.program_id(0), programs, Q, K, V, OUT, LSE, TOP, TOTAL, q_strides, k_strides, v_strides, out_strides,
            terms, sinks, dropout, starts_q, starts_k, lists,
            heads, group, count, seqlen_q, seqlen_k, align, left, right, section, scale, softcap, sink_scale,
            NEGATE, NATURAL, PLAIN, SOFTCAP, LEFT, RIGHT,
            D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, BLOCK, DESCRIBED, SPECIALIZE,
        )  # fmt: skip


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate and launch; arguments and results as :func:`fusedops.attention.reference.attention`."""
    batch, heads, seqlen_q, _ = q.shape
    out = empty_heads(q, (batch, heads, seqlen_q, v.shape[3]))
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    statistics = q.new_empty((2, batch, heads, seqlen_q), dtype=torch.float32)
    if q.numel() == 0:
        return out, lse, statistics
    operands = Operands.of(q, k, v, options)
    config = operands.config("forward", operands.k, operands.v)
    with device_guard(q):
        programs = operands.programs("q", config.block_m)
        keys, values = operands.moving(config.descriptors, config.block_n, operands.k, operands.v)
        resident = device_facts(q.device).multiprocessor_count if config.persistent else programs
        forward_kernel[(min(programs, resident),)](
            operands.q, keys, values, out, lse, *statistics.unbind(),
            *operands.strides, strides_of(out), operands.terms, operands.sinks, operands.dropout,
            *operands.starts, operands.lists("keys"), *operands.sizes, operands.section("q"), programs,
            abs(operands.scale), operands.softcap, operands.unit,
            NEGATE=operands.scale < 0, DESCRIBED=config.descriptors, SPECIALIZE=config.specialize,
            PERSISTENT=config.persistent, **operands.flags("forward", config),
        )  # fmt: skip
    return out, lse, statistics
