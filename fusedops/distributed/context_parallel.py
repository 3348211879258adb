"""Attention over a sequence whose positions lie on several ranks, and what belongs to it: shards and position ids."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist

from fusedops.attention.arguments import Causal, Modifiers, Window
from fusedops.attention.functional import _unsupported, attention
from fusedops.attention.options import Options
from fusedops.distributed.context_parallel_checks import (
    FUNCTION,
    check_agreement,
    check_call,
    check_group,
    check_options,
    check_order,
    check_shard,
)
from fusedops.distributed.context_parallel_plan import Layout, Order
from fusedops.runtime.backend import explainable, might_use_triton, use_triton
from fusedops.runtime.checks import check_count, wrong_type, wrong_value
from fusedops.runtime.precision import autocast_dtype, float32_precision

Method = Literal["ring", "all_to_all"]


def _reasons(  # type: ignore[no-untyped-def]
    q, k, v, *, group=None, method="ring", order="contiguous", causal=False, window=None, attn_mask=None,
    alibi_slopes=None, sinks=None, softcap=0.0, scale=None, dropout_p=0.0, document_ids=None, return_lse=False,
):  # fmt: skip
    _, world = check_call(q, k, v, group, order, method, return_lse)
    given = Modifiers(causal, window, attn_mask, alibi_slopes, sinks, softcap, scale, dropout_p, None, None)
    options = check_options(q, given, document_ids, world, method)
    return q.device, _unsupported(q, k, v, options)


@explainable(_reasons)
def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any = None,
    method: Method = "ring",
    order: Order = "contiguous",
    causal: Causal = False,
    window: Window | None = None,
    attn_mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    document_ids: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`fusedops.attention` of one sequence that is cut along its length over the ranks of a process group.

    Every rank calls it with its own shard and the same other arguments, and gets its shard of the result; backwards
    too have to run on every rank.

    * ``"ring"`` (Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context"): keys and
      values travel round the group while attention is computed with those that are there; parts are merged in float32
      by their softmax statistics. No rank ever holds more than three shards of keys and values. Blocks that no query
      of a rank sees are not computed, and not sent to where nobody needs them.
    * ``"all_to_all"`` (Jacobs et al. 2023, "DeepSpeed Ulysses"): each rank exchanges its positions of all heads for all
      positions of its share of the heads, attends, and exchanges back. It takes every option. The ranks have to divide
      q's heads; where k has fewer heads than there are ranks, its heads have to divide the ranks.

    Args:
        q: (batch, heads, length, size), the rank's shard; of the same length on every rank. Dtypes, sizes and strides
            as of :func:`fusedops.attention`.
        k: (batch, kv_heads, length, size), kv_heads a divisor of heads.
        v: (batch, kv_heads, length, size_v).
        group: a process group, or a DeviceMesh of one dimension. None: the default group; without torch.distributed
            initialised there is one rank, and this is :func:`fusedops.attention`.
        method: ``"ring"`` or ``"all_to_all"``.
        order: which positions a rank has. ``"contiguous"``: rank r of P has chunk r of P. ``"zigzag"``: chunks r and
            2P - 1 - r of 2P, so that under ``causal`` every rank has as much to compute. :func:`shard_sequence` cuts a
            sequence so, :func:`positions` says where it lies.
        causal, window, softcap, scale: as of :func:`fusedops.attention`, positions and distances those of the whole
            sequence.
        sinks: (heads,), the same on every rank. Its gradient is this rank's part: sum it over the group, as every
            parameter's.
        attn_mask: for ``"all_to_all"``; broadcastable to (batch, heads, P · length, P · length), in the sequence's own
            order whatever ``order`` is. Its gradient is this rank's part, of its heads.
        alibi_slopes: for ``"all_to_all"``; (heads,) or (batch, heads). Its gradient is this rank's part.
        dropout_p: for ``"all_to_all"``; seed the ranks' generators differently, or heads of different ranks drop the
            same weights.
        document_ids: for ``"all_to_all"``; (batch, P · length) or (P · length,), in the sequence's own order.
        return_lse: return the logarithm of the softmax's denominator too.

    Returns:
        out: (batch, heads, length, size_v), as :func:`fusedops.attention`.
        lse: with ``return_lse``, (batch, heads, length) float32, of the whole sequence's keys. It has a gradient.

    Gradients are those of the sum of all ranks' losses, and the same to the bit on every run. Under torch.compile it is
    a graph break.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device, or differs between the ranks (the
            first time that such a call is made; then all ranks raise); the message names it.

    Examples:
        >>> import torch, fusedops
        >>> from fusedops.distributed import context_parallel_attention
        >>> q = k = v = torch.randn(1, 4, 6, 32)  # on P ranks: of a sequence of 6 · P positions
        >>> out = context_parallel_attention(q, k, v, order="zigzag", causal=True)
        >>> out.shape, torch.equal(out, fusedops.attention(q, k, v, causal=True))  # one rank has all of it
        (torch.Size([1, 4, 6, 32]), True)
    """
    if torch.compiler.is_compiling():
        from fusedops.distributed.context_parallel_eager import run

        run_or_call = run
    else:
        run_or_call = _run
    given = Modifiers(causal, window, attn_mask, alibi_slopes, sinks, softcap, scale, dropout_p, None, None)
    return run_or_call(q, k, v, group, method, order, given, document_ids, return_lse)


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Any,
    method: Method,
    order: Order,
    given: Modifiers,
    document_ids: Any,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    group, world = check_call(q, k, v, group, order, method, return_lse)
    options = check_options(q, given, document_ids, world, method)
    if group is None:
        return _attend(q, k, v, given, document_ids, return_lse)
    check_agreement(q, k, v, group, order, method, options, return_lse)
    check_shard(q, k, world, order, method)
    dtype = autocast_dtype(q)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if method == "ring":
        out, lse = _ring(q, k, v, group, order, options)
        return (out, lse) if return_lse else out
    return _all_to_all(q, k, v, group, order, given, document_ids, return_lse)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Modifiers, document_ids: Any, return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    return attention(
        q, k, v, causal=given.causal, window=given.window, attn_mask=given.attn_mask, alibi_slopes=given.alibi_slopes,
        sinks=given.sinks, softcap=given.softcap, scale=given.scale, dropout_p=given.dropout_p,
        document_ids=document_ids, return_lse=return_lse,
    )  # fmt: skip


