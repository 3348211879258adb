"""The public function of the linear family: check the arguments, choose a backend, call the operator."""

from __future__ import annotations

import torch

from fusedops.linear import reference
from fusedops.linear.activations import check_activation, register_activation
from fusedops.linear.autograd import AddToMainGrad, linear_op
from fusedops.runtime.backend import device_reasons, explainable, might_use_triton, use_triton
from fusedops.runtime.checks import (
    check_bool,
    check_dtype,
    check_parameter,
    check_probability,
    check_same_device,
    check_tensor,
    wrong_type,
    wrong_value,
)
from fusedops.runtime.dropout import draw_seed
from fusedops.runtime.precision import autocast_dtype, check_precision, float32_precision
from fusedops.runtime.sharded import sharded

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
        check_parameter_dtype(function, "weight", weight, input)
    if bias is not None:
        check_tensor(function, "bias", bias)
        if bias.ndim != 1 or bias.shape[0] != shape[0]:
            wrong_value(function, "bias", f"of shape ({shape[0]},), one for each row of weight", bias)
        if bias.device != device:
            check_same_device(function, "bias", bias, "input", input)
        if bias.dtype is not dtype:
            check_parameter_dtype(function, "bias", bias, input)
            mixed = True
    if activation is not None:
        check_activation(function, activation)
    return mixed


def check_parameter_dtype(function: str, argument: str, value: torch.Tensor, input: torch.Tensor) -> bool:
    """Whether it is not the input's dtype; an error unless it is float32 beside 16 bits, or autocast makes both one."""
    if value.dtype is input.dtype:
        return False
    both = value.dtype == torch.float32 and input.dtype in _HALF
    if not both and autocast_dtype(value) != autocast_dtype(input):
        wrong_type(function, argument, f"of input's dtype ({input.dtype}) or float32 beside a 16-bit input", value)
    return True


def _check_options(
    input: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    dropout_p: float,
    out_dtype: torch.dtype | None,
    recompute: bool,
    fp32_precision: str | None,
    fuse_wgrad_accumulation: bool,
) -> None:
    function = "linear"
    if residual is not None:
        shape = (*input.shape[:-1], weight.shape[0])
        check_parameter(function, "residual", residual, shape, input, "of the output's shape {}")
    check_probability(function, "dropout_p", dropout_p)
    if out_dtype is not None:
        check_dtype(function, "out_dtype", out_dtype)
    check_bool(function, "recompute", recompute)
    check_precision(function, fp32_precision)
    check_bool(function, "fuse_wgrad_accumulation", fuse_wgrad_accumulation)


def unsupported(input: torch.Tensor, *others: torch.Tensor | torch.dtype | None) -> list[str]:
    """Every reason why the linear kernels cannot take these arguments, which have been checked."""
    dtypes = (o if isinstance(o, torch.dtype) else o.dtype for o in others if o is not None)
    return device_reasons(input.device, (autocast_dtype(input), *dtypes))


def _linear_reasons(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    residual: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    out_dtype: torch.dtype | None = None,
    recompute: bool = False,
    fp32_precision: str | None = None,
    fuse_wgrad_accumulation: bool = False,
) -> tuple[torch.device, list[str]]:
    check_linear("linear", input, weight, bias, activation)
    options = (residual, dropout_p, out_dtype, recompute, fp32_precision, fuse_wgrad_accumulation)
    _check_options(input, weight, *options)
    return input.device, unsupported(input, residual, out_dtype)


