"""Reading a graph that Dynamo captured: what a node computes, under one name for all the ways of writing it."""

from __future__ import annotations

import inspect
import operator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import Node

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Left(Exception):  # noqa: N818 (not an error: a reason to leave a part of the graph as it is)
    """A part of the graph looked like one of ours, but is not provably one. The message says why."""


class Call(NamedTuple):
    """What a node computes: an operation's name and its arguments by name."""

    name: str
    args: dict[str, Any]


# Arguments in their order, as the function and the method of a tensor have them.
_UNARY = ("input",)
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "add": ("input", "other", "alpha"),
    "sub": ("input", "other", "alpha"),
    "mul": ("input", "other"),
    "div": ("input", "other", "rounding_mode"),
    "pow": ("input", "exponent"),
    "square": _UNARY,
    "sqrt": _UNARY,
    "rsqrt": _UNARY,
    "reciprocal": _UNARY,
    "neg": _UNARY,
    "exp": _UNARY,
    "erf": _UNARY,
    "tanh": _UNARY,
    "sigmoid": _UNARY,
    "relu": ("input", "inplace"),
    "silu": ("input", "inplace"),
    "mish": ("input", "inplace"),
    "hardswish": ("input", "inplace"),
    "hardsigmoid": ("input", "inplace"),
    "gelu": ("input", "approximate"),
    "elu": ("input", "alpha", "inplace"),
    "leaky_relu": ("input", "negative_slope", "inplace"),
    "softplus": ("input", "beta", "threshold"),
    "mean": ("input", "dim", "keepdim", "dtype"),
    "var": ("input", "dim", "unbiased", "keepdim", "correction"),
    "linear": ("input", "weight", "bias"),
    "addmm": ("input", "mat1", "mat2", "beta", "alpha"),
    "matmul": ("input", "other"),
    "t": _UNARY,
    "transpose": ("input", "dim0", "dim1"),
    "getattr": ("input", "name"),
    "getitem": ("input", "index"),
    "chunk": ("input", "chunks", "dim"),
    "repeat_interleave": ("input", "repeats", "dim"),
    "dropout": ("input", "p", "training", "inplace"),
    "softmax": ("input", "dim", "_stacklevel", "dtype"),
    "masked_fill": ("input", "mask", "value"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled"),
    "attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
}
_SPELLINGS: dict[str, tuple[Any, ...]] = {
    "add": (operator.add, torch.add),
    "sub": (operator.sub, torch.sub, torch.subtract),
    "mul": (operator.mul, torch.mul, torch.multiply),
    "div": (operator.truediv, torch.div, torch.divide, torch.true_divide),
    "pow": (operator.pow, torch.pow),
    "square": (torch.square,),
    "sqrt": (torch.sqrt,),
    "rsqrt": (torch.rsqrt,),
    "reciprocal": (torch.reciprocal,),
    "neg": (operator.neg, torch.neg, torch.negative),
    "exp": (torch.exp,),
    "erf": (torch.erf, torch.special.erf),
    "tanh": (torch.tanh, F.tanh),
    "sigmoid": (torch.sigmoid, torch.special.expit, F.sigmoid),
    "relu": (torch.relu, F.relu),
    "silu": (F.silu,),
    "mish": (F.mish,),
    "hardswish": (F.hardswish,),
    "hardsigmoid": (F.hardsigmoid,),
    "gelu": (F.gelu,),
    "elu": (F.elu,),
    "leaky_relu": (F.leaky_relu,),
    "softplus": (F.softplus,),
    "mean": (torch.mean,),
    "var": (torch.var,),
    "linear": (F.linear,),
    "addmm": (torch.addmm,),
    "matmul": (operator.matmul, torch.matmul),
    "t": (torch.t,),
    "transpose": (torch.transpose, torch.swapaxes, torch.swapdims),
    "getattr": (getattr,),
    "getitem": (operator.getitem,),
    "chunk": (torch.chunk,),
    "repeat_interleave": (torch.repeat_interleave,),
    "dropout": (F.dropout,),
    "softmax": (F.softmax,),
    "layer_norm": (F.layer_norm, torch.layer_norm),
    "rms_norm": (F.rms_norm, torch.rms_norm),
    "group_norm": (F.group_norm, torch.group_norm),
    "attention": (F.scaled_dot_product_attention,),
}
_FUNCTIONS = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings}
# All but functions of torch.nn.functional are methods of a tensor, too.
_METHODS = {name: name for name in _PARAMETERS if hasattr(torch.Tensor, name)}
_METHODS |= {"true_divide": "div", "multiply": "mul", "swapaxes": "transpose", "swapdims": "transpose"}
# softmax(input, dim, dtype): the function of torch.nn.functional has one argument more in between.
_SHORT_SOFTMAX = ("input", "dim", "dtype")


