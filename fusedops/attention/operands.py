"""What every attention launcher hands to its kernel: tensors, strides, sizes and compile-time flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fusedops.attention.tuning import AttentionConfig, AttentionProblem, MaskKind, Pass, default_config
from fusedops.autotune.resolve import resolve
from fusedops.runtime.launch import options
from fusedops.runtime.precision import input_precision

LOG2E = 1.4426950408889634

Strides = tuple[int, ...]


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with stride 1 in its last dimension: itself where it has that, else a copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def strides_of(tensor: torch.Tensor) -> Strides:
    """Strides of batch, head and row."""
    return tensor.stride()[:3]


@dataclass(frozen=True, slots=True)
class Operands:
    """The inputs of one call of attention, as kernels take them.

    Attributes:
        q, k, v: (batch, heads, length, size) with unit stride in the last dimension.
        mask: (1 or batch, 1 or heads, 1 or seqlen_q, 1 or seqlen_k); a bool mask as uint8; without a mask, ``q``
            stands in, which is not read.
        mask_kind: what ``mask`` is.
        mask_strides: stride 0 where the mask is broadcast.
        shift: query i sees keys j ≤ i + shift, where ``causal``.
        scale: factor of q·k, in the unit that kernels_tiles describes.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor
    mask_kind: MaskKind
    mask_strides: Strides
    causal: bool
    shift: int
    scale: float
    precision: str

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: int,
        scale: float,
        allow_tf32: bool,
    ) -> Operands:
        kind: MaskKind = "none"
        mask_strides: Strides = (0, 0, 0, 0)
        if mask is not None:
            kind = "bool" if mask.dtype == torch.bool else "float"
            mask_strides = tuple(
                0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)
            )
            if kind == "bool":
                mask = mask.view(torch.uint8)
        return cls(
            unit_stride(q),
            unit_stride(k),
            unit_stride(v),
            q if mask is None else mask,
            kind,
            mask_strides,
            causal != 0,
            k.shape[2] - q.shape[2] if causal == 2 else 0,
            scale if kind == "float" else scale * LOG2E,
            input_precision(q, allow_tf32),
        )

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(query heads, query heads a key head, seqlen_q, seqlen_k, shift)."""
        heads = self.q.shape[1]
        return heads, heads // self.k.shape[1], self.q.shape[2], self.k.shape[2], self.shift

    @property
    def strides(self) -> tuple[Strides, Strides, Strides, Strides]:
        return strides_of(self.q), strides_of(self.k), strides_of(self.v), self.mask_strides

    def config(self, kernel: Pass) -> AttentionConfig:
        return resolve(self.problem(kernel), self.q.device, default_config)

    def problem(self, kernel: Pass) -> AttentionProblem:
        q, v = self.q, self.v
        return AttentionProblem.of(
            kernel, q.shape[3], v.shape[3], q.shape[2], v.shape[2], q.element_size(), self.causal, self.mask_kind
        )

    def flags(self, kernel: Pass, config: AttentionConfig) -> dict[str, Any]:
        """Compile-time arguments and launch options."""
        problem = self.problem(kernel)
        flags = {
            "MASK_KIND": self.mask_kind,
            "MASK_PER_QUERY": self.mask_strides[2] != 0,
            "CAUSAL": self.causal,
            "D_K": self.q.shape[3],
            "D_V": self.v.shape[3],
            "BLOCK_DK": problem.block_dk,
            "BLOCK_DV": problem.block_dv,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "PRECISION": self.precision,
        }
        if kernel != "forward":
            flags["EXACT"] = self.mask_kind == "float" or self.q.dtype == torch.float32
        return flags | options(config.num_warps, config.num_stages)
