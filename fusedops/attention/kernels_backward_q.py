"""The gradients of attention's queries and ALiBi slopes; the formulas are in kernels_backward."""

from __future__ import annotations

import triton
import triton.language as tl

from fusedops.attention.kernels_tiles import (
    band_of,
    bounds_of,
    head_of,
    kept,
    keys_of_queries,
    listed,
    load_rows,
    load_tile,
    probabilities,
    scores,
    softmax_of_row,
    start_of,
    store_rows,
    through_scores,
    tile_of,
)


@triton.jit
def _sum_over_keys(
    dq,  # (BLOCK_M, BLOCK_DK) float32: Σ_j dS_ij k_j over the keys seen so far
    dslope,  # (BLOCK_M,) float32: -Σ_j dS_ij |j - i - shift|
    q,
    do,
    top,
    weight,
    delta,
    K,
    V,
    of_keys,
    index,
    first,
    last,
    i,
    row,
    k_stride,
    v_stride,
    terms,
    dropout,
    place,
    shape,
    band,
    scale,
    softcap,
    NEED_DQ: tl.constexpr,
    NEED_DSLOPES: tl.constexpr,
    NATURAL: tl.constexpr,
    EXACT: tl.constexpr,
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
    EDGE: tl.constexpr,
):
    """The key tiles first … last."""
    STEP: tl.constexpr = 1 if LISTED else BLOCK_N
    for step in range(first, last, STEP):
        start = start_of(step, index, TILES, BLOCK_N, LISTED)
        j = start + tl.arange(0, BLOCK_N)
        k = load_tile(K, of_keys, start, shape[1], k_stride, D_K, BLOCK_N, BLOCK_DK, EDGE, DESCRIBED)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s, plain, slope = scores(
            qk, terms, place, i[:, None], j[None, :], shape, band, scale, softcap,
            SOFTCAP, LEFT, RIGHT, EDGE, EDGE or not LISTED,
        )  # fmt: skip
        p = probabilities(s, top[:, None], weight[:, None], NATURAL, EXACT)
        v = load_tile(V, of_keys, start, shape[1], v_stride, D_V, BLOCK_N, BLOCK_DV, EDGE, DESCRIBED)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if dropout is not None:
            dp = dp * kept(dropout, row, start, BLOCK_M, BLOCK_N)
        ds = p * (dp - delta[:, None])
        if NEED_DSLOPES:
            dslope -= tl.sum(ds * tl.abs(j[None, :] - i[:, None] - band[2]).to(tl.float32), axis=1)
        if NEED_DQ:
            ds = through_scores(ds, s, plain, slope, terms, place, i[:, None], j[None, :], shape, SOFTCAP)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, dslope


