"""How tensors of one shape are read as rows: which of them can be read where they lie, and which must be copied."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

# Row indices are split by int32 divisions: more rows than this are copied into a matrix instead.
_MAX_SPLIT_ROWS = 2**31 - 1


class Rows(NamedTuple):
    """Tensors of one shape as ``rows`` rows of ``width`` elements with unit stride.

    Row ``r`` of tensor ``i`` begins ``a·s[0] + b·s[1] + c·s[2]`` elements behind its first one, with
    ``s = strides[i]`` and ``r = (a·sizes[0] + b)·sizes[1] + c``.

    Attributes:
        tensors: those given, None included; the ones that could not be read where they lie are replaced by copies.
        strides: three strides a tensor, in elements; zeros for None.
        sizes: the two inner sizes of the rows' index; ones where ``split`` is False.
        split: False where ``c`` alone is the row's index (``a = b = 0``).
    """

    rows: int
    width: int
    tensors: tuple[torch.Tensor | None, ...]
    strides: tuple[tuple[int, int, int], ...]
    sizes: tuple[int, int]
    split: bool

    @property
    def unit(self) -> int:
        """What kernels count widths and strides in, so that the compiler knows them for multiples of it.

        Triton finds out by itself where all are multiples of 16. Rows of 72 elements too can be read in vectors of 8.
        """
        common = math.gcd(self.width, *[stride for strides in self.strides for stride in strides])
        if common % 16:
            for unit in (8, 4):
                if common % unit == 0:
                    return unit
        return 1

    def counted(self) -> tuple[int, int, tuple[tuple[int, ...], ...]]:
        """The unit, and width and strides in units."""
        unit = self.unit
        if unit == 1:
            return unit, self.width, self.strides
        return unit, self.width // unit, tuple(tuple(stride // unit for stride in strides) for strides in self.strides)


def as_rows(tensors: Sequence[torch.Tensor | None], dims: int) -> Rows:
    """Read tensors as rows over their last ``dims`` dimensions.

    Args:
        tensors: at least one; all of one shape, with at least one element. None stands for an absent one.
        dims: how many trailing dimensions make up a row, ≥ 1.
    """
    present = [t for t in tensors if t is not None]
    shape = present[0].shape
    width = 1
    for size in shape[len(shape) - dims :]:
        width *= size
    rows = present[0].numel() // width
    if all(t.is_contiguous() for t in present):
        return _matrix(rows, width, tensors)
    lead = [(i, size) for i, size in enumerate(shape[: len(shape) - dims]) if size != 1]
    tensors = [t if t is None or _unit_stride(t, dims) else t.contiguous() for t in tensors]
    split = _merge(lead, [t for t in tensors if t is not None])
    if len(split) > 3 or (len(split) > 1 and rows > _MAX_SPLIT_ROWS):
        return _matrix(rows, width, [t if t is None else t.contiguous() for t in tensors])
    (_, a), (size_b, b), (size_c, c) = [(1, ())] * (3 - len(split)) + split
    strides = tuple(
        (0, 0, 0) if t is None else tuple(t.stride(axis[0]) if axis else 0 for axis in (a, b, c)) for t in tensors
    )
    if len(split) < 2:
        return Rows(rows, width, tuple(tensors), strides, (1, 1), False)  # type: ignore[arg-type]
    return Rows(rows, width, tuple(tensors), strides, (size_b, size_c), True)  # type: ignore[arg-type]


_ABSENT = (0, 0, 0)


def _matrix(rows: int, width: int, tensors: Sequence[torch.Tensor | None]) -> Rows:
    strides = tuple([_ABSENT if t is None else (0, 0, width) for t in tensors])
    return Rows(rows, width, tuple(tensors), strides, (1, 1), False)


def _unit_stride(tensor: torch.Tensor, dims: int) -> bool:
    """Whether the last ``dims`` dimensions lie without gaps, in order."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[-dims:]), reversed(tensor.stride()[-dims:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _merge(lead: list[tuple[int, int]], tensors: list[torch.Tensor]) -> list[tuple[int, tuple[int, ...]]]:
    """Leading dimensions with those merged that are one in every tensor: (size, (innermost dimension,)) each."""
    merged: list[tuple[int, tuple[int, ...]]] = []
    for axis, size in lead:
        if merged:
            before, (outer,) = merged[-1]
            if all(t.stride(outer) == t.stride(axis) * size for t in tensors):
                merged[-1] = (before * size, (axis,))
                continue
        merged.append((size, (axis,)))
    return merged
