"""torch's nested tensors as the kernels read them: the rows of all sequences, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusedops.runtime.checks import wrong_value


@dataclass(frozen=True, slots=True)
class Packed:
    """A batch of sequences without padding.

    Attributes:
        rows: (total, size), those of sequence b from ``offsets[b]`` to ``offsets[b + 1]``.
        offsets: (batch + 1,), int32 or int64, on the device of ``rows``.
        longest: length of the longest sequence, where that is known without waiting for the device.
        nest: makes a nested tensor with these lengths of other (total, size) rows.
    """

    rows: torch.Tensor
    offsets: torch.Tensor
    longest: int | None
    nest: Callable[[torch.Tensor], torch.Tensor]

    def padding(self) -> torch.Tensor:
        """(batch, longest) bool, True past the end of a sequence."""
        lengths = self.offsets.diff()
        longest = (int(lengths.max()) if len(lengths) else 0) if self.longest is None else self.longest
        return torch.arange(longest, device=lengths.device) >= lengths[:, None]

    def padded(self) -> torch.Tensor:
        """(batch, longest, size), zeros past the end of a sequence."""
        used = ~self.padding()
        return self.rows.new_zeros(*used.shape, self.rows.shape[-1]).masked_scatter(used[..., None], self.rows)


def unpack(function: str, argument: str, tensor: torch.Tensor) -> Packed:
    """The rows of a nested tensor (batch, any length, size), of either layout, with a gradient.

    Raises:
        ValueError: it is nested in another way.
    """
    takes = "a tensor, or a nested tensor of shape (batch, any length, size)"
    if tensor.dim() != 3:
        raise ValueError(f"{function}: {argument} must be {takes}; got a nested tensor of {tensor.dim()} dimensions")
    if tensor.layout is torch.jagged:
        return _unpack_jagged(function, argument, tensor, takes)
    tensor = tensor.contiguous()
    sizes = tensor._nested_tensor_size()  # (batch, 2) on the CPU
    lengths, widths = sizes.unbind(1)
    size = int(widths[0])
    if not bool((widths == size).all()):
        raise ValueError(f"{function}: {argument} must be {takes}; got sizes {widths.tolist()}")
    strides, starts = tensor._nested_tensor_strides(), tensor._nested_tensor_storage_offsets()
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)

    def nest(rows: torch.Tensor) -> torch.Tensor:
        return torch._nested_view_from_buffer(rows.reshape(-1), sizes, strides, starts)

    rows = tensor.values().view(-1, size)
    return Packed(rows, offsets.to(tensor.device, non_blocking=True), int(lengths.max()), nest)


def _unpack_jagged(function: str, argument: str, tensor: Any, takes: str) -> Packed:
    if getattr(tensor, "_ragged_idx", 1) != 1:
        wrong_value(function, argument, takes + ", the second dimension being the ragged one", tensor)
    if tensor.lengths() is not None:  # a view with holes between its sequences
        tensor = tensor.contiguous()
    offsets = tensor.offsets()

    def nest(rows: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(rows, offsets)

    return Packed(tensor.values(), offsets, getattr(tensor, "_maybe_max_seqlen", None), nest)
