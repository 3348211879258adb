"""Triton kernels of the linear backward, and their launcher.

With dZ = dropout(dY) ∘ a′(S), where S is the activation's input or its output: dX = dZ W, dW = dZᵀ X, db = Σ_m dZ. The
products make dZ tile by tile from dY and S, in their prologue, where that is cheaper than to write dZ down once (the
configuration says so); the bias's gradient is summed in the pass that makes dZ for dW. Nothing is atomic: every sum
has one owner and one order.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from fusedops.linear.kernels_activations import device_functions
from fusedops.linear.kernels_common import config_for, multiply, partial_sums, share_of, tile_of, tiles
from fusedops.linear.kernels_epilogue import quarters, sum_splits
from fusedops.linear.kernels_preactivation import grad_preactivation
from fusedops.linear.reference import empty_weight_gradient, no_autocast
from fusedops.linear.tuning import LinearConfig
from fusedops.runtime.device import device_guard
from fusedops.runtime.launch import options
from fusedops.runtime.precision import dot_precision

Pair = tuple[torch.Tensor, torch.Tensor]


@triton.jit
def grad_input_kernel(
    DY,  # (M, N), any strides
    S,  # (M, N), contiguous: what the derivative is a function of; None without an activation
    W,  # (N, K), any strides
    DY2,  # (M, N), any strides, or None: a second product, DY2 W2, is added
    W2,
    DX,  # (M, K), contiguous
    P,  # (SPLITS, M, K) float32 where a tile has several programs: their sums
    M,
    N,
    K,
    stride_dym,
    stride_dyn,
    stride_wn,
    stride_wk,
    stride_dy2m,
    stride_dy2n,
    stride_w2n,
    stride_w2k,
    TIMES_DERIVATIVE: tl.constexpr,  # a function of kernels_activations.py, or None
    DY_ROW_MAJOR: tl.constexpr,  # the elements of a row of DY, and of DY2, are neighbours in memory
    EVEN_N: tl.constexpr,  # BLOCK_N divides N
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """dX = dZ W: each program owns a BLOCK_M × BLOCK_K tile of dX, or a share of it, and makes the dZ that it needs."""
    tile, split, begin_n, end_n = share_of(tl.program_id(0), M, K, N, BLOCK_M, BLOCK_K, BLOCK_N, SPLITS)
    block_m, block_k = tile_of(tile, M, K, BLOCK_M, BLOCK_K, GROUP)
    m = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = block_k.to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    in_m = (m < M)[:, None]
    in_k = (k < K)[None, :]
    dx = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    if TIMES_DERIVATIVE is None:
        dx = multiply(
            dx, DY, W, m, k, M, K, begin_n, end_n, stride_dym, stride_dyn, stride_wn, stride_wk,
            DY_ROW_MAJOR, False, EVEN_N, PRECISION, BLOCK_N,
        )  # fmt: skip
        if DY2 is not None:
            dx = multiply(
                dx, DY2, W2, m, k, M, K, begin_n, end_n, stride_dy2m, stride_dy2n, stride_w2n, stride_w2k,
                DY_ROW_MAJOR, False, EVEN_N, PRECISION, BLOCK_N,
            )  # fmt: skip
    else:
        n = begin_n + tl.arange(0, BLOCK_N).to(tl.int64)
        dy_at = DY + m[:, None] * stride_dym + n[None, :] * stride_dyn
        s_at = S + m[:, None] * N + n[None, :]
        w_at = W + n[:, None] * stride_wn + k[None, :] * stride_wk
        dy_step = tl.full((), BLOCK_N, tl.int64) * stride_dyn
        w_step = tl.full((), BLOCK_N, tl.int64) * stride_wn
        for first_n in range(begin_n, end_n, BLOCK_N):
            in_mn = in_m
            in_nk = in_k
            if not EVEN_N:
                in_n = first_n + tl.arange(0, BLOCK_N) < end_n
                in_mn = in_m & in_n[None, :]
                in_nk = in_k & in_n[:, None]
            dy = tl.load(dy_at, mask=in_mn, other=0.0).to(tl.float32)
            w = tl.load(w_at, mask=in_nk, other=0.0)
            s = tl.load(s_at, mask=in_mn, other=0.0).to(tl.float32)
            dz = TIMES_DERIVATIVE(dy, s)
            if not EVEN_N:
                dz = tl.where(in_n[None, :], dz, 0.0)  # a derivative may be infinite where nothing was loaded
            dx = tl.dot(dz.to(w.dtype), w, dx, input_precision=PRECISION)
            dy_at += dy_step
            s_at += BLOCK_N
            w_at += w_step
    at = m[:, None] * K + k[None, :]
    if P is not None:
        tl.store(P + split.to(tl.int64) * M * K + at, dx, mask=in_m & in_k)
    else:
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=in_m & in_k)


@triton.jit
def weight_product(
    DY,
    S,
    X,
    n,  # int64 indices of the tile's rows and columns
    k,
    M,
    N,
    K,
    begin_m,
    end_m,
    stride_dym,
    stride_dyn,
    stride_xm,
    stride_xk,
    SUM: tl.constexpr,
    TIMES_DERIVATIVE: tl.constexpr,
    EVEN_M: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dZᵀ[n, begin_m:end_m] X[begin_m:end_m, k] and, with SUM, the sums of that dZ over its rows."""
    in_n = (n < N)[:, None]
    in_k = (k < K)[None, :]
    m = begin_m + tl.arange(0, BLOCK_M).to(tl.int64)
    dy_at = DY + n[:, None] * stride_dyn + m[None, :] * stride_dym
    x_at = X + m[:, None] * stride_xm + k[None, :] * stride_xk
    dy_step = tl.full((), BLOCK_M, tl.int64) * stride_dym
    x_step = tl.full((), BLOCK_M, tl.int64) * stride_xm
    if TIMES_DERIVATIVE is not None:
        s_at = S + n[:, None] + m[None, :] * N
        s_step = tl.full((), BLOCK_M, tl.int64) * N
    dw = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    db = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for first_m in range(begin_m, end_m, BLOCK_M):
        in_nm = in_n
        in_mk = in_k
        if not EVEN_M:
            in_m = first_m + tl.arange(0, BLOCK_M) < end_m
            in_nm = in_n & in_m[None, :]
            in_mk = in_k & in_m[:, None]
        dzt = tl.load(dy_at, mask=in_nm, other=0.0)
        x = tl.load(x_at, mask=in_mk, other=0.0)
        if TIMES_DERIVATIVE is not None:
            s = tl.load(s_at, mask=in_nm, other=0.0).to(tl.float32)
            dzt = TIMES_DERIVATIVE(dzt.to(tl.float32), s)
            if not EVEN_M:
                dzt = tl.where(in_m[None, :], dzt, 0.0)
            s_at += s_step
        if SUM:
            db += tl.sum(dzt.to(tl.float32), axis=1)
        dw = tl.dot(dzt.to(x.dtype), x, dw, input_precision=PRECISION)
        dy_at += dy_step
        x_at += x_step
    return dw, db


