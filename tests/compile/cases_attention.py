"""The attention launchers' compile cases: each kernel, at each kind of default configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from fusedops.attention.modifiers import MaskMod, ScoreMod
from fusedops.attention.options import Needs, Options
from fusedops.attention.tuning import BLOCK, AttentionConfig, too_small
from fusedops.runtime.backend import HAS_TRITON
from fusedops.runtime.device import TARGETS
from tests.harness.compile import BFLOAT16_TARGETS, Case

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _tilted(score, batch, head, i, j, args):
        return score + tl.load(args[0] + head) * (i - j).to(tl.float32)

    @triton.jit
    def _tilted_gradient(grad, score, batch, head, i, j, args):
        return grad

    @triton.jit
    def _striped(batch, head, i, j, args):
        return (i - j) % 8 == head % 8


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


_HEADS, _LENGTH = 4, 2048
_STARTS = torch.empty(9, dtype=torch.int32)  # of eight sequences

_OPTIONS: dict[str, Callable[[torch.dtype], Options]] = {
    # What a decoder, an encoder with padding, and a model with a learned bias launch.
    "causal": lambda _: Options(right=0),
    "padded": lambda _: Options(torch.empty(1, 1, 1, _LENGTH, dtype=torch.bool)),
    "biased": lambda dtype: Options(torch.empty(1, _HEADS, _LENGTH, _LENGTH, dtype=dtype)),
    # Mistral, GPT-OSS, Gemma 2, BLOOM, and training with dropout.
    "window": lambda _: Options(bottom_right=True, left=512, right=0),
    "sinks": lambda dtype: Options(sinks=torch.empty(_HEADS, dtype=dtype), bottom_right=True, left=127, right=0),
    "softcap": lambda _: Options(right=0, softcap=50.0),
    "alibi": lambda _: Options(alibi_slopes=torch.empty(8, _HEADS), sequences=(_STARTS, _STARTS), right=0),
    "dropout": lambda _: Options(seed=torch.empty(1, dtype=torch.int64), right=0, dropout_p=0.1),
    "packed": lambda _: Options(sequences=(_STARTS, _STARTS), bottom_right=True, right=0),
    "blocks": lambda _: Options(blocks=_lists(), mask_mod=MaskMod(_striped).name, right=0),
    "rules": lambda _: Options(
        mask_mod=MaskMod(_striped).name,
        score_mod=ScoreMod(_tilted, _tilted_gradient).name,
        score_args=(torch.empty(_HEADS),),
    ),
}


def _lists() -> tuple[torch.Tensor, ...]:
    blocks = _LENGTH // BLOCK
    index = torch.empty(1, 1, blocks, blocks, dtype=torch.int32)
    count = torch.empty(1, 1, blocks, 2, dtype=torch.int32)
    return index, count, index, count


def _tensors(size: int, dtype: torch.dtype, options: str, kv_heads: int, length: int) -> tuple[Any, ...]:
    q = torch.empty(1, _HEADS, length, size, dtype=dtype)
    k, v = (torch.empty(1, kv_heads, length, size, dtype=dtype) for _ in range(2))
    return q, k, v, _OPTIONS[options](dtype)._replace(scale=0.125)


def _forward(*arguments: Any) -> Callable[[], object]:
    from fusedops.attention.kernels_forward import attention_forward

    tensors = _tensors(*arguments)
    return lambda: attention_forward(*tensors)


def _backward(*arguments: Any) -> Callable[[], object]:
    from fusedops.attention.kernels_backward import attention_backward

    q, k, v, options = _tensors(*arguments)
    out, statistics = torch.empty_like(q), torch.empty(2, *q.shape[:3])
    needs = Needs(True, True, True, options.float_mask, options.alibi_slopes is not None, options.sinks is not None)
    return lambda: attention_backward(out, None, q, k, v, out, statistics, options, needs)


# name of the options, head size, dtype, key heads of 4, targets (None: all), length
_TABLE: list[tuple[str, int, torch.dtype, int, frozenset[str] | None, int]] = [
    ("causal", 64, _FP16, 2, None, _LENGTH),
    ("causal", 128, _BF16, 2, BFLOAT16_TARGETS, _LENGTH),
    ("biased", 128, _FP16, 4, None, _LENGTH),
    ("causal", 256, _FP16, 2, None, _LENGTH),
    ("causal", 64, _FP32, 2, None, _LENGTH),
    ("biased", 256, _FP32, 4, None, _LENGTH),
    ("padded", 64, _BF16, 4, BFLOAT16_TARGETS, _LENGTH),
    ("biased", 64, _FP16, 4, None, _LENGTH),
    ("padded", 80, _FP16, 4, None, _LENGTH),
    ("biased", 256, _FP16, 4, None, _LENGTH),
    ("causal", 192, _BF16, 2, None, _LENGTH),
    ("biased", 64, _FP32, 4, None, _LENGTH),
    ("biased", 128, _FP32, 4, None, _LENGTH),
    # The options one by one, where they are used. Each takes long to compile: for some of the targets.
    ("window", 128, _BF16, 2, frozenset({"sm_80", "sm_90"}), _LENGTH),
    ("sinks", 64, _BF16, 1, frozenset({"sm_90"}), _LENGTH),
    ("softcap", 256, _BF16, 2, frozenset({"sm_80", "sm_90"}), _LENGTH),
    ("alibi", 128, _BF16, 4, frozenset({"gfx942"}), _LENGTH),
    ("dropout", 64, _FP16, 4, frozenset({"sm_80"}), _LENGTH),
    ("packed", 128, _BF16, 2, frozenset({"sm_90", "gfx942"}), _LENGTH),
    ("blocks", 64, _BF16, 2, frozenset({"sm_90"}), _LENGTH),
    ("rules", 128, _FP16, 4, frozenset({"sm_80"}), _LENGTH),
    # Too few tiles to fill a device: one launch for all gradients.
    ("causal", 64, _BF16, 4, frozenset({"sm_90"}), 512),
    ("packed", 64, _FP16, 4, frozenset({"sm_80"}), 512),
]


def _targets(size: int, dtype: torch.dtype, targets: frozenset[str] | None) -> frozenset[str]:
    """Those of ``targets`` (None: of all) that attention serves."""
    served = {name for name, facts in TARGETS.items() if too_small(facts, size, size, dtype.itemsize) is None}
    return frozenset(served & (targets or served))


def _candidate(size: int, config: AttentionConfig) -> Callable[[], object]:
    """A forward in a configuration that is no default."""
    from fusedops.attention.kernels_forward import attention_forward
    from fusedops.attention.operands import Operands

    tensors = _tensors(size, _BF16, "causal", 2, _LENGTH)

    def call() -> object:
        with mock.patch.object(Operands, "config", return_value=config):
            return attention_forward(*tensors)

    return call


_PERSISTENT = AttentionConfig(128, 64, 8, 2, descriptors=True, persistent=True)
_SPECIALIZED = AttentionConfig(128, 64, 8, 2, descriptors=True, persistent=True, specialize=True)

CASES = [
    Case("persistent_128", functools.partial(_candidate, 128, _PERSISTENT), frozenset({"sm_90"})),
    Case("specialized_64", functools.partial(_candidate, 64, _SPECIALIZED), frozenset({"sm_100"})),
]
CASES += [
    Case(
        f"{name}_{size}_{str(dtype).removeprefix('torch.')}{'' if length == _LENGTH else '_short'}_{make.__name__[1:]}",
        functools.partial(make, size, dtype, name, kv_heads, length),
        _targets(size, dtype, targets),
    )
    for name, size, dtype, kv_heads, targets, length in _TABLE
    for make in (_forward, _backward)
    if length == _LENGTH or make is _backward
]