def _ring(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any, order: Order, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    from fusedops.distributed.context_parallel_ring import Ring, RingAttention

    layout = Layout(dist.get_world_size(group), q.shape[2], order, options.left, options.right)
    # Every part has bounds of its own, and the sinks come last.
    parts = options._replace(sinks=None, bottom_right=False).completed(q.shape[3], None, float32_precision(q))
    kernels = might_use_triton(q.device) and use_triton(FUNCTION, _unsupported(q, k, v, parts), q.device)
    ring = Ring(group, dist.get_rank(group), layout)
    return RingAttention.apply(q, k, v, options.sinks, ring, parts, kernels)


def _all_to_all(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Any,
    order: Order,
    given: Modifiers,
    document_ids: Any,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    from fusedops.distributed.context_parallel_exchange import heads_for_positions, positions_for_heads

    world, rank = dist.get_world_size(group), dist.get_rank(group)
    heads = q.shape[1] // world
    mine = slice(rank * heads, (rank + 1) * heads)
    if 0 < k.shape[1] < world:  # several ranks need the same head
        k, v = (t.repeat_interleave(world // t.shape[1], 1) for t in (k, v))
    q, k, v = (heads_for_positions(t, group, order) for t in (q, k, v))
    mask, slopes, sinks = given.attn_mask, given.alibi_slopes, given.sinks
    if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
        mask = mask[..., mine, :, :]
    given = given._replace(
        attn_mask=mask,
        alibi_slopes=None if slopes is None else slopes[..., mine],
        sinks=None if sinks is None else sinks[mine],
    )
    result = _attend(q, k, v, given, document_ids, return_lse)
    if isinstance(result, tuple):
        out, lse = (positions_for_heads(t, group, order) for t in result)
        return out, lse
    return positions_for_heads(result, group, order)


def positions(
    seqlen: int, *, group: Any = None, order: Order = "contiguous", device: torch.device | str | None = None
) -> torch.Tensor:
    """Which positions of a sequence this rank's shard has: what rotary embeddings, or learned ones, are taken at.

    Args:
        seqlen: of the whole sequence; a multiple of the ranks, of twice the ranks for ``"zigzag"``.
        group, order: as of :func:`context_parallel_attention`.
        device: of the result.

    Returns:
        (seqlen / ranks,) int64.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or value; the message names it.

    Examples:
        >>> from fusedops.distributed import positions
        >>> positions(6, order="zigzag")  # one rank; rank 0 of 2 has 0, 1 and 6, 7 of 8
        tensor([0, 1, 2, 3, 4, 5])
    """
    check_count("positions", "seqlen", seqlen)
    check_order("positions", order)
    group = check_group("positions", group)
    if group is None:
        return torch.arange(seqlen, device=device)
    layout = _layout("positions", "seqlen", seqlen, seqlen, group, order)
    pieces = layout.pieces(dist.get_rank(group))
    return torch.cat([torch.arange(p.start, p.start + p.length, device=device) for p in pieces])


def shard_sequence(
    tensor: torch.Tensor, dim: int = 1, *, group: Any = None, order: Order = "contiguous"
) -> torch.Tensor:
    """This rank's positions of a sequence that every rank has: tokens, labels, position ids, embeddings.

    Nothing is sent. In a backward the other positions get zeros: the gradient is this rank's part.

    Args:
        tensor: of any shape and dtype.
        dim: along which the positions lie; its size a multiple of the ranks, of twice the ranks for ``"zigzag"``.
        group, order: as of :func:`context_parallel_attention`.

    Returns:
        The shape of ``tensor``, ``dim`` divided by the ranks. A view where order is ``"contiguous"``.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or value; the message names it.

    Examples:
        >>> import torch
        >>> from fusedops.distributed import shard_sequence
        >>> shard_sequence(torch.zeros(2, 8), order="zigzag").shape  # one rank has all of it
        torch.Size([2, 8])
    """
    dim = _check_tensor("shard_sequence", tensor, dim)
    check_order("shard_sequence", order)
    group = check_group("shard_sequence", group)
    if group is None:
        return tensor
    layout = _layout("shard_sequence", "tensor", tensor, tensor.shape[dim], group, order)
    parts = [tensor.narrow(dim, p.start, p.length) for p in layout.pieces(dist.get_rank(group))]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def unshard_sequence(
    tensor: torch.Tensor, dim: int = 1, *, group: Any = None, order: Order = "contiguous"
) -> torch.Tensor:
    """The whole sequence on every rank, of the shards that the ranks have: the way back from :func:`shard_sequence`.

    All ranks have to call it, and run its backward, in which a shard gets the sum of what all ranks' losses give it.

    Args:
        tensor: this rank's shard; of the same shape and dtype on every rank.
        dim: along which the positions lie.
        group, order: as of :func:`context_parallel_attention`.

    Returns:
        The shape of ``tensor``, ``dim`` times the ranks.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or value; the message names it.

    Examples:
        >>> import torch
        >>> from fusedops.distributed import unshard_sequence
        >>> unshard_sequence(torch.zeros(2, 8)).shape  # one rank has all of it
        torch.Size([2, 8])
    """
    dim = _check_tensor("unshard_sequence", tensor, dim)
    check_order("unshard_sequence", order)
    group = check_group("unshard_sequence", group)
    if group is None:
        return tensor
    if order == "zigzag" and tensor.shape[dim] % 2:
        wrong_value("unshard_sequence", "tensor", f'of an even size in dimension {dim} for order="zigzag"', tensor)
    from fusedops.distributed.context_parallel_exchange import Gather, from_ranks

    return from_ranks(Gather.apply(tensor, group), dim, order)


def _check_tensor(function: str, tensor: Any, dim: Any) -> int:
    """The dimension, counted from the first."""
    if not isinstance(tensor, torch.Tensor):
        wrong_type(function, "tensor", "a torch.Tensor", tensor)
    if not isinstance(dim, int) or isinstance(dim, bool):
        wrong_type(function, "dim", "an int", dim)
    if not -tensor.dim() <= dim < tensor.dim():
        wrong_value(function, "dim", f"a dimension of the tensor, which has {tensor.dim()}", dim)
    return dim % tensor.dim()


def _layout(function: str, argument: str, value: Any, seqlen: int, group: Any, order: Order) -> Layout:
    world = dist.get_world_size(group)
    chunks = world if order == "contiguous" else 2 * world
    if seqlen % chunks:
        takes = f'of a length that is a multiple of {chunks} ({world} ranks, order="{order}"): pad it'
        wrong_value(function, argument, takes, value)
    return Layout(world, seqlen // world, order, None, None)