@triton.jit
def grad_weight_kernel(
    DY,  # (M, N), any strides
    S,  # (M, N), contiguous, or None
    X,  # (M, K), any strides
    DW,  # (N, K), any strides
    DB,  # (SPLITS, N) or None
    P,  # (SPLITS, N, K) float32 where a tile has several programs: their sums
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
    ACCUMULATE: tl.constexpr,  # add to what DW holds
    EVEN_M: tl.constexpr,  # BLOCK_M divides M
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """dW = dZᵀ X: each program owns a BLOCK_N × BLOCK_K tile of dW, or a share of it; the first block column's also
    BLOCK_N of db."""
    tile, split, begin_m, end_m = share_of(tl.program_id(0), N, K, M, BLOCK_N, BLOCK_K, BLOCK_M, SPLITS)
    block_n, block_k = tile_of(tile, N, K, BLOCK_N, BLOCK_K, GROUP)
    n = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = block_k.to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    in_n = (n < N)[:, None]
    in_k = (k < K)[None, :]
    # Each its own loop: a branch inside would cost the programs that have no db to sum.
    if DB is not None:
        if block_k == 0:
            dw, db = weight_product(
                DY, S, X, n, k, M, N, K, begin_m, end_m, stride_dym, stride_dyn, stride_xm, stride_xk,
                True, TIMES_DERIVATIVE, EVEN_M, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            db_at = DB + n
            if SPLITS > 1:
                db_at += split.to(tl.int64) * N
            tl.store(db_at, db.to(DB.dtype.element_ty), mask=n < N)
        else:
            dw, _ = weight_product(
                DY, S, X, n, k, M, N, K, begin_m, end_m, stride_dym, stride_dyn, stride_xm, stride_xk,
                False, TIMES_DERIVATIVE, EVEN_M, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    else:
        dw, _ = weight_product(
            DY, S, X, n, k, M, N, K, begin_m, end_m, stride_dym, stride_dyn, stride_xm, stride_xk,
            False, TIMES_DERIVATIVE, EVEN_M, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if P is not None:
        tl.store(P + split.to(tl.int64) * N * K + n[:, None] * K + k[None, :], dw, mask=in_n & in_k)
    elif ACCUMULATE:
        # In parts: what is added to wants registers too.
        parts = quarters(dw)
        for i in tl.static_range(4):
            part = block_k.to(tl.int64) * BLOCK_K + i * (BLOCK_K // 4) + tl.arange(0, BLOCK_K // 4)
            mask = in_n & (part < K)[None, :]
            dw_at = DW + n[:, None] * stride_dwn + part[None, :] * stride_dwk
            total = parts[i] + tl.load(dw_at, mask=mask, other=0.0).to(tl.float32)
            tl.store(dw_at, total.to(DW.dtype.element_ty), mask=mask)
    else:
        dw_at = DW + n[:, None] * stride_dwn + k[None, :] * stride_dwk
        tl.store(dw_at, dw.to(DW.dtype.element_ty), mask=in_n & in_k)


def grad_input_product(
    pairs: list[Pair],
    dx: torch.Tensor,
    precision: str,
    s: torch.Tensor | None = None,
    activation: str | None = None,
    config: LinearConfig | None = None,
) -> None:
    """Write dX = Σ dZ W over one or two pairs (dZ, W), rounded once where a kernel of ours computes it.

    Args:
        pairs: each dZ (M, N) and W (N, K) of any strides, one dtype; with ``activation``, one pair (dY, W).
        dx: (M, K), contiguous, written.
        s: (M, N), contiguous, what the derivative of ``activation`` is a function of.
        config: what to launch; None: ask for it.
    """
    dy, w = pairs[0]
    (M, N), K = dy.shape, w.shape[1]
    config = config or _input_config(pairs, dx, activation, precision)
    if config.kernel == "torch":
        with torch.no_grad(), no_autocast(dy):  # autograd refuses ``out``
            torch.mm(dy, w, out=dx)
            for pair in pairs[1:]:
                torch.addmm(dx, *pair, out=dx)
        return
    dy2, w2 = pairs[1] if len(pairs) > 1 else (None, None)
    sums = partial_sums(config, M, K, dy)
    grad_input_kernel[tiles(config, M, K)](
        dy, s, w, dy2, w2, dx, sums, M, N, K, *dy.stride(), *w.stride(),
        *((0, 0) if dy2 is None else dy2.stride()), *((0, 0) if w2 is None else w2.stride()),
        TIMES_DERIVATIVE=device_functions(activation)[1],
        DY_ROW_MAJOR=all(dz.stride(1) == 1 for dz, _ in pairs), EVEN_N=N % config.depth == 0,
        PRECISION=dot_precision(dy, precision),
        BLOCK_M=config.rows, BLOCK_N=config.depth, BLOCK_K=config.cols, GROUP=config.group, SPLITS=config.splits,
        **options(config.num_warps, config.num_stages),
    )  # fmt: skip
    if sums is not None:
        sum_splits(sums, dx)


def grad_weight_product(
    dy: torch.Tensor,
    x: torch.Tensor,
    dw: torch.Tensor,
    precision: str,
    s: torch.Tensor | None = None,
    activation: str | None = None,
    db: torch.Tensor | None = None,
    accumulate: bool = False,
    config: LinearConfig | None = None,
) -> None:
    """Write dW = dZᵀ X, or add it to what ``dw`` holds, and db = Σ dZ where it is given.

    Args:
        dy: (M, N), any strides: dZ itself without an activation.
        x: (M, K), any strides.
        dw: (N, K), any strides, written.
        s: (M, N), contiguous, what the derivative of ``activation`` is a function of.
        db: (N,), contiguous, written.
        accumulate: add to ``dw``.
        config: what to launch; None: ask for it.
    """
    (M, N), K = dy.shape, x.shape[1]
    config = config or _weight_config(dy, s, x, dw, activation, precision, db is not None, accumulate)
    if config.kernel == "torch":
        with torch.no_grad(), no_autocast(dy):  # autograd refuses ``out``
            if accumulate:
                torch.addmm(dw, dy.t(), x, out=dw)
            elif dw.stride(1) == 1:
                torch.mm(dy.t(), x, out=dw)
            else:
                torch.mm(x.t(), dy, out=dw.t())
            if db is not None:
                _, column_sums = grad_preactivation(dy, None, None, False, True)
                assert column_sums is not None
                db.copy_(column_sums)
        return
    sums = partial_sums(config, N, K, dy)
    into = db
    if db is not None and config.splits > 1:
        into = torch.empty((config.splits, N), dtype=torch.float32, device=dy.device)
    grad_weight_kernel[tiles(config, N, K)](
        dy, s, x, dw, into, sums, M, N, K, *dy.stride(), *x.stride(), *dw.stride(),
        TIMES_DERIVATIVE=device_functions(activation)[1], ACCUMULATE=accumulate, EVEN_M=M % config.depth == 0,
        PRECISION=dot_precision(dy, precision),
        BLOCK_M=config.depth, BLOCK_N=config.rows, BLOCK_K=config.cols, GROUP=config.group, SPLITS=config.splits,
        **options(config.num_warps, config.num_stages),
    )  # fmt: skip
    if sums is not None:
        sum_splits(sums, dw, accumulate)
    if db is not None and into is not None and into is not db:
        db.copy_(into.sum(0))


def _input_config(pairs: list[Pair], dx: torch.Tensor, activation: str | None, precision: str) -> LinearConfig:
    operands = [matrix for pair in pairs for matrix in pair]
    (M, K), N = dx.shape, pairs[0][0].shape[1] * len(pairs)
    return config_for("grad_input", (M, K, N), tuple(operands), activation, precision, dx.dtype, pairs=len(pairs))


def _weight_config(
    dy: torch.Tensor,
    s: torch.Tensor | None,
    x: torch.Tensor,
    dw: torch.Tensor,
    activation: str | None,
    precision: str,
    bias: bool,
    accumulate: bool,
) -> LinearConfig:
    (N, K), M = dw.shape, dy.shape[0]
    return config_for(
        "grad_weight", (N, K, M), (dy, s, x), activation, precision, dw.dtype, bias=bias, accumulate=accumulate
    )


def linear_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor | None,
    weight: torch.Tensor | None,
    saved: torch.Tensor | None,
    seed: torch.Tensor | None,
    activation: str | None,
    dropout_p: float,
    needs: list[bool],
    input_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    transposed: bool,
    precision: str,
    main_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of (input, weight, bias), each in its tensor's dtype; one that is not needed has shape (0,).

    Arguments as of :func:`fusedops.linear.reference.linear_backward`.
    """
    need_dx, need_dw, need_db = needs
    lead, N = grad_output.shape[:-1], grad_output.shape[-1]
    M = math.prod(lead)
    K = weight.shape[1] if weight is not None else input.shape[-1] if input is not None else 0
    dx = grad_output.new_empty((*lead, K) if need_dx else (0,), dtype=input_dtype)
    dw = grad_output.new_empty((0,), dtype=weight_dtype)
    if need_dw and main_grad is None:
        dw = empty_weight_gradient(grad_output, N, K, weight_dtype, transposed)
    db = grad_output.new_empty((N if need_db else 0,), dtype=bias_dtype)
    if M == 0 or N == 0:
        return dx.zero_(), dw.zero_(), db.zero_()

    dy = grad_output.reshape(M, N)
    if activation is None and seed is None:
        dy = dy.to(input_dtype)
    s = None if saved is None else saved.reshape(M, N).contiguous()
    w = weight.to(input_dtype) if weight is not None and need_dx and K > 0 else None
    x = input.reshape(M, K) if input is not None and need_dw and K > 0 else None
    into_dw = dw if main_grad is None else main_grad
    with device_guard(dy):
        # Dropout's random numbers are drawn once only, and the prologues multiply dtypes that are equal.
        make_dz = (w is not None or x is not None) and (seed is not None or dy.dtype != input_dtype)
        input_config = weight_config = None
        if w is not None and not make_dz:
            input_config = config_for("grad_input", (M, K, N), (dy, s, w), activation, precision, input_dtype)
            make_dz = not input_config.prologue
        if x is not None and not make_dz:
            weight_config = _weight_config(dy, s, x, into_dw, activation, precision, need_db, main_grad is not None)
            make_dz = not weight_config.prologue
        make_db = need_db and x is None
        if make_db and w is not None and activation is not None:
            make_dz = True  # it is computed anyway
        if make_dz or make_db:
            dz, sums = grad_preactivation(dy, s, activation, make_dz, need_db, seed, dropout_p, input_dtype)
            if sums is not None:
                db.copy_(sums)
                need_db = False
            if dz is not None:
                dy, s, activation, input_config, weight_config = dz, None, None, None, None
        if w is not None:
            grad_input_product([(dy, w)], dx.view(M, K), precision, s, activation, input_config)
        if x is not None:
            grad_weight_product(
                dy, x, into_dw, precision, s, activation, db if need_db else None, main_grad is not None, weight_config
            )  # fmt: skip
    return dx, dw, db
