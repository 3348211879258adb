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
    scores,
    start_of,
    store_rows,
    tile_of,
)
from fusedops.attention.operands import Operands, strides_of
from fusedops.attention.options import Options, empty_heads
from fusedops.runtime.device import device_guard


@triton.jit
def _attend(
    acc,  # (BLOCK_M, BLOCK_DV) float32: Σ_j exp(s_ij - top_i) v_j over the keys seen so far
    total,  # (BLOCK_M,) float32: Σ_j exp(s_ij - top_i)
    top,  # (BLOCK_M,) float32: max_j s_ij
    q,
    K,
    V,
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
    EDGE: tl.constexpr,
):
    """The online softmax over the key tiles first … last."""
    STEP: tl.constexpr = 1 if LISTED else BLOCK_N
    for step in range(first, last, STEP):
        start = start_of(step, index, TILES, BLOCK_N, LISTED)
        k = load_rows(K, start, shape[1], k_stride, D_K, BLOCK_N, BLOCK_DK, EDGE)
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
            p = p * kept(dropout, row, start, BLOCK_M, BLOCK_N)
        v = load_rows(V, start, shape[1], v_stride, D_V, BLOCK_N, BLOCK_DV, EDGE)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize=["heads", "count", "seqlen_q", "seqlen_k", "align", "left", "right", "section"])
def forward_kernel(
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
):
    """out = softmax(s) v and lse = log Σ exp(s). A program owns BLOCK_M queries of one head."""
    batch, sequence, head, first, begin, length = tile_of(
        tl.program_id(0), tl.num_programs(0), starts_q, count, heads, seqlen_q, section, RIGHT, BLOCK_M
    )
    rows = first + tl.arange(0, BLOCK_M)
    q_head = head_of(Q, batch, head, q_strides) + begin.to(tl.int64) * q_strides[2]
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
    index = k_head
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
                acc, total, top, q, k_head, v_head, index, near, tl.minimum(inner, end), rows, row + first,
                k_strides[2], v_strides[2], terms, dropout, (sequence, head), (length, keys), (low, high, shift),
                scale, softcap, NATURAL, PLAIN, SOFTCAP, LEFT, RIGHT,
                D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, TILES, LISTED, EDGE=True,
            )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, q, k_head, v_head, index, inner, whole, rows, row + first,
        k_strides[2], v_strides[2], terms, dropout, (sequence, head), (length, keys), (low, high, shift),
        scale, softcap, NATURAL, PLAIN, SOFTCAP, LEFT, RIGHT,
        D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, TILES, LISTED, EDGE=False,
    )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, q, k_head, v_head, index, edge, end, rows, row + first,
        k_strides[2], v_strides[2], terms, dropout, (sequence, head), (length, keys), (low, high, shift),
        scale, softcap, NATURAL, PLAIN, SOFTCAP, LEFT, RIGHT,
        D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, TILES, LISTED, EDGE=True,
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
    store_rows(out_head, acc / divisor[:, None], first, length, out_strides[2], D_V, BLOCK_M, BLOCK_DV)


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate and launch; arguments and results as :func:`fusedops.attention.reference.attention`."""
    batch, heads, seqlen_q, _ = q.shape
    out = empty_heads(q, (batch, heads, seqlen_q, v.shape[3]))
    lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)
    statistics = torch.empty((2, batch, heads, seqlen_q), dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return out, lse, statistics
    operands = Operands.of(q, k, v, options)
    config = operands.config("forward")
    with device_guard(q):
        forward_kernel[(operands.programs("q", config.block_m),)](
            operands.q, operands.k, operands.v, out, lse, *statistics,
            *operands.strides, strides_of(out), operands.terms, operands.sinks, operands.dropout,
            *operands.starts, operands.lists("keys"), *operands.sizes, operands.section("q"),
            abs(operands.scale), operands.softcap, operands.unit,
            NEGATE=operands.scale < 0, **operands.flags("forward", config),
        )  # fmt: skip
    return out, lse, statistics
