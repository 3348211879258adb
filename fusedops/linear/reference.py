"""The definition of the linear family in plain torch: what the kernels are compared with, and the path without them."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F

from fusedops.linear.activations import ACTIVATIONS
from fusedops.runtime.dropout import keep_scale


def keeps_output(activation: str | None) -> bool:
    """Whether the activation's derivative is a function of its output; else it is one of the pre-activation."""
    return activation is not None and ACTIVATIONS[activation].derivative_of == "output"


def saves(
    activation: str | None,
    residual: torch.Tensor | None,
    seed: torch.Tensor | None,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> bool:
    """Whether the backward needs a tensor that only it needs.

    That is the activation's input, or its output where dropout, a residual or a rounding comes after it.
    """
    if activation is None:
        return False
    return not keeps_output(activation) or residual is not None or seed is not None or out_dtype != dtype


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    seed: torch.Tensor | None,
    activation: str | None,
    dropout_p: float,
    out_dtype: torch.dtype,
    save: bool,
    recompute: bool,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``y = dropout(a(x Wᵀ + b)) + residual``, all that follows the product in float32, rounded once.

    Args:
        input: (..., in_features), any floating dtype; the operands' dtype. Computed in float32, or float64 for a
            float64 input.
        weight: (out_features, in_features); rounded to the input's dtype where it is float32 beside a 16-bit input.
        bias: (out_features) or None.
        residual: (..., out_features) or None, any floating dtype.
        seed: (1,) int64 that the dropout mask is drawn from; None: no dropout.
        activation: a key of :data:`fusedops.linear.activations.ACTIVATIONS`, or None.
        dropout_p: probability that an element is dropped; the others are divided by ``1 - dropout_p``.
        out_dtype: dtype of the output.
        save: the backward will need what the activation's derivative is a function of.
        recompute: without ``save``: the backward will ask for that tensor then. With ``save``: it asks, and wants
            nothing else.
        precision: how a float32 product may be computed. Here torch's own setting decides.

    Returns:
        output: (..., out_features), ``out_dtype``; empty, shape (0,), where only ``saved`` is wanted.
        saved: what the derivative is a function of, of the same shape and the input's dtype, where ``save`` is set and
            :func:`saves` says that it is a tensor of its own; else empty, shape (0,).
    """
    dtype = input.dtype
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    with no_autocast(input):
        z = F.linear(input.to(compute), weight.to(dtype).to(compute), None if bias is None else bias.to(compute))
        y = z if activation is None else ACTIVATIONS[activation].forward(z)
        output = y
        if seed is not None:
            output = output * _keep_scale(seed, y.shape, dropout_p)
        if residual is not None:
            output = output + residual.to(compute)
    saved = input.new_empty(0)
    if save and saves(activation, residual, seed, dtype, out_dtype):
        saved = (y if keeps_output(activation) else z).to(dtype)
        if recompute:
            output = output.new_empty(0)
    return output.to(out_dtype), saved


def linear_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor | None,
    weight: torch.Tensor | None,
    saved: torch.Tensor | None,
    seed: torch.Tensor | None,
    activation: str | None,
    dropout_p: float,
    needs: list[bool],
    input_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    transposed: bool,
    precision: str,
    main_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of :func:`linear` with respect to input, weight and bias; one that is not needed has shape (0,).

    With ``dz = dropout(dy) ∘ a′(saved)``: ``dx = dz W``, ``dW = dzᵀ x``, ``db = Σ dz``, the sums over all leading
    dimensions.

    Args:
        grad_output: (..., out_features).
        input: (..., in_features), read for the weight's gradient only.
        weight: (out_features, in_features), read for the input's gradient only.
        saved: what a′ is a function of, ``Activation.derivative_of``; None without an activation.
        seed, activation, dropout_p, precision: as of :func:`linear`.
        needs: which of the three gradients are wanted.
        input_dtype, weight_dtype, bias_dtype: dtypes of the gradients.
        transposed: the weight's gradient is laid out with unit stride along out_features, as the weight is.
        main_grad: (out_features, in_features), to which the weight's gradient is added, in place, instead of returned.
    """
    compute = torch.float64 if input_dtype == torch.float64 else torch.float32
    dx, dw, db = (grad_output.new_empty(0, dtype=t) for t in (input_dtype, weight_dtype, bias_dtype))
    with no_autocast(grad_output):
        dz = grad_output.to(compute)
        if seed is not None:
            dz = dz * _keep_scale(seed, dz.shape, dropout_p)
        if activation is not None:
            assert saved is not None
            dz = dz * ACTIVATIONS[activation].derivative(saved.to(compute))
        rows = dz.reshape(math.prod(dz.shape[:-1]), dz.shape[-1])
        if needs[0]:
            assert weight is not None
            dx = (dz @ weight.to(input_dtype).to(compute)).to(input_dtype)
        if needs[1]:
            assert input is not None
            product = rows.t() @ input.reshape(rows.shape[0], input.shape[-1]).to(compute)
            if main_grad is not None:
                main_grad.add_(product)
            else:
                out_features, in_features = product.shape
                dw = empty_weight_gradient(grad_output, out_features, in_features, weight_dtype, transposed)
                dw.copy_(product)
        if needs[2]:
            db = rows.sum(0).to(bias_dtype)
    return dx, dw, db


def _keep_scale(seed: torch.Tensor, shape: torch.Size, dropout_p: float) -> torch.Tensor:
    """The dropout mask of a tensor as a matrix of rows, times 1 / (1 - p)."""
    return keep_scale(seed, math.prod(shape[:-1]), shape[-1], dropout_p).view(shape)


def empty_weight_gradient(
    like: torch.Tensor, out_features: int, in_features: int, dtype: torch.dtype, transposed: bool
) -> torch.Tensor:
    """An uninitialised (out_features, in_features), the first of them with unit stride where ``transposed``."""
    if transposed:
        return like.new_empty((in_features, out_features), dtype=dtype).t()
    return like.new_empty((out_features, in_features), dtype=dtype)


def torch_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    mixed: bool,
    residual: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The torch backend: torch's own operators. ``mixed``: a parameter's dtype is not the input's."""
    if mixed and not torch.is_autocast_enabled(input.device.type):
        weight = weight.to(input.dtype)
        bias = None if bias is None else bias.to(input.dtype)
    y = F.linear(input, weight, bias)
    if out_dtype is None:
        out_dtype = y.dtype if residual is None else torch.promote_types(y.dtype, residual.dtype)
    if activation is not None:
        y = ACTIVATIONS[activation].forward(y)
    if dropout_p:
        y = F.dropout(y, dropout_p)
    if residual is not None:
        y = y + residual
    return y if y.dtype is out_dtype else y.to(out_dtype)


def no_autocast(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """The dtypes are chosen here; autocast, which may be on around the op, must not choose others."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
