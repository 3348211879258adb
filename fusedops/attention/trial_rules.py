"""Rules that stand in for a user's when the tuner tries attention: a problem says that there are some, not which."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.attention.modifiers import MaskMod, ScoreMod


@triton.jit
def _tilted(score, batch, head, i, j, args):
    """A slope a head, read from memory, times the distance: as cheap as a rule that reads anything can be."""
    return score + tl.load(args[0] + head) * (i - j).to(tl.float32)


@triton.jit
def _tilted_gradient(grad, score, batch, head, i, j, args):
    return grad


def _tilted_definition(score, batch, head, i, j, slopes):
    return score + (slopes[head] * (i - j)).to(score.dtype)


@triton.jit
def _all_but_every_eighth(batch, head, i, j, args):
    """Every row sees its first key, and one of any two that follow each other."""
    return j % 8 != 5


def _all_but_every_eighth_definition(batch, head, i, j):
    return j % 8 != 5


def score_mod(slopes: torch.Tensor) -> ScoreMod:
    """``slopes``: (heads,) float32."""
    return ScoreMod(_tilted, _tilted_gradient, (slopes,), _tilted_definition)


def mask_mod() -> MaskMod:
    return MaskMod(_all_but_every_eighth, (), _all_but_every_eighth_definition)
