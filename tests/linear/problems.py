"""What the linear tests share: the plain composition, the exact result, and the comparison of everything."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

import fusedops
from fusedops.linear.activations import ACTIVATIONS
from fusedops.runtime.backend import HAS_TRITON
from tests.harness.errors import check_error
from tests.harness.tensors import randn

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EVERY_ACTIVATION = [None, *ACTIVATIONS]

TORCHS = {
    None: lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
    "silu": F.silu,
    "relu_squared": lambda z: F.relu(z).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "mish": F.mish,
    "softplus": F.softplus,
}


def plain(x, weight, bias, activation):
    """torch's own operators in the dtype of x: what rounding alone costs."""
    weight, bias = (p if p is None else p.to(x.dtype) for p in (weight, bias))
    return TORCHS[activation](F.linear(x, weight, bias))


def exact(x, weight, bias, activation):
    """The formula in float64, of the operands that are multiplied: those of the input's dtype."""
    return plain(x.double(), weight.to(x.dtype).double(), None if bias is None else bias.double(), activation)


def tensors(runner, shape, out_features, dtype=torch.float32, *, bias=True, parameter_dtype=None, layouts=None):
    """(x, weight, bias), each requiring a gradient; ``layouts`` holds memory layouts by those names."""
    parameter_dtype = parameter_dtype or dtype
    layouts = layouts or {}
    sizes = {"x": shape, "weight": (out_features, shape[-1]), "bias": (out_features,)}
    made = {
        name: randn(
            *size,
            dtype=dtype if name == "x" else parameter_dtype,
            device=runner.device,
            layout=layouts.get(name, "contiguous"),
        )
        for name, size in sizes.items()
    }
    # Pre-activations of about unit variance. An expanded weight has one row in memory.
    made["weight"][: 1 if layouts.get("weight") == "expanded" else None].mul_(max(shape[-1], 1) ** -0.5)
    x, weight, b = (t.requires_grad_() for t in made.values())
    return x, weight, b if bias else None


def gradients(function, leaves, grad):
    """Output and gradients of ``function(*leaves)``, None where a leaf is None or asks for no gradient."""
    leaves = [t if t is None else t.detach().requires_grad_(t.requires_grad) for t in leaves]
    output = function(*leaves)
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    grads = iter(torch.autograd.grad(output, wanted, grad.to(output.dtype)))
    return output, [next(grads) if t is not None and t.requires_grad else None for t in leaves]


def check(x, weight, bias, activation, grad=None):
    """Output and gradients of ``fusedops.linear`` by the error rule; returns the output."""
    leaves = (x, weight, bias)
    shape = (*x.shape[:-1], weight.shape[0])
    if grad is None:
        grad = torch.randn(shape, device=x.device).to(x.dtype)
    output, grads = gradients(lambda *t: fusedops.linear(*t, activation), leaves, grad)
    baseline, plain_grads = gradients(lambda *t: plain(*t, activation), leaves, grad)
    wide = [t if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in leaves]
    rounded = [wide[0], weight.detach().to(x.dtype).double().requires_grad_(weight.requires_grad), wide[2]]
    truth, exact_grads = gradients(lambda *t: plain(*t, activation), rounded, grad.double())
    assert output.dtype == x.dtype
    assert output.shape == shape
    check_error(output, truth, baseline, what="output")
    for name, leaf, ours, theirs, right in zip(
        ("input", "weight", "bias"), leaves, grads, plain_grads, exact_grads, strict=True
    ):
        if leaf is not None and leaf.requires_grad:
            assert ours.dtype == leaf.dtype
            assert ours.shape == leaf.shape
            check_error(ours, right, theirs, gradient=True, what=f"gradient of {name}")
    return output


def use_config(monkeypatch, kernel="tiled", **fields):
    """Let every product run on a kernel with its default tile, these fields replaced, or on torch's own product.

    ``kernel``: that of the forward; the gradients' products are tiled, or torch's.
    """
    if not HAS_TRITON:  # torch's operators run, whatever the configuration
        return []
    from fusedops.linear import kernels_common
    from fusedops.linear.tuning import TORCH, prune, tiled_config
    from fusedops.linear.tuning_skinny import skinny_config

    def chosen(operator, problem, device):
        facts = fusedops.runtime.device.device_facts(device)
        config = tiled_config(problem, facts)
        wanted = {"torch": TORCH, "skinny": skinny_config(problem, facts)}.get(kernel, replace(config, kernel=kernel))
        if kernel != "tiled" and prune(wanted, problem, facts) is None:
            chosen.kernels.append(kernel)
            config = wanted
        if config is TORCH:
            return config
        return replace(config, **{k: v for k, v in fields.items() if k != "prologue" or problem.derives})

    chosen.kernels = []
    monkeypatch.setattr(kernels_common, "resolve", chosen)
    return chosen.kernels
