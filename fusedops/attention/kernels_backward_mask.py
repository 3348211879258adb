"""The gradient of attention's float mask: dS summed over the batches, heads, queries or keys it was broadcast to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.attention.kernels_tiles import (
    band_of,
    bounds_of,
    head_of,
    kept,
    load_rows,
    probabilities,
    scores,
    softmax_of_row,
)
from fusedops.attention.operands import Operands, strides_of
from fusedops.runtime.device import device_facts
from fusedops.runtime.launch import ceil_div


@triton.jit(
    do_not_specialize=[
        "heads", "count", "seqlen_q", "seqlen_k", "align", "left", "right",
        "rows", "columns", "mask_heads", "summed", "summed_heads", "splits",
    ]
)  # fmt: skip
def backward_mask_kernel(
    Q,
    K,
    V,
    DO,
    TOP,
    WEIGHT,
    DELTA,
    DMASK,  # (splits, mask batches, mask heads, rows or 1, columns or 1), contiguous
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    terms,
    dropout,
    starts_q,
    starts_k,
    heads,
    group,
    count,
    seqlen_q,
    seqlen_k,
    align,
    left,
    right,
    scale,
    softcap,
    rows,  # of the scores that the tiles cover: of a mask's own, or as many as a sequence may have
    columns,
    mask_heads,
    summed,  # how many (sequence, head) a mask's head is broadcast to
    summed_heads,  # how many heads of one sequence
    splits,  # programs that share them
    PER_QUERY: tl.constexpr,  # DMASK has a row for each query, else one
    PER_KEY: tl.constexpr,
    EXACT: tl.constexpr,
    NATURAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program owns a tile of the mask, and its share of the batches and heads that one mask head serves.

    It adds their dS; where the mask is broadcast over queries or keys, those of all its tiles, and in the end the
    tile's rows or columns. What is left to add, over splits, is left to torch.
    """
    tiles_n = tl.cdiv(columns, BLOCK_N)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    own_n = 1
    own_m = 1
    members = summed.to(tl.int64)
    if PER_KEY:
        own_n = tiles_n
    else:
        members = members * tiles_n
    if PER_QUERY:
        own_m = tiles_m
    else:
        members = members * tiles_m
    program = tl.program_id(0)
    tile_n = program % own_n
    tile_m = program // own_n % own_m
    split = program // own_n // own_m % splits
    mask_pair = program // own_n // own_m // splits
    mask_batch = mask_pair // mask_heads
    mask_head = mask_pair % mask_heads

    share = tl.cdiv(members, splits)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for member in range(split * share, tl.minimum(split * share + share, members)):
        rest = member
        first = tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        if not PER_KEY:
            column = (rest % tiles_n).to(tl.int32) * BLOCK_N
            rest = rest // tiles_n
        if not PER_QUERY:
            first = (rest % tiles_m).to(tl.int32) * BLOCK_M
            rest = rest // tiles_m
        i = first + tl.arange(0, BLOCK_M)
        j = column + tl.arange(0, BLOCK_N)
        sequence = mask_batch + (rest // summed_heads).to(tl.int32)
        head = mask_head + (rest % summed_heads).to(tl.int32)
        batch = sequence
        begin_q = tl.full((), 0, tl.int32)
        begin_k = begin_q
        queries = seqlen_q
        keys = seqlen_k
        if starts_q is not None:
            batch = begin_q
            begin_q, queries = bounds_of(starts_q, sequence, count, seqlen_q)
            begin_k, keys = bounds_of(starts_k, sequence, count, seqlen_k)
        low, high, shift = band_of(queries, keys, align, left, right)
        seen = (first < queries) & (column < keys)
        if RIGHT:
            seen = seen & (column <= first + BLOCK_M - 1 + high)
        if LEFT:
            seen = seen & (column + BLOCK_N - 1 >= first + low)
        if seen:
            q_head = head_of(Q, batch, head, q_strides) + begin_q.to(tl.int64) * q_strides[2]
            q = load_rows(q_head, first, queries, q_strides[2], D_K, BLOCK_M, BLOCK_DK, True)
            k_head = head_of(K, batch, head // group, k_strides) + begin_k.to(tl.int64) * k_strides[2]
            k = load_rows(k_head, column, keys, k_strides[2], D_K, BLOCK_N, BLOCK_DK, True)
            qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            s, _, _ = scores(
                qk, terms, (sequence, head), i[:, None], j[None, :], (queries, keys), (low, high, shift),
                scale, softcap, SOFTCAP, LEFT, RIGHT, True, True,
            )  # fmt: skip
            row = (batch.to(tl.int64) * heads + head) * seqlen_q + begin_q
            top, weight = softmax_of_row(TOP + row, WEIGHT + row if EXACT else None, i, queries)
            p = probabilities(s, top[:, None], weight[:, None], NATURAL, EXACT)
            do_head = head_of(DO, batch, head, do_strides) + begin_q.to(tl.int64) * do_strides[2]
            do = load_rows(do_head, first, queries, do_strides[2], D_V, BLOCK_M, BLOCK_DV, True)
            v_head = head_of(V, batch, head // group, v_strides) + begin_k.to(tl.int64) * v_strides[2]
            v = load_rows(v_head, column, keys, v_strides[2], D_V, BLOCK_N, BLOCK_DV, True)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            if dropout is not None:
                dp = dp * kept(dropout, row + first, column, BLOCK_M, BLOCK_N)
            delta = tl.load(DELTA + row + i, mask=i < queries, other=0.0)
            total += p * (dp - delta[:, None])

    # dS is zero past the last query and key.
    i = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    last_row = rows
    last_column = columns
    if not PER_QUERY:
        total = tl.sum(total, axis=0)[None, :]
        i = tl.arange(0, 1)
        last_row = 1
    if not PER_KEY:
        total = tl.sum(total, axis=1)[:, None]
        j = tl.arange(0, 1)
        last_column = 1
    mask_pairs = tl.num_programs(0) // own_n // own_m // splits
    head_start = (split.to(tl.int64) * mask_pairs + mask_pair) * last_row * last_column
    at = DMASK + head_start + i[:, None].to(tl.int64) * last_column + j[None, :]
    tl.store(at, total.to(DMASK.dtype.element_ty), mask=(i < last_row)[:, None] & (j < last_column)[None, :])


def mask_gradient(
    dmask: torch.Tensor,
    operands: Operands,
    do: torch.Tensor,
    top: torch.Tensor,
    weight: torch.Tensor | None,
    delta: torch.Tensor,
) -> None:
    """Launch, and write the mask's gradient to ``dmask``: contiguous, shape and dtype of the mask."""
    heads, seqlen_q = operands.q.shape[1:3]
    seqlen_k = operands.k.shape[2]
    mask_batches, mask_heads, mask_rows, mask_columns = dmask.shape
    if dmask.numel() == 0:
        return
    summed_heads = heads // mask_heads
    summed = operands.sequence_count // mask_batches * summed_heads
    if summed == 0 or seqlen_k == 0:
        dmask.zero_()
        return
    packed = bool(operands.options.sequences)
    per_query = mask_rows != 1 if packed else mask_rows == seqlen_q
    per_key = mask_columns != 1 if packed else mask_columns == seqlen_k
    # Packed sequences may be shorter than the mask. Where it has one row, theirs are at most all tokens.
    rows, columns = (mask_rows if per_query else seqlen_q), (mask_columns if per_key else seqlen_k)
    config = operands.config("backward_mask")
    tiles_m, tiles_n = ceil_div(rows, config.block_m), ceil_div(columns, config.block_n)
    tiles = (tiles_m if per_query else 1) * (tiles_n if per_key else 1) * mask_batches * mask_heads
    members = summed * (1 if per_query else tiles_m) * (1 if per_key else tiles_n)
    # A small mask has few tiles: then several programs share what each is the sum of.
    splits = min(members, max(1, 2 * device_facts(dmask.device).multiprocessor_count // tiles))
    direct = splits == 1
    shape = (splits, *dmask.shape)
    parts = dmask if direct else torch.empty(shape, dtype=torch.float32, device=dmask.device)
    flags = operands.flags("backward_mask", config)
    backward_mask_kernel[(tiles * splits,)](
        operands.q, operands.k, operands.v, do, top, weight, delta, parts, *operands.strides, strides_of(do),
        operands.terms, operands.dropout, *operands.starts, *operands.sizes, operands.scale, operands.softcap,
        rows, columns, mask_heads, summed, summed_heads, splits, PER_QUERY=per_query, PER_KEY=per_key, **flags,
    )  # fmt: skip
    if not direct:
        dmask.copy_(parts.sum(0))
