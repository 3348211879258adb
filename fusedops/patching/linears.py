"""Linear layers and what follows them: the fused classes, what rewritten methods call, and which parts are fused."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import has_torch_function

from fusedops.attention.functional import scaled_dot_product_attention
from fusedops.linear.activations import ACTIVATIONS, name_of
from fusedops.linear.functional import linear
from fusedops.linear.functional_gated import gated_linear
from fusedops.nn.parts import hooked
from fusedops.norm.functional import group_norm, layer_norm, rms_norm
from fusedops.patching.activations import Function, activation_name, known_name, maker_of
from fusedops.patching.attention import reading
from fusedops.patching.attention_bloom import find_bloom
from fusedops.patching.classes import Body, Fused, is_plain, original_class
from fusedops.patching.findings import (
    Finding,
    forward_is_replaced,
    full_name,
    hooks_of,
    obstacles_of,
    plainly_called,
)
from fusedops.patching.rewriting import Gate, Helpers, Link, Rewritten, rewritten_methods
from fusedops.patching.source import methods_of, names_in


def observed(module: Any) -> bool:
    """Whether somebody hooks the calls of this module or has replaced its forward."""
    return hooked(module) or forward_is_replaced(module)


def fetches_weights(module: nn.Module) -> bool:
    """Whether the forward of the instance is accelerate's, which brings a module's weights for as long as it runs."""
    forward = module.__dict__.get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


class FusedLinear(Fused):
    """With an activation's name, both are one call; without, it is the original's forward."""

    def forward(self: Any, *args: Any, activation: str | None = None, up: Any = None, **kwargs: Any) -> Any:
        if activation is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if up is None:
            return linear(args[0], self._weight(), self.bias, activation)
        if not isinstance(up, str):
            return gated_linear(args[0], self._weight(), up._weight(), self.bias, up.bias, activation)
        # Both in one layer; ``up`` says which half is not activated.
        if up == "second":
            return gated_linear(args[0], self._weight(), None, self.bias, None, activation)
        rest, gate = self._weight().chunk(2)
        rest_bias, gate_bias = (None, None) if self.bias is None else self.bias.chunk(2)
        return gated_linear(args[0], gate, rest, gate_bias, rest_bias, activation)

    def _weight(self: Any) -> torch.Tensor:
        return self.weight


class FusedConv1D(FusedLinear):
    """With an activation's name, both are one call; without, it is the original's forward."""

    def _weight(self: Any) -> torch.Tensor:
        # transformers' Conv1D holds its weight as (in, out).
        return self.weight.t()


class FusedOwner(Fused):
    """A linear layer and the activation after it, a gated pair of linear layers, or torch's function are one call."""


# --- What rewritten methods call -------------------------------------------------------------------------------------


def _fuses(module: Any) -> bool:
    return isinstance(module, FusedLinear) and not observed(module)


def _followed_by(module: Any) -> str:
    """The name of the activation that a module or function is, "" where it has to be called."""
    name = known_name(module)
    return "" if name and isinstance(module, nn.Module) and observed(module) else name


def chain(x: Any, parts: tuple[Any, ...]) -> Any:
    """Apply parts one after other, a fused linear layer together with the activation after it."""
    last = len(parts) - 1
    fuse = not torch_module._has_any_global_hook()
    skip = False
    for i, part in enumerate(parts):
        if skip:
            skip = False
            continue
        if fuse and i < last and _fuses(part) and is_plain(x):
            name = _followed_by(parts[i + 1])
            if name:
                x = part(x, activation=name)
                skip = True
                continue
        x = part(x)
    return x


def gated(x: Any, gate: Any, activation: Any, up: Any, order: str) -> Any:
    """``activation(gate(x)) * up(x)``, in one call where the parts allow it; else in the order of the source."""
    if (
        _fuses(gate)
        and _fuses(up)
        and is_plain(x)
        and _alike(gate, up)
        and not (fetches_weights(gate) or fetches_weights(up))
        and not torch_module._has_any_global_hook()
    ):
        name = _followed_by(activation)
        if name:
            return gate(x, activation=name, up=up)
    if "ga" in order:
        activated = None if order == "uga" else chain(x, (gate, activation))
        rest = up(x)
        return rest * chain(x, (gate, activation)) if activated is None else activated * rest
    gate_output = gate(x)
    rest = up(x)
    return activation(gate_output) * rest


def _alike(gate: Any, up: Any) -> bool:
    """Whether one call may hold both layers' parameters."""
    first, second = gate.weight, up.weight
    return _shape(gate) == _shape(up) and first.dtype is second.dtype and first.device == second.device


