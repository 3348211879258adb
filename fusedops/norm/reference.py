"""The definition of the norm family in plain torch: what the kernels are compared with, and the path without them."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F

from fusedops.runtime.dropout import keep_scale

Kind = Literal["layer", "rms", "l2"]


def norm(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    dims: int,
    eps: float,
    weight_offset: float,
    kind: str,
    dropout_p: float,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Layer, RMS or L2 norm of ``x = dropout(input) + residual`` over the last ``dims`` dimensions.

    ``y = (x - mean) * rstd * (weight + weight_offset) + bias``. Layer norm: ``rstd = 1 / sqrt(mean((x - mean)²) +
    eps)`` (Ba, Kiros, Hinton 2016, equations 3 and 4). RMS norm: the mean left out (Zhang, Sennrich 2019, equation 4).
    L2 norm: ``rstd = 1 / max(‖x‖, eps)`` and no mean. With a residual, x is rounded to the dtype that it is returned in
    before it is normalised.

    Args:
        input: (..., normalized shape), any floating dtype. Computed in float32, or float64 for a float64 input.
        residual: shape of ``input``, any floating dtype, or None.
        weight, bias: (normalized shape), any floating dtype, or None.
        seed: (1,) int64 that the dropout mask is drawn from; None: no dropout.
        dims: how many trailing dimensions are normalized, ≥ 1.
        kind: ``"layer"``, ``"rms"`` or ``"l2"``.

    Returns:
        output: shape of ``input``, ``out_dtype``.
        residual_out: x where there is a residual (:func:`residual_dtype`); else empty, shape (0,).
        mean, rstd: the leading shape of ``input``; ``mean`` is empty, shape (0,), for other than layer norm.
    """
    compute = compute_dtype(input, residual)
    over = tuple(range(-dims, 0))
    x = input.to(compute)
    if seed is not None:
        x = x * keep_scale(seed, *_matrix_shape(input, dims), dropout_p).view(x.shape)
    residual_out = input.new_empty(0, dtype=residual_dtype(input, residual))
    if residual is not None:
        residual_out = (x + residual.to(compute)).to(residual_out.dtype)
        x = residual_out.to(compute)
    mean = x.new_empty(0)
    if kind == "layer":
        mean = x.mean(over, keepdim=True)
        x = x - mean
        mean = mean.flatten(-dims).squeeze(-1)
    if kind == "l2":
        rstd = x.square().sum(over, keepdim=True).sqrt().clamp_min(eps).reciprocal()
    else:
        rstd = torch.rsqrt(x.square().mean(over, keepdim=True) + eps)
    y = x * rstd
    if weight is not None:
        y = y * (weight.to(compute) + weight_offset)
    if bias is not None:
        y = y + bias.to(compute)
    return y.to(out_dtype), residual_out, mean, rstd.flatten(-dims).squeeze(-1)


