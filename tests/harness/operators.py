"""Every public operator and every module of fusedops, with small inputs: what tests of composition run over.

A test that must hold for all of them is parametrised with ``OPERATORS`` or ``MODULES`` (``ids=str``), so that an
operator that is added later meets it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import fusedops
from fusedops.linear.activations import ACTIVATIONS
from fusedops.runtime.backend import HAS_TRITON
from tests.harness.tensors import randn

if HAS_TRITON:
    from tests.attention import rules

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Operator:
    """One way of calling a public function.

    Attributes:
        name: of the function, and of the variant after a colon.
        function: takes the tensors that ``make`` gives, in that order; returns a tensor or a tuple of tensors.
        make: ``make(device, dtype, length)``: fresh tensors, none of which requires a gradient. ``length`` is how many
            rows or tokens there are (at least 2); every other size stays.
        differentiable: which of the tensors have a gradient.
        replaces: the composition of torch's operators that it replaces, a function of the same tensors; None: there is
            none in torch, or it draws other random numbers.
        random: it draws random numbers: seed torch's generator before each call to get the same.
    """

    name: str
    function: Callable[..., Any]
    make: Callable[..., Tensors]
    differentiable: tuple[int, ...]
    replaces: Callable[..., Any] | None = None
    random: bool = False

    def __str__(self) -> str:
        return self.name

    def inputs(self, device: torch.device | str, dtype: torch.dtype = torch.float32, length: int = 5) -> list:
        """Tensors of which those that are differentiable require a gradient."""
        tensors = list(self.make(device, dtype, length))
        for i in self.differentiable:
            tensors[i].requires_grad_()
        return tensors


@dataclass(frozen=True)
class Module:
    """A module of ``fusedops.nn``: ``build(device, dtype)`` makes it, ``make(device, dtype, length)`` its inputs."""

    name: str
    constructor: Callable[..., torch.nn.Module]
    make: Callable[..., Tensors]
    call: dict[str, Any]

    def __str__(self) -> str:
        return self.name

    def build(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> torch.nn.Module:
        return self.constructor(device=device, dtype=dtype)


def shaped(*shapes: str) -> Callable[..., Tensors]:
    """Normal random tensors; a shape is written as its sizes, ``L`` for the length: ``"2 L 16"``."""

    def make(device: torch.device | str, dtype: torch.dtype, length: int) -> Tensors:
        return tuple(
            randn(*(length if size == "L" else int(size) for size in shape.split()), dtype=dtype, device=device)
            for shape in shapes
        )

    return make


def _floats(name: str, function: Callable[..., Any], *shapes: str, **options: Any) -> Operator:
    """An operator all of whose tensors are floating and differentiable."""
    return Operator(name, function, shaped(*shapes), tuple(range(len(shapes))), **options)


# --- Norms: rows of 16 -----------------------------------------------------------------------------------------------

_ROWS, _ROW = "2 L 16", "16"


def _torch_add(norm: Callable[..., torch.Tensor]) -> Callable[..., Tensors]:
    def composition(x: torch.Tensor, residual: torch.Tensor, *parameters: torch.Tensor) -> Tensors:
        total = x + residual
        return norm(total, (16,), *parameters), total

    return composition


def _group_major(*tensors: torch.Tensor, function: Callable[..., Any]) -> Any:
    """Group norm of tensors (2, L, 4), whose channels are last as a sequence model has them."""
    x, *parameters = tensors
    return function(x.transpose(1, 2), 2, *parameters)


_NORMS = [
    _floats(
        "layer_norm", lambda x, w, b: fusedops.layer_norm(x, 16, w, b), _ROWS, _ROW, _ROW,
        replaces=lambda x, w, b: F.layer_norm(x, (16,), w, b),
    ),
    _floats("layer_norm:recompute", lambda x, *t: fusedops.layer_norm(x, 16, *t, recompute=True), _ROWS, _ROW, _ROW),
    _floats(
        "layer_norm:plain_float32", lambda x: fusedops.layer_norm(x, 16, out_dtype=torch.float32), _ROWS,
        replaces=lambda x: F.layer_norm(x.float(), (16,)),
    ),
    _floats(
        "rms_norm", lambda x, w: fusedops.rms_norm(x, 16, w, 1e-6), _ROWS, _ROW,
        replaces=lambda x, w: F.rms_norm(x, (16,), w, 1e-6),
    ),
    _floats(
        "rms_norm:offset", lambda x, w: fusedops.rms_norm(x, 16, w, 1e-6, weight_offset=1.0), _ROWS, _ROW,
        replaces=lambda x, w: F.rms_norm(x, (16,), w + 1.0, 1e-6),
    ),
    _floats(
        "add_layer_norm", lambda x, r, w, b: fusedops.add_layer_norm(x, r, 16, w, b), _ROWS, _ROWS, _ROW, _ROW,
        replaces=_torch_add(F.layer_norm),
    ),
    _floats(
        "add_layer_norm:dropout", lambda x, r, w, b: fusedops.add_layer_norm(x, r, 16, w, b, dropout_p=0.3),
        _ROWS, _ROWS, _ROW, _ROW, random=True,
    ),
    _floats(
        "add_rms_norm", lambda x, r, w: fusedops.add_rms_norm(x, r, 16, w), _ROWS, _ROWS, _ROW,
        replaces=_torch_add(F.rms_norm),
    ),
    _floats(
        "l2_norm", lambda x: fusedops.l2_norm(x), _ROWS,
        replaces=lambda x: F.normalize(x, dim=-1),
    ),
    _floats("l2_norm:over_length", lambda x: fusedops.l2_norm(x, 1), _ROWS, replaces=lambda x: F.normalize(x, dim=1)),
    _floats(
        "group_norm", partial(_group_major, function=fusedops.group_norm), "2 L 4", "4", "4",
        replaces=partial(_group_major, function=F.group_norm),
    ),
]  # fmt: skip

# --- Linear: 16 to 12 ------------------------------------------------------------------------------------------------

_WEIGHT, _BIAS, _OUT = "12 16", "12", "2 L 12"


def _with_activation(name: str | None) -> Operator:
    """Few activations stand for all: in a graph they differ by their name alone."""
    forward = ACTIVATIONS[name].forward if name else lambda z: z
    return _floats(
        f"linear:{name}" if name else "linear",
        lambda x, w, b: fusedops.linear(x, w, b, name),
        _ROWS, _WEIGHT, _BIAS,
        replaces=lambda x, w, b: forward(F.linear(x, w, b)),
    )  # fmt: skip


def _torch_gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *biases: torch.Tensor) -> torch.Tensor:
    bias_gate, bias_up = biases or (None, None)
    return F.silu(F.linear(x, gate, bias_gate)) * F.linear(x, up, bias_up)


def _groups(device: torch.device | str, dtype: torch.dtype, length: int) -> Tensors:
    """Rows of three groups, the second of them empty."""
    input, weights, bias = shaped("L 16", "3 12 16", "3 12")(device, dtype, length)
    first = length // 2
    return input, weights, torch.tensor([first, first, length], dtype=torch.int32, device=device), bias


def _torch_grouped(
    input: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    group = torch.searchsorted(offsets, torch.arange(len(input), device=input.device, dtype=torch.int32), right=True)
    return (weights[group] @ input[..., None])[..., 0] + bias[group]


def _quantized(bits: int, group_size: int | None) -> Callable[..., Tensors]:
    def make(device: torch.device | str, dtype: torch.dtype, length: int) -> Tensors:
        input, weight, bias = shaped("2 L 32", "12 32", "12")(device, dtype, length)
        return input, *fusedops.quantize_weight(weight, bits, group_size), bias

    return make


def _float8(device: torch.device | str, dtype: torch.dtype, length: int) -> Tensors:
    input, weight, bias = shaped("2 L 32", "12 32", "12")(device, dtype, length)
    return *fusedops.quantize_fp8(input), *fusedops.quantize_fp8(weight, per_row=True), bias


def _call_fp8(
    input: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, scale_weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    return fusedops.fp8_linear(input, weight, scale, scale_weight, bias, "gelu", out_dtype=torch.float32)


_LINEARS = [
    *map(_with_activation, (None, "relu", "gelu", "silu")),
    _floats("linear:no_bias", lambda x, w: fusedops.linear(x, w), _ROWS, _WEIGHT, replaces=F.linear),
    _floats(
        "linear:residual", lambda x, w, b, r: fusedops.linear(x, w, b, "gelu", residual=r), _ROWS, _WEIGHT, _BIAS, _OUT,
        replaces=lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r,
    ),
    _floats(
        "linear:dropout", lambda x, w, b, r: fusedops.linear(x, w, b, "relu", residual=r, dropout_p=0.3),
        _ROWS, _WEIGHT, _BIAS, _OUT, random=True,
    ),
    _floats("linear:recompute", lambda *t: fusedops.linear(*t, "silu", recompute=True), _ROWS, _WEIGHT, _BIAS),
    _floats("gated_linear", lambda *t: fusedops.gated_linear(*t), _ROWS, _WEIGHT, _WEIGHT, replaces=_torch_gated),
    _floats(
        "gated_linear:bias", lambda *t: fusedops.gated_linear(*t), _ROWS, _WEIGHT, _WEIGHT, _BIAS, _BIAS,
        replaces=_torch_gated,
    ),
    _floats(
        "gated_linear:packed", lambda x, w: fusedops.gated_linear(x, w, activation="gelu_tanh"), _ROWS, "24 16",
        replaces=lambda x, w: F.gelu(F.linear(x, w[:12]), approximate="tanh") * F.linear(x, w[12:]),
    ),
    _floats("gated_linear:recompute", lambda *t: fusedops.gated_linear(*t, recompute=True), _ROWS, _WEIGHT, _WEIGHT),
    Operator("grouped_linear", fusedops.grouped_linear, _groups, (0, 1, 3), _torch_grouped),
    Operator("grouped_linear:gelu", lambda *t: fusedops.grouped_linear(*t, "gelu"), _groups, (0, 1, 3),
             lambda *t: F.gelu(_torch_grouped(*t))),
    _floats(
        "batched_linear", lambda x, w, b: fusedops.batched_linear(x, w, b, "relu"), _ROWS, "2 12 16", "2 12",
        replaces=lambda x, w, b: F.relu(torch.baddbmm(b[:, None], x, w.mT)),
    ),
    Operator("quantized_linear", lambda *t: fusedops.quantized_linear(*t, "gelu"), _quantized(8, None), ()),
    Operator("quantized_linear:int4", lambda *t: fusedops.quantized_linear(*t, group_size=16), _quantized(4, 16), ()),
    Operator("fp8_linear", _call_fp8, _float8, ()),
    _floats(
        "layer_norm_linear", lambda *t: fusedops.layer_norm_linear(*t, "gelu"), _ROWS, _ROW, _ROW, _WEIGHT, _BIAS,
        replaces=lambda x, g, h, w, b: F.gelu(F.linear(F.layer_norm(x, (16,), g, h), w, b)),
    ),
    _floats(
        "rms_norm_linear", lambda *t: fusedops.rms_norm_linear(*t), _ROWS, _ROW, _WEIGHT, _BIAS,
        replaces=lambda x, g, w, b: F.linear(F.rms_norm(x, (16,), g), w, b),
    ),
]  # fmt: skip

# --- Attention: 4 query heads and 2 key heads of 8, L queries and L keys ---------------------------------------------

_Q, _KV = "2 4 L 8", "2 2 L 8"


def _torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


def _attention(name: str, *more: str, replaces: Callable[..., Any] | None = None, **options: Any) -> Operator:
    """``more``: names of the tensor arguments after q, k and v, with their shapes: ``"sinks=4"``."""
    names, shapes = [m.partition("=")[0] for m in more], [m.partition("=")[2] for m in more]

    def call(q: Any, k: Any, v: Any, *tensors: Any) -> Any:
        return fusedops.attention(q, k, v, **dict(zip(names, tensors, strict=True)), **options)

    random = bool(options.get("dropout_p"))
    return _floats(
        f"attention:{name}" if name else "attention", call, _Q, _KV, _KV, *shapes, replaces=replaces, random=random
    )


def _bool_mask(device: torch.device | str, dtype: torch.dtype, length: int) -> Tensors:
    q, k, v = shaped(_Q, _KV, _KV)(device, dtype, length)
    mask = torch.rand(2, 1, 1, length, device=device) < 0.7
    mask[..., 0] = True  # torch's composition gives NaN to a query that sees nothing
    return q, k, v, mask


def _documents(device: torch.device | str, dtype: torch.dtype, length: int) -> Tensors:
    ids = torch.arange(length, device=device) * 2 // length
    return *shaped(_Q, _KV, _KV)(device, dtype, length), ids


def _packed(device: torch.device | str, dtype: torch.dtype, length: int) -> Tensors:
    """Three sequences, the second of them empty."""
    ends = torch.tensor([0, length // 2, length // 2, length], dtype=torch.int32, device=device)
    return *shaped("L 4 8", "L 2 8", "L 2 8")(device, dtype, length), ends


def _call_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, **options: Any) -> Any:
    # The torch backend pads to the longest: given, it need not read it from the device, which no graph can hold.
    return fusedops.attention_varlen(q, k, v, ends, ends, q.shape[0], k.shape[0], **options)


def _cached(device: torch.device | str, dtype: torch.dtype, length: int) -> Tensors:
    """One query a sequence, and a cache with room for ``length`` tokens, which is not full."""
    lengths = torch.tensor([1, length - 1], dtype=torch.int32, device=device)
    return *shaped("2 4 1 8", "2 2 L 8", "2 2 L 8")(device, dtype, length), lengths


def _call_decode(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: torch.Tensor) -> Any:
    return fusedops.attention_decode(q, k_cache, v_cache, cache_seqlens=lengths)


_ATTENTIONS = [
    _attention("", replaces=_torch_attention),
    _attention("causal", causal=True, scale=0.3, replaces=partial(_torch_attention, is_causal=True, scale=0.3)),
    _attention("lse", return_lse=True, causal="bottom_right", window=(3, 0)),
    _attention("options", "sinks=4", "alibi_slopes=4", softcap=2.0),
    _attention(
        "float_mask", "attn_mask=1 4 L L", replaces=lambda q, k, v, mask: _torch_attention(q, k, v, attn_mask=mask)
    ),
    _attention("dropout", causal=True, dropout_p=0.3),
    Operator(
        "attention:bool_mask", lambda q, k, v, mask: fusedops.attention(q, k, v, attn_mask=mask), _bool_mask, (0, 1, 2),
        lambda q, k, v, mask: _torch_attention(q, k, v, attn_mask=mask),
    ),
    Operator(
        "attention:document_ids", lambda q, k, v, ids: fusedops.attention(q, k, v, document_ids=ids), _documents,
        (0, 1, 2), lambda q, k, v, ids: _torch_attention(q, k, v, attn_mask=ids[:, None] == ids),
    ),
    _floats(
        "scaled_dot_product_attention", lambda q, k, v: fusedops.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        _Q, _KV, _KV, replaces=_torch_attention,
    ),
    _floats(
        "scaled_dot_product_attention:mask",
        lambda q, k, v, mask: fusedops.scaled_dot_product_attention(q, k, v, mask), _KV, _KV, _KV, "L L",
        replaces=F.scaled_dot_product_attention,
    ),
    Operator("attention_varlen", partial(_call_varlen, causal=True, return_lse=True), _packed, (0, 1, 2)),
    Operator("attention_decode", _call_decode, _cached, ()),
]  # fmt: skip

if HAS_TRITON:
    _RELATIVE = fusedops.ScoreMod(
        rules.relative, rules.unchanged, definition=lambda score, batch, head, i, j: score - 0.1 * (i - j).abs()
    )
    _DILATED = fusedops.MaskMod(rules.dilated, definition=lambda batch, head, i, j: (j - i) % (head + 2) == 0)
    _ATTENTIONS += [_attention("score_mod_and_mask_mod", score_mod=_RELATIVE, mask_mod=_DILATED)]

OPERATORS: list[Operator] = [*_NORMS, *_LINEARS, *_ATTENTIONS]

# --- Modules ---------------------------------------------------------------------------------------------------------


def _module(kind: type[torch.nn.Module], *args: Any, inputs: tuple[str, ...] = (_ROWS,), variant: str = "",
            call: dict[str, Any] | None = None, **kwargs: Any) -> Module:  # fmt: skip
    return Module(kind.__name__ + variant, partial(kind, *args, **kwargs), shaped(*inputs), call or {})


MODULES: list[Module] = [
    _module(fusedops.nn.LayerNorm, 16),
    _module(fusedops.nn.RMSNorm, 16),
    _module(fusedops.nn.RMSNorm, 16, weight_offset=1.0, variant=":offset"),
    _module(fusedops.nn.AddLayerNorm, 16, inputs=(_ROWS, _ROWS)),
    _module(fusedops.nn.AddRMSNorm, 16, inputs=(_ROWS, _ROWS)),
    _module(fusedops.nn.GroupNorm, 2, 4, inputs=("2 4 L",)),
    _module(fusedops.nn.Linear, 16, 12, activation="gelu"),
    _module(fusedops.nn.LayerNormLinear, 16, 12),
    _module(fusedops.nn.LayerNormMLP, 16, 32),
    _module(fusedops.nn.LayerNormMLP, 16, 32, normalization="RMSNorm", variant=":rms"),
    _module(fusedops.nn.MLP, 16, 32),
    _module(fusedops.nn.GatedLinear, 16, 12),
    _module(fusedops.nn.GatedMLP, 16, 32),
    _module(fusedops.nn.GatedMLP, 16, 32, packed=True, variant=":packed"),
    _module(
        fusedops.nn.MultiheadAttention, 16, 2, batch_first=True, inputs=(_ROWS, _ROWS, _ROWS),
        call={"need_weights": False},
    ),
    _module(fusedops.nn.TransformerEncoderLayer, 16, 2, 32, dropout=0.0, batch_first=True),
    _module(fusedops.nn.TransformerEncoderLayer, 16, 2, 32, dropout=0.0, batch_first=True, norm_first=True,
            variant=":norm_first"),
]  # fmt: skip
