"""The linear family's operators (``torch.ops.fusedops.linear``, ``linear_backward``) and their autograd Function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from fusedops.linear import reference
from fusedops.linear.reference import saves
from fusedops.runtime.backend import can_launch
from fusedops.runtime.library import first_order_only, register


class Linear(torch.autograd.Function):
    """Saves the input for the weight's gradient, the weight for the input's, and what the derivative is a function of.

    That is a tensor that the kernel writes only then, or the output, or nothing; with ``recompute`` it is the input,
    the weight and the bias, from which the backward computes it again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        seed: torch.Tensor | None,
        main_grad: torch.Tensor | None,
        activation: str | None,
        dropout_p: float,
        out_dtype: torch.dtype,
        save: bool,
        recompute: bool,
        precision: str,
        compute: Callable[..., Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needs = list(ctx.needs_input_grad[:3])
        own = any(needs) and saves(activation, residual, seed, input.dtype, out_dtype)
        again = own and recompute
        output, saved = compute(
            input, weight, bias, residual, seed, None, activation, dropout_p, out_dtype,
            own and not again, again, precision,
        )  # fmt: skip
        derivative_of = None
        if activation is not None and any(needs) and not again:
            derivative_of = saved if own else output
        ctx.save_for_backward(
            input if needs[1] or again else None,
            weight if needs[0] or again else None,
            bias if again else None,
            derivative_of,
            seed,
        )
        ctx.main_grad = main_grad  # not saved: others add to it before this backward does
        ctx.again = again
        ctx.residual_dtype = None if residual is None else residual.dtype
        transposed = weight.stride(0) == 1 and weight.stride(1) != 1
        dtypes = input.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype
        ctx.arguments = (activation, dropout_p, needs, *dtypes, transposed, precision)
        ctx.mark_non_differentiable(saved)
        ctx.set_materialize_grads(False)
        return output, saved

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_output: torch.Tensor | None, _: Any) -> Any:
        if grad_output is None:
            return (None,) * 13
        input, weight, bias, saved, seed = ctx.saved_tensors
        activation, dropout_p, needs, *_, precision = ctx.arguments
        dx = dw = db = None
        if any(needs):
            if ctx.again:
                # How the product is computed depends on what follows it. The residual's values do not matter.
                residual = None if ctx.residual_dtype is None else grad_output
                _, saved = linear_op(
                    input, weight, bias, residual, seed, None, activation, dropout_p, grad_output.dtype, True, True,
                    precision,
                )  # fmt: skip
            arguments = (
                grad_output, input if needs[1] else None, weight if needs[0] else None, saved, seed, *ctx.arguments
            )  # fmt: skip
            if ctx.main_grad is not None and needs[1]:
                dx, db = linear_backward_accumulate_op(*arguments, ctx.main_grad)
                increment_version(ctx.main_grad)
            else:
                dx, dw, db = linear_backward_op(*arguments)
        dr = grad_output.to(ctx.residual_dtype) if ctx.needs_input_grad[3] else None
        return dx if needs[0] else None, dw if needs[1] else None, db if needs[2] else None, dr, *(None,) * 9


class AddToMainGrad(torch.autograd.Function):
    """The weight itself; its gradient is added to another tensor, and ends there."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, main_grad: torch.Tensor) -> torch.Tensor:
        ctx.main_grad = main_grad
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad_weight: torch.Tensor) -> tuple[None, None]:
        ctx.main_grad.add_(grad_weight.detach())
        return None, None


def _linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    seed: torch.Tensor | None,
    main_grad: torch.Tensor | None,
    activation: str | None,
    dropout_p: float,
    out_dtype: torch.dtype,
    save: bool,
    recompute: bool,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    if can_launch(input):
        from fusedops.linear.kernels_forward import linear_forward as forward
    else:
        forward = reference.linear
    return forward(input, weight, bias, residual, seed, activation, dropout_p, out_dtype, save, recompute, precision)


def _linear_fake(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    seed: torch.Tensor | None,
    main_grad: torch.Tensor | None,
    activation: str | None,
    dropout_p: float,
    out_dtype: torch.dtype,
    save: bool,
    recompute: bool,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*input.shape[:-1], weight.shape[0])
    save = save and saves(activation, residual, seed, input.dtype, out_dtype)
    output = input.new_empty((0,) if save and recompute else shape, dtype=out_dtype)
    return output, input.new_empty(shape if save else (0,))


def _linear_backward(
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
    if can_launch(grad_output):
        from fusedops.linear.kernels_backward import linear_backward as backward
    else:
        backward = reference.linear_backward
    return backward(
        grad_output, input, weight, saved, seed, activation, dropout_p, needs,
        input_dtype, weight_dtype, bias_dtype, transposed, precision, main_grad,
    )  # fmt: skip


def _linear_backward_fake(
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
    *lead, out_features = grad_output.shape
    need_input, need_weight, need_bias = needs
    dx = grad_output.new_empty(
        (*lead, weight.shape[1]) if need_input and weight is not None else (0,), dtype=input_dtype
    )
    dw = grad_output.new_empty((0,), dtype=weight_dtype)
    if need_weight and input is not None and main_grad is None:
        dw = reference.empty_weight_gradient(grad_output, out_features, input.shape[-1], weight_dtype, transposed)
    return dx, dw, grad_output.new_empty((out_features if need_bias else 0,), dtype=bias_dtype)


def _linear_backward_accumulate(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    dx, _, db = _linear_backward(*arguments)
    return dx, db


def _linear_backward_accumulate_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    dx, _, db = _linear_backward_fake(*arguments)
    return dx, db


# An unwanted gradient comes back as an empty tensor of shape (0,): a library op returns tensors only.
linear_op = register(
    "linear(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, Tensor? seed, Tensor? main_grad,"
    " str? activation, float dropout_p, ScalarType out_dtype, bool save, bool recompute, str precision)"
    " -> (Tensor output, Tensor saved)",
    kernel=_linear,
    fake=_linear_fake,
    function=Linear,
)
_BACKWARD = (
    "Tensor grad_output, Tensor? input, Tensor? weight, Tensor? saved, Tensor? seed, str? activation, float dropout_p,"
    " bool[] needs, ScalarType input_dtype, ScalarType weight_dtype, ScalarType bias_dtype, bool transposed,"
    " str precision"
)
linear_backward_op = register(
    f"linear_backward({_BACKWARD}) -> (Tensor, Tensor, Tensor)", kernel=_linear_backward, fake=_linear_backward_fake
)
linear_backward_accumulate_op = register(
    f"linear_backward_accumulate({_BACKWARD}, Tensor(a!) main_grad) -> (Tensor, Tensor)",
    kernel=_linear_backward_accumulate,
    fake=_linear_backward_accumulate_fake,
)
