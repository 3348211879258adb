"""Decoding by its definition, in plain torch: what the torch backend computes and the kernels are compared with."""

from __future__ import annotations

import math
from typing import Any

import torch

from fusedops.attention.cache import LARGEST, Cache, for_tokens
from fusedops.attention.reference import compute_dtype


def append_kv(k: torch.Tensor, v: torch.Tensor, cache: Cache) -> None:
    """Write new tokens behind those of the cache, in place; those that it has no room for are not written.

    With a scale for each token and head that is set too: such that the largest magnitude becomes the largest number of
    the cache's dtype. int8 is rounded to the nearest.
    """
    batch, heads, tokens, _ = k.shape
    if 0 in (batch, heads, tokens):
        return
    places = cache.seqlens.long()[:, None] + torch.arange(tokens, device=k.device)
    inside = places >= 0
    if cache.ring:
        outer, row = torch.arange(batch, device=k.device)[:, None].expand_as(places), places.remainder(cache.size)
        # Of tokens that share a place the last one stays.
        inside = inside & (torch.arange(tokens, device=k.device) >= tokens - cache.size)
    else:
        inside = inside & (places < cache.size)
        outer, row = _places(cache, places.clamp(0, max(cache.size - 1, 0)))
        inside = inside & (outer >= 0) & (outer < cache.keys.shape[0])
    outer, row = outer[inside], row[inside]
    for new, stored, scales in ((k, cache.keys, cache.key_scales), (v, cache.values, cache.value_scales)):
        rows = new.transpose(1, 2)[inside]
        if stored.dtype not in LARGEST:
            stored[outer, :, row] = rows.to(stored.dtype)
            continue
        numbers, scale = _quantized(rows.float(), stored.dtype, scales)
        # index_put_ knows no float8: its bytes do as well.
        stored.view(torch.uint8)[outer, :, row] = numbers.view(torch.uint8)
        if scales is not None and for_tokens(scales):
            scales[outer, :, row] = scale


