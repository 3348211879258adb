"""The public functions of the attention family: check the arguments, choose a backend, call the operator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fusedops.attention import reference
from fusedops.attention.arguments import Causal, check_attention, check_scaled_dot_product_attention
from fusedops.attention.autograd import attention_op
from fusedops.attention.tuning import WIDE, too_small
from fusedops.runtime.backend import device_reasons, explainable, might_use_triton, use_triton
from fusedops.runtime.device import device_facts
from fusedops.runtime.precision import autocast_dtype, tf32_allowed

# The kernels hold whole rows of q, k and v.
_MAX_SIZE = 256

_torch_attention = torch._C._nn.scaled_dot_product_attention


def _unsupported(q: torch.Tensor, v: torch.Tensor) -> list[str]:
    """Every reason why the attention kernels cannot take these tensors."""
    reasons = device_reasons(q.device, (autocast_dtype(q),))
    for what, size in (("queries and keys", q.shape[-1]), ("values", v.shape[-1])):
        if not 1 <= size <= _MAX_SIZE:
            reasons.append(f"head size {size} of {what}: the kernels take 1 to {_MAX_SIZE}")
    if not reasons:
        small, wide = _device_reasons(q.device.type, q.device.index)
        if small is not None:
            reasons.append(small)
        elif wide is not None and autocast_dtype(q) == torch.float32 and min(q.shape[-1], v.shape[-1]) > WIDE:
            reasons.append(wide)
    return reasons


def _device_reasons(kind: str, index: int | None) -> tuple[str | None, str | None]:
    """Why the kernels cannot serve any heads on a device, and why not wide ones of float32."""
    facts = device_facts(torch.device(kind, index or 0))
    return too_small(facts, 16, 16, 2), too_small(facts, _MAX_SIZE, _MAX_SIZE, 4)


# A device's facts never change: traced code takes the answer as a constant.
_device_reasons._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    causal: int,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the operator; a mask has four dimensions."""
    dtype = autocast_dtype(q)
    if attn_mask is not None and attn_mask.dtype == torch.float64 and dtype != torch.float64:
        attn_mask = attn_mask.float()
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    out, lse, _ = attention_op(q, k, v, attn_mask, causal, scale, tf32_allowed(q))
    return out, lse


def _attention_reasons(  # type: ignore[no-untyped-def]
    q, k, v, *, causal=False, attn_mask=None, scale=None, return_lse=False
):
    check_attention(q, k, v, causal, attn_mask, scale, return_lse)
    return q.device, _unsupported(q, v)