def call_of(node: Any) -> Call | None:
    """What a node computes; None: nothing that is known here."""
    if not isinstance(node, Node):
        return None
    if node.op == "call_function":
        name = _FUNCTIONS.get(node.target)
        parameters = _PARAMETERS.get(name or "")
        if node.target is torch.softmax:
            name, parameters = "softmax", _SHORT_SOFTMAX
    elif node.op == "call_method":
        name = _METHODS.get(str(node.target))
        parameters = _PARAMETERS.get(name or "")
        if node.target == "softmax":
            name, parameters = "softmax", _SHORT_SOFTMAX
    else:
        return None
    if name is None or parameters is None or len(node.args) > len(parameters):
        return None
    args = dict(zip(parameters, node.args, strict=False))
    if not node.kwargs.keys() <= set(parameters) or node.kwargs.keys() & args.keys():
        return None
    return Call(name, args | node.kwargs)


def binary(node: Any, name: str) -> tuple[Any, Any] | None:
    """The two operands of ``add``, ``sub``, ``mul`` or ``div`` without further options."""
    call = call_of(node)
    if (
        call is None
        or call.name != name
        or call.args.get("alpha", 1) != 1
        or call.args.get("rounding_mode") is not None
    ):
        return None
    return call.args.get("input"), call.args.get("other")


def operands(node: Any, name: str) -> list[tuple[Any, Any]]:
    """Both orders of the operands of a commutative operation."""
    found = binary(node, name)
    return [] if found is None else [found, found[::-1]]


def number(value: Any) -> float | None:
    """A constant; None: a tensor, a symbol or no number."""
    return float(value) if type(value) in (int, float) else None


def constant(value: Any) -> float | None:
    """A number, also one that is an attribute or a function's default.

    With ``dynamic=True`` Dynamo makes inputs of those, too. They hardly ever change: the graph is guarded, to be
    compiled again should they. An argument of the compiled function may change with each call, and is none.
    """
    found = number(value)
    if found is not None or not isinstance(value, Node) or not value.all_input_nodes:
        return found
    symbol, source = value.meta.get("example_value"), getattr(value.args[0], "_dynamo_source", None)
    if type(symbol) is not torch.SymFloat or not symbol.node.has_hint():
        return None
    from torch._dynamo.source import AttrSource, DefaultsSource

    return float(symbol) if isinstance(source, (AttrSource, DefaultsSource)) else None


