"""The activations of the linear family: one table, read by the functions, the reference, the kernels and the docs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from fusedops.runtime.checks import wrong_type, wrong_value

Elementwise = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Activation:
    """An elementwise function of the pre-activation z and its derivative.

    Attributes:
        name: what ``linear(activation=...)`` takes.
        forward: a(z) in torch, torch's own operator where there is one.
        derivative: a′ in torch, as a function of the tensor that ``derivative_of`` names.
        derivative_of: what the backward reads: ``"preactivation"`` z, which the forward must then keep, or
            ``"output"`` a(z), which the caller holds anyway.
        cost: instructions an element that the derivative adds to a product's loop: those of ``device_backward`` in
            sm_90's machine code, and about 6 for reading and converting ``s``.
        device_forward, device_backward: Triton functions ``(z) -> a(z)`` and ``(dy, s) -> dy · a′``; None: those of the
            activation's name in kernels_activations.py.
    """

    name: str
    forward: Elementwise
    derivative: Elementwise
    derivative_of: Literal["preactivation", "output"]
    cost: int
    device_forward: Any = None
    device_backward: Any = None


def _relu_derivative(y: torch.Tensor) -> torch.Tensor:
    return (y > 0).to(y.dtype)


def _gelu_derivative(z: torch.Tensor) -> torch.Tensor:
    """d/dz z Φ(z) = Φ(z) + z φ(z), with the normal distribution's Φ and density φ (Hendrycks, Gimpel 2016)."""
    return 0.5 * (1 + torch.erf(z * math.sqrt(0.5))) + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def _gelu_tanh(z: torch.Tensor) -> torch.Tensor:
    return F.gelu(z, approximate="tanh")


def _gelu_tanh_derivative(z: torch.Tensor) -> torch.Tensor:
    """d/dz z σ(2u) = σ(2u) + z σ(2u) (1 - σ(2u)) 2u′ with u = √(2/π) (z + 0.044715 z³); σ(2u) = (1 + tanh u) / 2."""
    c = math.sqrt(2 / math.pi)
    two_u = 2 * c * (z + 0.044715 * z * z * z)
    s = torch.sigmoid(two_u)
    return s + z * s * torch.sigmoid(-two_u) * (2 * c * (1 + 3 * 0.044715 * z * z))


def _quick_gelu(z: torch.Tensor) -> torch.Tensor:
    """z σ(1.702 z): the sigmoid approximation of Hendrycks, Gimpel 2016, section 2."""
    return z * torch.sigmoid(1.702 * z)


