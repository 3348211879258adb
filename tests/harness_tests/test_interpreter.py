"""The repaired interpreter computes what a GPU would, and reports what a GPU would hide."""

from __future__ import annotations

import math

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from tests.harness import interpreter  # noqa: E402
from tests.harness.interpreter import DataRace, IntegerOverflow, OutOfBounds  # noqa: E402

pytestmark = pytest.mark.interpreter

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@triton.jit
def elementwise_kernel(X, Y, OUT, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(X + at)
    y = tl.load(Y + at)
    if OP == "add":
        z = x + y
    elif OP == "sub":
        z = x - y
    elif OP == "mul":
        z = x * y
    elif OP == "div":
        z = x / y
    elif OP == "neg":
        z = -x
    elif OP == "abs":
        z = tl.abs(x)
    elif OP == "maximum":
        z = tl.maximum(x, y)
    elif OP == "minimum":
        z = tl.minimum(x, y)
    elif OP == "where":
        z = tl.where(x > y, x, y)
    elif OP == "plus_one":
        z = x + 1
    elif OP == "through_float32":
        z = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
    elif OP == "through_int32":
        z = x.to(tl.int32).to(x.dtype)
    tl.store(OUT + at, z)


ELEMENTWISE = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": torch.maximum,
    "plus_one": lambda x, y: x + 1,
    "through_float32": torch.add,
    "through_int32": lambda x, y: x.to(torch.int32).to(x.dtype),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ELEMENTWISE)
def test_arithmetic_is_torchs_to_the_bit(op, dtype):
    x, y = (torch.randn(256).mul(5).to(dtype) for _ in range(2))
    out = torch.empty_like(x)
    elementwise_kernel[(1,)](x, y, out, OP=op, BLOCK=256)
    expected = ELEMENTWISE[op](x, y)
    if op == "div" and dtype == torch.float16:  # Triton divides float16 in float32
        expected = (x.float() / y.float()).to(dtype)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@triton.jit
