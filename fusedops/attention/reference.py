"""The definition of attention in plain torch: what the kernels are compared with, and the path without them."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch

from fusedops.runtime.precision import autocast_dtype

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

NO_CAUSAL, TOP_LEFT, BOTTOM_RIGHT = 0, 1, 2

_dot_product_attention = torch._C._nn.scaled_dot_product_attention  # what torch.nn.functional's is


def empty_heads(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """An uninitialised (batch, heads, length, size) whose memory lies as (batch, length, heads, size).

    So do models hold it before and after attention: their transposes and reshapes are then views.
    """
    return torch.empty_permuted(shape, (0, 2, 1, 3), dtype=like.dtype, device=like.device)


def empty_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    needs: tuple[bool, bool, bool, bool],
) -> Gradients:
    """Uninitialised gradients of (q, k, v, attn_mask); one that is not needed has shape (0,)."""
    need_q, need_k, need_v, need_mask = needs
    return (
        empty_heads(q, q.shape) if need_q else q.new_empty(0),
        empty_heads(k, k.shape) if need_k else k.new_empty(0),
        empty_heads(v, v.shape) if need_v else v.new_empty(0),
        attn_mask.new_empty(attn_mask.shape) if need_mask and attn_mask is not None else q.new_empty(0),
    )


def causal_mask(seqlen_q: int, seqlen_k: int, causal: int, device: torch.device) -> torch.Tensor:
    """(seqlen_q, seqlen_k) bool, True where query i sees key j: j ≤ i + shift."""
    shift = seqlen_k - seqlen_q if causal == BOTTOM_RIGHT else 0
    return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device).tril(shift)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _no_autocast(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Products in the compute dtype, not in autocast's."""
    kind = tensor.device.type
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def _scores(
    q: torch.Tensor, k: torch.Tensor, attn_mask: torch.Tensor | None, causal: int, scale: float
) -> torch.Tensor:
    """scale · q·k + mask, −inf where a query does not see a key. In the dtype of q and k, heads already equal."""
    s = scale * (q @ k.transpose(-1, -2))
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else s + attn_mask.to(s.dtype)
    if causal != NO_CAUSAL:
        s = s.masked_fill(~causal_mask(s.shape[-2], s.shape[-1], causal, s.device), float("-inf"))
    return s