def value_of(node: Any) -> torch.Tensor | None:
    """The fake tensor that stands for a node's result; None: it is no plain tensor."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if type(value) in (torch.Tensor, _fake_tensor()) else None


@lru_cache(maxsize=1)
def _fake_tensor() -> type:
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def is_cast(node: Any) -> bool:
    """Whether a node gives its input in a dtype, perhaps the same, and changes nothing else."""
    if not (isinstance(node, Node) and node.op == "call_method"):
        return False
    if node.target not in ("to", "float", "half", "bfloat16", "type_as"):
        return False
    source, result = value_of(node.args[0]), value_of(node)
    return source is not None and result is not None and source.device == result.device


def widened(node: Any, passed: list[Node]) -> Any:
    """What was cast to ``node``, where the cast lost nothing: to the same dtype, or from 16 bits to float32.

    The casts are added to ``passed``.
    """
    while is_cast(node):
        source, result = value_of(node.args[0]), value_of(node)
        assert source is not None
        assert result is not None
        if source.dtype != result.dtype and not (source.dtype in FLOATS and result.dtype == torch.float32):
            break
        passed.append(node)
        node = node.args[0]
    return node


def uncast(node: Any, passed: list[Node]) -> Any:
    """What was cast to ``node``, to whichever dtype that the kernels compute in; the casts are added to ``passed``."""
    while is_cast(node) and dtype_of(node) in FLOATS and dtype_of(node.args[0]) in FLOATS:
        passed.append(node)
        node = node.args[0]
    return node


def dtype_of(node: Any) -> torch.dtype | None:
    value = value_of(node)
    return None if value is None else value.dtype


def same_sizes(one: Any, other: Any) -> bool:
    """Whether two sequences of sizes are equal whatever their symbols stand for."""
    if len(one) != len(other):
        return False
    return all(known(a == b) for a, b in zip(one, other, strict=True))


def known(condition: Any) -> bool:
    """Whether a condition holds whatever its symbols stand for. Adds no guard."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def is_last(dim: Any, node: Any) -> bool:
    """Whether ``dim`` is the last dimension of a node's tensor, alone."""
    value = value_of(node)
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    return value is not None and value.dim() > 0 and type(dim) is int and dim in (-1, value.dim() - 1)


def is_vector(node: Any, size: Any) -> bool:
    """Whether a node is a floating tensor of shape (size,)."""
    value = value_of(node)
    return value is not None and value.is_floating_point() and same_sizes(value.shape, (size,))


# --- What may change a tensor, or how operations are recorded ---------------------------------------------------------

_PURE_MODULES = frozenset(
    (
        "_operator", "builtins", "math", "torch", "torch.functional", "torch.nn.functional", "torch.special",
        "torch._C", "torch._C._nn", "torch._C._special", "torch._C._linalg", "torch._C._fft",
    )
)  # fmt: skip
_WRITERS = frozenset(("batch_norm", "instance_norm", "setitem", "delitem", "setattr", "manual_seed"))


def is_border(node: Node) -> bool:
    """Whether something may be different after a node beside its result.

    A tensor written in place, a context entered or left (autocast, no_grad), a module or an operator of others.
    No computation is moved from one side to the other.
    """
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and (not name.endswith("__") or name.startswith("__i") or name == "__setitem__")
    if node.op != "call_function":
        return True
    target = node.target
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    name = str(getattr(target, "__name__", ""))
    if name == "_log_api_usage_once":
        return False
    module = getattr(target, "__module__", None)
    if module not in _PURE_MODULES or name.startswith("_") or name.endswith("_") or name in _WRITERS:
        return True
    if module == "_operator" and name[0] == "i" and name not in ("index", "invert", "inv", "is_", "is_not"):
        return True
    if node.kwargs.get("out") is not None or _is_true(_bound(target, node).get("inplace", False)):
        return True
    return name.startswith("embedding") and _bound(target, node).get("max_norm") is not None


def _is_true(value: Any) -> bool:
    return value is not False


def _bound(function: Any, node: Node) -> dict[str, Any]:
    try:
        return inspect.signature(function).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):  # torch's own builtins have no signature, and no such argument
        return dict(node.kwargs)


def border_between(first: Node, last: Node, own: set[Node]) -> Node | None:
    """A border after ``first`` and before ``last`` that is none of ``own``."""
    node = first
    while node is not last:
        if node not in own and is_border(node):
            return node
        node = node.next
    return None
