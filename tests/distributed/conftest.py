"""Groups of processes for the tests of what is distributed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.distributed.ranks import Ranks


def _ranks(world: int) -> Iterator[Ranks]:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch was built without gloo")
    ranks = Ranks(world)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    yield from _ranks(2)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    yield from _ranks(4)