def norm_backward(
    grad_output: torch.Tensor,
    grad_residual: torch.Tensor | None,
    saved: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    seed: torch.Tensor | None,
    dims: int,
    eps: float,
    weight_offset: float,
    kind: str,
    dropout_p: float,
    from_output: bool,
    needs: tuple[bool, ...],
    dtypes: tuple[torch.dtype, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of :func:`norm` with respect to input, residual, weight and bias.

    With ``x̂ = (x - mean) * rstd`` and ``g = dy * (weight + weight_offset)``:
    ``dx = rstd * (g - x̂ * mean(g * x̂) - mean(g))`` (RMS norm: without the last term; L2 norm: sums instead of means,
    and no sum where the norm is below eps), plus the gradient of residual_out; ``dweight = Σ_rows dy * x̂``,
    ``dbias = Σ_rows dy``.

    Args:
        grad_output, grad_residual: gradients of output and residual_out; None: no gradient arrives there.
        saved: what was normalised: input, or residual_out; the output if ``from_output``, and then
            ``x̂ = (y - bias) / (weight + weight_offset)``. None where neither input, residual nor weight needs one.
        needs: which gradients are wanted; the others come back with shape (0,).
        dtypes: of the four gradients.
    """
    compute = rstd.dtype
    over = tuple(range(-dims, 0))
    lead = tuple(range(grad_output.dim() - dims))
    shape = (*rstd.shape, *(1,) * dims)
    dy = grad_output.to(compute)
    scaled = None if weight is None else weight.to(compute) + weight_offset
    zero = grad_output.new_empty(0, dtype=compute)
    dx, dw = zero, zero
    if saved is not None:
        x = saved.to(compute)
        if from_output:
            xhat = x if bias is None else x - bias.to(compute)
            xhat = xhat if scaled is None else xhat / scaled
        else:
            xhat = (x - mean.view(shape) if kind == "layer" else x) * rstd.view(shape)
        g = dy if scaled is None else dy * scaled
        if kind == "l2":
            inner = torch.where(rstd.view(shape) * eps < 0.999999, (g * xhat).sum(over, keepdim=True), 0.0)
        else:
            inner = (g * xhat).mean(over, keepdim=True)
        dx = g - xhat * inner
        if kind == "layer":
            dx = dx - g.mean(over, keepdim=True)
        dx = dx * rstd.view(shape)
        if grad_residual is not None:
            dx = dx + grad_residual.to(compute)
        dw = (dy * xhat).sum(lead) if lead else dy * xhat
    dresidual = dx
    if seed is not None and needs[0]:
        dx = dx * keep_scale(seed, *_matrix_shape(grad_output, dims), dropout_p).view(dx.shape)
    # An op's outputs share no memory with one another or with its inputs.
    grads = zip((dx, dresidual, dw, dy.sum(lead) if lead else dy), needs, dtypes, strict=True)
    a, b, c, d = (g.to(dtype, copy=True) if need else zero.new_empty(0, dtype=dtype) for g, need, dtype in grads)
    return a, b, c, d


def torch_norm(
    input: torch.Tensor,
    normalized_shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    kind: Kind,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The torch backend: torch's own fused operator wherever it means the same, else :func:`norm`."""
    if out_dtype is None or out_dtype == output_dtype(input):
        if kind == "layer":
            # torch.layer_norm is what F.layer_norm calls, without the cost of its wrapper.
            # The backward of its layer_norm fails at a float32 bias without a weight.
            mixed = weight is None and bias is not None and bias.dtype != input.dtype
            if not mixed and _torch_takes(input, weight, bias) and not _loses_gradients(input, weight, bias):
                return torch.layer_norm(input, normalized_shape, weight, bias, eps)
        elif kind == "rms" and weight_offset == 0.0 and (weight is None or weight.dtype == input.dtype):
            return torch.rms_norm(input, normalized_shape, weight, eps)
    dims = len(normalized_shape)
    return norm(input, None, weight, bias, None, dims, eps, weight_offset, kind, 0.0, out_dtype or output_dtype(input))[
        0
    ]


def torch_add_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    kind: Kind,
    dropout_p: float,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The torch backend of the norms with a residual: dropout, sum and norm as torch has them."""
    dtype = out_dtype or output_dtype(input)
    residual_out = (F.dropout(input, dropout_p) if dropout_p else input) + residual
    return torch_norm(residual_out, normalized_shape, weight, bias, eps, weight_offset, kind, dtype), residual_out


def compute_dtype(input: torch.Tensor, residual: torch.Tensor | None) -> torch.dtype:
    """float32, or float64 if a float64 tensor takes part."""
    return torch.float64 if residual_dtype(input, residual) == torch.float64 else torch.float32


def residual_dtype(input: torch.Tensor, residual: torch.Tensor | None) -> torch.dtype:
    """The dtype of ``input + residual``."""
    return input.dtype if residual is None else torch.promote_types(input.dtype, residual.dtype)


def output_dtype(input: torch.Tensor) -> torch.dtype:
    """The dtype torch's norms return: the input's; float32 under autocast on a GPU (not on the CPU)."""
    if input.is_cuda and torch.is_autocast_enabled("cuda") and input.dtype != torch.float64:
        return torch.float32
    return input.dtype


def _matrix_shape(input: torch.Tensor, dims: int) -> tuple[int, int]:
    width = math.prod(input.shape[input.dim() - dims :])
    return math.prod(input.shape[: input.dim() - dims]), width


def group_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_groups: int,
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group norm (Wu, He 2018, equations 1, 2, 6 and 7), with its statistics.

    ``y = (x - mean) * rstd * weight + bias`` with ``rstd = 1 / sqrt(mean((x - mean)²) + eps)``, the means over the
    channels of a group and all positions.

    Args:
        input: (N, C, *), any floating dtype. Computed in float32, or float64 for a float64 input.
        weight, bias: (C,), any floating dtype, or None.
        num_groups: a divisor of C.

    Returns:
        output: shape of ``input``, ``out_dtype``.
        mean, rstd: (N, num_groups).
    """
    compute = compute_dtype(input, None)
    x = input.to(compute).unflatten(1, (num_groups, input.shape[1] // num_groups))
    over = tuple(range(2, x.dim()))
    mean = x.mean(over, keepdim=True)
    x = x - mean
    rstd = torch.rsqrt(x.square().mean(over, keepdim=True) + eps)
    y = (x * rstd).flatten(1, 2)
    if weight is not None:
        y = y * _by_channel(weight.to(compute), y)
    if bias is not None:
        y = y + _by_channel(bias.to(compute), y)
    return y.to(out_dtype), mean.flatten(1), rstd.flatten(1)


def group_norm_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    num_groups: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of :func:`group_norm` with respect to input, weight and bias, in the compute dtype.

    With ``x̂ = (x - mean) * rstd`` and ``g = dy * weight``: ``dx = rstd * (g - x̂ * mean(g * x̂) - mean(g))``, the means
    as in the forward; ``dweight = Σ dy * x̂`` and ``dbias = Σ dy`` over batch and positions.
    """
    compute = rstd.dtype
    groups = (num_groups, input.shape[1] // num_groups)
    x = input.to(compute).unflatten(1, groups)
    over = tuple(range(2, x.dim()))
    shape = (*rstd.shape, *(1,) * len(over))
    xhat = (x - mean.view(shape)) * rstd.view(shape)
    dy = grad_output.to(compute)
    g = (dy if weight is None else dy * _by_channel(weight.to(compute), dy)).unflatten(1, groups)
    dx = rstd.view(shape) * (g - xhat * (g * xhat).mean(over, keepdim=True) - g.mean(over, keepdim=True))
    but_channels = (0, *range(2, dy.dim()))
    return dx.flatten(1, 2), (dy * xhat.flatten(1, 2)).sum(but_channels), dy.sum(but_channels)


def torch_group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """The torch backend: torch's own operator wherever it means the same, else :func:`group_norm`."""
    # torch's gradients of weight and bias are NaN, not 0, without positions; that of a bias without a weight raises.
    right = input.numel() > 0 and (bias is None or weight is not None)
    if out_dtype in (None, output_dtype(input)) and right and _torch_takes(input, weight, bias):
        return torch.group_norm(input, num_groups, weight, bias, eps)
    return group_norm(input, weight, bias, num_groups, eps, out_dtype or output_dtype(input))[0]


def _by_channel(parameter: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return parameter.view(-1, *(1,) * (like.dim() - 2))


def _loses_gradients(input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    """Whether torch's layer_norm would add up float32 parameters' gradients over all rows in 16 bits, as on the CPU."""
    wanted = torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in (weight, bias))
    return wanted and any(p is not None and p.dtype != input.dtype for p in (weight, bias))


def _torch_takes(input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    """Whether torch's layer_norm and group_norm take parameters of these dtypes.

    They take the input's dtype; on the CPU float32 beside a 16-bit input too.
    """
    dtype = input.dtype
    if (weight is None or weight.dtype == dtype) and (bias is None or bias.dtype == dtype):
        return True
    mixed = input.device.type == "cpu" and dtype in (torch.float16, torch.bfloat16)
    return mixed and all(p is None or p.dtype == torch.float32 for p in (weight, bias))