@explainable(_attention_reasons)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = False,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Multi-head attention, ``softmax(scale · q kᵀ + attn_mask) v`` in each head.

    Vaswani et al. 2017, "Attention Is All You Need", equation 1, computed tile by tile as in FlashAttention-2 (Dao
    2023): no score is ever stored. Softmax and sums in float32; the backward is deterministic.

    Args:
        q: (batch, heads, seqlen_q, size); float32, float16 or bfloat16 (float64 on the torch backend), any strides.
            The kernels take head sizes from 1 to 256, here and in v.
        k: (batch, kv_heads, seqlen_k, size). ``kv_heads`` divides ``heads``: query head h reads key head
            ``h // (heads // kv_heads)`` (grouped-query attention).
        v: (batch, kv_heads, seqlen_k, size_v).
        causal: which keys a query may see. False: all. True or ``"top_left"``, torch's rule: query i sees keys j ≤ i.
            ``"bottom_right"``, what decoding wants: j ≤ i + seqlen_k - seqlen_q, so that the last query sees all.
        attn_mask: broadcastable to (batch, heads, seqlen_q, seqlen_k). bool: True where the query may see the key.
            Floating: added to the scaled scores; its gradient is summed over what was broadcast. Together with
            ``causal`` both hold.
        scale: factor of the scores, any real number. None: 1/√size.
        return_lse: return the logarithm of the softmax's denominator too.

    Returns:
        out: (batch, heads, seqlen_q, size_v), dtype of q (autocast's dtype under autocast, as torch's). A query that
            sees no key gets zeros, and zero gradients.
        lse: with ``return_lse``, (batch, heads, seqlen_q), natural logarithm of Σ exp(scores), float32 (float64 for
            float64 inputs); −inf for a query that sees no key. It has a gradient.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device; the message names it.

    Example:
        >>> import torch, fusedops
        >>> q, k, v = torch.randn(1, 8, 5, 64), torch.randn(1, 2, 7, 64), torch.randn(1, 2, 7, 32)
        >>> fusedops.attention(q, k, v, causal="bottom_right").shape
        torch.Size([1, 8, 5, 32])
    """
    code = check_attention(q, k, v, causal, attn_mask, scale, return_lse)
    if attn_mask is not None and attn_mask.dim() < 4:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    if might_use_triton(q.device) and use_triton("attention", _unsupported(q, v), q.device):
        out, lse = _run(q, k, v, attn_mask, code, scale)
    elif return_lse:
        out, lse = reference.attention_with_lse(q, k, v, attn_mask, code, scale)
    else:
        return reference.torch_attention(q, k, v, attn_mask, code, scale)
    return (out, lse) if return_lse else out


def _sdpa_unsupported(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, enable_gqa: bool
) -> list[str]:
    reasons = _unsupported(query, value)
    if dropout_p > 0.0:
        reasons.append("dropout_p > 0: the kernels have no dropout")
    if enable_gqa and key.shape[-3] != value.shape[-3]:
        reasons.append("key and value differ in their number of heads")
    return reasons


def _sdpa_reasons(  # type: ignore[no-untyped-def]
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    check_scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return query.device, _sdpa_unsupported(query, key, value, dropout_p, enable_gqa)


def _four_dimensions(tensor: torch.Tensor, batch: Sequence[int], heads: int) -> torch.Tensor:
    """(…, heads, length, size) as (batch, heads, length, size), its batch dimensions broadcast; a view where it can."""
    if tensor.dim() == 4 and len(batch) == 1 and tensor.shape[0] == batch[0] and tensor.shape[1] == heads:
        return tensor
    length, size = tensor.shape[-2:]
    return tensor.expand(*batch, heads, length, size).reshape(math.prod(batch), heads, length, size)


def _four_dimensional_mask(mask: torch.Tensor, batch: Sequence[int]) -> torch.Tensor:
    """The same for a mask, whose dimensions of size 1 stay so where they can."""
    if mask.dim() < 4:
        return mask[(None,) * (4 - mask.dim())]
    if mask.dim() == 4 and len(batch) == 1:
        return mask
    if math.prod(mask.shape[:-3]) == 1:
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*batch, *mask.shape[-3:]).reshape(math.prod(batch), *mask.shape[-3:])


@explainable(_sdpa_reasons)
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Multi-head attention with the signature of :func:`torch.nn.functional.scaled_dot_product_attention`.

    The same operator as :func:`attention`, in torch's terms: any number of leading dimensions, which broadcast.

    Args:
        query: (…, heads, seqlen_q, size); float32, float16 or bfloat16 (float64 on the torch backend), any strides.
        key: (…, heads, seqlen_k, size); with ``enable_gqa``, its number of heads divides query's.
        value: (…, heads, seqlen_k, size_v); as key.
        attn_mask: broadcastable to (…, heads, seqlen_q, seqlen_k). bool: True where the query may see the key.
            Floating: added to the scaled scores, with a gradient.
        dropout_p: probability that a softmax weight is dropped. Above zero the torch backend serves the call.
        is_causal: query i sees keys j ≤ i. Not together with ``attn_mask``.
        scale: factor of the scores, any real number. None: 1/√size.
        enable_gqa: query head h reads key and value head ``h // (heads // kv_heads)``.

    Returns:
        (…, heads, seqlen_q, size_v), dtype of query (autocast's under autocast). A query that sees no key gets zeros.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device; the message names it.

    Example:
        >>> import torch, fusedops
        >>> q, k, v = (torch.randn(2, 4, 6, 32) for _ in range(3))
        >>> ours = fusedops.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torch.allclose(ours, torchs, atol=1e-6)
        True
    """
    lead = check_scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if might_use_triton(query.device) and use_triton(
        "scaled_dot_product_attention",
        _sdpa_unsupported(query, key, value, dropout_p, enable_gqa),
        query.device,
    ):
        batch, heads = tuple(lead[:-1]), lead[-1] if lead else 1
        kv_heads = key.shape[-3] if enable_gqa else heads
        q = _four_dimensions(query, batch, heads)
        k, v = (_four_dimensions(t, batch, kv_heads) for t in (key, value))
        mask = None if attn_mask is None else _four_dimensional_mask(attn_mask, batch)
        causal = reference.TOP_LEFT if is_causal else reference.NO_CAUSAL
        out = _run(q, k, v, mask, causal, scale)[0]
        return out if len(lead) == 2 else out.reshape(*lead, *out.shape[-2:])
    mask = reference.torch_mask(attn_mask, query)
    return _torch_attention(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
