"""The public functions of the norm family: check the arguments, choose a backend, call the operator."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import torch

from fusedops.norm import reference
from fusedops.norm.autograd import group_norm_op, norm_op
from fusedops.runtime.backend import device_reasons, explainable, might_use_triton, use_triton
from fusedops.runtime.checks import (
    check_bool,
    check_dtype,
    check_number,
    check_parameter,
    check_probability,
    check_same_device,
    check_tensor,
    wrong_type,
    wrong_value,
)
from fusedops.runtime.dropout import draw_seed
from fusedops.runtime.sharded import sharded

# torch's default for rms_norm: the machine epsilon of the dtype that the statistics are computed in.
_EPS = {torch.float64: torch.finfo(torch.float64).eps}
_EPS_FLOAT32 = torch.finfo(torch.float32).eps

# Python's, those of a shape that is traced, and numpy's.
_INTEGERS = (int, torch.SymInt, numbers.Integral)

_NORMALIZED = "of normalized_shape {}"

# Column indices are int32 in the kernels, with room for a block past the end.
_MAX_WIDTH = 2**30


def _check_shape(function: str, input: torch.Tensor, normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    check_tensor(function, "input", input)
    shape: tuple[int, ...]
    if isinstance(normalized_shape, tuple):  # first: modules pass one, and the other questions take longer
        shape = normalized_shape
    elif isinstance(normalized_shape, _INTEGERS):
        shape = (normalized_shape,)
    else:
        try:
            shape = tuple(normalized_shape)
        except TypeError:
            wrong_type(function, "normalized_shape", "an int or a sequence of ints", normalized_shape)
    for size in shape:
        if type(size) is not int and (not isinstance(size, _INTEGERS) or isinstance(size, bool)):
            wrong_type(function, "normalized_shape", "an int or a sequence of ints", normalized_shape)
    if not shape:
        wrong_value(function, "normalized_shape", "of at least one dimension", normalized_shape)
    if input.shape[-len(shape) :] != shape:
        wrong_value(function, "normalized_shape", f"the last dimensions of input {tuple(input.shape)}", shape)
    return shape


def _check_options(function: str, out_dtype: torch.dtype | None, recompute: bool) -> None:
    if out_dtype is not None:
        check_dtype(function, "out_dtype", out_dtype)
    check_bool(function, "recompute", recompute)


def _check_layer_norm(  # type: ignore[no-untyped-def]
    input,
    normalized_shape,
    weight=None,
    bias=None,
    eps=1e-5,
    *,
    out_dtype=None,
    recompute=False,
    function="layer_norm",
):
    shape = _check_shape(function, input, normalized_shape)
    check_parameter(function, "weight", weight, shape, input, _NORMALIZED)
    check_parameter(function, "bias", bias, shape, input, _NORMALIZED)
    check_number(function, "eps", eps)
    _check_options(function, out_dtype, recompute)
    return shape


def _check_rms_norm(  # type: ignore[no-untyped-def]
    input,
    normalized_shape,
    weight=None,
    eps=None,
    *,
    weight_offset=0.0,
    out_dtype=None,
    recompute=False,
    function="rms_norm",
):
    shape = _check_shape(function, input, normalized_shape)
    check_parameter(function, "weight", weight, shape, input, _NORMALIZED)
    if eps is not None:
        check_number(function, "eps", eps)
    check_number(function, "weight_offset", weight_offset)
    _check_options(function, out_dtype, recompute)
    return shape


def _check_add_layer_norm(input, residual, normalized_shape, *arguments, dropout_p=0.0, **options):  # type: ignore[no-untyped-def]
    shape = _check_layer_norm(input, normalized_shape, *arguments, **options, function="add_layer_norm")
    _check_residual("add_layer_norm", input, residual, dropout_p)
    return shape


def _check_add_rms_norm(input, residual, normalized_shape, *arguments, dropout_p=0.0, **options):  # type: ignore[no-untyped-def]
    shape = _check_rms_norm(input, normalized_shape, *arguments, **options, function="add_rms_norm")
    _check_residual("add_rms_norm", input, residual, dropout_p)
    return shape


def _check_residual(function: str, input: torch.Tensor, residual: torch.Tensor, dropout_p: float) -> None:
    check_tensor(function, "residual", residual)
    if residual.shape != input.shape:
        wrong_value(function, "residual", f"of input's shape {tuple(input.shape)}", residual)
    check_same_device(function, "residual", residual, "input", input)
    check_probability(function, "dropout_p", dropout_p)


def _check_l2_norm(input, dim=-1, eps=1e-12, *, out_dtype=None):  # type: ignore[no-untyped-def]
    check_tensor("l2_norm", "input", input)
    if not isinstance(dim, _INTEGERS) or isinstance(dim, bool):
        wrong_type("l2_norm", "dim", "an int", dim)
    if not -input.dim() <= dim < input.dim():
        wrong_value("l2_norm", "dim", f"a dimension of input {tuple(input.shape)}", dim)
    check_number("l2_norm", "eps", eps)
    _check_options("l2_norm", out_dtype, False)
    return int(dim) % input.dim()


def _check_group_norm(input, num_groups, weight=None, bias=None, eps=1e-5, *, out_dtype=None):  # type: ignore[no-untyped-def]
    function = "group_norm"
    check_tensor(function, "input", input)
    if input.dim() < 2:
        wrong_value(function, "input", "of shape (N, C, *), at least two dimensions", input)
    channels = input.shape[1]
    if not isinstance(num_groups, _INTEGERS) or isinstance(num_groups, bool):
        wrong_type(function, "num_groups", "an int", num_groups)
    if num_groups < 1 or channels % num_groups:
        wrong_value(function, "num_groups", f"a positive divisor of input's {channels} channels", num_groups)
    for argument, value in (("weight", weight), ("bias", bias)):
        check_parameter(function, argument, value, (channels,), input, "of shape {}, one element a channel of input")
    check_number(function, "eps", eps)
    _check_options(function, out_dtype, False)


def unsupported(input: torch.Tensor, shape: tuple[int, ...], *others: torch.Tensor | torch.dtype | None) -> list[str]:
    """Every reason why the norm kernels cannot take these arguments."""
    dtypes = (input.dtype, *[o if isinstance(o, torch.dtype) else o.dtype for o in others if o is not None])
    reasons = device_reasons(input.device, dtypes)
    width = 1
    for size in shape:
        width *= size
    if width > _MAX_WIDTH:
        reasons.append(f"a row has {width} elements: the kernels take up to {_MAX_WIDTH}")
    return reasons


def _layer_norm_reasons(input, normalized_shape, weight=None, bias=None, eps=1e-5, **options):  # type: ignore[no-untyped-def]
    shape = _check_layer_norm(input, normalized_shape, weight, bias, eps, **options)
    return input.device, unsupported(input, shape, weight, bias, options.get("out_dtype"))


def _rms_norm_reasons(input, normalized_shape, weight=None, eps=None, **options):  # type: ignore[no-untyped-def]
    shape = _check_rms_norm(input, normalized_shape, weight, eps, **options)
    return input.device, unsupported(input, shape, weight, options.get("out_dtype"))


def _add_layer_norm_reasons(input, residual, normalized_shape, weight=None, bias=None, eps=1e-5, **options):  # type: ignore[no-untyped-def]
    shape = _check_add_layer_norm(input, residual, normalized_shape, weight, bias, eps, **options)
    return input.device, unsupported(input, shape, residual, weight, bias, options.get("out_dtype"))


def _add_rms_norm_reasons(input, residual, normalized_shape, weight=None, eps=None, **options):  # type: ignore[no-untyped-def]
    shape = _check_add_rms_norm(input, residual, normalized_shape, weight, eps, **options)
    return input.device, unsupported(input, shape, residual, weight, options.get("out_dtype"))


def _l2_norm_reasons(input, dim=-1, eps=1e-12, *, out_dtype=None):  # type: ignore[no-untyped-def]
    dim = _check_l2_norm(input, dim, eps, out_dtype=out_dtype)
    return input.device, unsupported(input, (input.shape[dim],), out_dtype)


def _group_unsupported(input: torch.Tensor, num_groups: int, *others: torch.Tensor | torch.dtype | None) -> list[str]:
    """Every reason why the group norm kernels cannot take these arguments."""
    reasons = unsupported(input, (), *others)
    for size, what in ((input.shape[1], "channels"), (math.prod(input.shape[2:]), "positions a channel")):
        if size > _MAX_WIDTH:
            reasons.append(f"input has {size} {what}: the kernels take up to {_MAX_WIDTH}")
    if input.shape[0] * num_groups > _MAX_WIDTH:
        reasons.append(f"{input.shape[0]} times {num_groups} groups: the kernels take up to {_MAX_WIDTH} in all")
    return reasons


def _group_norm_reasons(input, num_groups, weight=None, bias=None, eps=1e-5, *, out_dtype=None):  # type: ignore[no-untyped-def]
    _check_group_norm(input, num_groups, weight, bias, eps, out_dtype=out_dtype)
    return input.device, _group_unsupported(input, num_groups, weight, bias, out_dtype)


@explainable(_layer_norm_reasons)
def layer_norm(
    input: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
    recompute: bool = False,
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
        out_dtype: dtype of the result. None: that of ``input`` (float32 under autocast on a GPU, as torch's).
        recompute: keep the output for the backward instead of the input, and compute the normalised input from it:
            nothing but one number a row where the output is kept anyway, as by a linear layer that reads it. A single
            weight that is zero makes its own gradient NaN and the input's gradient NaN everywhere; one far smaller
            than its bias makes them coarse.
            The kernels' backward only: the torch backend keeps what torch keeps.

    Returns:
        Shape of ``input``, dtype as above.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or device; the message names it.

    Examples:
        >>> import torch, fusedops
        >>> fusedops.layer_norm(torch.tensor([[1.0, 3.0]]), 2).round(decimals=3)
        tensor([[-1.,  1.]])
        >>> x, weight = torch.randn(4, 8, dtype=torch.float16), torch.ones(8)  # 16-bit activations, float32 weights
        >>> fusedops.layer_norm(x, 8, weight).dtype
        torch.float16
    """
    shape = _check_layer_norm(input, normalized_shape, weight, bias, eps, out_dtype=out_dtype, recompute=recompute)
    if (
        might_use_triton(input.device)
        and use_triton("layer_norm", unsupported(input, shape, weight, bias, out_dtype), input.device)
    ) or sharded(input):
        dtype = out_dtype or reference.output_dtype(input)
        return norm_op(input, None, weight, bias, None, len(shape), float(eps), 0.0, "layer", 0.0, dtype, recompute)[0]
    return reference.torch_norm(input, shape, weight, bias, float(eps), 0.0, "layer", out_dtype)


