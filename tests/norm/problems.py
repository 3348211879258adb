"""What the norm tests share: the public functions, and the plain compositions they are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

import fusedops
from fusedops.norm import reference


@dataclass(frozen=True)
class Norm:
    """One of the two norms, called alike."""

    center: bool

    @property
    def name(self) -> str:
        return "layer_norm" if self.center else "rms_norm"

    def __str__(self) -> str:
        return self.name

    def fused(self, x, shape, weight, bias, eps=1e-5, offset=0.0):
        if self.center:
            return fusedops.layer_norm(x, shape, weight, bias, eps)
        return fusedops.rms_norm(x, shape, weight, eps, weight_offset=offset)

    def plain(self, x, shape, weight, bias, eps=1e-5, offset=0.0):
        """torch's own operators in the dtype of x: what rounding alone costs."""
        weight, bias = (p if p is None else p.to(x.dtype) for p in (weight, bias))
        if self.center:
            return F.layer_norm(x, shape, weight, bias, eps)
        y = F.rms_norm(x, shape, None, eps)
        return y if weight is None else y * (weight + offset)

    def exact(self, x, shape, weight, bias, eps=1e-5, offset=0.0):
        """The definition in float64."""
        x, weight, bias = (t if t is None else t.double() for t in (x, weight, bias))
        kind = "layer" if self.center else "rms"
        return reference.norm(x, None, weight, bias, None, len(shape), eps, offset, kind, 0.0, torch.float64)[0]


NORMS = [Norm(True), Norm(False)]


def gradients(function, tensors, grad):
    """Output and gradients of ``function(*leaves)``, None where a tensor is None or asks for no gradient."""
    leaves = [t if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors]
    output = function(*leaves)
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    grads = iter(torch.autograd.grad(output, wanted, grad.to(output.dtype)))
    return output, [next(grads) if t is not None and t.requires_grad else None for t in leaves]
