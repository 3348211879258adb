"""Decoding's compile cases: each kernel, at each kind of default configuration and of cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.harness.compile import BFLOAT16_TARGETS, KINDS, TABLES, Case

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_E4M3 = torch.float8_e4m3fn


def _tensors(
    dtype: torch.dtype, d: int, *, stored: torch.dtype | None, page: int | None, ring: bool, scales: str, batch: int
) -> Any:
    from fusedops.attention.cache import Cache

    room, heads = 4096, 8
    stored = stored or dtype
    shape = (batch, heads, room) if page is None else (64, heads, page)
    caches = [torch.empty(*shape, d, dtype=torch.uint8 if stored.itemsize == 1 else stored) for _ in range(2)]
    if stored.itemsize == 1:
        caches = [cache.view(stored) for cache in caches]
    scale = {"none": None, "heads": torch.ones(heads), "tokens": torch.ones(shape)}[scales]
    table = None if page is None else torch.zeros(batch, room // page, dtype=torch.int32)
    return Cache(*caches, torch.zeros(batch, dtype=torch.int32), table, scale, scale, ring)


def _decode(
    dtype: torch.dtype,
    d: int,
    *,
    queries: int = 1,
    group: int = 4,
    stored: torch.dtype | None = None,
    page: int | None = None,
    ring: bool = False,
    scales: str = "none",
    batch: int = 1,
    precision: str = "ieee",
    options: bool = False,
    splits: int | None = None,
) -> Callable[[], object]:
    """``options``: a window, a softcap, ALiBi and sinks; ``batch`` of 64: the keys are not divided."""
    from fusedops.attention.kernels_decode import attention_decode

    cache = _tensors(dtype, d, stored=stored, page=page, ring=ring, scales=scales, batch=batch)
    q = torch.empty(batch, 8 * group, queries, d, dtype=dtype)
    slopes, sinks = (torch.ones(1, 8 * group), torch.ones(8 * group)) if options else (None, None)
    left, softcap = (1000 if options or ring else None), (30.0 if options else 0.0)
    return lambda: attention_decode(q, cache, 1, left, slopes, sinks, softcap, 0.1, splits, precision)


def _append(dtype: torch.dtype, d: int, tokens: int, **kind: Any) -> Callable[[], object]:
    from fusedops.attention.kernels_append import append_kv

    given = {"stored": None, "page": None, "ring": False, "scales": "none", "batch": 2} | kind
    cache = _tensors(dtype, d, **given)
    k, v = (torch.empty(2, 8, tokens, d, dtype=dtype) for _ in range(2))
    return lambda: append_kv(k, v, cache)


# The default configurations differ between these alone.
_DIFFERENT = frozenset({"sm_75", "sm_80", "sm_90", "gfx942", "gfx1100"})
_HALF = _DIFFERENT - {"sm_75"}

_TABLE: list[tuple[str, torch.dtype, int, dict[str, Any], frozenset[str]]] = [
    ("step_64", _FP16, 64, {}, TABLES),
    ("step_128", _BF16, 128, {}, BFLOAT16_TARGETS),
    ("step_256", _BF16, 256, {}, _HALF),
    ("step_256_most_splits", _BF16, 256, {"splits": 128}, _HALF | {"sm_100"}),
    ("step_96_many_sequences", _FP16, 96, {"batch": 64, "group": 1}, KINDS),
    ("speculation_64", _BF16, 64, {"queries": 16, "group": 8, "page": 64}, KINDS),
    ("speculation_128", _BF16, 128, {"queries": 16, "group": 8, "page": 64}, BFLOAT16_TARGETS & TABLES),
    ("speculation_256", _FP16, 256, {"queries": 16, "group": 8}, KINDS | {"sm_86"}),
    ("pages_128", _BF16, 128, {"page": 64}, KINDS),
    ("small_pages_128", _BF16, 128, {"page": 16}, _HALF),
    ("odd_pages_128", _FP16, 128, {"page": 33}, KINDS),
    ("ring_128", _BF16, 128, {"ring": True}, KINDS),
    ("options_128", _BF16, 128, {"options": True, "queries": 4, "group": 8}, _HALF | {"sm_86"}),
    ("int8_128", _BF16, 128, {"stored": torch.int8, "scales": "tokens"}, _HALF | {"sm_86"}),
    ("int8_pages_128", _FP16, 128, {"stored": torch.int8, "scales": "tokens", "page": 16}, KINDS),
    ("int8_256", _FP16, 256, {"stored": torch.int8, "scales": "heads"}, KINDS),
    ("fp8_128", _BF16, 128, {"stored": _E4M3, "scales": "tokens"}, frozenset({"sm_89", "sm_90", "gfx950"})),
    ("fp8_heads_64", _FP16, 64, {"stored": _E4M3, "scales": "heads", "page": 64}, frozenset({"sm_90"})),
    ("float32_64", _FP32, 64, {}, _DIFFERENT),
    ("float32_128", _FP32, 128, {"queries": 4}, _DIFFERENT),
    ("float32_256", _FP32, 256, {}, _DIFFERENT - {"gfx1100"}),
    ("tf32_128", _FP32, 128, {"precision": "tf32"}, frozenset({"sm_80", "sm_90"})),
    ("float32_int8_128", _FP32, 128, {"stored": torch.int8, "scales": "tokens"}, KINDS),
]
_APPEND_TABLE: list[tuple[str, torch.dtype, int, int, dict[str, Any], frozenset[str]]] = [
    ("append_step", _BF16, 128, 1, {}, _HALF),
    ("append_prompt_int8", _FP16, 256, 100, {"stored": torch.int8, "scales": "tokens", "page": 48}, _DIFFERENT),
    ("append_prompt_fp8", _BF16, 128, 100, {"stored": _E4M3, "scales": "heads"}, frozenset({"sm_89", "gfx950"})),
    ("append_ring", _FP32, 40, 5000, {"ring": True}, KINDS),
]

CASES = [
    Case(name, lambda dtype=dtype, d=d, kind=kind: _decode(dtype, d, **kind), targets)
    for name, dtype, d, kind, targets in _TABLE
] + [
    Case(name, lambda dtype=dtype, d=d, tokens=tokens, kind=kind: _append(dtype, d, tokens, **kind), targets)
    for name, dtype, d, tokens, kind, targets in _APPEND_TABLE
]
