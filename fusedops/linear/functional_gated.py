"""The gated product's public function: check the arguments, choose a backend, call the operator."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.linear import reference_gated as reference
from fusedops.linear.activations import check_activation
from fusedops.linear.autograd_gated import gated_linear_op
from fusedops.linear.functional import cast_parameters, check_parameter_dtype
from fusedops.runtime.backend import device_reasons, explainable, might_use_triton, use_triton
from fusedops.runtime.checks import check_bool, check_dtype, check_same_device, check_tensor, wrong_value
from fusedops.runtime.precision import autocast_dtype, check_precision, float32_precision
from fusedops.runtime.sharded import sharded

_NAME = "gated_linear"


def check_gated_linear(
    input: torch.Tensor,
    weight_gate: torch.Tensor,
    weight_up: torch.Tensor | None = None,
    bias_gate: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None,
    activation: str | None = "silu",
    *,
    out_dtype: torch.dtype | None = None,
    recompute: bool = False,
    fp32_precision: str | None = None,
) -> bool:
    """Raise, naming the argument, or say whether a parameter's dtype differs from the input's."""
    check_tensor(_NAME, "input", input)
    if not input.ndim:
        wrong_value(_NAME, "input", "of at least one dimension (..., in_features)", input)
    check_tensor(_NAME, "weight_gate", weight_gate)
    shape = weight_gate.shape
    if len(shape) != 2 or shape[1] != input.shape[-1]:
        size = input.shape[-1]
        takes = f"of shape (out_features, {size}), {size} being input's last size"
        wrong_value(_NAME, "weight_gate", takes, weight_gate)
    mixed = _check_like(input, "weight_gate", weight_gate)
    if weight_up is not None:
        check_tensor(_NAME, "weight_up", weight_up)
        if weight_up.shape != shape:
            wrong_value(_NAME, "weight_up", f"of weight_gate's shape {tuple(shape)}", weight_up)
        mixed |= _check_like(input, "weight_up", weight_up)
    else:
        if shape[0] % 2:
            takes = "of an even number of rows where weight_up is None: the gate's, then as many of the other layer"
            wrong_value(_NAME, "weight_gate", takes, weight_gate)
        if bias_up is not None:
            wrong_value(_NAME, "bias_up", "None where weight_up is None: bias_gate then holds both biases", bias_up)
    if bias_gate is not None:
        mixed |= _check_bias(input, "bias_gate", bias_gate, shape[0])
    if bias_up is not None:
        mixed |= _check_bias(input, "bias_up", bias_up, shape[0])
    if activation is not None:
        check_activation(_NAME, activation)
    if out_dtype is not None:
        check_dtype(_NAME, "out_dtype", out_dtype)
    check_bool(_NAME, "recompute", recompute)
    if fp32_precision is not None:
        check_precision(_NAME, fp32_precision)
    return mixed


def _check_bias(input: torch.Tensor, name: str, bias: torch.Tensor, rows: int) -> bool:
    check_tensor(_NAME, name, bias)
    if bias.ndim != 1 or bias.shape[0] != rows:
        wrong_value(_NAME, name, f"of shape ({rows},), one for each row of weight_gate", bias)
    return _check_like(input, name, bias)


def _check_like(input: torch.Tensor, name: str, value: torch.Tensor) -> bool:
    """On the input's device and of a dtype that goes with the input's; whether that is another one."""
    if value.device != input.device:
        check_same_device(_NAME, name, value, "input", input)
    return check_parameter_dtype(_NAME, name, value, input)


def unsupported(input: torch.Tensor, out_dtype: torch.dtype | None = None) -> list[str]:
    """Every reason why the kernels cannot take these arguments, which have been checked."""
    dtype = autocast_dtype(input)
    return device_reasons(input.device, (dtype, out_dtype or dtype))


def _gated_linear_reasons(*args: Any, **kwargs: Any) -> tuple[torch.device, list[str]]:
    check_gated_linear(*args, **kwargs)
    input = args[0] if args else kwargs["input"]
    return input.device, unsupported(input, kwargs.get("out_dtype"))


@explainable(_gated_linear_reasons)
def gated_linear(
    input: torch.Tensor,
    weight_gate: torch.Tensor,
    weight_up: torch.Tensor | None = None,
    bias_gate: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None,
    activation: str | None = "silu",
    *,
    out_dtype: torch.dtype | None = None,
    recompute: bool = False,
    fp32_precision: str | None = None,
) -> torch.Tensor:
    """Gated linear unit: ``activation(input @ weight_gate.T + bias_gate) * (input @ weight_up.T + bias_up)``.

    Shazeer 2020, "GLU Variants Improve Transformer", equations 4 and 5: ``"silu"`` is SwiGLU, ``"gelu"`` (or
    ``"gelu_tanh"``) GeGLU, ``"relu"`` ReGLU, ``"sigmoid"`` GLU, None the bilinear layer. One kernel computes both
    products from one read of the input; they are accumulated in float32, biases, activation and product are applied
    there, and the result is rounded once. The backward is one elementwise pass, which sums the biases' gradients too,
    and plain products; it is deterministic.

    Args:
        input: (..., in_features), any number of leading dimensions, none included; float32, float16 or bfloat16
            (float64 on the torch backend), any strides.
        weight_gate: (out_features, in_features), any strides. Of the input's dtype, or float32 beside a 16-bit input:
            it is then rounded to the input's dtype, and its gradient is float32. Without ``weight_up``: both weights
            in one, (2 · out_features, in_features), the gate's rows first, as Phi-3's ``gate_up_proj``; it is not
            copied, and its gradient is one tensor too.
        weight_up: of the shape of ``weight_gate``, or None. Halves of one tensor are not copied either. (Where the
            strides of the two differ, they are: to contiguous ones.)
        bias_gate: (out_features), or (2 · out_features) beside a weight that holds both; or None. Dtypes as for the
            weights.
        bias_up: (out_features) or None.
        activation: None or a name that :func:`fusedops.linear` takes.
        out_dtype: the result's dtype; None: the input's (under autocast: autocast's).
        recompute: keep nothing but the inputs for the backward, which then computes the two products again; else the
            (..., 2 · out_features) pre-activations are kept, in the input's dtype. The gradients are the same. Without
            an effect on the torch backend.
        fp32_precision: how float32 products are computed: ``"ieee"``, ``"tf32"`` or ``"tf32x3"`` (three TF32 products,
            nearly as exact as ``"ieee"``); None: as torch's setting (``torch.backends.cuda.matmul.fp32_precision``)
            says when the function is called. The torch backend follows torch's setting.

    Returns:
        (..., out_features).

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or name; the message names it.

    Examples:
        >>> import torch
        >>> from fusedops import gated_linear
        >>> gate, up = torch.tensor([[1.0, 2.0], [-3.0, 1.0]]), torch.tensor([[2.0, 1.0], [1.0, 1.0]])
        >>> gated_linear(torch.tensor([1.0, 1.0]), gate, up, activation="relu")
        tensor([9., 0.])
        >>> gated_linear(torch.tensor([1.0, 1.0]), torch.cat((gate, up)), activation="relu")
        tensor([9., 0.])
    """
    mixed = check_gated_linear(
        input, weight_gate, weight_up, bias_gate, bias_up, activation,
        out_dtype=out_dtype, recompute=recompute, fp32_precision=fp32_precision,
    )  # fmt: skip
    if (might_use_triton(input.device) and use_triton(_NAME, unsupported(input, out_dtype), input.device)) or sharded(
        input
    ):
        dtype = autocast_dtype(input)
        if dtype != input.dtype or mixed:
            input = input.to(dtype)
            weight_gate, bias_gate = cast_parameters(weight_gate, bias_gate, dtype)
            if weight_up is not None:
                weight_up, bias_up = cast_parameters(weight_up, bias_up, dtype)
        tensors = (input, weight_gate, weight_up, bias_gate, bias_up)
        precision = float32_precision(input, fp32_precision)
        return gated_linear_op(*tensors, activation, out_dtype, recompute, False, precision)[0]
    return reference.torch_gated_linear(input, weight_gate, weight_up, bias_gate, bias_up, activation, out_dtype, mixed)
