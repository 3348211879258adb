"""Attention of new tokens to a cache, for generation: check the arguments, choose a backend, call the operator."""

from __future__ import annotations

import math
from typing import Any

import torch

from fusedops.attention.arguments import Window, check_per_head
from fusedops.attention.autograd_decode import append_kv_op, attention_decode_op, refuse_gradient, unsupported
from fusedops.attention.cache import LARGEST, Cache
from fusedops.attention.tuning_decode import MOST_SPLITS
from fusedops.runtime.backend import explainable, might_use_triton, use_triton
from fusedops.runtime.checks import (
    check_bool,
    check_number,
    check_same_device,
    check_tensor,
    wrong_type,
    wrong_value,
)
from fusedops.runtime.precision import autocast_dtype, float32_precision

# Queries of a sequence at a time.
MOST_QUERIES = 16
_FEWEST_ROWS = 16  # of a page
_CACHE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, *LARGEST)
_INTEGERS = (torch.int32, torch.int64)


def _check_numbers(function: str, name: str, value: Any, shape: tuple[int | None, ...], like: torch.Tensor) -> None:
    """int32 or int64 on the cache's device; None in ``shape``: any size."""
    if not isinstance(value, torch.Tensor) or value.dtype not in _INTEGERS:
        wrong_type(function, name, "an int32 or int64 tensor", value)
    if value.dim() != len(shape) or any(
        n is not None and n != size for n, size in zip(shape, value.shape, strict=True)
    ):
        wanted = ", ".join("pages of a sequence" if n is None else str(n) for n in shape)
        wrong_value(function, name, f"of shape ({wanted}{',' if len(shape) == 1 else ''})", value)
    check_same_device(function, name, value, "k_cache", like)


def _check_scales(function: str, name: str, scales: Any, cache_name: str, cache: torch.Tensor) -> None:
    if scales is None:
        if cache.dtype == torch.int8:
            wrong_type(function, name, f"a float32 tensor where {cache_name} is int8", scales)
        return
    if cache.dtype not in LARGEST:
        wrong_value(function, name, f"None where {cache_name} is neither int8 nor float8 ({cache.dtype})", scales)
    if not isinstance(scales, torch.Tensor) or scales.dtype != torch.float32:
        wrong_type(function, name, "a float32 tensor", scales)
    shapes = (cache.shape[1:2], cache.shape[:3])
    if scales.shape not in shapes or (scales.dim() == 1 and scales.stride(0) != 1 and scales.shape[0] > 1):
        takes = f"of shape {tuple(shapes[0])} (contiguous), one a head, or {tuple(shapes[1])}, one a token and head"
        wrong_value(function, name, takes, scales)
    check_same_device(function, name, scales, cache_name, cache)


