"""The norm family's operators (``torch.ops.fusedops.norm``, ``group_norm``, …) and their autograd Functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusedops.norm import reference
from fusedops.norm.channels import empty_like
from fusedops.runtime.backend import can_launch
from fusedops.runtime.library import first_order_only, register

_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Norm(torch.autograd.Function):
    """The norms, with dropout and a residual before them.

    Saves what was normalised (the input, or the sum with the residual) and the float32 statistics. With ``recompute``
    it saves the output instead, which whoever uses the output has mostly saved as well, and no mean.
    """

    @staticmethod
    def forward(
        ctx: Any,
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
        recompute: bool,
        compute: Callable[..., Any],
    ) -> _Outputs:
        arguments = (dims, eps, weight_offset, kind, dropout_p)
        output, residual_out, mean, rstd = compute(
            input, residual, weight, bias, seed, *arguments, out_dtype, recompute
        )
        saved, saved_bias, kept_mean = input if residual is None else residual_out, None, mean
        if recompute:
            saved, saved_bias, kept_mean = output, bias, mean.new_empty(0)
        if not any(ctx.needs_input_grad[:3]):
            saved = None
        ctx.save_for_backward(saved, weight, saved_bias, kept_mean, rstd, seed)
        dtype = input.dtype
        ctx.dtypes = (dtype, *[dtype if t is None else t.dtype for t in (residual, weight, bias)])
        ctx.arguments = (*arguments, recompute)
        # Parameters are no part of the sum: without a gradient of its own terms it is a constant.
        sum_has_gradient = residual is not None and any(ctx.needs_input_grad[:2])
        ctx.mark_non_differentiable(*(() if sum_has_gradient else (residual_out,)), mean, rstd)
        ctx.set_materialize_grads(False)
        return output, residual_out, mean, rstd

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_output: torch.Tensor | None, grad_residual: torch.Tensor | None, *_: Any) -> Any:
        rest = (None,) * 9
        if grad_output is None:
            return *Norm.backward_of_the_sum(ctx, grad_residual), None, None, *rest
        saved, weight, bias, mean, rstd, seed = ctx.saved_tensors
        dims, eps, weight_offset, kind, dropout_p, from_output = ctx.arguments
        needs, dtypes = list(ctx.needs_input_grad[:4]), ctx.dtypes
        # Without dropout input and residual have one gradient, which is then computed once.
        shared = needs[0] and needs[1] and seed is None and dtypes[0] == dtypes[1]
        needs[0] = needs[0] and not shared
        grads = norm_backward_op(
            grad_output, grad_residual, saved, weight, bias, mean, rstd, seed,
            dims, eps, weight_offset, kind, dropout_p, from_output, needs, *dtypes,
        )  # fmt: skip
        dx, dresidual, dw, db = (grad if need else None for grad, need in zip(grads, needs, strict=True))
        return dresidual if shared else dx, dresidual, dw, db, *rest

    @staticmethod
    def backward_of_the_sum(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of input and residual where no gradient arrives at the output: that of the sum alone, exactly."""
        if grad is None:
            return None, None
        *_, rstd, seed = ctx.saved_tensors
        dims, eps, _, _, dropout_p, _ = ctx.arguments
        (need_dx, need_dresidual, *_), dtypes = ctx.needs_input_grad, ctx.dtypes
        dx = grad
        if need_dx and seed is not None:
            # A rstd of 0: nothing comes through the norm, whatever has gone into it.
            dx, *_ = norm_backward_op(
                grad, grad, grad, None, None, rstd.new_empty(0), torch.zeros_like(rstd), seed,
                dims, eps, 0.0, "rms", dropout_p, False, [True, False, False, False], *dtypes,
            )  # fmt: skip
        return dx.to(dtypes[0]) if need_dx else None, grad.to(dtypes[1]) if need_dresidual else None


def _norm(
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
    recompute: bool,
) -> _Outputs:
    if can_launch(input):
        from fusedops.norm.kernels_forward import norm_forward

        return norm_forward(input, residual, weight, bias, seed, dims, eps, weight_offset, kind, dropout_p, out_dtype)
    return _contiguous(
        reference.norm(input, residual, weight, bias, seed, dims, eps, weight_offset, kind, dropout_p, out_dtype)
    )


def _contiguous(results: _Outputs) -> _Outputs:
    """In the strides that the fake functions promise: torch's operators keep those of their inputs."""
    a, b, c, d = (t.contiguous() for t in results)
    return a, b, c, d


def _norm_fake(
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
    recompute: bool,
) -> _Outputs:
    statistics = reference.compute_dtype(input, residual)
    lead = input.shape[: input.dim() - dims]
    return (
        input.new_empty(input.shape, dtype=out_dtype),
        input.new_empty((0,) if residual is None else input.shape, dtype=reference.residual_dtype(input, residual)),
        input.new_empty(lead if kind == "layer" else (0,), dtype=statistics),
        input.new_empty(lead, dtype=statistics),
    )


def _norm_backward(
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
    needs: list[bool],
    *dtypes: torch.dtype,
) -> _Outputs:
    arguments = (
        grad_output, grad_residual, saved, weight, bias, mean, rstd, seed,
        dims, eps, weight_offset, kind, dropout_p, from_output, tuple(needs), dtypes,
    )  # fmt: skip
    if can_launch(grad_output):
        from fusedops.norm.kernels_backward import norm_backward

        return norm_backward(*arguments)
    return _contiguous(reference.norm_backward(*arguments))


