"""The definition of grouped and batched products in plain torch: what the kernels are compared with, and the path
without them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusedops.linear.activations import ACTIVATIONS, Elementwise
from fusedops.linear.reference import keeps_output, no_autocast
from fusedops.runtime.precision import autocast_dtype


def group_rows(offsets: torch.Tensor, rows: int) -> list[tuple[int, int]]:
    """(first row, end) of each group, read on the host; no end is beyond the last row, or before the end before it."""
    bounds, first = [], 0
    for offset in offsets.tolist():
        end = max(first, min(offset, rows))
        bounds.append((first, end))
        first = end
    return bounds


def grouped_linear(
    input: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    save: bool,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``y_g = a(x_g W_gᵀ + b_g)``, the bias and the activation in float32, rounded once.

    Args:
        input: (rows, in_features), rows sorted by group; without offsets (groups, rows, in_features). Any floating
            dtype; the operands' dtype. Computed in float32, or float64 for a float64 input.
        weights: (groups, out_features, in_features); rounded to the input's dtype where it is float32 beside 16 bits.
        offsets: (groups,) the end of each group's rows; None: each group has the same number.
        bias: (groups, out_features) or None.
        activation: a key of :data:`fusedops.linear.activations.ACTIVATIONS`, or None.
        save: the backward will need the pre-activation.
        precision: how a float32 product may be rounded. Here torch's own setting decides.

    Returns:
        output: (rows, out_features), without offsets (groups, rows, out_features); the input's dtype. Rows behind the
            last group are zero.
        saved: the pre-activation of the same shape and dtype where ``save`` is set and the activation's derivative is a
            function of it, zero behind the last group; else empty, shape (0,).
    """
    dtype = input.dtype
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    a = ACTIVATIONS[activation].forward if activation is not None else None
    save = save and activation is not None and not keeps_output(activation)
    output = input.new_zeros((*input.shape[:-1], weights.shape[1]))
    saved = torch.zeros_like(output) if save else input.new_empty(0)
    with no_autocast(input):
        for group, rows in enumerate(_blocks(input, offsets)):
            x = input[rows].to(compute)
            b = None if bias is None else bias[group].to(compute)
            z = F.linear(x, weights[group].to(dtype).to(compute), b)
            output[rows] = (z if a is None else a(z)).to(dtype)
            if save:
                saved[rows] = z.to(dtype)
    return output, saved


