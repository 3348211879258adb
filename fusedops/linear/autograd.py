"""The linear family's operators (``torch.ops.fusedops.linear``, ``linear_backward``) and their autograd Function."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.linear import reference
from fusedops.linear.activations import keeps_preactivation
from fusedops.runtime.backend import can_launch
from fusedops.runtime.library import below_autograd, first_order_only, register


class Linear(torch.autograd.Function):
    """Saves the input for the weight's gradient, the weight for the input's, and what the derivative is a function of.

    That is the pre-activation, which the kernel writes only then, or the output, or nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        save: bool,
        allow_tf32: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with below_autograd():
            output, saved = linear_op(input, weight, bias, activation, True, allow_tf32)
        needs_dx, needs_dw, _ = ctx.needs_input_grad[:3]
        derivative_of = None
        if activation is not None:
            derivative_of = saved if keeps_preactivation(activation) else output
        ctx.save_for_backward(input if needs_dw else None, weight if needs_dx else None, derivative_of)
        dtypes = weight.dtype, weight.dtype if bias is None else bias.dtype
        transposed = weight.stride(0) == 1 and weight.stride(1) != 1
        ctx.arguments = (activation, *ctx.needs_input_grad[:3], *dtypes, transposed, allow_tf32)
        ctx.mark_non_differentiable(saved)
        ctx.set_materialize_grads(False)
        return output, saved

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_output: torch.Tensor | None, _: Any) -> Any:
        if grad_output is None:
            return (None,) * 6
        grads = linear_backward_op(grad_output, *ctx.saved_tensors, *ctx.arguments)
        return *(g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)), None, None, None


def _linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    save: bool,
    allow_tf32: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    if can_launch(input):
        from fusedops.linear.kernels_forward import linear_forward as forward
    else:
        forward = reference.linear
    return forward(input, weight, bias, activation, save, allow_tf32)


def _linear_fake(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    save: bool,
    allow_tf32: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*input.shape[:-1], weight.shape[0])
    return input.new_empty(shape), input.new_empty(shape if save and keeps_preactivation(activation) else (0,))


def _linear_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor | None,
    weight: torch.Tensor | None,
    saved: torch.Tensor | None,
    activation: str | None,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    transposed: bool,
    allow_tf32: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if can_launch(grad_output):
        from fusedops.linear.kernels_backward import linear_backward as backward
    else:
        backward = reference.linear_backward
    needs = (need_input, need_weight, need_bias)
    return backward(
        grad_output, input, weight, saved, activation, needs, weight_dtype, bias_dtype, transposed, allow_tf32
    )


def _linear_backward_fake(
    grad_output: torch.Tensor,
    input: torch.Tensor | None,
    weight: torch.Tensor | None,
    saved: torch.Tensor | None,
    activation: str | None,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    transposed: bool,
    allow_tf32: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *lead, out_features = grad_output.shape
    dx = grad_output.new_empty((*lead, weight.shape[1]) if need_input and weight is not None else (0,))
    dw = grad_output.new_empty((0,), dtype=weight_dtype)
    if need_weight and input is not None:
        dw = reference.empty_weight_gradient(grad_output, out_features, input.shape[-1], weight_dtype, transposed)
    return dx, dw, grad_output.new_empty((out_features if need_bias else 0,), dtype=bias_dtype)


# An unwanted gradient comes back as an empty tensor of shape (0,): a library op returns tensors only.
linear_op = register(
    "linear(Tensor input, Tensor weight, Tensor? bias, str? activation, bool save, bool allow_tf32)"
    " -> (Tensor output, Tensor saved)",
    kernel=_linear,
    fake=_linear_fake,
    function=Linear,
)
linear_backward_op = register(
    "linear_backward(Tensor grad_output, Tensor? input, Tensor? weight, Tensor? saved, str? activation,"
    " bool need_input, bool need_weight, bool need_bias, ScalarType weight_dtype, ScalarType bias_dtype,"
    " bool transposed, bool allow_tf32) -> (Tensor, Tensor, Tensor)",
    kernel=_linear_backward,
    fake=_linear_backward_fake,
)