def unary_kernel(X, OUT, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(X + at)
    if OP == "exp":
        y = tl.exp(x)
    elif OP == "exp2":
        y = tl.exp2(x)
    elif OP == "log":
        y = tl.log(x)
    elif OP == "log2":
        y = tl.log2(x)
    elif OP == "sqrt":
        y = tl.sqrt(x)
    elif OP == "rsqrt":
        y = tl.rsqrt(x)
    elif OP == "erf":
        y = tl.erf(x)
    elif OP == "math_erf":
        y = tl.math.erf(x)
    elif OP == "sigmoid":
        y = tl.sigmoid(x)
    elif OP == "sin":
        y = tl.sin(x)
    tl.store(OUT + at, y)


@pytest.mark.parametrize("op", ["exp", "exp2", "log", "log2", "sqrt", "rsqrt", "erf", "math_erf", "sigmoid", "sin"])
def test_functions(op):
    x = torch.rand(512) * 4 + 1e-3
    out = torch.empty_like(x)
    unary_kernel[(1,)](x, out, OP=op, BLOCK=512)
    torch.testing.assert_close(out, getattr(torch, op.removeprefix("math_"))(x), rtol=1e-6, atol=1e-6)


@triton.jit
def cast_kernel(X, OUT, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(OUT + at, tl.load(X + at).to(OUT.dtype.element_ty))


SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    math.inf,
    float("-inf"),
    math.nan,
    1e-40,
    3.3e38,
    65504.0,
    65520.0,
    1e-7,
    1 / 3,
]


@pytest.mark.parametrize("target", DTYPES, ids=lambda d: f"to_{d}")
@pytest.mark.parametrize("source", [*DTYPES, torch.int32], ids=lambda d: f"from_{d}")
def test_casts_round_as_torch_does(source, target):
    x = torch.cat([torch.tensor(SPECIAL), torch.randn(512 - len(SPECIAL)) * 100])
    x = x.nan_to_num(0, 1, 1).mul(1000).to(source) if source == torch.int32 else x.to(source)
    out = torch.empty(512, dtype=target)
    cast_kernel[(1,)](x, out, BLOCK=512)
    torch.testing.assert_close(out, x.to(target), rtol=0, atol=0, equal_nan=True)
    number = ~out.isnan()
    assert torch.equal(out.signbit()[number], x.to(target).signbit()[number])


FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("target", DTYPES, ids=lambda d: f"to_{d}")
@pytest.mark.parametrize("source", FLOAT8, ids=lambda d: f"from_{d}")
def test_every_float8_is_read_as_torch_does(source, target):
    x = torch.arange(256, dtype=torch.uint8).view(source)
    out = torch.empty(256, dtype=target)
    cast_kernel[(1,)](x, out, BLOCK=256)
    torch.testing.assert_close(out, x.to(target), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("target", FLOAT8, ids=lambda d: f"to_{d}")
@pytest.mark.parametrize("source", DTYPES, ids=lambda d: f"from_{d}")
def test_casts_to_float8_round_and_saturate_as_a_gpu(source, target):
    largest = torch.finfo(target).max
    x = torch.cat([torch.tensor(SPECIAL), torch.randn(512 - len(SPECIAL)) * torch.logspace(-7, 5, 512 - len(SPECIAL))])
    x = x.to(source)
    out = torch.empty(512, dtype=target)
    cast_kernel[(1,)](x, out, BLOCK=512)
    # Every number of the type, and the nearest of them, the even one of two.
    numbers = torch.arange(128, dtype=torch.uint8).view(target).double()
    numbers = numbers[numbers.isfinite()]
    exact = x.double().abs().clamp_max(largest)
    distance = (exact[:, None] - numbers[None, :]).abs()
    even = (torch.arange(len(numbers)) % 2).double()
    nearest = numbers[(distance * (1 + even * 1e-12)).argmin(1)] * torch.where(x.signbit(), -1.0, 1.0)
    nearest[x.isnan()] = math.nan
    torch.testing.assert_close(out.double(), nearest, rtol=0, atol=0, equal_nan=True)


@triton.jit
def masked_float8_kernel(X, OUT, N, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(OUT + at, tl.load(X + at, mask=at < N).to(tl.float32))


def test_masked_lanes_of_float8_are_nan():
    for dtype in FLOAT8:
        out = torch.empty(32)
        masked_float8_kernel[(1,)](torch.ones(32).to(dtype), out, 20, BLOCK=32)
        assert (out[:20] == 1).all()
        assert out[20:].isnan().all()


@triton.jit
def reduce_kernel(X, OUT, ROWS: tl.constexpr, COLS: tl.constexpr):
    x = tl.load(X + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :])
    tl.store(OUT + tl.arange(0, ROWS), tl.sum(x, axis=1))
    tl.store(OUT + ROWS + tl.arange(0, ROWS), tl.max(x, axis=1).to(x.dtype))
    tl.store(OUT + 2 * ROWS, tl.min(tl.min(x, axis=1), axis=0).to(x.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions(dtype):
    x = torch.randn(16, 64).to(dtype)
    out = torch.zeros(33, dtype=dtype)
    reduce_kernel[(1,)](x, out, ROWS=16, COLS=64)
    torch.testing.assert_close(out[:16], x.sum(1), rtol=4 * torch.finfo(dtype).eps, atol=1e-5)
    assert torch.equal(out[16:32], x.amax(1))
    assert out[32] == x.min()


@triton.jit
def dot_kernel(A, B, C, N: tl.constexpr, PRECISION: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(A + i[:, None] * N + i[None, :])
    b = tl.load(B + i[:, None] * N + i[None, :])
    c = tl.dot(a, b, input_precision=PRECISION)
    tl.store(C + i[:, None] * N + i[None, :], c)


@triton.jit
def float8_dot_kernel(A, B, C, N: tl.constexpr, LIMIT: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(A + i[:, None] * N + i[None, :])
    b = tl.load(B + i[:, None] * N + i[None, :])
    tl.store(C + i[:, None] * N + i[None, :], tl.dot(a, b, max_num_imprecise_acc=LIMIT))


@pytest.mark.parametrize("right", FLOAT8, ids=str)
@pytest.mark.parametrize("left", FLOAT8, ids=str)
def test_products_of_float8(left, right):
    a, b = torch.randn(64, 64).to(left), torch.randn(64, 64).to(right)
    a[0, 0] = b[5, 5] = math.nan
    for limit in (0, 64):
        c = torch.empty(64, 64)
        float8_dot_kernel[(1,)](a, b, c, N=64, LIMIT=limit)
        torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=2e-6, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_summed_in_float32(dtype):
    a, b = (torch.randn(64, 64).to(dtype) for _ in range(2))
    a[0, :2] = torch.tensor([60000.0, 2.0]) if dtype == torch.float16 else a[0, :2]  # past float16's range in the sum
    c = torch.empty(64, 64)
    dot_kernel[(1,)](a, b, c, N=64, PRECISION="ieee")
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("size", [16, 64])
def test_products_are_summed_in_one_order_whichever_operand_comes_first(size):
    a, b = torch.randn(size, size), torch.randn(size, size)
    c, d = torch.empty(size, size), torch.empty(size, size)
    dot_kernel[(1,)](a, b.T.contiguous(), c, N=size, PRECISION="ieee")
    dot_kernel[(1,)](b, a.T.contiguous(), d, N=size, PRECISION="ieee")
    assert torch.equal(c, d.T)


def test_float32_products_are_rounded_to_tf32_unless_ieee_is_asked_for():
    a, b = torch.randn(64, 64), torch.eye(64)
    c = torch.empty(64, 64)
    dot_kernel[(1,)](a, b, c, N=64, PRECISION="ieee")
    assert torch.equal(c, a)
    dot_kernel[(1,)](a, b, c, N=64, PRECISION="tf32")
    assert not torch.equal(c, a)
    assert (c / a - 1).abs().max() <= 2**-11


@triton.jit
def mask_kernel(OUT, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = (at < n) & (tl.program_id(0) < n - 3)
    tl.store(OUT + at, tl.where(mask, 1.0, 0.0))


def test_a_block_mask_and_a_scalar_comparison():
    out = torch.empty(16)
    mask_kernel[(1,)](out, 5, BLOCK=16)
    assert out.tolist() == [1.0] * 5 + [0.0] * 11


@triton.jit
def maximum_kernel(X, OUT, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(OUT + at, tl.maximum(tl.load(X + at), 0.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_maximum_leaves_nan_out_as_on_a_gpu(dtype):
    out = torch.empty(4, dtype=dtype)
    maximum_kernel[(1,)](torch.tensor([math.nan, -1.0, 2.0, math.inf], dtype=dtype), out, BLOCK=4)
    assert out.tolist() == [0.0, 0.0, 2.0, math.inf]


@triton.jit
def scalar_kernel(OUT, x, n):
    total = 0.0
    for i in range(n):
        total += x * i
    tl.store(OUT, total)
    tl.store(OUT + 1, x.to(tl.float32))


def test_float_arguments_are_float32():
    out = torch.empty(2)
    scalar_kernel[(1,)](out, 0.1, 4)
    assert out[1].item() == torch.tensor(0.1, dtype=torch.float32).item()
    assert out[0].item() == pytest.approx(0.6, rel=1e-6)


@triton.jit
def copy_kernel(X, OUT, start, count, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < count, other=0.0)
    tl.store(OUT + tl.arange(0, BLOCK), x)


@pytest.mark.parametrize(("start", "count"), [(0, 9), (-1, 8), (1000, 2000)], ids=["past", "before", "far"])
def test_a_load_outside_the_tensor_is_an_error(start, count):
    with pytest.raises(OutOfBounds, match="load of fp32 through X"):
        copy_kernel[(1,)](torch.ones(8), torch.empty(16), start, count, BLOCK=16)


def test_a_load_from_another_arguments_memory_is_an_error():
    memory = torch.ones(32)
    with pytest.raises(OutOfBounds, match="through X"):
        copy_kernel[(1,)](memory[:8], memory[8:24], 0, 9, BLOCK=16)


def test_a_store_outside_the_tensor_is_an_error():
    with pytest.raises(OutOfBounds, match="store of fp32 through OUT: 6 of 16 addresses"):
        copy_kernel[(1,)](torch.ones(16), torch.empty(10), 0, 16, BLOCK=16)


def test_an_address_in_a_hole_of_a_strided_tensor_is_within_it():
    x = torch.ones(16)[::2]
    out = torch.empty(16)
    copy_kernel[(1,)](x, out, 0, 15, BLOCK=16)
    assert out[:15].eq(1).all()


@triton.jit
def choose_kernel(X, Y, OUT, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    pointers = tl.where(at % 2 == 0, X + at, Y + at)
    tl.store(OUT + at, tl.load(pointers))


def test_a_choice_between_pointers_may_point_into_both():
    x, y, out = torch.zeros(8), torch.ones(8), torch.empty(8)
    choose_kernel[(1,)](x, y, out, BLOCK=8)
    assert out.tolist() == [0.0, 1.0] * 4


@triton.jit
def overlapping_kernel(OUT, STEP: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(OUT + tl.program_id(0) * STEP + tl.arange(0, BLOCK), 1.0)


def test_two_programs_that_store_the_same_element_are_an_error():
    out = torch.empty(32)
    overlapping_kernel[(2,)](out, STEP=16, BLOCK=16)
    with pytest.raises(DataRace, match="store through OUT: element 15 was stored by program 0, this is program 1"):
        overlapping_kernel[(2,)](out, STEP=15, BLOCK=16)


@triton.jit
def handing_on_kernel(X, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    x = tl.load(X + program * BLOCK + tl.arange(0, BLOCK))
    tl.store(X + (program + 1) * BLOCK + tl.arange(0, BLOCK), x)


@triton.jit
def in_place_kernel(X, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(X + at, tl.load(X + at) + 1)
    tl.store(X + at, tl.load(X + at) + 1)


def test_a_program_that_loads_what_another_stored_is_an_error():
    x = torch.zeros(64)
    in_place_kernel[(4,)](x, BLOCK=16)
    assert x.eq(2).all()
    with pytest.raises(DataRace, match="load through X: element 16 was stored by program 0, this is program 1"):
        handing_on_kernel[(3,)](x, BLOCK=16)


@triton.jit
def undefined_kernel(X, OUT, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(OUT + at, tl.load(X + at, mask=at < n))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_masked_lane_without_a_value_is_nan(dtype):
    out = torch.empty(8, dtype=dtype)
    undefined_kernel[(1,)](torch.ones(5, dtype=dtype), out, 5, BLOCK=8)
    assert out[:5].eq(1).all()
    assert out[5:].isnan().all()


@triton.jit
def offset_kernel(X, OUT, stride, WIDE: tl.constexpr):
    row = tl.program_id(0) + 2
    if WIDE:
        row = row.to(tl.int64)
    tl.store(OUT, (row * stride) % 7)


def test_an_int32_overflow_is_an_error():
    out = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(IntegerOverflow, match="mul of int32 gives 3000000000"):
        offset_kernel[(1,)](out, out, 1_500_000_000, WIDE=False)
    offset_kernel[(1,)](out, out, 1_500_000_000, WIDE=True)
    assert out.item() == 3_000_000_000 % 7


@triton.jit
def tile_kernel(X, OUT, step, FIRST_COL: tl.constexpr):
    """Program p copies the tile at row 8p to row p · step."""
    row = tl.program_id(0) * 8
    tile = X.load([row, FIRST_COL])
    OUT.store([tl.program_id(0) * step, FIRST_COL], tile.T.T * 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_descriptors_load_zeros_outside_and_store_nothing_there(dtype):
    x, out = torch.randn(19, 24).to(dtype), torch.full((29, 24), 7.0, dtype=dtype)
    # The descriptors stand for 19 x 21 elements; the memory around belongs to the same tensors.
    described = [TensorDescriptor(t, [rows, 21], [24, 1], [8, 16]) for t, rows in ((x, 19), (out[:21], 21))]
    for first_col in (0, 16):
        tile_kernel[(3,)](*described, 8, FIRST_COL=first_col)
    assert torch.equal(out[:19, :21], x[:, :21] * 2)
    assert not out[19:21, :21].any()
    assert (out[21:] == 7).all()
    assert (out[:, 21:] == 7).all()


def test_a_tensor_descriptor_that_reaches_past_its_tensor():
    whole = torch.ones(32, 16)
    small, out = whole[:16], TensorDescriptor.from_tensor(torch.empty(32, 16), [8, 16])
    tile_kernel[(2,)](TensorDescriptor(small, [17, 16], [16, 1], [8, 16]), out, 8, FIRST_COL=0)
    with pytest.raises(OutOfBounds, match="load of fp32 through X: 16 of 16 addresses"):
        tile_kernel[(3,)](TensorDescriptor(small, [17, 16], [16, 1], [8, 16]), out, 8, FIRST_COL=0)


def test_programs_that_store_the_same_tile_by_a_tensor_descriptor():
    x, out = (TensorDescriptor.from_tensor(torch.ones(16, 16), [8, 16]) for _ in range(2))
    with pytest.raises(DataRace, match="store through OUT: element 64 was stored by program 0, this is program 1"):
        tile_kernel[(2,)](x, out, 4, FIRST_COL=0)


@triton.jit
def loop_kernel(OUT, first, last, step):
    for i in range(first.to(tl.int64), last, step):
        tl.store(OUT, i * 1_500_000_000)


def test_a_loops_variable_has_the_widest_type_of_its_bounds():
    out = torch.zeros(1, dtype=torch.int64)
    loop_kernel[(1,)](out, 0, 3, 1)
    assert out.item() == 3_000_000_000


def test_errors_say_in_which_program():
    with pytest.raises(OutOfBounds) as caught:
        copy_kernel[(2, 1)](torch.ones(8), torch.empty(16), 0, 9, BLOCK=16)
    notes = getattr(caught.value, "__notes__", ["in kernel copy_kernel, program (0, 0, 0) of (2, 1, 1)"])
    assert notes == ["in kernel copy_kernel, program (0, 0, 0) of (2, 1, 1)"]


def test_the_kernels_module_is_left_alone():
    copy_kernel[(1,)](torch.ones(16), torch.empty(16), 0, 16, BLOCK=16)
    assert "np" not in globals()
    assert "interpreter_semantic" not in globals()
    assert range is __builtins__["range"]


def test_installing_twice_changes_nothing():
    before = interpreter.stock.InterpretedFunction.run
    interpreter.install()
    assert interpreter.stock.InterpretedFunction.run is before
