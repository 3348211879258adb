"""Bytes an element: those of a turn, of the tensors that count, in a tile that is filled or not."""

from __future__ import annotations

from typing import Any

import pytest

from fusedops.inspection.accesses import Access
from fusedops.inspection.elements import element_bytes
from fusedops.inspection.offline import Compiled
from fusedops.inspection.traffic import Traffic

THREADS = 128
# An access of 128 bits by every thread, of 16-bit elements.
TILE = THREADS * 8


def access(kind: Any, count: int, looped: bool, argument: str | None = "X", bits: int = 128) -> Access:
    return Access(argument, kind, bits, count, looped)


def found(*accesses: Access, tile: int = TILE, **itemsizes: int):
    constants = {"BLOCK_M": 1, "BLOCK_N": tile, "BLOCK_FLAG": "no size", "EVEN": True}
    compiled = Compiled("kernel", "sm_90", 32, 0, 0, 4, 1, 1, (), constants, 0.0, {})
    return element_bytes(compiled, Traffic(THREADS, accesses), itemsizes or {"X": 2})


@pytest.mark.parametrize(
    ("accesses", "loaded"),
    [
        # Copies before a loop that copies too are of its first turns, issued early.
        ([access("load", 4, False), access("load", 2, True), access("store", 1, False)], 4.0),
        ([access("load", 2, False), access("store", 1, True)], 4.0),
        ([access("load", 2, True), access("load", 3, False, "R")], 10.0),
        ([access("load", 1, True), access("load", 1, True, "W")], 2.0),  # a parameter does not count
    ],
)
def test_bytes_of_a_turn_are_those_of_the_loop(accesses, loaded):
    sizes = {"X": 2, "R": 2} if any(one.argument == "R" for one in accesses) else {"X": 2}
    assert found(*accesses, **sizes).loaded == loaded


def test_a_tile_that_does_not_fill_the_threads_counts_once():
    assert found(access("load", 1, False), tile=TILE // 4).loaded == 2.0


def test_where_no_argument_is_told_all_count():
    told = found(access("load", 2, True, None), access("load", 3, False, None))
    assert told.all_arguments
    assert told.loaded == 10.0


def test_widths_and_an_argument_that_may_be_either():
    told = found(access("load", 1, False, "X|R"), access("store", 8, False, bits=16))
    assert (told.bits, told.loaded, told.stored) == ((16, 128), 2.0, 2.0)
    assert found(access("load", 1, False, "W")).bits is None
