"""The linear launchers' compile cases: each kernel, at each kind of default configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from fusedops.linear.activations import ACTIVATIONS
from fusedops.runtime.device import TARGETS, device_facts
from tests.harness.compile import BFLOAT16_TARGETS, KINDS, TABLES, Case

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_TF32_TARGETS = frozenset(name for name, facts in TARGETS.items() if facts.capability >= 80)
_ONE = frozenset({"sm_80"})
_PAIR = frozenset({"sm_90", "gfx942"})

Sizes = tuple[int, int, int]


def _with_tiles(call: Callable[[], object]) -> Callable[[], object]:
    """The call on our own product with its default tile, where torch's might be the default."""

    def made() -> object:
        from fusedops.linear import kernels_common
        from fusedops.linear.tuning import tiled_config

        def resolve(operator: Any, problem: Any, device: torch.device) -> Any:
            return tiled_config(problem, device_facts(device))

        with mock.patch.object(kernels_common, "resolve", resolve):
            return call()

    return made


def _forward(
    sizes: Sizes,
    dtype: torch.dtype,
    activation: str | None,
    *,
    precision: str = "ieee",
    transposed: bool = False,
    residual: bool = False,
    dropout_p: float = 0.0,
    out_dtype: torch.dtype | None = None,
    recompute: bool = False,
) -> Callable[[], object]:
    from fusedops.linear.kernels_forward import linear_forward

    M, N, K = sizes
    x, bias = torch.empty(M, K, dtype=dtype), torch.empty(N, dtype=dtype)
    weight = torch.empty(K, N, dtype=dtype).t() if transposed else torch.empty(N, K, dtype=dtype)
    r = torch.empty(M, N, dtype=dtype) if residual else None
    seed = torch.zeros(1, dtype=torch.int64) if dropout_p else None
    return _with_tiles(
        lambda: linear_forward(
            x, weight, bias, r, seed, activation, dropout_p, out_dtype or dtype, True, recompute, precision
        )
    )


def _backward(
    sizes: Sizes,
    dtype: torch.dtype,
    activation: str | None,
    *,
    precision: str = "ieee",
    needs: tuple[bool, bool, bool] = (True, True, True),
    dropout_p: float = 0.0,
    main_grad: bool = False,
) -> Callable[[], object]:
    from fusedops.linear.kernels_backward import linear_backward

    M, N, K = sizes
    dy, x, weight = (torch.empty(s, dtype=dtype) for s in ((M, N), (M, K), (N, K)))
    saved = None if activation is None else dy
    seed = torch.zeros(1, dtype=torch.int64) if dropout_p else None
    into = torch.empty(N, K, dtype=torch.float32) if main_grad else None
    return _with_tiles(
        lambda: linear_backward(
            dy, x, weight, saved, seed, activation, dropout_p, list(needs), dtype, dtype, dtype, False, precision, into
        )
    )


# Sizes decide the tile. Those of the gradients decide where the derivative is computed as well: few columns of the
# result leave it in the products' prologue, many in a pass of its own.
LARGE, THIN, MIDDLE, ODD = (8192, 8192, 8192), (1, 4096, 4096), (512, 1040, 1040), (1001, 1003, 1005)
DEEP, TALL = (64, 256, 16384), (65536, 256, 256)  # few tiles and much to sum: several programs a tile
ONES = (1, 1, 1)  # Triton makes a constant of every argument that is 1
FEW_COLUMNS, FEW_COLUMNS_MANY_ROWS = (1024, 1024, 64), (32768, 512, 128)

_TABLE = [
    ("forward_large", _forward, LARGE, _FP16, "gelu", {}, None),
    ("forward_thin", _forward, THIN, _BF16, "silu", {}, KINDS),
    ("forward_middle_transposed", _forward, MIDDLE, _BF16, "gelu_tanh", {"transposed": True}, KINDS),
    ("forward_unaligned", _forward, ODD, _FP16, "gelu", {}, TABLES),
    ("forward_float32", _forward, LARGE, _FP32, "gelu", {}, TABLES),
    ("forward_tf32", _forward, LARGE, _FP32, "gelu", {"precision": "tf32"}, _TF32_TARGETS & KINDS),
    ("backward_pass", _backward, LARGE, _FP16, "gelu", {}, None),
    ("backward_prologue", _backward, FEW_COLUMNS, _BF16, "gelu", {}, BFLOAT16_TARGETS),
    ("backward_prologue_many_rows", _backward, FEW_COLUMNS_MANY_ROWS, _BF16, "gelu", {}, KINDS),
    ("backward_prologue_unaligned", _backward, (65, 67, 69), _BF16, "gelu", {}, KINDS),
    ("backward_prologue_float32", _backward, FEW_COLUMNS, _FP32, "gelu", {}, KINDS),
    ("backward_bias_large", _backward, LARGE, _BF16, None, {}, KINDS),
    ("backward_bias_alone", _backward, ONES, _FP16, "relu", {"needs": (False, False, True)}, _ONE),
    ("backward_ones", _backward, ONES, _FP16, "gelu", {}, _ONE),
    ("forward_ones", _forward, ONES, _FP16, "gelu", {}, _ONE),
    ("forward_everything", _forward, LARGE, _BF16, "gelu", {"residual": True, "dropout_p": 0.1}, KINDS | {"sm_100"}),
    ("forward_keeps_its_output", _forward, MIDDLE, _BF16, "sigmoid", {"residual": True, "out_dtype": _FP32}, _ONE),
    ("forward_again", _forward, MIDDLE, _BF16, "sigmoid", {"residual": True, "recompute": True}, _ONE),
    ("forward_tf32x3", _forward, LARGE, _FP32, None, {"precision": "tf32x3"}, _TF32_TARGETS & KINDS),
    ("forward_split", _forward, DEEP, _BF16, "gelu", {}, KINDS),
    ("backward_split", _backward, TALL, _BF16, None, {}, KINDS),
    ("backward_dropout", _backward, MIDDLE, _BF16, "gelu", {"dropout_p": 0.1}, KINDS),
    ("backward_accumulates", _backward, LARGE, _BF16, None, {"main_grad": True}, KINDS),
    ("backward_tf32", _backward, LARGE, _FP32, None, {"precision": "tf32"}, _TF32_TARGETS & KINDS),
]

# Every other activation, where an NVIDIA and an AMD compiler may differ; mish wants the most registers of all.
_TABLE += [
    row
    for name in ACTIVATIONS
    for row in (
        (f"forward_{name}", _forward, LARGE, _FP16, name, {}, TABLES if name == "mish" else _PAIR),
        (f"backward_{name}", _backward, ONES if name != "mish" else FEW_COLUMNS, _FP16, name, {}, _PAIR),
    )
    if name not in ("relu", "gelu")
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
