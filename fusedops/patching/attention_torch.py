"""torch.nn's multi-head attention and encoder layer: their modules get fusedops.nn's forward.

The modules keep their classes' other methods, and what :class:`fusedops.nn.MultiheadAttention` does otherwise than
torch's module holds for them too: a query that may see no key gets zeros from its heads rather than NaN, and wrong
arguments raise TypeError or ValueError. ``need_weights=True`` still gives the weights. torch's fast path, which takes a
whole encoder layer in evaluation mode, is never taken by a fused layer.

Of nn.TransformerDecoderLayer, the two attention modules are fused here; its norms and linear layers have other rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fusedops.nn.attention import MultiheadAttention
from fusedops.nn.transformer import TransformerEncoderLayer
from fusedops.patching.classes import Body, Fused, original_class
from fusedops.patching.findings import Finding, full_name, obstacles_of


class FusedMultiheadAttention(Fused, MultiheadAttention):
    """Its forward is that of fusedops.nn.MultiheadAttention."""


class FusedEncoderLayer(Fused, TransformerEncoderLayer):
    """Its forward is that of fusedops.nn.TransformerEncoderLayer."""


# By torch's class: ours, what is called, and torch's methods beside forward that ours replaces.
_KINDS: dict[type[nn.Module], tuple[type[Any], str, tuple[str, ...]]] = {
    nn.MultiheadAttention: (
        FusedMultiheadAttention, "fusedops.attention (where no weights are asked for)", (),
    ),
    nn.TransformerEncoderLayer: (
        FusedEncoderLayer, "fusedops.linear, fusedops.add_layer_norm", ("_sa_block", "_ff_block"),
    ),
}  # fmt: skip


def _base(kind: type[nn.Module]) -> type[nn.Module] | None:
    if issubclass(kind, (MultiheadAttention, TransformerEncoderLayer)):
        return None  # fusedops' own
    return next((base for base in _KINDS if issubclass(kind, base)), None)


def _class_reasons(kind: type[nn.Module], base: type[nn.Module]) -> list[str]:
    """What in a class' own methods keeps ours from taking the place of torch's."""
    ours, _, methods = _KINDS[base]
    reasons = [
        f"{full_name(kind)} has a {method} of its own"
        for method in methods
        if getattr(kind, method) is not getattr(base, method)
    ]
    # Names that ours brings would hide what somebody calls by the same name.
    brought = {name for name in vars(ours.__mro__[2]) if not name.startswith("__")} - {"forward"}
    hidden = sorted(name for name in brought if getattr(kind, name, None) is not getattr(base, name, None))
    return reasons + [
        f"{full_name(kind)} has a {name} of its own" for name in hidden if not any(name in r for r in reasons)
    ]


def torch_body(original: type[nn.Module]) -> Body | None:
    base = _base(original)
    if base is None or original.forward is not base.forward or _class_reasons(original, base):
        return None
    # Another one of the class is made as before: fusedops.nn's constructors check and take what a user's may not.
    return _KINDS[base][0], {"__init__": original.__init__}


def find_torch_attention(module: nn.Module) -> Iterator[Finding]:
    """An nn.MultiheadAttention or nn.TransformerEncoderLayer, or a module of a subclass with the same forward."""
    kind = original_class(type(module))
    base = _base(kind)
    if base is not None:
        calls = _KINDS[base][1]
        yield Finding("", kind.__name__, calls, ((module, "torch attention"),), tuple(_reasons(module, base)))


def _reasons(module: nn.Module, base: type[nn.Module]) -> list[str]:
    kind = original_class(type(module))
    reasons = obstacles_of(module, base) + _class_reasons(kind, base)
    if base is nn.TransformerEncoderLayer:
        inner = module._modules.get("self_attn")
        if not isinstance(inner, nn.MultiheadAttention):
            reasons.append("its self_attn is no nn.MultiheadAttention")
        elif _adds_key(inner):
            reasons.append("its self_attn adds a key of its own (add_bias_kv, add_zero_attn)")
        return reasons
    if _adds_key(module):
        reasons.append("it adds a key of its own (add_bias_kv, add_zero_attn)")
    out_proj = module._modules.get("out_proj")
    # torch's forward reads its weight and bias too, and never calls it.
    if not isinstance(out_proj, nn.Linear) or type(out_proj).forward is not nn.Linear.forward:
        reasons.append(f"its out_proj is a {type(out_proj).__name__}")
    return reasons


def _adds_key(attention: Any) -> bool:
    """Whether there is a key that torch hides from early queries or shows, depending on the way it takes."""
    return attention.bias_k is not None or attention.add_zero_attn
