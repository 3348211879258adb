"""What a compiled kernel loads from global memory and stores there, read from its code.

NVIDIA: the PTX that Triton makes. Each access's address is followed back, through the arithmetic on registers, to the
kernel's argument that it comes from. AMD: the assembly, counted by width only.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fusedops.inspection.offline import Compiled, target_facts

Kind = Literal["load", "store"]


@dataclass(frozen=True, slots=True)
class Access:
    """Instructions of one kind in a kernel's code.

    Attributes:
        argument: the kernel's argument whose memory is accessed; ``"A|B"`` where it may be either. None where the
            address comes from no argument, and on AMD.
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
        """Bytes that one program loads: of one argument (None: of all), in loops or outside (None: both)."""
        return self._moved("load", argument, looped)

    def stored(self, argument: str | None = None, looped: bool | None = None) -> int:
        """Bytes that one program stores; arguments as of :meth:`loaded`."""
        return self._moved("store", argument, looped)

    def widths(self, argument: str | None = None, kind: Kind | None = None) -> tuple[int, ...]:
        """The widths in bits that occur, narrowest first; empty where there is no such access."""
        return tuple(sorted({a.bits for a in self._chosen(kind, argument, None)}))

    def _moved(self, kind: Kind, argument: str | None, looped: bool | None) -> int:
        return sum(a.bits // 8 * a.count * self.threads for a in self._chosen(kind, argument, looped))

    def _chosen(self, kind: Kind | None, argument: str | None, looped: bool | None) -> Iterator[Access]:
        for access in self.accesses:
            if kind in (None, access.kind) and argument in (None, access.argument) and looped in (None, access.looped):
                yield access


def memory_traffic(compiled: Compiled) -> Traffic:
    """What one program of a compiled kernel loads and stores.

    Raises:
        ValueError: the kernel holds what is not counted here: copies by tensor descriptors, or calls of functions
            that were not inlined.

    Example:
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
        accesses = amd_accesses(compiled.asm["amdgcn"])
    else:
        accesses = ptx_accesses(compiled.asm["ptx"], compiled.parameters)
    return Traffic(compiled.num_warps * facts.warp_size, accesses)


# --- NVIDIA: PTX (the PTX ISA's chapters "instruction statements" and "data movement") -----------------------------

_REGISTER = re.compile(r"%\w+")
_PARAMETER = re.compile(r"_param_(\d+)")
# A pointer among the parameters; other 64-bit integers have no .ptr.
_POINTER = re.compile(r"\.param\s+\.[bsu]64\s+\.ptr\b[^,)]*_param_(\d+)")
_STATEMENT = re.compile(
    r"""^\s*(?P<label>[$\w]+):(?!:)
    | (?<![\w.%$])(?P<opcode>[a-z]\w*(\.[\w:]+)*) (\s+(?P<operands>[^;]*?))? \s*;""",
    re.MULTILINE | re.VERBOSE,
)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_OTHER_SPACES = frozenset({"param", "shared", "local", "const"})
# Stands for all memory but the global one: what was stored there may be what is loaded.
_MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class _Instruction:
    position: int
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
    sources = _pointers_behind(instructions, {int(index) for index in _POINTER.findall(header)})
    loops = _loops(labels, [(i.position, i.operands[-1]) for i in instructions if i.opcode[0] == "bra"])
    found: Counter[_Group] = Counter()
    for instruction in instructions:
        for kind, address, bits in _global_accesses(instruction):
            indices = sorted({index for register in _REGISTER.findall(address) for index in sources[register]})
            # Triton appends pointers to scratch memory of its own to the kernel's parameters.
            argument = "|".join(parameters[index] for index in indices if index < len(parameters)) or None
            found[argument, kind, _enclosed(instruction.position, loops), bits] += 1
    return _sorted(found)


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
            instructions.append(_Instruction(match.start(), tuple(match["opcode"].split(".")), operands))
    return labels, instructions


def _pointers_behind(instructions: list[_Instruction], pointers: set[int]) -> dict[str, set[int]]:
    """For each register, the pointer parameters that its value was computed from.

    A register may be written in several places (a loop's variables are): it has the pointers of all of them. What is
    loaded from global memory is data, from no parameter.
    """
    sources: dict[str, set[int]] = defaultdict(set)
    flows: list[tuple[list[str], list[str]]] = []
    for instruction in instructions:
        if len(instruction.operands) < 2:
            continue
        name, (first, *rest) = instruction.opcode[0], instruction.operands
        written, read = _REGISTER.findall(first), _REGISTER.findall(" ".join(rest))
        if name in ("atom", "red", "cp", "setp") or (name in ("ld", "st") and instruction.space == "global"):
            continue
        if name == "st":
            written = [_MEMORY]
        elif name == "ld" and instruction.space != "param":
            read = [_MEMORY]
        # A parameter's name: ld.param reads it; mov takes its address, which a later ld.param reads by.
        named = {int(index) for index in _PARAMETER.findall(" ".join(rest))} & pointers
        for register in written:
            sources[register] |= named
        flows.append((written, read))
    changed = True
    while changed:
        changed = False
        for written, read in flows:
            behind = {index for register in read for index in sources[register]}
            for register in written:
                if not behind <= sources[register]:
                    sources[register] |= behind
                    changed = True
    return sources


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


# --- AMD: assembly (the instruction set guides' tables of buffer, global and flat instructions) -----------------------

_AMD_ACCESS = re.compile(r"\s*(?:global|buffer|flat)_(load|store|atomic)_(\w+)")
_AMD_BRANCH = re.compile(r"\s*s_c?branch\w*\s+(\S+)")
_AMD_LABEL = re.compile(r"([.\w]+):")


def amd_accesses(assembly: str) -> tuple[Access, ...]:
    """Accesses of a kernel's assembly to global memory, by vector instructions. Scalar loads (``s_load``) of what is
    the same for the whole program, the arguments mostly, are not counted, nor is the register allocator's scratch."""
    labels: dict[str, int] = {}
    branches = []
    accesses: list[tuple[int, Kind, int]] = []
    for position, line in enumerate(assembly.splitlines()):
        if label := _AMD_LABEL.match(line):
            labels[label[1]] = position
        elif branch := _AMD_BRANCH.match(line):
            branches.append((position, branch[1]))
        elif (access := _AMD_ACCESS.match(line)) and "Folded" not in line:  # the comment of spill code
            bits = _amd_bits(access[2])
            if access[1] != "store":
                accesses.append((position, "load", bits))
            if access[1] != "load":
                accesses.append((position, "store", bits))
    loops = _loops(labels, branches)
    return _sorted(Counter((None, kind, _enclosed(position, loops), bits) for position, kind, bits in accesses))


def _amd_bits(name: str) -> int:
    """Bits a lane by an instruction's name after ``load_``: ``dwordx4``, ``ushort``, ``d16_hi_b16``, ``add_f32``, …"""
    if words := re.search(r"dword(?:x(\d))?", name):
        return 32 * int(words[1] or 1)
    for size, pattern in ((8, "byte"), (16, "short"), (64, r"x2$")):
        if re.search(pattern, name):
            return size
    number = re.search(r"[a-z](\d+)$", name)
    # An atomic of the older naming (global_atomic_add) has no size in its name and is of one word.
    return int(number[1]) if number else 32


# --- both ------------------------------------------------------------------------------------------------------------

_Group = tuple[str | None, Kind, bool, int]


def _loops(labels: dict[str, int], branches: Iterable[tuple[int, str]]) -> list[tuple[int, int]]:
    """Where loops begin and end: a branch that goes back to a label."""
    return [(labels[target], at) for at, target in branches if target in labels and labels[target] < at]


def _enclosed(position: int, loops: list[tuple[int, int]]) -> bool:
    return any(first < position < last for first, last in loops)


def _sorted(found: Counter[_Group]) -> tuple[Access, ...]:
    groups = sorted(found.items(), key=lambda item: (item[0][0] or "", *item[0][1:]))
    return tuple(Access(argument, kind, bits, count, looped) for (argument, kind, looped, bits), count in groups)
