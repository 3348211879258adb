"""Triton's interpreter, repaired and made strict, so that kernels can be tested on CPU tensors.

:func:`install` changes Triton in this process, which must run with ``TRITON_INTERPRET=1``. It works with Triton 3.6,
3.7 and 3.9. Four kinds of change:

*Repairs.* The stock interpreter keeps bfloat16 as raw bits and computes on the bits; it reads float8's infinities, NaN
and smallest numbers as others, and cuts where it should round; a comparison keeps its operands'
dtype, so that ``block_mask & (scalar < n)`` is refused; ``tl.maximum`` returns NaN where a GPU returns the number
(3.6, 3.7); a Python float argument and the variable of a ``range`` loop have no Triton type, so that int64 and
float32 arithmetic differ from a GPU's.

*Strictness.* What a GPU would let pass in silence is an error or a poisoned value here:

* :class:`OutOfBounds`: a load, store or atomic touches an address outside the tensor that its pointer came from
  (each tensor argument's pointer type carries the tensor's own span of addresses, through all pointer arithmetic; a
  tensor descriptor's does too, while what it loads outside its own shape is zero, as on a GPU);
* :class:`DataRace`: a program loads or stores an element that another program of the same launch has stored: on a GPU
  their order is open;
* :class:`IntegerOverflow`: an integer product, sum or difference does not fit its type (the 2^31 faults of offsets);
* a masked load without ``other`` gives NaN in its masked lanes, which are undefined on a GPU;
* ``tl.dot`` of float32 rounds its operands to TF32 unless ``input_precision="ieee"`` (or ``tf32x3``) is asked for.

*Names.* A kernel sees its own module's globals only: stock puts the interpreter's imports (``np``, ``math``, …) into
the module of the kernel, where they would hide a missing import of its launcher.

*Speed.* ``triton.language`` is patched once instead of at every launch and every call of a device function: with all
checks on, kernels run two to three times as fast as in the stock interpreter.

Not seen here: shared-memory limits, misaligned vector accesses, block sizes that the compiler refuses, races within a
program. The compile tests and the GPU tests look for those.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as stock
from triton.runtime.jit import _normalize_ty
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedops.runtime import backend

Handle = stock.TensorHandle


class OutOfBounds(RuntimeError):  # noqa: N818
    """A kernel touched memory outside the tensor that the pointer came from."""


class DataRace(RuntimeError):  # noqa: N818
    """A program touched an element that another program of the launch has stored."""


class IntegerOverflow(ArithmeticError):  # noqa: N818
    """An integer result does not fit its type: on a GPU it would wrap around in silence."""


# ---------------------------------------------------------------------------------------------- bfloat16


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """float32 values of bfloat16 bits (uint16)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """bfloat16 bits (uint16) of float32 values, rounded to nearest even, NaN kept."""
    bits = np.array(values, dtype=np.float32, order="C").view(np.uint32)
    last_kept_bit = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + (last_kept_bit + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _is_bfloat16(handle: Any) -> bool:
    return isinstance(handle, Handle) and handle.dtype.scalar == tl.bfloat16


def _widened(handle: Handle) -> Handle:
    if _is_float8(handle):
        return Handle(from_float8(handle.data, handle.dtype.scalar), tl.float32)
    return Handle(from_bfloat16(handle.data), tl.float32) if _is_bfloat16(handle) else handle


def _narrowed(values: np.ndarray) -> Handle:
    return Handle(to_bfloat16(values), tl.bfloat16)


_FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
_FLOAT8_VALUES = {
    dtype: torch.arange(256, dtype=torch.uint8).view(twin).float().numpy() for dtype, twin in _FLOAT8.items()
}


def from_float8(bits: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """float32 values of float8 bits (uint8)."""
    return _FLOAT8_VALUES[dtype][bits]


def to_float8(values: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """float8 bits (uint8) of values, rounded to nearest even and saturated as on a GPU, NaN kept."""
    twin = _FLOAT8[dtype]
    largest = torch.finfo(twin).max
    floats = torch.from_numpy(np.array(values, dtype=np.float32, order="C"))
    return floats.clamp(-largest, largest).to(twin).view(torch.uint8).numpy()


def _is_float8(handle: Any) -> bool:
    return isinstance(handle, Handle) and handle.dtype.scalar in _FLOAT8


def round_to_tf32(values: np.ndarray) -> np.ndarray:
    """float32 rounded to nearest even at TF32's 10 bits of mantissa; infinities and NaN kept."""
    bits = np.array(values, dtype=np.float32, order="C").view(np.uint32)
    last_kept_bit = (bits >> np.uint32(13)) & np.uint32(1)
    rounded = (bits + (last_kept_bit + np.uint32(0x0FFF))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded.view(np.float32), values)


# ---------------------------------------------------------------------------------------- tracked pointers


class TensorPointer(tl.pointer_type):
    """The pointer type of one tensor argument: it carries the addresses that belong to that tensor.

    Handles keep their dtype object through arithmetic, broadcasting and reshaping, so the span arrives at the load.

    Attributes:
        spans: (name, first address, past-the-end address) of each tensor that the pointer may point into.
    """

    def __init__(self, element_ty: tl.dtype, spans: tuple[tuple[str, int, int], ...], const: bool = False) -> None:
        super().__init__(element_ty, const=const)
        self.spans = spans


def _span(name: str, tensor: torch.Tensor) -> tuple[str, int, int]:
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return name, start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return name, start, start + (last + 1) * tensor.element_size()


class _Memory:
    """The memory that the running launch may touch, and who has written what.

    Attributes:
        spans: of all tensors of the launch, for pointers whose origin is not known (made from an integer).
        program: flat index of the running program.
        writers: for each span and element width that was stored to, the program that stored each element, or -1.
    """

    # Elements of a span whose writers are recorded; tests of huge strides have spans far beyond.
    LARGEST = 1 << 22

    def __init__(self) -> None:
        self.start(())

    def start(self, spans: tuple[tuple[str, int, int], ...]) -> None:
        self.spans = spans
        self.program = 0
        self.writers: dict[tuple[int, int, int], np.ndarray] = {}

    def check(self, pointers: Handle, mask: np.ndarray, every: bool, what: str) -> None:
        """Raise where an access that is not masked off is out of bounds or races."""
        addresses = pointers.data
        if not every:
            addresses = np.broadcast_to(addresses, mask.shape)[mask]
            if addresses.size == 0:
                return
        element = pointers.get_element_ty()
        width = max(1, element.primitive_bitwidth // 8)
        spans = getattr(pointers.dtype.scalar, "spans", None) or self.spans
        low, high = int(addresses.min()), int(addresses.max()) + width
        for name, start, end in spans:
            if start <= low and high <= end:
                if what != "atomic":
                    self._check_race(addresses, name, (start, end, width), what)
                return
        inside = np.zeros(addresses.shape, dtype=bool)
        for _, start, end in spans:
            inside |= (addresses >= np.uint64(start)) & (addresses + np.uint64(width) <= np.uint64(end))
        if inside.all():
            return
        outside = addresses[~inside]
        name, start, end = spans[0] if spans else ("(none)", 0, 0)
        raise OutOfBounds(
            f"{what} of {element} through {name}: {outside.size} of {addresses.size} addresses are outside the tensor; "
            f"the first is element {(int(outside.flat[0]) - start) // width} of {(end - start) // width}"
        )

    def _check_race(self, addresses: np.ndarray, name: str, key: tuple[int, int, int], what: str) -> None:
        start, end, width = key
        writers = self.writers.get(key)
        if writers is None:
            if what == "load" or (end - start) // width > self.LARGEST:
                return
            writers = self.writers[key] = np.full((end - start) // width, -1, dtype=np.int64)
        at = (addresses - np.uint64(start)) // np.uint64(width)
        before = writers[at]
        foreign = (before != -1) & (before != self.program)
        if foreign.any():
            raise DataRace(
                f"{what} through {name}: element {int(at[foreign].flat[0])} was stored by program "
                f"{int(before[foreign].flat[0])}, this is program {self.program}"
            )
        if what == "store":
            writers[at] = self.program


_memory = _Memory()


# ------------------------------------------------------------------------------------------------ builder


def _mask(mask: Any) -> Handle:
    """A tensor descriptor's accesses bring a bare array (3.6, 3.7)."""
    return mask if isinstance(mask, Handle) else Handle(mask, tl.int1)


_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


class RepairedBuilder(stock.InterpreterBuilder):
    """The operations of a kernel on numpy arrays. Overrides what stock has wrong, adds the checks."""

    # Arithmetic. Every operation of stock's on two or one operands comes through these two.

    def binary_op(self, lhs: Handle, rhs: Handle, op: Any) -> Handle:
        if (_is_bfloat16(lhs) or _is_bfloat16(rhs)) and op not in _BITWISE:
            output = op(_widened(lhs).data, _widened(rhs).data)
            return Handle(output, tl.int1) if output.dtype == np.bool_ else _narrowed(output)
        result = super().binary_op(lhs, rhs, op)
        if result.data.dtype == np.bool_ and result.dtype != tl.int1:
            return Handle(result.data, tl.int1)  # a comparison
        return result

    def unary_op(self, arg: Handle, op: Any) -> Handle:
        if _is_bfloat16(arg):
            return _narrowed(op(_widened(arg).data))
        return super().unary_op(arg, op)

    def ternary_op(self, lhs: Handle, rhs: Handle, other: Handle, op: Any) -> Handle:
        if op is np.where:
            result = super().ternary_op(lhs, rhs, other, op)
            spans = [getattr(h.dtype.scalar, "spans", ()) for h in (rhs, other)]
            if spans[0] != spans[1]:  # a choice between pointers into two tensors
                result.dtype = TensorPointer(other.get_element_ty(), spans[0] + spans[1])
            return result
        if _is_bfloat16(other):
            return _narrowed(op(_widened(lhs).data, _widened(rhs).data, _widened(other).data))
        return super().ternary_op(lhs, rhs, other, op)

    def create_minnumf(self, lhs: Handle, rhs: Handle) -> Handle:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs: Handle, rhs: Handle) -> Handle:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_clampf(self, arg: Handle, low: Handle, high: Handle, propagate_nans: Any) -> Handle:
        if propagate_nans == stock._ir.PROPAGATE_NAN.NONE:
            return self.create_minnumf(self.create_maxnumf(arg, low), high)
        return self.create_minimumf(self.create_maximumf(arg, low), high)

    def create_fma(self, x: Handle, y: Handle, z: Handle) -> Handle:
        if _is_bfloat16(z):
            return _narrowed(_widened(x).data * _widened(y).data + _widened(z).data)
        return super().create_fma(x, y, z)

    def create_erf(self, arg: Handle) -> Handle:
        return self.unary_op(arg, lambda x: torch.erf(torch.tensor(x)).numpy())

    def create_rsqrt(self, arg: Handle) -> Handle:
        return self.unary_op(arg, lambda x: 1 / np.sqrt(x))

    def create_dot(self, a: Handle, b: Handle, d: Handle, input_precision: Any, max_num_imprecise_acc: Any) -> Handle:
        """Products of operands of 16 bits or fewer are exact in float32, where they are summed, as on a tensor core.

        A sum has the same order whichever operand comes first, as on a GPU: a backward that computes k·q where the
        forward computed q·k finds the same number. numpy's product does not keep to that; torch's does.
        """
        if any(h.dtype.scalar.primitive_bitwidth == 8 and not _is_float8(h) for h in (a, b)):
            return super().create_dot(a, b, d, input_precision, max_num_imprecise_acc)
        lhs, rhs, total = _widened(a).data, _widened(b).data, _widened(d).data
        if a.dtype.scalar == tl.float32 and str(input_precision).rsplit(".", 1)[-1].upper() == "TF32":
            lhs, rhs = round_to_tf32(lhs), round_to_tf32(rhs)
        compute = np.result_type(total.dtype, np.float32)
        lhs, rhs = (torch.from_numpy(x.astype(compute)) for x in (lhs, rhs))
        with torch.autocast("cpu", enabled=False):
            result = torch.matmul(lhs, rhs).numpy() + total
        return _narrowed(result) if _is_bfloat16(d) else Handle(result.astype(total.dtype), d.dtype.scalar)

    # Casts.

    def cast_impl(self, src: Handle, dst_type: tl.dtype) -> Handle:
        if src.dtype.scalar == dst_type.scalar:
            return Handle(src.data, dst_type.scalar)
        src = _widened(src)
        if dst_type.scalar in _FLOAT8:
            return Handle(to_float8(src.data, dst_type.scalar), dst_type.scalar)
        if dst_type.scalar == tl.bfloat16:
            return _narrowed(src.data.astype(np.float32))
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: Handle, dst_type: tl.dtype, rounding_mode: Any) -> Handle:
        unknown = any(t.primitive_bitwidth == 8 and t not in _FLOAT8 for t in (src.dtype.scalar, dst_type.scalar))
        if unknown or rounding_mode == stock._ir.ROUNDING_MODE.RTZ:
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        return self.cast_impl(src, dst_type)

    def create_bitcast(self, src: Handle, dst_type: tl.dtype) -> Handle:
        result = super().create_bitcast(src, dst_type)
        spans = getattr(src.dtype.scalar, "spans", None)
        if spans and dst_type.scalar.is_ptr():
            result.dtype = TensorPointer(dst_type.scalar.element_ty, spans)
        return result

    create_int_to_ptr = create_bitcast
    create_ptr_to_int = create_bitcast

    def get_bf16(self, value: float) -> Handle:
        return _narrowed(np.array([value], dtype=np.float32))

    # Memory. The parameters after the mask differ between versions and mean nothing here.

    def create_masked_load(self, ptrs: Handle, mask: Any, other: Any, *policy: Any, **named: Any) -> Handle:
        mask = _mask(mask)
        every = bool(mask.data.all())
        _memory.check(ptrs, mask.data, every, "load")
        if other is None and not every:
            element = ptrs.get_element_ty()
            undefined = self._undefined(element)
            if undefined is not None:
                other = Handle(np.full(ptrs.data.shape, undefined), element)
        return super().create_masked_load(ptrs, mask, other, *policy, **named)

    @staticmethod
    def _undefined(element: tl.dtype) -> Any:
        """What a lane holds that was masked off without a value of its own; None: stock's zero."""
        if element == tl.bfloat16:
            return np.uint16(0x7FC0)
        if element in _FLOAT8:
            return np.uint8(0x7F)
        if element in (tl.float16, tl.float32, tl.float64):
            return stock._get_np_dtype(element).type("nan")
        return None

    def create_masked_store(self, ptrs: Handle, value: Handle, mask: Any, *policy: Any) -> Any:
        mask = _mask(mask)
        _memory.check(ptrs, mask.data, bool(mask.data.all()), "store")
        return super().create_masked_store(ptrs, value, mask, *policy)

    def create_atomic_rmw(self, op: Any, ptr: Handle, val: Handle, mask: Handle, *rest: Any) -> Handle:
        _memory.check(ptr, mask.data, bool(mask.data.all()), "atomic")
        return super().create_atomic_rmw(op, ptr, val, mask, *rest)

    def create_atomic_cas(self, ptr: Handle, *rest: Any) -> Handle:
        _memory.check(ptr, np.ones(1, dtype=bool), True, "atomic")
        return super().create_atomic_cas(ptr, *rest)


# ------------------------------------------------------------------- reductions, overflow, loops, launches

_stock_apply = stock.ReduceScanOpInterface.apply


def _apply_reduction(self: Any, input: Any) -> Any:
    """Reductions and scans of bfloat16 are computed in float32 and rounded at the end."""
    if not isinstance(input, tuple):
        return _apply_reduction(self, (input,))[0]
    narrow = [isinstance(x, tl.core.tensor) and x.dtype == tl.bfloat16 for x in input]
    if not any(narrow):
        return _stock_apply(self, input)
    wide = tuple(
        tl.core.tensor(_widened(x.handle), x.type.with_element_ty(tl.float32)) if n else x
        for x, n in zip(input, narrow, strict=True)
    )
    results = _stock_apply(self, wide)
    return tuple(
        tl.core.tensor(_narrowed(r.handle.data), r.type.with_element_ty(tl.bfloat16))
        if isinstance(r, tl.core.tensor) and r.dtype == tl.float32 and narrow[0]
        else r
        for r in results
    )


_INTEGER_OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _check_overflow(self: Any, lhs: tl.tensor, rhs: tl.tensor, binary_op: Any) -> None:
    """Stock's check is eight interpreted operations; this one is three of numpy's."""
    scalar = lhs.type.scalar
    if scalar.int_bitwidth >= 64 or scalar == tl.int1:
        return
    operation = _INTEGER_OPERATIONS[binary_op.__name__]
    exact = operation(lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
    low, high = exact.min(), exact.max()
    if low < scalar.get_int_min_value() or high > scalar.get_int_max_value():
        worst = low if low < scalar.get_int_min_value() else high
        raise IntegerOverflow(f"{binary_op.__name__} of {scalar} gives {worst}: cast to int64 before the operation")


def _typed_range(*bounds: Any, **_: Any) -> Iterator[tl.tensor]:
    """``range`` as the compiler sees it: its variable has the widest integer type of its bounds."""
    values = [bound.value if isinstance(bound, tl.constexpr) else bound for bound in bounds]
    numbers = [int(value) for value in values]
    wide = any(isinstance(v, tl.tensor) and v.dtype.int_bitwidth == 64 for v in values)
    wide = wide or any(not -(2**31) <= number < 2**31 for number in numbers)
    element, dtype = (tl.int64, np.int64) if wide else (tl.int32, np.int32)
    return (tl.tensor(Handle(np.array([i], dtype=dtype), element), element) for i in range(*numbers))


def _loop(arg1: Any, arg2: Any = None, step: Any = None, **_: Any) -> Iterator[tl.tensor]:
    """``tl.range``, whose further keywords are for the compiler."""
    first, last = (0, arg1) if arg2 is None else (arg1, arg2)
    return _typed_range(first, last, 1 if step is None else step)


def _argument(name: str, value: Any) -> Any:
    """A launch argument as the kernel sees it."""
    if isinstance(value, bool):
        return tl.tensor(Handle(np.array([value]), tl.int1), tl.int1)
    if isinstance(value, float):
        return tl.tensor(Handle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise ValueError(f"argument {name} is on {value.device}: the interpreter takes CPU tensors")
        plain = stock._implicit_cvt(value)
        pointer = TensorPointer(plain.type.element_ty, (_span(name, value),), const=plain.type.const)
        return tl.tensor(Handle(plain.handle.data, pointer), pointer)
    if isinstance(value, TensorDescriptor):
        return stock.interpreter_semantic.make_tensor_descriptor(
            _argument(name, value.base),
            [stock._implicit_cvt(size) for size in value.shape],
            [*(stock._implicit_cvt(stride) for stride in value.strides[:-1]), tl.constexpr(1)],
            [tl.constexpr(size) for size in value.block_shape],
            value.padding,
        )
    if isinstance(value, tuple):
        members = [_argument(f"{name}[{index}]", member) for index, member in enumerate(value)]
        return type(value)(*members) if hasattr(value, "_fields") else tl.tuple(members)
    return stock._implicit_cvt(value)


def _memory_of(name: str, value: Any) -> Iterator[tuple[str, int, int]]:
    """The span of every tensor that an argument points into."""
    if isinstance(value, TensorDescriptor):
        value = value.base
    if isinstance(value, torch.Tensor):
        yield _span(name, value)
    elif isinstance(value, tuple):
        for index, member in enumerate(value):
            yield from _memory_of(f"{name}[{index}]", member)


def _run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Run every program of a launch, one after the other. Errors are raised as they are, with the program's index."""
    if warmup:
        return
    function = self.rewrite()
    named = {k: v for k, v in kwargs.items() if k in self.arg_names}  # the rest are the compiler's options
    given = inspect.getcallargs(function, *args, **named)
    constexprs = {k for k, v in inspect.get_annotations(self.fn).items() if _normalize_ty(v) == "constexpr"}
    values = {k: v if k in constexprs else _argument(k, v) for k, v in given.items()}
    sizes = tuple(grid(given) if callable(grid) else grid)
    sizes += (1,) * (3 - len(sizes))
    builder = stock.interpreter_builder
    builder.set_grid_dim(*sizes)
    _memory.start(tuple(itertools.chain.from_iterable(_memory_of(k, v) for k, v in given.items())))
    with np.errstate(all="ignore"):
        for index, program in enumerate(itertools.product(*map(range, sizes))):
            _memory.program = index
            builder.set_grid_idx(*program)
            try:
                function(**values)
            except Exception as error:
                if hasattr(error, "add_note"):
                    error.add_note(f"in kernel {self.fn.__name__}, program {program} of {sizes}")
                raise


def _make_roomy() -> Callable[..., Any]:
    """A function that calls another one, deep in a large piece of the interpreter's stack.

    From version 3.11 on Python maps memory for its frames in pieces of 16 KiB, and gives a piece back when its first
    frame returns: a kernel's loop whose calls happen to cross a border maps and unmaps at each of them, which took up
    to half of a test's time. A frame of 20,000 variables gets a piece of 256 KiB, with room for all that follow.
    """
    names = "; ".join(f"v{number} = 0" for number in range(20_000))
    made: dict[str, Any] = {}
    exec(f"def roomy(function, never=False):\n if never:\n  {names}\n return function()", made)
    return made["roomy"]


_roomy = _make_roomy()


def _run_with_room(self: Any, *args: Any, **kwargs: Any) -> None:
    _roomy(lambda: _run(self, *args, **kwargs))


def _execute(self: Any, tree: Any) -> Any:
    """Define the rewritten function over a copy of its module's globals, with what the rewriting needs added."""
    names = dict(self.fn.__globals__)
    names["range"] = _typed_range
    names["interpreter_semantic"] = stock.interpreter_semantic
    if hasattr(stock, "_InterpreterComparison"):
        names["_InterpreterComparison"] = stock._InterpreterComparison
    made = dict(self.kwargs)
    exec(compile(tree, filename=self.filename, mode="exec"), names, made)
    return made[self.fn.__name__]


_stock_numpy_dtype = functools.cache(stock._get_np_dtype)


def _numpy_dtype(dtype: tl.dtype) -> np.dtype:
    """Stock builds its table of types at every call."""
    scalar = dtype.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _stock_numpy_dtype(scalar)


_stock_init_block_type = tl.block_type.__init__


@functools.cache
def _block_shape(sizes: tuple[int, ...]) -> tuple[tl.tuple, int, str, tl.constexpr, tl.tuple]:
    """What every type and every tensor of one shape has alike; none of it is ever changed."""
    template = tl.block_type.__new__(tl.block_type)
    _stock_init_block_type(template, tl.int1, list(sizes))
    wrapped = tl.tuple([tl.constexpr(size) for size in sizes])
    return template.shape, template.numel, str(template.shape), tl.constexpr(template.numel), wrapped


def _init_block_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    """A type is made for every result, of few different shapes: each shape is checked and wrapped once."""
    self.element_ty = element_ty
    self.sizes = tuple([getattr(size, "value", size) for size in shape])
    self.shape, self.numel, text, *self.of_tensors = _block_shape(self.sizes)
    self.name = f"<{text}, {element_ty.name}>"


_OF_SCALARS = (tl.constexpr(1), tl.tuple([]))


def _init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = type.of_tensors if type.is_block() else _OF_SCALARS


def _equal_types(self: tl.dtype, other: Any) -> bool:
    """Most comparisons are of a type with itself or with another name."""
    if self is other:
        return True
    if isinstance(other, tl.constexpr):
        other = other.value
    return isinstance(other, tl.dtype) and self.name == other.name


_stock_binary_operands = TritonSemantic.binary_op_type_checking_impl


def _binary_operands(
    self: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[tl.tensor, tl.tensor]:
    """Two tensors of one type of numbers are computed in that type: only divisions may widen it."""
    tensors = isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor)
    if tensors and lhs.dtype is rhs.dtype and not (div_or_mod or lhs.dtype.is_ptr()):
        return self.broadcast_impl_value(lhs, rhs)
    return _stock_binary_operands(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


_stock_broadcast = TritonSemantic.broadcast_impl_value


@functools.cache
def _common_sizes(lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that two blocks of one rank broadcast to; None: stock finds it, or the error."""
    if len(lhs) != len(rhs) or any(a != b and 1 not in (a, b) for a, b in zip(lhs, rhs, strict=True)):
        return None
    return tuple(map(max, lhs, rhs))


def _broadcast(self: Any, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Most operands have one shape or differ in sizes of one, which stock finds out in many steps."""
    if not (lhs.type.is_block() and rhs.type.is_block()):
        return _stock_broadcast(self, lhs, rhs)
    if lhs.type.shape is rhs.type.shape:
        return lhs, rhs
    sizes = _common_sizes(lhs.type.sizes, rhs.type.sizes)
    if sizes is None:
        return _stock_broadcast(self, lhs, rhs)
    return tuple([_broadcast_to(self, operand, sizes) for operand in (lhs, rhs)])


def _broadcast_to(self: Any, operand: tl.tensor, sizes: tuple[int, ...]) -> tl.tensor:
    if operand.type.sizes == sizes:
        return operand
    handle = self.builder.create_broadcast(operand.handle, list(sizes))
    return self.tensor(handle, tl.block_type(operand.dtype, sizes))


_stock_unwrap = tl.core._unwrap_if_constexpr


def _unwrap(value: Any) -> Any:
    return value if type(value) is tl.tensor else _stock_unwrap(value)


def _patch_attribute(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Give a function of the language its semantic; stock does so in three calls, and copies the keywords."""
    function = getattr(member, "__wrapped__", member)  # what tl.core.builtin has wrapped
    semantic = stock.interpreter_semantic

    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, called)


class _Modules:
    """Stands for a kernel whose globals name both language modules."""

    __globals__ = {"tl": tl, "core": tl.core}  # noqa: RUF012


_installed = False


def install() -> None:
    """Repair the interpreter in this process (once; it stays so until the process ends).

    Raises:
        RuntimeError: ``TRITON_INTERPRET=1`` was not set when triton was imported.
    """
    global _installed
    if _installed:
        return
    if not isinstance(tl.sum, stock.InterpretedFunction):
        raise RuntimeError("TRITON_INTERPRET=1 must be set before triton is imported")
    backend.interpreter_knows_bfloat16 = backend.interpreter_knows_float8 = True
    stock._patch_attr = _patch_attribute
    stock._patch_lang(_Modules)  # the scope that would undo it is let go
    for module in (tl, tl.core):
        module.range = _loop
    tl.tensor.__index__ = lambda self: int(self.handle.data.item())
    stock._get_np_dtype = _numpy_dtype
    tl.block_type.__init__ = _init_block_type
    tl.tensor.__init__ = _init_tensor
    tl.dtype.__eq__ = _equal_types
    tl.core._unwrap_if_constexpr = _unwrap
    TritonSemantic.binary_op_type_checking_impl = _binary_operands
    TritonSemantic.broadcast_impl_value = _broadcast
    stock.interpreter_builder.options = stock.InterpreterOptions(debug=True)
    stock.interpreter_builder.__class__ = RepairedBuilder
    stock.ReduceScanOpInterface.apply = _apply_reduction
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
    stock.FunctionRewriter._compile_and_exec = _execute
    stock.InterpretedFunction.run = _run_with_room
    stock.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)
    _installed = True
