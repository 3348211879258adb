"""The number of rows is a run-time value of the norms' kernels: a new one compiles nothing new."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def test_a_new_batch_of_group_norm(compiler):
    found = compiler.call("tests.compile.norm_variants:groups")
    assert len(found) == 8  # all of group norm's kernels
    assert set(found.values()) == {1}


def test_a_new_number_of_rows(compiler):
    found = compiler.call("tests.compile.norm_variants:rows")
    # Held: forward and backward; looped: forward, means and columns; each in both layouts; and two widths of sums.
    assert len(found) == 2 * 2 + 3 * 2 + 2
    assert set(found.values()) == {1}
