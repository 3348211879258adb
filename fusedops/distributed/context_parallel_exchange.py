"""Parts of tensors exchanged between all ranks: heads for positions and back, shards gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fusedops.distributed.context_parallel_plan import Order

# torch 2.13 gave it another name, and warns of the old one. None: torch was built without torch.distributed.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class Exchange(torch.autograd.Function):
    """(ranks, …): part p goes to rank p, and comes back as part ``rank`` of its result. It is its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        if sent.numel():
            # As bytes: no backend takes all dtypes.
            dist.all_to_all_single(received.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return Exchange.apply(grad, ctx.group), None


class Gather(torch.autograd.Function):
    """Every rank's shard, (ranks, …); a shard's gradient is the sum of what all ranks' losses give it."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        sent = shard.contiguous()
        gathered = sent.new_empty((dist.get_world_size(group), *sent.shape))
        if sent.numel():
            _all_gather(gathered.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        # Summed in the order of the ranks, in float32: the same to the bit every time.
        wide = torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else grad.dtype
        return Exchange.apply(grad, ctx.group).sum(0, dtype=wide).to(grad.dtype), None


def from_ranks(parts: torch.Tensor, dim: int, order: Order) -> torch.Tensor:
    """(ranks, …), each rank's shard along ``dim`` of the rest, as one sequence along that dimension."""
    if order == "contiguous":
        return parts.movedim(0, dim).flatten(dim, dim + 1)
    first, second = parts.unflatten(dim + 1, (2, -1)).unbind(dim + 1)
    # Chunks 0, 1, … of the ranks in order, then their second ones the other way round.
    return torch.cat((first, second.flip(0))).movedim(0, dim).flatten(dim, dim + 1)


def to_ranks(whole: torch.Tensor, world: int, dim: int, order: Order) -> torch.Tensor:
    """The way back: (ranks, …), each rank's shard."""
    if order == "contiguous":
        return whole.unflatten(dim, (world, -1)).movedim(dim, 0)
    chunks = whole.unflatten(dim, (2 * world, -1)).movedim(dim, 0)
    return torch.cat((chunks[:world], chunks[world:].flip(0)), dim + 1)


def heads_for_positions(x: torch.Tensor, group: Any, order: Order) -> torch.Tensor:
    """(batch, heads, length, …) of this rank's positions → (batch, heads / ranks, ranks · length, …) of its heads."""
    world = dist.get_world_size(group)
    return from_ranks(Exchange.apply(x.unflatten(1, (world, -1)).movedim(1, 0), group), 2, order)


def positions_for_heads(x: torch.Tensor, group: Any, order: Order) -> torch.Tensor:
    """The way back."""
    world = dist.get_world_size(group)
    return Exchange.apply(to_ranks(x, world, 2, order), group).movedim(0, 1).flatten(1, 2)