@explainable(_rms_norm_reasons)
def rms_norm(
    input: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    recompute: bool = False,
) -> torch.Tensor:
    """Root-mean-square normalisation over the last dimensions, as :func:`torch.nn.functional.rms_norm`.

    ``y = x / sqrt(mean(x²) + eps) * (weight + weight_offset)`` (Zhang, Sennrich 2019, "Root Mean Square Layer
    Normalization", equation 4). Statistics in float32; the backward is deterministic. Heads of queries or keys, a
    (batch, heads, sequence, head size) view of a projection, are normalised where they lie, without a copy.

    Args:
        input: (*, *normalized_shape); float32, float16 or bfloat16 (float64 on the torch backend), any strides.
        normalized_shape: the trailing shape that is normalised; an int stands for one dimension.
        weight: (*normalized_shape) or None (ones). Any floating dtype, float32 beside a 16-bit input too.
        eps: added to the mean square. None: the machine epsilon of float32 (of float64 for a float64 input).
        weight_offset: added to the weight before it multiplies; 1.0 for Gemma's models. Without a weight it has no
            effect.
        out_dtype: dtype of the result. None: that of ``input`` (float32 under autocast on a GPU, as torch's).
        recompute: as for :func:`layer_norm`.

    Returns:
        Shape of ``input``, dtype as above.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or device; the message names it.

    Examples:
        >>> import torch, fusedops
        >>> fusedops.rms_norm(torch.tensor([[3.0, 4.0]]), 2).round(decimals=3)
        tensor([[0.8490, 1.1310]])
        >>> x, weight = torch.randn(4, 8), torch.randn(8)
        >>> gemma = fusedops.rms_norm(x, 8, weight - 1, eps=1e-6, weight_offset=1.0)
        >>> torch.allclose(gemma, torch.nn.functional.rms_norm(x, (8,), weight, 1e-6), atol=1e-5)
        True
    """
    shape = _check_rms_norm(
        input, normalized_shape, weight, eps, weight_offset=weight_offset, out_dtype=out_dtype, recompute=recompute
    )
    if eps is None:
        eps = _EPS.get(input.dtype, _EPS_FLOAT32)
    if (
        might_use_triton(input.device)
        and use_triton("rms_norm", unsupported(input, shape, weight, out_dtype), input.device)
    ) or sharded(input):
        dtype = out_dtype or reference.output_dtype(input)
        return norm_op(
            input, None, weight, None, None, len(shape), float(eps), float(weight_offset), "rms", 0.0, dtype, recompute
        )[0]
    return reference.torch_norm(input, shape, weight, None, float(eps), float(weight_offset), "rms", out_dtype)