def _shape(layer: Any) -> torch.Size:
    """(out_features, in_features): transformers' Conv1D has it the other way round."""
    return layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.shape[::-1]


def halved(x: Any, gate: Any, activation: Any, order: str) -> Any:
    """``activation(gate(x)'s one half) * its other half``; ``order``: "ga" if the first half is activated."""
    first = order == "ga"
    if _fuses(gate) and is_plain(x) and not torch_module._has_any_global_hook() and _shape(gate)[0] % 2 == 0:
        name = _followed_by(activation)
        if name:
            return gate(x, activation=name, up="second" if first else "first")
    one, other = gate(x).chunk(2, dim=-1)
    return activation(one) * other if first else one * activation(other)


# torch's functions in a module's own methods, and ours, which take the same arguments.
FUNCTIONS = {
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "group_norm": group_norm,
}


def _stands_in(name: str) -> Any:
    """Our function for torch's, for as long as torch's is what its name stands for."""
    original = getattr(F, name)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get("query", kwargs.get("input"))
        tensors = (*args, *kwargs.values())
        own = getattr(F, name) is original and is_plain(x) and not has_torch_function(tensors)
        return (FUNCTIONS[name] if own else getattr(F, name))(*args, **kwargs)

    return function


HELPERS = Helpers(chain, gated, halved, {getattr(F, name): (name, _stands_in(name)) for name in FUNCTIONS})


# --- Classes ---------------------------------------------------------------------------------------------------------

# The methods of each class met so far that were rewritten, and those whose source is not at hand.
_rewritten: dict[type[nn.Module], tuple[Any, tuple[dict[str, Rewritten], frozenset[str]]]] = {}


def _read(kind: type[nn.Module]) -> tuple[dict[str, Rewritten], frozenset[str]]:
    methods = methods_of(kind, nn.Module)
    # Somebody may give a class other methods between two calls of patch.
    if kind not in _rewritten or _rewritten[kind][0] != methods:
        _rewritten[kind] = methods, rewritten_methods(kind, HELPERS)
    return _rewritten[kind][1]


def rewritten(kind: type[nn.Module]) -> dict[str, Rewritten]:
    """The methods of a class in which linear layers with activations, or torch's functions, are called."""
    return _read(kind)[0]


def _sequential_forward(self: Any, input: Any) -> Any:
    return chain(input, tuple(self._modules.values()))


def owner_body(original: type[nn.Module]) -> Body | None:
    """For :func:`fusedops.patching.classes.fused_class`: a class with its methods rewritten."""
    # Its name stays: device maps and FSDP's policies look for layers by the name of their class.
    name = {"__name__": original.__name__}
    if is_sequential(original):
        return FusedOwner, {"forward": _sequential_forward, **name}
    methods = rewritten(original)
    if not methods:
        return None
    return FusedOwner, {**{method: made.function for method, made in methods.items()}, **name}


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


# --- Findings --------------------------------------------------------------------------------------------------------


def find_linears(module: nn.Module) -> Iterator[Finding]:
    """Linear layers with their activation, and gated pairs, that a module calls."""
    kind = original_class(type(module))
    if is_sequential(kind):
        yield from _pairs(module, "forward", tuple(module._modules))
        return
    if not any(_is_linear(child) for child in module._modules.values()):
        return
    seen = set()
    for method, found in rewritten(kind).items():
        findings = [_gate(module, method, gate) for gate in found.gates]
        findings += [finding for links in found.chains for finding in _pairs(module, method, links)]
        for finding in findings:
            if finding is not None and (finding.path, finding.original) not in seen:
                seen.add((finding.path, finding.original))
                yield finding
    if not seen:
        yield from _unused_activations(module, kind)


