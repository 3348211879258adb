"""Triton kernels of the gated product, and their launcher: with G = X Wgᵀ + bg and U = X Wuᵀ + bu, Y = a(G) ∘ U."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from fusedops.autotune.resolve import resolve
from fusedops.linear.kernels_activations import device_functions
from fusedops.linear.kernels_common import aligned, multiply, tile_of, torch_multiplies
from fusedops.linear.kernels_epilogue import halves
from fusedops.linear.reference import no_autocast
from fusedops.linear.tuning_gated import GATED_LINEAR, GatedProblem
from fusedops.runtime.device import device_facts, device_guard
from fusedops.runtime.launch import DTYPE_NAMES, as_dtype, as_matrix, ceil_div, next_power_of_2, options
from fusedops.runtime.precision import dot_precision


@triton.jit
def finish(g, u, BG, BU, Y, Z, m, first_n, M, N, ACTIVATION: tl.constexpr, PARTS: tl.constexpr):
    """Biases, gate and stores of rows m and columns first_n, first_n + 1, …; g and u are their X Wgᵀ and X Wuᵀ."""
    if PARTS > 1:
        left_g, right_g = halves(g)
        left_u, right_u = halves(u)
        HALF: tl.constexpr = g.shape[1] // 2
        finish(left_g, left_u, BG, BU, Y, Z, m, first_n, M, N, ACTIVATION, PARTS // 2)
        finish(right_g, right_u, BG, BU, Y, Z, m, first_n + HALF, M, N, ACTIVATION, PARTS // 2)
    else:
        n = first_n + tl.arange(0, g.shape[1])
        in_n = n < N
        mask = (m < M)[:, None] & in_n[None, :]
        if BG is not None:
            g += tl.load(BG + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
        if BU is not None:
            u += tl.load(BU + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
        if Z is not None:
            z_at = Z + m[:, None] * (2 * N) + n[None, :]
            tl.store(z_at, g.to(Z.dtype.element_ty), mask=mask)
            tl.store(z_at + N, u.to(Z.dtype.element_ty), mask=mask)
        if Y is not None:
            if ACTIVATION is not None:
                g = ACTIVATION(g)
            tl.store(Y + m[:, None] * N + n[None, :], (g * u).to(Y.dtype.element_ty), mask=mask)


@triton.jit
def gated_linear_kernel(
    X,  # (M, K), any strides
    WG,  # (N, K), any strides
    WU,  # (N, K), the strides of WG
    BG,  # (N,) or None
    BU,  # (N,) or None
    Y,  # (M, N), contiguous, or None
    Z,  # (M, 2N), contiguous, or None: where the pre-activations [G | U] are kept
    M,
    N,
    K,
    stride_xm,
    stride_xk,
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
    GROUP: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # bytes that WG and WU are multiples of: 16 or an element's
    INTERLEAVED: tl.constexpr,  # the columns of the two weights alternate; else one's stand before the other's
    PARTS: tl.constexpr,  # in how many pieces the tile is finished: a large one's activation wants registers
):
    """Y = a(X Wgᵀ + bg) ∘ (X Wuᵀ + bu): each program owns one BLOCK_M × BLOCK_N tile of Y and reads its X once."""
    block_m, block_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    m = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_n = block_n.to(tl.int64) * BLOCK_N
    # One product of twice as many columns: those of the gate and those of the other weight.
    column = tl.arange(0, 2 * BLOCK_N)
    if INTERLEAVED:
        of_gate = column % 2 == 0
        n = first_n + column // 2
    else:
        of_gate = column < BLOCK_N
        n = first_n + column % BLOCK_N
    # Chosen as integers: not every compiler takes a choice of pointers. None sees through it how they are aligned.
    address = tl.where(of_gate, WG.to(tl.int64), WU.to(tl.int64))
    weight = tl.multiple_of(address.to(WG.dtype), ALIGNMENT)
    z = tl.zeros((BLOCK_M, 2 * BLOCK_N), dtype=tl.float32)
    z = multiply(
        z, X, weight[None, :], m, n, M, N, 0, K, stride_xm, stride_xk, stride_wk, stride_wn,
        X_ROW_MAJOR, W_ROW_MAJOR, EVEN_K, PRECISION, BLOCK_K,
    )  # fmt: skip
    if INTERLEAVED:
        g, u = z.reshape(BLOCK_M, BLOCK_N, 2).split()
    else:
        g, u = halves(z)
    finish(g, u, BG, BU, Y, Z, m, first_n, M, N, ACTIVATION, PARTS)


@triton.jit
def gate_kernel(
    Z,  # (M, 2N), contiguous: [G | U]
    Y,  # (M, N), contiguous
    M,
    N,
    ACTIVATION: tl.constexpr,  # a function of kernels_activations.py, or None
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Y = a(G) ∘ U: each program owns one tile of Y."""
    blocks_n = tl.cdiv(N, BLOCK_N)
    m = (tl.program_id(0) // blocks_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) % blocks_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (m < M)[:, None] & (n < N)[None, :]
    z_at = Z + m[:, None] * (2 * N) + n[None, :]
    g = tl.load(z_at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(z_at + N, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        g = ACTIVATION(g)
    tl.store(Y + m[:, None] * N + n[None, :], (g * u).to(Y.dtype.element_ty), mask=mask)


def gated_linear(
    input: torch.Tensor,
    weight_gate: torch.Tensor,
    weight_up: torch.Tensor | None,
    bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
    recompute: bool,
    save: bool,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate and launch; arguments and results as :func:`fusedops.linear.reference_gated.gated_linear`."""
    lead, K = input.shape[:-1], input.shape[-1]
    M = math.prod(lead)
    N = weight_gate.shape[0] if weight_up is not None else weight_gate.shape[0] // 2
    output = input.new_empty((*lead, N), dtype=out_dtype or input.dtype)
    save = save and not recompute
    saved = input.new_empty((*lead, 2 * N) if save else (0,))
    if M > 0 and N > 0:
        x, z = as_matrix(input, M, K), saved if save else None
        weights = (weight_gate, weight_up, bias_gate, bias_up)
        products(x, *weights, activation, output, z, precision, output.dtype, save)
    return output, saved


def products(
    x: torch.Tensor,
    weight_gate: torch.Tensor,
    weight_up: torch.Tensor | None,
    bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None,
    activation: str | None,
    y: torch.Tensor | None,
    z: torch.Tensor | None,
    precision: str,
    result_dtype: torch.dtype,
    keeps: bool,
) -> None:
    """Write Y (contiguous, M · N elements), Z (contiguous, M · 2N) or both, of a matrix X; none is empty.

    The dtype of Y and whether the forward keeps Z are part of the problem: the same ones give the same Z to the bit.
    """
    M, K = x.shape
    packed = weight_up is None
    N = weight_gate.shape[0] // 2 if packed else weight_gate.shape[0]
    w_gate = as_dtype(weight_gate, x.dtype)
    w_up = w_gate[N:] if weight_up is None else as_dtype(weight_up, x.dtype)
    b_gate = None if bias_gate is None else bias_gate.contiguous()
    b_up = None if bias_up is None else bias_up.contiguous()
    if packed and b_gate is not None:
        b_up = b_gate[N:]
    problem = GatedProblem.of(
        M, N, K, dtype=DTYPE_NAMES[x.dtype], out_dtype=DTYPE_NAMES[result_dtype],
        layout=("r" if x.stride(1) == 1 else "c") + ("r" if w_up.stride(1) == 1 else "c"),
        activation=activation, precision=precision, aligned=aligned(x) and aligned(w_gate) and aligned(w_up),
        torch_serves=torch_multiplies(x, result_dtype, precision),
        bias=b_gate is not None or b_up is not None, packed=packed, keeps=keeps,
    )  # fmt: skip
    config = resolve(GATED_LINEAR, problem, x.device)
    with device_guard(x):
        if config.kernel == "torch":
            z = x.new_empty((M, 2 * N)) if z is None else z.view(M, 2 * N)
            _torch_products(x, w_gate, None if packed else w_up, b_gate, b_up, z)
            if y is not None:
                gate(z, y, activation)
            return
        if w_gate.stride() != w_up.stride():
            w_gate, w_up = w_gate.contiguous(), w_up.contiguous()
        gated_linear_kernel[(ceil_div(M, config.rows) * ceil_div(N, config.cols),)](
            x, w_gate, w_up, b_gate, b_up, y, z, M, N, K, *x.stride(), *w_up.stride(),
            ACTIVATION=device_functions(activation)[0],
            X_ROW_MAJOR=x.stride(1) == 1, W_ROW_MAJOR=w_up.stride(1) == 1, EVEN_K=K % config.depth == 0,
            PRECISION=dot_precision(x, precision),
            BLOCK_M=config.rows, BLOCK_N=config.cols, BLOCK_K=config.depth, GROUP=config.group,
            ALIGNMENT=x.element_size() if (w_gate.data_ptr() | w_up.data_ptr()) % 16 else 16,
            INTERLEAVED=w_up.stride(1) == 1,
            PARTS=config.parts(device_facts(x.device).warp_size),
            **options(config.num_warps, config.num_stages),
        )  # fmt: skip


def _torch_products(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor | None,
    b_gate: torch.Tensor | None,
    b_up: torch.Tensor | None,
    z: torch.Tensor,
) -> None:
    """Z = [X Wgᵀ + bg | X Wuᵀ + bu] by torch's own products: one where ``w_gate`` is packed and ``w_up`` None."""
    N = z.shape[1] // 2
    parts = [(w_gate, b_gate, z)] if w_up is None else [(w_gate, b_gate, z[:, :N]), (w_up, b_up, z[:, N:])]
    with torch.no_grad(), no_autocast(x):  # autograd refuses ``out``
        for w, b, out in parts:
            if b is None:
                torch.mm(x, w.t(), out=out)
            else:
                torch.addmm(b.to(x.dtype), x, w.t(), out=out)


def gate(z: torch.Tensor, y: torch.Tensor, activation: str | None) -> None:
    """Write Y, contiguous with M · N elements, from Z (M, 2N), contiguous; they are not empty."""
    M, N = z.shape[0], z.shape[1] // 2
    block_n = min(128, max(16, next_power_of_2(N)))
    block_m = max(1, 2048 // block_n)
    gate_kernel[(ceil_div(M, block_m) * ceil_div(N, block_n),)](
        z, y, M, N, ACTIVATION=device_functions(activation)[0], BLOCK_M=block_m, BLOCK_N=block_n, **options(4)
    )
