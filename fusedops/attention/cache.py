"""Where the keys and values of a cache lie, and their numbers: what every part of decoding agrees on."""

from __future__ import annotations

from typing import NamedTuple

import torch

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Largest magnitude of a stored number, to which the largest of a token's head is scaled.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def quantized(cache: torch.Tensor) -> bool:
    """Whether a number in this cache stands for itself times a scale."""
    return cache.dtype in LARGEST


def for_tokens(scales: torch.Tensor | None) -> bool:
    """Whether there is a scale for each token, rather than one a head."""
    return scales is not None and scales.dim() == 3


def scale_strides(scales: torch.Tensor | None) -> tuple[int, ...]:
    """As kernels take them."""
    return scales.stride() if scales is not None and scales.dim() == 3 else (0, 0, 0)


class Cache(NamedTuple):
    """Keys and values of the tokens so far.

    Contiguous: token p of sequence b is ``keys[b, head, p]``. Ring: ``keys[b, head, p % size]``, where the tokens that
    have come since have not overwritten it. Paged: ``keys[block_table[b, p // page], head, p % page]``.

    Attributes:
        keys: (batch, heads, size, d_k), or (pages, heads, page, d_k).
        values: the same with d_v.
        seqlens: (batch,) integers: tokens of each sequence before a call.
        block_table: (batch, most pages) integers; None: not paged.
        key_scales, value_scales: float32: (heads,), or of the shape of the cache without its last dimension: what a
            stored number is multiplied with. None: with nothing.
        ring: the cache is a ring.
    """

    keys: torch.Tensor
    values: torch.Tensor
    seqlens: torch.Tensor
    block_table: torch.Tensor | None
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    ring: bool

    @property
    def page(self) -> int | None:
        return None if self.block_table is None else self.keys.shape[2]

    @property
    def size(self) -> int:
        """Tokens of a sequence that it has room for."""
        pages = 1 if self.block_table is None else self.block_table.shape[1]
        return pages * self.keys.shape[2]


SCHEMA = (
    "Tensor{k} keys, Tensor{v} values, Tensor seqlens, Tensor? block_table, Tensor{ks}? key_scales,"
    " Tensor{vs}? value_scales, bool ring"
)
READ = SCHEMA.format(k="", v="", ks="", vs="")
WRITTEN = SCHEMA.format(k="(a!)", v="(b!)", ks="(c!)", vs="(d!)")