def _shared(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values as each query head reads them: query head h reads head h // group."""
    return x if x.shape[1] in (heads, 0) else x.repeat_interleave(heads // x.shape[1], dim=1)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    causal: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``out = softmax(scale · q kᵀ + mask) v`` of each head (Vaswani et al. 2017, equation 1), differentiable.

    Args:
        q: (batch, heads, seqlen_q, d_k).
        k: (batch, kv_heads, seqlen_k, d_k); query head h reads key head h // (heads // kv_heads).
        v: (batch, kv_heads, seqlen_k, d_v).
        attn_mask: four dimensions, each 1 or that of (batch, heads, seqlen_q, seqlen_k). bool: True where the query
            sees the key. Floating: added to the scores.
        causal: NO_CAUSAL, TOP_LEFT (query i sees keys j ≤ i) or BOTTOM_RIGHT (j ≤ i + seqlen_k - seqlen_q).
        scale: any real number.

    Returns:
        out: (batch, heads, seqlen_q, d_v), dtype of q; 0 for a query that sees no key.
        lse: (batch, heads, seqlen_q), log Σ exp(scores), float32 (float64 for float64 inputs); −inf for such a query.
        statistics: (2, batch, heads, seqlen_q), what the backward needs of a row: the maximum of its scores (0 for such
            a query) and Σ exp(scores - maximum). The kernels keep them in a unit of their own.
    """
    compute = compute_dtype(q.dtype)
    with _no_autocast(q):
        s = _scores(q.to(compute), _shared(k, q.shape[1]).to(compute), attn_mask, causal, scale)
        with torch.no_grad():  # any shift gives the same result; the maximum keeps exp from overflowing
            top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_zeros((*s.shape[:-1], 1))
            top = top.masked_fill(top == float("-inf"), 0.0)
        p = torch.exp(s - top)
        total = p.sum(-1, keepdim=True)
        empty = total == 0
        divisor = total.masked_fill(empty, 1.0)
        out = (p / divisor) @ _shared(v, q.shape[1]).to(compute)
        lse = (divisor.log() + top).masked_fill(empty, float("-inf")).squeeze(-1)
        statistics = torch.stack((top, total.detach())).squeeze(-1)
    return out.to(q.dtype), lse, statistics


def attention_backward(
    grad_output: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    out: torch.Tensor | None,
    statistics: torch.Tensor,
    causal: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of :func:`attention` with respect to q, k, v and a float mask, in the compute dtype.

    The formulas are in kernels_backward. Arguments as those and the results of :func:`attention`; ``out`` may be None
    where v's gradient alone is wanted.
    """
    compute = compute_dtype(q.dtype)
    batch, heads = q.shape[:2]
    kv_heads, seqlen_k = k.shape[1:3]
    q, do = q.to(compute), grad_output.to(compute)
    k, v = _shared(k, heads).to(compute), _shared(v, heads).to(compute)
    with _no_autocast(q):
        s = _scores(q, k, attn_mask, causal, scale)
        top, total = statistics[..., None]
        p = torch.exp(s - top) / total.masked_fill(total == 0, 1.0)
        delta = 0.0 if out is None else (do * out.to(compute)).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta = delta - grad_lse[..., None]
        ds = p * (do @ v.transpose(-1, -2) - delta)
        dq = scale * (ds @ k)
        dk = scale * (ds.transpose(-1, -2) @ q)
        dv = p.transpose(-1, -2) @ do
    if kv_heads != heads:
        dk, dv = (x.view(batch, kv_heads, -1, seqlen_k, x.shape[-1]).sum(2) for x in (dk, dv))
    if attn_mask is None or attn_mask.dtype == torch.bool:
        return dq, dk, dv, None
    return dq, dk, dv, ds.sum_to_size(attn_mask.shape)


def torch_mask(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """The mask in a dtype that torch's operator takes."""
    if mask is None or mask.dtype in (torch.bool, torch.float32, q.dtype):
        return mask
    return mask.float()


def attention_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    causal: int,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The torch backend where lse is asked for, which torch's operator does not give."""
    dtype = autocast_dtype(q)
    if scale is None:
        scale = 1.0 / math.sqrt(max(q.shape[-1], 1))
    return attention(q.to(dtype), k.to(dtype), v.to(dtype), attn_mask, causal, scale)[:2]


def torch_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    causal: int,
    scale: float | None,
) -> torch.Tensor:
    """The torch backend: torch's own fused operator, which means the same where it is asked in the right way.

    Its softmax gives a query that sees no key zeros, and zero gradients, as :func:`attention` does (torch ≥ 2.5).
    """
    if attn_mask is not None and (q.numel() == 0 or k.numel() == 0):
        # torch's operator leaves a mask that it does not need out of the graph: its gradient would be None, not zero.
        return attention_with_lse(q, k, v, attn_mask, causal, scale)[0]
    is_causal = False
    if causal != NO_CAUSAL:
        seqlen_q, seqlen_k = q.shape[2], k.shape[2]
        top_left = causal == TOP_LEFT or seqlen_q == seqlen_k
        if top_left and attn_mask is None:
            is_causal = True
        else:
            seen = causal_mask(seqlen_q, seqlen_k, causal, q.device)
            if attn_mask is None:
                attn_mask = seen
            elif attn_mask.dtype == torch.bool:
                attn_mask = attn_mask & seen
            else:
                attn_mask = attn_mask.masked_fill(~seen, float("-inf"))
    grouped = False  # not an expression: while torch.compile traces, a comparison of sizes is no bool
    if q.shape[1] != k.shape[1]:
        grouped = True
    mask = torch_mask(attn_mask, q)
    return _dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)
