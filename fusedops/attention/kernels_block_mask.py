"""The Triton kernel that finds the blocks of scores that a mask lets through, and the rules of built-in masks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fusedops.runtime.device import device_facts, device_guard
from fusedops.runtime.launch import ceil_div, options

_LARGEST_GRID = 2**31 - 1


class Function(NamedTuple):
    """A user's ``@triton.jit`` function and the tensors that it reads, as a kernel takes them: one argument."""

    function: Any
    args: tuple[torch.Tensor, ...]


@triton.jit
def same_document(batch, head, i, j, args):
    """Query i sees key j iff both have the same id.

    args: the ids of queries (batch or 1, seqlen_q) and of keys (batch or 1, seqlen_k), and the two strides of the
    batch, 0 where it is broadcast.
    """
    of_query = tl.load(args[0] + batch * tl.load(args[2]) + i)
    of_key = tl.load(args[1] + batch * tl.load(args[2] + 1) + j)
    return of_query == of_key


@triton.jit
def bit_of_tile(batch, head, i, j, args):
    """Query i sees key j iff the bit of that element is set; all elements lie in one block of 128 x 128.

    args: which tile holds a block's bits (batch or 1, heads or 1, blocks, blocks), int32; the tiles (n, 128, 4), int32,
    whose bit j % 32 of word (i % 128, j % 128 // 32) is that of (i, j); the strides of the first three dimensions of
    the former, 0 where one is broadcast.
    """
    strides = args[2]
    block = batch * tl.load(strides) + head * tl.load(strides + 1) + tl.min(i) // 128 * tl.load(strides + 2)
    tile = tl.load(args[0] + block + tl.min(j) // 128)
    word = tl.load(args[1] + tile.to(tl.int64) * 512 + (i % 128 * 4 + j % 128 // 32))
    return ((word >> (j % 32)) & 1) != 0


@triton.jit(do_not_specialize=["first", "heads", "seqlen_q", "seqlen_k"])
def block_kinds_kernel(
    KINDS,  # (batch, heads, blocks of queries, blocks of keys) int8, contiguous
    RULE,  # Function
    first,
    heads,
    seqlen_q,
    seqlen_k,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program i owns block first + i: 0 where the rule lets no element through, 2 where all, else 1.

    It asks for ROWS queries at a time. Indices past an end repeat the last one, which changes neither answer.
    """
    block = first + tl.program_id(0).to(tl.int64)
    blocks_k = tl.cdiv(seqlen_k, BLOCK)
    blocks_q = tl.cdiv(seqlen_q, BLOCK)
    row = block // blocks_k
    pair = row // blocks_q
    batch = (pair // heads).to(tl.int32)
    head = (pair % heads).to(tl.int32)
    first_query = (row % blocks_q).to(tl.int32) * BLOCK
    first_key = (block % blocks_k).to(tl.int32) * BLOCK
    j = tl.minimum(first_key + tl.arange(0, BLOCK), seqlen_k - 1)[None, :]
    some = tl.zeros((ROWS, BLOCK), tl.int32)
    every = tl.full((ROWS, BLOCK), 1, tl.int32)
    for start in range(0, BLOCK, ROWS):
        i = tl.minimum(first_query + start + tl.arange(0, ROWS), seqlen_q - 1)[:, None]
        seen = RULE.function(batch, head, i, j, RULE.args).to(tl.int1).to(tl.int32)
        some = some | seen
        every = every & seen
    kind = tl.max(tl.max(some, axis=1), axis=0) + tl.min(tl.min(every, axis=1), axis=0)
    tl.store(KINDS + block, kind.to(tl.int8))


def block_kinds(
    function: Any,
    args: tuple[torch.Tensor, ...],
    shape: tuple[int, int, int, int],
    block: int,
    device: torch.device,
) -> torch.Tensor:
    """Allocate and launch: the kind of each block of a mask of ``shape`` (batch, heads, seqlen_q, seqlen_k)."""
    batch, heads, seqlen_q, seqlen_k = shape
    kinds = torch.empty(
        (batch, heads, ceil_div(seqlen_q, block), ceil_div(seqlen_k, block)), dtype=torch.int8, device=device
    )
    # The interpreter's time is that of its operations, whatever the size of a tile.
    rows = block if device_facts(device).vendor == "interpreter" else 32
    with device_guard(kinds):
        for first in range(0, kinds.numel(), _LARGEST_GRID):
            block_kinds_kernel[(min(kinds.numel() - first, _LARGEST_GRID),)](
                kinds, Function(function, args), first, heads, seqlen_q, seqlen_k,
                BLOCK=block, ROWS=rows, **options(num_warps=4),
            )  # fmt: skip
    return kinds
