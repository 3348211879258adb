"""The group norm launchers' compile cases: each kernel, at each kind of default configuration."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.harness.compile import BFLOAT16_TARGETS, Case

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


def _forward(
    shape: tuple[int, ...], groups: int, dtype: torch.dtype, *, channels_last: bool = False, affine: bool = True
) -> Callable[[], object]:
    from fusedops.norm.kernels_group import group_norm_forward

    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.empty(shape, dtype=dtype, memory_format=memory_format)
    weight = torch.empty(shape[1], dtype=dtype) if affine else None
    return lambda: group_norm_forward(x, weight, weight, groups, 1e-5, dtype)


def _backward(
    shape: tuple[int, ...], groups: int, dtype: torch.dtype, *, channels_last: bool = False, affine: bool = True
) -> Callable[[], object]:
    from fusedops.norm.kernels_group_backward import group_norm_backward

    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.empty(shape, dtype=dtype, memory_format=memory_format)
    weight = torch.empty(shape[1], dtype=dtype) if affine else None
    statistics = torch.empty(shape[0], groups)
    needs = (True, affine, affine)
    return lambda: group_norm_backward(x, x, weight, statistics, statistics, groups, needs, dtype)


def _cases() -> list[Case]:
    last, plain = {"channels_last": True}, {"affine": False}
    table = [
        ("vectors", (512, 1024), 32, _BF16, {}),
        ("odd", (4, 320, 7, 7), 32, _BF16, {}),
        ("held", (4, 256, 32, 32), 32, _FP16, {}),
        ("held_channels_last", (4, 1280, 8, 8), 32, _FP16, last),
        ("widest_held", (4, 1024, 32, 32), 32, _BF16, {}),  # by the forward
        ("widest_held", (4, 512, 32, 32), 32, _FP32, {}),
        ("widest_held_vectors", (4, 32768), 1, _BF16, {}),
        ("looped", (64, 320, 64, 64), 32, _FP16, {}),
        ("looped_channels_last", (64, 320, 64, 64), 32, _BF16, last),
        ("divided", (1, 128, 256, 256), 32, _FP16, {}),
        ("divided_without_parameters", (4, 2048, 32, 32), 1, _FP32, plain),
        ("divided_channels_last", (4, 2048, 32, 32), 1, _BF16, last),
    ]
    return [
        Case(
            f"{direction}_{name}_{str(dtype).removeprefix('torch.')}",
            lambda call=call, shape=shape, groups=groups, dtype=dtype, options=options: call(
                shape, groups, dtype, **options
            ),
            BFLOAT16_TARGETS if dtype == _BF16 else None,
        )
        for direction, call in (("forward", _forward), ("backward", _backward))
        for name, shape, groups, dtype, options in table
    ]


CASES = _cases()