def _quantized(
    rows: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers, scales) of rows (tokens, heads, size)."""
    largest = LARGEST[dtype]
    if scales is None:
        scale = rows.new_ones(rows.shape[1])
    elif for_tokens(scales):
        scale = rows.abs().amax(-1) / largest
    else:
        scale = scales
    divisor = scale[..., None]
    divided = torch.where(divisor == 0, 0.0, rows / divisor).clamp(-largest, largest)
    return (divided.round() if dtype == torch.int8 else divided).to(dtype), scale


def _places(cache: Cache, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(first index, row) of positions (batch, n) in a cache that is no ring."""
    if cache.block_table is None:
        return torch.arange(positions.shape[0], device=positions.device)[:, None].expand_as(positions), positions
    page = cache.keys.shape[2]
    return cache.block_table.long().gather(1, positions // page), positions % page


def attention_decode(
    q: torch.Tensor,
    cache: Cache,
    added: int = 0,
    *,
    left: int | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out = softmax(s) v`` of the last tokens of each sequence, as :func:`fusedops.attention.reference.attention`.

    Args:
        q: (batch, heads, seqlen_q, d_k), the queries of each sequence's last tokens.
        cache: with those tokens; its numbers stand for themselves times their scales.
        added: tokens that the cache has besides ``cache.seqlens``.
        left: query i of a sequence of L tokens sees keys from L - seqlen_q + i - left on; None: from 0 on.
        alibi_slopes, sinks, softcap, scale: as there. alibi_slopes: (batch or 1, heads).

    Returns:
        out: (batch, heads, seqlen_q, d_v), dtype of q; 0 for a query that sees no key.
        lse: (batch, heads, seqlen_q) float32 (float64 for float64).
    """
    batch, heads, seqlen_q, d_k = q.shape
    kv_heads, d_v = cache.values.shape[1], cache.values.shape[3]
    compute = compute_dtype(q.dtype)
    scale = 1.0 / math.sqrt(max(d_k, 1)) if scale is None else scale
    lengths = cache.seqlens.long() + added
    if not cache.ring:
        lengths = lengths.clamp(max=cache.size)
    stored_keys, stored_values, positions = _gathered(cache, lengths)
    positions = positions[:, None, None]  # (batch, head, query, key)
    own = (lengths[:, None] - seqlen_q + torch.arange(seqlen_q, device=q.device))[:, None, :, None]
    seen = (positions >= 0) & (positions <= own)
    if left is not None:
        seen = seen & (positions >= own - left)
    keys = _plain(stored_keys, compute)
    # What no query sees may be anything: infinities and NaN too.
    values = torch.where(seen.any(2).unsqueeze(-1), _plain(stored_values, compute), 0.0)
    group = heads // kv_heads if kv_heads else 1
    queries = q.to(compute).reshape(batch, kv_heads, group * seqlen_q, d_k)
    s = (queries @ keys.transpose(-1, -2)).reshape(batch, heads, seqlen_q, keys.shape[2]) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(compute)[:, :, None, None] * (positions - own).abs()
    s = torch.where(seen, s, float("-inf"))
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:3], 1), float("-inf"))
    if sinks is not None:
        sinks = sinks.to(compute).view(-1, 1, 1)
        top = torch.maximum(top, sinks)
    top = top.masked_fill(top == float("-inf"), 0.0)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    p = (p / total).reshape(batch, kv_heads, group * seqlen_q, keys.shape[2])
    out = (p @ values).reshape(batch, heads, seqlen_q, d_v)
    lse = (total.log() + top).masked_fill(empty, float("-inf"))
    return out.to(q.dtype), lse.squeeze(-1)


def dense(cache: Cache, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What keys and values of the first ``size`` tokens stand for, (batch, heads, size, …); not of a ring."""
    keys, values, _ = _gathered(cache, cache.seqlens.new_full(cache.seqlens.shape, size).long())
    return _plain(keys, dtype), _plain(values, dtype)


_Stored = tuple[torch.Tensor, torch.Tensor | None]


def _gathered(cache: Cache, lengths: torch.Tensor) -> tuple[_Stored, _Stored, torch.Tensor]:
    """Keys and values with their scales, each (batch, heads, n, …), and the token of each of the n places: -1: none."""
    size = cache.size
    if lengths.device.type == "cpu":  # elsewhere one would wait for it
        size = min(size, max(int(lengths.max()), 0) if lengths.numel() else 0)
    places = torch.arange(size, device=lengths.device)
    if cache.ring:
        last = lengths[:, None] - 1
        positions = last - (last - places).remainder(max(cache.size, 1))
    else:
        positions = torch.where(places < lengths[:, None], places, -1)
    parts: list[Any] = [cache.keys, cache.values, cache.key_scales, cache.value_scales]
    if cache.block_table is None:
        parts = [t if t is None or t.dim() == 1 else t[:, :, :size] for t in parts]
    else:
        page = max(cache.keys.shape[2], 1)
        pages = cache.block_table[:, : -(-size // page)].long().clamp(0, max(cache.keys.shape[0] - 1, 0))
        parts = [t if t is None or t.dim() == 1 else _of_pages(t, pages, size) for t in parts]
    keys, values, key_scales, value_scales = parts
    return (keys, key_scales), (values, value_scales), positions


def _of_pages(pool: torch.Tensor, pages: torch.Tensor, size: int) -> torch.Tensor:
    """(batch, heads, size, …) of (pages, heads, page, …)."""
    return pool[pages].transpose(1, 2).flatten(2, 3)[:, :, :size]


def _plain(stored: _Stored, dtype: torch.dtype) -> torch.Tensor:
    """What the stored numbers stand for."""
    numbers, scales = stored
    numbers = numbers.to(dtype)
    if scales is None:
        return numbers
    scales = scales.to(dtype)
    return numbers * (scales[:, None, None] if scales.dim() == 1 else scales.unsqueeze(-1))
