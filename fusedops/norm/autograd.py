"""The norm family's operators (``torch.ops.fusedops.norm``, ``norm_backward``) and their autograd Function."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.norm import reference
from fusedops.runtime.backend import can_launch
from fusedops.runtime.library import below_autograd, first_order_only, register

_Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Norm(torch.autograd.Function):
    """Layer norm and RMS norm. Saves input, weight and the float32 statistics; never the output."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        dims: int,
        eps: float,
        weight_offset: float,
        center: bool,
        out_dtype: torch.dtype,
    ) -> _Outputs:
        with below_autograd():
            output, mean, rstd = norm_op(input, weight, bias, dims, eps, weight_offset, center, out_dtype)
        ctx.save_for_backward(input, weight, mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.arguments = (dims, weight_offset, center)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        return output, mean, rstd

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_output: torch.Tensor | None, *_: Any) -> Any:
        rest = (None,) * 5
        if grad_output is None:
            return None, None, None, *rest
        input, weight, mean, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        grads = norm_backward_op(
            grad_output, input, weight, mean, rstd, *ctx.arguments, *needs, ctx.bias_dtype or rstd.dtype
        )
        return *(g if need else None for g, need in zip(grads, needs, strict=True)), *rest


def _norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dims: int,
    eps: float,
    weight_offset: float,
    center: bool,
    out_dtype: torch.dtype,
) -> _Outputs:
    if can_launch(input):
        from fusedops.norm.kernels_norm import norm_forward as forward
    else:
        forward = reference.norm
    return forward(input, weight, bias, dims, eps, weight_offset, center, out_dtype)


def _norm_fake(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dims: int,
    eps: float,
    weight_offset: float,
    center: bool,
    out_dtype: torch.dtype,
) -> _Outputs:
    statistics = torch.float64 if input.dtype == torch.float64 else torch.float32
    lead = input.shape[: input.dim() - dims]
    mean = input.new_empty(lead if center else (0,), dtype=statistics)
    return input.new_empty(input.shape, dtype=out_dtype), mean, input.new_empty(lead, dtype=statistics)


def _norm_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    dims: int,
    weight_offset: float,
    center: bool,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
    bias_dtype: torch.dtype,
) -> _Outputs:
    needs = (need_input, need_weight, need_bias)
    if can_launch(input):
        from fusedops.norm.kernels_norm import norm_backward

        return norm_backward(grad_output, input, weight, mean, rstd, dims, weight_offset, center, needs, bias_dtype)
    grads = reference.norm_backward(grad_output, input, weight, mean, rstd, dims, weight_offset, center)
    dtypes = (input.dtype, input.dtype if weight is None else weight.dtype, bias_dtype)
    empty = input.new_empty(0)
    dx, dw, db = (g.to(t) if need else empty.to(t) for g, need, t in zip(grads, needs, dtypes, strict=True))
    return dx, dw, db


def _norm_backward_fake(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    dims: int,
    weight_offset: float,
    center: bool,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
    bias_dtype: torch.dtype,
) -> _Outputs:
    shape = input.shape[input.dim() - dims :]
    weight_dtype = input.dtype if weight is None else weight.dtype
    return (
        input.new_empty(input.shape if need_input else (0,)),
        input.new_empty(shape if need_weight else (0,), dtype=weight_dtype),
        input.new_empty(shape if need_bias else (0,), dtype=bias_dtype),
    )


# An unwanted gradient comes back as an empty tensor of shape (0,): a library op returns tensors only.
norm_op = register(
    "norm(Tensor input, Tensor? weight, Tensor? bias, int dims, float eps, float weight_offset, bool center,"
    " ScalarType out_dtype) -> (Tensor output, Tensor mean, Tensor rstd)",
    kernel=_norm,
    fake=_norm_fake,
    function=Norm,
)
norm_backward_op = register(
    "norm_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, Tensor rstd, int dims,"
    " float weight_offset, bool center, bool need_input, bool need_weight, bool need_bias, ScalarType bias_dtype)"
    " -> (Tensor, Tensor, Tensor)",
    kernel=_norm_backward,
    fake=_norm_backward_fake,
)
