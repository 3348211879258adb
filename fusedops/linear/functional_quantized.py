"""The quantised products of the family, for inference: check the arguments, choose a backend, call the operator."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.linear import reference_quantized as reference
from fusedops.linear.activations import check_activation
from fusedops.linear.autograd_quantized import (
    fp8_linear_op,
    fp8_unsupported,
    quantized_linear_op,
    quantized_unsupported,
)
from fusedops.runtime.backend import explainable, might_use_triton, use_triton
from fusedops.runtime.checks import (
    check_bool,
    check_dtype,
    check_parameter,
    check_same_device,
    check_tensor,
    wrong_type,
    wrong_value,
)
from fusedops.runtime.precision import autocast_dtype, float32_precision
from fusedops.runtime.sharded import sharded

_OCP = (torch.float8_e4m3fn, torch.float8_e5m2)
_FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_FP8 = _OCP + _FNUZ
_FP8_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FP8)
_OUT = (torch.bfloat16, torch.float16, torch.float32)


def _check_refused_gradient(function: str, *arguments: torch.Tensor | None) -> None:
    """The kernels have no gradient; to lose one in silence would be worse than to stop."""
    if torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in arguments):
        raise RuntimeError(
            f"fusedops.{function}: the kernels are for inference and have no gradient, but an argument requires one."
            ' Call it under torch.no_grad() or detach the argument; `with fusedops.backend("torch"):` computes it with'
            " torch's operators, which have gradients."
        )


def _check_strided(function: str, argument: str, value: Any, dtypes: tuple[torch.dtype, ...], names: str) -> None:
    if not isinstance(value, torch.Tensor):
        wrong_type(function, argument, "a torch.Tensor", value)
    if value.dtype not in dtypes or value.layout is not torch.strided:
        wrong_type(function, argument, f"a strided tensor of {names}", value)


def _check_scale(
    function: str, argument: str, value: torch.Tensor, rows: tuple[int, ...], input: torch.Tensor, takes: str
) -> None:
    _check_strided(function, argument, value, (torch.float32,), "float32")
    if value.numel() != 1 and value.shape != rows and value.shape != (*rows, 1):
        wrong_value(function, argument, f"of one element, or {takes}", value)
    check_same_device(function, argument, value, "input", input)


def _check_fp8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    scale_input: torch.Tensor,
    scale_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> None:
    function = "fp8_linear"
    _check_strided(function, "input", input, _FP8, f"a float8 dtype ({_FP8_NAMES})")
    _check_strided(function, "weight", weight, _FP8, f"a float8 dtype ({_FP8_NAMES})")
    if not input.ndim:
        wrong_value(function, "input", "of at least one dimension (..., in_features)", input)
    size = input.shape[-1]
    if weight.ndim != 2 or weight.shape[1] != size:
        wrong_value(function, "weight", f"of shape (out_features, {size}), {size} being input's last size", weight)
    check_same_device(function, "weight", weight, "input", input)
    if (input.dtype in _OCP) != (weight.dtype in _OCP):
        wrong_type(function, "weight", f"of input's kind of float8 ({input.dtype}): both fnuz or both not", weight)
    lead, out_features = tuple(input.shape[:-1]), weight.shape[0]
    takes = f"one for each row of input: of shape {lead} or {(*lead, 1)}"
    _check_scale(function, "scale_input", scale_input, lead, input, takes)
    takes = f"one for each row of weight: of shape ({out_features},) or ({out_features}, 1)"
    _check_scale(function, "scale_weight", scale_weight, (out_features,), input, takes)
    check_parameter(function, "bias", bias, (out_features,), input, "of shape {}, one for each row of weight")
    check_activation(function, activation)
    if not isinstance(out_dtype, torch.dtype):
        wrong_type(function, "out_dtype", "a torch.dtype", out_dtype)
    if out_dtype not in _OUT:
        wrong_value(function, "out_dtype", "bfloat16, float16 or float32", out_dtype)


def _fp8_linear_reasons(*args: Any, **kwargs: Any) -> tuple[torch.device, list[str]]:
    _check_fp8_linear(*args, **kwargs)
    named = dict(zip(("input", "weight"), args, strict=False)) | kwargs
    input = named["input"]
    return input.device, fp8_unsupported(input, named["weight"], kwargs.get("out_dtype", torch.bfloat16))


@explainable(_fp8_linear_reasons)
def fp8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    scale_input: torch.Tensor,
    scale_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """A product of float8 numbers with scales, bias and activation, for inference.

    ``activation((input @ weight.T) * scale_input * scale_weight + bias)``: a stored number q stands for q · scale
    (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"). Scales, bias and activation are applied in float32 and
    the result is rounded once. :func:`quantize_fp8` makes the operands.

    A 16-bit result is multiplied on the float8 tensor cores. Those of sm_89, sm_90 and sm_120 keep about 13 bits of a
    running sum, too few for a long one: so the sums of each step (32 to 128 products) are added in float32, as in
    cuBLAS without ``use_fast_accum``. A float32 result is multiplied as float16 on these GPUs, which is exact and half
    as fast. Other matrix cores sum float8 in float32. Where no kernel serves a call (``fusedops.explain`` says why),
    the operands are converted to float32 and multiplied there.

    Args:
        input: (..., in_features), float8_e4m3fn or float8_e5m2 (kernels: sm_89 and newer, gfx950), or float8_e4m3fnuz
            or float8_e5m2fnuz (kernels: gfx942). Any strides; copied unless the last dimension has unit stride.
        weight: (out_features, in_features), a float8 dtype of the same kind, not necessarily the same; as ``input``.
        scale_input: float32 on the input's device: one element, or one for each row, (...) or (..., 1).
        scale_weight: float32: one element, or one for each row, (out_features) or (out_features, 1).
        bias: (out_features), any floating dtype, or None.
        activation: None or a name that :func:`fusedops.linear` takes.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        (..., out_features) of ``out_dtype``.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or name; the message names it.
        RuntimeError: an argument requires a gradient, which the kernels do not have (the torch backend does).

    Examples:
        >>> import torch
        >>> from fusedops import fp8_linear, quantize_fp8
        >>> x, scale_x = quantize_fp8(torch.tensor([[1.0, 2.0]]))
        >>> w, scale_w = quantize_fp8(torch.tensor([[3.0, 0.0], [0.0, -4.0]]), per_row=True)
        >>> fp8_linear(x, w, scale_x, scale_w, out_dtype=torch.float32).round(decimals=3)
        tensor([[ 3., -8.]])
    """
    _check_fp8_linear(input, weight, scale_input, scale_weight, bias, activation, out_dtype=out_dtype)
    if (
        might_use_triton(input.device)
        and use_triton("fp8_linear", fp8_unsupported(input, weight, out_dtype), input.device)
    ) or sharded(input):
        _check_refused_gradient("fp8_linear", input, weight, scale_input, scale_weight, bias)
        return fp8_linear_op(input, weight, scale_input, scale_weight, bias, activation, out_dtype)
    return reference.fp8_linear(input, weight, scale_input, scale_weight, bias, activation, out_dtype)


def quantize_fp8(
    tensor: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, per_row: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operand of :func:`fp8_linear` that stands for a tensor, and its scale.

    ``scale = max|t| / (largest number of dtype)`` over the finite elements of the tensor or of each row; 1 where all
    are zero. Infinities become the largest number, NaN stays NaN. No gradient passes.

    Args:
        tensor: (..., size), float32, float16, bfloat16 or float64.
        dtype: a float8 dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz.
        per_row: a scale for each row of the last dimension instead of one for the tensor.

    Returns:
        quantized: of ``dtype`` and of the tensor's shape.
        scale: float32, of shape (), or (..., 1) with ``per_row``.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype or shape; the message names it.

    Examples:
        >>> import torch
        >>> from fusedops import quantize_fp8
        >>> quantized, scale = quantize_fp8(torch.tensor([1.0, -448.0]))
        >>> quantized.float(), scale
        (tensor([   1., -448.]), tensor(1.))
    """
    check_tensor("quantize_fp8", "tensor", tensor)
    if not isinstance(dtype, torch.dtype):
        wrong_type("quantize_fp8", "dtype", "a torch.dtype", dtype)
    if dtype not in _FP8:
        wrong_value("quantize_fp8", "dtype", f"a float8 dtype ({_FP8_NAMES})", dtype)
    check_bool("quantize_fp8", "per_row", per_row)
    if per_row and not tensor.ndim:
        wrong_value("quantize_fp8", "tensor", "of at least one dimension with per_row", tensor)
    return reference.quantize_fp8(tensor.detach(), dtype, per_row)


def _check_group_size(function: str, group_size: int | None, in_features: int) -> None:
    if group_size is None:
        return
    takes = f"None or a multiple of 16 that divides in_features ({in_features})"
    if not isinstance(group_size, int) or isinstance(group_size, bool):
        wrong_type(function, "group_size", takes, group_size)
    if group_size <= 0 or group_size % 16 or in_features % group_size:
        wrong_value(function, "group_size", takes, group_size)


def _check_weight(
    function: str,
    weight: torch.Tensor,
    scales: torch.Tensor,
    group_size: int | None,
    scale_dtypes: tuple[torch.dtype, ...],
) -> int:
    """Raise, naming the argument, or say how many in_features the weight has."""
    _check_strided(function, "weight", weight, (torch.int8, torch.uint8), "int8, or uint8 with two int4 a byte")
    if weight.ndim != 2:
        wrong_value(function, "weight", "of two dimensions (out_features, in_features; half of that if uint8)", weight)
    in_features = weight.shape[1] * (2 if weight.dtype == torch.uint8 else 1)
    _check_group_size(function, group_size, in_features)
    names = " or ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in scale_dtypes))
    _check_strided(function, "scales", scales, scale_dtypes, names)
    rows = weight.shape[0]
    if group_size is None:
        if scales.shape != (rows,) and scales.shape != (rows, 1):
            wrong_value(function, "scales", f"of shape ({rows},), one for each row of weight", scales)
    elif scales.shape != (rows, in_features // group_size):
        shape = (rows, in_features // group_size)
        wrong_value(function, "scales", f"of shape {shape}, one for each group of {group_size}", scales)
    check_same_device(function, "scales", scales, "weight", weight)
    return in_features


def _check_quantized_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    group_size: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> None:
    function = "quantized_linear"
    check_tensor(function, "input", input)
    if not input.ndim:
        wrong_value(function, "input", "of at least one dimension (..., in_features)", input)
    in_features = _check_weight(function, weight, scales, group_size, (torch.float32, input.dtype))
    if in_features != input.shape[-1]:
        size = input.shape[-1]
        takes = f"of {size} in_features, input's last size (uint8 holds two a byte)"
        wrong_value(function, "weight", takes, weight)
    check_same_device(function, "weight", weight, "input", input)
    takes = "of shape {}, one for each row of weight"
    check_parameter(function, "bias", bias, (weight.shape[0],), input, takes)
    check_activation(function, activation)
    if out_dtype is not None:
        check_dtype(function, "out_dtype", out_dtype)


def _quantized_linear_reasons(*args: Any, **kwargs: Any) -> tuple[torch.device, list[str]]:
    _check_quantized_linear(*args, **kwargs)
    input = args[0] if args else kwargs["input"]
    dtype = autocast_dtype(input)
    return input.device, quantized_unsupported(input, dtype, kwargs.get("out_dtype") or dtype)


@explainable(_quantized_linear_reasons)
def quantized_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    group_size: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A linear layer whose weight is kept as int8 or int4, for inference: ``activation(input @ W.T + bias)``.

    ``W`` is what :func:`dequantize_weight` gives for ``weight`` and ``scales``, of :func:`quantize_weight`'s format.
    A quarter or a half of the weight's bytes are read, which is what a product with few rows takes its time for. The
    integers become numbers of the input's dtype in registers, which is exact; their products are summed in float32, and
    the scales multiply the sums of each group there, as do bias and activation; the result is rounded once. The weight
    as rounded in :func:`quantize_weight` is the only thing that is lost. For few rows the summed dimension is split
    among programs whose sums a second kernel adds, always in the same order: results are the same in every run.

    Args:
        input: (..., in_features), float32, float16 or bfloat16 (float64 on the torch backend). Any strides; copied
            unless the last dimension has unit stride.
        weight: (out_features, in_features) int8, or (out_features, in_features / 2) uint8 with two int4 a byte: element
            2j in the low four bits, 2j + 1 in the high ones, each the value plus 8. It is copied in every call unless
            a row is contiguous and rows start at multiples of 4 bytes.
        scales: float32 or the input's dtype: (out_features), or (out_features, in_features / group_size).
        bias: (out_features), any floating dtype, or None.
        activation: None or a name that :func:`fusedops.linear` takes.
        group_size: how many neighbours of a row have one scale: a multiple of 16 that divides in_features; best a
            multiple of 128. None: the whole row.
        out_dtype: of the result; None: the input's dtype (under autocast: autocast's).

    Returns:
        (..., out_features) of ``out_dtype``.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or name; the message names it.
        RuntimeError: an argument requires a gradient, which the kernels do not have (the torch backend does).

    Examples:
        >>> import torch
        >>> from fusedops import quantize_weight, quantized_linear
        >>> weight, scales = quantize_weight(torch.tensor([[7.0, -3.0], [0.5, 3.5]]), bits=4)
        >>> quantized_linear(torch.tensor([1.0, 2.0]), weight, scales)
        tensor([1.0000, 7.5000])
    """
    _check_quantized_linear(input, weight, scales, bias, activation, group_size=group_size, out_dtype=out_dtype)
    dtype = autocast_dtype(input)
    out = dtype if out_dtype is None else out_dtype
    if (
        might_use_triton(input.device)
        and use_triton("quantized_linear", quantized_unsupported(input, dtype, out), input.device)
    ) or sharded(input):
        _check_refused_gradient("quantized_linear", input, scales, bias)
        x = input.to(dtype)
        return quantized_linear_op(x, weight, scales, bias, activation, group_size, out, float32_precision(x))
    return reference.quantized_linear(input.to(dtype), weight, scales, bias, activation, group_size, out, "ieee")


def quantize_weight(
    weight: torch.Tensor, bits: int = 8, group_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight of :func:`quantized_linear` that stands for a weight, and its scales. No gradient passes.

    Symmetric, rounded to nearest: ``scale = max|w| / 127`` (int4: / 7) over a row or each group of it, as the
    group-wise quantisation of weights in Yao et al. 2022, "ZeroQuant"; 1 where all are zero. A row or group that holds
    an infinity or NaN gets the scale NaN: its results are NaN.

    Args:
        weight: (out_features, in_features), float32, float16, bfloat16 or float64.
        bits: 8, or 4 (in_features even).
        group_size: how many neighbours of a row have one scale: a multiple of 16 that divides in_features. None: all.

    Returns:
        quantized: (out_features, in_features) int8, or (out_features, in_features / 2) uint8.
        scales: float32, (out_features), or (out_features, in_features / group_size).

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype or shape; the message names it.

    Examples:
        >>> import torch
        >>> from fusedops import dequantize_weight, quantize_weight
        >>> quantized, scales = quantize_weight(torch.tensor([[1.0, -127.0]]))
        >>> quantized, dequantize_weight(quantized, scales)
        (tensor([[   1, -127]], dtype=torch.int8), tensor([[   1., -127.]]))
    """
    function = "quantize_weight"
    check_tensor(function, "weight", weight)
    if weight.ndim != 2:
        wrong_value(function, "weight", "of two dimensions (out_features, in_features)", weight)
    if not isinstance(bits, int) or isinstance(bits, bool):
        wrong_type(function, "bits", "8 or 4", bits)
    if bits not in (8, 4):
        wrong_value(function, "bits", "8 or 4", bits)
    if bits == 4 and weight.shape[1] % 2:
        wrong_value(function, "weight", "of an even number of in_features with bits=4", weight)
    _check_group_size(function, group_size, weight.shape[1])
    return reference.quantize_weight(weight.detach(), bits, group_size)


def dequantize_weight(
    weight: torch.Tensor,
    scales: torch.Tensor,
    *,
    group_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The weight that an int8 or int4 one stands for, q · scale: the way back from :func:`quantize_weight`.

    Args:
        weight, scales, group_size: as for :func:`quantized_linear`; the scales of any floating dtype.
        dtype: of the result.

    Returns:
        (out_features, in_features) of ``dtype``.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device; the message names it.

    Examples:
        >>> import torch
        >>> from fusedops import dequantize_weight
        >>> dequantize_weight(torch.tensor([[0x1F]], dtype=torch.uint8), torch.tensor([0.5]))
        tensor([[ 3.5000, -3.5000]])
    """
    function = "dequantize_weight"
    check_dtype(function, "dtype", dtype)
    _check_weight(function, weight, scales, group_size, (*_OUT, torch.float64))
    return reference.dequantize_weight(weight, scales, group_size, dtype)
