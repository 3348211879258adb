"""How a tensor of shape (N, C, *) is read as (N, C, S), and in which memory format results are made."""

from __future__ import annotations

from itertools import pairwise

import torch


def as_channels(tensor: torch.Tensor) -> torch.Tensor:
    """(N, C, S), S the product of the trailing sizes: a view where they can be merged, else a contiguous copy.

    Args:
        tensor: (N, C, *), with at least one element.
    """
    return tensor.flatten(2) if tensor.dim() > 2 else tensor.unsqueeze(2)


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides, 0 for a dimension of one element, whose stride would spoil what is known of the alignment."""
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def empty_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor of the shape and memory format of ``tensor`` (N, C, *), such as channels_last.

    It is contiguous where the trailing dimensions of that format could not be merged into one.
    """
    result = torch.empty_like(tensor, dtype=dtype)
    if result.is_contiguous() or _merges(result):
        return result
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


def _merges(tensor: torch.Tensor) -> bool:
    """Whether the dimensions from the third on can be viewed as one."""
    sizes, strides = tensor.shape, tensor.stride()
    axes = [i for i in range(2, tensor.dim()) if sizes[i] != 1]
    return all(strides[a] == strides[b] * sizes[b] for a, b in pairwise(axes))
