"""Block-sparse attention masks: which blocks of scores attention visits, and the rule inside those seen in part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fusedops.attention.modifiers import MaskMod, register_rule
from fusedops.runtime.backend import HAS_TRITON, device_reasons, might_use_triton, use_triton
from fusedops.runtime.checks import check_count, describe, wrong_type, wrong_value
from fusedops.runtime.launch import ceil_div

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

# Queries and keys a block. The tiles of attention's kernels divide it.
BLOCK = 128

# Kinds of blocks.
NONE, SOME, ALL = 0, 1, 2

# Elements that a definition in plain torch is asked for at once.
_ELEMENTS = 1 << 22

# Results of `lists` that a mask keeps.
_KEPT_LISTS = 4

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

Lists = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """A mask of attention as blocks of 128 queries by 128 keys: attention never visits a block that no query sees, and
    asks the rule only inside blocks that are seen in part.

    Make one with :meth:`from_mask_mod`, :meth:`from_document_ids` or :meth:`from_torch`, once, and hand it to every
    layer: ``fusedops.attention(q, k, v, block_mask=mask)``. A function that torch.compile compiles may take one as an
    argument; of the three, only :meth:`from_document_ids` can be called inside.

    Attributes:
        mask_mod: the rule: which query sees which key.
        shape: (batch or 1, heads or 1, seqlen_q, seqlen_k); a 1 stands for every member of the batch, or every head.
        kinds: (batch or 1, heads or 1, ⌈seqlen_q / 128⌉, ⌈seqlen_k / 128⌉) int8, one number a block: 0, no query sees a
            key; 1, the rule must be asked (it may say no to all); 2, every query sees every key. They must agree with
            the rule. A last block of keys that reaches over ``seqlen_k`` is never 2: one that is given as 2 becomes 1.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Examples:
        >>> import torch
        >>> from fusedops.attention.block_mask import BlockMask
        >>> mask = BlockMask.from_document_ids(torch.tensor([0] * 200 + [1] * 184))
        >>> mask
        BlockMask(shape=(1, 1, 384, 384), blocks=(3, 3), mask_mod=same_document, device=cpu)
        >>> mask.kinds[0, 0]
        tensor([[2, 1, 0],
                [1, 1, 1],
                [0, 1, 2]], dtype=torch.int8)
        >>> round(mask.sparsity(), 1)
        22.2
    """

    mask_mod: MaskMod
    shape: tuple[int, int, int, int]
    kinds: torch.Tensor
    _kept: dict[tuple[Any, ...], Lists] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask_mod", MaskMod.of("BlockMask", self.mask_mod))
        if not isinstance(self.shape, Sequence) or len(self.shape) != 4:
            wrong_value("BlockMask", "shape", "of four ints (batch, heads, seqlen_q, seqlen_k)", self.shape)
        for size in self.shape:
            check_count("BlockMask", "shape", size)
        *lead, seqlen_q, seqlen_k = self.shape
        blocks = (*lead, ceil_div(seqlen_q, BLOCK), ceil_div(seqlen_k, BLOCK))
        if not isinstance(self.kinds, torch.Tensor) or self.kinds.dtype != torch.int8:
            wrong_type("BlockMask", "kinds", "an int8 tensor", self.kinds)
        if self.kinds.shape != blocks:
            wrong_value("BlockMask", "kinds", f"of shape {blocks}", self.kinds)
        object.__setattr__(self, "shape", tuple(self.shape))
        if seqlen_k % BLOCK:
            kinds = self.kinds.clone()
            kinds[..., -1].clamp_(max=SOME)
            object.__setattr__(self, "kinds", kinds)

    @classmethod
    def from_mask_mod(
        cls,
        mask_mod: MaskMod,
        batch: int | None,
        heads: int | None,
        seqlen_q: int,
        seqlen_k: int,
        device: torch.device | str,
    ) -> BlockMask:
        """The blocks of a rule, which is asked about every element, once.

        One kernel launch, without host synchronisation; beside the kinds, nothing is allocated. On the torch backend
        the rule's ``definition`` is evaluated, 4 million elements at a time.

        Args:
            mask_mod: the rule.
            batch, heads: of the calls that the mask is for; None or 1: the rule does not look at it, and one row of
                blocks serves all.
            seqlen_q, seqlen_k: lengths of the sequences.
            device: where the mask belongs; the tensors that the rule reads must be there.

        Raises:
            TypeError, ValueError: an argument is wrong, or the torch backend is to evaluate a rule that has no
                ``definition``; the message names the argument.

        Examples:
            >>> from fusedops.attention.block_mask import BlockMask
            >>> packed = BlockMask.from_document_ids(torch.tensor([0] * 128 + [1] * 128))
            >>> BlockMask.from_mask_mod(packed.mask_mod, None, None, 256, 256, "cpu").kinds[0, 0]
            tensor([[2, 0],
                    [0, 2]], dtype=torch.int8)
        """
        function = "BlockMask.from_mask_mod"
        mask_mod = MaskMod.of(function, mask_mod)
        sizes = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        for name, size in sizes.items():
            if size is not None or name in ("seqlen_q", "seqlen_k"):
                check_count(function, name, size)
        try:
            where = torch.empty(0, device=device).device
        except (RuntimeError, TypeError):
            wrong_value(function, "device", "a device that torch knows", device)
        for tensor in mask_mod.args:
            if tensor.device != where:
                wrong_value(function, "mask_mod", f"a rule whose tensors are on {where}", tensor)
        shape = (1 if batch is None else batch, 1 if heads is None else heads, seqlen_q, seqlen_k)
        if might_use_triton(where) and use_triton(function, _reasons(mask_mod, where), where):
            from fusedops.attention.kernels_block_mask import block_kinds

            return cls(mask_mod, shape, block_kinds(mask_mod.function, mask_mod.args, shape, BLOCK, where))
        _check_definition(function, mask_mod)
        return cls(mask_mod, shape, _kinds_by_definition(mask_mod, shape, where))

    @classmethod
    def from_document_ids(cls, document_ids: torch.Tensor, document_ids_k: torch.Tensor | None = None) -> BlockMask:
        """Documents packed into one sequence: query i sees key j iff both have the same id.

        Costs O(blocks²): a block is seen in full where all its ids are one, and not at all where its queries' ids are
        all below, or all above, those of its keys. So ids that ascend along the sequence (any ids that do) give the
        fewest blocks; others are right too. No host synchronisation. The ids are copied.

        Args:
            document_ids: (seqlen,) or (batch, seqlen), of an integer dtype: the queries' ids.
            document_ids_k: likewise, the keys' ids, where they are others.

        Raises:
            TypeError, ValueError: an argument is wrong; the message names it.

        Examples:
            >>> import torch
            >>> from fusedops.attention.block_mask import BlockMask
            >>> BlockMask.from_document_ids(torch.tensor([7, 7, 9])).materialize()[0, 0].int()
            tensor([[1, 1, 0],
                    [1, 1, 0],
                    [0, 0, 1]], dtype=torch.int32)
        """
        function = "BlockMask.from_document_ids"
        given = document_ids if document_ids_k is None else document_ids_k
        for name, ids in (("document_ids", document_ids), ("document_ids_k", given)):
            if not isinstance(ids, torch.Tensor) or ids.dtype not in _INTEGERS:
                wrong_type(function, name, "a tensor of an integer dtype", ids)
            if ids.dim() not in (1, 2):
                wrong_value(function, name, "of shape (seqlen,) or (batch, seqlen)", ids)
            if ids.device != document_ids.device:
                wrong_value(function, name, f"on the device of document_ids ({document_ids.device})", ids)
        of_q = _copied_ids(document_ids)
        of_k = of_q if document_ids_k is None else _copied_ids(document_ids_k)
        batches = {of_q.shape[0], of_k.shape[0]} - {1}
        if len(batches) > 1:
            wrong_value(function, "document_ids_k", f"of a batch of {of_q.shape[0]}, as document_ids is, or 1", given)
        batch = batches.pop() if batches else 1
        least_q, most_q = (ids[:, :, None] for ids in _range_of_blocks(of_q))
        least_k, most_k = (ids[:, None, :] for ids in _range_of_blocks(of_k))
        # Of two ranges of ids that meet, each of one id, both are the same id.
        meet = (least_q <= most_k) & (least_k <= most_q)
        kinds = meet.to(torch.int8) + (meet & (least_q == most_q) & (least_k == most_k))
        strides = _on_device([_stride(ids, 0) for ids in (of_q, of_k)], of_q.device)
        rule = _built_in(same_document, (of_q, of_k, strides))
        return cls(rule, (batch, 1, of_q.shape[1], of_k.shape[1]), kinds[:, None])

    @classmethod
    def from_torch(cls, block_mask: TorchBlockMask) -> BlockMask:
        """The mask of a ``torch.nn.attention.flex_attention.BlockMask``, of any block size.

        Its rule is a Python function, which no kernel can call. So it is evaluated here, once, inside the blocks that
        are seen in part, and kept as bits: 2 KiB each such block of 128 x 128, beside 4 bytes a block. The host waits
        for the device to learn how many blocks that are. What torch lists as seen in full stays so, and what it does
        not list stays unseen, whatever the rule says there. Where the mask has a batch or heads of 1, the rule is asked
        about the first and the answer serves all. What the rule reads is read now: later changes of it do not show.

        Raises:
            TypeError, ValueError: ``block_mask`` is none, or its lists have fewer rows than its lengths need.

        Examples:
            >>> from torch.nn.attention.flex_attention import create_block_mask
            >>> from fusedops.attention.block_mask import BlockMask
            >>> def causal(batch, head, i, j):
            ...     return i >= j
            >>> BlockMask.from_torch(create_block_mask(causal, None, None, 256, 256, device="cpu")).kinds[0, 0]
            tensor([[1, 0],
                    [2, 1]], dtype=torch.int8)
        """
        from fusedops.attention.block_mask_torch import convert

        shape, kinds, tile_of_block, tiles = convert(block_mask, BLOCK)
        strides = _on_device([_stride(tile_of_block, dim) for dim in range(3)], kinds.device)
        return cls(_built_in(bit_of_tile, (tile_of_block, tiles, strides)), shape, kinds)

    def lists(self, low: int | None = None, high: int | None = None) -> Lists:
        """The blocks that attention visits, under this mask and bounds: i + low ≤ j ≤ i + high for query i and key j.

        A handful of torch operators, without host synchronisation. The last few results are kept and must not be
        written to; inside a function that torch.compile compiles nothing is kept, so build there only what changes.

        Args:
            low, high: the bounds; None: no limit.

        Returns:
            ``(key_index, key_count, query_index, query_count)``, contiguous int32 tensors. ``key_index`` (batch or 1,
            heads or 1, query blocks, key blocks) has, for each block of queries, first the key blocks in which the rule
            and the bounds must be asked, ascending, then those seen in full, ascending, then the rest; ``key_count``
            (batch or 1, heads or 1, query blocks, 2) has the numbers of the first and of the second. ``query_index``
            (…, key blocks, query blocks) and ``query_count`` (…, key blocks, 2) are the same for each block of keys.

        Raises:
            TypeError: a bound is neither an int nor None.

        Examples:
            >>> import torch
            >>> from fusedops.attention.block_mask import BlockMask
            >>> index, count, _, _ = BlockMask.from_document_ids(torch.zeros(384).int()).lists(None, 0)  # causal
            >>> for blocks, (some, all) in zip(index[0, 0].tolist(), count[0, 0].tolist()):
            ...     print("in part", blocks[:some], "in full", blocks[some : some + all])
            in part [0] in full []
            in part [1] in full [0]
            in part [2] in full [0, 1]
        """
        for name, bound in (("low", low), ("high", high)):
            if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool)):
                wrong_type("BlockMask.lists", name, "an int or None", bound)
        seqlen_q, seqlen_k = self.shape[2:]
        # Bounds that hide nothing are none. And none beyond: a bound may be any int, of any size.
        low = None if low is None or low <= 1 - seqlen_q else min(low, seqlen_k)
        high = None if high is None or high >= seqlen_k - 1 else max(high, -seqlen_q)
        if torch.compiler.is_compiling():
            return self._build_lists(low, high)
        kept = self._kept
        if not self.kinds.is_cuda:
            key: tuple[Any, ...] = (low, high)
        elif torch.cuda.is_current_stream_capturing():
            # What a graph is to read must have been there before: what is made while capturing is only made when the
            # graph runs. Beginning a capture waits for all streams.
            return next((it for key, it in kept.items() if key[:2] == (low, high)), None) or self._build_lists(
                low, high
            )
        else:
            # On another stream they might not have been written yet.
            key = (low, high, torch.cuda.current_stream(self.kinds.device).cuda_stream)
        found = kept.get(key)
        if found is None:
            while len(kept) >= _KEPT_LISTS:
                kept.pop(next(iter(kept)), None)
            found = kept[key] = self._build_lists(low, high)
        return found

    def _build_lists(self, low: int | None, high: int | None) -> Lists:
        kinds = self.kinds
        if low is not None and high is not None and low > high:
            kinds = torch.zeros_like(kinds)
        elif low is not None or high is not None:
            kinds = torch.minimum(kinds, _kinds_of_bounds(self.shape[2], self.shape[3], low, high, kinds.device))
        return *_ordered(kinds), *_ordered(kinds.mT.contiguous())

    def materialize(self) -> torch.Tensor:
        """The mask itself, by the rule's ``definition``: bool, of :attr:`shape`, True where a query sees a key.

        For tests, the torch backend and small examples: it has seqlen_q · seqlen_k elements a head.

        Raises:
            ValueError: the rule has no ``definition``.
        """
        _check_definition("BlockMask.materialize", self.mask_mod)
        indices = (torch.arange(size, device=self.kinds.device) for size in self.shape)
        return _evaluate(self.mask_mod, *indices)

    def to(self, device: torch.device | str) -> BlockMask:
        """The same mask on another device; the tensors of its rule are moved too.

        Args:
            device: a torch.device or its name.
        """
        rule = self.mask_mod
        args = tuple(tensor.to(device) for tensor in rule.args)
        return BlockMask(MaskMod(rule.function, args, rule.definition), self.shape, self.kinds.to(device))

    @property
    def device(self) -> torch.device:
        """Where the lists of blocks are."""
        return self.kinds.device

    def numel(self) -> int:
        """The number of elements of the mask, seen or not."""
        return math.prod(self.shape)

    def sparsity(self) -> float:
        """The percentage of blocks that attention does not visit (without bounds); 0 where there are none.

        The host waits for the device.
        """
        blocks = self.kinds.numel()
        return 100.0 * int((self.kinds == NONE).sum()) / blocks if blocks else 0.0

    def __repr__(self) -> str:
        rule = self.mask_mod.function or self.mask_mod.definition
        name = getattr(rule, "__name__", None) or getattr(getattr(rule, "fn", None), "__name__", repr(rule))
        blocks = tuple(self.kinds.shape[2:])
        return f"BlockMask(shape={self.shape}, blocks={blocks}, mask_mod={name}, device={self.device})"


def same_document(
    batch: torch.Tensor,
    head: torch.Tensor,
    i: torch.Tensor,
    j: torch.Tensor,
    of_q: torch.Tensor,
    of_k: torch.Tensor,
    strides: torch.Tensor,
) -> torch.Tensor:
    """The definition of a document mask; arguments as of the kernel's function of this name."""
    return of_q[batch % of_q.shape[0], i] == of_k[batch % of_k.shape[0], j]


