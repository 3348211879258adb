"""All that attention takes beside queries, keys and values, as its operators, kernels and definition see it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Options(NamedTuple):
    """The operators' arguments after q, k and v, in the order of :data:`SCHEMA`.

    Attributes:
        attn_mask: (batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1): bool, True where the query may see the key,
            or floating, added to the scores. With ``sequences`` the lengths are those of the longest sequence.
        alibi_slopes: (batch or 1, heads): ``-slope · |j - i - shift|`` is added to a score, shift the diagonal's.
        sinks: (heads,): one more logit in each row's softmax, that belongs to no key.
        seed: one int64, of dropout; None: no dropout.
        sequences: () or (cu_seqlens_q, cu_seqlens_k): sequences lie one after the other along the lengths of q and
            k, whose batch is 1; (sequences + 1,) integers, where each begins and the last one ends.
        blocks: () or the four lists of :meth:`fusedops.attention.block_mask.BlockMask.lists`: the only blocks visited.
        score_args, mask_args: tensors that the two rules read.
        score_mod, mask_mod: their names (modifiers.py); "" for none.
        bottom_right: the diagonal ends at the last query and key, else it begins at the first ones.
        left, right: query i sees key j only if i + shift - left ≤ j ≤ i + shift + right; None: no limit.
        softcap: s becomes softcap · tanh(s / softcap); 0: it does not.
        scale: factor of q·k. None: 1/√size, which the operators want as a number.
        dropout_p: probability that a weight is dropped.
        precision: of float32 products (runtime.precision).
    """

    attn_mask: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    seed: torch.Tensor | None = None
    sequences: Sequence[torch.Tensor] = ()
    blocks: Sequence[torch.Tensor] = ()
    score_args: Sequence[torch.Tensor] = ()
    mask_args: Sequence[torch.Tensor] = ()
    score_mod: str = ""
    mask_mod: str = ""
    bottom_right: bool = False
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    scale: float | None = 1.0
    dropout_p: float = 0.0
    precision: str = "ieee"

    def completed(self, size: int, seed: torch.Tensor | None, precision: str) -> Options:
        """With what the operators want as well: the factor as a number, for a head size; the seed; the precision."""
        return Options(  # several times faster than _replace
            self.attn_mask, self.alibi_slopes, self.sinks, seed, self.sequences, self.blocks, self.score_args,
            self.mask_args, self.score_mod, self.mask_mod, self.bottom_right, self.left, self.right, self.softcap,
            1.0 / math.sqrt(max(size, 1)) if self.scale is None else self.scale, self.dropout_p, precision,
        )  # fmt: skip

    @property
    def float_mask(self) -> bool:
        return self.attn_mask is not None and self.attn_mask.dtype != torch.bool

    def bounds(self, seqlen_q: int, seqlen_k: int) -> tuple[int | None, int | None]:
        """(low, high): query i sees key j only if i + low ≤ j ≤ i + high; None: no limit. For one dense sequence."""
        shift = seqlen_k - seqlen_q if self.bottom_right else 0
        low = None if self.left is None else shift - self.left
        return low, None if self.right is None else shift + self.right


SCHEMA = (
    "Tensor? attn_mask, Tensor? alibi_slopes, Tensor? sinks, Tensor? seed, Tensor[] sequences, Tensor[] blocks,"
    " Tensor[] score_args, Tensor[] mask_args, str score_mod, str mask_mod, bool bottom_right, SymInt? left,"
    " SymInt? right, float softcap, float scale, float dropout_p, str precision"
)


class Needs(NamedTuple):
    """Which gradients are wanted, and in which order they come."""

    q: bool
    k: bool
    v: bool
    attn_mask: bool
    alibi_slopes: bool
    sinks: bool


class Gradients(NamedTuple):
    """Gradients in the dtypes of their tensors; one that is not wanted has shape (0,)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    attn_mask: torch.Tensor
    alibi_slopes: torch.Tensor
    sinks: torch.Tensor


def empty_heads(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """An uninitialised (batch, heads, length, size) whose memory lies as (batch, length, heads, size).

    So do models hold it before and after attention: their transposes and reshapes are then views.
    """
    batch, heads, length, size = shape
    if type(like) is torch.Tensor and batch and heads and length and size:  # the quickest way to the same strides
        return like.new_empty_strided(shape, (length * heads * size, size, heads * size, 1))
    return torch.empty_permuted(shape, (0, 2, 1, 3), dtype=like.dtype, device=like.device)


def empty_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, needs: Sequence[bool]
) -> Gradients:
    """Uninitialised gradients."""
    tensors = (q, k, v, options.attn_mask, options.alibi_slopes, options.sinks)
    made = [
        q.new_empty(0)
        if tensor is None or not need
        else (empty_heads(tensor, tensor.shape) if place < 3 else tensor.new_empty(tensor.shape))
        for place, (tensor, need) in enumerate(zip(tensors, needs, strict=True))
    ]
    return Gradients(*made)
