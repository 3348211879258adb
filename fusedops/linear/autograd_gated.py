"""The gated product's operators (``torch.ops.fusedops.gated_linear``, ``gated_linear_backward``) and their Function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusedops.linear import reference_gated as reference
from fusedops.runtime.backend import can_launch
from fusedops.runtime.library import first_order_only, register

MaybeTensor = torch.Tensor | None


class GatedLinear(torch.autograd.Function):
    """Saves the input for the weights' gradients, the weights for the input's, and the two pre-activations.

    With ``recompute`` those are not kept: then all of the inputs are.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight_gate: torch.Tensor,
        weight_up: MaybeTensor,
        bias_gate: MaybeTensor,
        bias_up: MaybeTensor,
        activation: str | None,
        out_dtype: torch.dtype | None,
        recompute: bool,
        save: bool,
        precision: str,
        compute: Callable[..., Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = (input, weight_gate, weight_up, bias_gate, bias_up)
        output, saved = compute(*tensors, activation, out_dtype, recompute, True, precision)
        needs = list(ctx.needs_input_grad[:5])
        if recompute:
            ctx.save_for_backward(*tensors, None)
        else:
            x = input if needs[1] or needs[2] else None
            weights = (weight_gate, weight_up) if needs[0] else (None, None)
            ctx.save_for_backward(x, *weights, None, None, saved)
        packed = weight_up is None
        weights = weight_gate, weight_gate if weight_up is None else weight_up
        dtypes = [t.dtype for t in weights]
        dtypes += [input.dtype if t is None else t.dtype for t in (bias_gate, bias_up)]
        transposed = [t.stride(0) == 1 and t.stride(1) != 1 for t in weights]
        ctx.arguments = (packed, activation, needs, *dtypes, transposed, precision)
        ctx.mark_non_differentiable(saved)
        ctx.set_materialize_grads(False)
        return output, saved

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_output: MaybeTensor, _: Any) -> Any:
        if grad_output is None:
            return (None,) * 11
        grads = gated_linear_backward_op(grad_output, *ctx.saved_tensors, *ctx.arguments)
        return *(g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)), *(None,) * 6


def _gated_linear(
    input: torch.Tensor,
    weight_gate: torch.Tensor,
    weight_up: MaybeTensor,
    bias_gate: MaybeTensor,
    bias_up: MaybeTensor,
    activation: str | None,
    out_dtype: torch.dtype | None,
    recompute: bool,
    save: bool,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    if can_launch(input):
        from fusedops.linear.kernels_gated import gated_linear as forward
    else:
        forward = reference.gated_linear
    return forward(input, weight_gate, weight_up, bias_gate, bias_up, activation, out_dtype, recompute, save, precision)


def _gated_linear_fake(
    input: torch.Tensor,
    weight_gate: torch.Tensor,
    weight_up: MaybeTensor,
    bias_gate: MaybeTensor,
    bias_up: MaybeTensor,
    activation: str | None,
    out_dtype: torch.dtype | None,
    recompute: bool,
    save: bool,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    lead = input.shape[:-1]
    N = weight_gate.shape[0] // 2 if weight_up is None else weight_gate.shape[0]
    output = input.new_empty((*lead, N), dtype=out_dtype or input.dtype)
    return output, input.new_empty((*lead, 2 * N) if save and not recompute else (0,))


def _gated_linear_backward(
    grad_output: torch.Tensor,
    input: MaybeTensor,
    weight_gate: MaybeTensor,
    weight_up: MaybeTensor,
    bias_gate: MaybeTensor,
    bias_up: MaybeTensor,
    saved: MaybeTensor,
    packed: bool,
    activation: str | None,
    needs: list[bool],
    weight_gate_dtype: torch.dtype,
    weight_up_dtype: torch.dtype,
    bias_gate_dtype: torch.dtype,
    bias_up_dtype: torch.dtype,
    transposed: list[bool],
    precision: str,
) -> tuple[torch.Tensor, ...]:
    operand = saved if input is None else input
    assert operand is not None
    if can_launch(operand) and can_launch(grad_output):
        from fusedops.linear.kernels_gated_backward import gated_linear_backward as backward
    else:
        backward = reference.gated_linear_backward
    dtypes = (weight_gate_dtype, weight_up_dtype, bias_gate_dtype, bias_up_dtype)
    tensors = (input, weight_gate, weight_up, bias_gate, bias_up, saved)
    return backward(grad_output, *tensors, packed, activation, needs, dtypes, (transposed[0], transposed[1]), precision)


def _gated_linear_backward_fake(
    grad_output: torch.Tensor,
    input: MaybeTensor,
    weight_gate: MaybeTensor,
    weight_up: MaybeTensor,
    bias_gate: MaybeTensor,
    bias_up: MaybeTensor,
    saved: MaybeTensor,
    packed: bool,
    activation: str | None,
    needs: list[bool],
    weight_gate_dtype: torch.dtype,
    weight_up_dtype: torch.dtype,
    bias_gate_dtype: torch.dtype,
    bias_up_dtype: torch.dtype,
    transposed: list[bool],
    precision: str,
) -> tuple[torch.Tensor, ...]:
    operand = saved if input is None else input
    assert operand is not None
    dtypes = (weight_gate_dtype, weight_up_dtype, bias_gate_dtype, bias_up_dtype)
    return reference.empty_gradients(
        grad_output, input, weight_gate, packed, needs, dtypes, (transposed[0], transposed[1]), operand.dtype
    )


# An unwanted gradient comes back as an empty tensor of shape (0,): a library op returns tensors only.
gated_linear_op = register(
    "gated_linear(Tensor input, Tensor weight_gate, Tensor? weight_up, Tensor? bias_gate, Tensor? bias_up,"
    " str? activation, ScalarType? out_dtype, bool recompute, bool save, str precision)"
    " -> (Tensor output, Tensor saved)",
    kernel=_gated_linear,
    fake=_gated_linear_fake,
    function=GatedLinear,
)
gated_linear_backward_op = register(
    "gated_linear_backward(Tensor grad_output, Tensor? input, Tensor? weight_gate, Tensor? weight_up,"
    " Tensor? bias_gate, Tensor? bias_up, Tensor? saved, bool packed, str? activation, bool[5] needs,"
    " ScalarType weight_gate_dtype, ScalarType weight_up_dtype, ScalarType bias_gate_dtype, ScalarType bias_up_dtype,"
    " bool[2] transposed, str precision) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    kernel=_gated_linear_backward,
    fake=_gated_linear_backward_fake,
)
