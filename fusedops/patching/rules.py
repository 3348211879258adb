"""The table of rules: what is recognised in a model, what it becomes, and why something is left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusedops.linear.activations import ACTIVATIONS
from fusedops.patching import activations, attention, attention_bloom, attention_torch, linears, norms
from fusedops.patching.check import evaluating
from fusedops.patching.classes import (
    Body,
    Fused,
    forget_maker,
    fused_rule,
    has_maker,
    original_class,
    register_maker,
)
from fusedops.patching.findings import Finding, obstacles_of


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the table.

    Attributes:
        name: as reports show it.
        find: ``find(module)`` yields what the rule recognises in a module that it is asked about (not in its
            descendants).
    """

    name: str
    find: Callable[[nn.Module], Iterable[Finding]]


# Asked in this order; of two rules that want the same module, the first has it.
RULES = (
    Rule("norm", norms.find_norm),
    Rule("attention", attention.find_attention),
    Rule("attention", attention_torch.find_torch_attention),
    Rule("attention", attention_bloom.find_bloom),
    Rule("linear+activation", linears.find_linears),
    Rule("experts", linears.find_experts),
    Rule("function", linears.find_functions),
)

register_maker("norm", norms.norm_body)
register_maker("linear", linears.linear_body)
register_maker("owner", linears.owner_body)
for _name in ACTIVATIONS:
    register_maker(activations.maker_of(_name), activations.activation_body(_name))
register_maker("attention", attention.attention_body, attention.register)
register_maker("torch attention", attention_torch.torch_body)
register_maker("bloom attention", attention_bloom.bloom_body)

# Makers of classes whose forward does all that the module's own methods did, so that nothing is left for other rules.
WHOLE = frozenset({"torch attention"})

# Rules of users, the last registered first.
_registered: dict[str, Rule] = {}


def registered_rules() -> tuple[Rule, ...]:
    """Users' rules, in the order in which they are asked: before all of fusedops' own."""
    return (*reversed(_registered.values()),)


