"""Linear→activation pairs inside chains.

A *chain* is a method that applies children one after other and does nothing else: the forward of nn.Sequential, of a
transformer's MLP, and of many a user's module. In a chain, a Linear and the activation right after it can be one call.
Only the method of the owner changes: on their own, the Linear and the activation compute what they did, and whenever
one of them is hooked, wrapped or exchanged after patching, the chain runs as it was written.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from fusedops.linear.activations import ACTIVATIONS
from fusedops.linear.functional import linear
from fusedops.patching.classes import Body, Fused

# What transformers' activation classes compute, by name: that library is not imported for it. Its tanh variants
# write sqrt(2 / pi) with ten or more digits, all the same function in the precision of the data.
_TRANSFORMERS_ACTIVATIONS = {
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "SiLUActivation": "silu",
}
_GELU = {"none": "gelu", "tanh": "gelu_tanh"}

# Name of the activation of each class met so far; "": not an activation that is fused.
_names: dict[type, str] = {nn.ReLU: "relu", nn.GELU: "gelu", nn.SiLU: "silu"}

# Activations after a Linear that a report mentions although they are not fused.
_UNFUSED_ACTIVATIONS = frozenset(
    {"Tanh", "Sigmoid", "LeakyReLU", "ELU", "Hardswish", "Hardsigmoid", "Mish", "Softplus"}
    | {"QuickGELUActivation", "ReLUSquaredActivation", "MishActivation", "ClippedGELUActivation"}
)


# The chains of each class met so far.
_chains: dict[type[nn.Module], dict[str, tuple[str, ...]]] = {}


def activation_name(module: Any) -> str:
    """Name of the activation that a module computes, "" where it is not fused."""
    kind = type(module)
    name = _names.get(kind)
    if name is None:
        name = _names[kind] = _learn(kind)
    if name == "gelu" and isinstance(module, nn.GELU):
        return _GELU.get(module.approximate, "")
    return name


def _learn(kind: type) -> str:
    for base in kind.__mro__:
        name = _names.get(base)
        if name is None and base.__module__ == "transformers.activations":
            name = _TRANSFORMERS_ACTIVATIONS.get(base.__name__)
        if name is not None and kind.forward is base.forward:  # type: ignore[attr-defined]
            return name if name in ACTIVATIONS else ""
    return ""


def observed(module: Any) -> bool:
    """Whether somebody hooks the calls of this module or has replaced its forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


class FusedLinear(Fused):
    """With an activation's name, both are one call; without, it is the original's forward."""

    def forward(self: Any, *args: Any, activation: str | None = None, **kwargs: Any) -> Any:
        if activation is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return linear(args[0], self.weight, self.bias, activation)


class FusedConv1D(FusedLinear):
    """With an activation's name, both are one call; without, it is the original's forward."""

    def forward(self: Any, *args: Any, activation: str | None = None, **kwargs: Any) -> Any:
        if activation is None:
            return super().forward(*args, **kwargs)
        # transformers' Conv1D holds its weight as (in, out).
        return linear(args[0], self.weight.t(), self.bias, activation)


class FusedChain(Fused):
    """A Linear and the activation after it are one call."""


def _is_plain(x: Any) -> bool:
    """A tensor that the operator takes; nested and sparse ones take the way they took before."""
    return isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_nested


def run_chain(modules: list[Any], x: Any) -> Any:
    """Apply modules one after other, a fused Linear together with the activation after it."""
    last = len(modules) - 1
    fuse = not torch_module._has_any_global_hook()
    skip = False
    for i, module in enumerate(modules):
        if skip:
            skip = False
            continue
        if fuse and i < last and isinstance(module, FusedLinear) and _is_plain(x):
            follower = modules[i + 1]
            name = activation_name(follower)
            if name and not observed(module) and not observed(follower):
                x = module(x, activation=name)  # type: ignore[operator]
                skip = True
                continue
        x = module(x)
    return x


def _sequential_forward(self: Any, input: Any) -> Any:
    return run_chain(list(self._modules.values()), input)


def _chain_method(original: FunctionType, names: tuple[str, ...]) -> Callable[..., Any]:
    parameter = original.__code__.co_varnames[1]

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            (x,) = args
        elif not args and len(kwargs) == 1 and parameter in kwargs:
            x = kwargs[parameter]
        else:
            return original(self, *args, **kwargs)  # raises the error for wrong arguments
        return run_chain([getattr(self, name) for name in names], x)

    return method


