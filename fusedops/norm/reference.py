"""The definition of the norm family in plain torch: what the kernels are compared with, and the path without them."""

from __future__ import annotations

import torch


def norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dims: int,
    eps: float,
    weight_offset: float,
    center: bool,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Layer norm (``center``) or RMS norm over the last ``dims`` dimensions, with its statistics.

    ``y = (x - mean) * rstd * (weight + weight_offset) + bias`` with ``rstd = 1 / sqrt(mean((x - mean)**2) + eps)``;
    RMS norm leaves the mean out. Layer norm: Ba, Kiros, Hinton 2016, equations 3 and 4. RMS norm: Zhang, Sennrich
    2019, equation 4.

    Args:
        input: (..., normalized shape), any floating dtype. Computed in float32, or float64 for a float64 input.
        weight, bias: (normalized shape), any floating dtype, or None.
        dims: how many trailing dimensions are normalized, ≥ 1.

    Returns:
        output: shape of ``input``, ``out_dtype``.
        mean, rstd: the leading shape of ``input``; ``mean`` is empty, shape (0,), for RMS norm.
    """
    compute = torch.float64 if input.dtype == torch.float64 else torch.float32
    over = tuple(range(-dims, 0))
    x = input.to(compute)
    mean = x.new_empty(0)
    if center:
        mean = x.mean(over, keepdim=True)
        x = x - mean
        mean = mean.flatten(-dims).squeeze(-1)
    rstd = torch.rsqrt(x.square().mean(over, keepdim=True) + eps)
    y = x * rstd
    if weight is not None:
        y = y * (weight.to(compute) + weight_offset)
    if bias is not None:
        y = y + bias.to(compute)
    return y.to(out_dtype), mean, rstd.flatten(-dims).squeeze(-1)


def norm_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    dims: int,
    weight_offset: float,
    center: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of :func:`norm` with respect to input, weight and bias, in the compute dtype.

    With ``x̂ = (x - mean) * rstd`` and ``g = dy * (weight + weight_offset)``:
    ``dx = rstd * (g - x̂ * mean(g * x̂) - mean(g))`` (RMS norm: without the last term),
    ``dweight = Σ_rows dy * x̂``, ``dbias = Σ_rows dy``.
    """
    compute = rstd.dtype
    over = tuple(range(-dims, 0))
    lead = tuple(range(input.dim() - dims))
    shape = (*rstd.shape, *(1,) * dims)
    dy, x = grad_output.to(compute), input.to(compute)
    xhat = (x - mean.view(shape) if center else x) * rstd.view(shape)
    g = dy if weight is None else dy * (weight.to(compute) + weight_offset)
    dx = g - xhat * (g * xhat).mean(over, keepdim=True)
    if center:
        dx = dx - g.mean(over, keepdim=True)
    product = dy * xhat
    return dx * rstd.view(shape), product.sum(lead) if lead else product, dy.sum(lead) if lead else dy


def torch_norm(
    input: torch.Tensor,
    normalized_shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    center: bool,
) -> torch.Tensor:
    """The torch backend: torch's own fused operator wherever it means the same, else :func:`norm`."""
    if center:
        # torch.layer_norm is what F.layer_norm calls, without the cost of its wrapper.
        # torch takes parameters of the input's dtype; on the CPU float32 ones beside a 16-bit input too.
        dtype = input.dtype
        if (weight is None or weight.dtype == dtype) and (bias is None or bias.dtype == dtype):
            return torch.layer_norm(input, normalized_shape, weight, bias, eps)
        mixed = input.device.type == "cpu" and dtype in (torch.float16, torch.bfloat16)
        if mixed and all(p is None or p.dtype == torch.float32 for p in (weight, bias)):
            return torch.layer_norm(input, normalized_shape, weight, bias, eps)
    elif weight_offset == 0.0 and (weight is None or weight.dtype == input.dtype):
        return torch.rms_norm(input, normalized_shape, weight, eps)
    return norm(input, weight, bias, len(normalized_shape), eps, weight_offset, center, output_dtype(input))[0]


def output_dtype(input: torch.Tensor) -> torch.dtype:
    """The dtype torch's norms return: the input's; float32 under autocast on a GPU (not on the CPU)."""
    if input.is_cuda and torch.is_autocast_enabled("cuda") and input.dtype != torch.float64:
        return torch.float32
    return input.dtype
