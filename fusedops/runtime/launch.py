"""What every launcher shares: launch options in one place, and integer helpers."""

from __future__ import annotations

import torch

# The dtypes that kernels take, as problems name them. A look-up is cheaper than str().
DTYPE_NAMES = {
    getattr(torch, name): name
    for name in (
        "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz", "int8", "uint8", "int32",
    )
}  # fmt: skip
ITEMSIZES = {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()}


def dtype_named(name: str) -> torch.dtype:
    """ValueError naming the known ones for another name."""
    for dtype, known in DTYPE_NAMES.items():
        if known == name:
            return dtype
    raise ValueError(f"dtype must be one of {', '.join(ITEMSIZES)}; got {name!r}")


def options(num_warps: int, num_stages: int | None = None, num_ctas: int = 1) -> dict[str, int | bool]:
    """Keyword options of a Triton launch.

    Fusing a multiply and an add is asked for by name: its default differs between Triton versions, and with it
    the last bit of results.
    """
    named: dict[str, int | bool] = {"num_warps": num_warps, "enable_fp_fusion": True}
    if num_stages is not None:
        named["num_stages"] = num_stages
    if num_ctas > 1:
        named["num_ctas"] = num_ctas
    return named


def empty_contiguous(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised, contiguous tensor of another's shape and device."""
    if like.dtype is dtype and like.is_contiguous():
        return torch.empty_like(like)  # in half the time
    return torch.empty(like.shape, dtype=dtype, device=like.device)


def as_matrix(tensor: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The tensor as (rows, cols): itself, without asking torch, where it is one."""
    return tensor if tensor.dim() == 2 else tensor.reshape(rows, cols)


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in a dtype: itself, without asking torch, where it has that."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least ``n`` (1 for n ≤ 1)."""
    return 1 << max(n - 1, 0).bit_length()
