"""The definition of the family in plain torch: a norm, then a linear layer."""

from __future__ import annotations

import torch

from fusedops.linear.reference import torch_linear
from fusedops.norm.reference import Kind, torch_norm


def torch_norm_linear(
    input: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    eps: float,
    weight_offset: float,
    kind: Kind,
    mixed: bool,
) -> torch.Tensor:
    """The torch backend: torch's own norm, product and activation. ``mixed``: as :func:`torch_linear` takes it."""
    normalised = torch_norm(input, (input.shape[-1],), norm_weight, norm_bias, eps, weight_offset, kind)
    return torch_linear(normalised, weight, bias, activation, mixed)
