"""Which instructions a compiled kernel's loops consist of, and what the assembler warns of.

NVIDIA: ``nvdisasm`` on the machine code. AMD: the assembly. The main loop of a matrix product is the innermost loop
with the most matrix instructions: what is issued there beside them, the copies and the barriers is overhead.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fusedops.inspection.flow import Graph, Loop
from fusedops.inspection.offline import Compiled, target_facts
from fusedops.inspection.resources import disassembly, ptxas_report

Kind = Literal["matrix", "special", "copy", "barrier", "other"]

# Opcodes by their first part (HMMA of HMMA.16816.F32), as nvdisasm names them ("CUDA binary utilities", chapter
# "Instruction set reference"). UTC*MMA: the products of the tensor memory. WARPGROUP: the waits around HGMMA.
_MATRIX = re.compile(r"[BDHIOQ]G?MMA|UTC\w*MMA")
# MUFU: exponentials and their like, which a unit of their own computes at a fraction of the rate.
_SPECIAL = re.compile(r"MUFU")
_COPY = re.compile(r"LD[GSLT]?|ST[GSLT]?|LDSM|STSM|LDGSTS|LDGMC|LDTM\w*|STTM\w*|UTMA(LDG|STG|PF|REDG)|UBLK\w+|UTCCP")
_BARRIER = re.compile(
    r"BAR|SYNCS|USYNCS|DEPBAR|LDGDEPBAR|ARRIVES|WARPGROUP|WARPGROUPSET|WARPSYNC|MEMBAR|FENCE|ERRBAR|UTCBAR|UTMACMDFLUSH|"
    r"ACQBULK|CGAERRBAR|UCGABAR_\w+"
)
# AMD's instruction set guides: matrix, transcendental and vector memory instructions; waits.
_AMD_MATRIX = re.compile(r"v_(mfma|smfmac|wmma|swmmac)_\w+")
_AMD_SPECIAL = re.compile(r"v_(s_)?(exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos)_f\d+\w*")
_AMD_COPY = re.compile(r"(global|buffer|flat|scratch|ds)_\w+")
_AMD_BARRIER = re.compile(r"s_(barrier|waitcnt|wait)\w*")

_Patterns = tuple[tuple[Kind, re.Pattern[str]], ...]
_KINDS: _Patterns = (("matrix", _MATRIX), ("special", _SPECIAL), ("copy", _COPY), ("barrier", _BARRIER))
_AMD_KINDS: _Patterns = (
    ("matrix", _AMD_MATRIX), ("special", _AMD_SPECIAL), ("copy", _AMD_COPY), ("barrier", _AMD_BARRIER),
)  # fmt: skip

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

    @classmethod
    def of(cls, instructions: Iterable[Instruction]) -> Mix:
        return cls(Counter((instruction.kind, instruction.opcode) for instruction in instructions))

    def count(self, kind: Kind) -> int:
        """How many there are of a kind."""
        return sum(number for (k, _), number in self.opcodes.items() if k == kind)

    def names(self, kind: Kind) -> tuple[str, ...]:
        """The opcodes of a kind, most frequent first."""
        found = {name: number for (k, name), number in self.opcodes.items() if k == kind}
        return tuple(sorted(found, key=lambda name: (-found[name], name)))

    @property
    def overhead(self) -> float:
        """Instructions of the kind ``other``, a matrix instruction; infinite where there is none."""
        matrix = self.count("matrix")
        return self.count("other") / matrix if matrix else float("inf")


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        opcode: as of :class:`Mix`.
        kind: what it does.
        targets: the labels it may jump to.
        falls_through: the next one may follow it.
        rest: what stands after the opcode's first part: ``.16816.F32 R4, R8, R12, R4``.
        guard: its predicate, as ``@!P0``; None: it has none.
    """

    opcode: str
    kind: Kind
    targets: tuple[str, ...]
    falls_through: bool
    rest: str = ""
    guard: str | None = None


def whole_kernel(compiled: Compiled) -> Mix:
    """All instructions of a kernel."""
    return Mix.of(code(compiled)[0])


def loops(compiled: Compiled) -> tuple[Mix, ...]:
    """The innermost loops of a kernel, in the order of the code.

    A loop that only waits (a barrier is asked until it answers) belongs to the loop around it.

    Raises:
        ToolError: nvdisasm is missing or fails.
    """
    instructions, labels = code(compiled)
    return tuple(Mix.of(instructions[at] for at in sorted(loop.body)) for loop in innermost_loops(instructions, labels))


def main_loop(compiled: Compiled) -> Mix | None:
    """The innermost loop with the most matrix instructions; None: no loop has any. Errors as of :func:`loops`.

    Examples:
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


def code(compiled: Compiled) -> tuple[list[Instruction], dict[str, int]]:
    """A compiled kernel's instructions.

    Args:
        compiled: the kernel.

    Returns:
        The instructions in the code's order, and for each label the index of the one that follows it.

    Raises:
        ToolError: nvdisasm is missing or fails.

    Examples:
        >>> import torch, fusedops
        >>> from fusedops.inspection.offline import compile_launches
        >>> from fusedops.inspection.sass import code
        >>> with fusedops.backend("triton"):
        ...     kernel = compile_launches("sm_90", lambda: fusedops.rms_norm(torch.ones(4, 4096), 4096))[0]
        >>> instructions, labels = code(kernel)
        >>> {each.opcode for each in instructions} >= {"LDG", "STG", "MUFU"}  # loads, stores, a reciprocal square root
        True
    """
    if target_facts(compiled.target).vendor == "amd":
        return parse_amd(compiled.asm["amdgcn"])
    return parse_sass(disassembly("nvdisasm", "-c", cubin=compiled.asm["cubin"]))


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
            instructions.append(
                Instruction(opcode, _kind(opcode, _KINDS), targets, not ends, found["rest"], found["guard"])
            )
    return instructions, labels


def _kind(opcode: str, patterns: _Patterns) -> Kind:
    return next((kind for kind, pattern in patterns if pattern.fullmatch(opcode)), "other")


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
            instructions.append(Instruction(opcode, _kind(opcode, _AMD_KINDS), targets, not ends, found["rest"]))
    return instructions, labels


# --- loops -----------------------------------------------------------------------------------------------------------

# A loop of at most so many instructions, barriers among them and no copy, is a wait.
_WAIT = 8


def innermost_loops(instructions: Sequence[Instruction], labels: Mapping[str, int]) -> list[Loop]:
    """Each natural loop (:mod:`fusedops.inspection.flow`) in which no other one lies, waits aside."""
    found = Graph(instructions, labels).loops()
    working = [loop for loop in found if not _waits([instructions[at] for at in loop.body])]
    return [loop for loop in working if not any(other.body < loop.body for other in working)]


def _waits(body: Sequence[Instruction]) -> bool:
    kinds = {instruction.kind for instruction in body}
    return len(body) <= _WAIT and not kinds & {"matrix", "copy"}
