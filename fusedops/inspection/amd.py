"""Accesses of a kernel to global memory, read from its code for AMD's devices.

The assembly (AMD's instruction set guides, tables of the buffer, global and flat instructions) says what the device
does. Which argument an address comes from is followed in the code that LLVM makes it from, the LLVM IR (LLVM's
"Language Reference Manual", and "User Guide for AMDGPU Backend", intrinsics and address spaces).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from fusedops.inspection.accesses import MEMORY, Access, Branch, Flow, Found, Kind, Loops, follow, grouped


def amd_accesses(assembly: str, llir: str | None = None, parameters: Sequence[str] = ()) -> tuple[Access, ...]:
    """Accesses of a kernel to global memory.

    Args:
        assembly: the device's.
        llir: the LLVM IR it was made from; None: arguments are not known.
        parameters: names of the kernel's parameters, in order.

    A load that is the same for a whole wavefront may have become a scalar one (``s_load``). It counts where the LLVM
    IR tells of it. Where the assembly has an access that the LLVM IR lacks, the assembly alone is believed.
    """
    real = _assembly_accesses(assembly)
    if llir is not None:
        named = llir_accesses(llir, parameters)
        if _by_width(real) <= _by_width(named):
            return named
    return real


def _by_width(accesses: tuple[Access, ...]) -> Counter[tuple[Kind, int]]:
    counts: Counter[tuple[Kind, int]] = Counter()
    for access in accesses:
        counts[access.kind, access.bits] += access.count
    return counts


# --- assembly --------------------------------------------------------------------------------------------------------

_ACCESS = re.compile(r"\s*(?:global|buffer|flat)_(load|store|atomic)_(\w+)")
_BRANCH = re.compile(r"\s*s_(?:(c)?branch\w*\s+(\S+)|endpgm)")
_LABEL = re.compile(r"([.\w]+):")


def _assembly_accesses(assembly: str) -> tuple[Access, ...]:
    """Vector instructions; not the scalar loads, of the arguments mostly, nor the register allocator's scratch."""
    labels: dict[str, int] = {}
    branches: list[Branch] = []
    found: list[Found] = []
    for position, line in enumerate(assembly.splitlines()):
        if label := _LABEL.match(line):
            labels[label[1]] = position
        elif branch := _BRANCH.match(line):
            conditional, target = branch.groups()
            branches.append(Branch(position, (target,) if target else (), conditional is not None))
        elif (access := _ACCESS.match(line)) and "Folded" not in line:  # the comment of spill code
            bits = _bits(access[2])
            found += [Found(position, kind, (), bits) for kind in _kinds(access[1])]
    return grouped(found, Loops(labels, branches))


def _kinds(name: str) -> tuple[Kind, ...]:
    """An atomic loads and stores."""
    return ("load",) if name == "load" else ("store",) if name == "store" else ("load", "store")


def _bits(name: str) -> int:
    """Bits a lane by an instruction's name after ``load_``: ``dwordx4``, ``ushort``, ``d16_hi_b16``, ``add_f32``, …"""
    if words := re.search(r"dword(?:x(\d))?", name):
        return 32 * int(words[1] or 1)
    for size, pattern in ((8, "byte"), (16, "short"), (64, r"x2$")):
        if re.search(pattern, name):
            return size
    number = re.search(r"[a-z](\d+)$", name)
    # An atomic of the older naming (global_atomic_add) has no size in its name and is of one word.
    return int(number[1]) if number else 32


def access_bits(opcode: str) -> int:
    """Bits a lane that a vector instruction moves from or to global memory; 0: it does not access it."""
    access = _ACCESS.match(opcode)
    return _bits(access[2]) if access else 0


# --- LLVM IR: one instruction a line, each value assigned once -------------------------------------------------------

_VALUE = re.compile(r"%[\w.$-]+")
_ASSIGNMENT = re.compile(r"(%[\w.$-]+) = (.*)")
_BUFFER = re.compile(r"@llvm\.amdgcn\.(?:raw|struct)\.(?:ptr\.)?buffer\.(load|store|atomic\.\w+)([.\w]*)\((.*)\)")
_TO_SHARED = re.compile(r"@llvm\.amdgcn\.global\.(load)(\.[.\w]*lds)\((.*)\)")
_PLAIN = re.compile(r"(load|store|atomicrmw|cmpxchg)\b")
# The types that a load or a store moves, and that an atomic's operand has.
_MOVED = re.compile(r"(?:load|store)(?: atomic| volatile)* (<[^>]*>|[\w() ]+?)(?:,| [%@\d-])")
_OPERAND = re.compile(r", (\w+) ")
_POINTER = re.compile(r"ptr(?: addrspace\((\d)\))? ([%@][\w.$-]+)")
_GLOBAL_SPACES = ("1", "")  # a generic address is as good as a global one here
_NAMED_BITS = {"half": 16, "bfloat": 16, "float": 32, "double": 64}