def check_cache(
    function: str,
    batch: int,
    k_cache: Any,
    v_cache: Any,
    cache_seqlens: Any,
    block_table: Any,
    ring: Any,
    k_scale: Any,
    v_scale: Any,
) -> Cache:
    """Raise, naming the argument, or give the cache."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(cache, torch.Tensor) or cache.dtype not in _CACHE_DTYPES:
            takes = "a tensor of float32, float16, bfloat16, float64, int8, float8_e4m3fn or float8_e5m2"
            wrong_type(function, name, takes, cache)
        if cache.dim() != 4 or cache.layout is not torch.strided:
            takes = "(batch, heads, size, head size), or (pages, heads, page size, head size) with a block_table"
            wrong_value(function, name, f"a strided tensor of four dimensions {takes}", cache)
        if cache.stride(3) != 1 and cache.shape[3] > 1:
            wrong_value(function, name, f"of stride 1 in its last dimension; it is {cache.stride(3)}", cache)
    if v_cache.dtype != k_cache.dtype:
        wrong_type(function, "v_cache", f"of k_cache's dtype {k_cache.dtype}", v_cache)
    if v_cache.shape[:3] != k_cache.shape[:3]:
        wrong_value(function, "v_cache", f"of shape {(*k_cache.shape[:3], 'head size')}, as k_cache is", v_cache)
    check_same_device(function, "v_cache", v_cache, "k_cache", k_cache)
    check_bool(function, "ring", ring)
    if block_table is None:
        if k_cache.shape[0] != batch:
            wrong_value(function, "k_cache", f"of the batch of q or k, {batch}", k_cache)
    else:
        if ring:
            wrong_value(function, "ring", "False where a block_table is given", ring)
        _check_numbers(function, "block_table", block_table, (batch, None), k_cache)
        if block_table.stride(1) != 1 and block_table.shape[1] > 1:
            wrong_value(function, "block_table", "of stride 1 in its last dimension", block_table)
        if k_cache.shape[2] < _FEWEST_ROWS:
            wrong_value(function, "k_cache", f"of pages of at least {_FEWEST_ROWS} tokens", k_cache)
        if k_cache.shape[0] == 0 and block_table.numel() > 0:
            wrong_value(function, "k_cache", "of at least one page, as block_table names some", k_cache)
    _check_numbers(function, "cache_seqlens", cache_seqlens, (batch,), k_cache)
    if cache_seqlens.stride(0) != 1 and batch > 1:
        cache_seqlens = cache_seqlens.contiguous()
    _check_scales(function, "k_scale", k_scale, "k_cache", k_cache)
    _check_scales(function, "v_scale", v_scale, "v_cache", v_cache)
    if (k_scale is None) != (v_scale is None):
        wrong_value(function, "v_scale", "given where k_scale is, and None where it is None", v_scale)
    return Cache(k_cache, v_cache, cache_seqlens, block_table, k_scale, v_scale, ring)


def _check_new(function: str, k: Any, v: Any, batch: int, cache: Cache) -> None:
    """New keys and values."""
    check_tensor(function, "k", k)
    check_tensor(function, "v", v)
    heads = cache.keys.shape[1]
    if k.dim() != 4 or k.shape[:2] != (batch, heads) or k.shape[3] != cache.keys.shape[3]:
        wrong_value(function, "k", f"of shape ({batch}, {heads}, tokens, {cache.keys.shape[3]}), as k_cache is", k)
    shape = (batch, heads, k.shape[2], cache.values.shape[3])
    if v.shape != shape:
        wrong_value(function, "v", f"of shape {shape}, as k and v_cache are", v)
    if v.dtype != k.dtype:
        wrong_type(function, "v", f"of the dtype of k ({k.dtype})", v)
    check_same_device(function, "k", k, "k_cache", cache.keys)
    check_same_device(function, "v", v, "k_cache", cache.keys)


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None = None,
    ring: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write the keys and values of new tokens into a cache, in place, behind those that each sequence has.

    The cache is that of :func:`attention_decode`. Token i of sequence b becomes its token ``cache_seqlens[b] + i``;
    ``cache_seqlens`` stays. What the cache has no room for is not written (in a ring there is always room: the oldest
    are overwritten). Nothing is read on the host.

    Args:
        k: (batch, kv_heads, tokens, size), any floating dtype and strides.
        v: (batch, kv_heads, tokens, size_v), dtype of k.
        k_cache, v_cache, cache_seqlens, block_table, ring: as in :func:`attention_decode`.
        k_scale, v_scale: of an int8 or float8 cache, float32: (kv_heads,), by which new numbers are divided; or the
            shape of the cache without its last dimension, one for each token and head: then each is set too, such
            that the token's largest magnitude becomes 127, 448 or 57344. float8 may have none. Rounded to nearest;
            numbers too large for the dtype become its largest.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device; the message names it.
        RuntimeError: an argument requires a gradient, which would be lost.

    Examples:
        >>> import torch, fusedops
        >>> k_cache, v_cache = torch.zeros(2, 4, 32, 16), torch.zeros(2, 4, 32, 16)
        >>> lengths = torch.tensor([3, 7])
        >>> k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 1, 16)
        >>> fusedops.append_kv(k, v, k_cache, v_cache, cache_seqlens=lengths)
        >>> torch.equal(k_cache[1, :, 7], k[1, :, 0])
        True
    """
    function = "append_kv"
    batch = k.shape[0] if isinstance(k, torch.Tensor) and k.dim() else 0
    cache = check_cache(function, batch, k_cache, v_cache, cache_seqlens, block_table, ring, k_scale, v_scale)
    _check_new(function, k, v, batch, cache)
    _append(function, k, v, cache)


def _append(function: str, k: torch.Tensor, v: torch.Tensor, cache: Cache) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (k, v, *cache[:6])):
        refuse_gradient(function)
    append_kv_op(k, v, *cache, _kernel_serves(function, cache, k.dtype))


