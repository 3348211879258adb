"""Attention's forward as tutorials write it in Triton: what the attention family's kernel is compared with.

A tile of queries a program, one loop over tiles of keys with the online softmax (Dao 2023, "FlashAttention-2",
algorithm 1), pointers that are moved along, masks wherever a tile might need one. It takes head sizes that are powers
of two, sizes for which int32 offsets do, and a positive scale. A second form takes only lengths that are multiples of
the tiles, as some tutorials do: its loop has no mask but that of causality.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl


@triton.jit
def textbook_attention_kernel(
    Q,  # (batch, heads, seqlen, D), the last stride 1; so the others
    K,  # (batch, heads / group, seqlen, D)
    V,  # (batch, heads / group, seqlen, D)
    OUT,  # (batch, heads, seqlen, D)
    LSE,  # (batch, heads, seqlen) float32, contiguous
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_ob,
    stride_oh,
    stride_om,
    heads,
    group,
    seqlen,
    scale,  # of the scores in base 2: log₂e / √D
    CAUSAL: tl.constexpr,
    WHOLE: tl.constexpr,  # seqlen is a multiple of BLOCK_M and BLOCK_N
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out = softmax(scale · q kᵀ) v and its lse: each program owns BLOCK_M queries of one head."""
    block = tl.program_id(0)
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    q_at = Q + batch * stride_qb + head * stride_qh + m[:, None] * stride_qm + d[None, :]
    k_at = K + batch * stride_kb + head // group * stride_kh + n[None, :] * stride_kn + d[:, None]
    v_at = V + batch * stride_vb + head // group * stride_vh + n[:, None] * stride_vn + d[None, :]
    out_at = OUT + batch * stride_ob + head * stride_oh + m[:, None] * stride_om + d[None, :]
    lse_at = LSE + tl.program_id(1) * seqlen + m
    if WHOLE:
        q = tl.load(q_at)
    else:
        q = tl.load(q_at, mask=m[:, None] < seqlen, other=0.0)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    end = seqlen
    if CAUSAL:
        end = min(seqlen, (block + 1) * BLOCK_M)
    for start in range(0, end, BLOCK_N):
        if WHOLE:
            k = tl.load(k_at)
        else:
            k = tl.load(k_at, mask=start + n[None, :] < seqlen, other=0.0)
        s = tl.dot(q, k)
        if CAUSAL or not WHOLE:
            if CAUSAL:  # no query is past the end, and so no key that it sees
                seen = m[:, None] >= start + n[None, :]
            else:
                seen = start + n[None, :] < seqlen
            s = tl.where(seen, s * scale, float("-inf"))
            new_top = tl.maximum(top, tl.max(s, 1))
            p = tl.exp2(s - new_top[:, None])
        else:
            # The maximum of the products first: then scaling and subtraction are one fused operation.
            new_top = tl.maximum(top, tl.max(s, 1) * scale)
            p = tl.exp2(s * scale - new_top[:, None])
        alpha = tl.exp2(top - new_top)
        total = total * alpha + tl.sum(p, 1)
        if WHOLE:
            v = tl.load(v_at)
        else:
            v = tl.load(v_at, mask=start + n[:, None] < seqlen, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        top = new_top
        k_at += BLOCK_N * stride_kn
        v_at += BLOCK_N * stride_vn
    out = (acc / total[:, None]).to(OUT.dtype.element_ty)
    lse = (top + tl.log2(total)) * 0.6931471805599453
    if WHOLE:
        tl.store(out_at, out)
        tl.store(lse_at, lse)
    else:
        tl.store(out_at, out, mask=m[:, None] < seqlen)
        tl.store(lse_at, lse, mask=m < seqlen)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    tile: tuple[int, int],
    options: Mapping[str, int | bool],
    whole: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention's output and the log of its softmax's denominator.

    Args:
        q: (batch, heads, seqlen, size), last stride 1, as the others.
        k, v: (batch, kv_heads, seqlen, size); ``kv_heads`` divides ``heads``.
        tile: (queries, keys).
        options: of the launch: warps and stages.
        whole: the form that takes only a ``seqlen`` which is a multiple of the tile's sides.
    """
    batch, heads, seqlen, size = q.shape
    out = torch.empty_like(q)
    lse = torch.empty((batch, heads, seqlen), dtype=torch.float32, device=q.device)
    strides = [stride for tensor in (q, k, v, out) for stride in tensor.stride()[:3]]
    textbook_attention_kernel[(triton.cdiv(seqlen, tile[0]), batch * heads)](
        q, k, v, out, lse, *strides, heads, heads // k.shape[1], seqlen, 1.4426950408889634 / size**0.5,
        CAUSAL=causal, WHOLE=whole, D=size, BLOCK_M=tile[0], BLOCK_N=tile[1], **options,
    )  # fmt: skip
    return out, lse
