"""The linear forward: its Triton kernel, and the launcher that chooses between this, others and torch's own product."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from fusedops.linear.kernels_activations import device_functions
from fusedops.linear.kernels_common import config_for, multiply, partial_sums, share_of, tile_of, tiles
from fusedops.linear.kernels_epilogue import epilogue, finish, quarters
from fusedops.linear.kernels_persistent import persistent_forward, persistent_reason
from fusedops.linear.kernels_skinny import skinny_forward
from fusedops.linear.reference import keeps_output, no_autocast, saves
from fusedops.linear.tuning import LinearConfig
from fusedops.runtime.device import device_facts, device_guard
from fusedops.runtime.dropout import threshold_and_scale
from fusedops.runtime.launch import as_dtype, as_matrix, options
from fusedops.runtime.precision import dot_precision


@triton.jit
def linear_forward_kernel(
    X,  # (M, K), any strides
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
    X_ROW_MAJOR: tl.constexpr,  # the elements of a row are neighbours in memory
    W_ROW_MAJOR: tl.constexpr,
    EVEN_K: tl.constexpr,  # BLOCK_K divides K
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    QUARTERS: tl.constexpr,  # finish the tile in four parts: what follows the product wants registers
    SPLITS: tl.constexpr,
):
    """Y = dropout(a(X Wᵀ + b)) + r: each program owns a BLOCK_M × BLOCK_N tile of Y, or a share of its product."""
    tile, split, first_k, end_k = share_of(tl.program_id(0), M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, SPLITS)
    block_m, block_n = tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
    m = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_n = block_n.to(tl.int64) * BLOCK_N
    n = first_n + tl.arange(0, BLOCK_N)
    z = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    z = multiply(
        z, X, W, m, n, M, N, first_k, end_k, stride_xm, stride_xk, stride_wk, stride_wn,
        X_ROW_MAJOR, W_ROW_MAJOR, EVEN_K, PRECISION, BLOCK_K,
    )  # fmt: skip
    if P is not None:
        at = P + split.to(tl.int64) * M * N + m[:, None] * N + n[None, :]
        tl.store(at, z, mask=(m < M)[:, None] & (n < N)[None, :])
    else:
        if QUARTERS:
            parts = quarters(z)
        else:
            parts = (z,)
        for i in tl.static_range(4 if QUARTERS else 1):
            finish(
                parts[i], B, R, SEED, Y, Z, m, first_n + i * (BLOCK_N // 4), M, N, stride_rm, stride_rn,
                threshold, scale, ACTIVATION, KEEP_OUTPUT,
            )  # fmt: skip


def linear_forward(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    seed: torch.Tensor | None,
    activation: str | None,
    dropout_p: float,
    out_dtype: torch.dtype,
    save: bool,
    recompute: bool,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate and launch; arguments and results as :func:`fusedops.linear.reference.linear`."""
    N, K = weight.shape
    lead = input.shape[:-1]
    M = math.prod(lead)
    own = saves(activation, residual, seed, input.dtype, out_dtype)
    save = save and own
    again = save and recompute
    output = input.new_empty((0,) if again else (*lead, N), dtype=out_dtype)
    saved = input.new_empty((*lead, N) if save else (0,))
    if M == 0 or N == 0:
        return output, saved
    x = as_matrix(input, M, K)
    w = as_dtype(weight, input.dtype)
    b = None if bias is None else bias.contiguous()
    r = None if residual is None or again else as_matrix(residual, M, N)
    y = None if again else as_matrix(output, M, N)
    z = as_matrix(saved, M, N) if save else None
    config = config_for(
        "forward", (M, N, K), (x, w), activation, precision, out_dtype,
        # The same for what keeps, what will recompute and what recomputes: the same products, to the bit.
        keeps=own and (save or recompute), residual=residual is not None, dropout=seed is not None,
        bias=b is not None, descriptors=persistent_reason(x, w, out_dtype) is None,
    )  # fmt: skip
    if again:
        seed = None
    with device_guard(x):
        _LAUNCHERS[config.kernel](x, w, b, r, seed, y, z, activation, dropout_p, precision, config)
    return output, saved


def _tiled(
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
    (M, K), N = x.shape, w.shape[0]
    threads = config.num_warps * device_facts(x.device).warp_size
    at_once = 128 if r is None and seed is None else 64  # sums a thread
    sums = partial_sums(config, M, N, x)
    linear_forward_kernel[tiles(config, M, N)](
        x, w, b, r, seed, y, z, sums, M, N, K, *x.stride(), *w.stride(), *((0, 0) if r is None else r.stride()),
        *threshold_and_scale(dropout_p),
        ACTIVATION=device_functions(activation)[0], KEEP_OUTPUT=keeps_output(activation),
        X_ROW_MAJOR=x.stride(1) == 1, W_ROW_MAJOR=w.stride(1) == 1,
        EVEN_K=K % config.depth == 0, PRECISION=dot_precision(x, precision),
        BLOCK_M=config.rows, BLOCK_N=config.cols, BLOCK_K=config.depth, GROUP=config.group,
        QUARTERS=config.rows * config.cols >= at_once * threads, SPLITS=config.splits,
        **options(config.num_warps, config.num_stages),
    )  # fmt: skip
    if sums is not None:
        epilogue(sums, b, r, seed, y, z, activation, dropout_p, keeps_output(activation))


def _torch_product(
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
    """torch's product, with the bias, and the activation where torch's has it; the rest in a pass over the result."""
    if b is not None:
        b = b.to(x.dtype)
    with torch.no_grad(), no_autocast(x):  # autograd refuses ``out``
        plain = y is not None and x.shape[1] > 0 and seed is None and r is None and z is None and y.dtype == x.dtype
        if plain and b is not None and activation in _torch_activations(x):
            torch._addmm_activation(b, x, w.t(), use_gelu=activation == "gelu_tanh", out=y)
            return
        # What the backward needs is this very result, if it is the activation's input.
        into: Any = y if plain and activation is None else z if not keeps_output(activation) else None
        if into is None:
            into = x.new_empty((x.shape[0], w.shape[0]))
        if b is None:
            torch.mm(x, w.t(), out=into)
        else:
            torch.addmm(b, x, w.t(), out=into)
    if into is not y and (y is not None or into is not z):
        kept = z if into is not z else None
        epilogue(into[None], None, r, seed, y, kept, activation, dropout_p, keeps_output(activation))


def _torch_activations(x: torch.Tensor) -> tuple[str, ...]:
    """What ``_addmm_activation`` can end with; on a CPU its GELU is the exact one."""
    return ("relu", "gelu_tanh") if x.is_cuda else ("relu",)


_LAUNCHERS = {"tiled": _tiled, "skinny": skinny_forward, "persistent": persistent_forward, "torch": _torch_product}
