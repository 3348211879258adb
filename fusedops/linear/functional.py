"""The public function of the linear family: check the arguments, choose a backend, call the operator."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.linear import reference
from fusedops.linear.activations import check_activation, register_activation
from fusedops.linear.autograd import linear_op
from fusedops.runtime.backend import device_reasons, explainable, might_use_triton, use_triton
from fusedops.runtime.checks import check_same_device, check_tensor, wrong_type, wrong_value
from fusedops.runtime.precision import autocast_dtype, tf32_allowed

_HALF = (torch.float16, torch.bfloat16)


def check_linear(
    function: str,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> bool:
    """Raise, naming the argument, or say whether a parameter's dtype differs from the input's."""
    check_tensor(function, "input", input)
    check_tensor(function, "weight", weight)
    shape = weight.shape
    if not input.ndim:
        wrong_value(function, "input", "of at least one dimension (..., in_features)", input)
    if len(shape) != 2 or shape[1] != input.shape[-1]:
        size = input.shape[-1]
        wrong_value(function, "weight", f"of shape (out_features, {size}), {size} being input's last size", weight)
    dtype, device = input.dtype, input.device
    if weight.device != device:
        check_same_device(function, "weight", weight, "input", input)
    mixed = weight.dtype is not dtype
    if mixed:
        _check_dtype(function, "weight", weight, input)
    if bias is not None:
        check_tensor(function, "bias", bias)
        if bias.ndim != 1 or bias.shape[0] != shape[0]:
            wrong_value(function, "bias", f"of shape ({shape[0]},), one for each row of weight", bias)
        if bias.device != device:
            check_same_device(function, "bias", bias, "input", input)
        if bias.dtype is not dtype:
            _check_dtype(function, "bias", bias, input)
            mixed = True
    if activation is not None:
        check_activation(function, activation)
    return mixed


def _check_dtype(function: str, argument: str, value: torch.Tensor, input: torch.Tensor) -> None:
    """The input's dtype, float32 beside a 16-bit input, or whatever autocast makes the same."""
    if value.dtype == torch.float32 and input.dtype in _HALF:
        return
    if autocast_dtype(value) != autocast_dtype(input):
        wrong_type(function, argument, f"of input's dtype ({input.dtype}) or float32 beside a 16-bit input", value)


def unsupported(input: torch.Tensor) -> list[str]:
    """Every reason why the linear kernels cannot take these arguments, which have been checked."""
    return device_reasons(input.device, (autocast_dtype(input),))


def _linear_reasons(*args: Any, **kwargs: Any) -> tuple[torch.device, list[str]]:
    check_linear("linear", *args, **kwargs)
    input = args[0] if args else kwargs["input"]
    return input.device, unsupported(input)


@explainable(_linear_reasons)
def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Matrix product, bias and activation: ``activation(input @ weight.T + bias)``.

    As :func:`torch.nn.functional.linear` followed by the activation, in one kernel: products are accumulated in
    float32, bias and activation are applied there, and the result is rounded once. The backward multiplies by the
    activation's derivative inside its products, or in one pass before them where the estimate in tuning.py says that
    this is cheaper; the bias's gradient is summed in the same pass. It is deterministic.

    Args:
        input: (..., in_features), any number of leading dimensions, none included; float32, float16 or bfloat16
            (float64 on the torch backend), any strides.
        weight: (out_features, in_features), any strides (a transposed view is not copied). Of the input's dtype, or
            float32 beside a 16-bit input: it is then rounded to the input's dtype, and its gradient is float32.
        bias: (out_features) or None. Dtypes as for the weight.
        activation: None; ``"relu"``; ``"gelu"``, z Φ(z), and its approximations ``"gelu_tanh"`` and ``"quick_gelu"``, z
            σ(1.702 z) (Hendrycks, Gimpel 2016, "Gaussian Error Linear Units", section 2); ``"silu"``, z σ(z);
            ``"relu_squared"`` (So et al. 2021, "Primer"); ``"mish"`` (Misra 2019); ``"sigmoid"``, ``"tanh"``,
            ``"leaky_relu"`` (slope 0.01), ``"elu"`` (α = 1), ``"hardswish"``, ``"hardsigmoid"``, ``"softplus"``
            (β = 1), with torch's defaults; or a name given to :func:`fusedops.linear.register_activation`.

    Returns:
        (..., out_features), the dtype of ``input`` (under autocast: autocast's).

    Float32 products run in TF32 only where torch's own setting allows it
    (``torch.backends.cuda.matmul.fp32_precision``), read when the function is called.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or name; the message names it.

    Example:
        >>> import torch, fusedops
        >>> weight, bias = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0.5, -8.0])
        >>> fusedops.linear(torch.tensor([1.0, 1.0]), weight, bias, activation="relu")
        tensor([3.5000, 0.0000])
    """
    mixed = check_linear("linear", input, weight, bias, activation)
    if might_use_triton(input.device) and use_triton("linear", unsupported(input), input.device):
        dtype = autocast_dtype(input)
        if dtype != input.dtype or mixed:
            input = input.to(dtype)
            weight, bias = cast_parameters(weight, bias, dtype)
        return linear_op(input, weight, bias, activation, False, tf32_allowed(input))[0]
    return reference.torch_linear(input, weight, bias, activation, mixed)


# In `fusedops.linear.register_activation` the function stands where one expects the package of its name.
linear.register_activation = register_activation  # type: ignore[attr-defined]


def cast_parameters(
    weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Parameters of dtype ``dtype``; float32 ones stay, for the operator takes and differentiates them."""
    if weight.dtype != torch.float32:
        weight = weight.to(dtype)
    if bias is not None and bias.dtype != torch.float32:
        bias = bias.to(dtype)
    return weight, bias
