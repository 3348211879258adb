"""Dropout that a backward can draw again: a seed from torch's generator, and a mask that is a function of it.

A mask is never stored. The seed is a tensor, drawn on the device by torch: so ``torch.manual_seed``, checkpointing,
torch.compile and CUDA graphs treat it as any other random number, and no device is waited for.
"""

from __future__ import annotations

import torch

from fusedops.runtime.sharded import sharded

_ROUND = (0xD2511F53, 0xCD9E8D57)
_KEY = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def draw_seed(
    like: torch.Tensor, residual: torch.Tensor | None = None, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """One int64, shape (1,), from the default generator of the device of ``like``.

    Where the result is spread over devices, as ``like`` or the residual is or by the rows of a weight, each shard gets
    another, made of one that all devices are expected to draw alike.
    """
    seed = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=like.device)
    if sharded(like):
        from fusedops.distributed.seeds import sharded_seed

        return sharded_seed(seed, like, residual, weight)
    return seed


def threshold_and_scale(p: float) -> tuple[int, float]:
    """What a kernel compares 31 random bits with, and what it multiplies by where it keeps an element.

    For p = 1 the scale is 0: all that is finite is dropped, exactly.
    """
    if p == 0.0:
        return 0, 1.0
    return min(int(p * 2**31), 2**31 - 1), 0.0 if p >= 1.0 else 1.0 / (1.0 - p)


def keep_scale(seed: torch.Tensor, rows: int | torch.Tensor, width: int, p: float) -> torch.Tensor:
    """(rows, width) float32: 1 / (1 - p) where an element is kept and 0 where it is dropped.

    ``rows``: how many, or which (int64 indices).

    The definition that :mod:`fusedops.kernels.dropout` computes in kernels, bit for bit.
    """
    device = seed.device
    row = (rows if isinstance(rows, torch.Tensor) else torch.arange(rows, device=device))[:, None]
    quads = -(-width // 4)
    quad = torch.arange(quads, device=device)[None, :].expand(row.shape[0], -1)
    counter = [quad, (row & _WORD).expand(-1, quads), (row >> 32).expand(-1, quads)]
    counter.append(torch.zeros_like(counter[0]))
    words = torch.stack(_philox(counter, seed & _WORD, (seed >> 32) & _WORD), dim=-1)
    threshold, scale = threshold_and_scale(p)
    kept = (words.flatten(1)[:, :width] >> 1) >= threshold
    return kept.to(torch.float32) * scale


def _philox(counter: list[torch.Tensor], key0: torch.Tensor, key1: torch.Tensor) -> list[torch.Tensor]:
    """Philox4x32-10 (Salmon et al. 2011, section 3.3) on 32-bit words held in int64."""
    c0, c1, c2, c3 = counter
    for _ in range(10):
        high0, low0 = _multiply(c0, _ROUND[0])
        high1, low1 = _multiply(c2, _ROUND[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + _KEY[0]) & _WORD, (key1 + _KEY[1]) & _WORD
    return [c0, c1, c2, c3]


def _multiply(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a product of 32-bit words; by halves, since int64 has a sign."""
    low, high = word * (factor & 0xFFFF), word * (factor >> 16)
    upper = high + (low >> 16)
    return upper >> 16, ((upper & 0xFFFF) << 16) | (low & 0xFFFF)
