"""Rules that a user writes as Triton functions: which query sees which key, and what becomes of a score.

The attention operators take names, not functions: a library operator's arguments are tensors, numbers and strings. A
rule is registered under the name of its function when its object is made, and stays so: make a rule once, not at
every step, and outside of compiled functions.
"""

from __future__ import annotations

import copy
import importlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fusedops.runtime.checks import wrong_type, wrong_value


class _Functions(NamedTuple):
    function: Any
    gradient: Any
    definition: Callable[..., torch.Tensor] | None


_by_name: dict[str, _Functions] = {}
# By the identity of the functions, which the other table keeps alive: a callable need not be hashable.
_names: dict[tuple[int, ...], str] = {}
_counts: dict[str, int] = {}
_lock = threading.Lock()


def register_rule(function: Any, gradient: Any, definition: Any) -> str:
    """A name for the functions: the first one's qualified name, and a number where others have that name."""
    functions = _Functions(function, gradient, definition)
    key = tuple(map(id, functions))
    with _lock:
        name = _names.get(key)
        if name is None:
            named = functions.function if functions.function is not None else functions.definition
            named = getattr(named, "fn", named)
            first = f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', type(named).__qualname__)}"
            _counts[first] = number = _counts.get(first, 0) + 1
            name = first if number == 1 else f"{first}#{number}"
            _by_name[name] = functions
            _names[key] = name
    return name


def functions_of(name: str) -> _Functions:
    """(function, gradient, definition) registered under a name that a rule's object has."""
    functions = _by_name.get(name)
    if functions is None:
        raise RuntimeError(f"no rule is named {name!r} here: make its MaskMod or ScoreMod in this process first")
    return functions


def parts_of(name: str) -> tuple[bool, bool, bool]:
    """Whether a rule has a Triton function, a gradient and a definition."""
    function, gradient, definition = functions_of(name)
    return function is not None, gradient is not None, definition is not None


# What is registered never changes, and torch.compile cannot guard on a function that it meets in two places.
parts_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _reference(function: Any) -> Any:
    """What stands for a Triton function in a pickle: where to import it from."""
    return (function.fn.__module__, function.fn.__qualname__) if _is_triton_function(function) else function


