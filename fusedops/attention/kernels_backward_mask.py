"""The gradient of attention's float mask: dS summed over the batches, heads, queries or keys it was broadcast to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.attention.kernels_tiles import head_of, load_rows, probabilities, scores, softmax_of_row
from fusedops.attention.operands import Operands, strides_of
from fusedops.runtime.device import device_facts
from fusedops.runtime.launch import ceil_div


@triton.jit(
    do_not_specialize=[
        "heads", "seqlen_q", "seqlen_k", "shift", "mask_heads", "summed", "summed_heads", "splits"
    ]
)  # fmt: skip
def backward_mask_kernel(
    Q,
    K,
    V,
    MASK,
    DO,
    TOP,
    TOTAL,
    DELTA,
    DMASK,  # (splits, mask batches, mask heads, rows, columns), contiguous
    q_strides,
    k_strides,
    v_strides,
    mask_strides,
    do_strides,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    shift,
    scale,
    mask_heads,
    summed,  # how many (batch, head) a mask's head is broadcast to
    summed_heads,  # how many heads of one batch
    splits,  # programs that share them
    PER_QUERY: tl.constexpr,  # DMASK has a row for each query, else for each tile of queries
    PER_KEY: tl.constexpr,
    EXACT: tl.constexpr,
    MASK_KIND: tl.constexpr,
    MASK_PER_QUERY: tl.constexpr,
    CAUSAL: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program owns a tile of queries and keys, and its share of the batches and heads that one mask head serves.

    It adds their dS; where the mask is broadcast over queries or keys, it adds up the tile's rows or columns too, and
    what is left to add (over tiles and splits) is left to torch.
    """
    tiles_n = tl.cdiv(seqlen_k, BLOCK_N)
    tiles_m = tl.cdiv(seqlen_q, BLOCK_M)
    program = tl.program_id(0)
    tile_n = program % tiles_n
    tile_m = program // tiles_n % tiles_m
    split = program // tiles_n // tiles_m % splits
    mask_pair = program // tiles_n // tiles_m // splits
    mask_batch = mask_pair // mask_heads
    mask_head = mask_pair % mask_heads
    row = tile_m * BLOCK_M
    column = tile_n * BLOCK_N
    i = row + tl.arange(0, BLOCK_M)
    j = column + tl.arange(0, BLOCK_N)

    share = tl.cdiv(summed, splits)
    first = split * share
    last = tl.minimum(first + share, summed)
    if CAUSAL:
        last = tl.where(column > row + BLOCK_M - 1 + shift, first, last)  # no query of the tile sees a key of it
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for member in range(first, last):
        batch = mask_batch + member // summed_heads
        head = mask_head + member % summed_heads
        q = load_rows(head_of(Q, batch, head, q_strides), row, seqlen_q, q_strides[2], D_K, BLOCK_M, BLOCK_DK, True)
        k_head = head_of(K, batch, head // group, k_strides)
        k = load_rows(k_head, column, seqlen_k, k_strides[2], D_K, BLOCK_N, BLOCK_DK, True)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s = scores(
            qk, head_of(MASK, batch, head, mask_strides), mask_strides, i[:, None], j[None, :],
            seqlen_q, seqlen_k, shift, scale, MASK_KIND, MASK_PER_QUERY, CAUSAL, EDGE=True,
        )  # fmt: skip
        statistics = (batch.to(tl.int64) * heads + head) * seqlen_q
        top, weight = softmax_of_row(TOP + statistics, TOTAL + statistics, i, seqlen_q, MASK_KIND, EXACT)
        p = probabilities(s, top[:, None], weight[:, None], MASK_KIND, EXACT)
        do = load_rows(head_of(DO, batch, head, do_strides), row, seqlen_q, do_strides[2], D_V, BLOCK_M, BLOCK_DV, True)
        v_head = head_of(V, batch, head // group, v_strides)
        v = load_rows(v_head, column, seqlen_k, v_strides[2], D_V, BLOCK_N, BLOCK_DV, True)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        delta = tl.load(DELTA + statistics + i, mask=i < seqlen_q, other=0.0)
        total += p * (dp - delta[:, None])

    # dS is zero past the last query and key.
    rows = seqlen_q
    columns = seqlen_k
    if not PER_QUERY:
        total = tl.sum(total, axis=0)[None, :]
        i = tile_m + tl.arange(0, 1)
        rows = tiles_m
    if not PER_KEY:
        total = tl.sum(total, axis=1)[:, None]
        j = tile_n + tl.arange(0, 1)
        columns = tiles_n
    mask_pairs = tl.num_programs(0) // tiles_n // tiles_m // splits
    head_start = (split.to(tl.int64) * mask_pairs + mask_pair) * rows * columns
    at = DMASK + head_start + i[:, None].to(tl.int64) * columns + j[None, :]
    tl.store(at, total.to(DMASK.dtype.element_ty), mask=(i < rows)[:, None] & (j < columns)[None, :])


def mask_gradient(
    dmask: torch.Tensor,
    operands: Operands,
    do: torch.Tensor,
    top: torch.Tensor,
    total: torch.Tensor,
    delta: torch.Tensor,
) -> None:
    """Launch, and write the mask's gradient to ``dmask``: contiguous, shape and dtype of the mask."""
    batches, heads, seqlen_q, _ = operands.q.shape
    seqlen_k = operands.k.shape[2]
    mask_batches, mask_heads, mask_rows, mask_columns = dmask.shape
    summed_heads = heads // mask_heads
    summed = batches // mask_batches * summed_heads
    per_query, per_key = mask_rows == seqlen_q, mask_columns == seqlen_k
    config = operands.config("backward_mask")
    tiles_m, tiles_n = ceil_div(seqlen_q, config.block_m), ceil_div(seqlen_k, config.block_n)
    tiles = tiles_m * tiles_n * mask_batches * mask_heads
    # A small mask has few tiles: then several programs share the batches and heads of each.
    splits = min(summed, max(1, 2 * device_facts(dmask.device).multiprocessor_count // tiles))
    direct = splits == 1 and per_query and per_key
    shape = (
        splits, mask_batches, mask_heads, seqlen_q if per_query else tiles_m, seqlen_k if per_key else tiles_n
    )  # fmt: skip
    parts = dmask if direct else torch.empty(shape, dtype=torch.float32, device=dmask.device)
    backward_mask_kernel[(tiles * splits,)](
        operands.q, operands.k, operands.v, operands.mask, do, top, total, delta, parts,
        *operands.strides, strides_of(do), *operands.sizes, operands.scale,
        mask_heads, summed, summed_heads, splits,
        PER_QUERY=per_query, PER_KEY=per_key, **operands.flags("backward_mask", config),
    )  # fmt: skip
    if not direct:
        over = [0]
        over += [] if per_query else [3]
        over += [] if per_key else [4]
        dmask.copy_(parts.sum(over).view(dmask.shape))
