"""Writes new keys and values behind those of a cache, in place, rounded to its dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.attention.cache import LARGEST, Cache, for_tokens, scale_strides
from fusedops.attention.kernels_decode import cache_rows
from fusedops.attention.operands import unit_stride
from fusedops.runtime.device import device_guard
from fusedops.runtime.launch import ceil_div, next_power_of_2, options


@triton.jit
def write_rows(
    new,  # (BLOCK_T, BLOCK_D) float32
    CACHE,
    SCALES,  # (kv_heads,), or as CACHE without its last dimension, or None
    strides,
    scale_strides,
    head,
    outer,
    row,
    inside,
    columns,
    LARGEST: tl.constexpr,  # the largest number of a quantised cache; 0: not quantised
    TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """A token's head each row; where TOKENS, its scale too: that which makes its largest magnitude LARGEST."""
    if LARGEST > 0:
        if TOKENS:
            scale = tl.max(tl.abs(new), axis=1) / LARGEST
            at = SCALES + outer * scale_strides[0] + head.to(tl.int64) * scale_strides[1]
            tl.store(at + row.to(tl.int64) * scale_strides[2], scale, mask=inside)
            divisor = tl.where(scale == 0.0, 1.0, scale)
            new = new / divisor[:, None]
        elif SCALES is not None:
            scale = tl.load(SCALES + head)
            new = tl.where(scale == 0.0, 0.0, new / tl.where(scale == 0.0, 1.0, scale))
        new = tl.minimum(tl.maximum(new, -LARGEST), LARGEST)
    if CACHE.dtype.element_ty == tl.int8:
        # To the nearest, to even ones from halfway: beyond 1.5 · 2²³ a float32 has no fractions.
        new = (new + 12582912.0) - 12582912.0
    at = CACHE + outer * strides[0] + head.to(tl.int64) * strides[1] + row.to(tl.int64) * strides[2]
    mask = inside[:, None] & (columns < SIZE)[None, :]
    tl.store(at[:, None] + columns[None, :], new.to(CACHE.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "first", "size", "pages", "table_stride"])
def append_kernel(
    K,  # (batch, kv_heads, tokens, D_K), any strides but 1 in the last dimension
    V,
    K_CACHE,
    V_CACHE,
    SEQLENS,  # (batch,)
    TABLE,
    K_SCALES,
    V_SCALES,
    k_strides,
    v_strides,
    k_cache_strides,
    v_cache_strides,
    k_scale_strides,
    v_scale_strides,
    table_stride,
    kv_heads,
    tokens,
    first,  # token that is the first to be written
    size,
    pages,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
    LARGEST: tl.constexpr,
    K_TOKENS: tl.constexpr,
    V_TOKENS: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Program (batch, block of tokens, key head) writes BLOCK_T tokens of one head, all for which there is room."""
    program = tl.program_id(0)
    blocks = tl.cdiv(tokens - first, BLOCK_T)
    head = program % kv_heads
    block = program // kv_heads % blocks
    batch = program // kv_heads // blocks
    token = first + block * BLOCK_T + tl.arange(0, BLOCK_T)
    begin = tl.load(SEQLENS + batch).to(tl.int32)
    place = begin + token
    inside = (token < tokens) & (place >= 0)
    if not RING:
        inside = inside & (place < size)
    outer, row, known = cache_rows(batch, TABLE, table_stride, place, inside, pages, size, PAGE, RING)
    inside = inside & known
    columns = tl.arange(0, BLOCK_DK)
    at = K + batch.to(tl.int64) * k_strides[0] + head.to(tl.int64) * k_strides[1] + token.to(tl.int64) * k_strides[2]
    new = tl.load(at[:, None] + columns[None, :], mask=inside[:, None] & (columns < D_K)[None, :], other=0.0)
    write_rows(
        new.to(tl.float32), K_CACHE, K_SCALES, k_cache_strides, k_scale_strides, head, outer, row, inside, columns,
        LARGEST, K_TOKENS, D_K,
    )  # fmt: skip
    columns = tl.arange(0, BLOCK_DV)
    at = V + batch.to(tl.int64) * v_strides[0] + head.to(tl.int64) * v_strides[1] + token.to(tl.int64) * v_strides[2]
    new = tl.load(at[:, None] + columns[None, :], mask=inside[:, None] & (columns < D_V)[None, :], other=0.0)
    write_rows(
        new.to(tl.float32), V_CACHE, V_SCALES, v_cache_strides, v_scale_strides, head, outer, row, inside, columns,
        LARGEST, V_TOKENS, D_V,
    )  # fmt: skip


def append_kv(k: torch.Tensor, v: torch.Tensor, cache: Cache) -> None:
    """Launch; arguments as :func:`fusedops.attention.reference_decode.append_kv`."""
    batch, kv_heads, tokens, d_k = k.shape
    if 0 in (batch, kv_heads, tokens):
        return
    k, v = unit_stride(k), unit_stride(v)
    pages, _, page, d_v = cache.values.shape
    table = cache.block_table
    # Of tokens that share a place in a ring the last one stays.
    first = max(0, tokens - cache.size) if cache.ring else 0
    block_t = 1 if tokens == 1 else 16
    with device_guard(k):
        append_kernel[(batch * kv_heads * ceil_div(tokens - first, block_t),)](
            k, v, cache.keys, cache.values, cache.seqlens, table, cache.key_scales, cache.value_scales,
            k.stride()[:3], v.stride()[:3], cache.keys.stride()[:3], cache.values.stride()[:3],
            scale_strides(cache.key_scales), scale_strides(cache.value_scales), 0 if table is None else table.stride(0),
            kv_heads, tokens, first, cache.size, pages,
            PAGE=0 if table is None else page, RING=cache.ring, LARGEST=LARGEST.get(cache.keys.dtype, 0.0),
            K_TOKENS=for_tokens(cache.key_scales), V_TOKENS=for_tokens(cache.value_scales), D_K=d_k, D_V=d_v,
            BLOCK_DK=next_power_of_2(d_k), BLOCK_DV=next_power_of_2(d_v), BLOCK_T=block_t, **options(4),
        )  # fmt: skip