def _imported(kind: Any, functions: tuple[Any, ...], args: Any, definition: Any) -> Any:
    """A rule from what :func:`_reference` made of its functions."""
    found = []
    for function in functions:
        if isinstance(function, tuple):
            module, names = function
            function = importlib.import_module(module)
            for name in names.split("."):
                function = getattr(function, name)
        found.append(function)
    return kind(*found, args=args, definition=definition)


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
    if torch.compiler.is_compiling():
        raise RuntimeError(f"make the {kind} outside of the compiled function, and let it use the object")
    if isinstance(args, torch.Tensor):
        args = (args,)
    if not isinstance(args, Iterable):
        wrong_type(kind, "args", "a tuple of tensors", args)
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

    After Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention Kernels".

    Args:
        function: decorated with ``triton.jit``, ``mask_mod(batch, head, i, j, args) -> bool``. ``batch`` and ``head``
            are numbers; ``i`` (queries) and ``j`` (keys) int32 blocks that broadcast with each other, always inside
            the sequences; ``args`` a tuple of pointers to the tensors of ``args``.
        args: tensors that the function reads. They are made contiguous, and lie on the device of the queries.
        definition: the same in plain torch, ``definition(batch, head, i, j, *args)``, every index a tensor that
            broadcasts with the others: what the torch backend computes. Without it that backend raises an error.

    Raises:
        TypeError, ValueError: an argument is none of these, or one of ``args`` requires a gradient.
        RuntimeError: it is made inside a function that torch.compile compiles.

    Examples:
        A prefix that every query sees, and causality behind it. (Without a Triton function only the torch backend
        takes the rule.)

        >>> import torch, fusedops
        >>> prefix = fusedops.MaskMod(None, definition=lambda batch, head, i, j: (j < 3) | (j <= i))
        >>> q = k = v = torch.randn(1, 2, 8, 16)
        >>> out = fusedops.attention(q, k, v, mask_mod=prefix)
        >>> mask = torch.ones(8, 8).tril().bool() | (torch.arange(8) < 3)
        >>> torch.allclose(out, fusedops.attention(q, k, v, attn_mask=mask), atol=1e-6)
        True
    """

    function: Any
    args: tuple[torch.Tensor, ...] = ()
    definition: Callable[..., torch.Tensor] | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        functions = _Functions(self.function, None, self.definition)
        object.__setattr__(self, "args", _check("MaskMod", functions, self.args))
        object.__setattr__(self, "name", register_rule(*functions))

    def __reduce__(self) -> Any:
        return _imported, (MaskMod, (_reference(self.function),), self.args, self.definition)

    def __deepcopy__(self, memo: dict[int, Any]) -> MaskMod:
        return MaskMod(self.function, copy.deepcopy(self.args, memo), self.definition)

    @classmethod
    def of(cls, function: str, value: Any) -> MaskMod:
        """A rule as it is; a Triton function as a rule without ``args``.

        Args:
            function: the name of the caller, for the message.
            value: the rule or the Triton function.

        Raises:
            TypeError: ``value`` is anything else.
        """
        if isinstance(value, cls):
            return value
        if not _is_triton_function(value):
            wrong_type(function, "mask_mod", "a fusedops.MaskMod, a function decorated with triton.jit, or None", value)
        return cls(value)


@dataclass(frozen=True, eq=False)
class ScoreMod:
    """A rule that changes each score, evaluated tile by tile inside the attention kernels.

    It takes the scaled (and capped) score, before attn_mask and ALiBi are added and before anything is masked. After
    Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention Kernels".

    Args:
        function: decorated with ``triton.jit``, ``score_mod(score, batch, head, i, j, args) -> score``, float32
            blocks; the other arguments as in :class:`MaskMod`.
        gradient: decorated with ``triton.jit``, ``gradient(grad, score, batch, head, i, j, args)``: the gradient
            of the score that goes in, given that of the one that comes out. Without it a backward raises an error.
        args: tensors that the functions read. They get no gradient.
        definition: the same in plain torch, ``definition(score, batch, head, i, j, *args)``, differentiated by
            autograd: what the torch backend computes. Without it that backend raises an error.

    Raises:
        TypeError, ValueError: an argument is none of these, or one of ``args`` requires a gradient.
        RuntimeError: it is made inside a function that torch.compile compiles.

    Examples:
        Scores that fall with the distance, as ALiBi's do. (Without a Triton function only the torch backend takes the
        rule.)

        >>> import torch, fusedops
        >>> near = fusedops.ScoreMod(None, definition=lambda score, batch, head, i, j: score - 0.1 * (i - j).abs())
        >>> q = k = v = torch.randn(1, 2, 8, 16)
        >>> out = fusedops.attention(q, k, v, score_mod=near)
        >>> torch.allclose(out, fusedops.attention(q, k, v, alibi_slopes=torch.full((2,), 0.1)), atol=1e-6)
        True
    """

    function: Any
    gradient: Any = None
    args: tuple[torch.Tensor, ...] = ()
    definition: Callable[..., torch.Tensor] | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        functions = _Functions(self.function, self.gradient, self.definition)
        object.__setattr__(self, "args", _check("ScoreMod", functions, self.args))
        object.__setattr__(self, "name", register_rule(*functions))

    def __reduce__(self) -> Any:
        functions = _reference(self.function), _reference(self.gradient)
        return _imported, (ScoreMod, functions, self.args, self.definition)

    def __deepcopy__(self, memo: dict[int, Any]) -> ScoreMod:
        return ScoreMod(self.function, self.gradient, copy.deepcopy(self.args, memo), self.definition)

    @classmethod
    def of(cls, function: str, value: Any) -> ScoreMod:
        """As :meth:`MaskMod.of`, with its ``function`` and ``value``."""
        if isinstance(value, cls):
            return value
        if not _is_triton_function(value):
            takes = "a fusedops.ScoreMod, a function decorated with triton.jit, or None"
            wrong_type(function, "score_mod", takes, value)
        return cls(value)