@explainable(_add_layer_norm_reasons)
def add_layer_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    dropout_p: float = 0.0,
    out_dtype: torch.dtype | None = None,
    recompute: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout, residual sum and layer normalisation in one pass over memory.

    ``residual_out = dropout(input) + residual`` and ``output = layer_norm(residual_out)``, as :func:`layer_norm`: what
    a transformer block does between two sublayers. The gradients of both results are honoured, and come back in one
    pass as well.

    Args:
        input: (*, *normalized_shape), what the sublayer gave; float32, float16 or bfloat16 (float64 on the torch
            backend), any strides.
        residual: shape of ``input``, the stream it is added to. Any floating dtype: a float32 stream beside 16-bit
            layers stays float32.
        normalized_shape, weight, bias, eps, recompute: as for :func:`layer_norm`.
        dropout_p: probability that an element of ``input`` is dropped; the others are divided by ``1 - dropout_p``.
            Drawn from torch's generator of the device, and drawn again rather than stored for the backward. Always
            applied: pass 0 for evaluation.
        out_dtype: dtype of ``output``. None: that of ``input`` (float32 under autocast on a GPU).

    Returns:
        output: shape of ``input``, dtype as above.
        residual_out: shape of ``input``; the dtype of ``input + residual``. ``output`` is the norm of exactly this.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or device; the message names it.

    Examples:
        >>> import torch, fusedops
        >>> output, stream = fusedops.add_layer_norm(torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 2.0]]), 2)
        >>> output.round(decimals=3), stream
        (tensor([[-1.,  1.]]), tensor([[1., 3.]]))
        >>> x, stream = torch.randn(4, 8, dtype=torch.float16), torch.randn(4, 8)  # a float32 stream stays float32
        >>> [result.dtype for result in fusedops.add_layer_norm(x, stream, 8)]
        [torch.float16, torch.float32]
    """
    shape = _check_add_layer_norm(
        input, residual, normalized_shape, weight, bias, eps,
        dropout_p=dropout_p, out_dtype=out_dtype, recompute=recompute,
    )  # fmt: skip
    if (
        might_use_triton(input.device)
        and use_triton("add_layer_norm", unsupported(input, shape, residual, weight, bias, out_dtype), input.device)
    ) or sharded(input):
        dtype = out_dtype or reference.output_dtype(input)
        seed = draw_seed(input, residual) if dropout_p else None
        return norm_op(
            input, residual, weight, bias, seed, len(shape), float(eps), 0.0, "layer", float(dropout_p), dtype,
            recompute,
        )[:2]  # fmt: skip
    return reference.torch_add_norm(
        input, residual, shape, weight, bias, float(eps), 0.0, "layer", float(dropout_p), out_dtype
    )


@explainable(_add_rms_norm_reasons)
def add_rms_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    dropout_p: float = 0.0,
    out_dtype: torch.dtype | None = None,
    recompute: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout, residual sum and root-mean-square normalisation in one pass over memory.

    ``residual_out = dropout(input) + residual`` and ``output = rms_norm(residual_out)``, as :func:`rms_norm`. The
    gradients of both results are honoured, and come back in one pass as well.

    Args:
        input, residual, dropout_p, out_dtype, recompute: as for :func:`add_layer_norm`.
        normalized_shape, weight, weight_offset: as for :func:`rms_norm`.
        eps: added to the mean square. None: the machine epsilon of float32 (of float64 for float64 tensors).

    Returns:
        output: shape of ``input``; dtype of ``input``, or ``out_dtype``.
        residual_out: shape of ``input``; the dtype of ``input + residual``. ``output`` is the norm of exactly this.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or device; the message names it.

    Examples:
        >>> import torch, fusedops
        >>> output, stream = fusedops.add_rms_norm(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 3.0]]), 2)
        >>> output.round(decimals=3), stream
        (tensor([[0.8490, 1.1310]]), tensor([[3., 4.]]))
    """
    shape = _check_add_rms_norm(
        input, residual, normalized_shape, weight, eps,
        weight_offset=weight_offset, dropout_p=dropout_p, out_dtype=out_dtype, recompute=recompute,
    )  # fmt: skip
    if eps is None:
        eps = _EPS.get(reference.residual_dtype(input, residual), _EPS_FLOAT32)
    if (
        might_use_triton(input.device)
        and use_triton("add_rms_norm", unsupported(input, shape, residual, weight, out_dtype), input.device)
    ) or sharded(input):
        dtype = out_dtype or reference.output_dtype(input)
        seed = draw_seed(input, residual) if dropout_p else None
        return norm_op(
            input, residual, weight, None, seed, len(shape), float(eps), float(weight_offset), "rms",
            float(dropout_p), dtype, recompute,
        )[:2]  # fmt: skip
    return reference.torch_add_norm(
        input, residual, shape, weight, None, float(eps), float(weight_offset), "rms", float(dropout_p), out_dtype
    )


