"""Which of a kernel's loops is the hot one, and how often the compilers unrolled it.

Triton makes one turn of a loop of each of its steps; what turns that into machine code may make one turn of several. So
a step's matrix instructions are counted where nothing is unrolled yet: in PTX, and for AMD in the LLVM IR. In a loop
without any, the accesses to global memory are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fusedops.inspection.offline import Compiled
from fusedops.inspection.sass import Instruction, Kind, innermost_loops

_PTX = re.compile(
    r"^\s*(?:(?P<label>[$\w]+):(?!:)|(?P<guard>@!?%\w+\s+)?(?P<opcode>[a-z][\w.:]*)(?P<rest>[^;]*);)", re.MULTILINE
)
_PTX_MATRIX = re.compile(r"(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b.*")
_PTX_GLOBAL = re.compile(
    r"((ld|st)\.(volatile\.)?global|(atom|red)\.(\w+\.)*global|cp\.async\.c[ag]\.shared\.global)\b.*"
)
_LLVM = re.compile(r"^(?P<label>[\w.$-]+):|^[ \t]+(?P<line>\S.*)$", re.MULTILINE)
_LLVM_MATRIX = re.compile(r"@llvm\.amdgcn\.(mfma|smfmac|wmma|swmmac)\.")
_LLVM_GLOBAL = re.compile(
    r"(load|store|atomicrmw) [^@]*addrspace\(1\)|@llvm\.amdgcn\.(\w+\.)*buffer\.(load|store|atomic)"
)

# Accesses to global memory in machine code: NVIDIA's; AMD's.
GLOBAL = re.compile(r"LDG|STG|LDGSTS|RED|RED(G|UX)|ATOM|ATOMG|LD|ST|(global|buffer|flat)_\w+")


class HotLoop(NamedTuple):
    """The innermost loop that most of the work is done in.

    Attributes:
        number: which one of :func:`fusedops.inspection.sass.innermost_loops`.
        body, certain: its instructions (:class:`fusedops.inspection.flow.Loop`).
        steps: steps of Triton's loop that one turn makes; None: that is not to be told.
    """

    number: int
    body: frozenset[int]
    certain: frozenset[int]
    steps: int | None


def hot_loop(compiled: Compiled, instructions: Sequence[Instruction], labels: Mapping[str, int]) -> HotLoop | None:
    """The innermost loop with the most matrix instructions; of several, that with the fewest others.

    In a kernel without matrix instructions, that with the most instructions. None: there is no loop.

    Args:
        instructions, labels: the kernel's, as :func:`fusedops.inspection.sass.code` gives them.
    """
    found = innermost_loops(instructions, labels)
    if not found:
        return None
    counts = [counts_of(instructions, loop.body) for loop in found]
    most = max(count.matrix for count in counts)
    sizes = [len(loop.body) for loop in found]
    if most:
        number = min((n for n, count in enumerate(counts) if count.matrix == most), key=lambda n: sizes[n])
    else:
        number = sizes.index(max(sizes))
    return HotLoop(number, *found[number], steps_of(compiled, counts)[number])


class Counts(NamedTuple):
    """Of a loop: matrix instructions, and accesses to global memory."""

    matrix: int
    accesses: int

    @property
    def work(self) -> tuple[bool, int]:
        """What a step has a fixed number of: whether it is of matrix instructions, and how many."""
        return (True, self.matrix) if self.matrix else (False, self.accesses)


def counts_of(instructions: Sequence[Instruction], body: frozenset[int]) -> Counts:
    """Counts of a loop's machine code."""
    inside = [instructions[at] for at in body]
    return Counts(
        sum(one.kind == "matrix" for one in inside),
        sum(one.kind == "copy" and GLOBAL.fullmatch(one.opcode) is not None for one in inside),
    )


def steps_of(compiled: Compiled, found: Sequence[Counts]) -> list[int | None]:
    """Steps of Triton's loops that a turn of each innermost loop makes; None where that is not to be told.

    Args:
        found: what each of :func:`fusedops.inspection.sass.innermost_loops` consists of, in their order.
    """
    before = unrolled_counts(compiled)
    return [_steps(after, number, found, before) for number, after in enumerate(found)]


def _steps(after: Counts, number: int, found: Sequence[Counts], before: Sequence[Counts]) -> int | None:
    of_matrix, count = after.work
    alike = {other.work[1] for other in before if other.work[0] == of_matrix} - {0}
    if len(alike) == 1:
        step = alike.pop()
    elif len(before) == len(found):  # the loops stand in the same order
        step = before[number].work[1] if before[number].work[0] == of_matrix else 0
    else:
        return None
    steps, rest = divmod(count, step) if step else (0, 0)
    return steps if steps and not rest else None


def unrolled_counts(compiled: Compiled) -> list[Counts]:
    """Counts of the innermost loops before anything was unrolled, in the order of the code."""
    parsed = parse_ptx(compiled.asm["ptx"]) if "ptx" in compiled.asm else parse_llvm(compiled.asm["llir"])
    instructions, _ = parsed
    return [
        Counts(*(sum(instructions[at].kind == kind for at in loop.body) for kind in ("matrix", "copy")))
        for loop in innermost_loops(*parsed)
    ]


def matrix_sources(compiled: Compiled) -> list[list[Instruction]]:
    """The matrix instructions in the PTX of each innermost loop that has any."""
    instructions, labels = parse_ptx(compiled.asm["ptx"])
    loops = ([instructions[at] for at in sorted(loop.body)] for loop in innermost_loops(instructions, labels))
    found = ([one for one in loop if one.kind == "matrix"] for loop in loops)
    return [loop for loop in found if loop]


def parse_ptx(ptx: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions and labels of a kernel's PTX, as :func:`fusedops.inspection.sass.parse_sass` gives them.

    Of copies only those from and to global memory are told, and no barriers.
    """
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for found in _PTX.finditer(ptx.partition(".entry")[2].partition("{")[2]):
        if found["label"]:
            labels[found["label"]] = len(instructions)
            continue
        opcode = found["opcode"]
        jumps = opcode.partition(".")[0] == "bra"
        ends = (jumps or opcode in ("ret", "exit")) and not found["guard"]
        kind: Kind = "matrix" if _PTX_MATRIX.fullmatch(opcode) else "copy" if _PTX_GLOBAL.fullmatch(opcode) else "other"
        targets = (found["rest"].strip(),) if jumps else ()
        instructions.append(Instruction(opcode, kind, targets, not ends, found["rest"], found["guard"]))
    return instructions, labels


def parse_llvm(llir: str) -> tuple[list[Instruction], dict[str, int]]:
    """The same of a kernel's LLVM IR."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for found in _LLVM.finditer(llir.partition("define ")[2].partition("{\n")[2].partition("\n}")[0]):
        if found["label"]:
            labels[found["label"]] = len(instructions)
            continue
        line = found["line"]
        jumps = line.startswith("br ")
        kind: Kind = "matrix" if _LLVM_MATRIX.search(line) else "copy" if _LLVM_GLOBAL.search(line) else "other"
        targets = tuple(re.findall(r"label %([\w.$-]+)", line)) if jumps else ()
        ends = line.startswith(("br ", "ret "))
        instructions.append(Instruction(line.partition(" ")[0], kind, targets, not ends, line))
    return instructions, labels
