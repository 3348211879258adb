"""The backward pass of attention: FlashAttention-2 (Dao 2023, algorithm 2) in Triton, and its launcher.

With P = softmax(s), a row's sink among its logits, Z = keep / (1 - p) of dropout (1 without) and out = (P ∘ Z) v, the
gradients are (Dao 2023, section 2.3.2; Dao et al. 2022, appendix B.4)::

    dv_j = Σ_i P_ij Z_ij do_i
    dS_ij = P_ij (Z_ij do_i · v_j - delta_i),   delta_i = do_i · out_i - dlse_i
    dq_i = scale Σ_j dS'_ij k_j                 dS' = dS through score_mod and softcap
    dk_j = scale Σ_i dS'_ij q_i
    dmask = dS, summed over what the mask was broadcast to (kernels_backward_mask)
    dslope_h = -Σ_ij dS_ij |j - i - shift|
    dsink_h = -Σ_i exp(sink_h - lse_i) delta_i

The term dlse is the gradient of lse, as ∂lse_i/∂s_ij = P_ij. P is computed again, tile by tile. Each gradient has
programs of its own that sum in a fixed order, without atomics: the result is the same to the bit on every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops.attention.kernels_backward_joint import backward_joint_kernel
from fusedops.attention.kernels_backward_kv import backward_kv_kernel
from fusedops.attention.kernels_backward_mask import mask_gradient
from fusedops.attention.kernels_backward_q import backward_q_kernel
from fusedops.attention.kernels_tiles import bounds_of, exponential, head_of, load_rows
from fusedops.attention.operands import Operands, strides_of, unit_stride
from fusedops.attention.options import Gradients, Needs, Options, empty_gradients
from fusedops.attention.tuning import serves_queries
from fusedops.runtime.device import device_facts, device_guard
from fusedops.runtime.launch import ceil_div, next_power_of_2
from fusedops.runtime.launch import options as launch_options


@triton.jit(do_not_specialize=["heads", "seqlen_q"])
def rows_kernel(
    OUT,  # (batch, heads, seqlen_q, D_V); None where delta is not wanted
    DO,  # as OUT
    DLSE,  # (batch, heads, seqlen_q) float32, contiguous; or None
    TOP,  # as DLSE: the maximum of a row's scores
    TOTAL,  # as DLSE: Σ exponential(s - TOP)
    SINKS,  # (heads,), or None where their gradient is not wanted
    BASE,  # as DLSE, and the next two: what is written
    WEIGHT,  # None where not EXACT
    DELTA,
    DSINKS,  # (batch, heads, tiles): each program's part
    out_strides,
    do_strides,
    heads,
    seqlen_q,
    sink_scale,
    NATURAL: tl.constexpr,
    EXACT: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """What the other kernels need of each row: ``P = exponential(s - base) · weight``, and delta.

    A row that sees no key gets base = inf: its probabilities are zero. Where not EXACT, the total goes into the base
    and the weight is one. That rounds the base, whose error is then the relative error of all probabilities: nothing
    beside what 16-bit operands cost, but too much for float32, and for a float mask, which may put every score of a row
    at -3e38. A program owns BLOCK_M queries of one head.
    """
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    first = tl.program_id(0) % blocks * BLOCK_M
    pair = tl.program_id(0) // blocks
    batch = pair // heads
    head = pair % heads
    rows = first + tl.arange(0, BLOCK_M)
    inside = rows < seqlen_q
    at = pair.to(tl.int64) * seqlen_q + rows
    top = tl.load(TOP + at, mask=inside, other=float("-inf"))
    total = tl.load(TOTAL + at, mask=inside, other=0.0)
    divisor = tl.where(total == 0.0, 1.0, total)
    base = tl.where(top == float("-inf"), float("inf"), top)
    if EXACT:
        tl.store(WEIGHT + at, 1.0 / divisor, mask=inside)
    else:
        base += tl.log2(divisor)
    tl.store(BASE + at, base, mask=inside)
    if OUT is not None:
        out_head = head_of(OUT, batch, head, out_strides)
        out = load_rows(out_head, first, seqlen_q, out_strides[2], D_V, BLOCK_M, BLOCK_DV, True)
        do_head = head_of(DO, batch, head, do_strides)
        do = load_rows(do_head, first, seqlen_q, do_strides[2], D_V, BLOCK_M, BLOCK_DV, True)
        delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), axis=1)
        if DLSE is not None:
            delta -= tl.load(DLSE + at, mask=inside, other=0.0)
        # A row that sees nothing has lse = -inf, whose gradient may be NaN; so may what arrives past the last sequence.
        delta = tl.where(total == 0.0, 0.0, delta)
        tl.store(DELTA + at, delta, mask=inside)
        if SINKS is not None:
            sink = tl.load(SINKS + head).to(tl.float32) * sink_scale
            share = exponential(sink - top, NATURAL) / divisor
            tl.store(DSINKS + tl.program_id(0), -tl.sum(tl.where(total == 0.0, 0.0, share * delta)))


@triton.jit(do_not_specialize=["heads", "count", "total"])
def sum_of_sequences_kernel(
    ROWS,  # (heads, total) float32, contiguous
    SUMS,  # (count, heads) float32, contiguous
    starts,
    heads,
    count,
    total,
    BLOCK: tl.constexpr,
):
    """Sums over each packed sequence. A program owns one sequence of one head."""
    sequence = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    begin, length = bounds_of(starts, sequence, count, total)
    acc = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, length, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        acc += tl.load(ROWS + head.to(tl.int64) * total + begin + rows, mask=rows < length, other=0.0)
    tl.store(SUMS + tl.program_id(0), tl.sum(acc))


def attention_backward(
    grad_output: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    statistics: torch.Tensor,
    options: Options,
    needs: Needs,
) -> Gradients:
    """Gradients, each in its tensor's dtype; one that is not wanted has shape (0,).

    ``out`` may be None where v's gradient alone is wanted.
    """
    grads = empty_gradients(q, k, v, options, needs)
    if q.numel() == 0:
        for grad in grads:
            grad.zero_()
        return grads
    operands = Operands.of(q, k, v, options)
    do = unit_stride(grad_output)
    with device_guard(q):
        through_scores = any(needs[:2]) or any(needs[3:])
        assert out is not None or not through_scores
        out = unit_stride(out) if through_scores and out is not None else None
        rows = _rows(out, do, grad_lse, statistics, operands, grads.sinks if needs.sinks else None)
        inputs = (operands.q, operands.k, operands.v, do, *rows)
        slope_rows = torch.empty_like(rows[0]) if needs.alibi_slopes else None
        _launch(operands, inputs, grads, slope_rows, needs)
        if needs.attn_mask:
            mask_gradient(grads.attn_mask, operands, *inputs[3:])
        if slope_rows is not None:
            grads.alibi_slopes.copy_(_sums(slope_rows, operands).sum_to_size(grads.alibi_slopes.shape))
    return grads


def _rows(
    out: torch.Tensor | None,
    do: torch.Tensor,
    grad_lse: torch.Tensor | None,
    statistics: torch.Tensor,
    operands: Operands,
    dsinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(base, weight, delta) of every query, (batch, heads, seqlen_q) float32; the gradient of sinks goes to ``dsinks``.

    Without ``out``, which dv alone does not need, delta is any such tensor.
    """
    batch, heads, seqlen_q, d_v = do.shape
    top, total = statistics.unbind()
    base = torch.empty_like(top)
    weight = torch.empty_like(base) if operands.exact else None
    delta = base if out is None else torch.empty_like(base)
    block_dv = max(16, next_power_of_2(d_v))
    block_m = min(128, 8192 // block_dv)
    tiles = ceil_div(seqlen_q, block_m)
    dlse = None if grad_lse is None else grad_lse.contiguous()
    parts = None if dsinks is None else torch.empty((batch, heads, tiles), dtype=torch.float32, device=do.device)
    rows_kernel[(tiles * batch * heads,)](
        out, do, dlse, top, total, None if dsinks is None else operands.sinks, base, weight, delta, parts,
        strides_of(do if out is None else out), strides_of(do), heads, seqlen_q, operands.unit,
        NATURAL=operands.natural, EXACT=operands.exact, D_V=d_v, BLOCK_DV=block_dv, BLOCK_M=block_m,
        **launch_options(4),
    )  # fmt: skip
    if dsinks is not None and parts is not None:
        dsinks.copy_(parts.sum((0, 2)))
    return base, weight, delta


def _launch(
    operands: Operands,
    inputs: tuple[Any, ...],
    grads: Gradients,
    slope_rows: torch.Tensor | None,
    needs: Needs,
) -> None:
    """The gradients of keys and values, and of queries: side by side where neither fills the device."""
    dq, dk, dv = (grad if need else None for grad, need in zip(grads[:3], needs[:3], strict=True))
    strides = (*operands.strides, strides_of(inputs[3]))
    common = (operands.terms, operands.dropout, *operands.starts)
    of_q, of_k, of_v = (grad if grad.dim() == 4 else operands.q for grad in grads[:3])
    grouped = operands.q.shape[1] != operands.k.shape[1]
    scales = (operands.scale, operands.softcap, operands.options.scale)
    for_keys = (dk is not None or dv is not None) and operands.k.shape[2] > 0
    for_queries = dq is not None or slope_rows is not None
    q, k, v, do = inputs[:4]
    config_k, config_q = operands.config("backward_kv", q, do), operands.config("backward_q", k, v)
    programs_k, programs_q = operands.programs("k", config_k.block_n), operands.programs("q", config_k.block_m)
    facts = device_facts(q.device)
    few = programs_k + programs_q <= facts.multiprocessor_count
    if for_keys and for_queries and few and serves_queries(config_k, operands.problem("backward_q"), facts):
        backward_joint_kernel[(programs_k + programs_q,)](
            *inputs, dq, dk, dv, slope_rows, *strides, strides_of(of_q), strides_of(of_k), strides_of(of_v),
            *common, operands.lists("keys"), operands.lists("queries"), *operands.sizes,
            operands.section("q"), operands.section("k"), programs_k, *scales,
            GROUPED=grouped, **operands.flags("backward_kv", config_k),
        )  # fmt: skip
        return
    if for_keys:
        moving = operands.moving(config_k.descriptors, config_k.block_m, q, do)
        backward_kv_kernel[(programs_k,)](
            moving[0], k, v, moving[1], *inputs[4:], dk, dv, *strides, strides_of(of_k), strides_of(of_v), *common,
            operands.lists("queries"), *operands.sizes, operands.section("k"), *scales,
            GROUPED=grouped, DESCRIBED=config_k.descriptors, **operands.flags("backward_kv", config_k),
        )  # fmt: skip
    if for_queries:
        moving = operands.moving(config_q.descriptors, config_q.block_n, k, v)
        backward_q_kernel[(operands.programs("q", config_q.block_m),)](
            q, *moving, *inputs[3:], dq, slope_rows, *strides, strides_of(of_q), *common,
            operands.lists("keys"), *operands.sizes, operands.section("q"), *scales,
            DESCRIBED=config_q.descriptors, **operands.flags("backward_q", config_q),
        )  # fmt: skip


def _sums(rows: torch.Tensor, operands: Operands) -> torch.Tensor:
    """(sequences, heads): sums of (batch, heads, seqlen_q) over each sequence's queries."""
    starts = operands.starts[0]
    if starts is None:
        return rows.sum(2)
    heads, total = rows.shape[1:]
    sums = torch.empty((operands.sequence_count, heads), dtype=torch.float32, device=rows.device)
    if operands.sequence_count:
        sum_of_sequences_kernel[(operands.sequence_count * heads,)](
            rows, sums, starts, heads, operands.sequence_count, total, BLOCK=1024, **launch_options(4)
        )
    return sums
