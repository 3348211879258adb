"""The quantised products' compile cases: each kernel, at each kind of default configuration."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusedops.runtime.device import TARGETS
from tests.harness.compile import BFLOAT16_TARGETS, TABLES, Case

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Where float8 is multiplied: in OCP's formats, and in AMD's own of gfx942.
OCP_TARGETS = frozenset({"sm_89", "sm_90", "sm_100", "sm_120", "gfx950"})
FNUZ_TARGETS = frozenset({"gfx942"})
SUM_IMPRECISELY = frozenset({"sm_89", "sm_90", "sm_120"})
_TF32_TARGETS = frozenset(name for name, facts in TARGETS.items() if facts.capability >= 80)
# For variants whose code differs little from another case's.
_RARE = frozenset({"sm_75", "sm_86", "sm_89", "sm_100", "sm_120", "gfx950", "gfx1100"})

Sizes = tuple[int, int, int]
LARGE, THIN, MIDDLE, ODD = (8192, 8192, 8192), (1, 4096, 4096), (64, 4096, 4096), (1001, 1003, 1005)


def _fp8(
    sizes: Sizes,
    activation: str | None,
    *,
    dtypes: tuple[torch.dtype, torch.dtype] = (_E4M3, _E4M3),
    out_dtype: torch.dtype = _BF16,
    rows: bool = True,
) -> Callable[[], object]:
    from fusedops.linear.kernels_fp8 import fp8_linear

    M, N, K = sizes
    x, weight = (
        torch.empty(s, dtype=torch.uint8).view(dtype) for s, dtype in zip(((M, K), (N, K)), dtypes, strict=True)
    )
    scale_x, scale_w = (torch.ones(M), torch.ones(N)) if rows else (torch.ones(()), torch.ones(()))
    bias = torch.empty(N, dtype=_BF16)
    return lambda: fp8_linear(x, weight, scale_x, scale_w, bias, activation, out_dtype)


def _weight_only(
    sizes: Sizes,
    dtype: torch.dtype,
    activation: str | None,
    *,
    bits: int = 4,
    group_size: int | None = 128,
    precision: str = "ieee",
) -> Callable[[], object]:
    from fusedops.linear.kernels_quantized import quantized_linear

    M, N, K = sizes
    x, bias = torch.empty(M, K, dtype=dtype), torch.empty(N, dtype=dtype)
    weight = torch.empty(N, K * bits // 8, dtype=torch.int8 if bits == 8 else torch.uint8)
    scales = torch.ones((N,) if group_size is None else (N, K // group_size), dtype=dtype)
    return lambda: quantized_linear(x, weight, scales, bias, activation, group_size, dtype, precision)


_FP8_TABLE = [
    ("fp8_large", LARGE, "silu", {}, OCP_TARGETS),
    ("fp8_large_gelu", LARGE, "gelu", {"rows": False}, frozenset({"sm_89", "sm_100", "sm_120", "gfx950"})),
    ("fp8_thin", THIN, "gelu", {}, OCP_TARGETS),
    ("fp8_middle", MIDDLE, "silu", {}, frozenset({"sm_89", "sm_120", "gfx950"})),
    ("fp8_unaligned", ODD, "silu", {"rows": False}, OCP_TARGETS),
    ("fp8_mixed", THIN, None, {"dtypes": (_E4M3, _E5M2)}, OCP_TARGETS),
    ("fp8_float32_large", LARGE, "silu", {"out_dtype": _FP32}, SUM_IMPRECISELY),
    ("fp8_float32_thin", THIN, "silu", {"out_dtype": _FP32}, SUM_IMPRECISELY),
    ("fp8_float32_unaligned", ODD, "silu", {"out_dtype": _FP32}, frozenset({"sm_89", "sm_120"})),
]
_FNUZ_TABLE = [
    (f"fp8_fnuz_{name}", sizes, activation, {"dtypes": dtypes}, FNUZ_TARGETS)
    for name, sizes, activation, dtypes in (
        ("large", LARGE, "gelu", (torch.float8_e4m3fnuz, torch.float8_e4m3fnuz)),
        ("thin", THIN, "silu", (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)),
        ("unaligned", ODD, "gelu", (torch.float8_e4m3fnuz, torch.float8_e4m3fnuz)),
    )
]
_WEIGHT_ONLY_TABLE = [
    # A thin product is split, and ends in the second kernel.
    ("int4_thin", THIN, _BF16, "silu", {}, BFLOAT16_TARGETS),
    ("int4_thin_small_groups", THIN, _FP16, "gelu", {"group_size": 32}, TABLES),
    ("int4_middle", MIDDLE, _BF16, "silu", {}, BFLOAT16_TARGETS & TABLES),
    ("int4_large", LARGE, _FP16, "gelu", {}, frozenset(TARGETS) - {"sm_80"}),
    ("int4_large_mish", LARGE, _BF16, "mish", {"group_size": None}, _RARE - {"sm_75"}),
    ("int4_unaligned", (33, 1003, 1006), _BF16, "silu", {"group_size": None}, BFLOAT16_TARGETS & TABLES),
    ("int4_float32", LARGE, _FP32, "silu", {}, TABLES),
    ("int4_tf32", LARGE, _FP32, "silu", {"precision": "tf32"}, _TF32_TARGETS & TABLES),
    ("int8_thin", THIN, _BF16, "silu", {"bits": 8, "group_size": None}, BFLOAT16_TARGETS & TABLES),
    ("int8_thin_tf32x3", THIN, _FP32, "silu", {"bits": 8, "group_size": None, "precision": "tf32x3"}, _RARE),
    ("int8_large", LARGE, _BF16, "silu", {"bits": 8}, BFLOAT16_TARGETS & TABLES),
    ("int8_large_float16", LARGE, _FP16, "gelu", {"bits": 8, "group_size": None}, _RARE),
    ("int8_unaligned", ODD, _FP16, "gelu", {"bits": 8, "group_size": None}, _RARE),
    ("int8_float32", THIN, _FP32, "silu", {"bits": 8, "group_size": 16}, _RARE),
]

CASES = [
    Case(
        name,
        lambda sizes=sizes, activation=activation, options=options: _fp8(sizes, activation, **options),
        targets,
    )
    for name, sizes, activation, options, targets in _FP8_TABLE + _FNUZ_TABLE
] + [
    Case(
        name,
        lambda sizes=sizes, dtype=dtype, activation=activation, options=options: _weight_only(
            sizes, dtype, activation, **options
        ),
        targets,
    )
    for name, sizes, dtype, activation, options, targets in _WEIGHT_ONLY_TABLE
]
