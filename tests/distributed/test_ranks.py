"""The groups of processes that the tests use."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import RankError


def summed(rank, world, tensor):
    total = tensor * (rank + 1)
    dist.all_reduce(total)
    return rank, world, os.getpid(), total


def failing(rank, world):
    if rank == 1:
        os._exit(3)
    raise ValueError("one has failed")


def test_results_come_in_the_order_of_the_ranks(two_ranks, four_ranks):
    for ranks in (two_ranks, four_ranks):
        results = ranks.run(summed, torch.ones(3))
        assert [(rank, world) for rank, world, *_ in results] == [(r, ranks.world) for r in range(ranks.world)]
        for *_, total in results:
            assert torch.equal(total, torch.full((3,), ranks.world * (ranks.world + 1) / 2))
        assert [pid for *_, pid, _ in ranks.run(summed, torch.ones(3))] == [pid for *_, pid, _ in results]


def test_failures_are_told_and_overcome(two_ranks):
    with pytest.raises(RankError, match=r"rank 0: [^$]*one has failed\s+rank 1: the process ended"):
        two_ranks.run(failing)
    assert [rank for rank, *_ in two_ranks.run(summed, torch.ones(1))] == [0, 1]
