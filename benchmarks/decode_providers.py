"""What ``decode.py`` compares: attention of one new token a sequence to its cache, as fusedops and others offer it.

A library is imported when it is asked for, and left out with the reason where it is not installed. Each gets the cache
in a layout that it takes; what a library must do in every step to read a cache that it does not take (torch: gather
pages, make numbers of 16 bits of stored ones) is timed, what it does once a step for all layers (FlashInfer's plan) is
not.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusedops
from benchmarks import compare
from benchmarks.measure import Run
from benchmarks.report import OURS

# Tokens a page: the fewest that FlashAttention 2 takes.
PAGE = 256


@dataclass(frozen=True, slots=True)
class Kind:
    """How keys and values are stored.

    Attributes:
        paged: in pages, in no order; else one room a sequence.
        stored: their dtype; None: that of the queries.
        unequal: the sequences' lengths differ.
    """

    paged: bool = False
    stored: torch.dtype | None = None
    unequal: bool = False


KINDS: dict[str, Kind] = {
    "contiguous": Kind(),
    "paged": Kind(paged=True),
    "unequal": Kind(paged=True, unequal=True),
    "int8": Kind(stored=torch.int8),  # a scale a token and head
    "float8": Kind(stored=torch.float8_e4m3fn),  # one scale: what FlashInfer takes too
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A step of generation.

    Attributes:
        lengths: tokens of each sequence in the cache, the new one's included.
        dtype: of queries and output.
    """

    kind: str
    heads: int
    kv_heads: int
    size: int
    lengths: tuple[int, ...]
    dtype: torch.dtype
    page: int = PAGE

    @classmethod
    def of(
        cls, kind: str, batch: int, heads: int, kv_heads: int, size: int, length: int, dtype: torch.dtype
    ) -> Problem | None:
        """None: one sequence has no unequal lengths. ``length``: of each, the mean where they are unequal."""
        if KINDS[kind].unequal and batch == 1:
            return None
        lengths = _unequal(batch, length) if KINDS[kind].unequal else (length,) * batch
        return cls(kind, heads, kv_heads, size, lengths, dtype)

    def tiny(self) -> Problem:
        """The same for a dry run on a CPU."""
        kv_heads = max(1, 4 * self.kv_heads // self.heads)
        lengths = (9, 40, 23) if KINDS[self.kind].unequal else (40,) * 2
        return replace(self, heads=4, kv_heads=kv_heads, lengths=lengths, page=16)

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def length(self) -> int:
        """The sequences' mean length."""
        return sum(self.lengths) // self.batch

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def stored(self) -> torch.dtype:
        return KINDS[self.kind].stored or self.dtype

    def cache_bytes(self) -> int:
        """Bytes of the keys and values that are seen, and their scales: what a step must read."""
        numbers = 2 * sum(self.lengths) * self.kv_heads
        return numbers * (self.size * self.stored.itemsize + (4 if self.stored == torch.int8 else 0))


def _unequal(count: int, mean: int) -> tuple[int, ...]:
    """Lengths between about a third and five thirds of the mean; always the same."""
    draw = random.Random(count)
    weights = [draw.uniform(1, 5) for _ in range(count)]
    return tuple(max(1, int(mean * count * weight / sum(weights))) for weight in weights)


@dataclass(frozen=True)
class Inputs:
    """Tensors of a problem.

    Attributes:
        q: (batch, heads, 1, size).
        keys, values: (batch, kv_heads, length, size), or (pages, kv_heads, page, size).
        seqlens: (batch,) int32.
        table: (batch, pages of the longest) int32; None: not paged.
        scales: of keys and of values: float32 (batch, kv_heads, length) for int8, (kv_heads,) for float8.
    """

    problem: Problem
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    seqlens: torch.Tensor
    table: torch.Tensor | None = None
    scales: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, problem: Problem, device: torch.device) -> Inputs:
        """Fresh random numbers."""
        batch, heads, longest = problem.batch, problem.kv_heads, max(problem.lengths)
        table = None
        rows = (batch, heads, longest)
        if KINDS[problem.kind].paged:
            pages = -(-longest // problem.page)
            table = torch.randperm(batch * pages, device=device).int().view(batch, pages)
            rows = (batch * pages, heads, problem.page)
        q = torch.randn((batch, problem.heads, 1, problem.size), dtype=problem.dtype, device=device)
        keys, values = (_stored((*rows, problem.size), problem, device) for _ in range(2))
        scales = None
        if problem.stored == torch.int8:
            key_scales, value_scales = (torch.rand(rows, device=device) / 64 + 1 / 128 for _ in range(2))
            scales = key_scales, value_scales
        elif problem.stored != problem.dtype:
            scales = torch.full((heads,), 0.5, device=device), torch.full((heads,), 2.0, device=device)
        seqlens = torch.tensor(problem.lengths, dtype=torch.int32, device=device)
        return cls(problem, q, keys, values, seqlens, table, scales)

    @cached_property
    def exact(self) -> torch.Tensor:
        """The output in float64, from the definition, one sequence after the other."""
        problem = self.problem
        out = torch.empty(self.q.shape, dtype=torch.float64, device=self.q.device)
        for b, length in enumerate(problem.lengths):
            k, v = (t[0, :, :length] for t in dense(self, slice(b, b + 1), torch.float64))
            q = self.q[b].double().view(problem.kv_heads, problem.group, problem.size)
            weights = (q @ k.transpose(1, 2) / math.sqrt(problem.size)).softmax(-1)
            out[b] = (weights @ v).view(problem.heads, 1, problem.size)
        return out


def _stored(shape: tuple[int, ...], problem: Problem, device: torch.device) -> torch.Tensor:
    if problem.stored == torch.int8:
        return torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
    if problem.stored == problem.dtype:
        return torch.randn(shape, dtype=problem.dtype, device=device)
    # In parts: there are no random numbers of 8 bits, and those of more would need more memory than the cache.
    made = torch.empty(shape, dtype=problem.stored, device=device)
    for part in made:
        part.copy_(torch.randn(part.shape, dtype=problem.dtype, device=device))
    return made


def dense(inputs: Inputs, rows: slice, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of some sequences, (sequences, kv_heads, room, size): the numbers that the stored ones stand for,
    in another dtype, in a row."""
    found = []
    for number, cache in enumerate((inputs.keys, inputs.values)):
        if inputs.table is not None:
            pages = cache[inputs.table[rows]]  # (sequences, pages, kv_heads, page, size)
            part = pages.transpose(1, 2).flatten(2, 3)
        else:
            part = cache[rows]
        part = part.to(dtype)
        if inputs.scales is not None:
            scales = inputs.scales[number]
            factors = scales[rows, :, :, None] if scales.dim() == 3 else scales[:, None, None]
            part = part * factors.to(dtype)
        found.append(part)
    return found[0], found[1]


# () -> (batch, heads, 1, size)
Step = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Provider:
    """How a library computes the step.

    Attributes:
        offer: the step over some inputs; None where the library does not take such a cache.
        within: what the step runs in.
    """

    offer: Callable[[Inputs], Step | None]
    within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


Found = dict[str, Provider]


def run(step: Step, provider: Provider) -> Run:
    """What to time."""

    def once() -> object:
        with provider.within(), torch.no_grad():
            return step()

    return once


def distance(step: Step, provider: Provider, inputs: Inputs) -> float:
    """Relative distance ‖found - exact‖ / ‖exact‖ of a step's output from float64's. NaN counts as infinite."""
    with provider.within(), torch.no_grad():
        found = step()
    if found.shape != inputs.exact.shape:
        raise ValueError(f"an output of shape {tuple(found.shape)}, not {tuple(inputs.exact.shape)}")
    relative = float((found.double() - inputs.exact).norm() / inputs.exact.norm())
    return relative if relative == relative else float("inf")


# --- fusedops --------------------------------------------------------------------------------------------------------


def _fusedops() -> Provider:
    from fusedops.attention.autograd_decode import unsupported
    from fusedops.attention.cache import Cache

    def offer(inputs: Inputs) -> Step | None:
        keys, values = inputs.scales or (None, None)
        cache = Cache(inputs.keys, inputs.values, inputs.seqlens, inputs.table, keys, values, False)
        if inputs.q.is_cuda and unsupported(cache, inputs.q.dtype):
            return None  # float8 on a GPU that has none
        return lambda: fusedops.attention_decode(
            inputs.q, inputs.keys, inputs.values, cache_seqlens=inputs.seqlens, block_table=inputs.table,
            k_scale=keys, v_scale=values,
        )  # fmt: skip

    return Provider(offer)


# --- torch -----------------------------------------------------------------------------------------------------------


def _sdpa_step(inputs: Inputs) -> Step:
    problem = inputs.problem
    plain = inputs.table is None and inputs.scales is None
    mask = None
    if KINDS[problem.kind].unequal or (inputs.table is not None and problem.length % problem.page):
        room = problem.page * -(-max(problem.lengths) // problem.page)
        mask = torch.arange(room, device=inputs.q.device) < inputs.seqlens[:, None, None, None]

    def step() -> torch.Tensor:
        keys, values = (inputs.keys, inputs.values) if plain else dense(inputs, slice(None), problem.dtype)
        return F.scaled_dot_product_attention(
            inputs.q, keys, values, attn_mask=mask, enable_gqa=problem.group > 1
        )  # a query of length 1 sees every key: no causality

    return step


def _sdpa(backend: SDPBackend | None) -> Callable[[], Provider]:
    @contextlib.contextmanager
    def within() -> Iterator[None]:
        # torch warns of each reason why a backend does not take a call, and then raises.
        with warnings.catch_warnings(), contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
            warnings.simplefilter("ignore")
            yield

    return lambda: Provider(_sdpa_step, within)


def _flex() -> Provider:
    from torch.nn.attention.flex_attention import flex_attention

    def offer(inputs: Inputs) -> Step | None:
        if inputs.table is not None or inputs.scales is not None:
            return None
        compiled = compare.compiled(flex_attention)
        return lambda: compiled(inputs.q, inputs.keys, inputs.values, enable_gqa=inputs.problem.group > 1)

    return Provider(offer)


# --- other libraries -------------------------------------------------------------------------------------------------


def _flash_attn(module: str, table: str) -> Callable[[], Provider]:
    """FlashAttention 2 and 3, which name the table of pages differently."""

    def load() -> Provider:
        function = importlib.import_module(module).flash_attn_with_kvcache

        def offer(inputs: Inputs) -> Step | None:
            if inputs.scales is not None:
                return None
            q, keys, values = (t.transpose(1, 2) for t in (inputs.q, inputs.keys, inputs.values))
            options = {"cache_seqlens": inputs.seqlens, "causal": True, table: inputs.table}

            def step() -> torch.Tensor:
                found = function(q, keys, values, **options)
                output: torch.Tensor = found[0] if isinstance(found, tuple) else found
                return output.transpose(1, 2)

            return step

        return Provider(offer)

    return load


def _flashinfer() -> Provider:
    library = importlib.import_module("flashinfer")

    def offer(inputs: Inputs) -> Step | None:
        problem = inputs.problem
        if problem.stored == torch.int8:
            return None
        device = inputs.q.device
        # One room a sequence is one page a sequence.
        page = problem.page if inputs.table is not None else inputs.keys.shape[2]
        counts = [-(-length // page) for length in problem.lengths]
        table = inputs.table if inputs.table is not None else torch.arange(problem.batch, device=device).int()[:, None]
        indices = torch.cat([row[:count] for row, count in zip(table, counts, strict=True)])
        starts = torch.tensor([0, *counts]).cumsum(0).int().to(device)
        last = inputs.seqlens - (starts.diff() - 1) * page
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
        # Its documentation advises tensor cores from four queries a key head on.
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=problem.group >= 4)
        wrapper.plan(
            starts, indices, last, problem.heads, problem.kv_heads, problem.size, page,
            q_data_type=problem.dtype, kv_data_type=problem.stored,
        )  # fmt: skip
        q, cache = inputs.q[:, :, 0], (inputs.keys, inputs.values)
        options = {name: float(t[0]) for name, t in zip(("k_scale", "v_scale"), inputs.scales or (), strict=False)}
        return lambda: wrapper.run(q, cache, **options)[:, :, None]

    return Provider(offer)


def _xformers() -> Provider:
    ops = importlib.import_module("xformers.ops")
    biases = importlib.import_module("xformers.ops.fmha.attn_bias")

    def offer(inputs: Inputs) -> Step | None:
        problem = inputs.problem
        if inputs.table is not None or inputs.scales is not None:
            return None
        room = inputs.keys.shape[2]
        bias = biases.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            q_seqlen=[1] * problem.batch, kv_padding=room, kv_seqlen=list(problem.lengths)
        )
        # Its way: (1, tokens, groups, heads of a group, size), keys expanded.
        q = inputs.q.view(1, problem.batch, problem.kv_heads, problem.group, problem.size)
        keys, values = (
            t.transpose(1, 2).reshape(1, -1, problem.kv_heads, 1, problem.size).expand(-1, -1, -1, problem.group, -1)
            for t in (inputs.keys, inputs.values)
        )
        return lambda: ops.memory_efficient_attention_forward(q, keys, values, attn_bias=bias).reshape(inputs.q.shape)

    return Provider(offer)


PROVIDERS: dict[str, Callable[[], Provider]] = {
    OURS: _fusedops,
    "SDPA": _sdpa(None),
    "SDPA cuDNN": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "SDPA flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "torch.compile": lambda: Provider(lambda inputs: compare.compiled(_sdpa_step(inputs))),
    "FlexAttention": _flex,
    "flash-attn 2": _flash_attn("flash_attn", "block_table"),
    "flash-attn 3": _flash_attn("flash_attn_interface", "page_table"),
    "FlashInfer": _flashinfer,
    "xformers": _xformers,
}
