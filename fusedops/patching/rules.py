"""The table of rules: what is recognised in a model, what it becomes, and why something is left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from fusedops.norm.functional import layer_norm, rms_norm
from fusedops.patching import attention, chains
from fusedops.patching.classes import Body, Fused, fused_class, fused_rule, original_class, register_maker


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a rule recognised.

    Attributes:
        path: where, from the module that was examined.
        original: class name, or "A -> B" for a pair.
        calls: the fusedops function that is called instead.
        swaps: the modules whose classes change, each with the rule that makes its fused class.
        reasons: every reason to leave it alone; empty: it can be replaced.
    """

    path: str
    original: str
    calls: str
    swaps: tuple[tuple[nn.Module, str], ...]
    reasons: tuple[str, ...]

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
        return f"{_full_name(kind)} cannot be subclassed: {error}"
    return "" if fused is not None else f"the {rule!r} rule does not know {_full_name(kind)}"


class FusedLayerNorm(Fused):
    """Layer norm in one kernel."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        if input.is_nested or input.layout is not torch.strided:
            return super().forward(input)  # type: ignore[misc]
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class FusedRMSNorm(Fused):
    """RMS norm in one kernel."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if x.is_nested or x.layout is not torch.strided:
            return super().forward(x)  # type: ignore[misc]
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


_NORMS: dict[type[nn.Module], tuple[type[Fused], str]] = {
    nn.LayerNorm: (FusedLayerNorm, "fusedops.layer_norm"),
    nn.RMSNorm: (FusedRMSNorm, "fusedops.rms_norm"),
}


def _norm_base(kind: type[nn.Module]) -> type[nn.Module] | None:
    return next((base for base in _NORMS if issubclass(kind, base)), None)


def _norm_body(original: type[nn.Module]) -> Body | None:
    base = _norm_base(original)
    return (_NORMS[base][0], {}) if base is not None and original.forward is base.forward else None


def _find_norm(module: nn.Module) -> Iterator[Finding]:
    kind = original_class(type(module))
    base = _norm_base(kind)
    if base is not None:
        reasons = _obstacles(module, base)
        yield Finding("", kind.__name__, _NORMS[base][1], ((module, "norm"),), tuple(reasons))
    elif kind.__name__.endswith(("RMSNorm", "LayerNorm")):
        yield Finding("", kind.__name__, "", (), (f"no rule for {_full_name(kind)} yet",))


def _find_pairs(module: nn.Module) -> Iterator[Finding]:
    kind = original_class(type(module))
    children = module._modules
    if chains.is_sequential(kind):
        found = {"forward": tuple(children)}
    elif any(_is_linear(child) for child in children.values()):
        found = chains.chains_of(kind)
    else:
        return
    for method, names in found.items():
        linked = [children.get(name) for name in names]
        for name, linear, activation in chains.pairs(names, linked):
            if not _is_linear(linear):
                continue
            base = original_class(type(linear))
            reasons = _obstacles(linear, nn.Linear if issubclass(base, nn.Linear) else base, hooks=True)
            if not (issubclass(base, nn.Linear) or chains.is_conv1d(base)):
                reasons = [f"{_full_name(base)} is neither nn.Linear nor transformers' Conv1D"]
            reasons += [reason.replace("it has", "the activation has") for reason in _hooks(activation)]
            if not plainly_called(type(activation)):
                reasons.append(f"{_full_name(type(activation))} changes how a module is called")
            function = chains.activation_name(activation)
            if not function:
                reasons.append(f"patch does not fuse {type(activation).__name__} into a Linear")
            if method in module.__dict__:
                reasons.append(f"its owner's {method} was replaced on the instance")
            yield Finding(
                name,
                f"{base.__name__} -> {type(activation).__name__}",
                f'fusedops.linear(activation="{function}")',
                ((linear, "linear"), (module, "chain")),
                tuple(reasons),
            )


def _is_linear(module: nn.Module | None) -> bool:
    """A Linear, transformers' Conv1D, or what stands in for one: a quantised Linear, or LoRA around it."""
    if module is None:
        return False
    kind = original_class(type(module))
    if isinstance(module, nn.Linear) or chains.is_conv1d(kind):
        return True
    return "Linear" in kind.__name__ or _is_linear(module._modules.get("base_layer"))


def _find_attention(module: nn.Module) -> Iterator[Finding]:
    kind = original_class(type(module))
    if isinstance(module, nn.MultiheadAttention):
        yield Finding("", kind.__name__, "", (), ("no rule for nn.MultiheadAttention yet",))
        return
    config = module.__dict__.get("config")
    implementation = getattr(config, "_attn_implementation", None)
    if implementation is None or not attention.transformers_loaded() or not attention.reads_registry(kind):
        return
    reasons = []
    if not attention.is_known(kind):
        model = getattr(config, "model_type", None) or type(config).__name__
        reasons.append(f"no rule for the attention of {model!r} models ({_full_name(kind)}) yet")
    if implementation not in attention.REGISTERED:
        reasons.append(f"it runs {implementation!r}; 'sdpa' and 'eager' are replaced")
    elif implementation == "eager":
        reasons += attention.eager_reasons(module)
        if attention.is_known(kind) and not attention.weights_are_hooked(kind):
            reasons.append("this version of transformers takes its eager attention weights from every call")
    if "forward" in module.__dict__:
        reasons.append("its forward was replaced on the instance")
    calls = f"fusedops.scaled_dot_product_attention (for {implementation!r})"
    yield Finding("", kind.__name__, calls, ((module, "attention"),), tuple(reasons))


def _obstacles(module: nn.Module, base: type[nn.Module], *, hooks: bool = False) -> list[str]:
    """Every reason why a module may not compute what ``base`` does, or may not be read by a kernel."""
    kind = original_class(type(module))
    reasons = []
    if parametrize.is_parametrized(module):
        reasons.append("it is parametrized (torch.nn.utils.parametrize)")
    elif kind.forward is not base.forward:
        reasons.append(f"{_full_name(kind)} has a forward of its own")
    if "forward" in module.__dict__:
        reasons.append("its forward was replaced on the instance")
    if not plainly_called(kind):
        reasons.append(f"{_full_name(kind)} changes how a module is called")
    if hooks:
        reasons += _hooks(module)
    for name in ("weight", "bias"):
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


def plainly_called(kind: type[nn.Module]) -> bool:
    """Whether calling such a module runs its forward and hooks, and nothing else."""
    return kind.__call__ is nn.Module.__call__ and kind._call_impl is nn.Module._call_impl


def _hooks(module: nn.Module) -> list[str]:
    kinds = {
        "forward hooks": module._forward_hooks,
        "forward pre-hooks": module._forward_pre_hooks,
        "backward hooks": module._backward_hooks,
        "backward pre-hooks": module._backward_pre_hooks,
    }
    found = [name for name, hooks in kinds.items() if hooks]
    return [f"it has {' and '.join(found)}"] if found else []


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True, slots=True)
class Rule:
    """``find(module)`` yields what the rule recognises in a module that it is asked about (not in its descendants)."""

    name: str
    find: Callable[[nn.Module], Iterator[Finding]]


RULES = (
    Rule("norm", _find_norm),
    Rule("linear+activation", _find_pairs),
    Rule("attention", _find_attention),
)

register_maker("norm", _norm_body)
register_maker("linear", chains.linear_body)
register_maker("chain", chains.chain_body)
register_maker("attention", attention.attention_body, attention.register)