def chain_body(original: type[nn.Module]) -> Body | None:
    """For :func:`fusedops.patching.classes.fused_class`: every chain of a class, rewritten to fuse."""
    if is_sequential(original):
        return FusedChain, {"forward": _sequential_forward}
    chains = chains_of(original)
    if not chains:
        return None
    return FusedChain, {name: _chain_method(getattr(original, name), chain) for name, chain in chains.items()}


def linear_body(original: type[nn.Module]) -> Body | None:
    if issubclass(original, nn.Linear):
        return (FusedLinear, {}) if original.forward is nn.Linear.forward else None
    return (FusedConv1D, {}) if is_conv1d(original) else None


def is_sequential(kind: type[nn.Module]) -> bool:
    return (
        issubclass(kind, nn.Sequential)
        and kind.forward is nn.Sequential.forward
        and kind.__iter__ is nn.Sequential.__iter__
    )


def is_conv1d(kind: type[nn.Module]) -> bool:
    """transformers' Conv1D, a Linear with its weight transposed."""
    return kind.__module__ == "transformers.pytorch_utils" and kind.__name__ == "Conv1D"


def chains_of(kind: type[nn.Module]) -> dict[str, tuple[str, ...]]:
    """The chains among the methods of a class: method name -> attributes that it applies in turn."""
    if kind not in _chains:
        _chains[kind] = _read_chains(kind)
    return _chains[kind]


def _read_chains(kind: type[nn.Module]) -> dict[str, tuple[str, ...]]:
    chains = {}
    seen = set()
    for base in kind.__mro__:
        if base is nn.Module:
            break
        for name, function in vars(base).items():
            # Overridden further down: not the method that runs.
            if name in seen or name.startswith("__"):
                continue
            seen.add(name)
            names = straight_line(function) if isinstance(function, FunctionType) else None
            if names is not None:
                chains[name] = names
    return chains


_NOT_PLAIN = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ITERABLE_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)


def straight_line(function: FunctionType) -> tuple[str, ...] | None:
    """The attributes that a method ``f(self, x)`` applies to x one after other; None when it does anything else.

    Read from the source, and only believed where it agrees with the compiled code.

    Example:
        >>> from torch import nn
        >>> straight_line(nn.TransformerEncoderLayer._ff_block)
        ('linear1', 'activation', 'dropout', 'linear2', 'dropout2')
    """
    code = function.__code__
    if code.co_argcount != 2 or code.co_kwonlyargcount or code.co_posonlyargcount or code.co_flags & _NOT_PLAIN:
        return None
    if code.co_freevars or code.co_cellvars or function.__defaults__ or hasattr(function, "__wrapped__"):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef) or tree.body[0].decorator_list:
        return None
    names = _read_chain(tree.body[0])
    if not names or set(names) != set(code.co_names):
        return None
    return names


def _read_chain(definition: ast.FunctionDef) -> tuple[str, ...] | None:
    """The chain that a function's body spells out: ``x = self.a(x)``, ``return self.c(self.b(x))`` and the like."""
    owner, argument = (a.arg for a in definition.args.args)
    values: dict[str, tuple[str, ...]] = {argument: ()}
    calls = 0

    def read(node: ast.expr | None) -> tuple[str, ...] | None:
        nonlocal calls
        match node:
            case ast.Name(id=name):
                return values.get(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attribute), args=[inner], keywords=[]) if (
                name == owner
            ):
                before = read(inner)
                calls += 1
                return None if before is None else (*before, attribute)
        return None

    for position, statement in enumerate(definition.body):
        match statement:
            case ast.Expr(value=ast.Constant(value=str())) if position == 0:
                continue
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name != owner:
                result = read(value)
                if result is None:
                    return None
                values[name] = result
            case ast.Return(value=value) if position == len(definition.body) - 1:
                result = read(value)
                # A call whose result is dropped is not in the chain, but was made.
                return result if result is not None and len(result) == calls else None
            case _:
                return None
    return None


def pairs(names: Iterable[str], modules: Iterable[Any]) -> list[tuple[str, nn.Module, nn.Module]]:
    """Neighbours in a chain of which the second is an activation: (name of the first, the first, the activation)."""
    return [
        (name, module, follower)
        for (name, module), (_, follower) in itertools.pairwise(zip(names, modules, strict=True))
        if isinstance(module, nn.Module) and isinstance(follower, nn.Module) and _is_activation(follower)
    ]


def _is_activation(module: nn.Module) -> bool:
    return bool(activation_name(module)) or type(module).__name__ in _UNFUSED_ACTIVATIONS
