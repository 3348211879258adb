"""The norm launchers' compile cases: each kernel, at each kind of default configuration."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.harness.compile import BFLOAT16_TARGETS, Case

EVERY = (True, True, True)


def _forward(width: int, dtype: torch.dtype, *, center: bool = True, affine: bool = True) -> Callable[[], object]:
    from fusedops.norm.kernels_norm import norm_forward

    x = torch.empty(3, width, dtype=dtype)
    weight = torch.empty(width, dtype=dtype) if affine else None
    bias = weight if center else None
    return lambda: norm_forward(x, weight, bias, 1, 1e-5, 0.0, center, dtype)


def _backward(
    width: int,
    dtype: torch.dtype,
    *,
    center: bool = True,
    affine: bool = True,
    needs: tuple[bool, bool, bool] = EVERY,
) -> Callable[[], object]:
    from fusedops.norm.kernels_norm import norm_backward

    x = torch.empty(3, width, dtype=dtype)
    weight = torch.empty(width, dtype=dtype) if affine else None
    mean, rstd = torch.empty(3), torch.empty(3)
    return lambda: norm_backward(x, x, weight, mean, rstd, 1, 0.0, center, needs, dtype)


def _cases() -> list[Case]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    rms_needs = (True, True, False)
    forward = [
        ("many_rows_a_program", 64, fp16, {}),
        ("one_row", 4096, bf16, {}),
        ("rms_norm", 8192, bf16, {"center": False}),
        ("widest_held_row", 16384, fp32, {}),
        ("looped", 65536, bf16, {}),
        ("looped_rms_norm_without_weight", 65536, fp32, {"center": False, "affine": False}),
    ]
    backward = [
        ("many_rows_a_program", 64, fp16, {}),
        ("one_row", 1024, bf16, {}),
        ("rms_norm", 4096, bf16, {"center": False, "needs": rms_needs}),
        ("widest_held_row", 8192, fp32, {}),
        ("looped", 16384, bf16, {}),
        ("looped_rms_norm_without_weight", 65536, fp32, {"center": False, "affine": False, "needs": rms_needs}),
    ]
    return [
        Case(
            f"{direction}_{name}_{width}_{str(dtype).removeprefix('torch.')}",
            lambda call=call, width=width, dtype=dtype, options=options: call(width, dtype, **options),
            BFLOAT16_TARGETS if dtype == bf16 else None,
        )
        for direction, call, table in (("forward", _forward, forward), ("backward", _backward, backward))
        for name, width, dtype, options in table
    ]


CASES = _cases()
