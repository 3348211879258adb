"""The operators of the quantised products (``torch.ops.fusedops.fp8_linear``, ``quantized_linear``).

They have no derivative: where a gradient is required they raise, rather than lose it.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from fusedops.linear import reference_quantized as reference
from fusedops.runtime.backend import backend_mode, device_reasons, float8_reasons
from fusedops.runtime.library import register


class _Refused(torch.autograd.Function):
    """What autograd applies where an argument requires a gradient."""

    @classmethod
    def refuse(cls, *args: Any) -> NoReturn:
        operator = cls.__name__
        asking = ", ".join(
            f"argument {i} ({tuple(a.shape)})"
            for i, a in enumerate(args)
            if isinstance(a, torch.Tensor) and a.requires_grad
        )
        raise RuntimeError(
            f"fusedops {operator}: the kernels are for inference and have no gradient, which {asking} requires. Call it"
            ' under torch.no_grad() or detach what requires one; `with fusedops.backend("torch"):` computes it with'
            " torch's operators, which have gradients."
        )


class Fp8Linear(_Refused):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> NoReturn:
        Fp8Linear.refuse(*args)


class QuantizedLinear(_Refused):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> NoReturn:
        QuantizedLinear.refuse(*args)


def fp8_unsupported(input: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> list[str]:
    """Every reason why the float8 kernel cannot take these arguments, which have been checked."""
    reasons = device_reasons(input.device, (out_dtype,))
    return reasons or float8_reasons(input.device, (input.dtype, weight.dtype))


def quantized_unsupported(input: torch.Tensor, dtype: torch.dtype, out_dtype: torch.dtype) -> list[str]:
    """Every reason why the weight-only kernels cannot take these arguments, multiplied in ``dtype``."""
    return device_reasons(input.device, (dtype, out_dtype))


def _fp8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    scale_input: torch.Tensor,
    scale_weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    if backend_mode() == "torch" or fp8_unsupported(input, weight, out_dtype):
        forward = reference.fp8_linear
    else:
        from fusedops.linear.kernels_fp8 import fp8_linear as forward
    return forward(input, weight, scale_input, scale_weight, bias, activation, out_dtype)


def _fp8_linear_fake(
    input: torch.Tensor,
    weight: torch.Tensor,
    scale_input: torch.Tensor,
    scale_weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]), dtype=out_dtype)


def _quantized_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    group_size: int | None,
    out_dtype: torch.dtype,
    precision: str,
) -> torch.Tensor:
    if backend_mode() == "torch" or quantized_unsupported(input, input.dtype, out_dtype):
        forward = reference.quantized_linear
    else:
        from fusedops.linear.kernels_quantized import quantized_linear as forward
    return forward(input, weight, scales, bias, activation, group_size, out_dtype, precision)


def _quantized_linear_fake(
    input: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    group_size: int | None,
    out_dtype: torch.dtype,
    precision: str,
) -> torch.Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]), dtype=out_dtype)


fp8_linear_op = register(
    "fp8_linear(Tensor input, Tensor weight, Tensor scale_input, Tensor scale_weight, Tensor? bias, str? activation,"
    " ScalarType out_dtype) -> Tensor",
    kernel=_fp8_linear,
    fake=_fp8_linear_fake,
    function=Fp8Linear,
)
quantized_linear_op = register(
    "quantized_linear(Tensor input, Tensor weight, Tensor scales, Tensor? bias, str? activation, int? group_size,"
    " ScalarType out_dtype, str precision) -> Tensor",
    kernel=_quantized_linear,
    fake=_quantized_linear_fake,
    function=QuantizedLinear,
)
