"""Accesses to memory in a kernel's code, whatever the code's language: what the readers of each share."""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["load", "store"]

# Stands for all memory but the global one: what was stored there may be what is loaded.
MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Access:
    """Instructions of one kind in a kernel's code.

    Attributes:
        argument: the kernel's argument whose memory is accessed; ``"A|B"`` where it may be either. None where the
            address comes from none.
        kind: ``"load"`` or ``"store"``. An atomic is one of each.
        bits: what one thread moves by one such instruction: 128 is the widest before sm_100.
        count: how many there are.
        looped: they stand in a loop. The count is then of one turn of it.
    """

    argument: str | None
    kind: Kind
    bits: int
    count: int
    looped: bool


class Found(NamedTuple):
    """One instruction that accesses global memory; ``address`` are the registers that its address is made of."""

    position: int
    kind: Kind
    address: tuple[str, ...]
    bits: int


class Flow(NamedTuple):
    """An instruction that computes values from values."""

    written: Sequence[str]
    read: Sequence[str]


def follow(flows: Sequence[Flow], sources: dict[str, set[int]]) -> dict[str, set[int]]:
    """For each register, the pointer parameters (their indices) that its value was computed from.

    A register may be written in several places, as a loop's variables are: it has the pointers of all of them.

    Args:
        sources: the registers that begin with a parameter.
    """
    behind: dict[str, set[int]] = defaultdict(set, {name: set(indices) for name, indices in sources.items()})
    changed = True
    while changed:
        changed = False
        for written, read in flows:
            indices = {index for register in read for index in behind[register]}
            for register in written:
                if not indices <= behind[register]:
                    behind[register] |= indices
                    changed = True
    return behind


class Branch(NamedTuple):
    """A jump; ``falls_through``: or on to the next instruction. Without targets: the end."""

    position: int
    targets: Sequence[str]
    falls_through: bool


class Loops:
    """Which instructions stand in a loop: those whose basic block can be reached from itself.

    Args:
        labels: their positions.
        branches: in order of their positions.
    """

    def __init__(self, labels: Mapping[str, int], branches: Sequence[Branch]) -> None:
        targets = {labels[name] for branch in branches for name in branch.targets if name in labels}
        # A block begins at a label that is jumped to, and after each jump.
        self._begins = sorted({-1, *targets, *(branch.position + 1 for branch in branches)})
        following = [{number + 1} for number in range(len(self._begins))]
        for branch in branches:
            number = self._block(branch.position)
            next_ones = {self._block(labels[name]) for name in branch.targets if name in labels}
            following[number] = next_ones | ({number + 1} if branch.falls_through else set())
        self._cyclic = [self._reaches_itself(number, following) for number in range(len(following))]

    def __contains__(self, position: int) -> bool:
        return self._cyclic[self._block(position)]

    def _block(self, position: int) -> int:
        return bisect.bisect_right(self._begins, position) - 1

    @staticmethod
    def _reaches_itself(number: int, following: list[set[int]]) -> bool:
        seen: set[int] = set()
        waiting = [number]
        while waiting:
            reached = following[waiting.pop()] - seen
            seen |= reached
            waiting += [other for other in reached if other < len(following)]
        return number in seen


def grouped(
    found: Iterable[Found],
    loops: Loops,
    behind: dict[str, set[int]] | None = None,
    parameters: Sequence[str] = (),
) -> tuple[Access, ...]:
    """Count what is alike, sorted; ``behind`` is of :func:`follow`, None: arguments are not known."""
    counts: Counter[tuple[str, Kind, bool, int]] = Counter()
    for position, kind, address, bits in found:
        indices = sorted({index for register in address for index in behind[register]} if behind else ())
        # Triton appends pointers to scratch memory of its own to the kernel's parameters: these have no name.
        argument = "|".join(parameters[index] for index in indices if index < len(parameters))
        counts[argument, kind, position in loops, bits] += 1
    return tuple(
        Access(argument or None, kind, bits, count, looped)
        for (argument, kind, looped, bits), count in sorted(counts.items())
    )
