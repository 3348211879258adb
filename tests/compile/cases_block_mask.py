"""The compile cases of the kernel that builds block masks: each kind of rule."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusedops.attention.block_mask import BLOCK, BlockMask
from tests.harness.compile import Case


def _documents(dtype: torch.dtype) -> Callable[[], object]:
    return _build(BlockMask.from_document_ids(torch.zeros(2, 512, dtype=dtype)))


def _bits() -> Callable[[], object]:
    from torch.nn.attention.flex_attention import create_block_mask

    torchs = create_block_mask(lambda batch, head, i, j: i >= j, None, None, 256, 256, device="cpu")
    return _build(BlockMask.from_torch(torchs))


def _build(mask: BlockMask) -> Callable[[], object]:
    from fusedops.attention.kernels_block_mask import block_kinds

    rule = mask.mask_mod
    return lambda: block_kinds(rule.function, rule.args, mask.shape, BLOCK, mask.device)


CASES = [
    Case("documents_int64", lambda: _documents(torch.int64)),
    Case("documents_int32", lambda: _documents(torch.int32)),
    Case("bits", _bits),
]