def grouped_linear_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor | None,
    weights: torch.Tensor | None,
    offsets: torch.Tensor | None,
    saved: torch.Tensor | None,
    activation: str | None,
    needs: tuple[bool, bool, bool],
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    transposed: bool,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of :func:`grouped_linear` with respect to input, weights and bias; an unwanted one has shape (0,).

    With ``dz = dy ∘ a′(saved)``, for each group: ``dx = dz W``, ``dW = dzᵀ x``, ``db = Σ dz``, sums over its rows.

    Args:
        grad_output: as the output of :func:`grouped_linear`.
        input: read for the weights' gradient only.
        weights: read for the input's gradient only.
        offsets: as of :func:`grouped_linear`.
        saved: what a′ is a function of, ``Activation.derivative_of``; None without an activation.
        needs: which of the three gradients are wanted.
        weight_dtype, bias_dtype: dtypes of their gradients.
        transposed: the weights' gradient is laid out with unit stride along out_features, as the weights are.
        precision: as of :func:`grouped_linear`.
    """
    dtype = grad_output.dtype
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    dx, dw, db = (grad_output.new_empty(0, dtype=t) for t in (dtype, weight_dtype, bias_dtype))
    groups = grad_output.shape[0] if offsets is None else offsets.shape[0]
    *lead, out_features = grad_output.shape
    if needs[0]:
        assert weights is not None
        dx = grad_output.new_zeros((*lead, weights.shape[2]))
    if needs[1]:
        assert input is not None
        shape = (groups, out_features, input.shape[-1])
        dw = empty_weights_gradient(grad_output, *shape, weight_dtype, transposed)
    if needs[2]:
        db = grad_output.new_empty((groups, out_features), dtype=bias_dtype)
    with no_autocast(grad_output):
        for group, rows in enumerate(_blocks(grad_output, offsets)):
            dz = grad_output[rows].to(compute)
            if activation is not None:
                assert saved is not None
                dz = dz * ACTIVATIONS[activation].derivative(saved[rows].to(compute))
            if needs[0]:
                assert weights is not None
                dx[rows] = (dz @ weights[group].to(dtype).to(compute)).to(dtype)
            if needs[1]:
                assert input is not None
                dw[group] = (dz.t() @ input[rows].to(compute)).to(weight_dtype)
            if needs[2]:
                db[group] = dz.sum(0).to(bias_dtype)
    return dx, dw, db


def empty_weights_gradient(
    like: torch.Tensor, groups: int, out_features: int, in_features: int, dtype: torch.dtype, transposed: bool
) -> torch.Tensor:
    """An uninitialised (groups, out_features, in_features), the second with unit stride where ``transposed``."""
    if transposed:
        return like.new_empty((groups, in_features, out_features), dtype=dtype).transpose(1, 2)
    return like.new_empty((groups, out_features, in_features), dtype=dtype)


def torch_grouped_linear(
    input: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    mixed: bool,
) -> torch.Tensor:
    """The torch backend: torch's own product of each group, and the activation. ``mixed``: dtypes differ."""
    weights, bias = _same_dtype(input, weights, bias, mixed)
    rows, groups = input.shape[0], weights.shape[0]
    a = _activation(activation)
    if groups == 0:
        # No rows of no matrix: a result that autograd connects with every argument.
        parts = [F.linear(input[:0], weights.sum(0), None if bias is None else bias.sum(0))]
        last = 0
    elif _readable(offsets):
        biases = [None] * groups if bias is None else bias.unbind(0)
        bounds = group_rows(offsets, rows)
        parts = [
            a(F.linear(input[first:end], w, b))
            for (first, end), w, b in zip(bounds, weights.unbind(0), biases, strict=True)
        ]
        last = bounds[-1][1]
    else:
        return _masked(input, weights, offsets, bias, a)
    return torch.cat((*parts, parts[0].new_zeros((rows - last, weights.shape[1]))))


def _readable(offsets: torch.Tensor) -> bool:
    """Whether the host may read the offsets: not while a graph is traced or captured, nor where there are no data."""
    if torch.compiler.is_compiling() or offsets.is_meta or type(offsets) is not torch.Tensor:
        return False
    return not (offsets.is_cuda and torch.cuda.is_current_stream_capturing())


def _masked(
    input: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None, a: Elementwise
) -> torch.Tensor:
    """Every group's product of all rows, the others' being zero: more work, but the host reads no offset."""
    rows = input.shape[0]
    ends = offsets.long().clamp(0, rows).cummax(0).values
    row = torch.arange(rows, device=input.device)
    group = torch.searchsorted(ends, row, right=True)[:, None]
    zero = input.new_zeros(())
    output = input.new_zeros((rows, weights.shape[1]), dtype=autocast_dtype(input))
    for g in range(weights.shape[0]):
        # Masked before and after: neither a row's nor a matrix's infinity may reach another group.
        z = a(F.linear(torch.where(group == g, input, zero), weights[g], None if bias is None else bias[g]))
        output = torch.where(group == g, z, output)
    return output


def torch_batched_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, mixed: bool
) -> torch.Tensor:
    """The torch backend: torch's own batched product and activation. ``mixed``: dtypes differ."""
    weight, bias = _same_dtype(input, weight, bias, mixed)
    turned = weight.transpose(1, 2)
    z = torch.bmm(input, turned) if bias is None else torch.baddbmm(bias[:, None], input, turned)
    return _activation(activation)(z)


def _activation(name: str | None) -> Elementwise:
    """The activation, its result of the dtype of its argument: autocast may widen it."""
    if name is None:
        return lambda z: z
    forward = ACTIVATIONS[name].forward
    return lambda z: forward(z).to(z.dtype)


def _same_dtype(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, mixed: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if mixed and not torch.is_autocast_enabled(input.device.type):
        return weight.to(input.dtype), None if bias is None else bias.to(input.dtype)
    return weight, bias


def _blocks(tensor: torch.Tensor, offsets: torch.Tensor | None) -> list[Any]:
    """What indexes each group's rows in the first dimension."""
    if offsets is None:
        return list(range(tensor.shape[0]))
    return [slice(*bounds) for bounds in group_rows(offsets, tensor.shape[0])]
