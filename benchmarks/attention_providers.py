"""What ``attention.py`` compares: attention as models have it, as fusedops and other libraries offer it.

A library is imported when it is asked for, and left out with the reason where it is not installed.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import random
import warnings
from collections.abc import Callable
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

DIRECTIONS = ("forward", "backward")

# Tokens in all sequences together, as the papers of FlashAttention measure (Dao 2023, section 4.1); so their sizes of
# what the heads make together.
TOKENS = 16384
_WIDTH = 2048

# q, k, v as in Inputs -> output of q's shape
Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Kind:
    """Which queries and keys there are, and which see each other.

    Attributes:
        heads: numbers of query and key heads; None: as many of both as make 2048 with the head size.
        window: a query sees no more than so many keys, itself the last; only where causal.
        packed: the sequences have unequal lengths and lie one behind the other.
    """

    causal: bool = False
    heads: tuple[int, int] | None = None
    window: int | None = None
    packed: bool = False


KINDS: dict[str, Kind] = {
    "all": Kind(),
    "causal": Kind(causal=True),
    "grouped": Kind(causal=True, heads=(32, 8)),  # as in Llama-3-8B
    "window": Kind(causal=True, window=1024),
    "packed": Kind(causal=True, packed=True),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Attention of one kind at one size.

    Attributes:
        lengths: of the sequences, which see only themselves.
        window: as in :class:`Kind`.
        packed: lengths differ: tensors are (tokens, heads, size), else (batch, length, heads, size).
    """

    kind: str
    heads: int
    kv_heads: int
    size: int
    lengths: tuple[int, ...]
    causal: bool
    window: int | None
    packed: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, kind: str, size: int, length: int, dtype: torch.dtype, tokens: int = TOKENS) -> Problem | None:
        """A problem of ``tokens``; None where it would be another kind's, or there are too few tokens.

        ``length``: of the sequences, the mean where they are packed.
        """
        what = KINDS[kind]
        batch = tokens // length
        if not batch or (what.window or 0) >= length or (what.packed and batch == 1):
            return None
        heads, kv_heads = what.heads or (max(1, _WIDTH // size),) * 2
        lengths = _unequal(batch, batch * length) if what.packed else (length,) * batch
        return cls(kind, heads, kv_heads, size, lengths, what.causal, what.window, what.packed, dtype)

    def tiny(self) -> Problem:
        """The same for a dry run on a CPU."""
        return replace(
            self, heads=4, kv_heads=4 * self.kv_heads // self.heads, lengths=(24, 33, 7) if self.packed else (40,) * 2,
            window=None if self.window is None else 9,
        )  # fmt: skip

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def length(self) -> int:
        """The sequences' mean length."""
        return sum(self.lengths) // len(self.lengths)

    def pairs(self) -> int:
        """Of a query and a key that it sees, in all sequences of one head."""
        return sum(self._pairs(length) for length in self.lengths)

    def _pairs(self, length: int) -> int:
        if not self.causal:
            return length * length
        width = min(self.window or length, length)
        return width * (width + 1) // 2 + (length - width) * width

    def flops(self, direction: str) -> int:
        """Two products of each pair forward, five backward (Dao 2023, section 4.1), only of the keys that are seen."""
        return 2 * self.heads * self.size * self.pairs() * (5 if direction == "backward" else 2)

    def seen(self, queries: range, length: int, device: torch.device) -> torch.Tensor | None:
        """(queries, length) bool: which keys some queries of a sequence see; None: all."""
        if not self.causal:
            return None
        i = torch.arange(queries.start, queries.stop, device=device)[:, None]
        j = torch.arange(length, device=device)[None, :]
        seen = j <= i
        return seen if self.window is None else seen & (j > i - self.window)


def _unequal(count: int, total: int) -> tuple[int, ...]:
    """``count`` lengths of ``total`` together, between about a third and five thirds of the mean; always the same."""
    draw = random.Random(count)
    weights = [draw.uniform(1, 5) for _ in range(count)]
    lengths = [max(1, int(total * weight / sum(weights))) for weight in weights]
    lengths[-1] += total - sum(lengths)
    return tuple(lengths)


@dataclass(frozen=True)
class Inputs:
    """Tensors of a problem, as models hold them and no library has to copy, and the gradient of the output.

    Attributes:
        tensors: q, k and v: (batch, length, heads, size), or (tokens, heads, size) where the problem is packed.
    """

    problem: Problem
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    gradient: torch.Tensor

    @classmethod
    def of(cls, problem: Problem, device: torch.device) -> Inputs:
        """Fresh random numbers."""
        batch, length = len(problem.lengths), problem.length
        lead = (sum(problem.lengths),) if problem.packed else (batch, length)

        def make(heads: int) -> torch.Tensor:
            return torch.randn((*lead, heads, problem.size), device=device).to(problem.dtype)

        q, k, v = (make(heads) for heads in (problem.heads, problem.kv_heads, problem.kv_heads))
        return cls(problem, (q, k, v), make(problem.heads))

    @cached_property
    def exact(self) -> tuple[torch.Tensor, ...]:
        """The output and the gradients of q, k and v in float64, from the definition."""
        return _exact(self.problem, *self.tensors, self.gradient)


# Scores of float64 that the reference holds at once.
_CHUNK = 1 << 26


def _exact(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """``softmax(q kᵀ / √size) v`` and its gradients, some queries of one sequence at a time."""
    results = [torch.zeros(t.shape, dtype=torch.float64, device=t.device) for t in (q, q, k, v)]
    out, dq, dk, dv = (t.flatten(0, -3) for t in results)  # views: (tokens, heads, size)
    tensors = [t.flatten(0, -3) for t in (q, k, v, gradient)]
    begin = 0
    for length in problem.lengths:
        part = slice(begin, begin + length)
        q_, k_, v_, arriving = (t[part].double() for t in tensors)
        at_once = max(1, _CHUNK // (problem.heads * length))
        for first in range(0, length, at_once):
            rows = range(first, min(length, first + at_once))
            some = slice(begin + rows.start, begin + rows.stop)
            leaves = [t.requires_grad_() for t in (q_[rows.start : rows.stop], k_.detach(), v_.detach())]
            result = _definition(problem.group, problem.seen(rows, length, q.device), *leaves)
            out[some] = result.detach()
            grads = torch.autograd.grad(result, leaves, arriving[rows.start : rows.stop])
            dq[some] = grads[0]
            dk[part] += grads[1]
            dv[part] += grads[2]
        begin += length
    return tuple(results)


def _definition(
    group: int, seen: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Attention of one sequence: tensors and result (length, heads, size)."""
    q, k, v = (t.transpose(0, 1) for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    s = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    if seen is not None:
        s = s.masked_fill(~seen, float("-inf"))
    return (s.softmax(-1) @ v).transpose(0, 1)


class _Known(torch.autograd.Function):
    """An output and gradients that have been computed, as if they were computed here."""

    @staticmethod
    def forward(ctx: Any, known: tuple[torch.Tensor, ...], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.gradients = known[1:]
        return known[0].detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *ctx.gradients


@dataclass(frozen=True, slots=True)
class Provider:
    """How a library computes attention.

    Attributes:
        offer: a problem's function on a device; None where the library has none.
        within: what the function runs in.
    """

    offer: Callable[[Problem, torch.device], Function | None]
    within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


Found = dict[str, Provider]


def run_in(direction: str, provider: Provider, inputs: Inputs) -> Run:
    """What to time: the forward without a graph (as in inference), or a backward alone."""
    function = provider.offer(inputs.problem, inputs.gradient.device)
    assert function is not None
    if direction == "forward":

        def forward() -> object:
            with provider.within(), torch.no_grad():
                return function(*inputs.tensors)

        return forward
    leaves = [t.detach().requires_grad_() for t in inputs.tensors]
    with provider.within():
        output = function(*leaves)

    def backward() -> object:
        with provider.within():
            return torch.autograd.grad(output, leaves, inputs.gradient, retain_graph=True)

    return backward


def distance(provider: Provider, inputs: Inputs) -> float:
    """Largest relative distance of a provider's output and gradients from float64's. NaN counts as infinite."""
    function = provider.offer(inputs.problem, inputs.gradient.device)
    assert function is not None
    rows = len(inputs.gradient)  # all at once: the float64 results are computed once, for every provider

    def exact(*tensors: torch.Tensor) -> tuple[torch.Tensor]:
        result: torch.Tensor = _Known.apply(inputs.exact, *tensors)
        return (result,)

    with provider.within():
        return compare.distance(
            lambda *tensors: (function(*tensors),), exact, inputs.tensors, (True, True, True), (inputs.gradient,), rows
        )


def boundaries(problem: Problem, device: torch.device) -> torch.Tensor:
    """(sequences + 1,) int32: where each packed sequence begins, and the last one's end."""
    return torch.tensor([0, *problem.lengths], device=device).cumsum(0, dtype=torch.int32)


def _heads_first(function: Function) -> Function:
    """Of one that takes (batch, heads, length, size), one that takes (batch, length, heads, size): views."""
    return lambda *tensors: function(*(t.transpose(1, 2) for t in tensors)).transpose(1, 2)


def _first(result: Any) -> torch.Tensor:
    """A library's output, which some of its versions return with the lse behind it."""
    output: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return output


# --- fusedops --------------------------------------------------------------------------------------------------------


def _offer_fusedops(problem: Problem, device: torch.device) -> Function:
    options: dict[str, Any] = {"causal": "bottom_right" if problem.causal else False}
    if problem.window is not None:
        options["window"] = (problem.window - 1, None)
    if problem.packed:
        bounds, longest = boundaries(problem, device), max(problem.lengths)
        return lambda q, k, v: fusedops.attention_varlen(q, k, v, bounds, bounds, longest, longest, **options)
    return _heads_first(lambda q, k, v: fusedops.attention(q, k, v, **options))


def _fusedops() -> Provider:
    return Provider(_offer_fusedops)


# --- torch -----------------------------------------------------------------------------------------------------------


def _sdpa(backend: SDPBackend) -> Callable[[], Provider]:
    @contextlib.contextmanager
    def within() -> Any:
        # torch warns of each reason why a backend does not take a call, and then raises.
        with warnings.catch_warnings(), sdpa_kernel(backend):
            warnings.simplefilter("ignore")
            yield

    def offer(problem: Problem, device: torch.device) -> Function | None:
        if problem.packed:
            # Of nested tensors it takes no causal ones.
            return None if backend == SDPBackend.MATH and problem.causal else _nested_sdpa(problem, device)
        mask = None
        if problem.window is not None:
            if backend == SDPBackend.FLASH_ATTENTION:
                return None  # it takes no mask, and torch's operator no window
            mask = problem.seen(range(problem.length), problem.length, device)
        # The one backend without grouped heads: what its users do instead.
        repeat = problem.group if backend == SDPBackend.EFFICIENT_ATTENTION else 1

        def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if repeat > 1:
                k, v = (t.repeat_interleave(repeat, 1) for t in (k, v))
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=problem.causal and mask is None, enable_gqa=q.shape[1] != k.shape[1]
            )

        return _heads_first(function)

    return lambda: Provider(offer, within)


def _nested_sdpa(problem: Problem, device: torch.device) -> Function:
    """Of packed sequences: torch's way for them, nested tensors."""
    bounds = boundaries(problem, device)
    shortest, longest = min(problem.lengths), max(problem.lengths)

    def nested(t: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(t, bounds, min_seqlen=shortest, max_seqlen=longest).transpose(
            1, 2
        )

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        output = F.scaled_dot_product_attention(nested(q), nested(k), nested(v), is_causal=problem.causal)
        return output.transpose(1, 2).values()

    return function


def _flex() -> Provider:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def offer(problem: Problem, device: torch.device) -> Function:
        sequence = torch.arange(len(problem.lengths), device=device).repeat_interleave(
            torch.tensor(problem.lengths, device=device)
        )

        def seen(b: Any, h: Any, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            result = i >= j
            if problem.window is not None:
                result = result & (i - j < problem.window)
            if problem.packed:
                result = result & (sequence[i] == sequence[j])
            return result

        length = sum(problem.lengths) if problem.packed else problem.length
        # Made once for all layers and steps of a model: it is not timed.
        mask = create_block_mask(seen, None, None, length, length, device=device) if problem.causal else None
        compiled = compare.compiled(flex_attention)
        grouped = _heads_first(lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=problem.group > 1))
        if problem.packed:
            return lambda *tensors: grouped(*(t[None] for t in tensors))[0]
        return grouped

    return Provider(offer)


# --- other libraries -------------------------------------------------------------------------------------------------


def _flash_attn(module: str) -> Callable[[], Provider]:
    """FlashAttention 2 and 3, which have the same functions."""

    def load() -> Provider:
        library = importlib.import_module(module)

        def offer(problem: Problem, device: torch.device) -> Function:
            options: dict[str, Any] = {"causal": problem.causal}
            if problem.window is not None:
                options["window_size"] = (problem.window - 1, 0)
            if problem.packed:
                bounds, longest = boundaries(problem, device), max(problem.lengths)
                return lambda q, k, v: _first(
                    library.flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest, **options)
                )
            return lambda q, k, v: _first(library.flash_attn_func(q, k, v, **options))

        return Provider(offer)

    return load


def _xformers() -> Provider:
    ops = importlib.import_module("xformers.ops")
    biases = importlib.import_module("xformers.ops.fmha.attn_bias")

    def offer(problem: Problem, device: torch.device) -> Function:
        bias: Any = None
        if problem.packed:
            made = biases.BlockDiagonalMask.from_seqlens(list(problem.lengths))
            bias = made.make_causal() if problem.causal else made
        elif problem.window is not None:
            bias = biases.LocalAttentionFromBottomRightMask(window_left=problem.window - 1, window_right=0)
        elif problem.causal:
            bias = biases.LowerTriangularMask()
        group = problem.group

        def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if problem.packed:
                q, k, v = (t[None] for t in (q, k, v))
            if group > 1:  # its way: (batch, length, groups, heads of a group, size), keys expanded
                q = q.unflatten(2, (-1, group))
                k, v = (t[:, :, :, None].expand(-1, -1, -1, group, -1) for t in (k, v))
            output: torch.Tensor = ops.memory_efficient_attention(q, k, v, attn_bias=bias)
            if group > 1:
                output = output.flatten(2, 3)
            return output[0] if problem.packed else output

        return function

    return Provider(offer)


PROVIDERS: dict[str, Callable[[], Provider]] = {
    OURS: _fusedops,
    "SDPA cuDNN": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "SDPA flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "SDPA efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "SDPA math": _sdpa(SDPBackend.MATH),
    "FlexAttention": _flex,
    "flash-attn 2": _flash_attn("flash_attn"),
    "flash-attn 3": _flash_attn("flash_attn_interface"),
    "xformers": _xformers,
}
