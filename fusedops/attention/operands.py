"""What every attention launcher hands to its kernel: tensors, strides, sizes and compile-time flags."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from fusedops.attention.modifiers import functions_of
from fusedops.attention.options import Options
from fusedops.attention.tuning import (
    ATTENTION,
    BLOCK,
    FEATURES,
    AttentionConfig,
    AttentionProblem,
    Pass,
    copies_by_descriptors,
    head_block,
)
from fusedops.autotune.resolve import resolve
from fusedops.runtime.device import device_facts
from fusedops.runtime.dropout import threshold_and_scale
from fusedops.runtime.launch import DTYPE_NAMES, ceil_div, next_power_of_2, options
from fusedops.runtime.precision import dot_precision

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4
    TensorDescriptor = None

LOG2E = 1.4426950408889634

Strides = tuple[int, ...]


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with stride 1 in its last dimension: itself where it has that, else a copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def strides_of(tensor: torch.Tensor) -> Strides:
    """Strides of batch, head and row."""
    return tensor.stride()[:3]


def _broadcast_strides(tensor: torch.Tensor) -> Strides:
    """Strides, 0 where the tensor has size 1."""
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class Rule(NamedTuple):
    """A user's Triton functions and the tensors that they read."""

    function: Any
    gradient: Any
    args: tuple[torch.Tensor, ...]


class Terms(NamedTuple):
    """What is added to a score, and what may hide it; None for what a call does not have.

    Attributes:
        mask: attn_mask; a bool mask as uint8.
        mask_strides: (batch, head, key), 0 where it is broadcast.
        mask_row_stride: of queries; None where it is broadcast over them.
        mask_shape: (queries, keys) of a mask for packed sequences, which may be longer than it.
        slopes: ALiBi's, (batch, heads) float32 in the unit of the scores.
        slope_strides: (batch,).
        score_mod, mask_mod: the user's rules.
    """

    mask: torch.Tensor | None
    mask_strides: Strides
    mask_row_stride: int | None
    mask_shape: tuple[int, int] | None
    slopes: torch.Tensor | None
    slope_strides: Strides
    score_mod: Rule | None
    mask_mod: Rule | None


class Dropout(NamedTuple):
    """One int64 seed, and what runtime.dropout.threshold_and_scale gives."""

    seed: torch.Tensor
    threshold: int
    scale: float


class Lists(NamedTuple):
    """For each block of one side, the blocks of the other: how many in part, how many wholly, and which."""

    blocks: torch.Tensor
    counts: torch.Tensor
    block_strides: Strides
    count_strides: Strides


# Below this length a kernel takes little longer than its launch, which descriptors lengthen.
WORTH_DESCRIBING = 512


def _describable(tensor: torch.Tensor) -> bool:
    """What the copy engine asks: 16-byte steps between rows, heads and batches, and an aligned beginning."""
    step = 16 // tensor.element_size()
    if tensor.data_ptr() % 16 or tensor.stride(3) != 1 or tensor.shape[3] % step:
        return False
    return all(
        size == 1 or (stride > 0 and stride % step == 0)
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    )


def _descriptor(tensor: torch.Tensor, rows: int) -> Any:
    """Of (batch, heads, length, size); its block is ``rows`` rows of one head."""
    size = tensor.shape[3]
    # A dimension of size 1 may have any stride, even one that a descriptor cannot have.
    strides = [stride if of > 1 else size for of, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, rows, max(16, next_power_of_2(size))])


_NO_TERMS = Terms(None, (0, 0, 0), None, None, None, (0,), None, None)
_LARGEST_BAND = 1 << 30


def _rule(name: str, args: Any) -> Rule | None:
    if not name:
        return None
    functions = functions_of(name)
    return Rule(functions.function, functions.gradient, tuple(args))


