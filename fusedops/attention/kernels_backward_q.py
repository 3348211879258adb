"""The gradient of attention's queries; the formulas are in kernels_backward."""

from __future__ import annotations

import triton
import triton.language as tl

from fusedops.attention.kernels_tiles import (
    head_of,
    keys_of_queries,
    load_rows,
    probabilities,
    scores,
    softmax_of_row,
    store_rows,
)


@triton.jit
def _sum_over_keys(
    dq,  # (BLOCK_M, BLOCK_DK) float32: Σ_j dS_ij k_j over the keys seen so far
    q,
    do,
    top,
    weight,
    delta,
    K,
    V,
    MASK,
    first,
    last,
    i,
    k_stride,
    v_stride,
    mask_strides,
    seqlen_q,
    seqlen_k,
    shift,
    scale,
    EXACT: tl.constexpr,
    MASK_KIND: tl.constexpr,
    MASK_PER_QUERY: tl.constexpr,
    CAUSAL: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    EDGE: tl.constexpr,
):
    """The key tiles first … last."""
    for start in range(first, last, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        k = load_rows(K, start, seqlen_k, k_stride, D_K, BLOCK_N, BLOCK_DK, EDGE)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s = scores(
            qk, MASK, mask_strides, i[:, None], j[None, :], seqlen_q, seqlen_k, shift, scale,
            MASK_KIND, MASK_PER_QUERY, CAUSAL, EDGE,
        )  # fmt: skip
        p = probabilities(s, top[:, None], weight[:, None], MASK_KIND, EXACT)
        v = load_rows(V, start, seqlen_k, v_stride, D_V, BLOCK_N, BLOCK_DV, EDGE)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["heads", "seqlen_q", "seqlen_k", "shift"])
def backward_q_kernel(
    Q,
    K,
    V,
    MASK,
    DO,
    TOP,
    TOTAL,
    DELTA,
    DQ,  # as Q
    q_strides,
    k_strides,
    v_strides,
    mask_strides,
    do_strides,
    dq_strides,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    shift,
    scale,
    dq_scale,
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
    """dq. A program owns BLOCK_M queries of one head."""
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    block = tl.program_id(0) % blocks
    pair = tl.program_id(0) // blocks
    if CAUSAL:
        block = blocks - 1 - block  # the longest first, so that the last programs to finish are short
    batch = pair // heads
    head = pair % heads
    first = block * BLOCK_M
    i = first + tl.arange(0, BLOCK_M)
    q = load_rows(head_of(Q, batch, head, q_strides), first, seqlen_q, q_strides[2], D_K, BLOCK_M, BLOCK_DK, True)
    do = load_rows(head_of(DO, batch, head, do_strides), first, seqlen_q, do_strides[2], D_V, BLOCK_M, BLOCK_DV, True)
    k_head = head_of(K, batch, head // group, k_strides)
    v_head = head_of(V, batch, head // group, v_strides)
    mask_head = head_of(MASK, batch, head, mask_strides)
    statistics = pair.to(tl.int64) * seqlen_q
    top, weight = softmax_of_row(TOP + statistics, TOTAL + statistics, i, seqlen_q, MASK_KIND, EXACT)
    delta = tl.load(DELTA + statistics + i, mask=i < seqlen_q, other=0.0)

    dq = tl.zeros((BLOCK_M, BLOCK_DK), tl.float32)
    whole, end = keys_of_queries(first, seqlen_k, shift, CAUSAL, BLOCK_M, BLOCK_N)
    dq = _sum_over_keys(
        dq, q, do, top, weight, delta, k_head, v_head, mask_head, 0, whole,
        i, k_strides[2], v_strides[2], mask_strides, seqlen_q, seqlen_k, shift, scale,
        EXACT, MASK_KIND, MASK_PER_QUERY, CAUSAL, D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_N, PRECISION, EDGE=False,
    )  # fmt: skip
    dq = _sum_over_keys(
        dq, q, do, top, weight, delta, k_head, v_head, mask_head, whole, end,
        i, k_strides[2], v_strides[2], mask_strides, seqlen_q, seqlen_k, shift, scale,
        EXACT, MASK_KIND, MASK_PER_QUERY, CAUSAL, D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_N, PRECISION, EDGE=True,
    )  # fmt: skip
    dq_head = head_of(DQ, batch, head, dq_strides)
    store_rows(dq_head, dq * dq_scale, first, seqlen_q, dq_strides[2], D_K, BLOCK_M, BLOCK_DK)
