"""float8 products and products with int8 or int4 weights: right by the error rule; no gradient is lost in silence."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import fusedops
from fusedops.linear.functional_quantized import (
    dequantize_weight,
    fp8_linear,
    quantize_fp8,
    quantize_weight,
    quantized_linear,
)
from fusedops.linear.tuning_quantized import (
    DEFAULTS,
    Fp8Problem,
    QuantizedProblem,
    default_fp8_config,
    default_quantized_config,
    prune_fp8,
    prune_quantized,
    sums_in_float32,
)
from fusedops.runtime.backend import HAS_TRITON, float8_reasons
from fusedops.runtime.device import INTERPRETER, TARGETS, DeviceFacts, device_facts, pretend
from tests.harness.errors import check_error
from tests.harness.tensors import randn
from tests.linear.problems import DTYPES, TORCHS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
SIZES = [
    (1, 1, 2),
    (2, 15, 16),
    (1, 129, 100),
    (15, 17, 64),
    (63, 2, 130),
    (17, 63, 128),
    (129, 100, 62),
    (16, 64, 256),
]
LAYOUTS = ["transposed", "sliced", "strided", "expanded", "offset"]
EMPTY = [(0, 4, 6), (3, 0, 6), (3, 4, 0), (0, 0, 0)]


def name(sizes):
    return "M{}_N{}_K{}".format(*sizes)


def serves_fp8(runner, *dtypes):
    """Skip where the device has no such float8; the torch backend has all."""
    reasons = float8_reasons(runner.device, dtypes) if runner.kernels else []
    if reasons:
        pytest.skip("; ".join(reasons))


def laid_out(values, layout):
    """The values in memory of another layout, NaN (or the largest integers) between and around them."""
    bits = values.view(torch.uint8)
    if layout == "expanded":
        return values[:1].expand(values.shape)
    if layout == "transposed":
        return bits.t().contiguous().t().view(values.dtype)
    step = 2 if layout == "strided" else 1
    edge = {"sliced": 3, "offset": 1, "strided": 0}[layout]
    shape = [2 * edge + size for size in values.shape]
    shape[-1] *= step
    whole = torch.full(shape, 0x7F, dtype=torch.uint8, device=values.device)
    if layout == "offset":
        flat = whole.flatten()[1 : 1 + values.numel()]
        flat.copy_(bits.flatten())
        return flat.view(values.shape).view(values.dtype)
    view = whole[
        tuple(slice(edge, edge + size * (step if d else 1), step if d else 1) for d, size in enumerate(values.shape))
    ]
    view.copy_(bits)
    return view.view(values.dtype)


def fp8_operands(runner, shape, out_features, dtypes=(E4M3, E4M3), rows=(True, True)):
    x, scale_x = quantize_fp8(randn(*shape, device=runner.device), dtypes[0], per_row=rows[0])
    w, scale_w = quantize_fp8(randn(out_features, shape[-1], device=runner.device), dtypes[1], per_row=rows[1])
    return x, w, scale_x, scale_w * max(shape[-1], 1) ** -0.5


def check_fp8(x, w, scale_x, scale_w, bias=None, activation=None, out_dtype=torch.bfloat16):
    """fp8_linear against float64 of the dequantised operands, as near as their product in float32."""
    y = fp8_linear(x, w, scale_x, scale_w, bias, activation, out_dtype=out_dtype)

    def composed(dtype):
        row_scales = scale_x.to(dtype)
        if scale_x.numel() != 1:
            row_scales = row_scales.reshape(*x.shape[:-1], 1)
        weight = w.to(dtype) * scale_w.to(dtype).reshape(-1, 1)
        z = torch.nn.functional.linear(x.to(dtype) * row_scales, weight, None if bias is None else bias.to(dtype))
        return TORCHS[activation](z)

    check_error(y, composed(torch.float64), composed(torch.float32).to(out_dtype))
    return y


@pytest.mark.parametrize("sizes", SIZES, ids=name)
def test_fp8_any_size(runner, sizes):
    serves_fp8(runner, E4M3)
    rows, out_features, in_features = sizes
    bias = randn(out_features, device=runner.device)
    check_fp8(*fp8_operands(runner, (rows, in_features), out_features), bias, "gelu", torch.float32)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtypes", list(itertools.product((E4M3, E5M2), repeat=2)), ids=str)
def test_fp8_dtypes(runner, dtypes, out_dtype):
    serves_fp8(runner, *dtypes)
    bias = randn(50, dtype=torch.bfloat16, device=runner.device)
    y = check_fp8(*fp8_operands(runner, (33, 96), 50, dtypes), bias, "silu", out_dtype)
    assert y.dtype == out_dtype


@pytest.mark.parametrize("dtype", FNUZ, ids=str)
def test_fp8_without_infinities_on_the_torch_backend(dtype):
    with fusedops.backend("torch"):
        x, w, scale_x, scale_w = (t for t in fp8_operands(_Cpu, (5, 32), 7, (dtype, FNUZ[0])))
        check_fp8(x, w, scale_x, scale_w, out_dtype=torch.float32)


class _Cpu:
    device, kernels = torch.device("cpu"), False


@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("rows", list(itertools.product((False, True), repeat=2)), ids=str)
def test_fp8_scales_of_the_tensor_or_of_rows(runner, rows, lead):
    """Both shapes that a scale a row may have; one of one element may have any."""
    serves_fp8(runner, E4M3)
    x, w, scale_x, scale_w = fp8_operands(runner, (*lead, 32), 20, rows=rows)
    y = check_fp8(x, w, scale_x, scale_w, out_dtype=torch.float32)
    shaped = scale_x[..., 0] if rows[0] else scale_x.reshape(1, 1)
    assert torch.equal(y, fp8_linear(x, w, shaped, scale_w.flatten(), out_dtype=torch.float32))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["x", "weight"])
def test_fp8_any_strides_and_neighbours_that_are_nan(runner, which, layout):
    serves_fp8(runner, E4M3)
    x, w, scale_x, scale_w = fp8_operands(runner, (9, 48), 21)
    x, w = (laid_out(x, layout), w) if which == "x" else (x, laid_out(w, layout))
    check_fp8(x, w, scale_x.expand(9, 1), scale_w, randn(42, device=runner.device)[::2], out_dtype=torch.float32)


@pytest.mark.parametrize("which", ["input", "weight"])
@pytest.mark.parametrize("kind", ["strided", "expanded"])
def test_fp8_scales_of_any_strides(runner, kind, which):
    serves_fp8(runner, E4M3)
    x, w, scale_x, scale_w = fp8_operands(runner, (9, 48), 21)
    scales = {"input": (scale_x, (9, 1)), "weight": (scale_w, (21,))}
    scale, shape = scales[which]
    if kind == "strided":
        apart = torch.full((*shape, 3), float("nan"), device=runner.device)[..., 1]
        scale = apart.copy_(torch.rand(shape, device=runner.device) + 0.5)
    else:
        scale = torch.full((1,), 0.75, device=runner.device).expand(shape)
    scale_x, scale_w = (scale, scale_w) if which == "input" else (scale_x, scale)
    check_fp8(x, w, scale_x, scale_w, None, out_dtype=torch.float32)


@pytest.mark.parametrize("backend", ["auto", "triton", "torch"])
def test_meta_tensors_need_no_data(backend):
    x, w = torch.empty(3, 16, device="meta"), torch.empty(5, 16, dtype=torch.int8, device="meta")
    eights = [torch.empty(s, dtype=E4M3, device="meta") for s in ((3, 16), (5, 16))]
    with fusedops.backend(backend):
        y = fusedops.quantized_linear(x, w, torch.empty(5, device="meta"))
        z = fusedops.fp8_linear(*eights, torch.empty((), device="meta"), torch.empty(5, device="meta"))
    assert (y.shape, y.dtype, z.shape, z.dtype) == ((3, 5), torch.float32, (3, 5), torch.bfloat16)


def test_fp8_nan_and_infinities_pass(runner):
    serves_fp8(runner, E5M2)
    x = torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0], [0.0, 0.0]], device=runner.device).to(E5M2)
    w = torch.ones(3, 2, device=runner.device).to(E4M3)
    one = torch.ones((), device=runner.device)
    expected = torch.tensor([3.0, float("nan"), float("inf"), 0.0], device=runner.device)[:, None].expand(4, 3)
    torch.testing.assert_close(fp8_linear(x, w, one, one, out_dtype=torch.float32), expected, equal_nan=True)


@pytest.mark.parametrize("sizes", EMPTY, ids=name)
def test_fp8_empty(runner, sizes):
    serves_fp8(runner, E4M3)
    rows, out_features, in_features = sizes
    x, w, scale_x, scale_w = fp8_operands(runner, (rows, in_features), out_features)
    bias = randn(out_features, device=runner.device)
    y = fp8_linear(x, w, scale_x, scale_w, bias, "relu", out_dtype=torch.float32)
    torch.testing.assert_close(y, bias.relu().expand(rows, -1), rtol=0, atol=0)


# Quantising to float8


@pytest.mark.parametrize("per_row", [False, True], ids=["tensor", "rows"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2, *FNUZ], ids=str)
def test_quantize_fp8(dtype, per_row):
    tensor = torch.randn(4, 5, 32) * torch.logspace(-6, 6, 5)[:, None]
    tensor[2, 3] = 0
    quantized, scale = quantize_fp8(tensor, dtype, per_row)
    assert quantized.dtype == dtype
    assert quantized.shape == tensor.shape
    assert (scale.dtype, scale.shape) == (torch.float32, (4, 5, 1) if per_row else ())
    largest = quantized.float().abs().amax(-1) if per_row else quantized.float().abs().amax()
    assert (largest[largest > 0] == torch.finfo(dtype).max).all()
    if per_row:
        assert scale[2, 3] == 1
    # Half a step of the mantissa, or half the smallest number.
    back, mantissa = quantized.float() * scale, {E4M3: 3, FNUZ[0]: 3}.get(dtype, 2)
    allowed = tensor.abs() * 2.0 ** -(mantissa + 1) + torch.finfo(dtype).smallest_normal * 2.0**-mantissa * scale
    assert ((back - tensor).abs() <= allowed * 1.001).all()


def test_quantize_fp8_special_values():
    tensor = torch.tensor([1.0, float("nan"), float("inf"), float("-inf"), -2.0])
    quantized, scale = quantize_fp8(tensor)
    assert scale == torch.tensor(2.0) / 448
    torch.testing.assert_close(
        quantized.float(), torch.tensor([224.0, float("nan"), 448, -448, -448]), equal_nan=True, rtol=0, atol=0
    )
    for shape in ((0,), (2, 0), (0, 3)):
        quantized, scale = quantize_fp8(torch.zeros(shape), per_row=True)
        assert (quantized.shape, scale.shape) == (shape, (*shape[:-1], 1))
    # A scale is a normal number, whatever the tensor: half of its smallest multiple is lost at most.
    tiny = torch.full((3,), 1e-42)
    quantized, scale = quantize_fp8(tiny)
    assert scale == torch.finfo(torch.float32).tiny
    assert ((quantized.float() * scale - tiny).abs() <= scale * 2.0**-10).all()
    assert not quantize_fp8(torch.ones(3, requires_grad=True))[0].requires_grad


# Weights of 8 and of 4 bits


def quantized_operands(runner, shape, out_features, bits, group_size=None, dtype=torch.float32):
    weight, scales = quantize_weight(randn(out_features, shape[-1], device=runner.device), bits, group_size)
    return randn(*shape, dtype=dtype, device=runner.device), weight, scales * max(shape[-1], 1) ** -0.5


def check_quantized(x, weight, scales, bias=None, activation=None, group_size=None, out_dtype=None):
    """quantized_linear against float64, as near as torch's product with the dequantised weight in the input's dtype."""
    y = quantized_linear(x, weight, scales, bias, activation, group_size=group_size, out_dtype=out_dtype)

    def composed(dtype):
        w = dequantize_weight(weight, scales, group_size=group_size, dtype=dtype)
        z = torch.nn.functional.linear(x.to(dtype), w, None if bias is None else bias.to(dtype))
        return TORCHS[activation](z)

    check_error(y, composed(torch.float64), composed(x.dtype).to(y.dtype))
    return y


@pytest.mark.parametrize(
    ("bits", "sizes"),
    [*((bits, sizes) for bits in (8, 4) for sizes in SIZES), (8, (3, 5, 1)), (8, (2, 70, 15)), (8, (1, 3, 63))],
    ids=lambda value: name(value) if isinstance(value, tuple) else f"int{value}",
)
def test_quantized_any_size(runner, sizes, bits):
    rows, out_features, in_features = sizes
    bias = randn(out_features, device=runner.device)
    check_quantized(*quantized_operands(runner, (rows, in_features), out_features, bits), bias, "gelu")


@pytest.mark.parametrize("group_size", [None, 16, 48, 96], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_dtypes_and_groups(runner, bits, dtype, group_size):
    x, weight, scales = quantized_operands(runner, (20, 96), 50, bits, group_size, dtype)
    bias = randn(50, device=runner.device)
    check_quantized(x, weight, scales, bias, "silu", group_size)
    if dtype != torch.float32:
        y = check_quantized(x, weight, scales.to(dtype), bias.to(dtype), None, group_size, torch.float32)
        assert y.dtype == torch.float32


@pytest.mark.parametrize("bits", [8, 4])
def test_every_stored_number_is_read_right(runner, bits):
    """All 256 bytes, and each place in a word: a product with unit vectors gives the weight back."""
    stored = torch.arange(256, device=runner.device).to(torch.uint8).reshape(8, 32)
    weight = stored.view(torch.int8) if bits == 8 else stored
    nibbles = torch.stack((stored & 0xF, stored >> 4), -1).flatten(1).float() - 8
    values = weight.float() if bits == 8 else nibbles
    scales = 2.0 ** torch.arange(8, device=runner.device)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        eye = torch.eye(values.shape[1], device=runner.device, dtype=dtype)
        y = quantized_linear(eye, weight, scales, out_dtype=torch.float32)
        assert torch.equal(y.t(), values * scales[:, None])


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
def test_quantized_any_leading_dimensions(runner, lead):
    y = check_quantized(*quantized_operands(runner, (*lead, 32), 12, 4, 16), None, "relu", 16)
    assert y.shape == (*lead, 12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["x", "weight", "scales"])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_any_strides_and_neighbours_that_are_nan(runner, which, layout, bits):
    x, weight, scales = quantized_operands(runner, (9, 64), 21, bits, 16, torch.bfloat16)
    if which == "x":
        x = randn(9, 64, dtype=torch.bfloat16, device=runner.device, layout=layout)
    elif which == "weight":
        weight = laid_out(weight, layout)
    else:
        scales = randn(*scales.shape, device=runner.device, layout=layout)
    check_quantized(x, weight, scales, randn(42, device=runner.device)[::2], None, 16)


@pytest.mark.parametrize("sizes", EMPTY, ids=name)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group_size", [None, 16])
def test_quantized_empty(runner, sizes, bits, group_size):
    rows, out_features, in_features = sizes
    if group_size and in_features:
        in_features = 32
    x, weight, scales = quantized_operands(runner, (rows, in_features), out_features, bits, group_size)
    bias = randn(out_features, device=runner.device)
    y = quantized_linear(x, weight, scales, bias, "relu", group_size=group_size)
    assert y.shape == (rows, out_features)
    if in_features == 0:
        torch.testing.assert_close(y, bias.relu().expand(rows, -1), rtol=0, atol=0)


@pytest.mark.parametrize("splits", [2, 3, 7])
@pytest.mark.parametrize("bits", [8, 4])
def test_splits_of_the_summed_dimension(kernel_runner, monkeypatch, bits, splits):
    """Parts that do not come out even, and more parts than there are steps; the same bits in every run."""
    use_config(monkeypatch, splits=splits, depth=32)
    x, weight, scales = quantized_operands(kernel_runner, (3, 160), 70, bits, 32, torch.bfloat16)
    bias = randn(70, device=kernel_runner.device)
    y = check_quantized(x, weight, scales, bias, "gelu", 32)
    again = quantized_linear(x, weight, scales, bias, "gelu", group_size=32)
    assert torch.equal(y, again)


@pytest.mark.parametrize(
    "config", [{"rows": 16, "cols": 32, "depth": 16}, {"rows": 32, "cols": 128, "depth": 128}], ids=str
)
@pytest.mark.parametrize("bits", [8, 4])
def test_any_configuration_gives_the_result(kernel_runner, monkeypatch, config, bits):
    use_config(monkeypatch, **config)
    check_quantized(*quantized_operands(kernel_runner, (35, 256), 50, bits, 128, torch.float16), None, None, 128)


def use_config(monkeypatch, **fields):
    from fusedops.linear import kernels_quantized

    def chosen(operator, problem, device):
        return replace(operator.default(problem, device_facts(device)), **fields)

    monkeypatch.setattr(kernels_quantized, "resolve", chosen)


def test_nan_passes_and_stays_in_its_row(runner):
    x, weight, scales = quantized_operands(runner, (3, 32), 5, 4)
    x[1, 7] = float("nan")
    y = quantized_linear(x, weight, scales)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.interpreter
def test_offsets_past_two_to_the_31(kernel_runner):
    """Rows so far apart that their offsets leave an int32; the interpreter reports a wrap."""
    stride = 2**28 + 16

    def far(values):
        memory = torch.from_numpy(np.empty(8 * stride + values.shape[1], dtype=np.int8)).view(values.dtype)
        return memory.as_strided(values.shape, (stride, 1)).copy_(values)

    x, weight, scales = quantized_operands(kernel_runner, (9, 32), 9, 8)
    assert torch.equal(quantized_linear(x, far(weight), scales), quantized_linear(x, weight, scales))
    x, w, scale_x, scale_w = fp8_operands(kernel_runner, (9, 32), 9)
    assert torch.equal(fp8_linear(far(x), far(w), scale_x, scale_w), fp8_linear(x, w, scale_x, scale_w))


# Quantising weights


@pytest.mark.parametrize("group_size", [None, 32], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_quantize_weight_rounds_to_nearest(bits, group_size):
    weight = torch.randn(6, 64)
    weight[2, :32] = 0
    weight[3] = 0
    quantized, scales = quantize_weight(weight, bits, group_size)
    assert (quantized.dtype, quantized.shape) == ((torch.int8, (6, 64)) if bits == 8 else (torch.uint8, (6, 32)))
    assert scales.shape == ((6,) if group_size is None else (6, 2))
    assert (scales[3] == 1).all()
    back = dequantize_weight(quantized, scales, group_size=group_size)
    steps = scales.reshape(6, -1, 1).expand(6, -1, 64 // (1 if group_size is None else 2)).reshape(6, 64)
    assert ((back - weight).abs() <= steps / 2 * 1.0001).all()
    assert back[weight == 0].eq(0).all()


def test_quantize_weight_special_values():
    weight = torch.ones(4, 32)
    weight[0, 0], weight[1, 0] = float("nan"), float("inf")
    weight[2] = 1e-41
    for bits in (8, 4):
        back = dequantize_weight(*quantize_weight(weight, bits))
        assert back[:2].isnan().all()
        torch.testing.assert_close(back[2:], weight[2:], rtol=1e-6, atol=1e-38)
    assert not quantize_weight(weight.requires_grad_())[1].requires_grad


# What the functions are not for, and what they compose with


def test_a_required_gradient_is_an_error_and_not_lost(kernel_runner):
    x, weight, scales = quantized_operands(kernel_runner, (3, 32), 5, 8)
    bias = randn(5, device=kernel_runner.device)
    for leaf in (x, scales, bias):
        leaf.requires_grad_()
        with pytest.raises(RuntimeError, match=r"quantized_linear: .* no gradient.*no_grad.*backend\(\"torch\"\)"):
            quantized_linear(x, weight, scales, bias)
        with pytest.raises(RuntimeError, match=r"QuantizedLinear: .* argument . "):
            torch.ops.fusedops.quantized_linear(x, weight, scales, bias, None, None, torch.float32, "ieee")
        with torch.no_grad():
            assert not quantized_linear(x, weight, scales, bias).requires_grad
        leaf.requires_grad_(False)
    with fusedops.backend("torch"):
        y = quantized_linear(x.requires_grad_(), weight, scales)
        (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, dequantize_weight(weight, scales).sum(0).expand(3, -1))


def test_a_required_gradient_of_an_fp8_argument(kernel_runner):
    serves_fp8(kernel_runner, E4M3)
    x, w, scale_x, scale_w = fp8_operands(kernel_runner, (3, 32), 5)
    scale_x.requires_grad_()
    with pytest.raises(RuntimeError, match=r"fp8_linear: .* no gradient"):
        fp8_linear(x, w, scale_x, scale_w)
    with pytest.raises(RuntimeError, match=r"Fp8Linear: .* argument 2 "):
        torch.ops.fusedops.fp8_linear(x, w, scale_x, scale_w, None, None, torch.float32)


def test_opcheck(kernel_runner):
    serves_fp8(kernel_runner, E4M3)
    operands = fp8_operands(kernel_runner, (2, 3, 32), 5)
    before = [t.view(torch.uint8).clone() for t in operands]
    # Not test_schema, which multiplies the arguments to see whether they changed: torch does not multiply float8.
    torch.library.opcheck(
        torch.ops.fusedops.fp8_linear.default,
        (*operands, None, "gelu", torch.bfloat16),
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
    assert all(torch.equal(t.view(torch.uint8), bits) for t, bits in zip(operands, before, strict=True))
    for bits in (8, 4):
        operands = quantized_operands(kernel_runner, (2, 3, 32), 5, bits, 16)
        bias = randn(5, device=kernel_runner.device)
        arguments = (*operands, bias, "silu", 16, torch.float16, "ieee")
        torch.library.opcheck(torch.ops.fusedops.quantized_linear.default, arguments)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_equals_eager(kernel_runner, dynamic):
    runner = kernel_runner
    serves_fp8(runner, E4M3)

    def function(x, weight, scales, scale_x, scale_w):
        y = quantized_linear(x, weight, scales, None, "gelu", group_size=16)
        return fp8_linear(x.to(E4M3), weight.to(E4M3), scale_x, scale_w), y

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 6):
        x, weight, scales = quantized_operands(runner, (rows, 32), 5, 8, 16)
        arguments = (x, weight, scales, torch.rand(rows, 1, device=x.device), torch.rand(5, device=x.device))
        for eager, traced in zip(function(*arguments), compiled(*arguments), strict=True):
            assert torch.equal(eager, traced)


def test_autocast(runner):
    """The input is computed in autocast's dtype, and the torch backend's float32 product stays one."""
    x, weight, scales = quantized_operands(runner, (3, 32), 5, 8)
    with torch.autocast(runner.device.type, dtype=torch.bfloat16):
        y = quantized_linear(x, weight, scales)
    assert torch.equal(y, quantized_linear(x.bfloat16(), weight, scales))
    serves_fp8(runner, E4M3)
    operands = fp8_operands(runner, (3, 32), 5)
    with torch.autocast(runner.device.type, dtype=torch.bfloat16):
        y = fp8_linear(*operands, out_dtype=torch.float32)
    assert torch.equal(y, fp8_linear(*operands, out_dtype=torch.float32))


def test_float64_on_the_torch_backend():
    x, weight, scales = quantized_operands(_Cpu, (3, 32), 5, 4)
    with fusedops.backend("torch"):
        y = quantized_linear(x.double(), weight, scales)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, x.double() @ dequantize_weight(weight, scales, dtype=torch.float64).t())


# Which backend


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("target", "dtype", "reason"),
    [
        ("sm_80", E4M3, "float8 needs sm_89 or newer"),
        ("sm_90", E4M3, None),
        ("sm_90", FNUZ[0], "float8_e4m3fnuz: H100 .* multiplies float8_e4m3fn and float8_e5m2"),
        ("gfx942", FNUZ[0], None),
        ("gfx942", E4M3, "float8_e4m3fn: MI300X .* multiplies float8_e4m3fnuz"),
        ("gfx950", E5M2, None),
        ("gfx1100", E4M3, "float8 needs gfx942 or gfx950"),
    ],
    ids=str,
)
def test_explain_names_the_devices_float8(target, dtype, reason):
    x, w = (torch.zeros(4, 16, dtype=torch.uint8).view(dtype) for _ in range(2))
    one = torch.ones(())
    with pretend(TARGETS[target]):
        explanation = fusedops.explain(fp8_linear, x, w, one, one)
    if reason is None:
        assert explanation.backend == "triton", explanation
    else:
        assert explanation.backend == "torch"
        assert re.search(reason, "\n".join(explanation.reasons)), explanation


@pytest.mark.interpreter
def test_an_interpreter_that_reads_float8_wrongly_is_not_used(monkeypatch):
    from fusedops.runtime import backend

    monkeypatch.setattr(backend, "interpreter_knows_float8", False)
    x, w, scale_x, scale_w = fp8_operands(_Cpu, (3, 32), 5)
    explanation = fusedops.explain(fp8_linear, x, w, scale_x, scale_w)
    assert explanation.backend == "torch"
    assert "interpreter" in explanation.reasons[0]


def test_explain_quantized():
    x, weight, scales = quantized_operands(_Cpu, (3, 32), 5, 4)
    explanation = fusedops.explain(quantized_linear, x.double(), weight, scales)
    assert explanation.backend == "torch"
    assert any("float64" in reason for reason in explanation.reasons)


# Wrong arguments

X8 = torch.ones(2, 32).to(E4M3)
W8 = torch.ones(4, 32).to(E4M3)
ONE = torch.ones(())
X, W, S, B = torch.ones(2, 32), torch.ones(4, 32, dtype=torch.int8), torch.ones(4), torch.ones(4)
PACKED = torch.zeros(4, 16, dtype=torch.uint8)

WRONG = {
    "fp8 input is float": (fp8_linear, TypeError, "input must be .*float8_e4m3fn.*got a float32",
                           (X, W8, ONE, ONE), {}),
    "fp8 input is a list": (fp8_linear, TypeError, "input must be a torch.Tensor", ([1], W8, ONE, ONE), {}),
    "fp8 input is a scalar": (fp8_linear, ValueError, "input must be of at least one", (X8[0, 0], W8, ONE, ONE), {}),
    "fp8 weight is integral": (fp8_linear, TypeError, "weight must be .*got a int8", (X8, W, ONE, ONE), {}),
    "fp8 weight is too short": (fp8_linear, ValueError, r"weight must be of shape \(out_features, 32\)",
                                (X8, W8[:, 1:], ONE, ONE), {}),
    "fp8 weight is of another kind": (fp8_linear, TypeError, "weight must be of input's kind of float8",
                                      (X8, W8.to(FNUZ[0]), ONE, ONE), {}),
    "fp8 weight is elsewhere": (fp8_linear, ValueError, "weight must be on the device",
                                (X8, W8.to("meta"), ONE, ONE), {}),
    "fp8 scale_input is a number": (fp8_linear, TypeError, "scale_input must be a torch.Tensor",
                                    (X8, W8, 1.0, ONE), {}),
    "fp8 scale_input is half": (fp8_linear, TypeError, "scale_input must be .*float32", (X8, W8, ONE.half(), ONE), {}),
    "fp8 scale_input has three": (fp8_linear, ValueError, r"scale_input must be of one element, or .*\(2,\) or .*",
                                  (X8, W8, torch.ones(3), ONE), {}),
    "fp8 scale_weight is a row": (fp8_linear, ValueError, r"scale_weight must be of one element, or .*\(4,\)",
                                  (X8, W8, ONE, torch.ones(1, 4)), {}),
    "fp8 scale_weight is elsewhere": (fp8_linear, ValueError, "scale_weight must be on",
                                      (X8, W8, ONE, ONE.to("meta")), {}),
    "fp8 bias is too long": (fp8_linear, ValueError, r"bias must be of shape \(4,\)", (X8, W8, ONE, ONE, X[0]), {}),
    "fp8 activation": (fp8_linear, ValueError, "activation must be None or", (X8, W8, ONE, ONE, None, "swish"), {}),
    "fp8 out_dtype is double": (fp8_linear, ValueError, "out_dtype must be bfloat16", (X8, W8, ONE, ONE),
                                {"out_dtype": torch.float64}),
    "fp8 out_dtype is text": (fp8_linear, TypeError, "out_dtype must be a torch.dtype", (X8, W8, ONE, ONE),
                              {"out_dtype": "float32"}),
    "input is integral": (quantized_linear, TypeError, "input must be a floating", (W, W, S), {}),
    "input is a scalar": (quantized_linear, ValueError, "input must be of at least one", (ONE, W, S), {}),
    "weight is float": (quantized_linear, TypeError, "weight must be .*int8, or uint8.*got a float32", (X, X, S), {}),
    "weight is a vector": (quantized_linear, ValueError, "weight must be of two dimensions", (X, W[0], S), {}),
    "weight is too short": (quantized_linear, ValueError, "weight must be of 32 in_features", (X, W[:, 1:], S), {}),
    "packed weight is too long": (quantized_linear, ValueError, "weight must be of 32 in_features",
                                  (X, W.view(torch.uint8), S), {}),
    "scales are half beside float": (quantized_linear, TypeError, "scales must be .*float32", (X, W, S.half()), {}),
    "scales are too few": (quantized_linear, ValueError, r"scales must be of shape \(4,\)", (X, W, S[:3]), {}),
    "scales of groups are too few": (quantized_linear, ValueError, r"scales must be of shape \(4, 2\)", (X, W, S),
                                     {"group_size": 16}),
    "scales are elsewhere": (quantized_linear, ValueError, "scales must be on the device", (X, W, S.to("meta")), {}),
    "group_size does not divide": (quantized_linear, ValueError, "group_size must be .* multiple of 16", (X, W, S),
                                   {"group_size": 48}),
    "group_size is 8": (quantized_linear, ValueError, "group_size must be .* multiple of 16", (X, W, S),
                        {"group_size": 8}),
    "group_size is 0": (quantized_linear, ValueError, "group_size must be", (X, W, S), {"group_size": 0}),
    "group_size is a float": (quantized_linear, TypeError, "group_size must be", (X, W, S), {"group_size": 16.0}),
    "bias is a matrix": (quantized_linear, ValueError, r"bias must be of shape \(4,\)", (X, W, S, B[None]), {}),
    "activation is a function": (quantized_linear, TypeError, "activation must be", (X, W, S, B, torch.relu), {}),
    "out_dtype is integral": (quantized_linear, ValueError, "out_dtype must be a floating", (X, W, S),
                              {"out_dtype": torch.int8}),
    "tensor is integral": (quantize_fp8, TypeError, "tensor must be a floating", (W,), {}),
    "tensor is a scalar": (quantize_fp8, ValueError, "tensor must be of at least one", (ONE,), {"per_row": True}),
    "dtype is half": (quantize_fp8, ValueError, "dtype must be a float8", (X, torch.float16), {}),
    "dtype is text": (quantize_fp8, TypeError, "dtype must be a torch.dtype", (X, "fp8"), {}),
    "weight to quantize is a vector": (quantize_weight, ValueError, "weight must be of two dimensions", (X[0],), {}),
    "weight to quantize is odd": (quantize_weight, ValueError, "weight must be of an even number", (X[:, 1:], 4), {}),
    "bits are 3": (quantize_weight, ValueError, "bits must be 8 or 4", (X, 3), {}),
    "bits are text": (quantize_weight, TypeError, "bits must be 8 or 4", (X, "8"), {}),
    "group_size to quantize": (quantize_weight, ValueError, "group_size must be", (X, 8, 24), {}),
    "dtype to dequantize": (dequantize_weight, ValueError, "dtype must be a floating", (W, S), {"dtype": torch.int8}),
    "scales to dequantize": (dequantize_weight, ValueError, "scales must be of shape", (W, S[:2]), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_wrong_arguments(backend, case):
    function, error, message, args, kwargs = WRONG[case]
    with fusedops.backend(backend), pytest.raises(error, match=f"{function.__name__}: {message}"):
        function(*args, **kwargs)


# Configurations

UNKNOWN = [
    DeviceFacts("nvidia", "sm_87", "a small board", 16, 166912),
    DeviceFacts("nvidia", "sm_90", "with little", 132, 101376),
    DeviceFacts("nvidia", "sm_121", "a workstation", 48, 101376),
    DeviceFacts("nvidia", "sm_130", "what comes", 200, 232448),
    DeviceFacts("amd", "gfx1201", "a card", 64, 65536, 32),
]


@pytest.mark.parametrize(
    "facts", [*TARGETS.values(), *UNKNOWN, INTERPRETER], ids=lambda f: f"{f.arch}_{f.shared_memory}"
)
def test_every_problem_has_a_configuration_that_fits(facts):
    def fits(config, itemsizes):
        words = (config.rows * itemsizes[0] + config.cols * itemsizes[1]) * config.depth * config.num_stages
        assert words <= facts.shared_memory
        assert config.num_warps * facts.warp_size <= 1024
        assert config.depth >= 16

    sizes = ((0, 1, 16, 100, 5000), (0, 33, 64, 5000), (0, 63, 4096))
    for (m, n, k), aligned in itertools.product(itertools.product(*sizes), (True, False)):
        kinds = ("float16", "float32"), ("ieee", "tf32")
        for group, bits, dtype, precision in itertools.product((0, 16, 48, 128), (8, 4), *kinds):
            problem = QuantizedProblem.of(
                m, n, k, group=group, bits=bits, dtype=dtype, precision=precision, aligned=aligned
            )
            config = default_quantized_config(problem, facts)
            fits(config, (problem.itemsize, 1))
            assert prune_quantized(config, problem, facts) is None, (problem, config)
            assert 1 <= config.splits <= 32
            assert problem.step < 16 or problem.step % config.depth == 0
        if multiplies_fp8(facts):
            for exact in {False, not sums_in_float32(facts)}:
                fp8 = Fp8Problem.of(m, n, k, aligned=aligned, exact=exact)
                config = default_fp8_config(fp8, facts)
                assert prune_fp8(config, fp8, facts) is None, (fp8, config)
                fits(config, (1, 1))
                assert config.depth >= 32


def multiplies_fp8(facts):
    with pretend(facts):
        return not float8_reasons(torch.device("cpu"), (FNUZ[0] if facts.arch == "gfx942" else E4M3,))


def test_few_rows_of_a_narrow_weight_are_split():
    facts = TARGETS["sm_90"]
    narrow = default_quantized_config(QuantizedProblem.of(1, 4096, 4096, group=128, bits=4), facts)
    wide = default_quantized_config(QuantizedProblem.of(1, 2**17, 4096, group=128, bits=4), facts)
    many = default_quantized_config(QuantizedProblem.of(4096, 4096, 4096, group=128, bits=4), facts)
    assert narrow.splits > 1
    assert wide.splits == many.splits == 1
    assert set(DEFAULTS) >= {"sm_75", "sm_80", "sm_90", "sm_100", "gfx942", "gfx1100"}
