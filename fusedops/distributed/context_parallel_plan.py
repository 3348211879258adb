"""Which scores each rank computes in each step of ring attention: arithmetic alone, the same on every rank.

In step t rank r holds the keys of rank ``source = r - t``. Its queries and those keys are one or two pieces of the
sequence each; which of these meet, and in which band, follows from where they lie.
"""

from __future__ import annotations

import functools
import itertools
from typing import Literal, NamedTuple

Order = Literal["contiguous", "zigzag"]
ORDERS: tuple[Order, ...] = ("contiguous", "zigzag")

# (low, high): query i sees key j only if i + low ≤ j ≤ i + high; None: no limit.
Band = tuple[int | None, int | None]


class Piece(NamedTuple):
    """Consecutive positions that a rank holds: where they lie in its shard and in the sequence, and how many."""

    place: int
    start: int
    length: int


class Call(NamedTuple):
    """One call of attention: rows and columns of a rank's queries and of the keys it holds, and the band in them."""

    rows: slice
    columns: slice
    low: int | None
    high: int | None

    def scores(self) -> int:
        """How many pairs of query and key see each other, in each head."""
        keys = self.columns.stop - self.columns.start
        count = 0
        for i in range(self.rows.stop - self.rows.start):
            first = 0 if self.low is None else max(0, i + self.low)
            last = keys - 1 if self.high is None else min(keys - 1, i + self.high)
            count += max(0, last - first + 1)
        return count


class Layout(NamedTuple):
    """How a sequence lies on the ranks, and who sees whom.

    Attributes:
        world: how many ranks.
        length: of each rank's shard.
        order: contiguous: rank r has chunk r of ``world``; zigzag: chunks r and 2 · world - 1 - r of 2 · world.
        left, right: position i sees position j only if i - left ≤ j ≤ i + right; None: no limit.
    """

    world: int
    length: int
    order: Order
    left: int | None
    right: int | None

    def pieces(self, rank: int) -> list[Piece]:
        if self.order == "contiguous":
            return [Piece(0, rank * self.length, self.length)]
        half = self.length // 2
        return [Piece(0, rank * half, half), Piece(half, (2 * self.world - 1 - rank) * half, half)]

    def calls(self, rank: int, source: int) -> tuple[Call, ...]:
        """What rank computes of its queries and the keys of ``source``; () where none sees any."""
        return _calls_of_rank(self, rank)[source]

    def reach(self, source: int) -> int:
        """How many ranks further along the ring the keys of ``source`` are needed."""
        return _reaches(self)[source]

    def steps(self) -> int:
        """The last step in which any rank computes."""
        return max(_reaches(self))


@functools.lru_cache(maxsize=256)
def _calls_of_rank(layout: Layout, rank: int) -> tuple[tuple[Call, ...], ...]:
    mine = layout.pieces(rank)
    return tuple(tuple(_cover(layout, mine, layout.pieces(source))) for source in range(layout.world))


@functools.lru_cache(maxsize=256)
def _reaches(layout: Layout) -> tuple[int, ...]:
    return tuple(_reach(layout, source) for source in range(layout.world))


def _reach(layout: Layout, source: int) -> int:
    world, length = layout.world, layout.length
    if not length:
        return 0
    if layout.order == "contiguous":
        if source and (layout.right is None or layout.right > 0):
            return world - 1  # the rank before, which comes last, sees the first of these keys
        last = world - 1 - source
        # Queries of a rank n further on are at least (n - 1) · length + 1 ahead.
        return last if layout.left is None else min(last, -(-layout.left // length))
    keys = layout.pieces(source)
    for step in reversed(range(1, world)):
        if any(_band(layout, q, k) for q in layout.pieces((source + step) % world) for k in keys):
            return step
    return 0


def _within(low: int | None, high: int | None, rows: int, columns: int) -> Band | None:
    """The band in a rectangle, without limits that limit nothing there; None: nothing of the rectangle lies in it."""
    if not rows or not columns or (high is not None and high <= -rows) or (low is not None and low >= columns):
        return None
    return None if low is None or low <= 1 - rows else low, None if high is None or high >= columns - 1 else high


def _band(layout: Layout, q: Piece, k: Piece) -> Band | None:
    ahead = q.start - k.start
    low = None if layout.left is None else ahead - layout.left
    high = None if layout.right is None else ahead + layout.right
    return _within(low, high, q.length, k.length)


def _cover(layout: Layout, qs: list[Piece], ks: list[Piece]) -> list[Call]:
    """The fewest calls found that compute all that these pieces see of one another."""
    bands = {(q, k): _band(layout, q, k) for q in qs for k in ks}
    qs = [q for q in qs if any(bands[q, k] for k in ks)]
    ks = [k for k in ks if any(bands[q, k] for q in qs)]
    if not qs or not ks:
        return []
    rows, columns = (slice(s[0].place, s[-1].place + s[-1].length) for s in (qs, ks))
    # How far a pair's band is moved where its place is counted from the whole's corner.
    moved = {(q, k): (k.place - columns.start) - (q.place - rows.start) for q in qs for k in ks}
    lows, highs = {None: 0}, {None: 0}  # in order, without repetition
    for pair, by in moved.items():
        low, high = bands[pair] or (None, None)
        if low is not None:
            lows[low + by] = 0  # type: ignore[index]
        if high is not None:
            highs[high + by] = 0  # type: ignore[index]
    for low, high in itertools.product(lows, highs):
        if all(
            _within(_plus(low, -by), _plus(high, -by), q.length, k.length) == bands[q, k]
            for (q, k), by in moved.items()
        ):
            return [Call(rows, columns, low, high)]
    if len(qs) > 1:
        return [call for q in qs for call in _cover(layout, [q], ks)]
    return [call for k in ks for call in _cover(layout, qs, [k])]


def _plus(limit: int | None, by: int) -> int | None:
    return None if limit is None else limit + by
