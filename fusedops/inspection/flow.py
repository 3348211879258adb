"""The control-flow graph of a kernel's code, and its loops.

Natural loops as by Aho, Lam, Sethi, Ullman, "Compilers", section 9.6: an edge back to a block that dominates its source
makes a loop of what reaches the source without passing that block. Loops of one header are one. Dominators by Cooper,
Harvey, Kennedy 2001, "A simple, fast dominance algorithm".
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol


class Step(Protocol):
    """What an instruction does to the flow; ``targets``: the labels it may jump to."""

    @property
    def targets(self) -> tuple[str, ...]: ...
    @property
    def falls_through(self) -> bool: ...


class Loop(NamedTuple):
    """A natural loop: indices of its instructions.

    Attributes:
        body: all of them.
        certain: those that every turn runs; what a turn may jump over is left out.
    """

    body: frozenset[int]
    certain: frozenset[int]


class Graph:
    """The basic blocks of a kernel's code and what may follow each.

    Args:
        instructions: the code.
        labels: for each the index of the instruction that follows it.
    """

    def __init__(self, instructions: Sequence[Step], labels: Mapping[str, int]) -> None:
        count = len(instructions)
        ends = (at for at, one in enumerate(instructions) if one.targets or not one.falls_through)
        self._starts = sorted(({0, *labels.values()} | {at + 1 for at in ends}) & set(range(count)))
        self._stops = [*self._starts[1:], count][: len(self._starts)]
        self._following: list[list[int]] = []
        for stop in self._stops:
            last = instructions[stop - 1]
            next_ones = {self._block(labels[name]) for name in last.targets if labels.get(name, count) < count}
            if last.falls_through and stop < count:
                next_ones.add(self._block(stop))
            self._following.append(sorted(next_ones))
        self._order = self._numbered()
        self._before: dict[int, list[int]] = {block: [] for block in self._order}
        for block in self._order:
            for other in self._following[block]:
                self._before[other].append(block)
        self._dominator = self._dominators()

    def loops(self) -> list[Loop]:
        """The natural loops, in the order of their headers."""
        sources: dict[int, list[int]] = {}
        for block in self._order:
            for header in self._following[block]:
                if header in self._above(block):
                    sources.setdefault(header, []).append(block)
        found = []
        for header in sorted(sources):
            body, waiting = {header}, list(sources[header])
            while waiting:
                block = waiting.pop()
                if block not in body:
                    body.add(block)
                    waiting += self._before[block]
            certain = set.intersection(*(set(self._above(source)) for source in sources[header])) & body
            found.append(Loop(self._instructions(body), self._instructions(certain)))
        return found

    def certain(self) -> frozenset[int]:
        """Instructions that the longest way to the end of the code passes for certain."""
        ends = [block for block in self._order if not self._following[block]]
        ways = (self._instructions(set(self._above(block))) for block in ends)
        return max(ways, key=len, default=frozenset())

    def _block(self, instruction: int) -> int:
        return bisect.bisect_right(self._starts, instruction) - 1

    def _instructions(self, blocks: set[int]) -> frozenset[int]:
        return frozenset(at for block in blocks for at in range(self._starts[block], self._stops[block]))

    def _numbered(self) -> list[int]:
        """The blocks that can be reached, in reverse postorder."""
        if not self._starts:
            return []
        done: list[int] = []
        seen = {0}
        waiting = [(0, iter(self._following[0]))]
        while waiting:
            block, rest = waiting[-1]
            fresh = next((other for other in rest if other not in seen), None)
            if fresh is None:
                done.append(block)
                waiting.pop()
            else:
                seen.add(fresh)
                waiting.append((fresh, iter(self._following[fresh])))
        return done[::-1]

    def _dominators(self) -> dict[int, int]:
        """The nearest block that every way to a block passes, by the block; the first one's is itself."""
        number = {block: place for place, block in enumerate(self._order)}
        found = {self._order[0]: self._order[0]} if self._order else {}
        changed = True
        while changed:
            changed = False
            for block in self._order[1:]:
                nearest: int | None = None
                for other in self._before[block]:
                    if other not in found:
                        continue
                    if nearest is None:
                        nearest = other
                    while nearest != other:
                        if number[nearest] > number[other]:
                            nearest = found[nearest]
                        else:
                            other = found[other]
                if nearest is not None and found.get(block) != nearest:
                    found[block], changed = nearest, True
        return found

    def _above(self, block: int) -> Iterator[int]:
        """A block and all that dominate it."""
        yield block
        while self._dominator[block] != block:
            block = self._dominator[block]
            yield block
