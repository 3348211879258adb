"""The public functions of the family: check the arguments, choose a backend, call the operator."""

from __future__ import annotations

import torch

from fusedops.linear.functional import cast_parameters, check_linear
from fusedops.norm.functional import unsupported
from fusedops.norm.reference import Kind, compute_dtype
from fusedops.norm_linear import reference
from fusedops.norm_linear.autograd import norm_linear_op
from fusedops.runtime.backend import explainable, might_use_triton, use_triton
from fusedops.runtime.checks import check_number, check_parameter
from fusedops.runtime.precision import autocast_dtype, float32_precision
from fusedops.runtime.sharded import sharded


def _check_norm_parameter(function: str, argument: str, value: torch.Tensor | None, input: torch.Tensor) -> None:
    takes = "of shape {0}, {0[0]} being input's last size"
    check_parameter(function, argument, value, input.shape[-1:], input, takes)


def _check_layer_norm_linear(input, norm_weight, norm_bias, weight, bias=None, activation=None, eps=1e-5):  # type: ignore[no-untyped-def]
    function = "layer_norm_linear"
    mixed = check_linear(function, input, weight, bias, activation)
    _check_norm_parameter(function, "norm_weight", norm_weight, input)
    _check_norm_parameter(function, "norm_bias", norm_bias, input)
    check_number(function, "eps", eps)
    return mixed


def _check_rms_norm_linear(input, norm_weight, weight, bias=None, activation=None, eps=None, *, weight_offset=0.0):  # type: ignore[no-untyped-def]
    function = "rms_norm_linear"
    mixed = check_linear(function, input, weight, bias, activation)
    _check_norm_parameter(function, "norm_weight", norm_weight, input)
    if eps is not None:
        check_number(function, "eps", eps)
    check_number(function, "weight_offset", weight_offset)
    return mixed


def _reasons(input: torch.Tensor, *norm_parameters: torch.Tensor | None) -> list[str]:
    """Every reason why the norm's or the linear layer's kernels cannot take these arguments, which are checked."""
    return unsupported(input, input.shape[-1:], *norm_parameters, autocast_dtype(input))


def _layer_norm_linear_reasons(input, norm_weight, norm_bias, weight, *args, **kwargs):  # type: ignore[no-untyped-def]
    _check_layer_norm_linear(input, norm_weight, norm_bias, weight, *args, **kwargs)
    return input.device, _reasons(input, norm_weight, norm_bias)


def _rms_norm_linear_reasons(input, norm_weight, weight, *args, **kwargs):  # type: ignore[no-untyped-def]
    _check_rms_norm_linear(input, norm_weight, weight, *args, **kwargs)
    return input.device, _reasons(input, norm_weight)


@explainable(_layer_norm_linear_reasons)
def layer_norm_linear(
    input: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Layer norm and the linear layer behind it: ``linear(layer_norm(input), weight, bias, activation)``.

    The results are those of :func:`fusedops.layer_norm` over the last dimension and :func:`fusedops.linear`, but the
    normalised tensor between them is not kept for the backward: it is computed once more there, from the input and to
    the same bits, if the weight's gradient is asked for. That costs a pass over the input and saves a tensor of its
    size. The backward is deterministic.

    Args:
        input: (..., in_features), any number of leading dimensions, none included; float32, float16 or bfloat16
            (float64 on the torch backend), any strides.
        norm_weight: (in_features) or None (ones). Any floating dtype, float32 beside a 16-bit input too.
        norm_bias: (in_features) or None (zeros). Any floating dtype.
        weight: (out_features, in_features), any strides. Of the input's dtype, or float32 beside a 16-bit input: it is
            then rounded to the input's dtype, and its gradient is float32.
        bias: (out_features) or None. Dtypes as for the weight.
        activation: None or a name that :func:`fusedops.linear` takes.
        eps: added to the variance.

    Returns:
        (..., out_features), the dtype of ``input`` (under autocast: autocast's).

    Under autocast the norm's statistics are float32 and its result is rounded straight to autocast's dtype, in which
    the product is computed: a float32 tensor between the two is never made.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or name; the message names it.

    Examples:
        >>> import torch, fusedops
        >>> x, weight = torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 1.0], [0.0, 2.0]])
        >>> fusedops.layer_norm_linear(x, torch.ones(2), torch.zeros(2), weight).round(decimals=3).abs()
        tensor([[0., 2.]])
    """
    mixed = _check_layer_norm_linear(input, norm_weight, norm_bias, weight, bias, activation, eps)
    if (
        might_use_triton(input.device)
        and use_triton("layer_norm_linear", _reasons(input, norm_weight, norm_bias), input.device)
    ) or sharded(input):
        return _fused(input, norm_weight, norm_bias, weight, bias, activation, eps, 0.0, "layer", mixed)
    return reference.torch_norm_linear(
        input, norm_weight, norm_bias, weight, bias, activation, eps, 0.0, "layer", mixed
    )


@explainable(_rms_norm_linear_reasons)
def rms_norm_linear(
    input: torch.Tensor,
    norm_weight: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """RMS norm and the linear layer behind it: ``linear(rms_norm(input), weight, bias, activation)``.

    As :func:`layer_norm_linear`: the normalised tensor is not kept for the backward.

    Args:
        input, weight, bias, activation: as for :func:`layer_norm_linear`.
        norm_weight: (in_features) or None (ones). Any floating dtype, float32 beside a 16-bit input too.
        eps: added to the mean square. None: the machine epsilon of float32 (of float64 for a float64 input).
        weight_offset: added to ``norm_weight`` before it multiplies; 1.0 for Gemma's models. Without a
            ``norm_weight`` it has no effect.

    Returns:
        (..., out_features), the dtype of ``input`` (under autocast: autocast's).

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or name; the message names it.

    Examples:
        >>> import torch, fusedops
        >>> x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0], [-1.0, 1.0]])
        >>> fusedops.rms_norm_linear(x, torch.ones(2), weight, activation="relu").round(decimals=3)
        tensor([[0.8490, 0.2830]])
    """
    mixed = _check_rms_norm_linear(
        input, norm_weight, weight, bias, activation, eps, weight_offset=weight_offset
    )  # fmt: skip
    if eps is None:
        eps = torch.finfo(compute_dtype(input, None)).eps
    if (
        might_use_triton(input.device) and use_triton("rms_norm_linear", _reasons(input, norm_weight), input.device)
    ) or sharded(input):
        return _fused(input, norm_weight, None, weight, bias, activation, eps, weight_offset, "rms", mixed)
    return reference.torch_norm_linear(
        input, norm_weight, None, weight, bias, activation, eps, weight_offset, "rms", mixed
    )


def _fused(
    input: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    eps: float,
    weight_offset: float,
    kind: Kind,
    mixed: bool,
) -> torch.Tensor:
    dtype = autocast_dtype(input)
    if mixed or dtype != input.dtype:
        weight, bias = cast_parameters(weight, bias, dtype)
    precision = float32_precision(input) if dtype == torch.float32 else "ieee"
    return norm_linear_op(
        input, norm_weight, norm_bias, weight, bias, float(eps), float(weight_offset), kind, activation, dtype,
        False, precision,
    )[0]  # fmt: skip
