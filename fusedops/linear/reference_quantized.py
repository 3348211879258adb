"""The definition of the quantised products in torch: what the kernels are compared with, and the path without them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fusedops.linear.activations import ACTIVATIONS
from fusedops.linear.reference import no_autocast


def fp8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    scale_input: torch.Tensor,
    scale_weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``y = a((x Wᵀ) ∘ scale_input ∘ scale_weight + b)`` in float32, rounded once.

    Args:
        input: (..., in_features), a float8 dtype.
        weight: (out_features, in_features), a float8 dtype.
        scale_input: float32, one element or one for each row: (...) or (..., 1).
        scale_weight: float32, one element or one for each row: (out_features) or (out_features, 1).
        bias: (out_features) or None.
        activation: a key of :data:`fusedops.linear.activations.ACTIVATIONS`, or None.
        out_dtype: of the result.
    """
    with no_autocast(input):
        z = F.linear(input.float(), weight.float())
        rows = scale_input.reshape(() if scale_input.numel() == 1 else (*input.shape[:-1], 1))
        return _finished(z * rows * scale_weight.flatten(), bias, activation, out_dtype)


def quantized_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    group_size: int | None,
    out_dtype: torch.dtype,
    precision: str,
) -> torch.Tensor:
    """``y = a(x Wᵀ + b)`` with the W that :func:`dequantize_weight` gives, in float32, rounded once.

    Args:
        input: (..., in_features), any floating dtype. Computed in float32, or float64 for a float64 input.
        weight: (out_features, in_features) int8, or (out_features, in_features / 2) uint8.
        scales: (out_features), or (out_features, in_features / group_size) where ``group_size`` is not None.
        bias, activation, out_dtype: as for :func:`fp8_linear`.
        precision: of float32 products. Here torch's own setting decides.
    """
    compute = torch.float64 if input.dtype == torch.float64 else torch.float32
    with no_autocast(input):
        z = F.linear(input.to(compute), dequantize_weight(weight, scales, group_size, compute))
        return _finished(z, bias, activation, out_dtype)


def _finished(
    z: torch.Tensor, bias: torch.Tensor | None, activation: str | None, out_dtype: torch.dtype
) -> torch.Tensor:
    if bias is not None:
        z = z + bias.to(z.dtype)
    return (z if activation is None else ACTIVATIONS[activation].forward(z)).to(out_dtype)


def dequantize_weight(
    weight: torch.Tensor, scales: torch.Tensor, group_size: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """The values q · scale in ``dtype``; arguments as of :func:`quantized_linear`."""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    if weight.dtype == torch.uint8:
        nibbles = torch.stack((weight & 0xF, weight >> 4), dim=-1).flatten(-2)
        values = nibbles.to(compute) - 8
    else:
        values = weight.to(compute)
    scales = scales.to(compute)
    if group_size is None:
        return (values * scales.reshape(-1, 1)).to(dtype)
    return (values.unflatten(1, (*scales.shape[1:], group_size)) * scales[:, :, None]).flatten(1).to(dtype)


def quantize_weight(weight: torch.Tensor, bits: int, group_size: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric, rounded to nearest: ``scale = max|w| / (2^(bits-1) - 1)`` of a row or a group."""
    rows, size = weight.shape
    limit = 2 ** (bits - 1) - 1
    group = size if group_size is None else group_size
    values = weight.float().reshape(rows, size // group if group else 1, group)
    largest = values.abs().amax(-1) if group else values.new_zeros(values.shape[:-1])
    # Not below the smallest normal number: a subnormal quotient would lose its digits.
    scales = torch.where(largest == 0, 1.0, (largest / limit).clamp_min(torch.finfo(torch.float32).tiny))
    # What is not finite has no integer; its scale is not finite either, and makes all of the group NaN.
    quotients = (values / scales[..., None]).round().nan_to_num(0.0).clamp(-limit, limit)
    scales = torch.where(scales.isfinite(), scales, float("nan"))
    quantized = quotients.to(torch.int8).reshape(rows, size)
    if bits == 4:
        nibbles = (quantized + 8).view(torch.uint8)
        quantized = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    return quantized, scales[:, 0] if group_size is None else scales


def quantize_fp8(tensor: torch.Tensor, dtype: torch.dtype, per_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``scale = max|t| / (largest number of dtype)`` over the finite elements, and t / scale, saturated."""
    limit = torch.finfo(dtype).max
    values = tensor.float()
    sizes = values.abs().masked_fill(~values.isfinite(), 0.0)
    if sizes.numel() == 0:
        largest = sizes.new_zeros((*sizes.shape[:-1], 1) if per_row else ())
    else:
        largest = sizes.amax(-1, keepdim=True) if per_row else sizes.amax()
    scale = torch.where(largest == 0, 1.0, (largest / limit).clamp_min(torch.finfo(torch.float32).tiny))
    return (values / scale).clamp(-limit, limit).to(dtype), scale
