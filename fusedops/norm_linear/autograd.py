"""The library ops ``torch.ops.fusedops.norm_linear`` and ``norm_linear_backward``, and their autograd Function.

They call the ops of the norm and the linear family, which bring the kernels, the definitions in plain torch and the
fakes: each function here is its op's kernel and its fake alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusedops.linear.autograd import linear_backward_op, linear_op
from fusedops.linear.reference import keeps_output
from fusedops.norm.autograd import norm_backward_op, norm_op
from fusedops.runtime.library import below_autograd, first_order_only, register

_Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class NormLinear(torch.autograd.Function):
    """Saves what the norm reads and its statistics; the weight's gradient has the norm computed again.

    Otherwise what the linear layer saves: the weight, and the pre-activation or the output if the activation's
    derivative is a function of it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        norm_weight: torch.Tensor | None,
        norm_bias: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        weight_offset: float,
        kind: str,
        activation: str | None,
        dtype: torch.dtype,
        save: bool,
        precision: str,
        compute: Callable[..., Any],
    ) -> _Outputs:
        arguments = (eps, weight_offset, kind, activation)
        output, saved, mean, rstd = compute(
            input, norm_weight, norm_bias, weight, bias, *arguments, dtype, True, precision
        )
        needs = list(ctx.needs_input_grad[:5])
        of_input, of_norm_weight, of_norm_bias, of_weight, _ = needs
        of_normalised = of_input or of_norm_weight or of_norm_bias
        derivative_of = None
        if activation is not None:
            derivative_of = output if keeps_output(activation) else saved
        ctx.save_for_backward(
            input if of_input or of_norm_weight or of_weight else None,
            norm_weight if of_input or of_weight else None,
            norm_bias if of_weight else None,
            weight if of_normalised else None,
            derivative_of,
            mean if of_normalised else None,
            rstd if of_normalised else None,
        )
        tensors = (input, norm_weight, norm_bias, weight, bias)
        transposed = weight.stride(0) == 1 and weight.stride(1) != 1
        ctx.arguments = (
            *arguments, needs, *(dtype if t is None else t.dtype for t in tensors), transposed, precision
        )  # fmt: skip
        ctx.mark_non_differentiable(saved, mean, rstd)
        ctx.set_materialize_grads(False)
        return output, saved, mean, rstd

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_output: torch.Tensor | None, *_: Any) -> Any:
        rest = (None,) * 8
        if grad_output is None:
            return *(None,) * 5, *rest
        grads = norm_linear_backward_op(grad_output, *ctx.saved_tensors, *ctx.arguments)
        return *(g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)), *rest


def _norm_linear(
    input: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    kind: str,
    activation: str | None,
    dtype: torch.dtype,
    save: bool,
    precision: str,
) -> _Outputs:
    """``activation(norm(input) @ weight.T + bias)`` over the last dimension, the norm rounded to ``dtype``.

    Args and results as of the ops ``norm`` and ``linear``; ``save``: the backward will need the pre-activation.
    """
    with below_autograd():
        normalised, _, mean, rstd = norm_op(
            input, None, norm_weight, norm_bias, None, 1, eps, weight_offset, kind, 0.0, dtype, False
        )
        output, saved = linear_op(
            normalised, weight, bias, None, None, None, activation, 0.0, dtype, save, False, precision
        )  # fmt: skip
    return output, saved, mean, rstd


def _norm_linear_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    saved: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    kind: str,
    activation: str | None,
    needs: list[bool],
    input_dtype: torch.dtype,
    norm_weight_dtype: torch.dtype,
    norm_bias_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    transposed: bool,
    precision: str,
) -> _Gradients:
    """Gradients of input, norm_weight, norm_bias, weight and bias; one that is not wanted has shape (0,).

    Each tensor is given if a gradient that is wanted reads it: ``input`` and both norm parameters for ``weight``'s,
    which has the norm computed again, by the op of the forward and so to the same bits.
    """
    of_input, of_norm_weight, of_norm_bias, of_weight, of_bias = needs
    of_normalised = of_input or of_norm_weight or of_norm_bias
    with below_autograd():
        normalised = None
        if of_weight:
            normalised = norm_op(
                input, None, norm_weight, norm_bias, None, 1, eps, weight_offset, kind, 0.0, grad_output.dtype, False
            )[0]
        grad_normalised, dw, db = linear_backward_op(
            grad_output, normalised, weight, saved, None, activation, 0.0, [of_normalised, of_weight, of_bias],
            grad_output.dtype, weight_dtype, bias_dtype, transposed, precision,
        )  # fmt: skip
        del normalised
        if not of_normalised:
            unwanted = [grad_output.new_empty(0, dtype=d) for d in (input_dtype, norm_weight_dtype, norm_bias_dtype)]
            return unwanted[0], unwanted[1], unwanted[2], dw, db
        dx, _, dnw, dnb = norm_backward_op(
            grad_normalised, None, input, norm_weight, None, mean, rstd, None, 1, eps, weight_offset, kind, 0.0, False,
            [of_input, False, of_norm_weight, of_norm_bias],
            input_dtype, input_dtype, norm_weight_dtype, norm_bias_dtype,
        )  # fmt: skip
    return dx, dnw, dnb, dw, db


norm_linear_op = register(
    "norm_linear(Tensor input, Tensor? norm_weight, Tensor? norm_bias, Tensor weight, Tensor? bias, float eps,"
    " float weight_offset, str kind, str? activation, ScalarType dtype, bool save, str precision)"
    " -> (Tensor output, Tensor saved, Tensor mean, Tensor rstd)",
    kernel=_norm_linear,
    fake=_norm_linear,
    function=NormLinear,
)
norm_linear_backward_op = register(
    "norm_linear_backward(Tensor grad_output, Tensor? input, Tensor? norm_weight, Tensor? norm_bias, Tensor? weight,"
    " Tensor? saved, Tensor? mean, Tensor? rstd, float eps, float weight_offset, str kind, str? activation,"
    " bool[] needs, ScalarType input_dtype, ScalarType norm_weight_dtype, ScalarType norm_bias_dtype,"
    " ScalarType weight_dtype, ScalarType bias_dtype, bool transposed, str precision)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    kernel=_norm_linear_backward,
    fake=_norm_linear_backward,
)
