"""The backward pass of attention: FlashAttention-2 (Dao 2023, algorithm 2) in Triton, and its launcher.

With P = softmax(s) and out = P v, the gradients are (Dao 2023, section 2.3.2)::

    dv_j = Σ_i P_ij do_i
    dS_ij = P_ij (do_i · v_j - delta_i),   delta_i = do_i · out_i - dlse_i
    dq_i = scale Σ_j dS_ij k_j
    dk_j = scale Σ_i dS_ij q_i
    dmask = dS, summed over what the mask was broadcast to (kernels_backward_mask)

The term dlse is the gradient of lse, as ∂lse_i/∂s_ij = P_ij. P is computed again, tile by tile. Each gradient has
programs of its own that sum in a fixed order, without atomics: the result is the same to the bit on every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.attention.kernels_backward_kv import backward_kv_kernel
from fusedops.attention.kernels_backward_mask import mask_gradient
from fusedops.attention.kernels_backward_q import backward_q_kernel
from fusedops.attention.kernels_tiles import head_of, load_rows
from fusedops.attention.operands import Operands, strides_of, unit_stride
from fusedops.attention.reference import Gradients, empty_gradients
from fusedops.runtime.device import device_guard
from fusedops.runtime.launch import ceil_div, next_power_of_2, options


@triton.jit(do_not_specialize=["heads", "seqlen_q"])
def delta_kernel(
    OUT,  # (batch, heads, seqlen_q, D_V)
    DO,  # as OUT
    DLSE,  # (batch, heads, seqlen_q) float32, contiguous
    DELTA,  # as DLSE
    out_strides,
    do_strides,
    heads,
    seqlen_q,
    HAS_DLSE: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """delta = Σ do · out - dlse. A program owns BLOCK_M queries of one head."""
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    first = tl.program_id(0) % blocks * BLOCK_M
    pair = tl.program_id(0) // blocks
    batch = pair // heads
    head = pair % heads
    out_head = head_of(OUT, batch, head, out_strides)
    out = load_rows(out_head, first, seqlen_q, out_strides[2], D_V, BLOCK_M, BLOCK_DV, True)
    do_head = head_of(DO, batch, head, do_strides)
    do = load_rows(do_head, first, seqlen_q, do_strides[2], D_V, BLOCK_M, BLOCK_DV, True)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), axis=1)
    rows = first + tl.arange(0, BLOCK_M)
    at = pair.to(tl.int64) * seqlen_q + rows
    if HAS_DLSE:
        delta -= tl.load(DLSE + at, mask=rows < seqlen_q, other=0.0)
    tl.store(DELTA + at, delta, mask=rows < seqlen_q)


def attention_backward(
    grad_output: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    out: torch.Tensor | None,
    statistics: torch.Tensor,
    causal: int,
    scale: float,
    allow_tf32: bool,
    needs: tuple[bool, bool, bool, bool],
) -> Gradients:
    """Gradients of (q, k, v, attn_mask), each in its tensor's dtype; one that is not needed has shape (0,).

    Arguments as :func:`fusedops.attention.reference.attention_backward`; ``allow_tf32``: float32 operands of products
    may be rounded to TF32.
    """
    need_dq, need_dk, need_dv, need_dmask = needs
    dq, dk, dv, dmask = empty_gradients(q, k, v, attn_mask, needs)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), dmask.zero_()
    operands = Operands.of(q, k, v, attn_mask, causal, scale, allow_tf32)
    batch, heads, seqlen_q, _ = q.shape
    _, kv_heads, seqlen_k, d_v = v.shape
    do = unit_stride(grad_output)
    top, total = statistics
    delta = top  # stands in where dv alone is needed, which does not read it
    with device_guard(q):
        if need_dq or need_dk or need_dmask:
            assert out is not None
            delta = torch.empty_like(top)
            o = unit_stride(out)
            dlse = None if grad_lse is None else grad_lse.contiguous()
            block_dv = max(16, next_power_of_2(d_v))
            block_m = min(128, 8192 // block_dv)
            delta_kernel[(ceil_div(seqlen_q, block_m) * batch * heads,)](
                o, do, dlse, delta, strides_of(o), strides_of(do), heads, seqlen_q,
                HAS_DLSE=dlse is not None, D_V=d_v, BLOCK_DV=block_dv, BLOCK_M=block_m, **options(4),
            )  # fmt: skip
        inputs = (operands.q, operands.k, operands.v, operands.mask, do, top, total, delta)
        strides = (*operands.strides, strides_of(do))
        sizes = (*operands.sizes, operands.scale, float(scale))
        if need_dk or need_dv:
            config = operands.config("backward_kv")
            backward_kv_kernel[(ceil_div(seqlen_k, config.block_n) * batch * kv_heads,)](
                *inputs, dk, dv, *strides, strides_of(dk), strides_of(dv), *sizes,
                NEED_DK=need_dk, NEED_DV=need_dv, GROUPED=heads != kv_heads, **operands.flags("backward_kv", config),
            )  # fmt: skip
        if need_dq:
            config = operands.config("backward_q")
            backward_q_kernel[(ceil_div(seqlen_q, config.block_m) * batch * heads,)](
                *inputs, dq, *strides, strides_of(dq), *sizes, **operands.flags("backward_q", config)
            )  # fmt: skip
        if need_dmask:
            mask_gradient(dmask, operands, *inputs[4:])
    return dq, dk, dv, dmask
