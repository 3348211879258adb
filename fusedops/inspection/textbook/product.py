"""A matrix product as textbooks write it in Triton: what the linear family's kernels are compared with.

A tile of the result a program, pointers that are moved along, neighbouring programs in groups, the bias and the GELU
behind the loop. It takes sizes for which int32 offsets do.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl


@triton.jit
def textbook_kernel(
    A,  # (M, K), any strides
    B,  # (K, N), any strides
    BIAS,  # (N,) or None
    C,  # (M, N), contiguous
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """C = A B, or gelu(A B + bias): each program owns one BLOCK_M × BLOCK_N tile of C."""
    program = tl.program_id(0)
    blocks_n = tl.cdiv(N, BLOCK_N)
    group = program // (GROUP * blocks_n)
    height = min(tl.cdiv(M, BLOCK_M) - group * GROUP, GROUP)
    block_m = group * GROUP + (program % (GROUP * blocks_n)) % height
    block_n = (program % (GROUP * blocks_n)) // height
    # Rows and columns past the end begin again at the first, so that only the depth wants a mask.
    m = (block_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    n = (block_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    k = tl.arange(0, BLOCK_K)
    a_at = A + m[:, None] * stride_am + k[None, :] * stride_ak
    b_at = B + k[:, None] * stride_bk + n[None, :] * stride_bn
    c = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        left = K - step * BLOCK_K
        a = tl.load(a_at, mask=k[None, :] < left, other=0.0)
        b = tl.load(b_at, mask=k[:, None] < left, other=0.0)
        c = tl.dot(a, b, c)
        a_at += BLOCK_K * stride_ak
        b_at += BLOCK_K * stride_bk
    m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if GELU:
        c += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        c = 0.5 * c * (1 + tl.erf(c * 0.7071067811865476))
    mask = (m < M)[:, None] & (n < N)[None, :]
    tl.store(C + m[:, None] * N + n[None, :], c.to(C.dtype.element_ty), mask=mask)


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    tile: tuple[int, int, int],
    options: Mapping[str, int | bool],
) -> torch.Tensor:
    """A B, and gelu(A B + bias) with a bias.

    Args:
        a: (M, K), any strides.
        b: (K, N), any strides.
        tile: (rows, columns, depth).
        options: of the launch: warps and stages.
    """
    (M, K), N = a.shape, b.shape[1]
    c = a.new_empty((M, N))
    rows, cols, depth = tile
    grid = (triton.cdiv(M, rows) * triton.cdiv(N, cols),)
    textbook_kernel[grid](
        a, b, bias, c, M, N, K, *a.stride(), *b.stride(), GELU=bias is not None,
        BLOCK_M=rows, BLOCK_N=cols, BLOCK_K=depth, GROUP=8, **options,
    )  # fmt: skip
    return c
