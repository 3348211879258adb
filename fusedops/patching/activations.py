"""Which activation a module or a function computes, by the names that fusedops.linear takes."""

from __future__ import annotations

import builtins
import copy
import dis
import functools
import inspect
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from fusedops.linear.activations import ACTIVATIONS, name_of
from fusedops.patching.classes import BodyMaker, Fused
from fusedops.patching.undisturbed import undisturbed

# Names of the functions and modules that were tried; "": none that is known.
_tried: dict[Any, str] = {}
_STANDARD = frozenset(nn.Module().__dict__)
_PREFIX = "activation:"


class FusedActivation(Fused):
    """Its forward is its own; a linear layer before it knows by its class what it computes."""


def activation_body(name: str) -> BodyMaker:
    """Makes the fused classes of modules that compute this activation."""
    return lambda original: (FusedActivation, {"fused_activation": name})


def maker_of(name: str) -> str:
    """The rule that marks a module as the activation of this name."""
    return f"{_PREFIX}{name}"


def known_name(activation: Any) -> str:
    """Name of the activation that a module or a function is known to compute, "" where it is not known. Quick.

    A module of a class that is not torch's is known from the moment that a rule has marked it.
    """
    if isinstance(activation, nn.Module):
        return type(activation).__dict__.get("fused_activation") or name_of(activation) or ""
    if isinstance(activation, Function):
        return activation.name
    name = name_of(activation)
    if name is not None or not isinstance(activation, FunctionType):
        return name or ""
    return _tried.get(activation, "")


def activation_name(activation: Any) -> str:
    """Name of the activation that a module or a function computes, "" where it is not one that can be fused.

    torch's own are known. Of others (transformers' activation classes, a user's function) the values and the
    derivative are compared with every activation's.
    """
    known = known_name(activation)
    if known or isinstance(activation, Function):
        return known
    if isinstance(activation, nn.Module):
        kind = type(activation)
        own = _own_attributes(activation)
        if kind.__module__.startswith("torch.") or own is None or not _is_pure(kind.forward):
            return ""
        return _remembered((kind, kind.forward, *own), activation)
    # A bound method or another callable object may do anything with what it holds.
    return _remembered(activation, activation) if _is_pure(activation) else ""


def _remembered(key: Any, activation: Any) -> str:
    """The name that was found when this was tried before, or is found now."""
    try:
        if key not in _tried:
            if len(_tried) > 256:  # functions made anew for every call
                _tried.clear()
            _tried[key] = _recognised(activation)
        return _tried[key]
    except TypeError:  # not hashable
        return _recognised(activation)


def _own_attributes(module: nn.Module) -> list[tuple[str, Any]] | None:
    """What tells modules of one class apart: functions alone. None where there is more, which may change later."""
    own = [(name, value) for name, value in module.__dict__.items() if name not in _STANDARD and name[0] != "_"]
    if module._parameters or module._buffers or module._modules:
        return None
    for name, value in own:
        # Settings of a user's activation may change after it was tried; those of transformers' never do.
        if name == "inplace" or (type(module).__module__ == "transformers.activations" and isinstance(value, float)):
            continue
        if isinstance(value, (FunctionType, MethodType)):
            if not _is_pure(getattr(value, "__func__", value)):
                return None
        elif not isinstance(value, (BuiltinFunctionType, functools.partial)):
            return None
    return [
        (name, (value.func, value.args, *value.keywords.items()) if type(value) is functools.partial else value)
        for name, value in own
    ]


_CONSTANTS = (int, float, str, bool, type(None), torch.dtype, ModuleType, BuiltinFunctionType, type)


def _is_pure(function: Any, depth: int = 0) -> bool:
    """Whether calling a function twice with one tensor gives one result, and nothing else can be seen of it.

    Judged by its code: it reads no global but modules, functions and constants, and writes none; nor variables of
    enclosing functions.
    """
    if not isinstance(function, FunctionType):
        return False
    if function.__module__.startswith("torch."):
        return True
    code = function.__code__
    if code.co_freevars or code.co_flags & inspect.CO_GENERATOR:
        return False
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "IMPORT_NAME"):
            return False
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = function.__globals__.get(step.argval, getattr(builtins, str(step.argval), None))
            if not isinstance(value, _CONSTANTS) and not (depth < 4 and _is_pure(value, depth + 1)):
                return False
    return True


class Function:
    """A call of a function with more arguments than the tensor, such as ``gelu(x, approximate="tanh")``."""

    __slots__ = ("function", "kwargs", "name")

    def __init__(self, function: Any, kwargs: dict[str, Any]) -> None:
        self.function = function
        self.kwargs = kwargs
        fixed = {key: value for key, value in kwargs.items() if key != "inplace"}
        if fixed:
            self.name = _recognised(self)
        else:
            self.name = activation_name(function) if _is_named_so(function) else name_of(function) or ""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, **self.kwargs)


def _is_named_so(function: Any) -> bool:
    """Whether a function may be tried: one of another name may do anything beside returning a tensor."""
    name = str(getattr(function, "__name__", type(function).__name__)).lower()
    return isinstance(function, (FunctionType, nn.Module)) and any(
        word in name for word in ("elu", "silu", "swish", "mish", "sigmoid", "tanh", "softplus")
    )


# Beyond what clipped activations let pass.
_LARGE = torch.tensor([-1e4, -300.0, 300.0, 1e4])


def _recognised(activation: Any) -> str:
    """The activation whose values and derivative this has, in training and in evaluation, on 1,200 points."""
    with undisturbed():
        generator = torch.Generator().manual_seed(0)
        z = torch.cat([torch.linspace(-40, 40, 797), _LARGE, torch.randn(399, generator=generator)]).reshape(3, 400)
        try:
            results = [_values(activation, z, training) for training in (True, False)]
            half = _call(activation, z.bfloat16(), True)
        except Exception:
            return ""  # not a function of one tensor
        if half.dtype is not torch.bfloat16 or half.shape != z.shape:
            return ""
        for name, own in ACTIVATIONS.items():
            expected = _values(own.forward, z, False)
            if all(_close(result, expected) for result in results):
                return name
    return ""


def _call(activation: Any, z: torch.Tensor, training: bool) -> torch.Tensor:
    if isinstance(activation, nn.Module):
        activation = copy.copy(activation)
        activation.training = training
        activation = activation.forward
    result = activation(z)
    if not isinstance(result, torch.Tensor):
        raise TypeError("it returns no tensor")
    return result


def _values(activation: Any, z: torch.Tensor, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = z.clone().requires_grad_()
    # Not the leaf itself, which an activation in place may not write.
    y = _call(activation, leaf * 1, training)
    if y.shape != z.shape or y.dtype != z.dtype:
        raise TypeError("it is not elementwise")
    (dz,) = torch.autograd.grad(y.sum(), leaf)
    return y.detach(), dz


def _close(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    # Formulas with constants of eight digits differ by 1e-7; the two GELUs by 5e-4. Derivatives may differ at a kink.
    values = torch.allclose(one[0], other[0], rtol=4e-6, atol=4e-6)
    return values and bool(((one[1] - other[1]).abs() <= 1e-5).float().mean() > 0.995)
