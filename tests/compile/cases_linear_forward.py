"""Compile cases of the forward by tensor descriptors and of the forward of few rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusedops.linear.tuning import LinearConfig, LinearProblem
from fusedops.linear.tuning_skinny import skinny_config
from fusedops.runtime.device import TARGETS, device_facts
from fusedops.runtime.launch import DTYPE_NAMES
from tests.harness.compile import KINDS, TABLES, Case

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_TF32_TARGETS = frozenset(name for name, facts in TARGETS.items() if facts.capability >= 80)
_DESCRIPTOR_TARGETS = frozenset(name for name, facts in TARGETS.items() if facts.capability >= 90)
# Those whose programs may have a large tile: the shared memory of a data centre's device.
_LARGE_TARGETS = frozenset(name for name in _DESCRIPTOR_TARGETS if TARGETS[name].shared_memory > 200_000)
_PAIR = frozenset({"sm_90", "gfx942"})

Sizes = tuple[int, int, int]


def _arguments(
    sizes: Sizes,
    dtype: torch.dtype,
    *,
    transposed: tuple[bool, bool] = (False, False),
    extras: bool = False,
    out_dtype: torch.dtype | None = None,
    activation: str | None = "relu",  # quick to compile
    save: bool = True,
) -> tuple[Any, ...]:
    """What a launcher takes before the precision."""
    M, N, K = sizes
    x = torch.empty(K, M, dtype=dtype).t() if transposed[0] else torch.empty(M, K, dtype=dtype)
    w = torch.empty(K, N, dtype=dtype).t() if transposed[1] else torch.empty(N, K, dtype=dtype)
    b, r, seed = torch.empty(N, dtype=dtype), None, None
    if extras:
        r, seed = torch.empty(M, N, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    y = torch.empty(M, N, dtype=out_dtype or dtype)
    z = torch.empty(M, N, dtype=dtype) if save else None
    return x, w, b, r, seed, y, z, activation, 0.1 if extras else 0.0


def _persistent(
    tile: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    precision: str = "ieee",
    specialize: bool = False,
    **options: Any,
) -> Any:
    from fusedops.linear.kernels_persistent import persistent_forward

    arguments = _arguments((1024, 512, 4096), dtype, **options)
    return lambda: persistent_forward(*arguments, precision, LinearConfig(*tile, specialize=specialize))


def _skinny(
    sizes: Sizes, dtype: torch.dtype, precision: str = "ieee", splits: int | None = None, **options: Any
) -> Any:
    from dataclasses import replace

    from fusedops.linear.kernels_common import aligned
    from fusedops.linear.kernels_skinny import skinny_forward

    arguments = _arguments(sizes, dtype, **options)
    x, w = arguments[:2]

    def call() -> None:
        problem = LinearProblem.of(
            "forward", *sizes, dtype=DTYPE_NAMES[x.dtype], precision=precision, aligned=aligned(x) and aligned(w)
        )
        config = skinny_config(problem, device_facts(x.device))
        skinny_forward(*arguments, precision, replace(config, splits=splits or config.splits))

    return call


# Two programs of the small tile fit a multiprocessor: one multiplies while the other finishes its tile.
SMALL, LARGE = (128, 128, 64, 3, 4), (128, 256, 64, 4, 8)
DECODE, WIDE = (1, 4096, 4096), (8, 14336, 4096)

_TABLE: list[tuple[str, Callable[..., Any], Any, torch.dtype, dict[str, Any], frozenset[str] | None]] = [
    ("persistent_small", _persistent, SMALL, _FP16, {}, _LARGE_TARGETS),
    ("persistent_large", _persistent, LARGE, _BF16, {}, _LARGE_TARGETS),
    ("persistent_large_gelu", _persistent, LARGE, _BF16, {"activation": "gelu"}, _LARGE_TARGETS),
    ("persistent_small_extras", _persistent, SMALL, _BF16, {"extras": True, "activation": "mish"}, _LARGE_TARGETS),
    ("persistent_small_transposed", _persistent, SMALL, _BF16, {"transposed": (True, True)}, _LARGE_TARGETS),
    ("persistent_small_float32_result", _persistent, SMALL, _BF16, {"out_dtype": _FP32}, _LARGE_TARGETS),
    ("persistent_tf32", _persistent, (128, 128, 32, 3, 4), _FP32, {"precision": "tf32"}, _LARGE_TARGETS),
    ("persistent_specialized", _persistent, LARGE, _BF16, {"specialize": True}, frozenset({"sm_100"})),
    ("persistent_consumer", _persistent, (128, 128, 64, 3, 8), _BF16, {}, _DESCRIPTOR_TARGETS),
    ("persistent_few", _persistent, (64, 64, 64, 4, 4), _BF16, {}, _DESCRIPTOR_TARGETS),
    ("skinny_one_row", _skinny, DECODE, _FP16, {"activation": "gelu"}, None),
    ("skinny_wide", _skinny, WIDE, _FP16, {}, KINDS),
    ("skinny_transposed_extras", _skinny, WIDE, _BF16, {"transposed": (False, True), "extras": True}, KINDS),
    ("skinny_splits", _skinny, (16, 1024, 8192), _BF16, {}, KINDS),
    ("skinny_unaligned", _skinny, (3, 1001, 1003), _BF16, {}, KINDS),
    ("skinny_one_row_float32", _skinny, DECODE, _FP32, {}, TABLES),
    ("skinny_one_row_float32_splits", _skinny, DECODE, _FP32, {"splits": 2, "transposed": (False, True)}, KINDS),
    ("skinny_float32", _skinny, WIDE, _FP32, {}, TABLES),
    ("skinny_tf32", _skinny, WIDE, _FP32, {"precision": "tf32"}, _TF32_TARGETS & TABLES),
    ("skinny_ones", _skinny, (1, 1, 1), _FP16, {}, _PAIR),
]

CASES = [
    Case(name, lambda call=call, first=first, dtype=dtype, options=options: call(first, dtype, **options), targets)
    for name, call, first, dtype, options, targets in _TABLE
]