@explainable(_l2_norm_reasons)
def l2_norm(
    input: torch.Tensor, dim: int = -1, eps: float = 1e-12, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Vectors of Euclidean length one: ``x / max(‖x‖₂, eps)``, as :func:`torch.nn.functional.normalize`.

    Norms are summed in float32. With the last dimension, any view that has unit stride there, such as the heads of
    queries and keys, is read where it lies.

    Args:
        input: any shape of at least one dimension; float32, float16 or bfloat16 (float64 on the torch backend), any
            strides.
        dim: the dimension that holds the vectors.
        eps: the least length that is divided by. A shorter vector is divided by ``eps``.
        out_dtype: dtype of the result. None: that of ``input`` (float32 under autocast on a GPU, as torch's).

    Returns:
        Shape of ``input``, dtype as above. With another dimension than the last, that one is innermost in its memory.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value; the message names it.

    Examples:
        >>> import torch, fusedops
        >>> fusedops.l2_norm(torch.tensor([[3.0, 4.0]]))
        tensor([[0.6000, 0.8000]])
        >>> fusedops.l2_norm(torch.tensor([[3.0, 0.0], [4.0, 0.0]]), dim=0)
        tensor([[0.6000, 0.0000],
                [0.8000, 0.0000]])
    """
    dim = _check_l2_norm(input, dim, eps, out_dtype=out_dtype)
    if (
        might_use_triton(input.device)
        and use_triton("l2_norm", unsupported(input, (input.shape[dim],), out_dtype), input.device)
    ) or sharded(input):
        dtype = out_dtype or reference.output_dtype(input)
        rows = input.movedim(dim, -1)
        output = norm_op(rows, None, None, None, None, 1, float(eps), 0.0, "l2", 0.0, dtype, False)[0]
        return output.movedim(-1, dim)
    if out_dtype is None or out_dtype == reference.output_dtype(input):
        return torch.nn.functional.normalize(input, 2.0, dim, float(eps))
    return reference.torch_norm(
        input.movedim(dim, -1), (input.shape[dim],), None, None, float(eps), 0.0, "l2", out_dtype
    ).movedim(-1, dim)


@explainable(_group_norm_reasons)
def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Group normalisation over groups of channels, as :func:`torch.nn.functional.group_norm`.

    ``y = (x - mean) / sqrt(var + eps) * weight + bias``, mean and (biased) variance over the C / num_groups channels
    of a group and all positions (Wu, He 2018, "Group Normalization", equations 1, 2, 6 and 7). Statistics in float32,
    centred before they are squared; the backward is deterministic. Contiguous and channels_last memory is read where
    it lies, and the result and the gradient of ``input`` keep that memory format.

    Args:
        input: (N, C, *), any number of trailing dimensions, none included; float32, float16 or bfloat16 (float64 on
            the torch backend), any strides (copied where the trailing dimensions cannot be viewed as one).
        num_groups: into how many groups of successive channels C is divided, without a remainder. 1: over all
            channels; C: each channel by itself (instance norm).
        weight: (C,) or None (ones). Any floating dtype, float32 beside a 16-bit input too.
        bias: (C,) or None (zeros). Any floating dtype.
        eps: added to the variance.
        out_dtype: dtype of the result. None: that of ``input`` (float32 under autocast on a GPU, as torch's).

    Returns:
        Shape of ``input``, dtype as above. A group of one element gives the bias, where torch's function raises.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, value or device; the message names it.

    Examples:
        >>> import torch, fusedops
        >>> fusedops.group_norm(torch.tensor([[1.0, 3.0, 10.0, 30.0]]), 2).round(decimals=3)
        tensor([[-1.,  1., -1.,  1.]])
        >>> images = torch.randn(2, 8, 5, 5)
        >>> torch.allclose(fusedops.group_norm(images, 4), torch.nn.functional.group_norm(images, 4), atol=1e-5)
        True
    """
    _check_group_norm(input, num_groups, weight, bias, eps, out_dtype=out_dtype)
    if (
        might_use_triton(input.device)
        and use_triton("group_norm", _group_unsupported(input, num_groups, weight, bias, out_dtype), input.device)
    ) or sharded(input):
        dtype = out_dtype or reference.output_dtype(input)
        return group_norm_op(input, weight, bias, int(num_groups), float(eps), dtype)[0]
    return reference.torch_group_norm(input, int(num_groups), weight, bias, float(eps), out_dtype)