def llir_accesses(llir: str, parameters: Sequence[str]) -> tuple[Access, ...]:
    """Accesses of a kernel's LLVM IR to global memory; arguments and errors as of :func:`amd_accesses`.

    Raises:
        ValueError: it calls functions that were not inlined.
    """
    if len(re.findall(r"^define ", llir, re.MULTILINE)) > 1:
        raise ValueError("the kernel calls functions that were not inlined: their accesses are not counted here")
    header, _, body = llir.partition("define ")[2].partition("{\n")
    found: list[Found] = []
    flows: list[Flow] = []
    labels: dict[str, int] = {}
    branches: list[Branch] = []
    for position, line in enumerate(body.partition("\n}")[0].splitlines()):
        if label := re.match(r"([\w.$-]+):", line):
            labels["%" + label[1]] = position
            continue
        text = line.strip().partition(", !")[0]
        assigned = _ASSIGNMENT.match(text)
        written, text = ([assigned[1]], assigned[2]) if assigned else ([], text)
        if text.startswith("ret ") or "label %" in text:  # the cases of a switch have a line each
            alone = text.startswith(("br ", "ret "))
            branches.append(Branch(position, re.findall(r"label (%[\w.$-]+)", text), not alone))
        elif access := _global_access(text):
            name, address, bits = access
            found += [Found(position, kind, (address,), bits) for kind in _kinds(name)]
        else:
            flows += _flows(written, text)
    begin = {
        name: {index}
        for index, (kind, name) in enumerate(re.findall(r"([^%]*)(%[\w.$-]+)", header))
        if "ptr addrspace(1)" in kind
    }
    return grouped(found, Loops(labels, branches), follow(flows, begin), parameters)


def _flows(written: list[str], text: str) -> list[Flow]:
    name = text.removeprefix("tail ").partition(" ")[0]
    if name in ("icmp", "fcmp"):  # what was compared is not behind what the outcome chooses
        return []
    if name == "load":
        return [Flow(written, [MEMORY])]
    return [Flow([MEMORY] if name == "store" else written, _VALUE.findall(text))]


def _global_access(text: str) -> tuple[str, str, int] | None:
    """What is done (a load, a store, else an atomic), the address, and the bits a lane, of an instruction."""
    if intrinsic := _BUFFER.search(text) or _TO_SHARED.search(text):
        name, suffix, operands = intrinsic.groups()
        address = _POINTER.search(operands)  # a store's first operand is what it stores
        if address is None:
            return None
        if "lds" in suffix.split("."):  # (from, to, bytes, …): straight into shared memory
            size = re.search(r"i32 (\d+)", operands)
            return name, address[2], 8 * int(size[1]) if size else 0
        return name, address[2], _type_bits(suffix.strip(".").partition(".")[0])
    plain = _PLAIN.match(text)
    pointers = _POINTER.findall(text) if plain else []
    if plain is None or not pointers:
        return None
    name = plain[1]
    # Of two pointers, a store's first is what it stores.
    space, address = pointers[-1 if name in ("load", "store") else 0]
    moved = (_MOVED if name in ("load", "store") else _OPERAND).search(text)
    if space not in _GLOBAL_SPACES or moved is None:
        return None
    return name, address, _type_bits(moved[1])


def _type_bits(name: str) -> int:
    """``<4 x i32>`` and ``v4i32`` are 128, ``float`` 32, a pointer 64."""
    parts = re.fullmatch(r"(?:<(\d+) x |v(\d+))?(\w+?)>?", name)
    if parts is None:
        return 64
    size = re.fullmatch(r"(?:i|f|bf)(\d+)", parts[3])
    each = int(size[1]) if size else _NAMED_BITS.get(parts[3], 64)
    return int(parts[1] or parts[2] or 1) * each
