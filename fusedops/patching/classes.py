"""Fused subclasses of a module's own class, and how they are pickled.

A patched module is the same object with another class, made once for every (original class, rule). Such a class
exists only in memory, so that pickling and deepcopy name the original class and the rule, and make it again.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import nn

from fusedops.patching.source import methods_of

# What a rule adds to a class: the mixin that goes before the original class, and more attributes. None where the rule
# has nothing for this class.
Body = tuple[type, dict[str, Any]]
BodyMaker = Callable[[type[nn.Module]], "Body | None"]

# For each kind of fused class: what makes its body, and what has to be done before a module may become one.
_makers: dict[str, tuple[BodyMaker, Callable[[], None]]] = {}
_classes: dict[tuple[type[nn.Module], str], tuple[Any, type[nn.Module] | None]] = {}


class Fused:
    """Base of the mixins: what every fused class has. (Without __slots__, or objects could not change their class.)"""

    fused_rule: ClassVar[str]
    fused_original: ClassVar[type[nn.Module]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Protocol 2 is the first that tells the class from the state.
        reduced = super().__reduce_ex__(max(2, int(protocol)))
        kind = type(self)
        if isinstance(reduced, str) or not is_fused(kind):
            return reduced
        function, arguments, *rest = reduced
        function, *arguments = (kind.fused_original if part is kind else part for part in (function, *arguments))
        return rebuild, (kind.fused_original, kind.fused_rule, function, tuple(arguments)), *rest


def is_plain(x: Any) -> bool:
    """A tensor that the operators take; nested and sparse ones take the way they took before."""
    return isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_nested


def register_maker(rule: str, make: BodyMaker, prepare: Callable[[], None] = lambda: None) -> None:
    """Name the function that makes the fused classes of a rule. Rules do so when they are imported.

    Args:
        prepare: called before a module gets such a class; may be called often.
    """
    _makers[rule] = make, prepare


def has_maker(rule: str) -> bool:
    return rule in _makers


def forget_maker(rule: str) -> None:
    """Undo :func:`register_maker`: nothing gets such a class any more."""
    del _makers[rule]
    for key in [key for key in _classes if key[1] == rule]:
        del _classes[key]


def is_fused(kind: type) -> bool:
    """Whether this is a fused class itself (and not a class that somebody derived from one)."""
    return "fused_original" in kind.__dict__


def fused_rule(kind: type) -> str | None:
    """The rule of a fused class; None for any other class."""
    return kind.__dict__.get("fused_rule") if is_fused(kind) else None


def original_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that a module had before it was patched; any other class as it is."""
    return kind.__dict__.get("fused_original", kind)


def fused_class(original: type[nn.Module], rule: str) -> type[nn.Module] | None:
    """The fused subclass of a class; None where the rule cannot fuse this class.

    Always the same one, as long as the class runs the same methods: somebody may give it others.
    """
    key, methods = (original, rule), methods_of(original, nn.Module)
    if key not in _classes or _classes[key][0] != methods:
        _classes[key] = methods, _make(original, rule)
    return _classes[key][1]


def _make(original: type[nn.Module], rule: str) -> type[nn.Module] | None:
    body = _makers[rule][0](original)
    if body is None:
        return None
    mixin, attributes = body
    names = {"__name__": f"Fused{original.__name__}", "__qualname__": f"Fused{original.__qualname__}"} | attributes
    namespace = {
        # The original's module: tools such as torch.fx tell torch's own modules by it.
        "__module__": original.__module__,
        "__doc__": f"{original.__qualname__} whose forward calls fusedops. {mixin.__doc__}",
        "fused_rule": rule,
        "fused_original": original,
        **names,
    }
    metaclass: Any = type(original)
    return metaclass(namespace.pop("__name__"), (mixin, original), namespace)


def fuse(module: nn.Module, rule: str) -> bool:
    """Give a module its fused class. False where it has one, or where the rule cannot fuse its class."""
    kind = type(module)
    fused = None if is_fused(kind) else fused_class(kind, rule)
    if fused is None:
        return False
    _makers[rule][1]()
    set_class(module, fused)
    return True


def set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    kept = _kept_forward(module)
    # Past any __setattr__ that the module's class may have.
    object.__setattr__(module, "__class__", kind)
    if kept is not None:
        module.__dict__[kept] = MethodType(kind.forward, module)


def calls_class_forward(module: nn.Module) -> bool:
    """Whether the forward of the instance is accelerate's, and no other than the class' but for what it moves."""
    return _kept_forward(module) is not None


def _kept_forward(module: nn.Module) -> str | None:
    """Where an instance that accelerate hooks, or has hooked, holds the forward of its class as a bound method.

    That is beside the hook, which moves what the module is given and calls it; or in the hook's place once it is gone.
    """
    name = "_old_forward" if "_hf_hook" in module.__dict__ else "forward"
    kept = module.__dict__.get(name)
    bound = isinstance(kept, MethodType) and kept.__self__ is module and kept.__func__ is type(module).forward
    return name if bound else None


def rebuild(original: type[nn.Module], rule: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Unpickle a patched module: make the object as its own class would, then give it the fused class.

    Where the rule no longer holds for the class (another version of the model's library), it stays unfused.
    """
    # Importing the rules registers their makers.
    import fusedops.patching.rules  # noqa: F401

    module = function(*arguments)
    if type(module) is original and rule in _makers:
        fuse(module, rule)
    return module
