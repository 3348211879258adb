"""Decoding's tuning problems with inputs of their own, and the problems that a call of the public function meets.

A trial's cache is full, its sequences are of equal length. A quantised one has a scale for each token and head. The
rows that share a key head are eight heads' and as many queries as there are rows for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from fusedops.attention import reference_decode as reference
from fusedops.attention.autograd_decode import unsupported
from fusedops.attention.cache import LARGEST, Cache
from fusedops.attention.tuning import head_block
from fusedops.attention.tuning_decode import DECODE, DecodeProblem, too_small_to_decode
from fusedops.autotune.operator import Operator
from fusedops.autotune.trial import Numbers, Trial
from fusedops.runtime.device import DeviceFacts
from fusedops.runtime.launch import dtype_named

_GROUP = 8
_HEADS = 8  # key heads of a sequence, at most
# Elements of keys and values that plain torch computes at once: as many sequences are compared, at least one.
_COMPARED = 1 << 26


class DecodeTrial(Trial):
    """The cache's heads lie one after the other, rows of a head together."""

    def __init__(self, problem: DecodeProblem, device: torch.device, empty: bool) -> None:
        self.problem, self.dtype = problem, dtype_named(problem.dtype)
        stored = dtype_named(problem.cache_dtype)
        if problem.queries != head_block(problem.queries) or problem.queries > 64:
            raise NotImplementedError("rows that share a key head are 16, 32 or 64")
        if problem.page & (problem.page - 1) or not 0 <= problem.page <= 128:
            raise NotImplementedError("what a page is divided by is a power of two, at most 128")
        self.kv_heads = max(n for n in range(1, _HEADS + 1) if problem.heads % n == 0)
        self.batch = problem.heads // self.kv_heads
        numbers = Numbers(device, empty)
        size = problem.size
        page = 0
        if problem.page:  # the shortest that this is the largest power of two in
            page = problem.page if problem.page >= 16 else 16 + problem.page
        pages = max(1, size // page) if page else 0
        size = self.size = pages * page or size
        lead = (self.batch * pages, self.kv_heads, page) if page else (self.batch, self.kv_heads, size)
        self.q = numbers.normal(
            self.batch, self.kv_heads * _GROUP, problem.queries // _GROUP, problem.d_k, dtype=self.dtype
        )
        caches, scales = [], []
        for d in (problem.d_k, problem.d_v):
            cache = numbers.empty(*lead, d, dtype=torch.uint8 if stored.itemsize == 1 else stored)
            if stored.itemsize == 1:
                cache = cache.view(stored)
            if numbers.generator is not None:
                for part in cache:  # float8 and int8 are not drawn, and the whole in float32 would take much room
                    values = numbers.normal(
                        *part.shape, dtype=torch.float32, deviation=40.0 if stored in LARGEST else 1
                    )
                    part.copy_(values.round() if stored == torch.int8 else values)
            caches.append(cache)
            quantized = stored in LARGEST
            scales.append(
                numbers.normal(*lead, dtype=torch.float32, mean=0.025, deviation=0.002) if quantized else None
            )
        seqlens = numbers.empty(self.batch, dtype=torch.int32)
        table = None
        if page:
            table = numbers.empty(self.batch, pages, dtype=torch.int32)
        if numbers.generator is not None:
            seqlens.fill_(size)
            if table is not None:
                order = torch.randperm(self.batch * pages, generator=numbers.generator, device=device)
                table.copy_(order.view(self.batch, pages))
        self.cache = Cache(caches[0], caches[1], seqlens, table, scales[0], scales[1], False)
        if not empty and (reasons := unsupported(self.cache, self.dtype)):
            raise NotImplementedError("; ".join(reasons))
        self.precision = problem.precision

    @cached_property
    def _some(self) -> int:
        a_sequence = self.kv_heads * self.problem.size * (self.problem.d_k + self.problem.d_v)
        return max(1, min(self.batch, _COMPARED // max(a_sequence, 1)))

    def run(self) -> Sequence[torch.Tensor]:
        from fusedops.attention.kernels_decode import attention_decode

        scale = 1.0 / math.sqrt(self.problem.d_k)
        return attention_decode(self.q, self.cache, 0, None, None, None, 0.0, scale, None, self.precision)

    def compared(self, results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [result[: self._some] for result in results]

    def _cache_of_some(self) -> Cache:
        cache, some = self.cache, self._some
        table = cache.block_table
        if table is not None:
            return cache._replace(seqlens=cache.seqlens[:some], block_table=table[:some])
        parts = [t if t is None else t[:some] for t in (cache.keys, cache.values, cache.key_scales, cache.value_scales)]
        return Cache(parts[0], parts[1], cache.seqlens[:some], None, parts[2], parts[3], False)  # type: ignore[arg-type]

    def exact(self) -> Sequence[torch.Tensor]:
        wide = torch.float64 if self.dtype == torch.float32 else torch.float32
        return reference.attention_decode(self.q[: self._some].to(wide), self._cache_of_some())

    def plain(self) -> Sequence[torch.Tensor]:
        """torch's own operator on a cache of the queries' dtype."""
        keys, values = reference.dense(self._cache_of_some(), self.size, self.dtype)
        q = self.q[: self._some]
        seqlen_q, size = q.shape[2], self.size
        seen = torch.ones(seqlen_q, size, dtype=torch.bool, device=q.device).tril(size - seqlen_q)
        out = F.scaled_dot_product_attention(q, keys, values, seen, enable_gqa=True)
        shared = keys.repeat_interleave(_GROUP, dim=1)
        scores = (q @ shared.transpose(-1, -2)).float() / math.sqrt(self.problem.d_k)
        return out, scores.masked_fill(~seen, float("-inf")).logsumexp(-1)


def trial_of(problem: DecodeProblem, device: torch.device, empty: bool = False) -> DecodeTrial:
    """The trial of a problem.

    Raises:
        NotImplementedError: no inputs, or none on this device, make this problem; the message says why.

    Examples:
        >>> import torch
        >>> trial = trial_of(DecodeProblem.of(64, 64, 1024, heads=16), torch.device("cpu"), empty=True)
        >>> tuple(trial.cache.keys.shape)
        (2, 8, 1024, 64)
    """
    return DecodeTrial(problem, device, empty)


def problems_of(
    *,
    facts: DeviceFacts,
    batch: int,
    heads: int,
    room: int,
    d: int,
    kv_heads: int | None = None,
    dv: int | None = None,
    length: int = 1,
    window: int | None = None,
    page_size: int = 0,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    precision: str = "ieee",
) -> list[tuple[Operator[Any, Any], DecodeProblem]]:
    """What :func:`fusedops.attention_decode` looks up.

    Args:
        facts: of the device.
        batch: sequences.
        heads, kv_heads: of queries, and of keys and values (None: as many).
        room: tokens of a sequence that the cache has room for.
        d, dv: head sizes of keys, and of values (None: the same).
        length: queries of a sequence.
        window: tokens before its own that a query sees; None: all.
        page_size: of a paged cache; 0: it is not.
        dtype, cache_dtype, precision: of the queries, the cache (None: the same), and float32 products.

    Examples:
        >>> from fusedops.runtime.device import TARGETS
        >>> found = problems_of(facts=TARGETS["sm_90"], batch=8, heads=32, kv_heads=8, room=8192, d=128, page_size=64)
        >>> [(problem.heads, problem.queries, problem.size, problem.page) for _, problem in found]
        [(64, 16, 8192, 64)]
    """
    kv_heads, dv = kv_heads or heads, dv or d
    kind = dtype_named(dtype)
    if too_small_to_decode(facts, d, dv, kind.itemsize) is not None:
        return []
    problem = DecodeProblem.of(
        d,
        dv,
        room if window is None else min(room, window + length),
        heads=batch * kv_heads,
        queries=heads // kv_heads * length,
        dtype=dtype,
        cache_dtype=cache_dtype,
        precision=precision if kind == torch.float32 and facts.capability >= 80 else "ieee",
        page=page_size,
    )
    return [(DECODE, problem)]