@explainable(_linear_reasons)
def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    residual: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    out_dtype: torch.dtype | None = None,
    recompute: bool = False,
    fp32_precision: str | None = None,
    fuse_wgrad_accumulation: bool = False,
) -> torch.Tensor:
    """Matrix product and what follows it: ``dropout(activation(input @ weight.T + bias)) + residual``.

    As :func:`torch.nn.functional.linear` and what follows it, in one kernel: products are accumulated in float32, all
    the rest is computed there, and the result is rounded once. Where torch's own product (cuBLAS, hipBLASLt) is faster
    than that kernel, it is used, and the rest is one elementwise kernel behind it. The backward multiplies by the
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
        residual: (..., out_features) or None, added last. Any floating dtype and strides; its gradient has its dtype.
            A float32 stream beside 16-bit inputs stays one, as in torch's sum.
        dropout_p: probability that an element is dropped; the others are divided by ``1 - dropout_p``. The mask is
            drawn from torch's generator and drawn again in the backward, never stored.
        out_dtype: dtype of the result; None: that of ``input`` (under autocast: autocast's), promoted with that of
            ``residual``.
        recompute: keep nothing for the activation's derivative that only the backward needs: compute the product once
            more there. It saves a tensor of the output's size and costs a forward. Without an effect where nothing
            would be kept (no activation; ``relu`` and others whose derivative is a function of the output) and on the
            torch backend.
        fp32_precision: how products of float32 are computed: ``"ieee"`` in full; ``"tf32"`` on tensor cores, operands
            rounded to 10 bits of mantissa; ``"tf32x3"`` on tensor cores, operands as sums of two such numbers, nearly
            as exact as float32. None: in TF32 only where torch's own setting allows it
            (``torch.backends.cuda.matmul.fp32_precision``), read when the function is called. The torch backend always
            follows torch's setting; so do devices without TF32, which compute in full.
        fuse_wgrad_accumulation: add the weight's gradient to the tensor that is ``weight.main_grad`` now (weight's
            shape; float32 or weight's dtype), in every backward through this call and inside the product, and leave
            ``weight.grad`` alone, as Megatron-LM and Transformer Engine do. The backward sets
            ``weight.grad_added_to_main_grad`` to True if there is such an attribute. Eager mode only.

    Returns:
        (..., out_features), ``out_dtype``.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or name; the message names it.
        RuntimeError: ``fuse_wgrad_accumulation`` inside torch.compile.

    Examples:
        >>> import torch, fusedops
        >>> weight, bias = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0.5, -8.0])
        >>> fusedops.linear(torch.tensor([1.0, 1.0]), weight, bias, activation="relu", residual=torch.ones(2))
        tensor([4.5000, 1.0000])
        >>> x = torch.randn(4, 3, 2)
        >>> torchs = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias))
        >>> torch.allclose(fusedops.linear(x, weight, bias, "gelu"), torchs, atol=1e-5)
        True
    """
    mixed = check_linear("linear", input, weight, bias, activation)
    usual = residual is None and out_dtype is None and recompute is False and fuse_wgrad_accumulation is False
    if usual and type(dropout_p) is float and dropout_p == 0.0:
        main_grad = None
        if fp32_precision is not None:
            check_precision("linear", fp32_precision)
    else:
        _check_options(
            input, weight, residual, dropout_p, out_dtype, recompute, fp32_precision, fuse_wgrad_accumulation
        )  # fmt: skip
        main_grad = _main_grad(weight, input) if fuse_wgrad_accumulation else None
    original = weight
    if (
        might_use_triton(input.device) and use_triton("linear", unsupported(input, residual, out_dtype), input.device)
    ) or sharded(input):
        dtype = autocast_dtype(input)
        if dtype != input.dtype or mixed:
            input = input.to(dtype)
            weight, bias = cast_parameters(weight, bias, dtype)
        seed = draw_seed(input, residual, weight) if dropout_p else None
        if out_dtype is None:
            out_dtype = dtype if residual is None else torch.promote_types(dtype, residual.dtype)
        output = linear_op(
            input, weight, bias, residual, seed, main_grad, activation, float(dropout_p), out_dtype, False,
            recompute, float32_precision(input, fp32_precision),
        )[0]  # fmt: skip
    else:
        if main_grad is not None:
            weight = AddToMainGrad.apply(weight, main_grad)
        output = reference.torch_linear(input, weight, bias, activation, mixed, residual, dropout_p, out_dtype)
    if main_grad is not None and hasattr(original, "grad_added_to_main_grad"):
        output.register_hook(lambda _: setattr(original, "grad_added_to_main_grad", True))
    return output


def _main_grad(weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor | None:
    """Where the weight's gradient is added; None where none is wanted. Errors as of :func:`linear`."""
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "linear: fuse_wgrad_accumulation=True writes to weight.main_grad in the backward, which torch.compile"
            " cannot trace; leave this call out of the compiled region (torch.compiler.disable)"
        )
    argument = "weight.main_grad (fuse_wgrad_accumulation=True)"
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        wrong_type("linear", argument, "a torch.Tensor, such as torch.zeros(weight.shape, dtype=torch.float32)", None)
    check_parameter("linear", argument, main_grad, weight.shape, input, "of weight's shape {}")
    if main_grad.dtype not in (torch.float32, weight.dtype):
        wrong_type("linear", argument, f"of float32 or weight's dtype ({weight.dtype})", main_grad)
    if any(stride == 0 and size > 1 for size, stride in zip(main_grad.shape, main_grad.stride(), strict=True)):
        wrong_value("linear", argument, "a tensor whose elements do not share memory (it is expanded)", main_grad)
    return main_grad


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
