"""What these tests share: the two functions called alike, the plain compositions, and the comparison of everything."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

import fusedops
from tests.harness.errors import check_error
from tests.harness.tensors import randn
from tests.linear.problems import TORCHS
from tests.norm.problems import gradients

NAMES = ("input", "norm_weight", "norm_bias", "weight", "bias")


@dataclass(frozen=True)
class NormLinear:
    """One of the two functions; leaves are (input, norm_weight, norm_bias, weight, bias)."""

    center: bool

    def __str__(self) -> str:
        return "layer_norm_linear" if self.center else "rms_norm_linear"

    @property
    def kind(self) -> str:
        return "layer" if self.center else "rms"

    def fused(self, x, norm_weight, norm_bias, weight, bias, activation=None, eps=1e-5, offset=0.0):
        if self.center:
            return fusedops.layer_norm_linear(x, norm_weight, norm_bias, weight, bias, activation, eps)
        return fusedops.rms_norm_linear(x, norm_weight, weight, bias, activation, eps, weight_offset=offset)

    def composed(self, x, norm_weight, norm_bias, weight, bias, activation=None, eps=1e-5, offset=0.0):
        """fusedops' own two functions, which keep the normalised tensor."""
        if self.center:
            normalised = fusedops.layer_norm(x, x.shape[-1], norm_weight, norm_bias, eps)
        else:
            normalised = fusedops.rms_norm(x, x.shape[-1], norm_weight, eps, weight_offset=offset)
        return fusedops.linear(normalised, weight, bias, activation)

    def plain(self, x, norm_weight, norm_bias, weight, bias, activation=None, eps=1e-5, offset=0.0):
        """torch's own operators in the dtype of x: what rounding alone costs."""
        norm_weight, norm_bias, weight, bias = (
            p if p is None else p.to(x.dtype) for p in (norm_weight, norm_bias, weight, bias)
        )
        if self.center:
            normalised = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps)
        else:
            normalised = F.rms_norm(x, x.shape[-1:], None, eps)
            if norm_weight is not None:
                normalised = normalised * (norm_weight + offset)
        return TORCHS[activation](F.linear(normalised, weight, bias))


BOTH = [NormLinear(True), NormLinear(False)]


def tensors(
    runner, function, shape, out_features, dtype=torch.float32, *, parameter_dtype=None, missing=(), layouts=None
):
    """(input, norm_weight, norm_bias, weight, bias), each requiring a gradient; None for those ``missing``."""
    layouts = layouts or {}
    width = shape[-1]
    sizes = dict(zip(NAMES, (shape, (width,), (width,), (out_features, width), (out_features,)), strict=True))
    missing = {*missing, *(() if function.center else ("norm_bias",))}
    made = {
        name: randn(
            *size,
            dtype=dtype if name == "input" else parameter_dtype or dtype,
            device=runner.device,
            layout=layouts.get(name, "contiguous"),
        )
        for name, size in sizes.items()
    }
    # Pre-activations of about unit variance. An expanded weight has one row in memory.
    made["weight"][: 1 if layouts.get("weight") == "expanded" else None].mul_(max(width, 1) ** -0.5)
    return tuple(None if name in missing else t.requires_grad_() for name, t in made.items())


def check(function, leaves, activation=None, grad=None, **options):
    """Output and gradients of the fused function by the error rule; returns the output."""
    x, weight = leaves[0], leaves[3]
    shape = (*x.shape[:-1], weight.shape[0])
    if grad is None:
        grad = torch.randn(shape, device=x.device).to(x.dtype)
    output, grads = gradients(lambda *t: function.fused(*t, activation, **options), leaves, grad)
    baseline, plain_grads = gradients(lambda *t: function.plain(*t, activation, **options), leaves, grad)
    wide = [t if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in leaves]
    # The product is of operands of the input's dtype.
    wide[3] = weight.detach().to(x.dtype).double().requires_grad_(weight.requires_grad)
    truth, exact_grads = gradients(lambda *t: function.plain(*t, activation, **options), wide, grad.double())
    assert output.dtype == x.dtype
    assert output.shape == shape
    check_error(output, truth, baseline, what="output")
    for name, leaf, ours, theirs, right in zip(NAMES, leaves, grads, plain_grads, exact_grads, strict=True):
        if leaf is not None and leaf.requires_grad:
            assert ours.dtype == leaf.dtype
            assert ours.shape == leaf.shape
            check_error(ours, right, theirs, gradient=True, what=f"gradient of {name}")
    return output
