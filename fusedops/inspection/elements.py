"""Bytes that a kernel moves for each element of its operator's tensors: the measure of one that is bound by memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fusedops.inspection.accesses import Access, Kind
from fusedops.inspection.offline import Compiled
from fusedops.inspection.traffic import Traffic


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """What is moved for an element.

    Attributes:
        tile: elements that a program holds at once.
        loaded, stored: bytes an element. 0 where the kernel touches no such tensor.
        bits: the narrowest and the widest of these accesses, in bits a thread; None where there is none.
        all_arguments: the code did not tell the arguments apart (AMD, seldom): the figures are of all of them.
    """

    tile: int
    loaded: float
    stored: float
    bits: tuple[int, int] | None
    all_arguments: bool


def element_bytes(compiled: Compiled, traffic: Traffic, itemsizes: Mapping[str, int]) -> ElementBytes:
    """Bytes an element of some of a kernel's tensors.

    Args:
        compiled: the kernel. Its tile is the product of its compile-time arguments named ``BLOCK…``, by the custom of
            Triton kernels: one a dimension.
        traffic: of it.
        itemsizes: bytes an element of each of the tensors, by the argument's name. Others do not count: parameters,
            statistics, partial sums.
    """
    tile = math.prod(v for k, v in compiled.constants.items() if k.startswith("BLOCK") and isinstance(v, int))
    all_arguments = bool(itemsizes) and not traffic.arguments
    chosen: list[tuple[Access, int]] = []
    for access in traffic.accesses:
        moved = traffic.threads * access.bits // 8
        sizes = [itemsizes[name] for name in (access.argument or "").split("|") if name in itemsizes]
        if sizes:
            # An instruction that has more room than the tile has elements does some of them in several threads.
            chosen.append((access, min(moved, tile * max(sizes))))
        elif all_arguments:
            chosen.append((access, moved))
    bits = [access.bits for access, _ in chosen]
    return ElementBytes(
        tile=tile,
        loaded=_a_turn(chosen, "load") / tile,
        stored=_a_turn(chosen, "store") / tile,
        bits=(min(bits), max(bits)) if bits else None,
        all_arguments=all_arguments,
    )


def _a_turn(chosen: list[tuple[Access, int]], kind: Kind) -> int:
    """Bytes that a program moves for each of its tiles: every access stands for a whole one.

    Copies of an argument before a loop that also copies it are the loop's first turns, issued early: its turns tell.
    """
    looped = {access.argument for access, _ in chosen if access.looped and access.kind == kind} - {None}
    return sum(
        each * access.count
        for access, each in chosen
        if access.kind == kind and (access.looped or access.argument not in looped)
    )
