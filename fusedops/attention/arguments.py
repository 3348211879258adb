"""Checks of the attention functions' arguments. An ordinary call passes on a few attribute reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from fusedops.attention import reference
from fusedops.runtime.checks import check_bool, check_number, check_same_device, check_tensor, wrong_type, wrong_value
from fusedops.runtime.precision import autocast_dtype

Causal = bool | Literal["top_left", "bottom_right"]

_CAUSAL = {
    False: reference.NO_CAUSAL,
    True: reference.TOP_LEFT,
    "top_left": reference.TOP_LEFT,
    "bottom_right": reference.BOTTOM_RIGHT,
}
_Q, _K, _V = "q", "k", "v"
_Tensor, _bool, _strided = torch.Tensor, torch.bool, torch.strided


def _check_tensors(function: str, names: tuple[str, str, str], q: Any, k: Any, v: Any) -> None:
    """Three floating-point tensors of one device and, autocast aside, one dtype."""
    for name, tensor in zip(names, (q, k, v), strict=True):
        check_tensor(function, name, tensor)
    if q.dtype == k.dtype == v.dtype and q.device == k.device == v.device:
        return
    for name, tensor in ((names[1], k), (names[2], v)):
        check_same_device(function, name, tensor, names[0], q)
        if autocast_dtype(tensor) != autocast_dtype(q):
            wrong_type(function, name, f"of the dtype of {names[0]} ({q.dtype})", tensor)


def _check_mask(function: str, mask: Any, shape: Sequence[int], like: str, q: torch.Tensor) -> None:
    """A bool or floating tensor that broadcasts to ``shape``, adding no dimension."""
    if not isinstance(mask, _Tensor):
        wrong_type(function, "attn_mask", "a bool or floating-point tensor, or None", mask)
    if mask.dtype is not _bool:
        check_tensor(function, "attn_mask", mask)
    elif mask.layout is not _strided:
        wrong_type(function, "attn_mask", "a strided tensor", mask)
    check_same_device(function, "attn_mask", mask, like, q)
    sizes = mask.shape
    broadcasts = len(sizes) <= len(shape)
    if broadcasts:
        for dim in range(-len(sizes), 0):
            size = sizes[dim]
            if size != 1 and size != shape[dim]:
                broadcasts = False
    if not broadcasts:
        wrong_value(function, "attn_mask", f"of a shape that broadcasts to {tuple(shape)}", mask)


def check_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: Causal,
    attn_mask: torch.Tensor | None,
    scale: float | None,
    return_lse: bool,
) -> int:
    """Raise, naming the argument, or give the number that stands for ``causal``."""
    _check_tensors("attention", (_Q, _K, _V), q, k, v)
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    for name, tensor, shape in ((_Q, q, of_q), (_K, k, of_k), (_V, v, of_v)):
        if len(shape) != 4:
            wrong_value("attention", name, "of four dimensions (batch, heads, length, head size)", tensor)
    batch, heads, seqlen_q, size = of_q
    _, kv_heads, seqlen_k, _ = of_k
    if of_k[0] != batch or of_k[3] != size:
        wrong_value("attention", _K, f"of shape ({batch}, heads, length, {size}), as q is", k)
    if heads != kv_heads and (heads % kv_heads if kv_heads else True):
        wrong_value("attention", _K, f"of a number of heads that divides q's {heads}", k)
    if of_v[0] != batch or of_v[1] != kv_heads or of_v[2] != seqlen_k:
        wrong_value("attention", _V, f"of shape ({batch}, {kv_heads}, {seqlen_k}, head size), as k is", v)
    if attn_mask is not None:
        _check_mask("attention", attn_mask, (batch, heads, seqlen_q, seqlen_k), _Q, q)
    if scale is not None:
        check_number("attention", "scale", scale)
    check_bool("attention", "return_lse", return_lse)
    if not isinstance(causal, (bool, str)):
        wrong_type("attention", "causal", 'False, True, "top_left" or "bottom_right"', causal)
    code = _CAUSAL.get(causal)
    if code is None:
        wrong_value("attention", "causal", 'False, True, "top_left" or "bottom_right"', causal)
    return code


def check_scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Sequence[int]:
    """Raise, naming the argument, or give the leading shape that all tensors broadcast to: (…, heads)."""
    function = "scaled_dot_product_attention"
    _check_tensors(function, ("query", "key", "value"), query, key, value)
    check_bool(function, "enable_gqa", enable_gqa)
    least = 3 if enable_gqa else 2
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < least:
            wrong_value(function, name, f"of at least {least} dimensions", tensor)
    if key.shape[-1] != query.shape[-1]:
        wrong_value(function, "key", f"of query's head size {query.shape[-1]}", key)
    if value.shape[-2] != key.shape[-2]:
        wrong_value(function, "value", f"of key's length {key.shape[-2]}", value)
    lead: Sequence[int] = query.shape[:-2]
    for name, tensor in (("key", key), ("value", value)):
        other: Sequence[int] = tensor.shape[:-2]
        if enable_gqa:
            if lead[-1] != other[-1] and (lead[-1] % other[-1] if other[-1] else True):
                wrong_value(function, name, f"of a number of heads that divides query's {lead[-1]}", tensor)
            other = (*other[:-1], lead[-1])
        if other != lead:
            try:
                lead = torch.broadcast_shapes(lead, other)
            except RuntimeError:
                takes = f"broadcastable to query's leading dimensions {tuple(query.shape[:-2])}"
                if not enable_gqa and tensor.dim() > 2:
                    takes += " (enable_gqa=True lets heads be shared)"
                wrong_value(function, name, takes, tensor)
    if attn_mask is not None:
        if isinstance(attn_mask, _Tensor) and attn_mask.dim() < 2:
            wrong_value(function, "attn_mask", "of at least 2 dimensions", attn_mask)
        _check_mask(function, attn_mask, (*lead, query.shape[-2], key.shape[-2]), "query", query)
        if is_causal:
            wrong_value(function, "attn_mask", "None where is_causal is True", attn_mask)
    check_number(function, "dropout_p", dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        wrong_value(function, "dropout_p", "from 0 to 1", dropout_p)
    check_bool(function, "is_causal", is_causal)
    if scale is not None:
        check_number(function, "scale", scale)
    return lead