def _kernel_serves(function: str, cache: Cache, dtype: torch.dtype) -> bool:
    device = cache.keys.device
    return might_use_triton(device) and use_triton(function, unsupported(cache, dtype), device)


def _check_decode(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, *, cache_seqlens, block_table=None, k=None, v=None, ring=False, window=None,
    alibi_slopes=None, sinks=None, softcap=0.0, scale=None, k_scale=None, v_scale=None, num_splits=None,
    return_lse=False,
):  # fmt: skip
    """(cache, left, slopes, scale) or an error that names the argument."""
    function = "attention_decode"
    check_tensor(function, "q", q)
    if q.dim() != 4:
        wrong_value(function, "q", "of four dimensions (batch, heads, length, head size)", q)
    batch, heads, length, size = q.shape
    if not 1 <= length <= MOST_QUERIES:
        takes = f"of a length from 1 to {MOST_QUERIES} (fusedops.attention takes whole prompts)"
        wrong_value(function, "q", takes, q)
    cache = check_cache(function, batch, k_cache, v_cache, cache_seqlens, block_table, ring, k_scale, v_scale)
    kv_heads = cache.keys.shape[1]
    if cache.keys.shape[3] != size:
        wrong_value(function, "k_cache", f"of q's head size {size}", k_cache)
    if kv_heads == 0 or heads % kv_heads:
        wrong_value(function, "k_cache", f"of a number of heads that divides q's {heads}", k_cache)
    check_same_device(function, "q", q, "k_cache", cache.keys)
    if (k is None) != (v is None):
        wrong_value(function, "v" if v is None else "k", "given where the other of k and v is", None)
    if k is not None:
        _check_new(function, k, v, batch, cache)
    left = None
    if window is not None:
        takes = "a pair (left, right): left None or an int from 0 on; right None or 0, as no query sees a later key"
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            wrong_type(function, "window", takes, window)
        for side in window:
            if side is not None and (not isinstance(side, (int, torch.SymInt)) or isinstance(side, bool)):
                wrong_type(function, "window", takes, window)
        left, right = window
        if (left is not None and left < 0) or right not in (None, 0):
            wrong_value(function, "window", takes, window)
        left = None if left is not None and left >= 1 << 30 else left
    if ring and (left is None or left + length > cache.size):
        takes = f"(left, 0) with left of at most {cache.size - length}: the ring has {cache.size} tokens, {length} of"
        wrong_value(function, "window", f"{takes} which are the queries'", window)
    slopes = alibi_slopes
    if slopes is not None:
        check_per_head(function, "alibi_slopes", slopes, heads, batch, q)
        slopes = slopes[None] if slopes.dim() == 1 else slopes
    if sinks is not None:
        check_per_head(function, "sinks", sinks, heads, None, q)
    softcap = 0.0 if softcap is None else softcap
    check_number(function, "softcap", softcap)
    if not 0 <= softcap < math.inf:
        wrong_value(function, "softcap", "0 (none) or a positive, finite number", softcap)
    if scale is None:
        scale = 1.0 / math.sqrt(max(size, 1))
    check_number(function, "scale", scale)
    if not -math.inf < scale < math.inf:
        wrong_value(function, "scale", "None or a finite number", scale)
    if num_splits is not None:
        if not isinstance(num_splits, int) or isinstance(num_splits, bool):
            wrong_type(function, "num_splits", f"None or an int from 1 to {MOST_SPLITS}", num_splits)
        if not 1 <= num_splits <= MOST_SPLITS:
            wrong_value(function, "num_splits", f"None or an int from 1 to {MOST_SPLITS}", num_splits)
    check_bool(function, "return_lse", return_lse)
    return cache, left, slopes, float(softcap), float(scale)


def _decode_reasons(*args: Any, **kwargs: Any) -> tuple[torch.device, list[str]]:
    cache, *_ = _check_decode(*args, **kwargs)
    q = kwargs["q"] if "q" in kwargs else args[0]
    return q.device, unsupported(cache, autocast_dtype(q))


