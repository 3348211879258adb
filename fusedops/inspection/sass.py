"""Which instructions a compiled kernel's loops consist of, and what the assembler warns of.

NVIDIA: ``nvdisasm`` on the machine code. AMD: the assembly. The main loop of a matrix product is the innermost loop
with the most matrix instructions: what is issued there beside them, the copies and the barriers is overhead.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from fusedops.inspection.offline import Compiled, target_facts
from fusedops.inspection.resources import ptxas_report, run_tool

Kind = Literal["matrix", "copy", "barrier", "other"]

# Opcodes by their first part (HMMA of HMMA.16816.F32), as nvdisasm names them ("CUDA binary utilities", chapter
# "Instruction set reference"). UTC*MMA: the products of the tensor memory. WARPGROUP: the waits around HGMMA.
_MATRIX = re.compile(r"[BDHIOQ]G?MMA|UTC\w*MMA")
_COPY = re.compile(r"LD[GSLT]?|ST[GSLT]?|LDSM|STSM|LDGSTS|LDGMC|LDTM\w*|STTM\w*|UTMA(LDG|STG|PF|REDG)|UBLK\w+|UTCCP")
_BARRIER = re.compile(
    r"BAR|SYNCS|USYNCS|DEPBAR|LDGDEPBAR|ARRIVES|WARPGROUP|WARPGROUPSET|WARPSYNC|MEMBAR|FENCE|ERRBAR|UTCBAR|UTMACMDFLUSH|"
    r"ACQBULK|CGAERRBAR|UCGABAR_\w+"
)
# AMD's instruction set guides: matrix and vector memory instructions; waits.
_AMD_MATRIX = re.compile(r"v_(mfma|smfmac|wmma|swmmac)_\w+")
_AMD_COPY = re.compile(r"(global|buffer|flat|scratch|ds)_\w+")
_AMD_BARRIER = re.compile(r"s_(barrier|waitcnt|wait)\w*")

_SASS_LABEL = re.compile(r"^(\.L\w+):")
_SASS_LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<opcode>[A-Z]\w*)(?P<rest>[^;]*);")
_AMD_LABEL = re.compile(r"^([.\w$]+):")
_AMD_LINE = re.compile(r"^\s+(?P<opcode>[a-z]\w*)(?P<rest>[^;]*)")


@dataclass(frozen=True, slots=True)
class Mix:
    """Instructions of a stretch of code, counted where they stand: each once, however often it runs.

    Attributes:
        opcodes: how many there are of each, by kind and name; no-operations left out. The name is the first part of
            NVIDIA's opcode (``HGMMA``), all of AMD's.
    """

    opcodes: Mapping[tuple[Kind, str], int]

    def count(self, kind: Kind) -> int:
        """How many there are of a kind."""
        return sum(number for (k, _), number in self.opcodes.items() if k == kind)

    def names(self, kind: Kind) -> tuple[str, ...]:
        """The opcodes of a kind, most frequent first."""
        found = {name: number for (k, name), number in self.opcodes.items() if k == kind}
        return tuple(sorted(found, key=lambda name: (-found[name], name)))

    @property
    def overhead(self) -> float:
        """Instructions that are not matrix, copy or barrier, a matrix instruction; infinite where there is none."""
        matrix = self.count("matrix")
        return self.count("other") / matrix if matrix else float("inf")


class Instruction(NamedTuple):
    """One instruction; ``targets``: the labels it may jump to; ``falls_through``: the next one may follow it."""

    opcode: str
    kind: Kind
    targets: tuple[str, ...]
    falls_through: bool


def whole_kernel(compiled: Compiled) -> Mix:
    """All instructions of a kernel."""
    return _mix(_instructions(compiled)[0])


def loops(compiled: Compiled) -> tuple[Mix, ...]:
    """The innermost loops of a kernel, in the order of the code.

    A loop that only waits (a barrier is asked until it answers) belongs to the loop around it.

    Raises:
        ToolError: nvdisasm is missing or fails.
    """
    instructions, labels = _instructions(compiled)
    return tuple(_mix(instructions[at] for at in sorted(body)) for body in innermost_loops(instructions, labels))


def main_loop(compiled: Compiled) -> Mix | None:
    """The innermost loop with the most matrix instructions; None: no loop has any. Errors as of :func:`loops`.

    Example:
        >>> import torch, fusedops
        >>> from fusedops.inspection.offline import compile_launches
        >>> from fusedops.inspection.sass import main_loop
        >>> q = torch.ones(1, 1, 256, 64, dtype=torch.float16)
        >>> with fusedops.backend("triton"):
        ...     kernel = compile_launches("sm_90", lambda: fusedops.attention(q, q, q))[0]
        >>> main_loop(kernel).names("matrix")
        ('HGMMA',)
    """
    found = max(loops(compiled), key=lambda mix: mix.count("matrix"), default=None)
    return found if found is not None and found.count("matrix") else None


def serialised(compiled: Compiled) -> bool:
    """Whether the assembler makes an NVIDIA kernel wait for each single asynchronous product (its warning C7511).

    It does where it cannot keep the sums of products in flight in registers. The PTX is assembled again to find out.

    Raises:
        ToolError: ptxas is missing or fails.
    """
    facts = target_facts(compiled.target)
    if "wgmma" not in compiled.asm.get("ptx", ""):
        return False
    return "C7511" in ptxas_report(compiled.asm["ptx"], facts.capability)


def _instructions(compiled: Compiled) -> tuple[list[Instruction], dict[str, int]]:
    """A kernel's instructions, and for each label the index of the one that follows it."""
    if target_facts(compiled.target).vendor == "amd":
        return parse_amd(compiled.asm["amdgcn"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(compiled.asm["cubin"])
        return parse_sass(run_tool("nvdisasm", "-c", str(path)))


def parse_sass(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions and labels in what ``nvdisasm -c`` prints."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _SASS_LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif (found := _SASS_LINE.match(line)) and found["opcode"] != "NOP":
            opcode = found["opcode"]
            jumps = opcode in ("BRA", "BRX", "JMP", "JMX", "BRXU", "JMXU")
            targets = tuple(re.findall(r"\.L\w+", found["rest"])) if jumps else ()  # a table of jumps has several
            # BRA.U UP0 and BRA P0 have their predicate among the operands.
            conditional = found["guard"] is not None or re.search(r"(\.U|\s)\s*!?U?P\d", found["rest"]) is not None
            ends = (jumps or opcode in ("EXIT", "RET")) and not conditional
            instructions.append(Instruction(opcode, _kind(opcode), targets, not ends))
    return instructions, labels


def _kind(opcode: str) -> Kind:
    for kind, pattern in (("matrix", _MATRIX), ("copy", _COPY), ("barrier", _BARRIER)):
        if pattern.fullmatch(opcode):
            return kind  # type: ignore[return-value]
    return "other"


def parse_amd(assembly: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions and labels of a kernel's assembly for AMD's devices."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in assembly.splitlines():
        if label := _AMD_LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif (found := _AMD_LINE.match(line)) and found["opcode"] != "s_nop":
            opcode = found["opcode"]
            jumps = opcode.startswith(("s_branch", "s_cbranch"))
            targets = tuple(found["rest"].split()[:1]) if jumps else ()
            ends = opcode in ("s_branch", "s_endpgm")
            instructions.append(Instruction(opcode, _amd_kind(opcode), targets, not ends))
    return instructions, labels


def _amd_kind(opcode: str) -> Kind:
    for kind, pattern in (("matrix", _AMD_MATRIX), ("copy", _AMD_COPY), ("barrier", _AMD_BARRIER)):
        if pattern.fullmatch(opcode):
            return kind  # type: ignore[return-value]
    return "other"


def _mix(instructions: Iterable[Instruction]) -> Mix:
    return Mix(Counter((instruction.kind, instruction.opcode) for instruction in instructions))


# --- loops -----------------------------------------------------------------------------------------------------------

# A loop of at most so many instructions, barriers among them and no copy, is a wait.
_WAIT = 8


def innermost_loops(instructions: Sequence[Instruction], labels: Mapping[str, int]) -> list[set[int]]:
    """The instructions (their indices) of each natural loop in which no other one lies, waits aside.

    Natural loops as by Aho, Lam, Sethi, Ullman, "Compilers", section 9.6: an edge back to a block that dominates its
    source makes a loop of what reaches the source without passing that block. Loops of one header are one.
    """
    starts = _blocks(instructions, labels)
    block_of = {}
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else len(instructions)
        block_of.update(dict.fromkeys(range(start, end), number))
    following: list[set[int]] = [set() for _ in starts]
    for number, start in enumerate(starts):
        last = (starts[number + 1] if number + 1 < len(starts) else len(instructions)) - 1
        at = instructions[last] if last >= start else None
        if at is None:
            continue
        following[number] = {block_of[labels[name]] for name in at.targets if labels.get(name) in block_of}
        if at.falls_through and last + 1 in block_of:
            following[number].add(block_of[last + 1])
    bodies = _natural_loops(following)
    members = [
        {at for at in range(len(instructions)) if block_of[at] in body} for body in (bodies[h] for h in sorted(bodies))
    ]
    loops = [body for body in members if not _waits([instructions[at] for at in body])]
    return [body for body in loops if not any(other < body for other in loops)]


def _waits(body: Sequence[Instruction]) -> bool:
    kinds = {instruction.kind for instruction in body}
    return len(body) <= _WAIT and not kinds & {"matrix", "copy"}


def _blocks(instructions: Sequence[Instruction], labels: Mapping[str, int]) -> list[int]:
    """Index of the first instruction of each basic block."""
    ends = (at for at, instruction in enumerate(instructions) if instruction.targets or not instruction.falls_through)
    after = (at + 1 for at in ends)
    return sorted({0, *after, *labels.values()} & set(range(len(instructions))))


def _natural_loops(following: Sequence[set[int]]) -> dict[int, set[int]]:
    """The blocks of each natural loop, by its header."""
    dominators = _dominators(following)
    before: dict[int, set[int]] = defaultdict(set)
    for number, next_ones in enumerate(following):
        for other in next_ones:
            before[other].add(number)
    bodies: dict[int, set[int]] = {}
    for number, next_ones in enumerate(following):
        for header in next_ones & dominators[number]:
            body = bodies.setdefault(header, {header})
            waiting = [number]
            while waiting:
                block = waiting.pop()
                if block not in body:
                    body.add(block)
                    waiting += before[block]
    return bodies


def _dominators(following: Sequence[set[int]]) -> list[set[int]]:
    """For each block those that every way to it passes; blocks that no way reaches have none."""
    order: list[int] = []
    seen = {0}
    waiting = [0] if following else []
    while waiting:
        block = waiting.pop()
        order.append(block)
        fresh = following[block] - seen
        seen |= fresh
        waiting += sorted(fresh)
    before: dict[int, set[int]] = defaultdict(set)
    for block in order:
        for other in following[block]:
            before[other].add(block)
    dominators: list[set[int]] = [set(order) if block in seen else set() for block in range(len(following))]
    if order:
        dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            common = set.intersection(*(dominators[other] for other in before[block])) | {block}
            if common != dominators[block]:
                dominators[block], changed = common, True
    return dominators
