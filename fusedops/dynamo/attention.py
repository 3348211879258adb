"""Attention in a graph: torch's scaled_dot_product_attention, with repeated keys, and softmax that is written out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from fusedops.attention.functional import scaled_dot_product_attention
from fusedops.dynamo.graph import (
    FLOATS,
    Call,
    Left,
    binary,
    call_of,
    dtype_of,
    is_last,
    known,
    number,
    operands,
    same_sizes,
    uncast,
    value_of,
)
from fusedops.dynamo.rewriting import Made, Match, Rewriter

_WHOLE = slice(None, None, None)


def replace_attentions(rewriter: Rewriter) -> None:
    """Replace each attention; key and value heads that were repeated for it are read where they lie."""
    for node in rewriter.nodes():
        call = call_of(node)
        if call is None or call.name not in ("attention", "matmul"):
            continue
        what = "attention" if call.name == "attention" else "attention, written out"
        try:
            match = _own_function(node, call) if call.name == "attention" else _written_out(node, call)
            if match is not None:
                rewriter.replace(match)
        except Left as reason:
            rewriter.leave(what, "fusedops.scaled_dot_product_attention", node, str(reason))


def _own_function(node: Node, call: Call) -> Match:
    a = dict(call.args)
    if number(a.get("dropout_p", 0.0)) != 0.0:
        raise Left("dropout: it would draw other random numbers")
    spare: list[Node] = []
    if not a.get("enable_gqa", False):
        one, other = _repeated(a["key"]), _repeated(a["value"])
        if one is not None and other is not None and one[1] == other[1]:
            a["key"], a["value"], a["enable_gqa"] = one[0], other[0], True
            spare = [*one[2], *other[2]]
    args = (a.pop("query"), a.pop("key"), a.pop("value"))
    what = "attention, repeated heads" if spare else "attention"
    return Match(what, scaled_dot_product_attention, args, a, (node,), (), spare)


def _repeated(node: Any) -> tuple[Any, int, list[Node]] | None:
    """(tensor, times, nodes) where each head of a (batch, heads, length, size) tensor is repeated in place.

    ``repeat_interleave(t, times, 1)``, or ``t[:, :, None].expand(b, h, times, s, d).reshape(b, h * times, s, d)``.
    """
    value, call = value_of(node), call_of(node)
    if value is None or value.dim() != 4:
        return None
    if call is not None and call.name == "repeat_interleave":
        source, repeats = call.args["input"], call.args.get("repeats")
        if call.args.get("dim") not in (1, -3) or type(repeats) is not int or not _heads_times(source, repeats, value):
            return None
        return source, repeats, [node]
    shape = node
    if not (shape.op == "call_method" and shape.target in ("reshape", "view")):
        return None
    spread = shape.args[0]
    if not (isinstance(spread, Node) and spread.op == "call_method" and spread.target == "expand"):
        return None
    index = spread.args[0]
    if not isinstance(index, Node):
        return None
    if not _inserts_third(index):
        return None
    source, middle = index.args[0], value_of(spread)
    if middle is None or middle.dim() != 5 or type(middle.shape[2]) is not int:
        return None
    times = middle.shape[2]
    inner = value_of(source)
    if inner is None or not same_sizes(middle.shape, (*inner.shape[:2], times, *inner.shape[2:])):
        return None
    return (source, times, [shape, spread, index]) if _heads_times(source, times, value) else None


def _inserts_third(node: Node) -> bool:
    """``t[:, :, None, :, :]`` or ``t.unsqueeze(2)`` of four dimensions."""
    source = value_of(node.args[0]) if node.args else None
    if source is None or source.dim() != 4:
        return False
    if node.op == "call_method" or node.target is torch.unsqueeze:
        return node.target in ("unsqueeze", torch.unsqueeze) and node.args[1:] in ((2,), (-3,))
    call = call_of(node)
    if call is None or call.name != "getitem":
        return False
    index = call.args.get("index")
    if not isinstance(index, (tuple, list)) or index[:3] != (_WHOLE, _WHOLE, None):
        return False
    return all(part == _WHOLE or part is Ellipsis for part in index[3:]) and len(index) <= 5


def _heads_times(source: Any, times: Any, value: torch.Tensor) -> bool:
    inner = value_of(source)
    if inner is None or inner.dim() != 4 or type(times) is not int:
        return False
    batch, heads, length, size = inner.shape
    return same_sizes(value.shape, (batch, heads * times, length, size))


def _written_out(node: Node, call: Call) -> Match | None:
    """``softmax(q @ k.transpose(-2, -1) * scale + mask, -1) @ v``."""
    inside: list[Node] = []
    weights = _undropped(call.args["input"], inside)
    weights = _undropped(uncast(weights, inside), inside)
    softmax = call_of(weights)
    if softmax is None or softmax.name != "softmax":
        return None
    inside.append(weights)
    if not is_last(softmax.args.get("dim"), softmax.args["input"]):
        return None
    scores = uncast(softmax.args["input"], inside)
    mask, scores = _masked(scores, inside)
    scale, product = _scaled(uncast(scores, inside), inside)
    found = _matmul(product)
    if found is None:
        return None
    inside.append(product)
    factor, query = _scaled(found[0], inside)
    key = _keys(found[1], inside)
    value = call.args["other"]
    if key is None:
        return None
    q, k, v = value_of(query), value_of(key), value_of(value)
    if q is None or k is None or v is None or not q.dim() == k.dim() == v.dim() >= 3:
        return None
    if not (same_sizes(q.shape[:-2], k.shape[:-2]) and same_sizes(k.shape[:-1], v.shape[:-1])):
        raise Left("queries, keys and values differ in their batch dimensions")
    if softmax.args.get("dtype") not in (None, *FLOATS) or dtype_of(weights) not in FLOATS:
        raise Left(f"it is computed in {dtype_of(weights)}")
    if known(k.shape[-2] == 0) or not math.isfinite(scale * factor):
        return None
    kwargs = {"attn_mask": mask, "scale": scale * factor}
    return Match("attention, written out", scaled_dot_product_attention, (query, key, value), kwargs, (node,), inside)


def _matmul(node: Any) -> tuple[Any, Any] | None:
    call = call_of(node)
    return (call.args["input"], call.args["other"]) if call is not None and call.name == "matmul" else None


def _undropped(node: Any, inside: list[Node]) -> Any:
    """What a dropout that does nothing was given."""
    call = call_of(node)
    if call is None or call.name != "dropout":
        return node
    if call.args.get("training", True) is not False and number(call.args.get("p", 0.5)) != 0.0:
        raise Left("dropout: it would draw other random numbers")
    inside.append(node)
    return call.args["input"]


def _masked(scores: Any, inside: list[Node]) -> tuple[Any, Any]:
    """(mask, what it was applied to): a floating tensor that was added, or where a bool one does not hide."""
    call = call_of(scores)
    if call is not None and call.name == "masked_fill" and number(call.args.get("value")) == -math.inf:
        inside.append(scores)
        return Made(torch.logical_not, (call.args["mask"],)), uncast(call.args["input"], inside)
    for one, other in operands(scores, "add"):
        value, total = value_of(other), value_of(scores)
        if value is None or total is None or value_of(one) is None or not value.is_floating_point():
            continue
        product = uncast(one, [])
        if _matmul(product) is None and _scaled(product, [])[1] is product:
            continue
        inside.append(scores)
        return other, uncast(one, inside)
    return None, scores


def _scaled(node: Any, inside: list[Node]) -> tuple[float, Any]:
    """(factor, tensor) where a node is a tensor times a constant, or divided by one."""
    for tensor, factor in operands(node, "mul"):
        if number(factor) is not None:
            inside.append(node)
            return float(factor), tensor
    quotient = binary(node, "div")
    if quotient is not None and number(quotient[1]):
        inside.append(node)
        return 1.0 / float(quotient[1]), quotient[0]
    return 1.0, node


def _keys(node: Any, inside: list[Node]) -> Node | None:
    """What a (…, size, length) tensor is the transpose of; None: no transpose."""
    call, value = call_of(node), value_of(node)
    if call is None or value is None:
        return None
    swapped = call.name == "transpose" and {
        d % value.dim() for d in (call.args.get("dim0"), call.args.get("dim1")) if type(d) is int
    } == {value.dim() - 1, value.dim() - 2}
    if not swapped and not (call.name == "getattr" and call.args.get("name") == "mT"):
        return None
    inside.append(node)
    return call.args["input"]