class Operands(NamedTuple):
    """The inputs of one call of attention, as kernels take them.

    Attributes:
        q, k, v: (batch, heads, length, size) with unit stride in the last dimension.
        options: the call's.
        terms, dropout, sinks, starts: as the kernels take them.
        scale, softcap: so that a score is ``scale · q·k``, or ``softcap · tanh(scale · q·k)``, in the kernels' unit.
        unit: that unit, of scores in base e: log₂e, or 1 where the kernels compute in base e.
        shape: of q.
        shape_v: of v.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: Options
    terms: Terms
    dropout: Dropout | None
    left: int | None
    right: int | None
    scale: float
    softcap: float
    unit: float
    precision: str
    shape: tuple[int, ...]  # kept, since a tensor makes a new one each time it is asked
    shape_v: tuple[int, ...]

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Operands:
        natural = options.float_mask or options.score_mod != ""
        unit = 1.0 if natural else LOG2E
        softcap, scale = options.softcap, options.scale
        assert scale is not None
        # A limit that no pair of positions passes is none.
        shape, shape_v = q.shape, v.shape
        most = min(shape[2] + shape_v[2], _LARGEST_BAND)
        left = None if options.left is None or options.left >= most else options.left
        right = None if options.right is None or options.right >= most else options.right
        dropout = None
        if options.seed is not None:
            dropout = Dropout(options.seed, *threshold_and_scale(options.dropout_p))
        return cls(
            unit_stride(q),
            unit_stride(k),
            unit_stride(v),
            options,
            _terms(options, unit),
            dropout,
            left,
            right,
            scale / softcap if softcap else scale * unit,
            softcap * unit,
            unit,
            dot_precision(q, options.precision),
            shape,
            shape_v,
        )

    @property
    def sinks(self) -> torch.Tensor | None:
        return None if self.options.sinks is None else self.options.sinks.contiguous()

    @property
    def starts(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        sequences = self.options.sequences
        return (sequences[0].contiguous(), sequences[1].contiguous()) if sequences else (None, None)

    @property
    def sequence_count(self) -> int:
        """Sequences: packed ones, or the batch."""
        return self.options.sequences[0].shape[0] - 1 if self.options.sequences else self.shape[0]

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int, int]:
        """(query heads, query heads a key head, sequences, seqlen_q, seqlen_k, align, left, right)."""
        _, heads, seqlen_q, _ = self.shape
        _, key_heads, seqlen_k, _ = self.shape_v
        align = int(self.options.bottom_right)
        return (
            heads, heads // key_heads, self.sequence_count, seqlen_q, seqlen_k, align, self.left or 0, self.right or 0,
        )  # fmt: skip

    @property
    def strides(self) -> tuple[Strides, Strides, Strides]:
        return strides_of(self.q), strides_of(self.k), strides_of(self.v)

    def lists(self, of: Literal["keys", "queries"]) -> Lists | None:
        """The lists of key blocks for each block of queries, or of query blocks for each block of keys."""
        if not self.options.blocks:
            return None
        at = 0 if of == "keys" else 2
        index, count = (t.contiguous() for t in self.options.blocks[at : at + 2])
        return Lists(index, count, (*_broadcast_strides(index)[:2], index.stride(2)), _broadcast_strides(count)[:2])

    def programs(self, side: Literal["q", "k"], block: int) -> int:
        """How many programs own ``block`` rows each (kernels_tiles.tile_of)."""
        batch, heads, length, _ = self.shape if side == "q" else self.shape_v
        if self.options.sequences:
            return heads * (length // block + self.sequence_count + 1)
        return batch * heads * ceil_div(length, block)

    def section(self, side: Literal["q", "k"]) -> int:
        """How many heads take turns (kernels_tiles.tile_of): as many as the level-2 cache holds.

        1 where all tiles are as long, or where the lengths differ for another reason.
        """
        if self.right is None or self.options.sequences or self.options.blocks:
            return 1
        batch, heads, seqlen_q, d_k = self.shape
        _, key_heads, seqlen_k, d_v = self.shape_v
        bytes_a_head = (seqlen_k * (d_k + d_v) if side == "q" else seqlen_q * 2 * d_k) * self.q.element_size()
        shared = heads // key_heads if side == "q" else 1
        held = device_facts(self.q.device).cache // max(bytes_a_head, 1)
        return max(1, min(held * shared, batch * (heads if side == "q" else key_heads)))

    def describable(self, *tensors: torch.Tensor) -> bool:
        """Whether tensor descriptors can stand for these, and it is worth the host's time to make them.

        A descriptor has its tensor's own lengths: it ends at each head's last row. Packed sequences have no lengths on
        the host.
        """
        if TensorDescriptor is None or self.options.sequences or self.q.element_size() > 2:
            return False
        if min(self.shape[2], self.shape_v[2]) < WORTH_DESCRIBING:
            return False
        if not copies_by_descriptors(device_facts(self.q.device)):
            return False
        return all(_describable(tensor) for tensor in tensors)

    def moving(self, descriptors: bool, rows: int, *tensors: torch.Tensor) -> list[Any]:
        """The tensors whose tiles of ``rows`` rows a kernel moves, or descriptors of them."""
        return [_descriptor(tensor, rows) if descriptors else tensor for tensor in tensors]

    def config(self, kernel: Pass, *moving: torch.Tensor) -> AttentionConfig:
        """``moving``: the tensors whose tiles move; none where the kernel has no use for descriptors."""
        described = bool(moving) and self.describable(*moving)
        return resolve(ATTENTION, self.problem(kernel, described), self.q.device)

    @property
    def natural(self) -> bool:
        return self.unit == 1.0

    @property
    def exact(self) -> bool:
        """Whether a backward needs each row's maximum and sum apart (kernels_backward.rows_kernel)."""
        return self.natural or self.q.dtype == torch.float32

    @property
    def features(self) -> str:
        """Names of what is done to scores (fusedops.attention.tuning.FEATURES)."""
        asked = self.options
        if (
            self.terms is _NO_TERMS
            and not (self.softcap or asked.blocks or asked.sequences)
            and (self.dropout is None and asked.sinks is None)
        ):
            return ""
        has_mask = asked.attn_mask is not None
        present = (
            self.softcap != 0.0,
            self.dropout is not None,
            has_mask and asked.float_mask,
            has_mask and not asked.float_mask,
            asked.alibi_slopes is not None,
            asked.score_mod != "",
            asked.mask_mod != "",
            asked.sinks is not None,
            bool(asked.blocks),
            bool(asked.sequences),
        )
        return "+".join(name for name, here in zip(FEATURES, present, strict=True) if here)

    def problem(self, kernel: Pass, described: bool = False) -> AttentionProblem:
        (batch, heads, rows, d_k), (_, key_heads, keys, d_v) = self.shape, self.shape_v
        return AttentionProblem.of(
            kernel, d_k, d_v, rows, keys, heads=batch * heads, queries=heads // key_heads,
            dtype=DTYPE_NAMES[self.q.dtype], precision=self.precision if self.q.element_size() == 4 else "ieee",
            causal=self.right is not None, window=self.left is not None, features=self.features, described=described,
        )  # fmt: skip

    def flags(self, kernel: Pass, config: AttentionConfig) -> dict[str, Any]:
        """Compile-time arguments and launch options."""
        terms, d_k, d_v = self.terms, self.shape[3], self.shape_v[3]
        flags = {
            "NATURAL": self.natural,
            "SOFTCAP": self.softcap != 0.0,
            "LEFT": self.left is not None,
            "RIGHT": self.right is not None,
            "D_K": d_k,
            "D_V": d_v,
            "BLOCK_DK": head_block(d_k),
            "BLOCK_DV": head_block(d_v),
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "PRECISION": self.precision,
            "BLOCK": BLOCK,
        }
        if kernel == "forward":
            asked = terms.mask_mod is not None and not self.options.blocks
            added = terms.mask is not None or terms.slopes is not None or terms.score_mod is not None
            flags["PLAIN"] = not (asked or added or self.softcap)
        else:
            flags["EXACT"] = self.exact
        return flags | options(config.num_warps, config.num_stages)


def _terms(options: Options, unit: float) -> Terms:
    mask, slopes = options.attn_mask, options.alibi_slopes
    if mask is None and slopes is None and not options.score_mod and not options.mask_mod:
        return _NO_TERMS
    strides: Strides = (0, 0, 0, 0)
    shape = None
    if mask is not None:
        strides = _broadcast_strides(mask)
        if options.sequences:
            # A dimension of size 1 serves every length.
            shape = tuple(_LARGEST_BAND if size == 1 else size for size in mask.shape[2:])
        if mask.dtype == torch.bool:
            mask = mask.view(torch.uint8)
    if slopes is not None:
        slopes = (slopes.float() * unit).contiguous()
    return Terms(
        mask,
        (strides[0], strides[1], strides[3]),
        strides[2] or None,
        shape,  # type: ignore[arg-type]
        slopes,
        (0,) if slopes is None else (_broadcast_strides(slopes)[0],),
        _rule(options.score_mod, options.score_args),
        _rule(options.mask_mod, options.mask_args),
    )
