"""All gradients of attention in one launch: two kernels that are both too small for the device share it."""

from __future__ import annotations

import triton
import triton.language as tl

from fusedops.attention.kernels_backward_kv import gradient_of_keys
from fusedops.attention.kernels_backward_q import gradient_of_queries


@triton.jit(
    do_not_specialize=[
        "heads", "count", "seqlen_q", "seqlen_k", "align", "left", "right", "section_q", "section_k", "programs_k"
    ]
)  # fmt: skip
def backward_joint_kernel(
    Q, K, V, DO, TOP, WEIGHT, DELTA, DQ, DK, DV, DSLOPES,
    q_strides, k_strides, v_strides, do_strides, dq_strides, dk_strides, dv_strides,
    terms, dropout, starts_q, starts_k, key_lists, query_lists,
    heads, group, count, seqlen_q, seqlen_k, align, left, right, section_q, section_k, programs_k,
    scale, softcap, plain_scale,
    GROUPED: tl.constexpr, NATURAL: tl.constexpr, EXACT: tl.constexpr, SOFTCAP: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dk and dv by the first ``programs_k`` programs, dq and the slopes' parts by the others."""
    program = tl.program_id(0)
    if program < programs_k:
        gradient_of_keys(
            program, programs_k, Q, K, V, DO, TOP, WEIGHT, DELTA, DK, DV,
            q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides,
            terms, dropout, starts_q, starts_k, query_lists,
            heads, group, count, seqlen_q, seqlen_k, align, left, right, section_k, scale, softcap, plain_scale,
            GROUPED, NATURAL, EXACT, SOFTCAP, LEFT, RIGHT,
            D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, BLOCK, False,
        )  # fmt: skip
    else:
        gradient_of_queries(
            program - programs_k, tl.num_programs(0) - programs_k, Q, K, V, DO, TOP, WEIGHT, DELTA, DQ, DSLOPES,
            q_strides, k_strides, v_strides, do_strides, dq_strides,
            terms, dropout, starts_q, starts_k, key_lists,
            heads, group, count, seqlen_q, seqlen_k, align, left, right, section_q, scale, softcap, plain_scale,
            NATURAL, EXACT, SOFTCAP, LEFT, RIGHT,
            D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, BLOCK, False,
        )  # fmt: skip
