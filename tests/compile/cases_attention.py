"""The attention launchers' compile cases: each kernel, at each kind of default configuration."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusedops.attention.tuning import too_small
from fusedops.runtime.device import TARGETS
from tests.harness.compile import BFLOAT16_TARGETS, Case

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


def _tensors(size: int, dtype: torch.dtype, mask: str | None, kv_heads: int) -> tuple[torch.Tensor | None, ...]:
    q = torch.empty(1, 4, 2048, size, dtype=dtype)
    k, v = (torch.empty(1, kv_heads, 2048, size, dtype=dtype) for _ in range(2))
    masks = {
        None: None,
        "float": torch.empty(1, 4, 2048, 2048, dtype=dtype),
        "padding": torch.empty(1, 1, 1, 2048, dtype=torch.bool),
    }
    return q, k, v, masks[mask]


def _forward(size: int, dtype: torch.dtype, mask: str | None, causal: int, kv_heads: int) -> Callable[[], object]:
    from fusedops.attention.kernels_forward import attention_forward

    q, k, v, attn_mask = _tensors(size, dtype, mask, kv_heads)
    return lambda: attention_forward(q, k, v, attn_mask, causal, 0.125, False)


def _backward(size: int, dtype: torch.dtype, mask: str | None, causal: int, kv_heads: int) -> Callable[[], object]:
    from fusedops.attention.kernels_backward import attention_backward

    q, k, v, attn_mask = _tensors(size, dtype, mask, kv_heads)
    out, statistics = torch.empty_like(q), torch.empty(2, 1, 4, 2048)
    needs = (True, True, True, mask == "float")
    return lambda: attention_backward(out, None, q, k, v, attn_mask, out, statistics, causal, 0.125, False, needs)


# Mask, causal, key heads of 4: what a decoder, an encoder with padding, and a model with a learned bias launch.
_CAUSAL_GROUPED, _PADDED, _BIASED = (None, 1, 2), ("padding", 0, 4), ("float", 0, 4)

_TABLE = [
    ("causal_grouped_64_float16", 64, _FP16, _CAUSAL_GROUPED, None),
    ("causal_grouped_128_bfloat16", 128, _BF16, _CAUSAL_GROUPED, BFLOAT16_TARGETS),
    ("biased_128_float16", 128, _FP16, _BIASED, None),
    ("causal_grouped_256_float16", 256, _FP16, _CAUSAL_GROUPED, None),
    ("causal_grouped_64_float32", 64, _FP32, _CAUSAL_GROUPED, None),
    ("biased_256_float32", 256, _FP32, _BIASED, None),
    ("padded_64_bfloat16", 64, _BF16, _PADDED, BFLOAT16_TARGETS),
    ("biased_64_float16", 64, _FP16, _BIASED, None),
    ("padded_80_float16", 80, _FP16, _PADDED, None),
    ("biased_256_float16", 256, _FP16, _BIASED, None),
    ("causal_grouped_192_bfloat16", 192, _BF16, _CAUSAL_GROUPED, None),
    ("biased_64_float32", 64, _FP32, _BIASED, None),
    ("biased_128_float32", 128, _FP32, _BIASED, None),
]


def _targets(size: int, dtype: torch.dtype, targets: frozenset[str] | None) -> frozenset[str]:
    """Those of ``targets`` (None: of all) that attention serves."""
    served = {name for name, facts in TARGETS.items() if too_small(facts, size, size, dtype.itemsize) is None}
    return frozenset(served & (targets or served))


CASES = [
    Case(
        f"{name}_{'backward' if make is _backward else 'forward'}",
        lambda make=make, size=size, dtype=dtype, options=options: make(size, dtype, *options),
        _targets(size, dtype, targets),
    )
    for name, size, dtype, options, targets in _TABLE
    for make in (_forward, _backward)
]
