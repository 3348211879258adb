"""The public functions of grouped and batched products: check the arguments, choose a backend, call the operator."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.linear import reference_grouped as reference
from fusedops.linear.activations import check_activation
from fusedops.linear.autograd_grouped import grouped_linear_op
from fusedops.linear.functional import cast_parameters, check_parameter_dtype
from fusedops.runtime.backend import device_reasons, explainable, might_use_triton, use_triton
from fusedops.runtime.checks import check_parameter, check_same_device, check_tensor, wrong_type, wrong_value
from fusedops.runtime.precision import autocast_dtype, check_precision, float32_precision
from fusedops.runtime.sharded import sharded


def _check_parameters(
    function: str,
    name: str,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    fp32_precision: str | None,
) -> bool:
    """Raise, naming the argument, or say whether a parameter's dtype differs from the input's."""
    check_same_device(function, name, weight, "input", input)
    mixed = check_parameter_dtype(function, name, weight, input)
    if bias is not None:
        takes = f"of shape {{}}, a row for each matrix of {name}"
        check_parameter(function, "bias", bias, weight.shape[:2], input, takes)
        mixed |= check_parameter_dtype(function, "bias", bias, input)
    if activation is not None:
        check_activation(function, activation)
    if fp32_precision is not None:
        check_precision(function, fp32_precision)
    return mixed


def _check_grouped(
    input: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    fp32_precision: str | None = None,
) -> bool:
    name = "grouped_linear"
    check_tensor(name, "input", input)
    check_tensor(name, "weights", weights)
    if input.ndim != 2:
        wrong_value(name, "input", "of shape (rows, in_features)", input)
    if weights.ndim != 3 or weights.shape[2] != input.shape[1]:
        size = input.shape[1]
        wrong_value(name, "weights", f"of shape (groups, out_features, {size}), the last size being input's", weights)
    if not isinstance(offsets, torch.Tensor):
        wrong_type(name, "offsets", "a torch.Tensor", offsets)
    if offsets.dtype not in (torch.int32, torch.int64) or offsets.layout is not torch.strided:
        wrong_type(name, "offsets", "a strided int32 or int64 tensor", offsets)
    if offsets.ndim == 1 and torch.compiler.is_compiling():
        torch._check(offsets.shape[0] == weights.shape[0])  # bincount's size is not known while a graph is traced
    elif offsets.ndim != 1 or offsets.shape[0] != weights.shape[0]:
        wrong_value(name, "offsets", f"of shape ({weights.shape[0]},), an end for each matrix of weights", offsets)
    check_same_device(name, "offsets", offsets, "input", input)
    return _check_parameters(name, "weights", input, weights, bias, activation, fp32_precision)


def _check_batched(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    fp32_precision: str | None = None,
) -> bool:
    name = "batched_linear"
    check_tensor(name, "input", input)
    check_tensor(name, "weight", weight)
    if input.ndim != 3:
        wrong_value(name, "input", "of shape (batch, rows, in_features)", input)
    batch, _, size = input.shape
    if weight.ndim != 3 or weight.shape[0] != batch or weight.shape[2] != size:
        wrong_value(name, "weight", f"of shape ({batch}, out_features, {size}), the sizes being input's", weight)
    return _check_parameters(name, "weight", input, weight, bias, activation, fp32_precision)


def unsupported(input: torch.Tensor) -> list[str]:
    """Every reason why the grouped kernels cannot take these arguments, which have been checked."""
    return device_reasons(input.device, (autocast_dtype(input),))


def _grouped_reasons(*args: Any, **kwargs: Any) -> tuple[torch.device, list[str]]:
    _check_grouped(*args, **kwargs)
    input = args[0] if args else kwargs["input"]
    return input.device, unsupported(input)


def _batched_reasons(*args: Any, **kwargs: Any) -> tuple[torch.device, list[str]]:
    _check_batched(*args, **kwargs)
    input = args[0] if args else kwargs["input"]
    return input.device, unsupported(input)


@explainable(_grouped_reasons)
def grouped_linear(
    input: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    fp32_precision: str | None = None,
) -> torch.Tensor:
    """Matrix product, bias and activation of each group of rows with a matrix of its own, as a mixture of experts has.

    Rows ``offsets[g - 1]`` to ``offsets[g]`` (the first group's from 0) become
    ``activation(input[rows] @ weights[g].T + bias[g])``; the product is that of
    ``torch.nn.functional.grouped_mm(input, weights.transpose(1, 2), offs=offsets)``. One kernel does all groups:
    products are accumulated in float32, bias and activation are applied there, and the result is rounded once. The
    backward is deterministic.

    The kernels read the offsets on the device, and the host never waits for them: a step with other offsets can replay
    a CUDA graph. (The torch backend reads them on the host, except while a graph is traced or captured; there it
    multiplies all rows with every matrix.)

    Args:
        input: (rows, in_features), the rows sorted by group; float32, float16 or bfloat16 (float64 on the torch
            backend), any strides.
        weights: (groups, out_features, in_features), any strides (a transposed view of (groups, in_features,
            out_features) is not copied). Of the input's dtype, or float32 beside a 16-bit input: it is then rounded to
            the input's dtype, and its gradient is float32.
        offsets: (groups,) int32 or int64, on the device of ``input``: the end of each group's rows, ascending. Groups
            may be empty. An end beyond the last row counts as the last row. Offsets that do not ascend give
            undefined rows, but touch no other memory.
        bias: (groups, out_features) or None. Dtypes as for the weights.
        activation: None or a name, as :func:`fusedops.linear` takes it.
        fp32_precision: how float32 products are computed: ``"ieee"``, ``"tf32"`` or ``"tf32x3"``, where the device has
            TF32; None: as torch's own setting says (``torch.backends.cuda.matmul.fp32_precision``), read when the
            function is called. On the torch backend torch's setting alone decides.

    Returns:
        (rows, out_features), the dtype of ``input`` (under autocast: autocast's). Rows behind the last group's end are
        zero, and so are their gradients.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or name; the message names it.

    Examples:
        Two experts; the first takes one row, the second two, and one row is nobody's:

        >>> import torch, fusedops
        >>> tokens = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
        >>> experts = torch.stack([torch.eye(2), -torch.eye(2)])
        >>> fusedops.grouped_linear(tokens, experts, torch.tensor([1, 3]), bias=torch.tensor([[0.0, 1.0], [4.0, 0.0]]))
        tensor([[ 1.,  3.],
                [ 1., -4.],
                [-1., -6.],
                [ 0.,  0.]])
    """
    mixed = _check_grouped(input, weights, offsets, bias, activation, fp32_precision=fp32_precision)
    if (might_use_triton(input.device) and use_triton("grouped_linear", unsupported(input), input.device)) or sharded(
        input
    ):
        return _call(input, weights, offsets, bias, activation, mixed, fp32_precision)
    return reference.torch_grouped_linear(input, weights, offsets, bias, activation, mixed)


@explainable(_batched_reasons)
def batched_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    fp32_precision: str | None = None,
) -> torch.Tensor:
    """Matrix product, bias and activation, a matrix each: ``activation(input[b] @ weight[b].T + bias[b])`` for every b.

    As :func:`torch.baddbmm` followed by the activation, in one kernel: products are accumulated in float32, bias and
    activation are applied there, and the result is rounded once. The backward is deterministic.

    Args:
        input: (batch, rows, in_features); float32, float16 or bfloat16 (float64 on the torch backend), any strides.
        weight: (batch, out_features, in_features), any strides (a transposed view of (batch, in_features,
            out_features) is not copied). Of the input's dtype, or float32 beside a 16-bit input: it is then rounded to
            the input's dtype, and its gradient is float32.
        bias: (batch, out_features) or None. Dtypes as for the weight.
        activation: None or a name, as :func:`fusedops.linear` takes it.
        fp32_precision: how float32 products are computed: ``"ieee"``, ``"tf32"`` or ``"tf32x3"``, where the device has
            TF32; None: as torch's own setting says (``torch.backends.cuda.matmul.fp32_precision``), read when the
            function is called. On the torch backend torch's setting alone decides.

    Returns:
        (batch, rows, out_features), the dtype of ``input`` (under autocast: autocast's).

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or name; the message names it.

    Examples:
        >>> import torch, fusedops
        >>> input = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
        >>> weight = torch.stack([torch.eye(2), -torch.eye(2)])
        >>> fusedops.batched_linear(input, weight, activation="relu")
        tensor([[[1., 2.]],
        <BLANKLINE>
                [[0., 0.]]])
    """
    mixed = _check_batched(input, weight, bias, activation, fp32_precision=fp32_precision)
    if (might_use_triton(input.device) and use_triton("batched_linear", unsupported(input), input.device)) or sharded(
        input
    ):
        return _call(input, weight, None, bias, activation, mixed, fp32_precision)
    return reference.torch_batched_linear(input, weight, bias, activation, mixed)


def _call(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    mixed: bool,
    fp32_precision: str | None,
) -> torch.Tensor:
    """The operator, its arguments in the dtypes that it takes."""
    dtype = autocast_dtype(input)
    if dtype != input.dtype or mixed:
        input = input.to(dtype)
        weight, bias = cast_parameters(weight, bias, dtype)
    precision = float32_precision(input, fp32_precision)
    return grouped_linear_op(input, weight, offsets, bias, activation, False, precision)[0]