def bit_of_tile(
    batch: torch.Tensor,
    head: torch.Tensor,
    i: torch.Tensor,
    j: torch.Tensor,
    tile_of_block: torch.Tensor,
    tiles: torch.Tensor,
    strides: torch.Tensor,
) -> torch.Tensor:
    """The definition of a mask that is kept as bits; arguments as of the kernel's function of this name."""
    batches, heads = tile_of_block.shape[:2]
    tile = tile_of_block[batch % batches, head % heads, i // BLOCK, j // BLOCK]
    word = tiles[tile, i % BLOCK, j % BLOCK // 32]
    return (word >> (j % 32)) & 1 != 0


def _built_in(definition: Callable[..., torch.Tensor], args: tuple[torch.Tensor, ...]) -> MaskMod:
    """The built-in rule of this definition, about these tensors."""
    # Not by MaskMod's own constructor, which traced code cannot go through.
    rule, (function, name) = object.__new__(MaskMod), _function_and_name(definition.__name__)
    object.__setattr__(rule, "function", function)
    object.__setattr__(rule, "args", args)
    object.__setattr__(rule, "definition", definition)
    object.__setattr__(rule, "name", name)
    return rule


def _function_and_name(definition: str) -> tuple[Any, str]:
    """(Triton function, registered name) of the built-in rule whose definition has this name, as has the function."""
    function = None
    if HAS_TRITON:
        from fusedops.attention import kernels_block_mask

        function = getattr(kernels_block_mask, definition)
    return function, register_rule(function, None, globals()[definition])


# A built-in rule is the same in the whole process: traced code takes it as a constant.
_function_and_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _reasons(mask_mod: MaskMod, device: torch.device) -> list[str]:
    """Every reason why the kernel cannot ask this rule."""
    reasons = device_reasons(device, ())
    if mask_mod.function is None:
        reasons.append("mask_mod has a definition only, no Triton function")
    return reasons


def _check_definition(function: str, mask_mod: MaskMod) -> None:
    if mask_mod.definition is None:
        raise ValueError(
            f"{function}: mask_mod must have a definition (the rule in plain torch) where the torch backend is to"
            f" evaluate it; got {describe(mask_mod)}"
        )


def _copied_ids(ids: torch.Tensor) -> torch.Tensor:
    """(batch or 1, seqlen) int32 or int64, contiguous, the memory our own."""
    ids = ids[None] if ids.dim() == 1 else ids
    dtype = torch.int64 if ids.dtype == torch.int64 else torch.int32
    return ids.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _range_of_blocks(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest id of each block (batch, blocks)."""
    blocks = ceil_div(ids.shape[1], BLOCK)
    # The last id, repeated past the end, changes neither.
    ids = torch.cat((ids, ids[:, -1:].expand(-1, blocks * BLOCK - ids.shape[1])), 1)
    return ids.view(ids.shape[0], blocks, BLOCK).aminmax(dim=2)


def _stride(tensor: torch.Tensor, dim: int) -> int:
    """0 where the dimension is broadcast."""
    return 0 if tensor.shape[dim] == 1 else tensor.stride(dim)


def _on_device(numbers: list[int], device: torch.device) -> torch.Tensor:
    """An int64 tensor of a few numbers, made without the host synchronisation that copying a list would be."""
    tensor = torch.empty(len(numbers), dtype=torch.int64, device=device)
    for position, number in enumerate(numbers):
        tensor[position].fill_(number)
    return tensor


def _evaluate(
    mask_mod: MaskMod, batch: torch.Tensor, head: torch.Tensor, i: torch.Tensor, j: torch.Tensor
) -> torch.Tensor:
    """(batch, head, i, j) bool: the rule's definition at these indices, each a tensor of one dimension."""
    assert mask_mod.definition is not None
    shape = (len(batch), len(head), len(i), len(j))
    seen = mask_mod.definition(batch[:, None, None, None], head[:, None, None], i[:, None], j, *mask_mod.args)
    return torch.broadcast_to(seen, shape).to(torch.bool)


def _kinds_by_definition(mask_mod: MaskMod, shape: tuple[int, int, int, int], device: torch.device) -> torch.Tensor:
    """What the kernel computes, by the definition in plain torch, a piece of ``_ELEMENTS`` elements at a time."""
    batch, heads, seqlen_q, seqlen_k = shape
    units = (batch, heads, ceil_div(seqlen_q, BLOCK), ceil_div(seqlen_k, BLOCK))
    kinds = torch.empty(units, dtype=torch.int8, device=device)
    for piece in _pieces(units, _ELEMENTS // BLOCK**2):
        b, h, i, j = (
            torch.arange(part.start * size, part.stop * size, device=device)
            for part, size in zip(piece, (1, 1, BLOCK, BLOCK), strict=True)
        )
        # Indices past an end repeat the last one, which changes neither `any` nor `all`.
        seen = _evaluate(mask_mod, b, h, i.clamp(max=seqlen_q - 1), j.clamp(max=seqlen_k - 1))
        seen = seen.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        kinds[piece] = seen.amax((3, 5)).to(torch.int8) + seen.amin((3, 5))
    return kinds


def _pieces(sizes: Sequence[int], most: int) -> Iterator[tuple[slice, ...]]:
    """Slices that together cover a tensor of these sizes, none of more than ``most`` elements."""
    steps = []
    for size in reversed(sizes):
        steps.append(max(1, min(size, most)))
        most //= steps[-1]
    ranges = [range(0, size, step) for size, step in zip(sizes, reversed(steps), strict=True)]
    for starts in itertools.product(*ranges):
        yield tuple(
            slice(start, min(start + part.step, size)) for start, part, size in zip(starts, ranges, sizes, strict=True)
        )


def _kinds_of_bounds(
    seqlen_q: int, seqlen_k: int, low: int | None, high: int | None, device: torch.device
) -> torch.Tensor:
    """(query blocks, key blocks) int8: the kinds of a mask of the bounds alone."""
    first_query, last_query = _ends_of_blocks(seqlen_q, device)
    first_key, last_key = _ends_of_blocks(seqlen_k, device)
    # The least and the most of j - i in each block, whose elements have every number between.
    least, most = first_key - last_query[:, None], last_key - first_query[:, None]
    kinds = torch.full(least.shape, ALL, dtype=torch.int8, device=device)
    if low is not None:
        kinds = torch.minimum(kinds, (most >= low).to(torch.int8) + (least >= low))
    if high is not None:
        kinds = torch.minimum(kinds, (least <= high).to(torch.int8) + (most <= high))
    return kinds


def _ends_of_blocks(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    first = torch.arange(0, length, BLOCK, device=device)
    return first, (first + (BLOCK - 1)).clamp(max=length - 1)


def _ordered(kinds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row: the positions of SOME, then ALL, then the others, each ascending; how many the first two are."""
    index = torch.argsort((kinds + 2) % 3, dim=-1, stable=True).to(torch.int32).contiguous()
    count = torch.stack(((kinds == SOME).sum(-1), (kinds == ALL).sum(-1)), -1).to(torch.int32)
    return index, count
