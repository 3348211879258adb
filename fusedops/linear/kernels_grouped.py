"""Triton kernels of grouped and batched products, and their launchers.

Rows sorted by group, a matrix a group: Y_g = a(X_g W_gᵀ + b_g), dX_g = dZ_g W_g, which is the same product with the
matrix read transposed, and dW_g = dZ_gᵀ X_g, db_g = Σ dZ_g. Where a group's rows lie is read on the device, so a launch
has programs for the most tiles that any division of the rows into groups can have; a surplus one leaves at once.
Nothing is atomic: every element has one owner, every sum one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.autotune.resolve import resolve
from fusedops.linear.kernels_activations import device_functions
from fusedops.linear.kernels_common import aligned, multiply, tile_of
from fusedops.linear.kernels_epilogue import quarters
from fusedops.linear.kernels_preactivation import grad_preactivation
from fusedops.linear.reference import keeps_output
from fusedops.linear.reference_grouped import empty_weights_gradient
from fusedops.linear.tuning_grouped import GROUPED_LINEAR, GroupedConfig, GroupedProblem, Product
from fusedops.runtime.device import device_facts, device_guard
from fusedops.runtime.launch import DTYPE_NAMES, ceil_div, options
from fusedops.runtime.precision import dot_precision

# Offsets that a program reads at a time when it looks for its group.
BLOCK_G = 256


@triton.jit
def bounded(offset, rows):
    """An offset as int64, 0 at least and ``rows`` at most, whatever the user wrote there."""
    return tl.minimum(tl.maximum(offset.to(tl.int64), 0), rows)


@triton.jit
def group_of(slot, OFFSETS, rows, G, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr):
    """(group, first row, end) of the group that slot ``slot`` of the tiles of rows belongs to.

    Group g has the slots from ⌊first row / BLOCK_M⌋ + g: enough for its tiles wherever its rows begin, and found
    without a sum over the groups before it. Rows behind the last group are group G. Offsets that do not ascend leave
    rows without a slot; no row has two.
    """
    group = tl.zeros((), dtype=tl.int32)
    first = tl.zeros((), dtype=tl.int64)
    end = tl.zeros((), dtype=tl.int64) + rows
    for start in range(0, G, BLOCK_G):
        g = start + tl.arange(0, BLOCK_G)
        ends = bounded(tl.load(OFFSETS + g, mask=g < G, other=0), rows)
        passed = (ends // BLOCK_M + g < slot) & (g < G)  # the next group has begun
        group += tl.sum(passed.to(tl.int32), axis=0)
        first = tl.maximum(first, tl.max(tl.where(passed, ends, 0), axis=0))
        end = tl.minimum(end, tl.min(tl.where(passed | (g >= G), rows, ends), axis=0))
    return group, first, end


@triton.jit
def finish(z, B, Y, Z, m, first_n, end, N, ACTIVATION: tl.constexpr):
    """Bias, activation and stores of Y's rows m and columns first_n, first_n + 1, …; z is their X Wᵀ."""
    n = first_n + tl.arange(0, z.shape[1])
    mask = (m < end)[:, None] & (n < N)[None, :]
    if B is not None:
        z += tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = m[:, None] * N + n[None, :]
    if Z is not None:
        tl.store(Z + at, z.to(Z.dtype.element_ty), mask=mask)
    if ACTIVATION is not None:
        z = ACTIVATION(z)
    tl.store(Y + at, z.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def store_zeros(Y, m, first_n, end, N, BLOCK_N: tl.constexpr):
    """Zeros in Y's rows m and columns first_n, …, BLOCK_N of them, few at a time."""
    for start in range(0, BLOCK_N, 16):
        n = first_n + start + tl.arange(0, 16)
        mask = (m < end)[:, None] & (n < N)[None, :]
        tl.store(Y + m[:, None] * N + n[None, :], tl.zeros((m.shape[0], 16), dtype=Y.dtype.element_ty), mask=mask)


@triton.jit
def grouped_linear_kernel(
    X,  # (M, K) rows sorted by group; without offsets (G, M, K); any strides
    W,  # (G, N, K), any strides
    B,  # (G, N), contiguous, or None
    OFFSETS,  # (G,) end of each group's rows; None: each group has M rows of its own
    Y,  # (M, N), contiguous; without offsets (G, M, N)
    Z,  # as Y, or None: where the pre-activation is kept
    M,
    N,
    K,
    G,
    stride_xg,
    stride_xm,
    stride_xk,
    stride_wg,
    stride_wn,
    stride_wk,
    ACTIVATION: tl.constexpr,  # a function of kernels_activations.py, or None
    X_ROW_MAJOR: tl.constexpr,  # the elements of a row are neighbours in memory
    W_ROW_MAJOR: tl.constexpr,
    EVEN_K: tl.constexpr,  # BLOCK_K divides K
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    GROUP: tl.constexpr,
    QUARTERS: tl.constexpr,  # finish the tile in four parts: a large one's activation wants registers
):
    """Y_g = a(X_g W_gᵀ + b_g): each program owns one BLOCK_M × BLOCK_N tile of one group's rows, or nothing."""
    blocks_m = tl.cdiv(M, BLOCK_M)
    if OFFSETS is None:
        slot, block_n = tile_of(tl.program_id(0), blocks_m * G, N, 1, BLOCK_N, GROUP)
        group = slot // blocks_m
        first = tl.zeros((), dtype=tl.int64)
        end = first + M
        block_m = slot % blocks_m
    else:
        slot, block_n = tile_of(tl.program_id(0), blocks_m + G, N, 1, BLOCK_N, GROUP)
        group, first, end = group_of(slot, OFFSETS, M, G, BLOCK_M, BLOCK_G)
        block_m = slot - (first // BLOCK_M + group)
    first_m = first + block_m.to(tl.int64) * BLOCK_M
    if (first_m >= end) | (block_m < 0):
        return
    m = first_m + tl.arange(0, BLOCK_M)
    first_n = block_n.to(tl.int64) * BLOCK_N
    if group == G:  # behind the last group
        store_zeros(Y, m, first_n, end, N, BLOCK_N)
        if Z is not None:
            store_zeros(Z, m, first_n, end, N, BLOCK_N)
        return
    g = group.to(tl.int64)
    if OFFSETS is None:
        X += g * stride_xg
        Y += g * M * N
        if Z is not None:
            Z += g * M * N
    if B is not None:
        B += g * N
    n = first_n + tl.arange(0, BLOCK_N)
    z = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    z = multiply(
        z, X, W + g * stride_wg, m, n, end, N, 0, K, stride_xm, stride_xk, stride_wk, stride_wn,
        X_ROW_MAJOR, W_ROW_MAJOR, EVEN_K, PRECISION, BLOCK_K,
    )  # fmt: skip
    if QUARTERS:
        parts = quarters(z)
    else:
        parts = (z,)
    for i in tl.static_range(4 if QUARTERS else 1):
        finish(parts[i], B, Y, Z, m, first_n + i * (BLOCK_N // 4), end, N, ACTIVATION)


@triton.jit
def grouped_grad_weight_kernel(
    DZ,  # (M, N) rows sorted by group; without offsets (G, M, N); any strides
    X,  # (M, K), without offsets (G, M, K), any strides; None: the bias's gradient only
    OFFSETS,  # (G,) end of each group's rows; None: each group has M rows of its own
    DW,  # (G, N, K), any strides, or None
    DB,  # (G, N), contiguous, or None
    M,
    N,
    K,
    stride_dzg,
    stride_dzm,
    stride_dzn,
    stride_xg,
    stride_xm,
    stride_xk,
    stride_dwg,
    stride_dwn,
    stride_dwk,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """dW_g = dZ_gᵀ X_g: each program owns a BLOCK_N × BLOCK_K tile of one group's; in block column 0 also db_g."""
    tiles = tl.cdiv(N, BLOCK_N) * tl.cdiv(K, BLOCK_K)
    group = tl.program_id(0) // tiles
    block_n, block_k = tile_of(tl.program_id(0) % tiles, N, K, BLOCK_N, BLOCK_K, GROUP)
    g = group.to(tl.int64)
    first = tl.zeros((), dtype=tl.int64)
    end = first + M
    if OFFSETS is None:
        DZ += g * stride_dzg
        if X is not None:
            X += g * stride_xg
    else:
        first = bounded(tl.load(OFFSETS + g - 1, mask=g > 0, other=0), M)
        end = bounded(tl.load(OFFSETS + g), M)
    n = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = block_k.to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    m = first + tl.arange(0, BLOCK_M)
    in_n = (n < N)[:, None]
    in_k = (k < K)[None, :]
    dz_at = DZ + n[:, None] * stride_dzn + m[None, :] * stride_dzm
    dz_step = tl.full((), BLOCK_M, tl.int64) * stride_dzm
    if X is not None:
        x_at = X + m[:, None] * stride_xm + k[None, :] * stride_xk
        x_step = tl.full((), BLOCK_M, tl.int64) * stride_xm
    dw = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    db = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for first_m in range(first, end, BLOCK_M):
        in_m = first_m + tl.arange(0, BLOCK_M) < end
        dzt = tl.load(dz_at, mask=in_n & in_m[None, :], other=0.0)
        if DB is not None:  # noqa: SIM102 (the one is known when compiling, the other is not)
            if block_k == 0:
                db += tl.sum(dzt.to(tl.float32), axis=1)
        if X is not None:
            x = tl.load(x_at, mask=in_k & in_m[:, None], other=0.0)
            dw = tl.dot(dzt, x, dw, input_precision=PRECISION)
            x_at += x_step
        dz_at += dz_step
    if X is not None:
        dw_at = DW + g * stride_dwg + n[:, None] * stride_dwn + k[None, :] * stride_dwk
        tl.store(dw_at, dw.to(DW.dtype.element_ty), mask=in_n & in_k)
    if DB is not None:  # noqa: SIM102
        if block_k == 0:
            tl.store(DB + g * N + n, db.to(DB.dtype.element_ty), mask=n < N)


def grouped_linear(
    input: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    save: bool,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate and launch; arguments and results as :func:`fusedops.linear.reference_grouped.grouped_linear`."""
    shape = (*input.shape[:-1], weights.shape[1])
    output = input.new_empty(shape)
    save = save and activation is not None and not keeps_output(activation)
    saved = input.new_empty(shape if save else (0,))
    if output.numel() == 0:
        return output, saved
    if weights.shape[0] == 0:
        return output.zero_(), saved.zero_()
    with device_guard(input):
        _rows_product(input, weights, offsets, bias, output, saved if save else None, activation, precision)
    return output, saved


def _rows_product(
    input: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    saved: torch.Tensor | None,
    activation: str | None,
    precision: str,
) -> None:
    """Launch the product of each group's rows; the output, which is contiguous, is not empty."""
    G, N, K = weights.shape
    M = input.shape[-2]
    x = input if offsets is None else input[None]
    w = weights.to(x.dtype)
    average = M if offsets is None else ceil_div(M, G)
    config = _config(
        "rows", (G, average, N, K), (x, w), offsets is None, precision,
        activation, bias is not None, saved is not None,
    )  # fmt: skip
    blocks_m = ceil_div(M, config.rows)
    slots = G * blocks_m if offsets is None else G + blocks_m
    threads = config.num_warps * device_facts(x.device).warp_size
    grouped_linear_kernel[(slots * ceil_div(N, config.cols),)](
        x, w, None if bias is None else bias.contiguous(), None if offsets is None else offsets.contiguous(),
        output, saved, M, N, K, G, *x.stride(), *w.stride(),
        ACTIVATION=device_functions(activation)[0],
        X_ROW_MAJOR=x.stride(-1) == 1, W_ROW_MAJOR=w.stride(-1) == 1, EVEN_K=K % config.depth == 0,
        PRECISION=dot_precision(x, precision), BLOCK_M=config.rows, BLOCK_N=config.cols, BLOCK_K=config.depth,
        BLOCK_G=BLOCK_G, GROUP=config.group, QUARTERS=config.rows * config.cols >= 128 * threads,
        **options(config.num_warps, config.num_stages),
    )  # fmt: skip


def grouped_linear_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor | None,
    weights: torch.Tensor | None,
    offsets: torch.Tensor | None,
    saved: torch.Tensor | None,
    activation: str | None,
    needs: tuple[bool, bool, bool],
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    transposed: bool,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of (input, weights, bias), each in its tensor's dtype; one that is not needed has shape (0,).

    Arguments as of the op ``grouped_linear_backward``.
    """
    need_dx, need_dw, need_db = needs
    *lead, N = grad_output.shape
    G = grad_output.shape[0] if offsets is None else offsets.shape[0]
    K = weights.shape[2] if weights is not None else input.shape[-1] if input is not None else 0
    M = grad_output.shape[-2]
    dx = grad_output.new_empty((*lead, K) if need_dx else (0,))
    dw = grad_output.new_empty((0,), dtype=weight_dtype)
    if need_dw:
        dw = empty_weights_gradient(grad_output, G, N, K, weight_dtype, transposed)
    db = grad_output.new_empty((G, N) if need_db else (0,), dtype=bias_dtype)
    if grad_output.numel() == 0 or G == 0:
        return dx.zero_(), dw.zero_(), db.zero_()

    with device_guard(grad_output):
        dz = grad_output
        if activation is not None:
            assert saved is not None
            pass_dz, _ = grad_preactivation(
                grad_output.reshape(-1, N), saved.reshape(-1, N).contiguous(), activation, True, False
            )
            assert pass_dz is not None
            dz = pass_dz.view(grad_output.shape)
        if need_dx and K > 0:
            assert weights is not None
            _rows_product(dz, weights.transpose(1, 2), offsets, None, dx, None, None, precision)
        need_dw = need_dw and K > 0
        if need_dw or need_db:
            rows = dz if offsets is None else dz[None]
            x = input if input is None or offsets is None else input[None]
            x = x if need_dw else None
            read = (rows,) if x is None else (rows, x)
            average = M if offsets is None else ceil_div(M, G)
            K = K if need_dw else 1
            c = _config("weights", (G, N, K, average), read, offsets is None, precision, bias=need_db)
            grouped_grad_weight_kernel[(G * ceil_div(N, c.rows) * ceil_div(K, c.cols),)](
                rows, x, None if offsets is None else offsets.contiguous(), dw if need_dw else None,
                db if need_db else None, M, N, K, *rows.stride(), *(rows if x is None else x).stride(),
                *(dw if need_dw else rows).stride(), PRECISION=dot_precision(dz, precision),
                BLOCK_M=c.depth, BLOCK_N=c.rows, BLOCK_K=c.cols, GROUP=c.group, **options(c.num_warps, c.num_stages),
            )  # fmt: skip
    return dx, dw, db


def _config(
    product: Product,
    sizes: tuple[int, int, int, int],
    operands: tuple[torch.Tensor, ...],
    equal: bool,
    precision: str,
    activation: str | None = None,
    bias: bool = False,
    keeps: bool = False,
) -> GroupedConfig:
    """The configuration of a product of sizes (groups, rows, cols, depth)."""
    first, last = operands[0], operands[-1]
    problem = GroupedProblem.of(
        product, *sizes, dtype=DTYPE_NAMES[first.dtype], activation=activation, precision=precision, equal=equal,
        layout=("r" if first.stride(-1) == 1 else "c") + ("r" if last.stride(-1) == 1 else "c"),
        aligned=all(map(aligned, operands)), bias=bias, keeps=keeps,
    )  # fmt: skip
    return resolve(GROUPED_LINEAR, problem, first.device)
