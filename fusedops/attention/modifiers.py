"""Rules that a user writes as Triton functions: which query sees which key, and what becomes of a score.

The attention operators take names, not functions: a library operator's arguments are tensors, numbers and strings. A
rule is registered under the name of its function when its object is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fusedops.runtime.checks import wrong_type, wrong_value


class _Functions(NamedTuple):
    function: Any
    gradient: Any
    definition: Callable[..., torch.Tensor] | None


_by_name: dict[str, _Functions] = {}
_names: dict[_Functions, str] = {}


def _register(functions: _Functions) -> str:
    """A name for the functions: the first one's qualified name, and a number where others have that name."""
    name = _names.get(functions)
    if name is None:
        named = functions.function if functions.function is not None else functions.definition
        named = getattr(named, "fn", named)
        first = name = f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', repr(named))}"
        number = 1
        while name in _by_name:
            number += 1
            name = f"{first}#{number}"
        _by_name[name] = functions
        _names[functions] = name
    return name


def functions_of(name: str) -> _Functions:
    """(function, gradient, definition) registered under a name that a rule's object has."""
    return _by_name[name]


def _is_triton_function(value: Any) -> bool:
    # A Triton function wraps a Python function; Triton itself may be missing here.
    return callable(getattr(value, "fn", None)) and type(value).__module__.partition(".")[0] == "triton"


def _check(kind: str, functions: _Functions, args: Any) -> tuple[torch.Tensor, ...]:
    for name, value in (("function", functions.function), ("gradient", functions.gradient)):
        if value is not None and not _is_triton_function(value):
            wrong_type(kind, name, "a function decorated with triton.jit, or None", value)
    if functions.definition is not None and not callable(functions.definition):
        wrong_type(kind, "definition", "a function of tensors, or None", functions.definition)
    if functions.function is None and functions.definition is None:
        wrong_type(kind, "function", "a function decorated with triton.jit (or give a definition)", None)
    if isinstance(args, torch.Tensor):
        args = (args,)
    args = tuple(args)
    for arg in args:
        if not isinstance(arg, torch.Tensor):
            wrong_type(kind, "args", "tensors", arg)
        if arg.requires_grad:
            wrong_value(kind, "args", "tensors that require no gradient: they get none (detach them)", arg)
    return tuple(arg.contiguous() for arg in args)


@dataclass(frozen=True, eq=False)
class MaskMod:
    """A rule that says which query sees which key, evaluated tile by tile inside the attention kernels.

    Args:
        function: decorated with ``triton.jit``, ``mask_mod(batch, head, i, j, args) -> bool``. ``batch`` and ``head``
            are numbers; ``i`` (queries) and ``j`` (keys) int32 blocks that broadcast with each other, always inside
            the sequences; ``args`` a tuple of pointers to the tensors of ``args``.
        args: tensors that the function reads. They are made contiguous, and lie on the device of the queries.
        definition: the same in plain torch, ``definition(batch, head, i, j, *args)``, every index a tensor that
            broadcasts with the others: what the torch backend computes. Without it that backend raises an error.

    Example:
        >>> import torch, fusedops
        >>> prefix = fusedops.MaskMod(None, definition=lambda batch, head, i, j: (j < 3) | (j <= i))
        >>> q = k = v = torch.randn(1, 2, 8, 16)
        >>> fusedops.attention(q, k, v, mask_mod=prefix).shape
        torch.Size([1, 2, 8, 16])
    """

    function: Any
    args: tuple[torch.Tensor, ...] = ()
    definition: Callable[..., torch.Tensor] | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        functions = _Functions(self.function, None, self.definition)
        object.__setattr__(self, "args", _check("MaskMod", functions, self.args))
        object.__setattr__(self, "name", _register(functions))

    @classmethod
    def of(cls, function: str, value: Any) -> MaskMod:
        """A rule as it is; a Triton function as a rule without ``args``; TypeError for anything else."""
        if isinstance(value, cls):
            return value
        if not _is_triton_function(value):
            wrong_type(function, "mask_mod", "a fusedops.MaskMod, a function decorated with triton.jit, or None", value)
        return cls(value)


@dataclass(frozen=True, eq=False)
class ScoreMod:
    """A rule that changes each score, evaluated tile by tile inside the attention kernels.

    It takes the scaled (and capped) score, before attn_mask and ALiBi are added and before anything is masked.

    Args:
        function: decorated with ``triton.jit``, ``score_mod(score, batch, head, i, j, args) -> score``, float32
            blocks; the other arguments as in :class:`MaskMod`.
        gradient: decorated with ``triton.jit``, ``gradient(grad, score, batch, head, i, j, args)``: the gradient
            of the score that goes in, given that of the one that comes out. Without it a backward raises an error.
        args: tensors that the functions read. They get no gradient.
        definition: the same in plain torch, ``definition(score, batch, head, i, j, *args)``, differentiated by
            autograd: what the torch backend computes. Without it that backend raises an error.

    Example:
        >>> import torch, fusedops
        >>> near = fusedops.ScoreMod(None, definition=lambda score, batch, head, i, j: score - 0.1 * (i - j).abs())
        >>> q = k = v = torch.randn(1, 2, 8, 16)
        >>> fusedops.attention(q, k, v, score_mod=near).shape
        torch.Size([1, 2, 8, 16])
    """

    function: Any
    gradient: Any = None
    args: tuple[torch.Tensor, ...] = ()
    definition: Callable[..., torch.Tensor] | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        functions = _Functions(self.function, self.gradient, self.definition)
        object.__setattr__(self, "args", _check("ScoreMod", functions, self.args))
        object.__setattr__(self, "name", _register(functions))

    @classmethod
    def of(cls, function: str, value: Any) -> ScoreMod:
        """As :meth:`MaskMod.of`."""
        if isinstance(value, cls):
            return value
        if not _is_triton_function(value):
            takes = "a fusedops.ScoreMod, a function decorated with triton.jit, or None"
            wrong_type(function, "score_mod", takes, value)
        return cls(value)