@triton.jit
def gradient_of_queries(
    program,
    programs,
    Q,
    K,
    V,
    DO,
    TOP,
    WEIGHT,
    DELTA,
    DQ,  # as Q; None where it is not wanted
    DSLOPES,  # as TOP: each query's part; None where it is not wanted
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    dq_strides,
    terms,
    dropout,
    starts_q,
    starts_k,
    lists,
    heads,
    group,
    count,
    seqlen_q,
    seqlen_k,
    align,
    left,
    right,
    section,
    scale,
    softcap,
    dq_scale,
    NATURAL: tl.constexpr,
    EXACT: tl.constexpr,
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
):
    """What one program does, which owns BLOCK_M queries of one head."""
    NEED_DQ: tl.constexpr = DQ is not None
    NEED_DSLOPES: tl.constexpr = DSLOPES is not None
    batch, sequence, head, first, begin, length = tile_of(
        program, programs, starts_q, count, heads, seqlen_q, section, RIGHT, BLOCK_M
    )
    i = first + tl.arange(0, BLOCK_M)
    q_head = head_of(Q, batch, head, q_strides) + begin.to(tl.int64) * q_strides[2]
    do_head = head_of(DO, batch, head, do_strides) + begin.to(tl.int64) * do_strides[2]
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
    do = load_rows(do_head, first, length, do_strides[2], D_V, BLOCK_M, BLOCK_DV, True)
    row = (batch.to(tl.int64) * heads + head) * seqlen_q + begin
    top, weight = softmax_of_row(TOP + row, WEIGHT + row if EXACT else None, i, length)
    delta = tl.load(DELTA + row + i, mask=i < length, other=0.0)
    low, high, shift = band_of(length, keys, align, left, right)

    dq = tl.zeros((BLOCK_M, BLOCK_DK), tl.float32)
    dslope = tl.zeros((BLOCK_M,), tl.float32)
    TILES: tl.constexpr = BLOCK // BLOCK_N
    LISTED: tl.constexpr = lists is not None
    index = TOP
    if LISTED:
        index, partly, wholly = listed(lists, sequence, head, first // BLOCK)
        edge, end = partly * 0, partly * TILES
        inner, whole = end, (partly + wholly) * TILES
    else:
        near, inner, whole, end = keys_of_queries(first, keys, low, high, LEFT, RIGHT, BLOCK_M, BLOCK_N)
        edge = whole
        if LEFT:
            edge = tl.maximum(whole, inner)
            dq, dslope = _sum_over_keys(
                dq, dslope, q, do, top, weight, delta, k_head, v_head, (batch, head // group), index,
                near, tl.minimum(inner, end), i, row + first, k_strides[2], v_strides[2], terms, dropout,
                (sequence, head), (length, keys), (low, high, shift), scale, softcap,
                NEED_DQ, NEED_DSLOPES, NATURAL, EXACT, SOFTCAP, LEFT, RIGHT,
                D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, TILES, LISTED, DESCRIBED, EDGE=True,
            )  # fmt: skip
    dq, dslope = _sum_over_keys(
        dq, dslope, q, do, top, weight, delta, k_head, v_head, (batch, head // group), index, inner, whole,
        i, row + first, k_strides[2], v_strides[2], terms, dropout, (sequence, head), (length, keys),
        (low, high, shift), scale, softcap, NEED_DQ, NEED_DSLOPES, NATURAL, EXACT, SOFTCAP, LEFT, RIGHT,
        D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, TILES, LISTED, DESCRIBED, EDGE=False,
    )  # fmt: skip
    dq, dslope = _sum_over_keys(
        dq, dslope, q, do, top, weight, delta, k_head, v_head, (batch, head // group), index, edge, end,
        i, row + first, k_strides[2], v_strides[2], terms, dropout, (sequence, head), (length, keys),
        (low, high, shift), scale, softcap, NEED_DQ, NEED_DSLOPES, NATURAL, EXACT, SOFTCAP, LEFT, RIGHT,
        D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, TILES, LISTED, DESCRIBED, EDGE=True,
    )  # fmt: skip
    if NEED_DQ:
        dq_head = head_of(DQ, batch, head, dq_strides) + begin.to(tl.int64) * dq_strides[2]
        store_rows(dq_head, dq * dq_scale, first, length, dq_strides[2], D_K, BLOCK_M, BLOCK_DK)
    if NEED_DSLOPES:
        tl.store(DSLOPES + row + i, dslope, mask=i < length)


@triton.jit(do_not_specialize=["heads", "count", "seqlen_q", "seqlen_k", "align", "left", "right", "section"])
def backward_q_kernel(
    Q, K, V, DO, TOP, WEIGHT, DELTA, DQ, DSLOPES, q_strides, k_strides, v_strides, do_strides, dq_strides,
    terms, dropout, starts_q, starts_k, lists,
    heads, group, count, seqlen_q, seqlen_k, align, left, right, section, scale, softcap, dq_scale,
    NATURAL: tl.constexpr, EXACT: tl.constexpr, SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """dq, and each query's part of the gradient of its head's slope; arguments as of :func:`gradient_of_queries`."""
    gradient_of_queries(
        tl.program_id(0), tl.num_programs(0), Q, K, V, DO, TOP, WEIGHT, DELTA, DQ, DSLOPES,
        q_strides, k_strides, v_strides, do_strides, dq_strides, terms, dropout, starts_q, starts_k, lists,
        heads, group, count, seqlen_q, seqlen_k, align, left, right, section, scale, softcap, dq_scale,
        NATURAL, EXACT, SOFTCAP, LEFT, RIGHT, D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, BLOCK,
        DESCRIBED,
    )  # fmt: skip
