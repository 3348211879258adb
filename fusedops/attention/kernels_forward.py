"""The forward pass of attention: FlashAttention-2 (Dao 2023, algorithm 1) in Triton, and its launcher."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.attention.kernels_tiles import exponential, head_of, keys_of_queries, load_rows, scores, store_rows
from fusedops.attention.operands import Operands, strides_of
from fusedops.attention.reference import empty_heads
from fusedops.runtime.device import device_guard
from fusedops.runtime.launch import ceil_div


@triton.jit
def _attend(
    acc,  # (BLOCK_M, BLOCK_DV) float32: Σ_j exp(s_ij - top_i) v_j over the keys seen so far
    total,  # (BLOCK_M,) float32: Σ_j exp(s_ij - top_i)
    top,  # (BLOCK_M,) float32: max_j s_ij
    q,
    K,
    V,
    MASK,
    first,
    last,
    rows,
    k_stride,
    v_stride,
    mask_strides,
    seqlen_q,
    seqlen_k,
    shift,
    scale,
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
    """The online softmax over the key tiles first … last."""
    for start in range(first, last, BLOCK_N):
        k = load_rows(K, start, seqlen_k, k_stride, D_K, BLOCK_N, BLOCK_DK, EDGE)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if EDGE or MASK_KIND != "none":
            j = start + tl.arange(0, BLOCK_N)
            s = scores(
                qk, MASK, mask_strides, rows[:, None], j[None, :], seqlen_q, seqlen_k, shift, scale,
                MASK_KIND, MASK_PER_QUERY, CAUSAL, EDGE,
            )  # fmt: skip
            new_top = tl.maximum(top, tl.max(s, axis=1))
            # A row that has seen no key yet has top = -inf, and inf - inf is NaN.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = exponential(s - base[:, None], MASK_KIND)
            alpha = exponential(top - base, MASK_KIND)
        else:
            # scale ≥ 0, so the maximum may be taken before it, and scaling and subtraction are one fused operation.
            new_top = tl.maximum(top, tl.max(qk, axis=1) * scale)
            p = tl.exp2(qk * scale - new_top[:, None])
            alpha = tl.exp2(top - new_top)
        total = total * alpha + tl.sum(p, axis=1)
        v = load_rows(V, start, seqlen_k, v_stride, D_V, BLOCK_N, BLOCK_DV, EDGE)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize=["heads", "seqlen_q", "seqlen_k", "shift"])
def forward_kernel(
    Q,  # (batch, heads, seqlen_q, D_K)
    K,  # (batch, heads / group, seqlen_k, D_K)
    V,  # (batch, heads / group, seqlen_k, D_V)
    MASK,  # broadcast to (batch, heads, seqlen_q, seqlen_k) by strides of 0
    OUT,  # (batch, heads, seqlen_q, D_V)
    LSE,  # (batch, heads, seqlen_q) float32, contiguous
    TOP,  # as LSE: the maximum of a row's scores
    TOTAL,  # as LSE: Σ exponential(s - TOP)
    q_strides,
    k_strides,
    v_strides,
    mask_strides,
    out_strides,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    shift,
    scale,  # ≥ 0
    NEGATE: tl.constexpr,  # the scale is -scale
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
    """out = softmax(s) v and lse = log Σ exp(s). A program owns BLOCK_M queries of one head."""
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    block = tl.program_id(0) % blocks
    pair = tl.program_id(0) // blocks
    if CAUSAL:
        block = blocks - 1 - block  # the longest first, so that the last programs to finish are short
    batch = pair // heads
    head = pair % heads
    first = block * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    q = load_rows(head_of(Q, batch, head, q_strides), first, seqlen_q, q_strides[2], D_K, BLOCK_M, BLOCK_DK, True)
    if NEGATE:
        q = -q
    k_head = head_of(K, batch, head // group, k_strides)
    v_head = head_of(V, batch, head // group, v_strides)
    mask_head = head_of(MASK, batch, head, mask_strides)

    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    whole, end = keys_of_queries(first, seqlen_k, shift, CAUSAL, BLOCK_M, BLOCK_N)
    acc, total, top = _attend(
        acc, total, top, q, k_head, v_head, mask_head, 0, whole, rows, k_strides[2], v_strides[2], mask_strides,
        seqlen_q, seqlen_k, shift, scale, MASK_KIND, MASK_PER_QUERY, CAUSAL,
        D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_N, PRECISION, EDGE=False,
    )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, q, k_head, v_head, mask_head, whole, end, rows, k_strides[2], v_strides[2], mask_strides,
        seqlen_q, seqlen_k, shift, scale, MASK_KIND, MASK_PER_QUERY, CAUSAL,
        D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_N, PRECISION, EDGE=True,
    )  # fmt: skip

    # A row that sees no key has top = -inf and total = 0: out = 0, lse = -inf.
    divisor = tl.where(total == 0.0, 1.0, total)
    if MASK_KIND == "float":
        lse = top + tl.log(divisor)
    else:
        lse = (top + tl.log2(divisor)) * 0.6931471805599453
    statistics = pair.to(tl.int64) * seqlen_q + rows
    tl.store(LSE + statistics, lse, mask=rows < seqlen_q)
    tl.store(TOP + statistics, top, mask=rows < seqlen_q)
    tl.store(TOTAL + statistics, total, mask=rows < seqlen_q)
    out_head = head_of(OUT, batch, head, out_strides)
    store_rows(out_head, acc / divisor[:, None], first, seqlen_q, out_strides[2], D_V, BLOCK_M, BLOCK_DV)


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    causal: int,
    scale: float,
    allow_tf32: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate and launch; arguments and results as :func:`fusedops.attention.reference.attention`.

    ``allow_tf32``: float32 operands of products may be rounded to TF32.
    """
    batch, heads, seqlen_q, _ = q.shape
    out = empty_heads(q, (batch, heads, seqlen_q, v.shape[3]))
    lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)
    statistics = torch.empty((2, batch, heads, seqlen_q), dtype=torch.float32, device=q.device)
    if q.numel() == 0 or k.numel() == 0:  # no query, or no key that one could see
        return out.zero_(), lse.fill_(float("-inf")), statistics.zero_()
    operands = Operands.of(q, k, v, attn_mask, causal, abs(scale), allow_tf32)
    config = operands.config("forward")
    with device_guard(q):
        forward_kernel[(ceil_div(seqlen_q, config.block_m) * batch * heads,)](
            operands.q, operands.k, operands.v, operands.mask, out, lse, *statistics,
            *operands.strides, strides_of(out), *operands.sizes, operands.scale,
            NEGATE=scale < 0, **operands.flags("forward", config),
        )  # fmt: skip
    return out, lse, statistics
