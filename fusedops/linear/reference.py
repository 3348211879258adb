"""The definition of the linear family in plain torch: what the kernels are compared with, and the path without them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fusedops.linear.activations import ACTIVATIONS, keeps_preactivation


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    save: bool,
    allow_tf32: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``y = a(x Wᵀ + b)``, the bias and the activation in float32, rounded once.

    Args:
        input: (..., in_features), any floating dtype; the operands' dtype. Computed in float32, or float64 for a
            float64 input.
        weight: (out_features, in_features); rounded to the input's dtype where it is float32 beside a 16-bit input.
        bias: (out_features) or None.
        activation: a key of :data:`fusedops.linear.activations.ACTIVATIONS`, or None.
        save: the backward will need the pre-activation.
        allow_tf32: a float32 product may be rounded to TF32. Here torch's own setting, which says the same, decides.

    Returns:
        output: (..., out_features), the input's dtype.
        saved: the pre-activation x Wᵀ + b of the same shape and dtype where ``save`` is set and the activation's
            derivative is a function of it; else empty, shape (0,).
    """
    dtype = input.dtype
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    with _no_autocast(input):
        z = F.linear(input.to(compute), weight.to(dtype).to(compute), None if bias is None else bias.to(compute))
        output = (z if activation is None else ACTIVATIONS[activation].forward(z)).to(dtype)
    saved = z.to(dtype) if save and keeps_preactivation(activation) else input.new_empty(0)
    return output, saved


def linear_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor | None,
    weight: torch.Tensor | None,
    saved: torch.Tensor | None,
    activation: str | None,
    needs: tuple[bool, bool, bool],
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    transposed: bool,
    allow_tf32: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of :func:`linear` with respect to input, weight and bias; one that is not needed has shape (0,).

    With ``dz = dy ∘ a′(saved)``: ``dx = dz W``, ``dW = dzᵀ x``, ``db = Σ dz``, the sums over all leading dimensions.

    Args:
        grad_output: (..., out_features), the input's dtype.
        input: (..., in_features), read for the weight's gradient only.
        weight: (out_features, in_features), read for the input's gradient only.
        saved: what a′ is a function of, ``Activation.derivative_of``; None without an activation.
        needs: which of the three gradients are wanted.
        weight_dtype, bias_dtype: dtypes of their gradients.
        transposed: the weight's gradient is laid out with unit stride along out_features, as the weight is.
    """
    dtype = grad_output.dtype
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    dx, dw, db = (grad_output.new_empty(0, dtype=t) for t in (dtype, weight_dtype, bias_dtype))
    with _no_autocast(grad_output):
        dz = grad_output.to(compute)
        if activation is not None:
            assert saved is not None
            dz = dz * ACTIVATIONS[activation].derivative(saved.to(compute))
        rows = dz.reshape(-1, dz.shape[-1]) if dz.numel() else dz.new_empty((0, dz.shape[-1]))
        if needs[0]:
            assert weight is not None
            dx = (dz @ weight.to(dtype).to(compute)).to(dtype)
        if needs[1]:
            assert input is not None
            x = input.reshape(rows.shape[0], input.shape[-1]).to(compute)
            dw = empty_weight_gradient(grad_output, rows.shape[1], x.shape[1], weight_dtype, transposed)
            dw.copy_(rows.t() @ x)
        if needs[2]:
            db = rows.sum(0).to(bias_dtype)
    return dx, dw, db


def empty_weight_gradient(
    like: torch.Tensor, out_features: int, in_features: int, dtype: torch.dtype, transposed: bool
) -> torch.Tensor:
    """An uninitialised (out_features, in_features), the first of them with unit stride where ``transposed``."""
    if transposed:
        return like.new_empty((in_features, out_features), dtype=dtype).t()
    return like.new_empty((out_features, in_features), dtype=dtype)


def torch_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, mixed: bool
) -> torch.Tensor:
    """The torch backend: torch's own product and activation. ``mixed``: a parameter's dtype is not the input's."""
    if mixed and not torch.is_autocast_enabled(input.device.type):
        weight = weight.to(input.dtype)
        bias = None if bias is None else bias.to(input.dtype)
    z = F.linear(input, weight, bias)
    return z if activation is None else ACTIVATIONS[activation].forward(z)


def _no_autocast(tensor: torch.Tensor) -> torch.autocast:
    """The dtypes are chosen here; autocast, which may be on around the op, must not choose others."""
    return torch.autocast(tensor.device.type, enabled=False)
