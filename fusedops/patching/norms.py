"""Norms: which modules compute one, and their fused classes.

torch's own classes are known. Any other class that may be a norm by its name is tried out (:mod:`.probing`): what is
shown to compute layer, RMS or group norm calls fusedops, for the inputs for which it was shown, and everything else is
left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fusedops.norm.functional import group_norm, layer_norm, rms_norm
from fusedops.patching.classes import Body, Fused, is_fused, is_plain, original_class
from fusedops.patching.findings import Finding, obstacles_of
from fusedops.patching.probing import Proof, argument_of, dtype_of, proofs_of, prove, result_order, subject_of


class FusedLayerNorm(Fused):
    """Layer norm in one kernel."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        if not is_plain(input):
            return super().forward(input)  # type: ignore[misc]
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class FusedRMSNorm(Fused):
    """RMS norm in one kernel."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not is_plain(x):
            return super().forward(x)  # type: ignore[misc]
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


class FusedGroupNorm(Fused):
    """Group norm in one kernel."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        if not is_plain(input):
            return super().forward(input)  # type: ignore[misc]
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class FusedNorm(Fused):
    """A norm in one kernel, for all inputs for which its forward was shown to compute one."""

    # The class' own list: what is found out later is added to it.
    fused_proofs: ClassVar[list[Proof]]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        proof = _proof_for(self)
        if proof is not None:
            x = args[0] if len(args) == 1 and not kwargs else None
            if not args and len(kwargs) == 1:
                x = kwargs.get(proof.argument)
            if isinstance(x, torch.Tensor):
                output = _apply(proof, self, x)
                if output is not None:
                    return output
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def _proof_for(module: Any) -> Proof | None:
    proofs: list[Proof] = module.fused_proofs
    for proof in proofs:
        if proof.holds(module):
            return proof
    if torch.compiler.is_compiling():
        return None
    # Unpickled in another process, or its attributes were changed.
    found = prove(module.fused_original, module)
    return found if isinstance(found, Proof) else None


def _apply(proof: Proof, module: Any, x: torch.Tensor) -> torch.Tensor | None:
    """The norm of x; None where it has not been shown to be what the module's own forward gives."""
    norm = proof.norm
    place = proof.layouts.get(x.dim())
    if place is None or not is_plain(x):
        return None
    dim, order = place
    weight = getattr(module, norm.weight) if norm.weight else None
    bias = getattr(module, norm.bias) if norm.bias else None
    eps = getattr(module, norm.eps_name) if norm.eps_name else norm.eps
    dtype = _out_dtype(proof, x, weight)
    width = proof.width if weight is None else weight.shape[0]
    if dtype is None or (width is not None and x.shape[dim] != width):
        return None
    if bias is not None and weight is not None and bias.dtype != weight.dtype:
        return None
    if eps is not norm.eps and not isinstance(eps, (float, int)):
        return None
    if norm.kind == "group":
        return group_norm(x, norm.groups, weight, bias, eps, out_dtype=dtype)
    if dim == -1 and x.is_contiguous():
        return _rows(proof, x, weight, bias, eps, dtype)
    # Rows in the order in which the result is to lie in memory; the normalised dimension innermost, for the kernels.
    dim %= x.dim()
    dims = result_order(order, x, dim)
    inner = [*(d for d in dims if d != dim), dim]
    y = _rows(proof, x.permute(inner), weight, bias, eps, dtype).permute(_inverse(inner))
    return y.permute(dims).contiguous().permute(_inverse(dims))


def _rows(
    proof: Proof,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: Any,
    dtype: torch.dtype,
) -> torch.Tensor:
    shape = (x.shape[-1],)
    if proof.norm.kind == "rms":
        return rms_norm(x, shape, weight, eps, weight_offset=proof.norm.offset, out_dtype=dtype)
    if weight is not None and proof.norm.offset:
        weight = weight + proof.norm.offset
    return layer_norm(x, shape, weight, bias, eps, out_dtype=dtype)


def _inverse(dims: list[int]) -> list[int]:
    return sorted(range(len(dims)), key=dims.__getitem__)


def _out_dtype(proof: Proof, x: torch.Tensor, weight: torch.Tensor | None) -> torch.dtype | None:
    """The dtype that the module's own forward gives, None where that is not known."""
    device = x.device.type
    parameter = None if weight is None else weight.dtype
    if device != "meta" and torch.is_autocast_enabled(device):
        return dtype_of(proof.index, device, torch.get_autocast_dtype(device), x.dtype, parameter)
    return proof.dtypes.get((x.dtype, parameter))


_NORMS: dict[type[nn.Module], tuple[type[Fused], str]] = {
    nn.LayerNorm: (FusedLayerNorm, "fusedops.layer_norm"),
    nn.RMSNorm: (FusedRMSNorm, "fusedops.rms_norm"),
    nn.GroupNorm: (FusedGroupNorm, "fusedops.group_norm"),
}


def _norm_base(kind: type[nn.Module]) -> type[nn.Module] | None:
    return next((base for base in _NORMS if issubclass(kind, base) and kind.forward is base.forward), None)


def may_be_norm(kind: type[nn.Module]) -> bool:
    """Whether a class is worth trying out."""
    if not (issubclass(kind, tuple(_NORMS)) or "norm" in kind.__name__.lower()):
        return False
    if issubclass(kind, _NormBase) or any(is_fused(base) for base in kind.__mro__):
        return False  # batch and instance norms; what was patched and then given yet another class
    # Not torch's other norms, nor our own modules, which are fused.
    return not kind.forward.__module__.startswith(("torch.nn.", "fusedops."))


def _is_norm_by_name(kind: type[nn.Module]) -> bool:
    """Whether everybody would call it a layer or RMS norm, so that a report has to say why it is not replaced."""
    return issubclass(kind, tuple(_NORMS)) or re.search(r"(layer|rms|group)_?norm", kind.__name__, re.I) is not None


def norm_body(original: type[nn.Module]) -> Body | None:
    base = _norm_base(original)
    if base is not None:
        return _NORMS[base][0], {}
    if not may_be_norm(original) or argument_of(original) is None:
        return None
    return FusedNorm, {"fused_proofs": proofs_of(original)}


def find_norm(module: nn.Module) -> Iterator[Finding]:
    kind = original_class(type(module))
    base = _norm_base(kind)
    if base is not None:
        reasons = obstacles_of(module, base)
        yield Finding("", kind.__name__, _NORMS[base][1], ((module, "norm"),), tuple(reasons))
    elif may_be_norm(kind):
        yield from _find_by_experiment(kind, module)


def _find_by_experiment(kind: type[nn.Module], module: nn.Module) -> Iterator[Finding]:
    reasons = obstacles_of(module, kind)
    subject = subject_of(kind, module)
    if isinstance(subject, str):
        # A Linear with a norm's name, a block with a norm inside: not what this rule is about.
        if _is_norm_by_name(kind) and not module._modules.keys() - {"parametrizations"}:
            yield Finding("", kind.__name__, "", (), (*reasons, *([] if module._modules else [subject])))
        return
    found: Proof | str = "" if reasons else prove(kind, module)
    if isinstance(found, Proof):
        yield Finding("", kind.__name__, found.calls, ((module, "norm"),), ())
    else:
        yield Finding("", kind.__name__, "", (), (*reasons, *filter(None, [found])))
