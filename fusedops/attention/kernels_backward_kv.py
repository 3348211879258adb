"""The gradients of attention's keys and values; the formulas are in kernels_backward."""

from __future__ import annotations

import triton
import triton.language as tl

from fusedops.attention.kernels_tiles import (
    band_of,
    bounds_of,
    head_of,
    kept,
    listed,
    load_rows,
    load_tile,
    probabilities,
    queries_of_keys,
    scores,
    softmax_of_row,
    start_of,
    store_rows,
    through_scores,
    tile_of,
)


@triton.jit
def _member_and_step(step, steps, GROUPED: tl.constexpr):
    """Which head of the group, and which of its tiles, a step is: first all tiles of the first head."""
    member = tl.full((), 0, tl.int64)
    if GROUPED:
        member += step // steps
        step = step % steps
    return member, step


@triton.jit
def _add_tile(
    dk,  # (BLOCK_N, BLOCK_DK) float32: Σ_i dS_ij q_i over the queries seen so far
    dv,  # (BLOCK_N, BLOCK_DV) float32: Σ_i P_ij do_i
    k,
    v,
    Q,  # this and the next four: of the group's first head
    DO,
    TOP,
    WEIGHT,
    DELTA,
    member,
    start,
    start_k,
    row,  # of dropout's mask, that of the first head's first query
    seqlen_q,  # from one head's statistics to the next
    q_strides,
    do_strides,
    terms,
    dropout,
    place,
    shape,
    band,
    scale,
    softcap,
    NEED_DK: tl.constexpr,
    NEED_DV: tl.constexpr,
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
    DESCRIBED: tl.constexpr,
    EDGE: tl.constexpr,
    ASK: tl.constexpr,
):
    """What BLOCK_M queries of one head of the group, from ``start`` on, add.

    Tiles are (keys, queries), so that P and dS are left operands as they stand. Keys past the end need no mask: each
    key's sums are its own, and theirs are not stored.
    """
    batch, sequence, head = place
    head = head + member.to(tl.int32)
    i = start + tl.arange(0, BLOCK_M)
    j = start_k + tl.arange(0, BLOCK_N)
    if DESCRIBED:
        q_head = Q
        do_head = DO
    else:
        q_head = Q + member * q_strides[1]
        do_head = DO + member * do_strides[1]
    of_queries = (batch, head)
    at = member * seqlen_q
    do = load_tile(do_head, of_queries, start, shape[0], do_strides[2], D_V, BLOCK_M, BLOCK_DV, True, DESCRIBED)
    q = load_tile(q_head, of_queries, start, shape[0], q_strides[2], D_K, BLOCK_M, BLOCK_DK, True, DESCRIBED)
    if NEED_DK:
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        if dropout is None:
            dp -= tl.load(DELTA + at + i, mask=i < shape[0], other=0.0)[None, :]
    kq = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    s, plain, slope = scores(
        kq, terms, (sequence, head), i[None, :], j[:, None], shape, band, scale, softcap,
        SOFTCAP, LEFT, RIGHT, EDGE, ASK,
    )  # fmt: skip
    top, weight = softmax_of_row(TOP + at, WEIGHT + at if EXACT else None, i, shape[0])
    p = probabilities(s, top[None, :], weight[None, :], NATURAL, EXACT)
    used = p
    if dropout is not None:
        keep = tl.trans(kept(dropout, row + at + start, start_k, BLOCK_M, BLOCK_N))
        used = tl.where(keep != 0.0, p, 0.0)  # scaled after the sum, as in the forward
    if NEED_DV:
        dv = tl.dot(used.to(do.dtype), do, dv, input_precision=PRECISION)
    if NEED_DK:
        if dropout is not None:
            dp = dp * keep - tl.load(DELTA + at + i, mask=i < shape[0], other=0.0)[None, :]
        ds = p * dp
        ds = through_scores(ds, s, plain, slope, terms, (sequence, head), i[None, :], j[:, None], shape, SOFTCAP)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _sum_over_queries(
    dk, dv, k, v, Q, DO, TOP, WEIGHT, DELTA, first, last, start_k, row, seqlen_q, q_strides, do_strides,
    terms, dropout, place, shape, band, group, scale, softcap,
    NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, GROUPED: tl.constexpr, NATURAL: tl.constexpr, EXACT: tl.constexpr,
    SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIBED: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """The queries from ``first`` to ``last`` of every head of the group.

    A single loop, as two nested ones cost a third more registers.
    """
    steps = tl.cdiv(tl.maximum(last - first, 0), BLOCK_M)
    for step in range(group * steps):
        member, tile = _member_and_step(step, steps, GROUPED)
        dk, dv = _add_tile(
            dk, dv, k, v, Q, DO, TOP, WEIGHT, DELTA, member, first + tile * BLOCK_M, start_k, row, seqlen_q,
            q_strides, do_strides, terms, dropout, place, shape, band, scale, softcap,
            NEED_DK, NEED_DV, NATURAL, EXACT, SOFTCAP, LEFT, RIGHT, D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N,
            PRECISION, DESCRIBED, EDGE, True,
        )  # fmt: skip
    return dk, dv


@triton.jit
def _sum_over_listed(
    dk, dv, k, v, Q, DO, TOP, WEIGHT, DELTA, lists, start_k, row, seqlen_q, q_strides, do_strides,
    terms, dropout, place, shape, band, group, scale, softcap,
    NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, NATURAL: tl.constexpr, EXACT: tl.constexpr,
    SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """The listed queries of every head of the group, each of which may have a list of its own."""
    TILES: tl.constexpr = BLOCK // BLOCK_M
    _, sequence, head = place
    for step in range(group):
        member = tl.full((), 0, tl.int64) + step
        index, partly, wholly = listed(lists, sequence, head + step, start_k // BLOCK)
        for tile in range(partly * TILES):
            dk, dv = _add_tile(
                dk, dv, k, v, Q, DO, TOP, WEIGHT, DELTA, member, start_of(tile, index, TILES, BLOCK_M, True), start_k,
                row, seqlen_q, q_strides, do_strides, terms, dropout, place, shape, band, scale, softcap,
                NEED_DK, NEED_DV, NATURAL, EXACT, SOFTCAP, LEFT, RIGHT, D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N,
                PRECISION, DESCRIBED, True, True,
            )  # fmt: skip
        for tile in range(partly * TILES, (partly + wholly) * TILES):
            dk, dv = _add_tile(
                dk, dv, k, v, Q, DO, TOP, WEIGHT, DELTA, member, start_of(tile, index, TILES, BLOCK_M, True), start_k,
                row, seqlen_q, q_strides, do_strides, terms, dropout, place, shape, band, scale, softcap,
                NEED_DK, NEED_DV, NATURAL, EXACT, SOFTCAP, LEFT, RIGHT, D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N,
                PRECISION, DESCRIBED, False, False,
            )  # fmt: skip
    return dk, dv


@triton.jit
def gradient_of_keys(
    program,
    programs,
    Q,
    K,
    V,
    DO,
    TOP,
    WEIGHT,
    DELTA,
    DK,  # as K; None where it is not wanted
    DV,  # as V; None where it is not wanted
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    dk_strides,
    dv_strides,
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
    dk_scale,
    GROUPED: tl.constexpr,  # group > 1
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
    DESCRIBED: tl.constexpr,  # Q and DO are tensor descriptors
):
    """What one program does: it owns BLOCK_N keys of one key head, and sums over the query heads that read it.

    The first keys are seen by the most queries, so that causal programs begin with the longest.
    """
    NEED_DK: tl.constexpr = DK is not None
    NEED_DV: tl.constexpr = DV is not None
    batch, sequence, kv_head, first, begin, length = tile_of(
        program, programs, starts_k, count, heads // group, seqlen_k, section, False, BLOCK_N
    )
    head = kv_head * group
    if DESCRIBED:
        q_head = Q
        do_head = DO
    else:
        q_head = head_of(Q, batch, head, q_strides)
        do_head = head_of(DO, batch, head, do_strides)
    k_head = head_of(K, batch, kv_head, k_strides) + begin.to(tl.int64) * k_strides[2]
    v_head = head_of(V, batch, kv_head, v_strides) + begin.to(tl.int64) * v_strides[2]
    row = (batch.to(tl.int64) * heads + head) * seqlen_q
    queries = seqlen_q
    if starts_q is not None:
        begin_q, queries = bounds_of(starts_q, sequence, count, seqlen_q)
        q_head += begin_q.to(tl.int64) * q_strides[2]
        do_head += begin_q.to(tl.int64) * do_strides[2]
        row += begin_q
        queries = tl.where((sequence < count) & (first < length), queries, 0)
    k = load_rows(k_head, first, length, k_strides[2], D_K, BLOCK_N, BLOCK_DK, True)
    v = load_rows(v_head, first, length, v_strides[2], D_V, BLOCK_N, BLOCK_DV, True)
    low, high, shift = band_of(queries, length, align, left, right)

    dk = tl.zeros((BLOCK_N, BLOCK_DK), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    if lists is not None:
        dk, dv = _sum_over_listed(
            dk, dv, k, v, q_head, do_head, TOP + row, WEIGHT + row if EXACT else None, DELTA + row,
            lists, first, row, seqlen_q, q_strides, do_strides, terms, dropout,
            (batch, sequence, head), (queries, length), (low, high, shift), group, scale, softcap,
            NEED_DK, NEED_DV, NATURAL, EXACT, SOFTCAP, LEFT, RIGHT,
            D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, BLOCK, DESCRIBED,
        )  # fmt: skip
    else:
        near, inner, whole, end = queries_of_keys(first, queries, low, high, LEFT, RIGHT, BLOCK_M, BLOCK_N)
        if RIGHT:
            dk, dv = _sum_over_queries(
                dk, dv, k, v, q_head, do_head, TOP + row, WEIGHT + row if EXACT else None, DELTA + row,
                near, tl.minimum(inner, end), first, row, seqlen_q, q_strides, do_strides, terms, dropout,
                (batch, sequence, head), (queries, length), (low, high, shift), group, scale, softcap,
                NEED_DK, NEED_DV, GROUPED, NATURAL, EXACT, SOFTCAP, LEFT, RIGHT,
                D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, DESCRIBED, True,
            )  # fmt: skip
        dk, dv = _sum_over_queries(
            dk, dv, k, v, q_head, do_head, TOP + row, WEIGHT + row if EXACT else None, DELTA + row,
            inner, whole, first, row, seqlen_q, q_strides, do_strides, terms, dropout,
            (batch, sequence, head), (queries, length), (low, high, shift), group, scale, softcap,
            NEED_DK, NEED_DV, GROUPED, NATURAL, EXACT, SOFTCAP, LEFT, RIGHT,
            D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, DESCRIBED, False,
        )  # fmt: skip
        if LEFT:
            dk, dv = _sum_over_queries(
                dk, dv, k, v, q_head, do_head, TOP + row, WEIGHT + row if EXACT else None, DELTA + row,
                tl.maximum(whole, inner), end, first, row, seqlen_q, q_strides, do_strides, terms, dropout,
                (batch, sequence, head), (queries, length), (low, high, shift), group, scale, softcap,
                NEED_DK, NEED_DV, GROUPED, NATURAL, EXACT, SOFTCAP, LEFT, RIGHT,
                D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, DESCRIBED, True,
            )  # fmt: skip
    if NEED_DK:
        dk_head = head_of(DK, batch, kv_head, dk_strides) + begin.to(tl.int64) * dk_strides[2]
        store_rows(dk_head, dk * dk_scale, first, length, dk_strides[2], D_K, BLOCK_N, BLOCK_DK)
    if NEED_DV:
        dv_head = head_of(DV, batch, kv_head, dv_strides) + begin.to(tl.int64) * dv_strides[2]
        if dropout is not None:
            dv = dv * dropout.scale
        store_rows(dv_head, dv, first, length, dv_strides[2], D_V, BLOCK_N, BLOCK_DV)


@triton.jit(do_not_specialize=["heads", "count", "seqlen_q", "seqlen_k", "align", "left", "right", "section"])
def backward_kv_kernel(
    Q, K, V, DO, TOP, WEIGHT, DELTA, DK, DV, q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides,
    terms, dropout, starts_q, starts_k, lists,
    heads, group, count, seqlen_q, seqlen_k, align, left, right, section, scale, softcap, dk_scale,
    GROUPED: tl.constexpr, NATURAL: tl.constexpr, EXACT: tl.constexpr, SOFTCAP: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """dk and dv; arguments as of :func:`gradient_of_keys`."""
    gradient_of_keys(
        tl.program_id(0), tl.num_programs(0), Q, K, V, DO, TOP, WEIGHT, DELTA, DK, DV,
        q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, terms, dropout, starts_q, starts_k, lists,
        heads, group, count, seqlen_q, seqlen_k, align, left, right, section, scale, softcap, dk_scale,
        GROUPED, NATURAL, EXACT, SOFTCAP, LEFT, RIGHT,
        D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, BLOCK, DESCRIBED,
    )  # fmt: skip
