"""The operators of grouped and batched products (``torch.ops.fusedops.grouped_linear`` and its backward)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusedops.linear import reference_grouped as reference
from fusedops.linear.reference import keeps_output
from fusedops.runtime.backend import can_launch
from fusedops.runtime.library import first_order_only, register


class GroupedLinear(torch.autograd.Function):
    """Saves the input for the weights' gradient, the weights for the input's, and what the derivative is a function of.

    That is the pre-activation, which the kernel writes only then, or the output, or nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weights: torch.Tensor,
        offsets: torch.Tensor | None,
        bias: torch.Tensor | None,
        activation: str | None,
        save: bool,
        precision: str,
        compute: Callable[..., Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, saved = compute(input, weights, offsets, bias, activation, True, precision)
        needs_dx, needs_dw, _, needs_db = ctx.needs_input_grad[:4]
        derivative_of = None
        if activation is not None:
            derivative_of = output if keeps_output(activation) else saved
        ctx.save_for_backward(input if needs_dw else None, weights if needs_dx else None, offsets, derivative_of)
        dtypes = weights.dtype, weights.dtype if bias is None else bias.dtype
        transposed = weights.stride(1) == 1 and weights.stride(2) != 1
        ctx.arguments = (activation, needs_dx, needs_dw, needs_db, *dtypes, transposed, precision)
        ctx.mark_non_differentiable(saved)
        ctx.set_materialize_grads(False)
        return output, saved

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_output: torch.Tensor | None, _: Any) -> Any:
        if grad_output is None:
            return (None,) * 8
        dx, dw, db = grouped_linear_backward_op(grad_output, *ctx.saved_tensors, *ctx.arguments)
        needs_dx, needs_dw, _, needs_db = ctx.needs_input_grad[:4]
        return dx if needs_dx else None, dw if needs_dw else None, None, db if needs_db else None, *(None,) * 4


def _grouped_linear(
    input: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    save: bool,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    if can_launch(input):
        from fusedops.linear.kernels_grouped import grouped_linear as forward
    else:
        forward = reference.grouped_linear
    return forward(input, weights, offsets, bias, activation, save, precision)


def _grouped_linear_fake(
    input: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    save: bool,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*input.shape[:-1], weights.shape[1])
    return input.new_empty(shape), input.new_empty(
        shape if save and activation is not None and not keeps_output(activation) else (0,)
    )


def _grouped_linear_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor | None,
    weights: torch.Tensor | None,
    offsets: torch.Tensor | None,
    saved: torch.Tensor | None,
    activation: str | None,
    need_input: bool,
    need_weights: bool,
    need_bias: bool,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    transposed: bool,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if can_launch(grad_output):
        from fusedops.linear.kernels_grouped import grouped_linear_backward as backward
    else:
        backward = reference.grouped_linear_backward
    needs = (need_input, need_weights, need_bias)
    return backward(
        grad_output, input, weights, offsets, saved, activation, needs, weight_dtype, bias_dtype, transposed, precision
    )


def _grouped_linear_backward_fake(
    grad_output: torch.Tensor,
    input: torch.Tensor | None,
    weights: torch.Tensor | None,
    offsets: torch.Tensor | None,
    saved: torch.Tensor | None,
    activation: str | None,
    need_input: bool,
    need_weights: bool,
    need_bias: bool,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    transposed: bool,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *lead, out_features = grad_output.shape
    groups = grad_output.shape[0] if offsets is None else offsets.shape[0]
    dx = grad_output.new_empty((*lead, weights.shape[2]) if need_input and weights is not None else (0,))
    dw = grad_output.new_empty((0,), dtype=weight_dtype)
    if need_weights and input is not None:
        sizes = (groups, out_features, input.shape[-1])
        dw = reference.empty_weights_gradient(grad_output, *sizes, weight_dtype, transposed)
    return dx, dw, grad_output.new_empty((groups, out_features) if need_bias else (0,), dtype=bias_dtype)


# Without offsets the input is (groups, rows, in_features): equal groups. An unwanted gradient comes back as an empty
# tensor of shape (0,): a library op returns tensors only.
grouped_linear_op = register(
    "grouped_linear(Tensor input, Tensor weights, Tensor? offsets, Tensor? bias, str? activation, bool save,"
    " str precision) -> (Tensor output, Tensor saved)",
    kernel=_grouped_linear,
    fake=_grouped_linear_fake,
    function=GroupedLinear,
)
grouped_linear_backward_op = register(
    "grouped_linear_backward(Tensor grad_output, Tensor? input, Tensor? weights, Tensor? offsets, Tensor? saved,"
    " str? activation, bool need_input, bool need_weights, bool need_bias, ScalarType weight_dtype,"
    " ScalarType bias_dtype, bool transposed, str precision) -> (Tensor, Tensor, Tensor)",
    kernel=_grouped_linear_backward,
    fake=_grouped_linear_backward_fake,
)