def _quick_gelu_derivative(z: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(1.702 * z)
    return s + 1.702 * z * s * torch.sigmoid(-1.702 * z)


def _silu_derivative(z: torch.Tensor) -> torch.Tensor:
    """d/dz z σ(z) = σ(z) + z σ(z) (1 - σ(z))."""
    s = torch.sigmoid(z)
    return s + z * s * torch.sigmoid(-z)


def _relu_squared(z: torch.Tensor) -> torch.Tensor:
    """max(z, 0)² (So et al. 2021, "Primer", section 4.1)."""
    return F.relu(z).square()


def _relu_squared_derivative(z: torch.Tensor) -> torch.Tensor:
    return 2 * F.relu(z)


def _sigmoid_derivative(y: torch.Tensor) -> torch.Tensor:
    return y * (1 - y)


def _tanh_derivative(y: torch.Tensor) -> torch.Tensor:
    return (1 - y) * (1 + y)


def _leaky_relu_derivative(y: torch.Tensor) -> torch.Tensor:
    return torch.full_like(y, 0.01).masked_fill(y > 0, 1.0)


def _elu_derivative(z: torch.Tensor) -> torch.Tensor:
    return torch.where(z > 0, 1.0, torch.exp(z.clamp_max(0)))


def _hardswish_derivative(z: torch.Tensor) -> torch.Tensor:
    return torch.where(z <= -3, 0.0, torch.where(z < 3, z / 3 + 0.5, 1.0))


def _hardsigmoid_derivative(z: torch.Tensor) -> torch.Tensor:
    return ((z > -3) & (z < 3)).to(z.dtype) / 6


def _mish_derivative(z: torch.Tensor) -> torch.Tensor:
    """d/dz z t = t + z (1 - t²) σ(z) with t = tanh(softplus(z)) (Misra 2019, equation 3)."""
    t = torch.tanh(F.softplus(z))
    return t + z * (1 - t) * (1 + t) * torch.sigmoid(z)


ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation("relu", F.relu, _relu_derivative, "output", 6),
        Activation("gelu", F.gelu, _gelu_derivative, "preactivation", 48),
        Activation("gelu_tanh", _gelu_tanh, _gelu_tanh_derivative, "preactivation", 31),
        Activation("quick_gelu", _quick_gelu, _quick_gelu_derivative, "preactivation", 23),
        Activation("silu", F.silu, _silu_derivative, "preactivation", 22),
        Activation("relu_squared", _relu_squared, _relu_squared_derivative, "preactivation", 9),
        Activation("sigmoid", torch.sigmoid, _sigmoid_derivative, "output", 9),
        Activation("tanh", torch.tanh, _tanh_derivative, "output", 10),
        Activation("leaky_relu", F.leaky_relu, _leaky_relu_derivative, "output", 10),
        Activation("elu", F.elu, _elu_derivative, "preactivation", 14),
        Activation("hardswish", F.hardswish, _hardswish_derivative, "preactivation", 11),
        Activation("hardsigmoid", F.hardsigmoid, _hardsigmoid_derivative, "preactivation", 12),
        Activation("mish", F.mish, _mish_derivative, "preactivation", 59),
        Activation("softplus", F.softplus, torch.sigmoid, "preactivation", 19),
    )
}
_OWN = frozenset(ACTIVATIONS)


# What torch.nn's modules compute with their default arguments.
_MODULES: dict[type, str] = {
    torch.nn.ELU: "elu",
    torch.nn.Hardsigmoid: "hardsigmoid",
    torch.nn.Hardswish: "hardswish",
    torch.nn.LeakyReLU: "leaky_relu",
    torch.nn.Mish: "mish",
    torch.nn.ReLU: "relu",
    torch.nn.SiLU: "silu",
    torch.nn.Sigmoid: "sigmoid",
    torch.nn.Softplus: "softplus",
    torch.nn.Tanh: "tanh",
}
_GELU = {"none": "gelu", "tanh": "gelu_tanh"}
# Arguments that our activations have fixed.
_DEFAULTS = {"alpha": 1.0, "negative_slope": 0.01, "beta": 1.0, "threshold": 20.0}
_FUNCTIONS: dict[Any, str] = {
    **{own.forward: name for name, own in ACTIVATIONS.items()},
    torch.relu: "relu",
    torch.relu_: "relu",
    F.relu_: "relu",
    F.elu_: "elu",
    F.leaky_relu_: "leaky_relu",
    F.sigmoid: "sigmoid",
    F.tanh: "tanh",
}


def name_of(activation: Any) -> str | None:
    """The name by which :func:`fusedops.linear` takes what a function or module of torch's computes; None: it does not.

    Only torch's own modules themselves: a subclass may compute anything.

    Examples:
        >>> name_of(torch.nn.GELU("tanh")), name_of(F.silu), name_of(torch.nn.LeakyReLU(0.2))
        ('gelu_tanh', 'silu', None)
    """
    if isinstance(activation, torch.nn.Module):
        kind = type(activation)
        if kind is torch.nn.GELU:
            return _GELU.get(str(activation.approximate))
        name = _MODULES.get(kind)
        if name is not None:
            values = activation.__dict__
            for argument, usual in _DEFAULTS.items():
                if values.get(argument, usual) != usual:
                    return None
        return name
    try:
        return _FUNCTIONS.get(activation)
    except TypeError:  # not hashable
        return None


