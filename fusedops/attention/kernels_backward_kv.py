"""The gradients of attention's keys and values; the formulas are in kernels_backward."""

from __future__ import annotations

import triton
import triton.language as tl

from fusedops.attention.kernels_tiles import head_of, load_rows, probabilities, scores, softmax_of_row, store_rows


@triton.jit
def _member_and_tile(step, tiles, GROUPED: tl.constexpr):
    """Which head of the group, and which of its tiles, a step is: first all tiles of the first head."""
    member = tl.full((), 0, tl.int64)
    tile = step
    if GROUPED:
        member += step // tiles
        tile = step % tiles
    return member, tile


@triton.jit
def _sum_over_queries(
    dk,  # (BLOCK_N, BLOCK_DK) float32: Σ_i dS_ij q_i over the queries seen so far
    dv,  # (BLOCK_N, BLOCK_DV) float32: Σ_i P_ij do_i
    k,
    v,
    Q,  # this and the next: of the group's first head
    DO,
    MASK,
    TOP,
    TOTAL,
    DELTA,
    first,
    last,
    j,
    q_strides,
    do_strides,
    mask_strides,
    group,
    seqlen_q,
    seqlen_k,
    shift,
    scale,
    NEED_DK: tl.constexpr,
    NEED_DV: tl.constexpr,
    GROUPED: tl.constexpr,
    EXACT: tl.constexpr,
    MASK_KIND: tl.constexpr,
    MASK_PER_QUERY: tl.constexpr,
    CAUSAL: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The query tiles first … last of every head of the group.

    Tiles are (keys, queries), so that P and dS are left operands as they stand. Keys past the end need no mask: each
    key's sums are its own, and theirs are not stored. A single loop, as two nested ones cost a third more registers.
    """
    tiles = tl.cdiv(tl.maximum(last - first, 0), BLOCK_M)
    for step in range(group * tiles):
        member, tile = _member_and_tile(step, tiles, GROUPED)
        start = first + tile * BLOCK_M
        i = start + tl.arange(0, BLOCK_M)
        q = load_rows(Q + member * q_strides[1], start, seqlen_q, q_strides[2], D_K, BLOCK_M, BLOCK_DK, True)
        kq = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        s = scores(
            kq, MASK + member * mask_strides[1], mask_strides, i[None, :], j[:, None],
            seqlen_q, seqlen_k, shift, scale, MASK_KIND, MASK_PER_QUERY, CAUSAL, EDGE=CAUSAL,
        )  # fmt: skip
        row = member * seqlen_q
        top, weight = softmax_of_row(TOP + row, TOTAL + row, i, seqlen_q, MASK_KIND, EXACT)
        p = probabilities(s, top[None, :], weight[None, :], MASK_KIND, EXACT)
        do = load_rows(DO + member * do_strides[1], start, seqlen_q, do_strides[2], D_V, BLOCK_M, BLOCK_DV, True)
        if NEED_DV:
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        if NEED_DK:
            delta = tl.load(DELTA + row + i, mask=i < seqlen_q, other=0.0)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["heads", "seqlen_q", "seqlen_k", "shift"])
def backward_kv_kernel(
    Q,
    K,
    V,
    MASK,
    DO,
    TOP,
    TOTAL,
    DELTA,
    DK,  # as K
    DV,  # as V
    q_strides,
    k_strides,
    v_strides,
    mask_strides,
    do_strides,
    dk_strides,
    dv_strides,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    shift,
    scale,
    dk_scale,
    NEED_DK: tl.constexpr,
    NEED_DV: tl.constexpr,
    GROUPED: tl.constexpr,  # group > 1
    EXACT: tl.constexpr,
    MASK_KIND: tl.constexpr,
    MASK_PER_QUERY: tl.constexpr,
    CAUSAL: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk and dv. A program owns BLOCK_N keys of one key head and sums over the ``group`` query heads that read it."""
    blocks = tl.cdiv(seqlen_k, BLOCK_N)
    pair = tl.program_id(0) // blocks
    kv_heads = heads // group
    batch = pair // kv_heads
    kv_head = pair % kv_heads
    first = tl.program_id(0) % blocks * BLOCK_N
    j = first + tl.arange(0, BLOCK_N)
    k = load_rows(head_of(K, batch, kv_head, k_strides), first, seqlen_k, k_strides[2], D_K, BLOCK_N, BLOCK_DK, True)
    v = load_rows(head_of(V, batch, kv_head, v_strides), first, seqlen_k, v_strides[2], D_V, BLOCK_N, BLOCK_DV, True)
    dk = tl.zeros((BLOCK_N, BLOCK_DK), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)

    head = kv_head * group
    q_head = head_of(Q, batch, head, q_strides)
    do_head = head_of(DO, batch, head, do_strides)
    mask_head = head_of(MASK, batch, head, mask_strides)
    statistics = (batch.to(tl.int64) * heads + head) * seqlen_q
    whole = 0  # the first query that sees all of the keys, rounded up to a tile
    if CAUSAL:
        seeing = tl.maximum(first - shift, 0) // BLOCK_M * BLOCK_M  # the first that sees one of them
        whole = tl.cdiv(tl.maximum(first + BLOCK_N - 1 - shift, 0), BLOCK_M) * BLOCK_M
        dk, dv = _sum_over_queries(
            dk, dv, k, v, q_head, do_head, mask_head, TOP + statistics, TOTAL + statistics, DELTA + statistics,
            seeing, tl.minimum(whole, seqlen_q), j, q_strides, do_strides, mask_strides, group, seqlen_q, seqlen_k,
            shift, scale, NEED_DK, NEED_DV, GROUPED, EXACT, MASK_KIND, MASK_PER_QUERY, True,
            D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, PRECISION,
        )  # fmt: skip
    dk, dv = _sum_over_queries(
        dk, dv, k, v, q_head, do_head, mask_head, TOP + statistics, TOTAL + statistics, DELTA + statistics,
        whole, seqlen_q, j, q_strides, do_strides, mask_strides, group, seqlen_q, seqlen_k,
        shift, scale, NEED_DK, NEED_DV, GROUPED, EXACT, MASK_KIND, MASK_PER_QUERY, False,
        D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, PRECISION,
    )  # fmt: skip
    if NEED_DK:
        dk_head = head_of(DK, batch, kv_head, dk_strides)
        store_rows(dk_head, dk * dk_scale, first, seqlen_k, dk_strides[2], D_K, BLOCK_N, BLOCK_DK)
    if NEED_DV:
        dv_head = head_of(DV, batch, kv_head, dv_strides)
        store_rows(dv_head, dv, first, seqlen_k, dv_strides[2], D_V, BLOCK_N, BLOCK_DV)
