"""Triton kernel of the gated product's backward, and its launcher.

With Z = [G | U], the two pre-activations of Y = a(G) ∘ U: dZ = [dY ∘ U ∘ a′(G) | dY ∘ a(G)], dX = dZ [Wg; Wu],
d[Wg; Wu] = dZᵀ X, d[bg; bu] = Σ_m dZ. dZ and its column sums come from one elementwise pass, the rest from plain
products. Nothing is atomic: every sum has one owner and one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.linear.activations import ACTIVATIONS
from fusedops.linear.kernels_activations import device_functions
from fusedops.linear.kernels_backward import grad_input_product, grad_weight_product
from fusedops.linear.kernels_gated import products
from fusedops.linear.reference_gated import empty_gradients
from fusedops.runtime.device import device_facts, device_guard
from fusedops.runtime.launch import ceil_div, next_power_of_2, options


@triton.jit
def grad_gate_kernel(
    DY,  # (M, N), any strides
    Z,  # (M, 2N), contiguous: [G | U]
    DZ,  # (M, width), contiguous, or None
    DB,  # (splits, width) float32 partial sums, or None
    M,
    N,
    stride_dym,
    stride_dyn,
    splits,
    ACTIVATION: tl.constexpr,  # two functions of kernels_activations.py, or None
    TIMES_DERIVATIVE: tl.constexpr,
    OF_OUTPUT: tl.constexpr,  # the derivative is a function of a(g), not of g
    GATE: tl.constexpr,  # the gate's half is wanted; it comes first
    UP: tl.constexpr,  # the other half is wanted
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dZ = [dY ∘ U ∘ a′(G) | dY ∘ a(G)], or one of the halves, and the column sums.

    Program (block, split) owns BLOCK_N columns of each half, of every splits-th row block. width: N for each half.
    """
    blocks_n = tl.cdiv(N, BLOCK_N)
    split = (tl.program_id(0) // blocks_n).to(tl.int64)
    n = (tl.program_id(0) % blocks_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < N
    # Where the other half begins, and how wide both are.
    second = N if GATE else 0
    width = second + N if UP else second
    step = tl.full((), BLOCK_M, tl.int64) * splits
    db_gate = tl.zeros((BLOCK_N,), dtype=tl.float32)
    db_up = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for first_m in range(split * BLOCK_M, M, step):
        m = first_m + tl.arange(0, BLOCK_M)
        mask = (m < M)[:, None] & in_n[None, :]
        z_at = Z + m[:, None] * (2 * N) + n[None, :]
        dz_at = m[:, None] * width + n[None, :]
        dy = tl.load(DY + m[:, None] * stride_dym + n[None, :] * stride_dyn, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(z_at, mask=mask, other=0.0).to(tl.float32)
        a = g
        if ACTIVATION is not None:
            a = ACTIVATION(g)
        if GATE:
            dz = dy * tl.load(z_at + N, mask=mask, other=0.0).to(tl.float32)
            if TIMES_DERIVATIVE is not None:
                # A derivative may be infinite where nothing was loaded, as may a(0) below.
                dz = tl.where(mask, TIMES_DERIVATIVE(dz, a if OF_OUTPUT else g), 0.0)
            if DZ is not None:
                tl.store(DZ + dz_at, dz.to(DZ.dtype.element_ty), mask=mask)
            if DB is not None:
                db_gate += tl.sum(dz, axis=0)
        if UP:
            dz = tl.where(mask, dy * a, 0.0)
            if DZ is not None:
                tl.store(DZ + dz_at + second, dz.to(DZ.dtype.element_ty), mask=mask)
            if DB is not None:
                db_up += tl.sum(dz, axis=0)
    if DB is not None:
        db_at = DB + split * width + n
        if GATE:
            tl.store(db_at, db_gate, mask=in_n)
        if UP:
            tl.store(db_at + second, db_up, mask=in_n)


def grad_gate(
    dy: torch.Tensor, z: torch.Tensor, activation: str | None, gate: bool, up: bool, need_dz: bool, need_db: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dZ in the dtype of Z, its column sums in float32) of matrices dY and Z, which are not empty.

    The wanted halves stand side by side; None for a result that is not needed.
    """
    M, N = dy.shape
    width = N * (gate + up)
    facts = device_facts(dy.device)
    block_n = min(128, max(16, next_power_of_2(N)))
    block_m = max(8, 1024 // block_n)  # eight elements a thread: more spill
    blocks_n = ceil_div(N, block_n)
    # Eight programs a multiprocessor hide the latency of device memory; each has at least one block of rows.
    splits = min(ceil_div(8 * facts.multiprocessor_count, blocks_n), ceil_div(M, block_m))
    dz = torch.empty((M, width), dtype=z.dtype, device=dy.device) if need_dz else None
    parts = torch.empty((splits, width), dtype=torch.float32, device=dy.device) if need_db else None
    forward, backward = device_functions(activation)
    of_output = activation is not None and ACTIVATIONS[activation].derivative_of == "output"
    grad_gate_kernel[(blocks_n * splits,)](
        dy, z, dz, parts, M, N, *dy.stride(), splits,
        ACTIVATION=forward, TIMES_DERIVATIVE=backward, OF_OUTPUT=of_output, GATE=gate, UP=up,
        BLOCK_M=block_m, BLOCK_N=block_n, **options(4),
    )  # fmt: skip
    return dz, None if parts is None else parts.sum(0)


def gated_linear_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor | None,
    weight_gate: torch.Tensor | None,
    weight_up: torch.Tensor | None,
    bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None,
    saved: torch.Tensor | None,
    packed: bool,
    activation: str | None,
    needs: list[bool],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype],
    transposed: tuple[bool, bool],
    precision: str,
) -> tuple[torch.Tensor, ...]:
    """Arguments and results as :func:`fusedops.linear.reference_gated.gated_linear_backward`."""
    N = grad_output.shape[-1]
    M = grad_output.numel() // N if N else 0
    operand = saved if input is None else input
    assert operand is not None
    dtype = operand.dtype
    results = empty_gradients(grad_output, input, weight_gate, packed, needs, dtypes, transposed, dtype)
    if M == 0 or N == 0:
        return tuple(result.zero_() for result in results)
    dx, dw_gate, dw_up, db_gate, db_up = results
    need_dx, need_dw_gate, need_dw_up, need_db_gate, need_db_up = needs
    dy = grad_output.reshape(M, N)
    x = None if input is None else input.reshape(M, input.shape[-1])
    w_gate = None if weight_gate is None else weight_gate.to(dtype)
    w_up = None if weight_up is None else weight_up.to(dtype)
    with device_guard(dy):
        if saved is None:
            assert x is not None
            assert w_gate is not None
            z = x.new_empty((M, 2 * N))
            products(x, w_gate, w_up, bias_gate, bias_up, activation, None, z, precision, grad_output.dtype, True)
        else:
            z = saved.reshape(M, 2 * N).contiguous()
        gate = need_dx or need_dw_gate or need_db_gate
        up = need_dx or need_dw_up or need_db_up or packed
        dz, sums = grad_gate(dy, z, activation, gate, up, need_dx or need_dw_gate or need_dw_up, any(needs[3:]))
        if dz is not None:
            # A packed weight has both halves in one matrix, in their order in dZ.
            dz_gate, dz_up = (dz, dz) if packed else (dz[:, :N], dz[:, -N:])
            if need_dx and dx.numel():
                pairs = [(d, w) for d, w in ((dz_gate, w_gate), (dz_up, w_up)) if w is not None]
                grad_input_product(pairs, dx.view(M, -1), precision)
            for need, d, dw in ((need_dw_gate, dz_gate, dw_gate), (need_dw_up, dz_up, dw_up)):
                if need and dw.numel():
                    assert x is not None
                    grad_weight_product(d, x, dw, precision)
        if sums is not None:
            if need_db_gate:
                db_gate.copy_(sums if packed else sums[:N])
            if need_db_up:
                db_up.copy_(sums[-N:])
    return results
