"""Activations as device functions: ``<name>(z)`` is a(z), ``<name>_backward(dy, s)`` is dy · a′.

All in float32; ``s`` is the tensor that ``derivative_of`` names in activations.py, where the formulas have their
sources. Differences that would cancel are written as products or as series.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from fusedops.linear.activations import ACTIVATIONS


@triton.jit
def logistic(x):
    """σ(x) = 1 / (1 + e^(-x)), and 1 - σ(x) as a product: near one the difference would cancel."""
    e = tl.exp(-x)
    g = 1.0 / (1.0 + e)
    return g, tl.where(x < -80.0, 1.0, g * e)  # where e is infinite, g is 0


@triton.jit
def relu(z):
    return tl.where(z <= 0, 0.0, z)  # NaN passes, as torch's


@triton.jit
def relu_backward(dy, y):
    return tl.where(y <= 0, 0.0, dy)


@triton.jit
def gelu(z):
    return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))


@triton.jit
def gelu_backward(dy, z):
    # Φ(z) + z φ(z)
    return dy * (0.5 + 0.5 * tl.erf(z * 0.7071067811865476) + z * 0.3989422804014327 * tl.exp(-0.5 * z * z))


@triton.jit
def gelu_tanh(z):
    # (1 + tanh u) / 2 = σ(2u), u = √(2/π) (z + 0.044715 z³)
    return z / (1.0 + tl.exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)))


@triton.jit
def gelu_tanh_backward(dy, z):
    # σ + z σ (1 - σ) 2u′
    g, rest = logistic(1.5957691216057308 * (z + 0.044715 * z * z * z))
    return dy * (g + z * (g * rest) * (1.5957691216057308 * (1.0 + 0.134145 * z * z)))


@triton.jit
def quick_gelu(z):
    return z / (1.0 + tl.exp(-1.702 * z))


@triton.jit
def quick_gelu_backward(dy, z):
    g, rest = logistic(1.702 * z)
    return dy * (g + 1.702 * (z * (g * rest)))


@triton.jit
def silu(z):
    return z / (1.0 + tl.exp(-z))


@triton.jit
def silu_backward(dy, z):
    g, rest = logistic(z)
    return dy * (g + z * (g * rest))


@triton.jit
def relu_squared(z):
    r = relu(z)
    return r * r


@triton.jit
def relu_squared_backward(dy, z):
    return dy * (2.0 * relu(z))


@triton.jit
def sigmoid(z):
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def sigmoid_backward(dy, y):
    return dy * (y * (1.0 - y))


@triton.jit
def tanh(z):
    # 1 - 2e / (1 + e) with e = e^(-2|z|) cancels near zero, where five terms of the series are exact
    e = tl.exp(-2.0 * tl.abs(z))
    far = 1.0 - 2.0 * e / (1.0 + e)
    z2 = z * z
    near = z * (1.0 + z2 * (-0.3333333333 + z2 * (0.1333333333 + z2 * (-0.0539682540 + z2 * 0.0218694885))))
    return tl.where(tl.abs(z) < 0.25, near, tl.where(z < 0, -far, far))


@triton.jit
def tanh_backward(dy, y):
    return dy * ((1.0 - y) * (1.0 + y))


@triton.jit
def leaky_relu(z):
    return tl.where(z > 0, z, 0.01 * z)


@triton.jit
def leaky_relu_backward(dy, y):
    return tl.where(y > 0, dy, 0.01 * dy)


@triton.jit
def elu(z):
    # e^z - 1 cancels near zero, where seven terms of the series are exact
    near = z * (1.0 + z * (0.5 + z * (0.1666666667 + z * (0.0416666667 + z * (0.0083333333 + z * 0.0013888889)))))
    below = tl.where(z > -0.25, near, tl.exp(tl.where(z > 0, 0.0, z)) - 1.0)
    return tl.where(z > 0, z, below)


@triton.jit
def elu_backward(dy, z):
    return tl.where(z <= 0, dy * tl.exp(tl.where(z <= 0, z, 0.0)), dy)


@triton.jit
def hardsigmoid(z):
    return tl.where(z <= -3, 0.0, tl.where(z >= 3, 1.0, z * 0.16666666666666666 + 0.5))


@triton.jit
def hardsigmoid_backward(dy, z):
    return tl.where((z > -3) & (z < 3), dy * 0.16666666666666666, 0.0)


@triton.jit
def hardswish(z):
    return z * hardsigmoid(z)


@triton.jit
def hardswish_backward(dy, z):
    return tl.where(z <= -3, 0.0, tl.where(z < 3, dy * (z * 0.3333333333333333 + 0.5), dy))


@triton.jit
def _tanh_of_softplus(z):
    """t = tanh(log(1 + e^z)) and 1 - t: rational in n = e^z, written in m = e^(-|z|) so that nothing overflows."""
    m = tl.exp(-tl.abs(z))
    above = 1.0 / (1.0 + 2.0 * m + 2.0 * m * m)
    below = 1.0 / (2.0 + 2.0 * m + m * m)
    t = tl.where(z > 0, (1.0 + 2.0 * m) * above, (2.0 + m) * m * below)
    return t, tl.where(z > 0, 2.0 * m * m * above, 2.0 * below)


@triton.jit
def mish(z):
    t, _ = _tanh_of_softplus(z)
    return z * t


@triton.jit
def mish_backward(dy, z):
    # t + z (1 - t²) σ(z)
    t, rest = _tanh_of_softplus(z)
    g, _ = logistic(z)
    return dy * (t + z * rest * (1.0 + t) * g)


@triton.jit
def softplus(z):
    # max(z, 0) + log(1 + m), m = e^(-|z|); for a small m the series
    m = tl.exp(-tl.abs(z))
    log1p = tl.where(m < 0.01, m * (1.0 + m * (-0.5 + m * (0.3333333333 - 0.25 * m))), tl.log(1.0 + m))
    return tl.where(z > 0, z, 0.0) + log1p


@triton.jit
def softplus_backward(dy, z):
    g, _ = logistic(z)
    return dy * g


def device_functions(name: str | None) -> tuple[Any, Any]:
    """The forward and the backward device function of an activation in the table; None for none."""
    if name is None:
        return None, None
    activation = ACTIVATIONS[name]
    if activation.device_forward is not None:
        return activation.device_forward, activation.device_backward
    return globals()[name], globals()[f"{name}_backward"]
