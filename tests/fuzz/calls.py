"""Calls of every public function, drawn at random: shapes, strides, dtypes, options, what requires a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

import fusedops
from fusedops.linear.activations import ACTIVATIONS
from tests.harness.tensors import LAYOUTS, randn

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Nothing, one, primes, powers of two and their neighbours.
COUNTS = (0, 1, 2, 3, 5, 7, 16, 17, 33)
WIDTHS = (1, 2, 3, 7, 8, 16, 17, 31, 64, 65, 130)
SIZES = (1, 3, 8, 16, 17, 40, 64)


@dataclass
class Call:
    """A call.

    Attributes:
        name: of the function.
        function: takes the tensors in their order.
        tensors: None: an optional one that is left out.
        shown: options and shapes, for messages.
        rows: the dimension of the first tensor, and of all those of ``with_rows``, along which results are independent.
        with_rows: names of tensors that have it.
    """

    name: str
    function: Callable[..., Any]
    tensors: dict[str, torch.Tensor | None]
    shown: dict[str, Any] = field(default_factory=dict)

    def given(self) -> list[torch.Tensor]:
        return [t for t in self.tensors.values() if t is not None]

    def outputs(self, tensors: list[torch.Tensor | None] | None = None) -> list[torch.Tensor]:
        found = self.function(*(self.tensors.values() if tensors is None else tensors))
        return [found] if isinstance(found, torch.Tensor) else list(found)

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor | None]:
        return [None if t is None else change(t) for t in self.tensors.values()]

    def __repr__(self) -> str:
        def told(t: torch.Tensor | None) -> str:
            if t is None:
                return "None"
            grad = ", grad" if t.requires_grad else ""
            return f"{str(t.dtype)[6:]}{tuple(t.shape)} strides {t.stride()} at {t.storage_offset()}{grad}"

        tensors = "; ".join(f"{name}: {told(t)}" for name, t in self.tensors.items())
        return f"{self.name}({tensors}; {self.shown})"


class Drawer:
    """What the strategies below draw with."""

    def __init__(self, draw: Callable[..., Any], dtype: torch.dtype) -> None:
        self._draw, self.dtype = draw, dtype
        self.seed = draw(st.integers(0, 2**31))
        torch.manual_seed(self.seed)

    def of(self, *values: Any) -> Any:
        return self._draw(st.sampled_from(values))

    def tensor(
        self, *shape: int, grad: bool | None = None, dtype: torch.dtype | None = None, layouts: Any = LAYOUTS
    ) -> torch.Tensor:
        layout = self.of(*layouts)
        wanted = self.of(True, False) if grad is None else grad
        return randn(*shape, dtype=dtype or self.dtype, layout=layout, requires_grad=wanted)

    def parameter(self, *shape: int) -> torch.Tensor | None:
        """An optional tensor, at times of float32 beside 16 bits."""
        if self.of(True, False, False):
            return None
        return self.tensor(*shape, dtype=self.of(self.dtype, self.dtype, torch.float32))


def _leading(d: Drawer) -> tuple[int, ...]:
    return d.of((), (d.of(*COUNTS),), (d.of(1, 2, 3), d.of(*COUNTS)), (2, 1, 3))


def _norm(d: Drawer, name: str) -> Call:
    width, leading = d.of(*WIDTHS), _leading(d)
    shape = d.of((width,), (width,), (2, width))
    tensors = {"input": d.tensor(*leading, *shape)}
    adds = name.startswith("add_")
    if adds:
        tensors["residual"] = d.tensor(*leading, *shape)
    tensors["weight"] = d.parameter(*shape)
    if "layer" in name:
        tensors["bias"] = d.parameter(*shape)
    options = {"eps": d.of(1e-5, 1e-3)}
    if "rms" in name:
        options["weight_offset"] = d.of(0.0, 1.0)
    function = getattr(fusedops, name)
    first = 2 if adds else 1
    return Call(
        name, lambda *t: function(*t[:first], shape, *t[first:], **options), tensors, {"shape": shape, **options}
    )


def _group_norm(d: Drawer) -> Call:
    groups, per_group = d.of(1, 2, 3), d.of(1, 2, 5)
    channels, spatial = groups * per_group, d.of((), (d.of(*COUNTS),), (d.of(1, 3, 8), d.of(1, 4, 7)))
    tensors = {
        "input": d.tensor(d.of(0, 1, 2, 3), channels, *spatial),
        "weight": d.parameter(channels),
        "bias": d.parameter(channels),
    }
    function = lambda x, w, b: fusedops.group_norm(x, groups, w, b)  # noqa: E731
    return Call("group_norm", function, tensors, {"groups": groups})


def _l2_norm(d: Drawer) -> Call:
    shape = (*_leading(d), d.of(*WIDTHS))
    dim = d.of(*range(-len(shape), len(shape)))
    return Call("l2_norm", lambda x: fusedops.l2_norm(x, dim), {"input": d.tensor(*shape)}, {"dim": dim})


ACTIVATED = (None, None, "relu", "gelu", "silu", "tanh", "gelu_tanh", "relu_squared", "mish", "softplus", "elu")


def _linear(d: Drawer) -> Call:
    inner, outer, leading = d.of(*SIZES, 0), d.of(*SIZES), _leading(d)
    activation = d.of(*ACTIVATED)
    assert activation is None or activation in ACTIVATIONS
    tensors = {"input": d.tensor(*leading, inner), "weight": d.tensor(outer, inner), "bias": None, "residual": None}
    if d.of(True, False):
        tensors["bias"] = d.tensor(outer)
    if d.of(True, False, False):
        tensors["residual"] = d.tensor(*leading, outer)
    options = {"recompute": d.of(False, True)}

    def function(x, w, b, r):
        return fusedops.linear(x, w, b, activation, residual=r, **options)

    return Call("linear", function, tensors, {"activation": activation, **options})


def _gated_linear(d: Drawer) -> Call:
    inner, outer, leading = d.of(*SIZES), d.of(*SIZES), _leading(d)
    activation, biased = d.of("silu", "gelu_tanh", "relu", "sigmoid", None), d.of(True, False)
    tensors = {
        "input": d.tensor(*leading, inner), "weight_gate": d.tensor(outer, inner), "weight_up": d.tensor(outer, inner),
        "bias_gate": d.tensor(outer) if biased else None, "bias_up": d.tensor(outer) if biased else None,
    }  # fmt: skip
    return Call("gated_linear", lambda *t: fusedops.gated_linear(*t, activation), tensors, {"activation": activation})


def _grouped_linear(d: Drawer) -> Call:
    inner, outer, groups = d.of(*SIZES), d.of(*SIZES), d.of(1, 2, 4)
    ends = torch.tensor([d.of(0, 1, 3, 9) for _ in range(groups)]).cumsum(0).to(d.of(torch.int32, torch.int64))
    rows = int(ends[-1]) + d.of(0, 2)
    tensors = {
        "input": d.tensor(rows, inner), "weight": d.tensor(groups, outer, inner), "offsets": ends,
        "bias": d.tensor(groups, outer) if d.of(True, False) else None,
    }  # fmt: skip
    activation = d.of(None, "gelu")
    return Call("grouped_linear", lambda *t: fusedops.grouped_linear(*t, activation), tensors, {"offsets": ends})


def _batched_linear(d: Drawer) -> Call:
    batch, rows, inner, outer = d.of(0, 1, 3), d.of(*COUNTS), d.of(*SIZES), d.of(*SIZES)
    tensors = {
        "input": d.tensor(batch, rows, inner), "weight": d.tensor(batch, outer, inner),
        "bias": d.tensor(batch, outer) if d.of(True, False) else None,
    }  # fmt: skip
    return Call("batched_linear", lambda *t: fusedops.batched_linear(*t, "relu"), tensors)


def _quantized_linear(d: Drawer) -> Call:
    bits, group = d.of(8, 4), d.of(None, 16)
    inner, outer, leading = d.of(16, 32, 48, 64), d.of(*SIZES), _leading(d)
    weight, scales = fusedops.quantize_weight(torch.randn(outer, inner), bits, group)
    tensors = {
        "input": d.tensor(*leading, inner, grad=False), "weight": weight, "scales": scales,
        "bias": d.tensor(outer, grad=False) if d.of(True, False) else None,
    }  # fmt: skip
    return Call(
        "quantized_linear", lambda *t: fusedops.quantized_linear(*t, group_size=group), tensors,
        {"bits": bits, "group": group},
    )  # fmt: skip


def _norm_linear(d: Drawer, name: str) -> Call:
    width, outer, leading = d.of(*SIZES), d.of(*SIZES), _leading(d)
    tensors = {"input": d.tensor(*leading, width), "norm_weight": d.tensor(width)}
    if name == "layer_norm_linear":
        tensors["norm_bias"] = d.tensor(width)
    tensors |= {"weight": d.tensor(outer, width), "bias": d.tensor(outer) if d.of(True, False) else None}
    return Call(name, lambda *t: getattr(fusedops, name)(*t, "gelu"), tensors)


def _attention_shapes(d: Drawer) -> tuple[int, int, int, int, int, int]:
    kv_heads = d.of(1, 2)
    return kv_heads * d.of(1, 3), kv_heads, d.of(0, 1, 5, 17, 33), d.of(0, 1, 7, 16, 40), d.of(*SIZES), d.of(*SIZES)


def _attention(d: Drawer) -> Call:
    heads, kv_heads, queries, keys, size, size_v = _attention_shapes(d)
    batch = d.of(0, 1, 2)
    options = {"causal": d.of(False, True, "bottom_right"), "scale": d.of(None, 0.2, -0.5), "softcap": d.of(0.0, 5.0)}
    if d.of(True, False, False):
        options["window"] = d.of((3, 2), (0, None), (None, 4)) if not options["causal"] else (4, 0)
    tensors = {
        "q": d.tensor(batch, heads, queries, size), "k": d.tensor(batch, kv_heads, keys, size),
        "v": d.tensor(batch, kv_heads, keys, size_v), "attn_mask": None, "sinks": None,
    }  # fmt: skip
    if d.of(True, False, False):
        tensors["attn_mask"] = d.tensor(d.of(batch, 1), d.of(heads, 1), d.of(queries, 1), keys)
    if d.of(True, False, False):
        tensors["sinks"] = d.tensor(heads)

    def function(q, k, v, mask, sinks):
        return fusedops.attention(q, k, v, attn_mask=mask, sinks=sinks, return_lse=True, **options)

    return Call("attention", function, tensors, options)


def _sdpa(d: Drawer) -> Call:
    heads, kv_heads, queries, keys, size, size_v = _attention_shapes(d)
    leading, masked = d.of((), (2,)), d.of(True, False)
    tensors = {
        "query": d.tensor(*leading, heads, queries, size), "key": d.tensor(*leading, kv_heads, keys, size),
        "value": d.tensor(*leading, kv_heads, keys, size_v),
        "attn_mask": d.tensor(queries, keys) if masked else None,
    }  # fmt: skip
    causal = not masked and d.of(True, False)

    def function(*t):
        return fusedops.scaled_dot_product_attention(*t, is_causal=causal, enable_gqa=True)

    return Call("scaled_dot_product_attention", function, tensors, {"is_causal": causal})


def _varlen(d: Drawer) -> Call:
    heads, kv_heads, _, _, size, size_v = _attention_shapes(d)
    lengths = [d.of(0, 1, 5, 17, 20) for _ in range(d.of(1, 2, 3))]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    tokens, causal = int(ends[-1]), d.of(False, True, "bottom_right")
    tensors = {
        "q": d.tensor(tokens, heads, size), "k": d.tensor(tokens, kv_heads, size),
        "v": d.tensor(tokens, kv_heads, size_v), "cu_seqlens": ends,
    }  # fmt: skip
    return Call(
        "attention_varlen", lambda q, k, v, e: fusedops.attention_varlen(q, k, v, e, e, causal=causal), tensors,
        {"causal": causal, "lengths": lengths},
    )  # fmt: skip


def _decode(d: Drawer) -> Call:
    heads, kv_heads, _, _, size, size_v = _attention_shapes(d)
    batch, queries, room = d.of(1, 2, 3), d.of(1, 2, 5), d.of(8, 17, 40)
    lengths = torch.tensor([d.of(queries, room, (queries + room) // 2) for _ in range(batch)], dtype=torch.int32)
    splits = d.of(None, 1, 3)
    rows = ("contiguous", "sliced", "expanded", "offset")  # a cache is never copied: its last stride must be 1
    tensors = {
        "q": d.tensor(batch, heads, queries, size, grad=False),
        "k_cache": d.tensor(batch, kv_heads, room, size, grad=False, layouts=rows),
        "v_cache": d.tensor(batch, kv_heads, room, size_v, grad=False, layouts=rows), "cache_seqlens": lengths,
    }  # fmt: skip
    return Call(
        "attention_decode",
        lambda q, k, v, n: fusedops.attention_decode(q, k, v, cache_seqlens=n, num_splits=splits),
        tensors, {"lengths": lengths.tolist(), "num_splits": splits},
    )  # fmt: skip


FUNCTIONS: dict[str, Callable[[Drawer], Call]] = {
    "layer_norm": lambda d: _norm(d, "layer_norm"),
    "rms_norm": lambda d: _norm(d, "rms_norm"),
    "add_layer_norm": lambda d: _norm(d, "add_layer_norm"),
    "add_rms_norm": lambda d: _norm(d, "add_rms_norm"),
    "group_norm": _group_norm,
    "l2_norm": _l2_norm,
    "linear": _linear,
    "gated_linear": _gated_linear,
    "grouped_linear": _grouped_linear,
    "batched_linear": _batched_linear,
    "quantized_linear": _quantized_linear,
    "layer_norm_linear": lambda d: _norm_linear(d, "layer_norm_linear"),
    "rms_norm_linear": lambda d: _norm_linear(d, "rms_norm_linear"),
    "attention": _attention,
    "scaled_dot_product_attention": _sdpa,
    "attention_varlen": _varlen,
    "attention_decode": _decode,
}


@st.composite
def calls(draw: Callable[..., Any], name: str) -> Call:
    """A call of a function; the same draw makes the same numbers."""
    return FUNCTIONS[name](Drawer(draw, draw(st.sampled_from(DTYPES))))


def allowed(exact: torch.Tensor, plain: torch.Tensor) -> float:
    """How far a result may be from the exact one: four times as far as torch's is, and 16 ulp of its largest number.

    Looser than the tests' one rule, which random calls of few elements would break by chance; what this is to find are
    wrong elements, not roundings. No less than 16 ulp of 1: a gradient that is exactly zero (of the scores of a single
    key) is a difference of such numbers.
    """
    if not exact.numel():
        return 0.0
    largest = float(exact.abs().amax())
    error = float((plain.double() - exact).abs().amax())
    return 4 * error + 16 * torch.finfo(plain.dtype).eps * max(1.0, largest if math.isfinite(largest) else 1.0)
