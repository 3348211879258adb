"""Launch configurations of the attention kernels: the problem, the space that may be searched, and the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fusedops.runtime.device import DeviceFacts
from fusedops.runtime.launch import next_power_of_2

Pass = Literal["forward", "backward_kv", "backward_q", "backward_mask"]
MaskKind = Literal["none", "bool", "float"]


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """What an attention kernel's configuration depends on. Lengths are run-time values: only short ones count here.

    Attributes:
        kernel: which of the four kernels.
        block_dk, block_dv: head sizes of queries and values as the kernels hold them: powers of two, at least 16.
        rows, keys: lengths of queries and keys as powers of two from 16 to 128; 128 stands for all longer ones.
        itemsize: bytes of an element of q, k and v.
        causal: keys beyond the diagonal are left out.
        mask: what attn_mask is.
    """

    kernel: Pass
    block_dk: int
    block_dv: int
    rows: int
    keys: int
    itemsize: int
    causal: bool
    mask: MaskKind

    @classmethod
    def of(
        cls, kernel: Pass, d: int, dv: int, seqlen_q: int, seqlen_k: int, itemsize: int, causal: bool, mask: MaskKind
    ) -> AttentionProblem:
        def block(size: int) -> int:
            return max(16, next_power_of_2(size))

        return cls(
            kernel, block(d), block(dv), min(block(seqlen_q), 128), min(block(seqlen_k), 128), itemsize, causal, mask
        )


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Attributes:
    block_m: queries a tile.
    block_n: keys a tile.
    num_warps: warps a program.
    num_stages: tiles in flight in the software pipeline.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def default_config(problem: AttentionProblem, facts: DeviceFacts) -> AttentionConfig:
    return AttentionConfig(64, 64, 4, 2)
