"""Triton kernels of the linear backward, and their launcher.

With dZ = dY ∘ a′(S), where S is the pre-activation or the output: dX = dZ W, dW = dZᵀ X, db = Σ_m dZ. The products
make dZ tile by tile from dY and S, in their prologue, where that is cheaper than to write dZ down once (the
configuration says so); the bias's gradient is summed in the pass that makes dZ for dW. Nothing is atomic: every sum
has one owner and one order.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from fusedops.linear.kernels_activations import device_functions
from fusedops.linear.kernels_common import config_for, tile_of, tiles
from fusedops.linear.reference import empty_weight_gradient
from fusedops.runtime.device import device_facts, device_guard
from fusedops.runtime.launch import ceil_div, next_power_of_2, options
from fusedops.runtime.precision import input_precision


@triton.jit
def grad_input_kernel(
    DY,  # (M, N), any strides
    S,  # (M, N), contiguous: what the derivative is a function of; None without an activation
    W,  # (N, K), any strides
    DX,  # (M, K), contiguous
    M,
    N,
    K,
    stride_dym,
    stride_dyn,
    stride_wn,
    stride_wk,
    TIMES_DERIVATIVE: tl.constexpr,  # a function of kernels_activations.py, or None
    EVEN_N: tl.constexpr,  # BLOCK_N divides N
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """dX = dZ W: each program owns one BLOCK_M × BLOCK_K tile of dX and makes the tiles of dZ that it needs."""
    block_m, block_k = tile_of(tl.program_id(0), M, K, BLOCK_M, BLOCK_K, GROUP)
    m = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = block_k.to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.arange(0, BLOCK_N).to(tl.int64)
    in_m = (m < M)[:, None]
    in_k = (k < K)[None, :]
    dy_at = DY + m[:, None] * stride_dym + n[None, :] * stride_dyn
    w_at = W + n[:, None] * stride_wn + k[None, :] * stride_wk
    dy_step = tl.full((), BLOCK_N, tl.int64) * stride_dyn
    w_step = tl.full((), BLOCK_N, tl.int64) * stride_wn
    if TIMES_DERIVATIVE is not None:
        s_at = S + m[:, None] * N + n[None, :]
    dx = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for first_n in range(0, N, BLOCK_N):
        in_mn = in_m
        in_nk = in_k
        if not EVEN_N:
            in_n = first_n + n < N
            in_mn = in_m & in_n[None, :]
            in_nk = in_k & in_n[:, None]
        dz = tl.load(dy_at, mask=in_mn, other=0.0)
        w = tl.load(w_at, mask=in_nk, other=0.0)
        if TIMES_DERIVATIVE is not None:
            s = tl.load(s_at, mask=in_mn, other=0.0).to(tl.float32)
            dz = TIMES_DERIVATIVE(dz.to(tl.float32), s).to(w.dtype)
            s_at += BLOCK_N
        dx = tl.dot(dz, w, dx, input_precision=PRECISION)
        dy_at += dy_step
        w_at += w_step
    tl.store(DX + m[:, None] * K + k[None, :], dx.to(DX.dtype.element_ty), mask=in_m & in_k)


@triton.jit
def grad_weight_kernel(
    DY,  # (M, N), any strides
    S,  # (M, N), contiguous, or None
    X,  # (M, K), any strides
    DW,  # (N, K), any strides
    DB,  # (N,) or None
    M,
    N,
    K,
    stride_dym,
    stride_dyn,
    stride_xm,
    stride_xk,
    stride_dwn,
    stride_dwk,
    TIMES_DERIVATIVE: tl.constexpr,  # a function of kernels_activations.py, or None
    EVEN_M: tl.constexpr,  # BLOCK_M divides M
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """dW = dZᵀ X: each program owns one BLOCK_N × BLOCK_K tile of dW; the first block column's also BLOCK_N of db."""
    block_n, block_k = tile_of(tl.program_id(0), N, K, BLOCK_N, BLOCK_K, GROUP)
    n = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = block_k.to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    m = tl.arange(0, BLOCK_M).to(tl.int64)
    in_n = (n < N)[:, None]
    in_k = (k < K)[None, :]
    dy_at = DY + n[:, None] * stride_dyn + m[None, :] * stride_dym
    x_at = X + m[:, None] * stride_xm + k[None, :] * stride_xk
    dy_step = tl.full((), BLOCK_M, tl.int64) * stride_dym
    x_step = tl.full((), BLOCK_M, tl.int64) * stride_xm
    if TIMES_DERIVATIVE is not None:
        s_at = S + n[:, None] + m[None, :] * N
        s_step = tl.full((), BLOCK_M, tl.int64) * N
    dw = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    db = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for first_m in range(0, M, BLOCK_M):
        in_nm = in_n
        in_mk = in_k
        if not EVEN_M:
            in_m = first_m + m < M
            in_nm = in_n & in_m[None, :]
            in_mk = in_k & in_m[:, None]
        dzt = tl.load(dy_at, mask=in_nm, other=0.0)
        x = tl.load(x_at, mask=in_mk, other=0.0)
        if TIMES_DERIVATIVE is not None:
            s = tl.load(s_at, mask=in_nm, other=0.0).to(tl.float32)
            dzt = TIMES_DERIVATIVE(dzt.to(tl.float32), s)
            s_at += s_step
        if DB is not None:  # noqa: SIM102 (the one is known when compiling, the other is not)
            if block_k == 0:
                db += tl.sum(dzt.to(tl.float32), axis=1)
        dw = tl.dot(dzt.to(x.dtype), x, dw, input_precision=PRECISION)
        dy_at += dy_step
        x_at += x_step
    tl.store(DW + n[:, None] * stride_dwn + k[None, :] * stride_dwk, dw.to(DW.dtype.element_ty), mask=in_n & in_k)
    if DB is not None:  # noqa: SIM102
        if block_k == 0:
            tl.store(DB + n, db.to(DB.dtype.element_ty), mask=n < N)


