"""What the trials of the linear family share: inputs laid out as a problem says, and what results are compared with."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from fusedops.autotune.buckets import bucket
from fusedops.autotune.trial import Numbers
from fusedops.linear.activations import ACTIVATIONS
from fusedops.linear.reference import no_autocast
from fusedops.linear.tuning import MOST_ROWS
from fusedops.runtime.backend import device_reasons
from fusedops.runtime.device import DeviceFacts, pretend
from fusedops.runtime.launch import dtype_named

T = TypeVar("T")

# How many elements of padding a row has in memory, of its number of elements and an element's bytes: the first with
# which the tensors are what the problem says is taken. None; so many that rows lie an odd number of elements apart; so
# many that they start at multiples of 16 bytes; and 16 bytes more, which 16 elements do not divide.
Pad = Callable[[int, int], int]
PADS: tuple[Pad, ...] = (
    lambda size, itemsize: 0,
    lambda size, itemsize: 2 - (size + 1) % 2,
    lambda size, itemsize: -size % max(1, 16 // itemsize),
    lambda size, itemsize: -size % max(1, 16 // itemsize) + max(1, 16 // itemsize),
)

META = torch.device("meta")


class Maker(Numbers):
    """Numbers in matrices of a layout."""

    def matrix(
        self, rows: int, cols: int, letter: str, pad: Pad, dtype: torch.dtype, scale: float = 1.0
    ) -> torch.Tensor:
        """(rows, cols): with unit stride along a row for the letter ``r``, along a column for ``c``."""
        outer, inner = (rows, cols) if letter == "r" else (cols, rows)
        whole = self.empty(outer, inner + pad(inner, dtype.itemsize), dtype=dtype)
        stored = self.fill(whole[:, :inner], deviation=scale)
        return stored if letter == "r" else stored.t()

    def matrices(
        self, groups: int, rows: int, cols: int, letter: str, pad: Pad, dtype: torch.dtype, scale: float = 1.0
    ) -> torch.Tensor:
        """(groups, rows, cols), each as :meth:`matrix`."""
        outer, inner = (rows, cols) if letter == "r" else (cols, rows)
        whole = self.empty(groups, outer, inner + pad(inner, dtype.itemsize), dtype=dtype)
        stored = self.fill(whole[..., :inner], deviation=scale)
        return stored if letter == "r" else stored.transpose(1, 2)


def laid_out(device: torch.device, empty: bool, make: Callable[[Maker, Pad], T], suits: Callable[[T], bool]) -> T:
    """What ``make`` makes with the first padding that ``suits``, on the device or, for ``empty``, the meta device.

    Raises:
        NotImplementedError: none does.
    """
    for pad in PADS:
        sample = make(Maker(META), pad)
        if suits(sample):
            return sample if empty else make(Maker(device), pad)
    raise NotImplementedError("no tensors of these sizes have this layout and alignment")


def letters(first: torch.Tensor, last: torch.Tensor) -> str:
    """The layout of two operands, as problems have it."""
    return ("r" if first.stride(-1) == 1 else "c") + ("r" if last.stride(-1) == 1 else "c")


def check_device(problem: Any, device: torch.device, empty: bool) -> None:
    """NotImplementedError for a dtype that the device's kernels do not take or an activation that nobody knows."""
    if problem.activation is not None and problem.activation not in ACTIVATIONS:
        raise NotImplementedError(f"no activation is named {problem.activation!r} in this process")
    dtypes = [dtype_named(problem.dtype), dtype_named(getattr(problem, "out_dtype", problem.dtype))]
    reasons = [] if empty else device_reasons(device, tuple(d for d in dtypes if d.itemsize > 1))
    if reasons:
        raise NotImplementedError("; ".join(reasons))


def check_bucket(rows: int) -> None:
    """NotImplementedError where a call with so many rows would be another problem."""
    if bucket(rows, MOST_ROWS) != rows:
        raise NotImplementedError(f"a problem has {bucket(rows, MOST_ROWS)} rows, not {rows}")


