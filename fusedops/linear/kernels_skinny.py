"""The linear forward of few rows, as in decoding: its Triton kernel, and its launcher.

The time is that of reading the weight once. So a program's tile is narrow, for enough programs to occupy the device,
and deep, for enough bytes to be on their way; where there are still too few, several share a tile's depth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.linear.kernels_activations import device_functions
from fusedops.linear.kernels_common import load_block, partial_sums, share_of, tiles
from fusedops.linear.kernels_epilogue import epilogue, finish
from fusedops.linear.reference import keeps_output
from fusedops.linear.tuning import LinearConfig
from fusedops.runtime.dropout import threshold_and_scale
from fusedops.runtime.launch import options
from fusedops.runtime.precision import dot_precision


@triton.jit
def linear_skinny_kernel(
    X,  # (M, K), any strides; M is at most BLOCK_M
    W,  # (N, K), any strides
    B,  # (N,) or None
    R,  # (M, N), any strides, or None: the residual
    SEED,  # (1,) int64, or None without dropout
    Y,  # (M, N), contiguous
    Z,  # (M, N), contiguous, or None: what the backward needs
    P,  # (SPLITS, M, N) float32 where a tile has several programs: their sums, and nothing else, are stored
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_rm,
    stride_rn,
    threshold,
    scale,
    ACTIVATION: tl.constexpr,  # a function of kernels_activations.py, or None
    KEEP_OUTPUT: tl.constexpr,  # Z takes the activation's output, else its input
    EVEN_N: tl.constexpr,  # BLOCK_N divides N
    EVEN_K: tl.constexpr,  # BLOCK_K divides K
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,  # 1: multiply and add; else for matrix instructions
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Y = dropout(a(X Wᵀ + b)) + r: each program owns BLOCK_N columns of Y, or a share of their product."""
    tile, split, first_k, end_k = share_of(tl.program_id(0), M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, SPLITS)
    m = tl.arange(0, BLOCK_M).to(tl.int64)
    first_n = tile.to(tl.int64) * BLOCK_N
    n = first_n + tl.arange(0, BLOCK_N)
    k = first_k + tl.arange(0, BLOCK_K).to(tl.int64)
    # A block has more rows than X: they are the last one again, and none of them is stored.
    x_at = X + tl.minimum(m, M - 1)[:, None] * stride_xm + k[None, :] * stride_xk
    x_step = tl.full((), BLOCK_K, tl.int64) * stride_xk
    w_step = tl.full((), BLOCK_K, tl.int64) * stride_wk
    if BLOCK_M == 1:
        # Sums of eight neighbours in k, which a thread reads at once.
        z = tl.zeros((BLOCK_N, BLOCK_K // 8), dtype=tl.float32)
        w_at = W + n[:, None] * stride_wn + k[None, :] * stride_wk
    else:
        z = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        w_at = W + k[:, None] * stride_wk + n[None, :] * stride_wn
    for at in tl.range(first_k, end_k, BLOCK_K, num_stages=STAGES):
        in_k = at + tl.arange(0, BLOCK_K) < end_k
        x = load_block(x_at, None, in_k[None, :], True, EVEN_K)
        if BLOCK_M == 1:
            w = load_block(w_at, (n < N)[:, None], in_k[None, :], EVEN_N, EVEN_K)
            z += tl.sum(tl.reshape(w.to(tl.float32) * x.to(tl.float32), (BLOCK_N, BLOCK_K // 8, 8)), axis=2)
        else:
            w = load_block(w_at, in_k[:, None], (n < N)[None, :], EVEN_K, EVEN_N)
            z = tl.dot(x, w, z, input_precision=PRECISION)
        x_at += x_step
        w_at += w_step
    if BLOCK_M == 1:
        z = tl.sum(z, axis=1)[None, :]
    if P is not None:
        sums_at = P + split.to(tl.int64) * M * N + m[:, None] * N + n[None, :]
        tl.store(sums_at, z, mask=(m < M)[:, None] & (n < N)[None, :])
    else:
        finish(
            z, B, R, SEED, Y, Z, m, first_n, M, N, stride_rm, stride_rn, threshold, scale, ACTIVATION, KEEP_OUTPUT
        )  # fmt: skip


def skinny_forward(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    r: torch.Tensor | None,
    seed: torch.Tensor | None,
    y: torch.Tensor | None,
    z: torch.Tensor | None,
    activation: str | None,
    dropout_p: float,
    precision: str,
    config: LinearConfig,
) -> None:
    """Write ``dropout(activation(x wᵀ + b)) + r`` to y, and what the backward needs to z.

    Args:
        x: (M, K), any strides, M at most ``config.rows``.
        w: (N, K), any strides.
        b: (N,), contiguous.
        r: (M, N), any strides.
        y, z: (M, N), contiguous, written; None: not wanted.
        config: as of :func:`fusedops.linear.tuning_skinny.skinny_config`.
    """
    (M, K), N = x.shape, w.shape[0]
    sums = partial_sums(config, M, N, x)
    linear_skinny_kernel[tiles(config, M, N)](
        x, w, b, r, seed, y, z, sums, M, N, K, *x.stride(), *w.stride(), *((0, 0) if r is None else r.stride()),
        *threshold_and_scale(dropout_p),
        ACTIVATION=device_functions(activation)[0], KEEP_OUTPUT=keeps_output(activation),
        EVEN_N=N % config.cols == 0, EVEN_K=K % config.depth == 0, PRECISION=dot_precision(x, precision),
        BLOCK_M=config.rows, BLOCK_N=config.cols, BLOCK_K=config.depth, SPLITS=config.splits,
        STAGES=config.num_stages, **options(config.num_warps, config.num_stages),
    )  # fmt: skip
    if sums is not None:
        epilogue(sums, b, r, seed, y, z, activation, dropout_p, keeps_output(activation))
