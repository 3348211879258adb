"""The activations of the linear family: one table, read by the functions, the reference, the kernels and the docs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from fusedops.runtime.checks import wrong_type, wrong_value


@dataclass(frozen=True, slots=True)
class Activation:
    """An elementwise function of the pre-activation z and its derivative.

    Attributes:
        name: what ``linear(activation=...)`` takes; the device functions of the same name are in kernels_common.py.
        forward: a(z), torch's own operator.
        derivative: a′ as a function of the tensor that ``derivative_of`` names.
        derivative_of: what the backward reads: ``"preactivation"`` z, which the forward must then keep, or
            ``"output"`` a(z), which the caller holds anyway.
        cost: instructions an element that the derivative adds to the loop of a matrix product (counted in sm_90's
            machine code).
    """

    name: str
    forward: Callable[[torch.Tensor], torch.Tensor]
    derivative: Callable[[torch.Tensor], torch.Tensor]
    derivative_of: Literal["preactivation", "output"]
    cost: int


def _gelu_tanh(z: torch.Tensor) -> torch.Tensor:
    return F.gelu(z, approximate="tanh")


def _relu_derivative(y: torch.Tensor) -> torch.Tensor:
    return (y > 0).to(y.dtype)


def _gelu_derivative(z: torch.Tensor) -> torch.Tensor:
    """d/dz z Φ(z) = Φ(z) + z φ(z), with the normal distribution's Φ and density φ (Hendrycks, Gimpel 2016)."""
    return 0.5 * (1 + torch.erf(z * math.sqrt(0.5))) + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def _gelu_tanh_derivative(z: torch.Tensor) -> torch.Tensor:
    """d/dz z σ(2u) = σ(2u) + z σ(2u) (1 - σ(2u)) 2u′ with u = √(2/π) (z + 0.044715 z³); σ(2u) = (1 + tanh u) / 2."""
    c = math.sqrt(2 / math.pi)
    two_u = 2 * c * (z + 0.044715 * z * z * z)
    s = torch.sigmoid(two_u)
    return s + z * s * torch.sigmoid(-two_u) * (2 * c * (1 + 3 * 0.044715 * z * z))


def _silu_derivative(z: torch.Tensor) -> torch.Tensor:
    """d/dz z σ(z) = σ(z) (1 + z (1 - σ(z)))."""
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation("relu", F.relu, _relu_derivative, "output", 6),
        Activation("gelu", F.gelu, _gelu_derivative, "preactivation", 48),
        Activation("gelu_tanh", _gelu_tanh, _gelu_tanh_derivative, "preactivation", 32),
        Activation("silu", F.silu, _silu_derivative, "preactivation", 22),
    )
}


def keeps_preactivation(activation: str | None) -> bool:
    """Whether the backward needs the pre-activation, so that the forward must keep it."""
    return activation is not None and ACTIVATIONS[activation].derivative_of == "preactivation"


def check_activation(function: str, activation: str | None) -> None:
    """TypeError or ValueError unless it is None or a name in the table."""
    if activation is None or (isinstance(activation, str) and activation in ACTIVATIONS):
        return
    takes = f"None or one of {', '.join(map(repr, ACTIVATIONS))}"
    if not isinstance(activation, str):
        wrong_type(function, "activation", takes, activation)
    wrong_value(function, "activation", takes, activation)
