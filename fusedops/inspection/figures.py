"""What a compiled kernel occupies, what its hot loop consists of, and how fast it can be at best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fusedops.inspection.bound import Bound, bound_of
from fusedops.inspection.loops import HotLoop, hot_loop
from fusedops.inspection.occupancy import occupancy_of
from fusedops.inspection.offline import Compiled, target_facts
from fusedops.inspection.sass import Instruction, code, serialised
from fusedops.inspection.traffic import memory_traffic
from fusedops.runtime.device import DeviceFacts


@dataclass(frozen=True, slots=True)
class LoopFigures:
    """Instructions of a kernel's hot loop by kind, each counted once, where it stands.

    Attributes:
        matrix: of the matrix units.
        special: of the special-function units: exponentials, reciprocals, square roots.
        memory: loads, stores and copies, of global and of shared memory.
        other: all others: arithmetic, addresses, barriers, jumps.
        steps: steps of Triton's loop that one turn makes, for it may be unrolled; None: that is not to be told.
    """

    matrix: int
    special: int
    memory: int
    other: int
    steps: int | None


@dataclass(frozen=True, slots=True)
class Figures:
    """One kernel, compiled for a target.

    Attributes:
        name, target, num_warps, num_stages, registers, spill_bytes, shared: as of
            :class:`fusedops.inspection.offline.Compiled`.
        blocks_per_multiprocessor: blocks of threads that a multiprocessor (compute unit) holds at once.
        occupancy: share of the warps (wavefronts) that it has room for.
        occupancy_limit: what keeps more blocks away (:class:`fusedops.inspection.occupancy.Occupancy`).
        instructions: of the whole kernel.
        loop: of the innermost loop with the most matrix instructions, of several that with the fewest others; without
            any matrix instruction, of that with the most instructions. None: the kernel has no loop.
        loaded, stored: bytes that a program moves from and to global memory, each loop's turn counted once
            (:class:`fusedops.inspection.traffic.Traffic`). None: not to be told, for tensor descriptors do.
        widths: of loads from global memory, in bits a thread, narrowest first.
        serialised: the assembler makes the kernel wait for each single asynchronous product (ptxas' warning C7511).
        bound: share of the peak that it cannot exceed; None: not to be told.
    """

    name: str
    target: str
    num_warps: int
    num_stages: int | None
    registers: int
    spill_bytes: int
    shared: int
    blocks_per_multiprocessor: int
    occupancy: float
    occupancy_limit: str
    instructions: int
    loop: LoopFigures | None
    loaded: int | None
    stored: int | None
    widths: tuple[int, ...]
    serialised: bool
    bound: Bound | None


def figures(compiled: Compiled, facts: DeviceFacts | None = None, memory_bound: bool | None = None) -> Figures:
    """All that the code of a compiled kernel tells.

    Args:
        compiled: the kernel.
        facts: of the device that occupancy and bound are of; None: of the product that stands for the target.
        memory_bound: the bound is of the memory's bandwidth though there are matrix instructions, as in decoding; None:
            it is where there are none.

    Returns:
        Resources, occupancy, instructions, bytes and the bound.

    Raises:
        ToolError: one of NVIDIA's binary tools is missing or fails.

    Examples:
        >>> import torch, fusedops
        >>> from fusedops.inspection.figures import figures
        >>> from fusedops.inspection.offline import compile_launches
        >>> x = torch.ones(4, 4096)
        >>> with fusedops.backend("triton"):
        ...     kernel = compile_launches("sm_90", lambda: fusedops.rms_norm(x, 4096))[0]
        >>> found = figures(kernel)
        >>> found.spill_bytes, found.widths, found.loaded == 4096 * 4  # a program loads a row
        (0, (128,), True)
    """
    instructions, labels = code(compiled)
    loop = hot_loop(compiled, instructions, labels)
    facts = facts or target_facts(compiled.target)
    held = occupancy_of(compiled, facts)
    try:
        traffic = memory_traffic(compiled)
    except ValueError:
        traffic = None
    return Figures(
        name=compiled.name,
        target=compiled.target,
        num_warps=compiled.num_warps,
        num_stages=compiled.num_stages,
        registers=compiled.registers,
        spill_bytes=compiled.spill_bytes,
        shared=compiled.shared,
        blocks_per_multiprocessor=held.blocks,
        occupancy=held.share,
        occupancy_limit=held.limit,
        instructions=len(instructions),
        loop=None if loop is None else _loop(instructions, loop),
        loaded=None if traffic is None else traffic.loaded(),
        stored=None if traffic is None else traffic.stored(),
        widths=() if traffic is None else traffic.widths(kind="load"),
        serialised=serialised(compiled),
        bound=bound_of(compiled, facts, instructions, labels, loop, memory_bound),
    )


def _loop(instructions: Sequence[Instruction], loop: HotLoop) -> LoopFigures:
    kinds = Counter(instructions[at].kind for at in loop.body)
    return LoopFigures(kinds["matrix"], kinds["special"], kinds["copy"], kinds["barrier"] + kinds["other"], loop.steps)