@explainable(_decode_reasons)
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    ring: bool = False,
    window: Window | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each sequence's last tokens to its keys in a cache, for generation.

    Of a sequence of L tokens the queries are the last ``length`` ones; query i sees keys up to its own place,
    L - length + i. The keys of a head are divided among programs and their results merged in a fixed order
    (Flash-Decoding, Dao et al. 2023); query heads that share a key head, and queries, read it once. Lengths stay on the
    device, so that a captured CUDA graph serves sequences that grow.

    Args:
        q: (batch, heads, length, size), length from 1 to 16; float32, float16 or bfloat16 (float64 on the torch
            backend), any strides.
        k_cache: (batch, kv_heads, room, size) or, with ``block_table``, (pages, kv_heads, page_size, size) with
            page_size of at least 16. Any floating dtype, int8, float8_e4m3fn or float8_e5m2; any strides but 1 in the
            last dimension.
        v_cache: the same with size_v.
        cache_seqlens: (batch,) int32 or int64: tokens that each sequence has in the cache before this call. It stays.
        block_table: (batch, most pages) int32 or int64: token p of sequence b lies in row p % page_size of page
            ``block_table[b, p // page_size]``. Entries beyond a sequence's tokens are not read.
        k, v: (batch, kv_heads, tokens, size), (…, size_v), or None: new tokens, which :func:`append_kv` writes into
            the cache first; L is then ``cache_seqlens + tokens``, else ``cache_seqlens``.
        ring: token p lies in row ``p % room``, where it has overwritten an older one. Needs a window.
        window: (left, 0): a query sees no key further than ``left`` before its own place. None: no limit.
        alibi_slopes: (heads,) or (batch, heads): ``-slope · distance`` is added to a score.
        sinks: (heads,): one more logit a head in the softmax, that belongs to no key.
        softcap: 0: none; else a score s becomes ``softcap · tanh(s / softcap)``.
        scale: factor of q·k; None: 1/√size.
        k_scale, v_scale: float32, of an int8 or float8 cache: a stored number stands for itself times its scale:
            (kv_heads,), or the shape of the cache without its last dimension.
        num_splits: among how many programs the keys of a head are divided, from 1 to 128; None: by the cache's room,
            batch, heads and device. A number makes a sequence's result independent, to the bit, of the batch it is in,
            the room being the same.
        return_lse: return the logarithm of the softmax's denominator too.

    Returns:
        out: (batch, heads, length, size_v), dtype of q (autocast's under autocast); zeros for a query that sees no key.
        lse: with ``return_lse``, (batch, heads, length) float32; −inf for a query that sees neither key nor sink.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device; the message names it. What
            ``cache_seqlens`` and ``block_table`` hold is not read on the host; whatever it is, nothing outside the
            cache is read or written.
        RuntimeError: an argument requires a gradient.

    Examples:
        >>> import torch, fusedops
        >>> k_cache, v_cache = torch.zeros(2, 4, 32, 16), torch.zeros(2, 4, 32, 16)
        >>> lengths = torch.tensor([3, 7])
        >>> q, k, v = torch.randn(2, 8, 1, 16), torch.randn(2, 4, 1, 16), torch.randn(2, 4, 1, 16)
        >>> out = fusedops.attention_decode(q, k_cache, v_cache, cache_seqlens=lengths, k=k, v=v)
        >>> lengths += 1  # the caches have the new tokens
        >>> whole = fusedops.attention(q[:1], k_cache[:1, :, :4], v_cache[:1, :, :4])
        >>> torch.allclose(out[:1], whole, atol=1e-6)
        True
    """
    cache, left, slopes, softcap, scale = _check_decode(
        q, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=block_table, k=k, v=v, ring=ring, window=window,
        alibi_slopes=alibi_slopes, sinks=sinks, softcap=softcap, scale=scale, k_scale=k_scale, v_scale=v_scale,
        num_splits=num_splits, return_lse=return_lse,
    )  # fmt: skip
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, slopes, sinks, *cache[:6])):
        refuse_gradient("attention_decode")
    added = 0
    if k is not None:
        assert v is not None
        added = k.shape[2]
        _append("attention_decode", k, v, cache)
    dtype = autocast_dtype(q)
    if q.dtype != dtype:
        q = q.to(dtype)
    slopes = slopes if slopes is None else slopes.float().contiguous()
    sinks = sinks if sinks is None else sinks.contiguous()
    precision, kernel = float32_precision(q), _kernel_serves("attention_decode", cache, dtype)
    out, lse = attention_decode_op(
        q, *cache, added, left, slopes, sinks, softcap, scale, num_splits, precision, kernel
    )  # fmt: skip
    return (out, lse) if return_lse else out