def register_rule(
    name: str,
    kind: type[nn.Module] | tuple[type[nn.Module], ...],
    forward: Callable[..., Any],
    *,
    calls: str,
    reasons: Callable[[nn.Module], Iterable[str]] = lambda module: (),
    check: Callable[[nn.Module], tuple[Any, ...]] | None = None,
) -> None:
    """Let :func:`fusedops.patch` replace the forward of a class of your own.

    A module that the rule fits gets a subclass of its own class with ``forward`` in it. Left alone, and named in the
    report, are modules with a forward of their own, replaced on the instance or in a subclass, with parametrizations,
    or with parameters that are not plain tensors. Rules are asked before fusedops' own, the last registered first.

    A pickled model holds the rule's name: the process that loads it has to register the rule before, or the modules
    are there as they were unpatched.

    Args:
        name: of the rule, as reports show it; not one that exists.
        kind: the class that is replaced, or several; subclasses that have its forward are replaced with it.
        forward: ``forward(self, ...)`` with the parameters of the class' own.
        calls: what it calls, for reports, such as ``"fusedops.rms_norm"``.
        reasons: what speaks against replacing a module, a list of texts; empty: it is replaced.
        check: gives positional arguments for a module, a tuple or one tensor. The module is run on them before it is
            replaced, with its own forward and with ``forward``, in evaluation mode and without gradients; where the
            results differ by more than the rounding of their dtype it is left alone. Without it, nothing compares the
            two: then give ``fusedops.patch`` inputs to check.

    Raises:
        TypeError: an argument is not what it should be.
        ValueError: there is a rule of this name.

    Examples:
        >>> import torch, fusedops
        >>> class Scale(torch.nn.Module):
        ...     def __init__(self, size):
        ...         super().__init__()
        ...         self.weight = torch.nn.Parameter(torch.ones(size))
        ...     def forward(self, x):
        ...         return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight
        >>> def fused(self, x):
        ...     return fusedops.rms_norm(x, self.weight.shape, self.weight, 1e-6)
        >>> fusedops.patching.register_rule("scale", Scale, fused, calls="fusedops.rms_norm")
        >>> print(fusedops.patch(torch.nn.Sequential(Scale(8))).replaced[0].rule)
        scale
        >>> fusedops.patching.unregister_rule("scale")
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"register_rule: name must be a text that is not empty; got {name!r}")
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not kinds:
        raise ValueError("register_rule: kind must be a class of modules, or several; got none")
    for each in kinds:
        if not (isinstance(each, type) and issubclass(each, nn.Module)):
            raise TypeError(f"register_rule: kind must be a class of modules, or several; got {each!r}")
    for argument, value in (("forward", forward), ("reasons", reasons), ("check", check)):
        if not (callable(value) or (argument == "check" and value is None)):
            raise TypeError(f"register_rule: {argument} must be a function; got {type(value).__name__}")
    if not isinstance(calls, str):
        raise TypeError(f"register_rule: calls must be a text; got {type(calls).__name__}")
    if name in _registered or has_maker(name) or any(rule.name == name for rule in RULES):
        raise ValueError(f"register_rule: there is a rule {name!r}; unregister_rule takes one of your own away")

    def base_of(own: type[nn.Module]) -> type[nn.Module] | None:
        return next((each for each in kinds if issubclass(own, each)), None)

    def find(module: nn.Module) -> Iterator[Finding]:
        own = original_class(type(module))
        base = base_of(own)
        if base is None:
            return
        found = [*obstacles_of(module, base), *_reasons_of(name, reasons, module)]
        if check is not None and not found and fused_rule(type(module)) != name:
            found += _differences(module, forward, check)
        yield Finding("", own.__name__, calls, ((module, name),), tuple(found))

    def make(own: type[nn.Module]) -> Body | None:
        base = base_of(own)
        return (FusedByRule, {"forward": forward}) if base is not None and own.forward is base.forward else None

    _registered[name] = Rule(name, find)
    register_maker(name, make)


def unregister_rule(name: str) -> None:
    """Take back a rule of :func:`register_rule`. Modules that it has replaced stay so until ``fusedops.unpatch``.

    Args:
        name: as it was registered.

    Raises:
        ValueError: no rule of this name was registered.

    Examples:
        >>> from fusedops.patching import unregister_rule
        >>> unregister_rule("mine")
        Traceback (most recent call last):
        ValueError: unregister_rule: no rule 'mine' was registered; there are: none
    """
    if not isinstance(name, str) or name not in _registered:
        raise ValueError(
            f"unregister_rule: no rule {name!r} was registered; there are: {', '.join(_registered) or 'none'}"
        )
    del _registered[name]
    forget_maker(name)


def _reasons_of(name: str, reasons: Callable[[nn.Module], Iterable[str]], module: nn.Module) -> list[str]:
    try:
        found = reasons(module)
        texts = [] if isinstance(found, str) else [*found]
    except Exception as error:
        return [f"the reasons of rule {name!r} failed: {type(error).__name__}: {error}"]
    if isinstance(found, str) or not all(isinstance(text, str) for text in texts):
        return [f"the reasons of rule {name!r} are no list of texts: {found!r}"]
    return texts


class FusedByRule(Fused):
    """Its forward is a registered rule's."""


def _differences(
    module: nn.Module, forward: Callable[..., Any], check: Callable[[nn.Module], tuple[Any, ...]]
) -> list[str]:
    """What a rule's own check finds wrong."""
    try:
        with evaluating(module), torch.no_grad(), torch.random.fork_rng([]):
            given = check(module)
            inputs = given if isinstance(given, tuple) else (given,)
            expected, actual = module(*inputs), forward(module, *inputs)
    except Exception as error:
        return [f"its check failed: {type(error).__name__}: {error}"]
    try:
        torch.testing.assert_close(actual, expected)
    except (AssertionError, TypeError, ValueError) as error:
        text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
        return [f"its check found other results: {text}"]
    return []