def _unused_activations(module: nn.Module, kind: type[nn.Module]) -> Iterator[Finding]:
    """Says so where a module has linear layers and activations, and nothing was found that may be fused."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    if any(isinstance(child, nn.modules.conv._ConvNd) for child in children.values()):
        return  # whose activations these are is not known
    activations = [name for name, child in children.items() if activation_name(child)]
    forward = methods_of(kind, nn.Module).get("forward")
    unread = "forward" in _read(kind)[1]
    named = forward is not None and not ACTIVATIONS.keys().isdisjoint(names_in(forward))
    if isinstance(module, torch.fx.GraphModule):
        reason = "it is a graph that torch.fx traced: patch the model before it is traced"
    elif unread and (activations or named):
        reason = _UNREAD
    else:
        reason = f"its methods call {' and '.join(activations)} in no form that patch knows"
    if activations or (unread and named):
        yield Finding("", kind.__name__, "", ((module, "owner"),), (reason,))


_UNREAD = "the source of its forward is not at hand, or not what runs"


def _part(module: nn.Module, link: Link) -> Any:
    if isinstance(link, Function):
        return link
    *holders, last = [link] if isinstance(module, nn.Sequential) else link.split(".")
    for name in holders:
        held = module._modules.get(name)
        if held is None:
            return None
        module = held
    if last in module._modules:
        return module._modules[last]
    # Not by getattr: a property may do anything. A module that is not registered is nobody's to replace.
    value = module.__dict__.get(last, inspect.getattr_static(module, last, None))
    value = value.__func__ if isinstance(value, staticmethod) else value
    return None if isinstance(value, (nn.Module, property)) else value


def _pairs(module: nn.Module, method: str, links: tuple[Link, ...]) -> Iterator[Finding]:
    parts = [_part(module, link) for link in links]
    for (link, part), (next_link, follower) in itertools.pairwise(zip(links, parts, strict=True)):
        if isinstance(link, str) and _is_linear(part) and _may_be_activation(follower):
            name, reasons = _activation(module, method, follower)
            yield Finding(
                link,
                f"{_kind_name(part)} -> {_kind_name(follower)}",
                f'fusedops.linear(activation="{name}")',
                ((part, "linear"), *_marks(follower, name), (module, "owner")),
                (*_linear_reasons(part), *reasons),
                (next_link,) if isinstance(next_link, str) else (),
            )


def _gate(module: nn.Module, method: str, gate: Gate) -> Finding | None:
    layers = [_part(module, link) for link in (gate.gate, gate.up) if link is not None]
    follower = _part(module, gate.activation)
    if not all(map(_is_linear, layers)) or not _may_be_activation(follower):
        return None
    name, reasons = _activation(module, method, follower)
    for layer in layers:
        reasons += [reason for reason in _linear_reasons(layer) if reason not in reasons]
    if gate.up is not None and any(map(fetches_weights, layers)):
        reasons.append("accelerate's hooks fetch the weights of one of its linear layers at a time")
    if not reasons and gate.up is not None and not _alike(*layers):
        reasons.append("its two linear layers differ in shape, dtype or device")
    halved = "" if gate.up else ", halved"
    return Finding(
        gate.gate,
        f"{_kind_name(layers[0])} -> {_kind_name(follower)} * {_kind_name(layers[-1])}{halved}",
        f'fusedops.gated_linear(activation="{name}")',
        (*((layer, "linear") for layer in layers), *_marks(follower, name), (module, "owner")),
        tuple(reasons),
        tuple(link for link in (gate.activation, gate.up) if isinstance(link, str)),
    )


def _marks(activation: Any, name: str) -> tuple[tuple[nn.Module, str], ...]:
    """The swap by which an activation that is not torch's own is known afterwards."""
    if name and isinstance(activation, nn.Module) and name_of(activation) is None:
        return ((activation, maker_of(name)),)
    return ()


def _owner_reasons(module: nn.Module) -> list[str]:
    """What speaks against another class for a module that calls fused parts."""
    # Models of transformers that record outputs (output_attentions): what they can is registered for their very class.
    kind = original_class(type(module))
    function: Any = kind.forward
    while function is not None:
        if getattr(function, "__code__", None) is not None and "output_capturing" in function.__code__.co_filename:
            return [f"it is called by {kind.__name__} itself, whose class transformers goes by"]
        function = getattr(function, "__wrapped__", None)
    return []


def _activation(module: nn.Module, method: str, follower: Any) -> tuple[str, list[str]]:
    """The activation's name, and what speaks against fusing it in this method of a module."""
    reasons = _owner_reasons(module)
    if isinstance(follower, nn.Module):
        reasons += [reason.replace("it has", "the activation has") for reason in hooks_of(follower)]
        if not plainly_called(type(follower)):
            reasons.append(f"{full_name(type(follower))} changes how a module is called")
    name = activation_name(follower)
    if not name:
        reasons.append(f"patch does not fuse {_kind_name(follower)} into a Linear")
    if _is_replaced(module, method):
        reasons.append(f"its owner's {method} was replaced on the instance")
    return name, reasons


def _is_replaced(module: nn.Module, method: str) -> bool:
    """Whether the instance has a method of its own in place of its class'."""
    return forward_is_replaced(module) if method == "forward" else method in module.__dict__


def _linear_reasons(layer: nn.Module) -> list[str]:
    base = original_class(type(layer))
    if not (issubclass(base, nn.Linear) or is_conv1d(base)):
        if isinstance(layer._modules.get("base_layer"), nn.Module):
            return [f"it carries an adapter ({full_name(base)}); merge it to have it fused"]
        return [f"{full_name(base)} is neither nn.Linear nor transformers' Conv1D"]
    return obstacles_of(layer, nn.Linear if issubclass(base, nn.Linear) else base, hooks=True)


