"""Norms in a graph: torch's own functions, and those that are written out.

``x * rsqrt(mean(x²) + eps)`` is an RMS norm of x; with ``x = t - mean(t)`` it is a layer norm of t. Casts to float32
and back, ``* weight``, ``* (1 + weight)`` and ``+ bias`` follow. However a model orders its casts, the kernels round
once, at the end.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from fusedops.dynamo.graph import (
    FLOATS,
    Left,
    binary,
    call_of,
    constant,
    dtype_of,
    is_cast,
    is_last,
    is_vector,
    number,
    operands,
    same_sizes,
    uncast,
    value_of,
    widened,
)
from fusedops.dynamo.rewriting import Made, Match, Rewriter
from fusedops.norm.functional import add_layer_norm, add_rms_norm, group_norm, layer_norm, rms_norm

_PLAIN = {"layer": layer_norm, "rms": rms_norm}
_ADDED = {"layer": add_layer_norm, "rms": add_rms_norm}


@dataclass
class Norm:
    """A norm that was found in a graph; ``root`` computes its result. No shape: it is over the last dimension."""

    kind: str
    x: Node
    shape: Any
    root: Node
    eps: float | None
    weight: Any = None
    bias: Any = None
    offset: float = 0.0
    written_out: bool = False
    inside: list[Node] = field(default_factory=list)
    spare: list[Node] = field(default_factory=list)

    @property
    def what(self) -> str:
        name = f"{'layer' if self.kind == 'layer' else 'RMS'} norm"
        return f"{name}, written out" if self.written_out else name

    def arguments(self, *tensors: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Those of the function that normalises ``tensors`` in this way."""
        shape = self.shape
        if shape is None:
            width = value_of(tensors[0]).shape[-1]  # type: ignore[union-attr]
            shape = (width if type(width) is int else Made(torch.Tensor.size, (tensors[0], -1)),)
        if self.kind == "layer":
            args: tuple[Any, ...] = (*tensors, shape, self.weight, self.bias, self.eps)
            kwargs: dict[str, Any] = {}
        else:
            args = (*tensors, shape, self.weight, self.eps)
            kwargs = {"weight_offset": self.offset} if self.offset else {}
        if self.written_out:  # the casts that were found say which dtype it has, under autocast too
            kwargs["out_dtype"] = dtype_of(self.root)
        return args, kwargs


def replace_norms(rewriter: Rewriter) -> None:
    """Replace each norm, together with the residual sum before it where there is one."""
    for node in rewriter.nodes():
        function = "fusedops.layer_norm"
        what = "norm"
        try:
            if (match := _group_norm(node)) is not None:
                what, function = match.what, "fusedops.group_norm"
                rewriter.replace(match)
                continue
            norm = _own_function(node) or _written_out(node)
            if norm is None:
                continue
            what, function = norm.what, f"fusedops.{_PLAIN[norm.kind].__name__}"
            _replace(rewriter, norm)
        except Left as reason:
            rewriter.leave(what, function, node, str(reason))


def _replace(rewriter: Rewriter, norm: Norm) -> None:
    terms = _residual_sum(norm)
    if terms is not None:
        args, kwargs = norm.arguments(*terms)
        what, outputs = f"residual sum, {norm.what}", (norm.root, norm.x)
        # Where the sum must be computed earlier, the norm alone may do.
        with contextlib.suppress(Left):
            rewriter.replace(Match(what, _ADDED[norm.kind], args, kwargs, outputs, norm.inside, norm.spare))
            return
    args, kwargs = norm.arguments(norm.x)
    rewriter.replace(Match(norm.what, _PLAIN[norm.kind], args, kwargs, (norm.root,), norm.inside, norm.spare))


def _residual_sum(norm: Norm) -> tuple[Node, Node] | None:
    """The two tensors, of the sum's own shape and dtype, whose sum is normalised."""
    found = binary(norm.x, "add")
    if found is None:
        return None
    total, one, other = value_of(norm.x), value_of(found[0]), value_of(found[1])
    if total is None or one is None or other is None:
        return None
    alike = all(t.dtype == total.dtype and same_sizes(t.shape, total.shape) for t in (one, other))
    return found if alike and total.dtype in FLOATS else None


def _group_norm(node: Node) -> Match | None:
    call = call_of(node)
    if call is None or call.name != "group_norm":
        return None
    a = call.args
    eps = constant(a.get("eps", 1e-5))
    if eps is None:
        raise Left("eps is no constant")
    args = (a["input"], a["num_groups"], a.get("weight"), a.get("bias"), eps)
    return Match("group norm", group_norm, args, {}, (node,), ())


def _own_function(node: Node) -> Norm | None:
    """``layer_norm`` or ``rms_norm`` of torch.nn.functional."""
    call = call_of(node)
    if call is None or call.name not in ("layer_norm", "rms_norm"):
        return None
    a = call.args
    kind = call.name.partition("_")[0]
    eps = a.get("eps", 1e-5 if kind == "layer" else None)
    if eps is not None and (eps := constant(eps)) is None:
        raise Left("eps is no constant")
    return Norm(kind, a["input"], a["normalized_shape"], node, eps, a.get("weight"), a.get("bias"))


def _written_out(node: Node) -> Norm | None:
    """A norm whose product with the reciprocal root ``node`` is, with what follows it."""
    for x, root, passed in _scaled(node):
        variance = call_of(root)
        if variance is None:
            continue
        for spread, eps in operands(root, "add"):
            inside = [*passed, root]
            found = _spread(spread, x, inside)
            if found is None:
                continue
            kind, source, spare = found
            if (eps := constant(eps)) is None:
                raise Left("eps is no constant")
            value = value_of(source)
            if value is None or value.dtype not in FLOATS or dtype_of(node) not in FLOATS:
                raise Left(f"it is computed in {dtype_of(source)}")
            norm = Norm(kind, source, None, node, eps, written_out=True, inside=inside, spare=spare)
            _extend(norm)
            return norm
    return None


