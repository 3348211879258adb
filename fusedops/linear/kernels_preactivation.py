"""The elementwise pass of the backward: the gradient of the pre-activation and its column sums, in one read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.kernels.dropout import keep_scale
from fusedops.linear.kernels_activations import device_functions
from fusedops.runtime.device import device_facts
from fusedops.runtime.dropout import threshold_and_scale
from fusedops.runtime.launch import ceil_div, next_power_of_2, options


@triton.jit
def grad_preactivation_kernel(
    DY,  # (M, N), any strides
    S,  # (M, N), contiguous, or None
    DZ,  # (M, N), contiguous, or None
    DB,  # (splits, N) float32 partial sums, or None
    SEED,  # (1,) int64, or None without dropout
    M,
    N,
    stride_dym,
    stride_dyn,
    splits,
    threshold,
    scale,
    TIMES_DERIVATIVE: tl.constexpr,  # a function of kernels_activations.py, or None
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dZ = dropout(dY) ∘ a′ and its column sums.

    Program (block, split) owns BLOCK_N columns of every splits-th block of rows.
    """
    blocks_n = tl.cdiv(N, BLOCK_N)
    split = (tl.program_id(0) // blocks_n).to(tl.int64)
    first_n = (tl.program_id(0) % blocks_n).to(tl.int64) * BLOCK_N
    n = first_n + tl.arange(0, BLOCK_N)
    in_n = n < N
    step = tl.full((), BLOCK_M, tl.int64) * splits
    db = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for first_m in range(split * BLOCK_M, M, step):
        m = first_m + tl.arange(0, BLOCK_M)
        mask = (m < M)[:, None] & in_n[None, :]
        at = m[:, None] * N + n[None, :]
        dz = tl.load(DY + m[:, None] * stride_dym + n[None, :] * stride_dyn, mask=mask, other=0.0).to(tl.float32)
        if SEED is not None:
            dz *= keep_scale(SEED, m, first_n, threshold, scale, BLOCK_N)
        if TIMES_DERIVATIVE is not None:
            s = tl.load(S + at, mask=mask, other=0.0).to(tl.float32)
            # A derivative may be infinite where nothing was loaded.
            dz = tl.where(mask, TIMES_DERIVATIVE(dz, s), 0.0)
        if DZ is not None:
            tl.store(DZ + at, dz.to(DZ.dtype.element_ty), mask=mask)
        if DB is not None:
            db += tl.sum(dz, axis=0)
    if DB is not None:
        tl.store(DB + split * N + n, db, mask=in_n)


def grad_preactivation(
    dy: torch.Tensor,
    s: torch.Tensor | None,
    activation: str | None,
    need_dz: bool,
    need_db: bool,
    seed: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dZ, db in float32) of matrices dY and S, which are not empty; None for what is not needed.

    Args:
        dy: (M, N), any strides.
        s: (M, N), contiguous, what the derivative of ``activation`` is a function of; None without one.
        seed, dropout_p: of the dropout that followed the activation.
        dtype: of dZ; None: that of dY.
    """
    M, N = dy.shape
    facts = device_facts(dy.device)
    block_n = min(128, max(16, next_power_of_2(N)))
    block_m = max(8, 1024 // block_n)  # eight elements a thread: more spill
    blocks_n = ceil_div(N, block_n)
    # Eight programs a multiprocessor hide the latency of device memory; each has at least one block of rows.
    splits = min(ceil_div(8 * facts.multiprocessor_count, blocks_n), ceil_div(M, block_m))
    dz = torch.empty((M, N), dtype=dtype or dy.dtype, device=dy.device) if need_dz else None
    parts = torch.empty((splits, N), dtype=torch.float32, device=dy.device) if need_db else None
    grad_preactivation_kernel[(blocks_n * splits,)](
        dy, s, dz, parts, seed, M, N, *dy.stride(), splits, *threshold_and_scale(dropout_p),
        TIMES_DERIVATIVE=device_functions(activation)[1], BLOCK_M=block_m, BLOCK_N=block_n, **options(4),
    )  # fmt: skip
    return dz, None if parts is None else parts.sum(0)
