"""What the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.compile import CompileWorker


@pytest.fixture(scope="module")
def compiler() -> Iterator[CompileWorker]:
    """A process that compiles the cases."""
    worker = CompileWorker()
    yield worker
    worker.close()