def _scaled(node: Node) -> list[tuple[Any, Any, list[Node]]]:
    """(x, v, nodes between) for each way to read a node as x / √v."""
    found = []
    for x, factor in operands(node, "mul"):
        passed: list[Node] = []
        factor = uncast(factor, passed)
        root = _reciprocal_root(factor, passed)
        if root is not None:
            found.append((x, root, passed))
    quotient = binary(node, "div")
    if quotient is not None:
        passed = []
        divisor = uncast(quotient[1], passed)
        root = _square_root(divisor, passed)
        if root is not None:
            found.append((quotient[0], root, passed))
    return found


def _reciprocal_root(node: Any, passed: list[Node]) -> Any:
    """v of 1 / √v, and the nodes that compute it."""
    call = call_of(node)
    if call is None:
        return None
    passed.append(node)
    if call.name == "rsqrt" or (call.name == "pow" and number(call.args.get("exponent")) == -0.5):
        return uncast(call.args["input"], passed)
    if call.name == "reciprocal":
        return _square_root(uncast(call.args["input"], passed), passed)
    quotient = binary(node, "div")
    if quotient is not None and number(quotient[0]) == 1.0:
        return _square_root(uncast(quotient[1], passed), passed)
    return None


def _square_root(node: Any, passed: list[Node]) -> Any:
    call = call_of(node)
    if call is None or not (call.name == "sqrt" or (call.name == "pow" and number(call.args.get("exponent")) == 0.5)):
        return None
    passed.append(node)
    return uncast(call.args["input"], passed)


def _spread(node: Any, x: Any, inside: list[Node]) -> tuple[str, Node, list[Node]] | None:
    """(kind, tensor, spare nodes) where a node is the mean square, or the variance, of what x holds.

    The other nodes are added to ``inside``.
    """
    own: list[Node] = []
    spare: list[Node] = []
    node = uncast(node, own)
    call = call_of(node)
    if call is None or call.name not in ("mean", "var"):
        return None
    own.append(node)
    deviation = widened(x, spare)
    centred = _centred(deviation, own, spare)
    if call.name == "var":
        if centred is None or widened(call.args["input"], spare) is not centred:
            return None
        if call.args.get("unbiased", True) is not False and call.args.get("correction") != 0:
            raise Left("the variance is not divided by the number of elements (unbiased=False)")
    else:
        square = uncast(call.args["input"], own)
        base = _squared(square)
        if base is None:
            return None
        own.append(square)
        base = widened(base, spare)
        # The deviation may be written twice.
        if base is not deviation and (centred is None or _centred(base, own, spare) is not centred):
            return None
        if call.args.get("dtype") not in (None, *FLOATS):
            raise Left(f"the mean is computed in {call.args['dtype']}")
    if not is_last(call.args.get("dim"), call.args["input"]):
        raise Left("it is over other dimensions than the last")
    if call.args.get("keepdim") is not True:
        raise Left("the mean does not keep its dimension (keepdim=True)")
    inside += own
    return ("rms", deviation, spare) if centred is None else ("layer", centred, spare)


def _squared(node: Any) -> Any:
    call = call_of(node)
    if call is None:
        return None
    if call.name == "square" or (call.name == "pow" and number(call.args.get("exponent")) == 2.0):
        return call.args["input"]
    factors = binary(node, "mul")
    return factors[0] if factors is not None and factors[0] is factors[1] else None


def _centred(node: Any, inside: list[Node], spare: list[Node]) -> Node | None:
    """t, where a node is t - mean(t) over the last dimension."""
    difference = binary(node, "sub")
    if difference is None:
        return None
    own: list[Node] = [node]
    casts: list[Node] = []
    mean = uncast(difference[1], own)
    call = call_of(mean)
    if call is None or call.name != "mean" or call.args.get("keepdim") is not True:
        return None
    own.append(mean)
    source = widened(difference[0], casts)
    if widened(call.args["input"], casts) is not source or not is_last(call.args.get("dim"), call.args["input"]):
        return None
    if call.args.get("dtype") not in (None, *FLOATS):
        return None
    inside += [n for n in own if n not in inside]
    spare += casts
    return source


def _extend(norm: Norm) -> None:
    """Take in the casts, the weight and the bias that follow."""
    while len(norm.root.users) == 1:
        (user,) = norm.root.users
        if dtype_of(user) not in FLOATS or not _take(norm, user):
            break
        norm.inside.append(norm.root)
        norm.root = user


def _take(norm: Norm, user: Node) -> bool:
    if is_cast(user):  # or what something else is cast to the dtype of: other.type_as(norm)
        return user.args[0] is norm.root
    width = value_of(norm.x).shape[-1]  # type: ignore[union-attr]
    if norm.weight is None and norm.bias is None:
        for root, other in operands(user, "mul"):
            if root is not norm.root or not is_vector(other, width):
                continue
            weight = widened(other, norm.spare)
            for vector, one in operands(weight, "add"):
                casts: list[Node] = [weight]
                source = widened(vector, casts)
                if norm.kind == "rms" and number(one) is not None and is_vector(source, width):
                    norm.weight, norm.offset = source, float(one)
                    norm.spare += casts
                    return True
            norm.weight = weight
            return True
    if norm.kind == "layer" and norm.bias is None:
        for root, other in operands(user, "add"):
            if root is norm.root and is_vector(other, width):
                norm.bias = widened(other, norm.spare)
                return True
    return False
