"""The gated launchers' compile cases: each kernel, at each kind of default configuration."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusedops.runtime.device import TARGETS
from tests.harness.compile import KINDS, TABLES, Case

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_TF32_TARGETS = frozenset(name for name, facts in TARGETS.items() if facts.capability >= 80)
_ONE = frozenset({"sm_80"})

Sizes = tuple[int, int, int]


def _forward(
    sizes: Sizes,
    dtype: torch.dtype,
    activation: str | None,
    *,
    precision: str = "ieee",
    transposed: bool = False,
    packed: bool = False,
) -> Callable[[], object]:
    """A call on a tile, whatever the estimate prefers, that keeps the pre-activations."""
    from fusedops.linear import kernels_gated
    from fusedops.linear.tuning_gated import tiled_config

    M, N, K = sizes
    x, bias = torch.empty(M, K, dtype=dtype), torch.empty(N, dtype=dtype)
    gate, up = (torch.empty(K, N, dtype=dtype).t() if transposed else torch.empty(N, K, dtype=dtype) for _ in range(2))
    tensors = (x, gate, None, bias, None) if packed else (x, gate, up, bias, bias)

    def call() -> None:
        resolve, kernels_gated.resolve = kernels_gated.resolve, _tiled(tiled_config)
        try:
            kernels_gated.gated_linear(*tensors, activation, None, False, True, precision)
        finally:
            kernels_gated.resolve = resolve

    return call


def _tiled(tiled_config):
    from fusedops.runtime.device import device_facts

    return lambda operator, problem, device: tiled_config(problem, device_facts(device))


def _torch(sizes: Sizes, dtype: torch.dtype, activation: str | None) -> Callable[[], object]:
    """The elementwise kernel behind torch's products (of which the test computes small ones)."""
    from fusedops.linear.kernels_gated import gate

    M, N, _ = sizes
    z, y = torch.empty(M, 2 * N, dtype=dtype), torch.empty(M, N, dtype=dtype)
    return lambda: gate(z, y, activation)


def _backward(
    sizes: Sizes, dtype: torch.dtype, activation: str | None, *, halves: tuple[bool, bool] = (True, True)
) -> Callable[[], object]:
    """The elementwise pass; the products that follow are linear's."""
    from fusedops.linear.kernels_gated_backward import grad_gate

    M, N, _ = sizes
    dy, z = torch.empty(M, N, dtype=dtype), torch.empty(M, 2 * N, dtype=dtype)
    return lambda: grad_gate(dy, z, activation, *halves, True, True)


# Sizes decide the tile; the depth does not.
LARGE, WIDE, MIDDLE, SMALL = (8192, 8192, 256), (2048, 2048, 256), (1024, 1040, 256), (512, 1040, 1040)
THIN, THIN32, ODD, ONES = (1, 4096, 4096), (32, 4096, 256), (1001, 1003, 1005), (1, 1, 1)

_TABLE = [
    ("large", _forward, LARGE, _FP16, "gelu", {}, None),
    ("large_packed", _forward, LARGE, _FP16, None, {"packed": True}, _ONE),
    ("wide", _forward, WIDE, _BF16, "silu", {}, TABLES - {"sm_75"}),
    ("middle", _forward, MIDDLE, _FP16, "gelu", {}, TABLES),
    ("small_transposed", _forward, SMALL, _FP16, "gelu_tanh", {"transposed": True}, KINDS),
    ("thin", _forward, THIN, _BF16, "silu", {}, TABLES - {"sm_75"}),
    ("thin_of_32_rows", _forward, THIN32, _FP16, "silu", {}, TABLES),
    ("unaligned", _forward, ODD, _FP16, "gelu", {}, TABLES),
    ("ones", _forward, ONES, _FP16, "gelu", {}, _ONE),
    ("float32", _forward, LARGE, _FP32, "gelu", {}, TABLES),
    ("tf32", _forward, LARGE, _FP32, "gelu", {"precision": "tf32"}, _TF32_TARGETS & TABLES),
    ("tf32_thin", _forward, THIN, _FP32, "gelu", {"precision": "tf32"}, _TF32_TARGETS & TABLES),
    ("tf32x3", _forward, LARGE, _FP32, "gelu", {"precision": "tf32x3"}, _TF32_TARGETS & TABLES),
    ("tf32x3_thin", _forward, THIN32, _FP32, "gelu", {"precision": "tf32x3"}, _TF32_TARGETS & TABLES),
    ("tf32_unaligned", _forward, ODD, _FP32, "gelu", {"precision": "tf32x3"}, _TF32_TARGETS & TABLES),
    ("mish", _forward, LARGE, _FP16, "mish", {}, KINDS),  # wants the most registers of all activations
    ("gate", _torch, LARGE, _FP16, "gelu", {}, TABLES),
    ("backward", _backward, LARGE, _FP16, "gelu", {}, None),
    ("backward_of_the_gate", _backward, LARGE, _BF16, "silu", {"halves": (True, False)}, KINDS),
    ("backward_mish", _backward, LARGE, _FP16, "mish", {}, KINDS),
    ("backward_tanh", _backward, LARGE, _FP16, "tanh", {}, KINDS),  # its derivative is a function of the output
    ("backward_of_the_other", _backward, ONES, _FP32, None, {"halves": (False, True)}, KINDS),
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
