"""FlexAttention's block masks, read into blocks of our size and bits."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.runtime.checks import wrong_type, wrong_value
from fusedops.runtime.launch import ceil_div

_FUNCTION, _ARGUMENT = "BlockMask.from_torch", "block_mask"

# Blocks whose elements are evaluated at once.
_BLOCKS = 256

# The first two tiles; those of blocks that are seen in part follow.
_UNSEEN, _SEEN = 0, 1


def convert(block_mask: Any, block: int) -> tuple[tuple[int, int, int, int], torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(shape, kinds, tile_of_block, tiles)`` of a ``torch.nn.attention.flex_attention.BlockMask``.

    ``shape`` and ``kinds`` are those of :class:`fusedops.attention.block_mask.BlockMask`. ``tile_of_block``, int32, of
    the shape of ``kinds``, has the number of each block's tile. ``tiles`` (n, block, block / 32), int32: bit j % 32 of
    word (i, j // 32) is set where row i of the block sees column j.
    """
    from torch.nn.attention.flex_attention import BlockMask, create_mask

    if not isinstance(block_mask, BlockMask):
        wrong_type(_FUNCTION, _ARGUMENT, "a torch.nn.attention.flex_attention.BlockMask", block_mask)
    seqlen_q, seqlen_k = block_mask.seq_lengths
    size_q, size_k = block_mask.BLOCK_SIZE
    theirs = _their_kinds(block_mask, ceil_div(seqlen_q, size_q), ceil_div(seqlen_k, size_k))
    device = theirs.device
    rule = block_mask.mask_mod

    # Each of our blocks as a whole: what all of their blocks that it meets are.
    rows, cols = _met(seqlen_q, size_q, block, device), _met(seqlen_k, size_k, block, device)
    least, most = (
        getattr(getattr(theirs[:, :, rows], reduction)(3)[..., cols], reduction)(4) for reduction in ("amin", "amax")
    )
    kinds = torch.where(least == 2, 2, most.clamp(max=1)).to(torch.int8)

    # Those seen in part, element by element: some may turn out to be seen in full, or not at all.
    tile_of_block = torch.where(kinds == 2, _SEEN, _UNSEEN).to(torch.int32)
    no_bits_and_all = torch.tensor([0, -1], dtype=torch.int32, device=device)
    tiles = [no_bits_and_all[:, None, None].expand(2, block, block // 32)]
    count = 2
    for part in (kinds == 1).nonzero().split(_BLOCKS):
        b, h, a, c = part.unbind(1)

        def element(n: torch.Tensor, _: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            b_n, h_n = b[n], h[n]  # noqa: B023 (called in this turn of the loop)
            i = (a[n] * block + i).clamp(max=seqlen_q - 1)  # noqa: B023
            j = (c[n] * block + j).clamp(max=seqlen_k - 1)  # noqa: B023
            kind = theirs[b_n, h_n, i // size_q, j // size_k]
            return (kind == 2) | ((kind == 1) & rule(b_n, h_n, i, j))

        seen = create_mask(element, len(part), 1, block, block, device=device)[:, 0]
        every, some = (getattr(seen.flatten(1), reduction)(1) for reduction in ("all", "any"))
        kinds[b, h, a, c] = some.to(torch.int8) + every
        in_part = some & ~every
        bits = _packed(seen[in_part])
        tile = torch.where(every, _SEEN, _UNSEEN).to(torch.int32)
        tile[in_part] = torch.arange(count, count + len(bits), dtype=torch.int32, device=device)
        tile_of_block[b, h, a, c] = tile
        tiles.append(bits)
        count += len(bits)
    return (*kinds.shape[:2], seqlen_q, seqlen_k), kinds, tile_of_block, torch.cat(tiles)


def _their_kinds(block_mask: Any, rows: int, cols: int) -> torch.Tensor:
    """(batch, heads, rows, cols) int8: 0, 1 or 2 for each of torch's blocks, from its lists."""
    lists = [(1, block_mask.kv_num_blocks, block_mask.kv_indices)]
    if block_mask.full_kv_indices is not None:
        lists.append((2, block_mask.full_kv_num_blocks, block_mask.full_kv_indices))
    lead = torch.broadcast_shapes(*(index.shape[:-2] for _, _, index in lists))
    if len(lead) > 2:
        wrong_value(_FUNCTION, _ARGUMENT, "a mask of at most a batch and heads", block_mask.kv_indices)
    # A column more takes what is written past the end of a list.
    kinds = torch.zeros((*lead, rows, cols + 1), dtype=torch.int8, device=block_mask.kv_indices.device)
    for kind, count, index in lists:
        if index.shape[-2] < rows:
            wrong_value(_FUNCTION, _ARGUMENT, f"a mask that lists all {rows} rows of blocks of its lengths", index)
        count, index = count[..., :rows, None], index[..., :rows, :]
        listed = (torch.arange(index.shape[-1], device=index.device) < count) & (index < cols)
        kinds.scatter_(-1, torch.where(listed, index, cols).long().expand(*lead, -1, -1), kind)
    return kinds[..., :cols].reshape((1,) * (2 - len(lead)) + (*lead, rows, cols))


def _met(length: int, size: int, block: int, device: torch.device) -> torch.Tensor:
    """(our blocks, n): the numbers of all of torch's blocks, of ``size`` elements, that each of our blocks meets."""
    # No block of theirs lies between two of these elements of ours.
    elements = torch.tensor([*range(0, block - 1, size), block - 1], device=device)
    return (torch.arange(0, length, block, device=device)[:, None] + elements).clamp(max=length - 1) // size


def _packed(seen: torch.Tensor) -> torch.Tensor:
    """(…, n / 32) int32 of (…, n) bool: element j is bit j % 32 of word j // 32."""
    bits = seen.unflatten(-1, (-1, 32)).to(torch.int32) << torch.arange(32, dtype=torch.int32, device=seen.device)
    return bits.sum(-1, dtype=torch.int32)
