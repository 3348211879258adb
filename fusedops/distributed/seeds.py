"""Dropout's seed where the result is spread over devices."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

# Steps of 2⁶⁴ divided by the golden ratio: no two shards have the same seed, and neighbours share no pattern.
_STEP = 0x9E3779B97F4A7C15
_LARGEST = 2**63 - 1


def shard_dim(placement: Any) -> int | None:
    """The dimension that a placement shards, in one piece a rank or in several."""
    dim = getattr(placement, "dim", None)
    return dim if isinstance(dim, int) else None


def sharded_seed(seed: torch.Tensor, like: Any, residual: Any = None, weight: Any = None) -> torch.Tensor:
    """A seed for each shard of a result, as a DTensor of as many elements as there are shards.

    Ranks that hold the same shard get the same, if they have drawn ``seed`` alike: then a mask does not depend on which
    of them computes. Ranks that hold different shards get different ones. An operator's rules keep this one in step
    with the result: sharded where the result is.

    Args:
        seed: (1,) int64 of this rank's generator.
        like, residual: sharded as the result.
        weight: (out_features, in_features): where its rows are sharded, the result's last dimension is.
    """
    mesh = like.device_mesh
    placements: list[Any] = []
    index = 0
    for place, placement in enumerate(like.placements):
        dims = [shard_dim(placement)]
        dims += [] if not isinstance(residual, DTensor) else [shard_dim(residual.placements[place])]
        rows = isinstance(weight, DTensor) and shard_dim(weight.placements[place]) == 0
        if rows or any(dim is not None for dim in dims):
            placements.append(Shard(0))
            index = index * mesh.size(place) + mesh.get_local_rank(place)
        else:
            placements.append(Replicate())
    mixed = (seed + (index * _STEP & _LARGEST)) & _LARGEST
    return DTensor.from_local(mixed, mesh, placements, run_check=False)