@triton.jit
def grad_preactivation_kernel(
    DY,  # (M, N), any strides
    S,  # (M, N), contiguous, or None
    DZ,  # (M, N), contiguous, or None
    DB,  # (splits, N) float32 partial sums, or None
    M,
    N,
    stride_dym,
    stride_dyn,
    splits,
    TIMES_DERIVATIVE: tl.constexpr,  # a function of kernels_activations.py, or None
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dZ = dY ∘ a′ and its column sums: program (block, split) owns BLOCK_N columns of every splits-th row block."""
    blocks_n = tl.cdiv(N, BLOCK_N)
    split = (tl.program_id(0) // blocks_n).to(tl.int64)
    n = (tl.program_id(0) % blocks_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < N
    step = tl.full((), BLOCK_M, tl.int64) * splits
    db = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for first_m in range(split * BLOCK_M, M, step):
        m = first_m + tl.arange(0, BLOCK_M)
        mask = (m < M)[:, None] & in_n[None, :]
        at = m[:, None] * N + n[None, :]
        dz = tl.load(DY + m[:, None] * stride_dym + n[None, :] * stride_dyn, mask=mask, other=0.0).to(tl.float32)
        if TIMES_DERIVATIVE is not None:
            s = tl.load(S + at, mask=mask, other=0.0).to(tl.float32)
            dz = TIMES_DERIVATIVE(dz, s)
        if DZ is not None:
            tl.store(DZ + at, dz.to(DZ.dtype.element_ty), mask=mask)
        if DB is not None:
            db += tl.sum(dz, axis=0)
    if DB is not None:
        tl.store(DB + split * N + n, db, mask=in_n)


def grad_preactivation(
    dy: torch.Tensor, s: torch.Tensor | None, activation: str | None, need_dz: bool, need_db: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dZ in the dtype of dY, db in float32) of matrices dY and S, which are not empty; None for what is not needed."""
    M, N = dy.shape
    facts = device_facts(dy.device)
    block_n = min(128, max(16, next_power_of_2(N)))
    block_m = max(16, 2048 // block_n)
    blocks_n = ceil_div(N, block_n)
    # Eight programs a multiprocessor hide the latency of device memory; each has at least one block of rows.
    splits = min(ceil_div(8 * facts.multiprocessor_count, blocks_n), ceil_div(M, block_m))
    dz = torch.empty((M, N), dtype=dy.dtype, device=dy.device) if need_dz else None
    parts = torch.empty((splits, N), dtype=torch.float32, device=dy.device) if need_db else None
    grad_preactivation_kernel[(blocks_n * splits,)](
        dy, s, dz, parts, M, N, *dy.stride(), splits,
        TIMES_DERIVATIVE=device_functions(activation)[1], BLOCK_M=block_m, BLOCK_N=block_n, **options(4),
    )  # fmt: skip
    return dz, None if parts is None else parts.sum(0)


def linear_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor | None,
    weight: torch.Tensor | None,
    saved: torch.Tensor | None,
    activation: str | None,
    needs: tuple[bool, bool, bool],
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    transposed: bool,
    allow_tf32: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of (input, weight, bias), each in its tensor's dtype; one that is not needed has shape (0,).

    Arguments as of the op ``linear_backward``.
    """
    need_dx, need_dw, need_db = needs
    lead, N = grad_output.shape[:-1], grad_output.shape[-1]
    M = math.prod(lead)
    K = weight.shape[1] if weight is not None else input.shape[-1] if input is not None else 0
    dx = grad_output.new_empty((*lead, K) if need_dx else (0,))
    dw = grad_output.new_empty((0,), dtype=weight_dtype)
    if need_dw:
        dw = empty_weight_gradient(grad_output, N, K, weight_dtype, transposed)
    db = grad_output.new_empty((N if need_db else 0,), dtype=bias_dtype)
    if M == 0 or N == 0:
        return dx.zero_(), dw.zero_(), db.zero_()

    dy = grad_output.reshape(M, N)
    s = None if saved is None else saved.reshape(M, N).contiguous()
    w = weight.to(dy.dtype) if weight is not None and need_dx and K > 0 else None
    x = input.reshape(M, K) if input is not None and need_dw and K > 0 else None
    with device_guard(dy):
        input_config = config_for("grad_input", (M, K, N), (dy, s, w), activation, allow_tf32)
        weight_config = config_for("grad_weight", (N, K, M), (dy, s, x), activation, allow_tf32)
        make_dz = (w is not None and not input_config.prologue) or (x is not None and not weight_config.prologue)
        make_db = need_db and x is None
        if make_db and w is not None and activation is not None:
            make_dz = True  # it is computed anyway
        if make_dz or make_db:
            dz, sums = grad_preactivation(dy, s, activation, make_dz, need_db)
            if sums is not None:
                db.copy_(sums)
                need_db = False
            if dz is not None:
                dy, s, activation = dz, None, None
                input_config = config_for("grad_input", (M, K, N), (dy, w), None, allow_tf32)
                weight_config = config_for("grad_weight", (N, K, M), (dy, x), None, allow_tf32)
        precision = input_precision(dy, allow_tf32)
        if w is not None:
            c = input_config
            grad_input_kernel[tiles(c, M, K)](
                dy, s, w, dx, M, N, K, *dy.stride(), *w.stride(),
                TIMES_DERIVATIVE=device_functions(activation)[1], EVEN_N=N % c.depth == 0, PRECISION=precision,
                BLOCK_M=c.rows, BLOCK_N=c.depth, BLOCK_K=c.cols, GROUP=c.group,
                **options(c.num_warps, c.num_stages),
            )  # fmt: skip
        if x is not None:
            c = weight_config
            grad_weight_kernel[tiles(c, N, K)](
                dy, s, x, dw, db if need_db else None, M, N, K, *dy.stride(), *x.stride(), *dw.stride(),
                TIMES_DERIVATIVE=device_functions(activation)[1], EVEN_M=M % c.depth == 0, PRECISION=precision,
                BLOCK_M=c.depth, BLOCK_N=c.rows, BLOCK_K=c.cols, GROUP=c.group,
                **options(c.num_warps, c.num_stages),
            )  # fmt: skip
    return dx, dw, db
