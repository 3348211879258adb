"""Accesses of a kernel to global memory, read from its PTX.

The language: NVIDIA's "Parallel Thread Execution ISA", chapters "Syntax" and "Instruction set: data movement".
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fusedops.inspection.accesses import MEMORY, Access, Branch, Flow, Found, Kind, Loops, follow, grouped

_REGISTER = re.compile(r"%\w+")
_PARAMETER = re.compile(r"_param_(\d+)")
# A pointer among the parameters; other 64-bit integers have no .ptr.
_POINTER = re.compile(r"\.param\s+\.[bsu]64\s+\.ptr\b[^,)]*_param_(\d+)")
_STATEMENT = re.compile(
    r"""^\s*(?P<label>[$\w]+):(?!:)
    | (?P<predicate>@!?%\w+\s+)? (?<![\w.%$])(?P<opcode>[a-z]\w*(\.[\w:]+)*) (\s+(?P<operands>[^;]*?))? \s*;""",
    re.MULTILINE | re.VERBOSE,
)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_OTHER_SPACES = frozenset({"param", "shared", "local", "const"})


@dataclass(frozen=True, slots=True)
class _Instruction:
    position: int
    predicated: bool
    opcode: tuple[str, ...]  # ("ld", "global", "v4", "b32")
    operands: tuple[str, ...]  # ("{ %r1, %r2, %r3, %r4 }", "[ %rd1 + 0 ]")

    @property
    def space(self) -> str:
        """The state space of a load, store or atomic. A generic address is as good as a global one here."""
        named = {part.partition("::")[0] for part in self.opcode} & _OTHER_SPACES
        return named.pop() if named else "global"


def ptx_accesses(ptx: str, parameters: Sequence[str]) -> tuple[Access, ...]:
    """Accesses of a kernel's PTX to global memory.

    Args:
        ptx: a module with one kernel.
        parameters: names of the kernel's parameters, in order.

    Raises:
        ValueError: as :func:`memory_traffic`.
    """
    if re.search(r"^(\.visible )?\.func\b", ptx, re.MULTILINE):
        raise ValueError("the kernel calls functions that were not inlined: their accesses are not counted here")
    header, _, body = ptx.partition(".entry")[2].partition("{")
    labels, instructions = _parse(body)
    behind = follow(*_flows(instructions, {int(index) for index in _POINTER.findall(header)}))
    branches = [
        Branch(i.position, i.operands[-1:] if i.opcode[0] == "bra" else (), i.predicated)
        for i in instructions
        if i.opcode[0] in ("bra", "ret", "exit")
    ]
    found = (
        Found(instruction.position, kind, tuple(_REGISTER.findall(address)), bits)
        for instruction in instructions
        for kind, address, bits in _global_accesses(instruction)
    )
    return grouped(found, Loops(labels, branches), behind, parameters)


def _parse(body: str) -> tuple[dict[str, int], list[_Instruction]]:
    """Positions of the labels, and the instructions in order, those in inline assembly among them."""
    lines = (line.partition("//")[0] for line in body.splitlines())
    code = "\n".join(line for line in lines if not line.lstrip().startswith("."))  # without directives
    labels: dict[str, int] = {}
    instructions = []
    for match in _STATEMENT.finditer(code):
        if label := match["label"]:
            labels[label] = match.start()
        else:
            operands = tuple(operand.strip() for operand in _OPERAND.findall(match["operands"] or ""))
            opcode = tuple(match["opcode"].split("."))
            instructions.append(_Instruction(match.start(), match["predicate"] is not None, opcode, operands))
    return labels, instructions


def _flows(instructions: list[_Instruction], pointers: set[int]) -> tuple[list[Flow], dict[str, set[int]]]:
    """How values flow between registers, and which begin with a pointer parameter.

    What is loaded from global memory is data: no parameter is behind it.
    """
    flows: list[Flow] = []
    begin: dict[str, set[int]] = defaultdict(set)
    for instruction in instructions:
        name = instruction.opcode[0]
        data = name in ("atom", "red", "cp", "setp") or (name in ("ld", "st") and instruction.space == "global")
        if data or len(instruction.operands) < 2:
            continue
        first, *rest = instruction.operands
        written, read = _REGISTER.findall(first), _REGISTER.findall(" ".join(rest))
        if name == "st":
            written = [MEMORY]
        elif name == "ld" and instruction.space != "param":
            read = [MEMORY]
        # A parameter's name: ld.param reads it; mov takes its address, which a later ld.param reads by.
        for register in written:
            begin[register] |= {int(index) for index in _PARAMETER.findall(" ".join(rest))} & pointers
        flows.append(Flow(written, read))
    return flows, begin


def _global_accesses(instruction: _Instruction) -> Iterator[tuple[Kind, str, int]]:
    """What an instruction does to global memory: kind, the operand with the address, bits a thread."""
    opcode, operands = instruction.opcode, instruction.operands
    if opcode[0] == "cp" and "bulk" in opcode and not {"commit_group", "wait_group"} & set(opcode):
        raise ValueError(f"the kernel copies by tensor descriptors ({'.'.join(opcode)}), which are not counted here")
    if opcode[0] == "cp" and "global" in opcode:
        # [shared], [global], bytes: a thread copies, and none of it passes through registers.
        yield "load", operands[1], 8 * int(operands[2], 0)
    elif opcode[0] in ("ld", "st", "atom", "red") and instruction.space == "global":
        has_result = opcode[0] in ("ld", "atom")
        address, bits = operands[1 if has_result else 0], _ptx_bits(opcode)
        if opcode[0] != "st":
            yield "load", address, bits
        if opcode[0] != "ld":
            yield "store", address, bits


def _ptx_bits(opcode: tuple[str, ...]) -> int:
    """``v4.b32`` is 128, ``f16x2`` 32, ``b64`` 64."""
    bits = 0
    count = 1
    for part in opcode[1:]:
        if vector := re.fullmatch(r"v(\d)", part):
            count = int(vector[1])
        elif kind := re.fullmatch(r"(?:b|u|s|f|bf)(\d+)(?:x(\d))?", part):
            bits = int(kind[1]) * int(kind[2] or 1)
    return bits * count
