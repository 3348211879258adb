"""The public functions of the norm family: check the arguments, choose a backend, call the operator."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedops.norm import reference
from fusedops.norm.autograd import norm_op
from fusedops.runtime.backend import device_reasons, explainable, might_use_triton, use_triton
from fusedops.runtime.checks import check_number, check_same_device, check_tensor, wrong_type, wrong_value

# torch's default for rms_norm: the machine epsilon of the dtype that the statistics are computed in.
_EPS = {torch.float64: torch.finfo(torch.float64).eps}
_EPS_FLOAT32 = torch.finfo(torch.float32).eps

# Column indices are int32 in the kernels, with room for a block past the end.
_MAX_WIDTH = 2**30


def _check_shape(function: str, input: torch.Tensor, normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    check_tensor(function, "input", input)
    if isinstance(normalized_shape, int):
        shape: tuple[int, ...] = (normalized_shape,)
    else:
        try:
            shape = tuple(normalized_shape)
        except TypeError:
            wrong_type(function, "normalized_shape", "an int or a sequence of ints", normalized_shape)
    if not shape:
        wrong_value(function, "normalized_shape", "of at least one dimension", normalized_shape)
    if input.shape[-len(shape) :] != shape:
        for size in shape:
            if not isinstance(size, (int, torch.SymInt)):
                wrong_type(function, "normalized_shape", "an int or a sequence of ints", normalized_shape)
        wrong_value(function, "normalized_shape", f"the last dimensions of input {tuple(input.shape)}", shape)
    return shape


def _check_parameter(
    function: str, argument: str, value: torch.Tensor | None, shape: tuple[int, ...], input: torch.Tensor
) -> None:
    if value is None:
        return
    check_tensor(function, argument, value)
    if value.shape != shape:
        wrong_value(function, argument, f"of normalized_shape {shape}", value)
    check_same_device(function, argument, value, "input", input)


def _check_layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):  # type: ignore[no-untyped-def]
    shape = _check_shape("layer_norm", input, normalized_shape)
    _check_parameter("layer_norm", "weight", weight, shape, input)
    _check_parameter("layer_norm", "bias", bias, shape, input)
    check_number("layer_norm", "eps", eps)
    return shape


def _check_rms_norm(input, normalized_shape, weight=None, eps=None, *, weight_offset=0.0):  # type: ignore[no-untyped-def]
    shape = _check_shape("rms_norm", input, normalized_shape)
    _check_parameter("rms_norm", "weight", weight, shape, input)
    if eps is not None:
        check_number("rms_norm", "eps", eps)
    check_number("rms_norm", "weight_offset", weight_offset)
    return shape


def unsupported(
    input: torch.Tensor, shape: tuple[int, ...], weight: torch.Tensor | None, bias: torch.Tensor | None
) -> list[str]:
    """Every reason why the norm kernels cannot take these arguments."""
    dtypes = (input.dtype, *(p.dtype for p in (weight, bias) if p is not None))
    reasons = device_reasons(input.device, dtypes)
    width = 1
    for size in shape:
        width *= size
    if width > _MAX_WIDTH:
        reasons.append(f"a row has {width} elements: the kernels take up to {_MAX_WIDTH}")
    return reasons


def _layer_norm_reasons(input, normalized_shape, weight=None, bias=None, eps=1e-5):  # type: ignore[no-untyped-def]
    shape = _check_layer_norm(input, normalized_shape, weight, bias, eps)
    return input.device, unsupported(input, shape, weight, bias)


def _rms_norm_reasons(input, normalized_shape, weight=None, eps=None, *, weight_offset=0.0):  # type: ignore[no-untyped-def]
    shape = _check_rms_norm(input, normalized_shape, weight, eps, weight_offset=weight_offset)
    return input.device, unsupported(input, shape, weight, None)


@explainable(_layer_norm_reasons)
def layer_norm(
    input: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Layer normalisation over the last dimensions, as :func:`torch.nn.functional.layer_norm`.

    ``y = (x - mean) / sqrt(var + eps) * weight + bias``, mean and (biased) variance over ``normalized_shape``
    (Ba, Kiros, Hinton 2016, "Layer Normalization", equations 3 and 4). Statistics in float32, centred before they
    are squared; the backward is deterministic.

    Args:
        input: (*, *normalized_shape); float32, float16 or bfloat16 (float64 on the torch backend), any strides.
        normalized_shape: the trailing shape that is normalised; an int stands for one dimension.
        weight: (*normalized_shape) or None (ones). Any floating dtype, float32 beside a 16-bit input too.
        bias: (*normalized_shape) or None (zeros). Any floating dtype.
        eps: added to the variance.

    Returns:
        Shape and dtype of ``input`` (float32 under autocast on a GPU, as torch's).

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or device; the message names it.

    Example:
        >>> import torch, fusedops
        >>> fusedops.layer_norm(torch.tensor([[1.0, 3.0]]), 2).round(decimals=3)
        tensor([[-1.,  1.]])
    """
    shape = _check_layer_norm(input, normalized_shape, weight, bias, eps)
    if might_use_triton(input.device) and use_triton(
        "layer_norm", unsupported(input, shape, weight, bias), input.device
    ):
        dtype = reference.output_dtype(input)
        return norm_op(input, weight, bias, len(shape), float(eps), 0.0, True, dtype)[0]
    return reference.torch_norm(input, shape, weight, bias, eps, 0.0, True)


@explainable(_rms_norm_reasons)
def rms_norm(
    input: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """Root-mean-square normalisation over the last dimensions, as :func:`torch.nn.functional.rms_norm`.

    ``y = x / sqrt(mean(x²) + eps) * (weight + weight_offset)`` (Zhang, Sennrich 2019, "Root Mean Square Layer
    Normalization", equation 4). Statistics in float32; the backward is deterministic.

    Args:
        input: (*, *normalized_shape); float32, float16 or bfloat16 (float64 on the torch backend), any strides.
        normalized_shape: the trailing shape that is normalised; an int stands for one dimension.
        weight: (*normalized_shape) or None (ones). Any floating dtype, float32 beside a 16-bit input too.
        eps: added to the mean square. None: the machine epsilon of float32 (of float64 for a float64 input).
        weight_offset: added to the weight before it multiplies; 1.0 for Gemma's models. Without a weight it has no
            effect.

    Returns:
        Shape and dtype of ``input`` (float32 under autocast on a GPU, as torch's).

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or device; the message names it.

    Example:
        >>> import torch, fusedops
        >>> fusedops.rms_norm(torch.tensor([[3.0, 4.0]]), 2).round(decimals=3)
        tensor([[0.8490, 1.1310]])
    """
    shape = _check_rms_norm(input, normalized_shape, weight, eps, weight_offset=weight_offset)
    if eps is None:
        eps = _EPS.get(input.dtype, _EPS_FLOAT32)
    if might_use_triton(input.device) and use_triton("rms_norm", unsupported(input, shape, weight, None), input.device):
        dtype = reference.output_dtype(input)
        return norm_op(input, weight, None, len(shape), float(eps), float(weight_offset), False, dtype)[0]
    return reference.torch_norm(input, shape, weight, None, eps, weight_offset, False)
