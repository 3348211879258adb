"""The grouped launchers' compile cases: each kernel, at each kind of default configuration."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusedops.runtime.device import TARGETS
from tests.harness.compile import KINDS, TABLES, Case

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_TF32_TARGETS = frozenset(name for name, facts in TARGETS.items() if facts.capability >= 80)
_ONE = frozenset({"sm_80"})

Sizes = tuple[int, int, int, int]


def _tensors(sizes: Sizes, dtype: torch.dtype, batched: bool, transposed: bool) -> tuple[torch.Tensor, ...]:
    """(x, weights, bias, output), none with data. Groups of a batch have ``rows / groups`` rows each."""
    G, M, N, K = sizes
    lead = (G, M // G) if batched else (M,)
    x, bias, y = (torch.empty(s, dtype=dtype) for s in ((*lead, K), (G, N), (*lead, N)))
    weights = torch.empty(G, K, N, dtype=dtype).transpose(1, 2) if transposed else torch.empty(G, N, K, dtype=dtype)
    return x, weights, bias, y


def _offsets(sizes: Sizes, batched: bool) -> torch.Tensor | None:
    return None if batched else torch.empty(sizes[0], dtype=torch.int32)


def _forward(
    sizes: Sizes,
    dtype: torch.dtype,
    activation: str | None,
    *,
    precision: str = "ieee",
    batched: bool = False,
    transposed: bool = False,
) -> Callable[[], object]:
    from fusedops.linear.kernels_grouped import grouped_linear

    x, weights, bias, _ = _tensors(sizes, dtype, batched, transposed)
    return lambda: grouped_linear(x, weights, _offsets(sizes, batched), bias, activation, True, precision)


def _backward(
    sizes: Sizes,
    dtype: torch.dtype,
    activation: str | None,
    *,
    precision: str = "ieee",
    batched: bool = False,
    transposed: bool = False,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> Callable[[], object]:
    from fusedops.linear.kernels_grouped import grouped_linear_backward

    x, weights, _, dy = _tensors(sizes, dtype, batched, transposed)
    saved = None if activation is None else dy
    return lambda: grouped_linear_backward(
        dy, x, weights, _offsets(sizes, batched), saved, activation, needs, dtype, dtype, transposed, precision
    )


# (groups, rows, out_features, in_features). How many rows a group has decides the tile.
LARGE, MEDIUM, SMALL = (8, 16384, 4096, 2048), (64, 8192, 1024, 1024), (64, 4096, 1024, 1024)
THIN, THIN_FEW, ODD, ONES = (64, 64, 4096, 2048), (2, 8, 1024, 1024), (8, 8001, 1003, 1005), (1, 1, 1, 1)

_TABLE = [
    ("forward_large", _forward, LARGE, _FP16, "gelu", {}, None),
    ("forward_large_mish", _forward, LARGE, _FP16, "mish", {}, frozenset({"sm_90", "gfx942"})),
    ("forward_medium", _forward, MEDIUM, _BF16, "relu", {}, KINDS),
    ("forward_small", _forward, SMALL, _BF16, "relu", {}, KINDS),
    ("forward_thin", _forward, THIN, _BF16, "relu", {}, KINDS),
    ("forward_thin_few", _forward, THIN_FEW, _BF16, "relu", {"transposed": True}, KINDS),
    ("forward_unaligned", _forward, ODD, _FP16, "gelu", {}, TABLES),
    ("forward_float32", _forward, LARGE, _FP32, "relu", {}, TABLES),
    ("forward_float32_small", _forward, SMALL, _FP32, "relu", {}, TABLES),
    ("forward_tf32", _forward, LARGE, _FP32, "relu", {"precision": "tf32"}, _TF32_TARGETS & KINDS),
    ("forward_tf32x3", _forward, LARGE, _FP32, "gelu", {"precision": "tf32x3"}, _TF32_TARGETS & TABLES),
    ("forward_ones", _forward, ONES, _FP16, "gelu", {}, _ONE),
    ("forward_batched", _forward, LARGE, _FP16, "relu", {"batched": True}, TABLES),
    ("forward_batched_transposed", _forward, LARGE, _BF16, "relu", {"batched": True, "transposed": True}, KINDS),
    ("forward_batched_ones", _forward, ONES, _FP16, "gelu", {"batched": True}, _ONE),
    ("backward_large", _backward, LARGE, _FP16, "gelu", {}, None),
    ("backward_transposed", _backward, LARGE, _BF16, None, {"transposed": True}, KINDS),
    ("backward_thin", _backward, THIN, _BF16, None, {}, KINDS),
    ("backward_unaligned", _backward, ODD, _FP16, None, {}, TABLES),
    ("backward_float32", _backward, LARGE, _FP32, "gelu", {}, TABLES),
    ("backward_tf32", _backward, LARGE, _FP32, None, {"precision": "tf32"}, _TF32_TARGETS & KINDS),
    ("backward_tf32x3", _backward, LARGE, _FP32, None, {"precision": "tf32x3"}, _TF32_TARGETS & TABLES),
    ("backward_ones", _backward, ONES, _FP16, "gelu", {}, _ONE),
    ("backward_bias_alone", _backward, LARGE, _FP16, None, {"needs": (False, False, True)}, KINDS),
    ("backward_batched", _backward, LARGE, _FP16, None, {"batched": True}, KINDS),
]

CASES = [
    Case(
        name,
        lambda call=call, sizes=sizes, dtype=dtype, activation=activation, options=options: call(
            sizes, dtype, activation, **options
        ),
        targets,
    )
    for name, call, sizes, dtype, activation, options, targets in _TABLE
]
