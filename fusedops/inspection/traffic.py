"""What a compiled kernel loads from global memory and stores there, read from its code.

Each access's address is followed back, through the arithmetic on registers, to the kernel's argument that it comes
from: in the PTX that Triton makes for NVIDIA's devices, in LLVM's code for AMD's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fusedops.inspection.accesses import Access, Kind
from fusedops.inspection.amd import amd_accesses
from fusedops.inspection.offline import Compiled, target_facts
from fusedops.inspection.ptx import ptx_accesses


@dataclass(frozen=True, slots=True)
class Traffic:
    """Accesses of one program to global memory.

    Bytes are those that the instructions move when every thread takes part: instructions × width × threads. So they
    are of the whole tile, what its masks leave out included, and each loop counts as one turn. Where a tile has fewer
    elements than the program has room for (threads × elements of an access), several threads own the same element:
    all of them load it, and are counted, though the memory is read once; one of them stores it, by a predicate,
    but all are counted. A tile that fills the threads has no such lanes, and bytes over its elements are exactly what
    an element costs.

    Attributes:
        threads: threads a program.
        accesses: sorted by argument, kind, loop and width.
    """

    threads: int
    accesses: tuple[Access, ...]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments whose memory is accessed."""
        return tuple(dict.fromkeys(a.argument for a in self.accesses if a.argument is not None))

    def loaded(self, argument: str | None = None, looped: bool | None = None) -> int:
        """Bytes that one program loads.

        Args:
            argument: from the memory of this one alone; None: of all.
            looped: in loops (True) or outside of them (False) alone; None: both.
        """
        return self._moved("load", argument, looped)

    def stored(self, argument: str | None = None, looped: bool | None = None) -> int:
        """Bytes that one program stores; ``argument`` and ``looped`` as of :meth:`loaded`."""
        return self._moved("store", argument, looped)

    def widths(self, argument: str | None = None, kind: Kind | None = None) -> tuple[int, ...]:
        """The widths of accesses that occur, in bits a thread, narrowest first; empty where there is no such access.

        Args:
            argument: of this one's memory alone; None: of all.
            kind: ``"load"`` or ``"store"`` alone; None: both.
        """
        return tuple(sorted({a.bits for a in self._chosen(kind, argument, None)}))

    def _moved(self, kind: Kind, argument: str | None, looped: bool | None) -> int:
        return sum(a.bits // 8 * a.count * self.threads for a in self._chosen(kind, argument, looped))

    def _chosen(self, kind: Kind | None, argument: str | None, looped: bool | None) -> Iterator[Access]:
        for access in self.accesses:
            if kind in (None, access.kind) and argument in (None, access.argument) and looped in (None, access.looped):
                yield access


def memory_traffic(compiled: Compiled) -> Traffic:
    """What one program of a compiled kernel loads and stores.

    Args:
        compiled: the kernel.

    Returns:
        Its accesses to global memory; bytes and widths by argument.

    Raises:
        ValueError: the kernel holds what is not counted here: copies by tensor descriptors, or calls of functions
            that were not inlined.

    Examples:
        >>> import torch, fusedops
        >>> from fusedops.inspection.offline import compile_launches
        >>> from fusedops.inspection.traffic import memory_traffic
        >>> with fusedops.backend("triton"):
        ...     x = torch.ones(4, 4096)
        ...     kernel = compile_launches("sm_90", lambda: fusedops.rms_norm(x, 4096))[0]
        >>> traffic = memory_traffic(kernel)
        >>> traffic.widths("X", "load"), traffic.loaded("X") / (4096 * x.element_size())
        ((128,), 1.0)
    """
    facts = target_facts(compiled.target)
    if facts.vendor == "amd":
        accesses = amd_accesses(compiled.asm["amdgcn"], compiled.asm.get("llir"), compiled.parameters)
    else:
        accesses = ptx_accesses(compiled.asm["ptx"], compiled.parameters)
    return Traffic(compiled.num_ctas * compiled.num_warps * facts.warp_size, accesses)