def _norm_backward_fake(grad_output: torch.Tensor, *rest: Any) -> _Outputs:
    dims, needs, dtypes = rest[7], rest[13], rest[14:]
    shape = grad_output.shape
    inner = shape[len(shape) - dims :]
    sizes = zip((shape, shape, inner, inner), needs, dtypes, strict=True)
    a, b, c, d = (grad_output.new_empty(size if need else (0,), dtype=dtype) for size, need, dtype in sizes)
    return a, b, c, d


class GroupNorm(torch.autograd.Function):
    """Group norm. Saves input, weight and the float32 statistics; never the output."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        num_groups: int,
        eps: float,
        out_dtype: torch.dtype,
        compute: Callable[..., Any],
    ) -> _Three:
        output, mean, rstd = compute(input, weight, bias, num_groups, eps, out_dtype)
        ctx.save_for_backward(input if any(ctx.needs_input_grad[:2]) else None, weight, mean, rstd)
        ctx.num_groups = num_groups
        ctx.bias_dtype = input.dtype if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        return output, mean, rstd

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_output: torch.Tensor | None, *_: Any) -> Any:
        rest = (None,) * 4
        if grad_output is None:
            return None, None, None, *rest
        needs = ctx.needs_input_grad[:3]
        grads = group_norm_backward_op(grad_output, *ctx.saved_tensors, ctx.num_groups, needs, ctx.bias_dtype)
        return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), *rest


def _group_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_groups: int,
    eps: float,
    out_dtype: torch.dtype,
) -> _Three:
    if can_launch(input):
        from fusedops.norm.kernels_group import group_norm_forward

        return group_norm_forward(input, weight, bias, num_groups, eps, out_dtype)
    output, mean, rstd = reference.group_norm(input, weight, bias, num_groups, eps, out_dtype)
    return empty_like(input, out_dtype).copy_(output), mean, rstd


def _group_norm_fake(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_groups: int,
    eps: float,
    out_dtype: torch.dtype,
) -> _Three:
    shape, dtype = (input.shape[0], num_groups), reference.compute_dtype(input, None)
    return empty_like(input, out_dtype), input.new_empty(shape, dtype=dtype), input.new_empty(shape, dtype=dtype)


def _group_norm_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor | None,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    num_groups: int,
    needs: list[bool],
    bias_dtype: torch.dtype,
) -> _Three:
    if input is None:  # the gradient of the bias does not depend on it
        input = grad_output
    if can_launch(grad_output):
        from fusedops.norm.kernels_group_backward import group_norm_backward

        dx, dw, db = needs
        return group_norm_backward(grad_output, input, weight, mean, rstd, num_groups, (dx, dw, db), bias_dtype)
    results = _group_norm_backward_fake(grad_output, input, weight, mean, rstd, num_groups, needs, bias_dtype)
    grads = reference.group_norm_backward(grad_output, input, weight, mean, rstd, num_groups)
    for result, grad, need in zip(results, grads, needs, strict=True):
        if need:
            result.copy_(grad)
    return results


def _group_norm_backward_fake(
    grad_output: torch.Tensor,
    input: torch.Tensor | None,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    num_groups: int,
    needs: list[bool],
    bias_dtype: torch.dtype,
) -> _Three:
    x = grad_output if input is None else input
    need_dx, need_dw, need_db = needs
    return (
        empty_like(x, x.dtype) if need_dx else x.new_empty(0),
        x.new_empty(x.shape[1] if need_dw else 0, dtype=(x if weight is None else weight).dtype),
        x.new_empty(x.shape[1] if need_db else 0, dtype=bias_dtype),
    )


# An output that does not apply, or an unwanted gradient, has shape (0,): a library op returns tensors only.
norm_op = register(
    "norm(Tensor input, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? seed, int dims, float eps,"
    " float weight_offset, str kind, float dropout_p, ScalarType out_dtype, bool recompute)"
    " -> (Tensor output, Tensor residual_out, Tensor mean, Tensor rstd)",
    kernel=_norm,
    fake=_norm_fake,
    function=Norm,
)
norm_backward_op = register(
    "norm_backward(Tensor grad_output, Tensor? grad_residual, Tensor? saved, Tensor? weight, Tensor? bias,"
    " Tensor mean, Tensor rstd, Tensor? seed, int dims, float eps, float weight_offset, str kind, float dropout_p,"
    " bool from_output, bool[] needs, ScalarType input_dtype, ScalarType residual_dtype, ScalarType weight_dtype,"
    " ScalarType bias_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    kernel=_norm_backward,
    fake=_norm_backward_fake,
)
group_norm_op = register(
    "group_norm(Tensor input, Tensor? weight, Tensor? bias, int num_groups, float eps, ScalarType out_dtype)"
    " -> (Tensor output, Tensor mean, Tensor rstd)",
    kernel=_group_norm,
    fake=_group_norm_fake,
    function=GroupNorm,
)
group_norm_backward_op = register(
    "group_norm_backward(Tensor grad_output, Tensor? input, Tensor? weight, Tensor mean, Tensor rstd, int num_groups,"
    " bool[] needs, ScalarType bias_dtype) -> (Tensor, Tensor, Tensor)",
    kernel=_group_norm_backward,
    fake=_group_norm_backward_fake,
)