def check_torch_serves(problem: Any, device: torch.device, empty: bool) -> None:
    """NotImplementedError where no setting of torch's makes ``torch_serves`` what the problem says."""
    same, serves = problem.out_dtype == problem.dtype, problem.torch_serves
    if problem.dtype != "float32":
        possible = serves == same
    elif not same or problem.precision == "tf32x3":
        possible = not serves
    else:
        # A CPU's products are in full precision, whatever the setting.
        possible = empty or device.type != "cpu" or serves == (problem.precision == "ieee")
    if not possible:
        raise NotImplementedError("torch's own product cannot be of this dtype and precision, or has to be")


_setting = threading.RLock()


@contextlib.contextmanager
def torch_setting(problem: Any) -> Iterator[None]:
    """torch's setting of float32 products that makes ``torch_serves`` what the problem says.

    It is the process's, so one thread at a time is in here; problems of other dtypes do not depend on it.
    """
    if problem.dtype != "float32":
        yield
        return
    # Without torch's product to serve, its setting must differ from what is asked for, where both are of one dtype.
    with tf32_products((problem.precision == "tf32") == problem.torch_serves and problem.precision != "tf32x3"):
        yield


@contextlib.contextmanager
def tf32_products(allowed: bool) -> Iterator[None]:
    """Whether torch's own float32 products may be in TF32; one thread at a time is in here."""
    matmul: Any = torch.backends.cuda.matmul
    name = "fp32_precision" if hasattr(matmul, "fp32_precision") else "allow_tf32"  # torch before 2.9
    value = allowed if name == "allow_tf32" else "tf32" if allowed else "ieee"
    with _setting:
        before = getattr(matmul, name)
        setattr(matmul, name, value)
        try:
            yield
        finally:
            setattr(matmul, name, before)


@contextlib.contextmanager
def comparing(tensor: torch.Tensor) -> Iterator[None]:
    """For the torch code that results are compared with: dtypes are what the code says, float32 products in full."""
    with torch.no_grad(), no_autocast(tensor), tf32_products(False):
        yield


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which exact results are computed: products of 16-bit numbers are exact in float32."""
    return torch.float64 if dtype == torch.float32 else torch.float32


def in_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """float32 numbers cut to the ten bits of mantissa that TF32 tensor cores read."""
    return (tensor.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


def operand(tensor: torch.Tensor, precision: str) -> torch.Tensor:
    """A matrix as a product of this precision reads it."""
    return in_tf32(tensor) if tensor.dtype == torch.float32 and precision == "tf32" else tensor


# Elements of a result that are compared at most, unless every 16th row of it has more.
_COMPARED = 1 << 24


def sampled_rows(rows: int, cols: int, device: torch.device) -> torch.Tensor | None:
    """Which rows of a large result are compared: some of every tile, and the last; None: all of a smaller one."""
    if rows * cols <= _COMPARED:
        return None
    step = min(16, 1 << (-(-rows * cols // _COMPARED) - 1).bit_length())
    at = torch.arange(0, rows, step, device=device)
    return torch.cat((at, at.new_tensor([rows - 1]))).unique()


def pick(tensor: torch.Tensor, at: torch.Tensor | None) -> torch.Tensor:
    """The rows of a tensor that are compared."""
    return tensor if at is None else tensor[at]


def activate(name: str | None, z: torch.Tensor) -> torch.Tensor:
    return z if name is None else ACTIVATIONS[name].forward(z)


def times_derivative(name: str | None, dy: torch.Tensor, s: torch.Tensor | None) -> torch.Tensor:
    """dy · a′ in the dtype of ``dy``, computed in float32 at least."""
    if name is None or s is None:
        return dy
    wide = torch.promote_types(dy.dtype, torch.float32)
    return (dy.to(wide) * ACTIVATIONS[name].derivative(s.to(wide))).to(dy.dtype)


@contextlib.contextmanager
def sizing(facts: DeviceFacts) -> Iterator[Maker]:
    """For code that finds out which problems tensors on a device would be: tensors without memory, and its facts."""
    with pretend(facts):
        yield Maker(META)
