"""Zones around what is allocated, and around what is given, that nobody may write to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ZONE = 64  # elements before and behind
_FRESH = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


def _pattern(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers that no kernel writes by chance: every byte 0xA5."""
    return torch.full((count * dtype.itemsize,), 0xA5, dtype=torch.uint8).view(dtype)


class Guarded(TorchDispatchMode):
    """Context manager: what is allocated in it lies between two zones, which :meth:`check` looks at.

    So does what lies between the elements of a result that has gaps.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in _FRESH or made.device.type != "cpu" or not made.numel() or made.is_sparse:
            return made
        extent = 1 + sum((size - 1) * stride for size, stride in zip(made.shape, made.stride(), strict=True))
        whole = _pattern(extent + 2 * _ZONE, made.dtype)
        inside = whole.as_strided(made.shape, made.stride(), _ZONE)
        self._kept.append((whole, inside))
        return inside

    def check(self) -> None:
        """AssertionError where something was written outside of what was allocated."""
        for whole, inside in self._kept:
            seen = whole.clone()
            seen.as_strided(inside.shape, inside.stride(), _ZONE).copy_(
                _pattern(inside.numel(), inside.dtype).view(inside.shape)
            )
            before = _pattern(len(whole), whole.dtype)
            changed = (seen.view(torch.uint8) != before.view(torch.uint8)).nonzero()
            assert not len(changed), (
                f"written outside of a {inside.dtype} tensor of shape {tuple(inside.shape)} and strides"
                f" {inside.stride()}: {len(changed)} bytes, the first {int(changed[0]) - _ZONE * inside.itemsize} bytes"
                " from its beginning"
            )


class Unchanged:
    """Remembers tensors, with all of the memory that they are views of; :meth:`check` compares."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._kept = [(t, t._version, self._memory(t)) for t in tensors]

    @staticmethod
    def _memory(tensor: torch.Tensor) -> torch.Tensor:
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        return whole.clone()

    def check(self) -> None:
        for tensor, version, memory in self._kept:
            assert tensor._version == version, f"an input of shape {tuple(tensor.shape)} was written in place"
            assert torch.equal(self._memory(tensor), memory), f"an input of shape {tuple(tensor.shape)} has changed"
