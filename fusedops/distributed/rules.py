"""The sharding rule of each operator (see :mod:`fusedops.distributed.sharding`).

R: replicated. P: each device has a term of the sum. S(d): sharded along dimension d.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import Partial, Shard

from fusedops.distributed.seeds import shard_dim
from fusedops.distributed.sharding import REPLICATE as R
from fusedops.distributed.sharding import Arguments, Rule, Way
from fusedops.linear.reference import keeps_output, saves

P = Partial()
S = Shard


def _wanted(needs: Any, *placements: Any) -> list[Any]:
    """Placements of gradients; one that is not wanted has shape (0,)."""
    return [placement if need else R for placement, need in zip(placements, needs, strict=True)]


def _norm(a: Arguments) -> Iterator[Way]:
    """Any dimension but those that are normalised."""
    for dim in range(len(a.input.shape) - a.dims):
        s = S(dim)
        outputs = [s, R if a.residual is None else s, s if a.kind == "layer" else R, s]
        yield Way(outputs, {"input": s, "residual": s, "seed": S(0)})


def _norm_backward(a: Arguments) -> Iterator[Way]:
    for dim in range(len(a.grad_output.shape) - a.dims):
        s = S(dim)
        inputs = dict.fromkeys(("grad_output", "grad_residual", "saved", "mean", "rstd"), s)
        yield Way(_wanted(a.needs, s, s, P, P), {**inputs, "seed": S(0)})


def _group_norm(a: Arguments) -> Iterator[Way]:
    yield Way([S(0)] * 3, {"input": S(0)})


def _group_norm_backward(a: Arguments) -> Iterator[Way]:
    inputs = dict.fromkeys(("grad_output", "input", "mean", "rstd"), S(0))
    yield Way(_wanted(a.needs, S(0), P, P), inputs)


def _linear(a: Arguments) -> Iterator[Way]:
    """Rows of the input; rows of the weight; or the summed dimension, where nothing but a sum follows."""
    last = len(a.input.shape) - 1
    keeps = a.save and saves(a.activation, a.residual, a.seed, a.input.tensor_meta.dtype, a.out_dtype)

    def outputs(placement: Any) -> list[Any]:
        return [R if keeps and a.recompute else placement, placement if keeps else R]

    for dim in range(last):
        yield Way(outputs(S(dim)), {"input": S(dim), "residual": S(dim), "seed": S(0)})
    yield Way(outputs(S(last)), {"weight": S(0), "bias": S(0), "residual": S(last), "seed": S(0)})
    if a.activation is None and a.seed is None:
        yield Way([P, R], {"input": S(last), "weight": S(1), "bias": P, "residual": P})


def _linear_backward(a: Arguments) -> Iterator[Way]:
    last = len(a.grad_output.shape) - 1
    accumulates = hasattr(a, "main_grad")

    def outputs(dx: Any, dw: Any, db: Any) -> list[Any]:
        made = _wanted(a.needs, dx, dw, db)
        return [made[0], made[2]] if accumulates else made

    if not accumulates:  # else a device would add to all of main_grad what is only its part of the sum
        for dim in range(last):
            s = S(dim)
            yield Way(outputs(s, P, P), {"grad_output": s, "input": s, "saved": s, "seed": S(0)})
    s = S(last)
    yield Way(outputs(P, S(0), S(0)), {"grad_output": s, "weight": S(0), "saved": s, "seed": S(0), "main_grad": S(0)})
    if a.seed is None:
        yield Way(outputs(s, S(1), R), {"input": s, "weight": S(1), "main_grad": S(1)})


def _gated_linear(a: Arguments) -> Iterator[Way]:
    """Rows of the input, or rows of both weights (not of both in one, whose first rows are all the gate's)."""
    last = len(a.input.shape) - 1
    keeps = a.save and not a.recompute

    def outputs(placement: Any) -> list[Any]:
        return [placement, placement if keeps else R]

    for dim in range(last):
        yield Way(outputs(S(dim)), {"input": S(dim)})
    if a.weight_up is not None:
        rows = dict.fromkeys(("weight_gate", "weight_up", "bias_gate", "bias_up"), S(0))
        yield Way(outputs(S(last)), rows)


def _gated_linear_backward(a: Arguments) -> Iterator[Way]:
    last = len(a.grad_output.shape) - 1
    needs = [need and not (a.packed and place in (2, 4)) for place, need in enumerate(a.needs)]
    for dim in range(last):
        s = S(dim)
        yield Way(_wanted(needs, s, P, P, P, P), {"grad_output": s, "input": s, "saved": s})
    if not a.packed:
        inputs = dict.fromkeys(("weight_gate", "weight_up", "bias_gate", "bias_up"), S(0))
        yield Way(_wanted(needs, P, *[S(0)] * 4), {**inputs, "grad_output": S(last), "saved": S(last)})


def _grouped_linear(a: Arguments) -> Iterator[Way]:
    """Rows of every weight, or the summed dimension; of equal groups the groups and their rows too."""
    last = len(a.input.shape) - 1
    keeps = a.save and a.activation is not None and not keeps_output(a.activation)

    def outputs(placement: Any) -> list[Any]:
        return [placement, placement if keeps else R]

    yield Way(outputs(S(last)), {"weights": S(1), "bias": S(1)})
    if a.activation is None:
        yield Way([P, R], {"input": S(last), "weights": S(2), "bias": P})
    if a.offsets is None:
        yield Way(outputs(S(0)), {"input": S(0), "weights": S(0), "bias": S(0)})
        yield Way(outputs(S(1)), {"input": S(1)})


def _grouped_linear_backward(a: Arguments) -> Iterator[Way]:
    last = len(a.grad_output.shape) - 1
    needs = (a.need_input, a.need_weights, a.need_bias)
    yield Way(_wanted(needs, P, S(1), S(1)), {"grad_output": S(last), "weights": S(1), "saved": S(last)})
    yield Way(_wanted(needs, S(last), S(2), R), {"input": S(last), "weights": S(2)})
    if a.offsets is None:
        names = ("grad_output", "input", "weights", "saved")
        yield Way(_wanted(needs, S(0), S(0), S(0)), dict.fromkeys(names, S(0)))
        yield Way(_wanted(needs, S(1), P, P), dict.fromkeys(("grad_output", "input", "saved"), S(1)))


def _fp8_linear(a: Arguments) -> Iterator[Way]:
    last = len(a.input.shape) - 1
    of_input = math.prod(a.scale_input.shape) != 1
    of_weight = math.prod(a.scale_weight.shape) != 1
    for dim in range(last):
        yield Way([S(dim)], {"input": S(dim), "scale_input": S(dim) if of_input else R})
    yield Way([S(last)], {"weight": S(0), "scale_weight": S(0) if of_weight else R, "bias": S(0)})
    if a.activation is None:
        yield Way([P], {"input": S(last), "weight": S(1), "bias": P})


def _quantized_linear(a: Arguments) -> Iterator[Way]:
    last = len(a.input.shape) - 1
    for dim in range(last):
        yield Way([S(dim)], {"input": S(dim)})
    yield Way([S(last)], {"weight": S(0), "scales": S(0), "bias": S(0)})
    # A device must have whole groups; each device's rows have the scales of theirs.
    grouped = a.group_size is not None
    devices = math.prod(a.input.mesh.shape)
    if a.activation is None and (not grouped or a.scales.shape[1] % devices == 0) and a.weight.shape[1] % devices == 0:
        yield Way([P], {"input": S(last), "weight": S(1), "scales": S(1) if grouped else R, "bias": P})


def _norm_linear(a: Arguments) -> Iterator[Way]:
    """Rows of the input, or rows of the weight."""
    last = len(a.input.shape) - 1
    keeps = a.save and a.activation is not None and not keeps_output(a.activation)
    layer = a.kind == "layer"
    for dim in range(last):
        s = S(dim)
        yield Way([s, s if keeps else R, s if layer else R, s], {"input": s})
    yield Way([S(last), S(last) if keeps else R, R, R], {"weight": S(0), "bias": S(0)})


def _norm_linear_backward(a: Arguments) -> Iterator[Way]:
    last = len(a.grad_output.shape) - 1
    for dim in range(last):
        inputs = dict.fromkeys(("grad_output", "input", "saved", "mean", "rstd"), S(dim))
        yield Way(_wanted(a.needs, S(dim), P, P, P, P), inputs)
    inputs = {"grad_output": S(last), "weight": S(0), "saved": S(last)}
    yield Way(_wanted(a.needs, P, P, P, S(0), S(0)), inputs)


def _devices(*specs: Any, dim: int) -> int:
    """How many devices share a dimension of some of these; none do: all that might."""
    mesh = specs[0].mesh
    shared = [
        size
        for place, size in enumerate(mesh.shape)
        if any(spec is not None and shard_dim(spec.placements[place]) == dim for spec in specs)
    ]
    return math.prod(shared or mesh.shape)


class _Attention:
    """The ways of attention in its forward and its backward: (name, of q and results, of k and v, of their sums).

    Batch and heads; queries where no place on a diagonal matters. A user's rule may read the numbers of batch, head
    and places, and lists of blocks are made for them: then everything is replicated.
    """

    def __init__(self, a: Arguments, *others: Any) -> None:
        self.a = a
        q, k = a.q.shape, a.k.shape
        self.ways: list[str] = []
        if a.score_mod or a.mask_mod:
            return
        if not a.sequences:
            self.ways.append("batch")
        devices = _devices(a.q, a.k, a.v, *others, dim=1)
        if q[1] == k[1] or (k[1] and k[1] % devices == 0):
            self.ways.append("heads")
        elif k[1] == 1:
            self.ways.append("query heads")
        diagonal = a.left is not None or a.right is not None or a.alibi_slopes is not None
        if not a.sequences and not diagonal:
            self.ways.append("queries")

    def place(self, way: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
        """The sharded dimension of q, and placements of all that is not a result and of their gradients."""
        a = self.a
        dim = {"batch": 0, "heads": 1, "query heads": 1, "queries": 2}[way]
        of_keys = S(dim) if way in ("batch", "heads") else R
        inputs = {"q": S(dim), "k": of_keys, "v": of_keys, "seed": S(0)}
        if a.attn_mask is not None and a.attn_mask.shape[dim] > 1:
            inputs["attn_mask"] = S(dim)
        if a.alibi_slopes is not None and dim < 2 and (dim == 1 or a.alibi_slopes.shape[0] > 1):
            inputs["alibi_slopes"] = S(dim)
        if dim == 1:
            inputs["sinks"] = S(0)
        # What is whole everywhere gets a term of its gradient from each device.
        grads = {name: inputs.get(name, R) for name in ("q", "k", "v", "attn_mask", "alibi_slopes", "sinks")}
        return dim, inputs, {name: P if placement == R else placement for name, placement in grads.items()}


def _attention(a: Arguments) -> Iterator[Way]:
    cases = _Attention(a)
    for way in cases.ways:
        dim, inputs, _ = cases.place(way)
        yield Way([S(dim), S(dim), S(dim + 1)], inputs)


def _attention_backward(a: Arguments) -> Iterator[Way]:
    cases = _Attention(a, a.grad_output)
    for way in cases.ways:
        dim, inputs, grads = cases.place(way)
        inputs |= {"grad_output": S(dim), "grad_lse": S(dim), "out": S(dim), "statistics": S(dim + 1)}
        yield Way(_wanted(a.needs, *grads.values()), inputs)


def _cache(a: Arguments, way: str) -> dict[str, Any] | None:
    """Placements of a cache by batch (unless it is paged) or by heads."""
    if way == "batch" and a.block_table is not None:
        return None
    dim = 0 if way == "batch" else 1
    inputs: dict[str, Any] = {"keys": S(dim), "values": S(dim)}
    for name in ("key_scales", "value_scales"):
        scales = getattr(a, name)
        if scales is not None:
            per_head = len(scales.shape) == 1
            inputs[name] = (R if dim == 0 else S(0)) if per_head else S(dim)
    if dim == 0:
        inputs["seqlens"] = S(0)
    return inputs


def _append_kv(a: Arguments) -> Iterator[Way]:
    for dim, way in enumerate(("batch", "heads")):
        cache = _cache(a, way)
        if cache is not None:
            yield Way([], {**cache, "k": S(dim), "v": S(dim)})


def _attention_decode(a: Arguments) -> Iterator[Way]:
    for dim, way in enumerate(("batch", "heads")):
        cache = _cache(a, way)
        heads, kv_heads = a.q.shape[1], a.keys.shape[1]
        divides = heads == kv_heads or kv_heads % _devices(a.q, a.keys, a.values, dim=1) == 0
        if cache is None or (dim == 1 and not divides):
            continue
        inputs = {**cache, "q": S(dim)}
        if a.alibi_slopes is not None and (dim == 1 or a.alibi_slopes.shape[0] > 1):
            inputs["alibi_slopes"] = S(dim)
        if dim == 1:
            inputs["sinks"] = S(0)
        yield Way([S(dim), S(dim)], inputs)


RULES: dict[str, Rule] = {
    "norm": _norm,
    "norm_backward": _norm_backward,
    "group_norm": _group_norm,
    "group_norm_backward": _group_norm_backward,
    "linear": _linear,
    "linear_backward": _linear_backward,
    "linear_backward_accumulate": _linear_backward,
    "gated_linear": _gated_linear,
    "gated_linear_backward": _gated_linear_backward,
    "grouped_linear": _grouped_linear,
    "grouped_linear_backward": _grouped_linear_backward,
    "fp8_linear": _fp8_linear,
    "quantized_linear": _quantized_linear,
    "norm_linear": _norm_linear,
    "norm_linear_backward": _norm_linear_backward,
    "attention": _attention,
    "attention_backward": _attention_backward,
    "append_kv": _append_kv,
    "attention_decode": _attention_decode,
}
# What is written to, or says which shards the mask of dropout is drawn for, is never moved.
FIXED = {
    "linear_backward_accumulate": ("seed", "main_grad"),
    "append_kv": ("keys", "values", "key_scales", "value_scales"),
}
