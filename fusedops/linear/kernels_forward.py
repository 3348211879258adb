"""The Triton kernel of the linear forward, and its launcher."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from fusedops.linear.activations import keeps_preactivation
from fusedops.linear.kernels_activations import device_functions
from fusedops.linear.kernels_common import config_for, tile_of, tiles
from fusedops.runtime.device import device_facts, device_guard
from fusedops.runtime.launch import options
from fusedops.runtime.precision import input_precision


@triton.jit
def halves(tile):
    """The left and the right half of a tile's columns."""
    return tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def finish(z, B, Y, Z, m, first_n, M, N, ACTIVATION: tl.constexpr):
    """Bias, activation and stores of Y's rows m and columns first_n, first_n + 1, …; z is their X Wᵀ."""
    n = first_n + tl.arange(0, z.shape[1])
    mask = (m < M)[:, None] & (n < N)[None, :]
    if B is not None:
        z += tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = m[:, None] * N + n[None, :]
    if Z is not None:
        tl.store(Z + at, z.to(Z.dtype.element_ty), mask=mask)
    if ACTIVATION is not None:
        z = ACTIVATION(z)
    tl.store(Y + at, z.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def linear_forward_kernel(
    X,  # (M, K), any strides
    W,  # (N, K), any strides
    B,  # (N,) or None
    Y,  # (M, N), contiguous
    Z,  # (M, N), contiguous, or None: where the pre-activation is kept
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    ACTIVATION: tl.constexpr,  # a function of kernels_activations.py, or None
    EVEN_K: tl.constexpr,  # BLOCK_K divides K
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    QUARTERS: tl.constexpr,  # finish the tile in four parts: a large one's activation wants registers
):
    """Y = a(X Wᵀ + b): each program owns one BLOCK_M × BLOCK_N tile of Y. Bias and activation in float32."""
    block_m, block_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    m = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_n = block_n.to(tl.int64) * BLOCK_N
    n = first_n + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    in_m = (m < M)[:, None]
    in_n = (n < N)[None, :]
    x_at = X + m[:, None] * stride_xm + k[None, :] * stride_xk
    w_at = W + k[:, None] * stride_wk + n[None, :] * stride_wn
    x_step = tl.full((), BLOCK_K, tl.int64) * stride_xk
    w_step = tl.full((), BLOCK_K, tl.int64) * stride_wk
    z = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first_k in range(0, K, BLOCK_K):
        in_mk = in_m
        in_kn = in_n
        if not EVEN_K:
            in_k = first_k + k < K
            in_mk = in_m & in_k[None, :]
            in_kn = in_n & in_k[:, None]
        x = tl.load(x_at, mask=in_mk, other=0.0)
        w = tl.load(w_at, mask=in_kn, other=0.0)
        z = tl.dot(x, w, z, input_precision=PRECISION)
        x_at += x_step
        w_at += w_step
    if QUARTERS:
        QUARTER: tl.constexpr = BLOCK_N // 4
        left, right = halves(z)
        z0, z1 = halves(left)
        z2, z3 = halves(right)
        finish(z0, B, Y, Z, m, first_n, M, N, ACTIVATION)
        finish(z1, B, Y, Z, m, first_n + QUARTER, M, N, ACTIVATION)
        finish(z2, B, Y, Z, m, first_n + 2 * QUARTER, M, N, ACTIVATION)
        finish(z3, B, Y, Z, m, first_n + 3 * QUARTER, M, N, ACTIVATION)
    else:
        finish(z, B, Y, Z, m, first_n, M, N, ACTIVATION)


def linear_forward(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    save: bool,
    allow_tf32: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate and launch; arguments and results as :func:`fusedops.linear.reference.linear`."""
    N, K = weight.shape
    lead = input.shape[:-1]
    M = math.prod(lead)
    output = input.new_empty((*lead, N))
    save = save and keeps_preactivation(activation)
    saved = input.new_empty((*lead, N) if save else (0,))
    if M == 0 or N == 0:
        return output, saved
    x = input.reshape(M, K)
    w = weight.to(input.dtype)
    b = None if bias is None else bias.contiguous()
    config = config_for("forward", (M, N, K), (x, w), activation, allow_tf32)
    threads = config.num_warps * device_facts(x.device).warp_size
    with device_guard(x):
        linear_forward_kernel[tiles(config, M, N)](
            x, w, b, output, saved if save else None, M, N, K, *x.stride(), *w.stride(),
            ACTIVATION=device_functions(activation)[0], EVEN_K=K % config.depth == 0,
            PRECISION=input_precision(x, allow_tf32),
            BLOCK_M=config.rows, BLOCK_N=config.cols, BLOCK_K=config.depth, GROUP=config.group,
            QUARTERS=config.rows * config.cols >= 128 * threads,
            **options(config.num_warps, config.num_stages),
        )  # fmt: skip
    return output, saved