def _kind_name(part: Any) -> str:
    if isinstance(part, nn.Module):
        return original_class(type(part)).__name__
    function = part.function if isinstance(part, Function) else part
    return getattr(function, "__name__", type(function).__name__)


# Activations after a Linear that a report mentions although they are not fused.
_UNFUSED = frozenset({"ReLU6", "PReLU", "RReLU", "Hardtanh", "CELU", "SELU", "Softsign", "LogSigmoid", "Tanhshrink"})


def _may_be_activation(part: Any) -> bool:
    if isinstance(part, nn.Module):
        if isinstance(part, torch.jit.ScriptModule):
            return False
        kind = original_class(type(part))
        own = kind in (nn.GELU, nn.ELU, nn.LeakyReLU, nn.Softplus)  # with other arguments than ours
        return bool(activation_name(part)) or own or kind.__name__ in _UNFUSED or "Activation" in kind.__name__
    return part is not None and bool(activation_name(part))


def _is_linear(module: Any) -> bool:
    """A Linear, transformers' Conv1D, or what stands in for one: a quantised Linear, or LoRA around it."""
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        return False
    kind = original_class(type(module))
    if isinstance(module, nn.Linear) or is_conv1d(kind):
        return True
    return "Linear" in kind.__name__ or _is_linear(module._modules.get("base_layer"))


def find_experts(module: nn.Module) -> Iterator[Finding]:
    """Mixtures of experts with weights of three dimensions, as in transformers: named, not replaced."""
    weights = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    if all(weight is not None and weight.dim() == 3 for weight in weights):
        reason = "fusedops has no gated product of grouped experts; the model's own runs"
        yield Finding("", original_class(type(module)).__name__, "", (), (reason,))


def find_functions(module: nn.Module) -> Iterator[Finding]:
    """Calls of torch's functions in a module's own methods."""
    kind = original_class(type(module))
    if kind.__module__.startswith("torch."):
        return
    methods = methods_of(kind, nn.Module)
    naming = [name for name, function in methods.items() if _names_functions(function)]
    found = rewritten(kind) if naming else {}
    calls = dict.fromkeys((method, call) for method in naming if method in found for call in found[method].calls)
    for method, call in calls:
        reasons = _owner_reasons(module)
        if _is_replaced(module, method):
            reasons.append(f"its {method} was replaced on the instance")
        _, negated, attribute = (call.condition or "").rpartition("not ")
        value = _part(module, attribute) if attribute else None
        if isinstance(value, bool) and value is bool(negated):
            reasons.append(f"its {method} does not call F.{call.name} while its {attribute} is {value}")
        original = f"{kind.__name__} (F.{call.name})"
        yield Finding("", original, f"fusedops.{call.name}", ((module, "owner"),), tuple(reasons))
    if any(method in _read(kind)[1] for method in naming):
        yield Finding("", kind.__name__, "", ((module, "owner"),), (_UNREAD,))
    elif not calls and not _has_attention_rule(module, kind) and any(map(_writes_attention, methods.values())):
        reason = (
            "its attention is written out, with every score in memory; patch would replace a call of"
            " F.scaled_dot_product_attention"
        )
        yield Finding("", kind.__name__, "", (), (reason,))


def _has_attention_rule(module: nn.Module, kind: type[nn.Module]) -> bool:
    return reading(kind) is not None or next(find_bloom(module), None) is not None


@functools.lru_cache(maxsize=4096)
def _names_functions(function: Any) -> bool:
    """Whether a method names one of the functions at all: a quick look before the source is read."""
    function = inspect.unwrap(function)
    globals_ = getattr(function, "__globals__", {})
    for name in names_in(function):
        value = globals_.get(name)
        if name in FUNCTIONS or (callable(value) and any(value is torchs for torchs in HELPERS.functions)):
            return True
    return False


_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum"})


@functools.lru_cache(maxsize=4096)
def _writes_attention(function: Any) -> bool:
    """Whether a method takes a softmax between two matrix products."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or "softmax" not in code.co_names:
        return False
    steps = [*dis.get_instructions(code)]
    softmax = [at for at, step in enumerate(steps) if step.argval == "softmax"]
    products = [
        at
        for at, step in enumerate(steps)
        if step.opname == "BINARY_MATRIX_MULTIPLY"
        or (step.opname == "BINARY_OP" and step.argrepr == "@")
        or step.argval in _PRODUCTS
    ]
    return bool(products) and products[0] < softmax[-1] < products[-1]
