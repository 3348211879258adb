"""What a rule recognises in a model, and what speaks against replacing it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize

from fusedops.patching.classes import calls_class_forward, fused_class, fused_rule, original_class


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a rule recognised.

    Attributes:
        path: where, from the module that was examined.
        original: class name, or "A -> B" for a pair.
        calls: the fusedops function that is called instead.
        swaps: the modules whose classes change, each with the rule that makes its fused class.
        reasons: every reason to leave it alone; empty: it can be replaced.
        involves: paths of further modules that are no longer called by themselves.
    """

    path: str
    original: str
    calls: str
    swaps: tuple[tuple[nn.Module, str], ...]
    reasons: tuple[str, ...]
    involves: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        """Whether an earlier call replaced it."""
        return bool(self.swaps) and all(fused_rule(type(module)) == rule for module, rule in self.swaps)

    def obstacles(self) -> list[str]:
        """``reasons``, or else what keeps the fused classes from being made."""
        if self.reasons:
            return list(self.reasons)
        return [*filter(None, (_class_reason(type(module), rule) for module, rule in self.swaps))]


def _class_reason(kind: type[nn.Module], rule: str) -> str:
    present = fused_rule(kind)
    if present is not None:
        return "" if present == rule else f"{original_class(kind).__name__} was replaced by the {present!r} rule"
    try:
        fused = fused_class(kind, rule)
    except Exception as error:  # whatever the class does when it is subclassed
        return f"{full_name(kind)} cannot be subclassed: {error}"
    return "" if fused is not None else f"the {rule!r} rule does not know {full_name(kind)}"


def obstacles_of(module: nn.Module, base: type[nn.Module], *, hooks: bool = False) -> list[str]:
    """Every reason why a module may not compute what ``base`` does, or may not be read by a kernel."""
    kind = original_class(type(module))
    reasons = []
    if parametrize.is_parametrized(module):
        reasons.append("it is parametrized (torch.nn.utils.parametrize)")
    elif kind.forward is not base.forward:
        reasons.append(f"{full_name(kind)} has a forward of its own")
    if forward_is_replaced(module):
        reasons.append("its forward was replaced on the instance")
    if not plainly_called(kind):
        reasons.append(f"{full_name(kind)} changes how a module is called")
    if hooks:
        reasons += hooks_of(module)
    for name in dict.fromkeys(("weight", "bias", *module._parameters)):
        if name not in module._parameters:
            if hasattr(module, name) and getattr(module, name) is not None:
                reasons.append(f"its {name} is not a parameter")
            continue
        value = module._parameters[name]
        if value is None:
            continue
        if type(value) is not nn.Parameter:
            reasons.append(f"its {name} is a {type(value).__name__}")
        elif type(value.data) is not torch.Tensor:
            reasons.append(f"its {name} is a {type(value.data).__name__}")
        elif not value.is_floating_point():
            reasons.append(f"its {name} has dtype {str(value.dtype).removeprefix('torch.')}")
    return reasons


def forward_is_replaced(module: nn.Module) -> bool:
    """Whether an instance has a forward of its own, other than accelerate's around the forward of its class."""
    return "forward" in module.__dict__ and not calls_class_forward(module)


def plainly_called(kind: type[nn.Module]) -> bool:
    """Whether calling such a module runs its forward and hooks, and nothing else."""
    return kind.__call__ is nn.Module.__call__ and kind._call_impl is nn.Module._call_impl


def hooks_of(module: nn.Module) -> list[str]:
    kinds = {
        "forward hooks": module._forward_hooks,
        "forward pre-hooks": module._forward_pre_hooks,
        "backward hooks": module._backward_hooks,
        "backward pre-hooks": module._backward_pre_hooks,
    }
    found = [name for name, hooks in kinds.items() if hooks]
    return [f"it has {' and '.join(found)}"] if found else []


def full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