def register_activation(
    name: str,
    forward: Elementwise,
    derivative: Elementwise,
    device_forward: Any,
    device_backward: Any,
    *,
    derivative_of: Literal["preactivation", "output"] = "preactivation",
    cost: int = 32,
) -> None:
    """Let :func:`fusedops.linear` take an activation of your own, in this process.

    It is computed where fusedops' own are: in the kernel of the product and in that of its gradient. Registering a
    name again replaces it, also for a backward whose forward ran before: do that between steps. fusedops' own names are
    taken.

    Args:
        name: what ``activation=`` will take.
        forward: a(z) in torch, elementwise, on any floating dtype: the torch backend, and what tests compare with.
        derivative: a′ in torch, elementwise, as a function of the tensor that ``derivative_of`` names: for graphs made
            for the kernels that run where there are none. (The torch backend differentiates ``forward``.)
        device_forward: a ``@triton.jit`` function of a float32 block z that returns a(z).
        device_backward: a ``@triton.jit`` function of float32 blocks ``(dy, s)`` that returns dy · a′, where ``s`` is
            the tensor that ``derivative_of`` names.
        derivative_of: ``"preactivation"``: z, kept for the backward; ``"output"``: a(z), which is kept anyway.
        cost: about how many instructions an element ``device_backward`` takes; decides whether it is computed inside
            the gradient's products or once before them.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value; the message names it.

    Examples:
        In a module (Triton reads the source of its functions)::

            import triton
            import triton.language as tl

            @triton.jit
            def softsign(z):
                return z / (1.0 + tl.abs(z))

            @triton.jit
            def softsign_backward(dy, z):
                n = 1.0 + tl.abs(z)
                return dy / (n * n)

            register_activation(
                "softsign", torch.nn.functional.softsign, lambda z: (1 + z.abs()) ** -2, softsign, softsign_backward
            )
            y = fusedops.linear(x, weight, bias, "softsign")
    """
    function = "register_activation"
    if not isinstance(name, str):
        wrong_type(function, "name", "a str", name)
    if not name.isidentifier() or name in _OWN:
        wrong_value(function, "name", f"an identifier other than {', '.join(map(repr, sorted(_OWN)))}", name)
    for argument, value in (("forward", forward), ("derivative", derivative)):
        if not callable(value):
            wrong_type(function, argument, "a function of a tensor", value)
    for argument, value in (("device_forward", device_forward), ("device_backward", device_backward)):
        # A compiled or an interpreted Triton function; both keep the Python function as .fn.
        if not callable(getattr(value, "fn", None)):
            wrong_type(function, argument, "a function decorated with triton.jit", value)
        parameters = ("z",) if argument == "device_forward" else ("dy", "s")
        if len(inspect.signature(value.fn).parameters) != len(parameters):
            takes = f"a function of {len(parameters)} argument{'s'[: len(parameters) - 1]}, ({', '.join(parameters)})"
            wrong_value(function, argument, takes, value.fn)
    if derivative_of not in ("preactivation", "output"):
        wrong_value(function, "derivative_of", "'preactivation' or 'output'", derivative_of)
    if not isinstance(cost, int) or isinstance(cost, bool):
        wrong_type(function, "cost", "an int", cost)
    if cost < 0:
        wrong_value(function, "cost", "0 or more", cost)
    ACTIVATIONS[name] = Activation(name, forward, derivative, derivative_of, cost, device_forward, device_backward)


def check_activation(function: str, activation: str | None) -> None:
    """TypeError or ValueError unless it is None or a name in the table."""
    if activation is None or (isinstance(activation, str) and activation in ACTIVATIONS):
        return
    takes = f"None or one of {', '.join(map(repr, ACTIVATIONS))}"
    if not isinstance(activation, str):
        wrong_type(function, "activation", takes, activation)
    wrong_value(function, "activation", takes, activation)
