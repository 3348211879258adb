"""Fresh random tensors with awkward strides, and NaN around them."""

from __future__ import annotations

from typing import Any

import torch

LAYOUTS = ("contiguous", "transposed", "sliced", "strided", "expanded", "offset")


def randn(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layout: str = "contiguous",
    requires_grad: bool = False,
) -> torch.Tensor:
    """Normal random numbers in a tensor whose memory is laid out as asked.

    Args:
        shape: the tensor's shape.
        layout: ``contiguous``; ``transposed``: the last two dimensions are swapped in memory; ``sliced``: the inside of
            a larger tensor, NaN all around; ``strided``: every second element of the last dimension, NaN between;
            ``expanded``: the first dimension has stride 0; ``offset``: starts one element past an aligned address.
            A layout that needs more dimensions than there are gives a contiguous tensor.
        requires_grad: make it a leaf that requires a gradient.
    """
    values = torch.randn(shape, dtype=torch.float32).to(dtype)
    tensor = _laid_out(values, layout, torch.device(device))
    return tensor.requires_grad_() if requires_grad else tensor


def randn_like(tensor: torch.Tensor, layout: str = "contiguous", **options: Any) -> torch.Tensor:
    """:func:`randn` of the shape, dtype and device of ``tensor``: an incoming gradient, for example."""
    return randn(*tensor.shape, **{"dtype": tensor.dtype, "device": tensor.device, "layout": layout, **options})


def _laid_out(values: torch.Tensor, layout: str, device: torch.device) -> torch.Tensor:
    shape = values.shape
    if layout == "contiguous" or not shape:
        return values.to(device)
    if layout == "transposed":
        last, before = (-1, -2) if len(shape) > 1 else (-1, -1)
        return values.transpose(last, before).contiguous().to(device).transpose(last, before)
    if layout == "expanded":
        return values[:1].to(device).expand(shape)
    if layout == "sliced":
        whole = torch.full([size + 3 for size in shape], float("nan"), dtype=values.dtype, device=device)
        view = whole[tuple(slice(1, 1 + size) for size in shape)]
    elif layout == "strided":
        whole = torch.full((*shape[:-1], 2 * shape[-1]), float("nan"), dtype=values.dtype, device=device)
        view = whole[..., ::2]
    elif layout == "offset":
        whole = torch.full((values.numel() + 2,), float("nan"), dtype=values.dtype, device=device)
        view = whole[1:-1].view(shape)
    else:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")
    view.copy_(values)
    return view
