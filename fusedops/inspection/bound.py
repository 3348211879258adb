"""An upper bound of the share of the peak that a kernel's hot loop can reach.

For one turn of the loop, and all warps of a program, the cycles are counted that each unit of a multiprocessor needs at
least. The longest of them bounds the turn, if everything else is hidden behind it. Where the loop has matrix
instructions, the peak is that of the matrix units, and its share at most their cycles over the longest. Where most of
the loop is fused multiply-adds, it is that of the float32 units. Elsewhere, and where the caller says so, it is the
bandwidth of the device memory, and the cycles those that the loop's bytes take at it. A kernel without a loop counts as
one turn.

It is a bound, no estimate. Not in it: latencies and waits, dependences between instructions, bank conflicts, arithmetic
units slower than an instruction a cycle, the copies that tensor descriptors make, tensor memory, caches, clocks under
load, waves of programs and tails. Of instructions that a turn may jump over only the matrix instructions count, and of
those that a predicate may switch off only their issue.

NVIDIA: four schedulers that issue an instruction a cycle each; shared memory and level-1 cache move 128 bytes a cycle,
for asynchronous products (wgmma) too, which read their operands there; 16 special functions a cycle (CUDA C++
programming guide, chapters "Compute capabilities" and "Arithmetic instructions"). AMD: vector instructions of 64 lanes
a cycle and compute unit, LDS of 128 bytes a cycle, special functions at a quarter of the rate (CDNA and RDNA ISA guides
and white papers). The matrix units' rates, the bandwidth and the clock: :mod:`fusedops.autotune.roofline`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusedops.autotune.operator import Unit
from fusedops.autotune.roofline import Product, product_of
from fusedops.inspection.amd import access_bits
from fusedops.inspection.flow import Graph
from fusedops.inspection.loops import GLOBAL, HotLoop, matrix_sources
from fusedops.inspection.offline import Compiled
from fusedops.inspection.sass import Instruction
from fusedops.runtime.device import DeviceFacts

_SHARED_BYTES, _SCHEDULERS, _VECTOR_LANES = 128, 4, 64


@dataclass(frozen=True, slots=True)
class Bound:
    """The share of the peak that a kernel cannot exceed.

    Attributes:
        share: 0 to 1.
        peak: of what: ``matrix units``, ``float32 units`` or ``memory bandwidth``.
        unit: what limits it; ``peak`` itself where nothing does.
        cycles: that each unit of a multiprocessor needs at least, for one turn of the hot loop of one program.
    """

    share: float
    peak: str
    unit: str
    cycles: Mapping[str, float]


def bound_of(
    compiled: Compiled,
    facts: DeviceFacts,
    instructions: Sequence[Instruction],
    labels: Mapping[str, int],
    loop: HotLoop | None,
    memory_bound: bool | None = None,
) -> Bound | None:
    """The bound of a kernel; None: the shapes of its products, or what its descriptors copy, are not to be told, or its
    warps do different work.

    Args:
        facts: of the device.
        instructions, labels: the kernel's (:func:`fusedops.inspection.sass.code`).
        memory_bound: of the memory's bandwidth though there are matrix instructions; None: where there are none.
        loop: its hot one (:func:`fusedops.inspection.loops.hot_loop`).
    """
    if _specialised(compiled):
        return None
    product = product_of(facts)
    body = frozenset(range(len(instructions))) if loop is None else loop.body
    certain = Graph(instructions, labels).certain() if loop is None else loop.certain
    inside = [instructions[at] for at in body]
    sure = [instructions[at] for at in certain]
    amd = facts.vendor == "amd"
    cycles = (_amd_cycles if amd else _nvidia_cycles)(sure, compiled.num_warps, product)
    products = any(one.kind == "matrix" for one in inside)
    if products and not memory_bound:
        peak = "matrix units"
        needed = _matrix_cycles(compiled, inside, loop, product)
    elif not products and 2 * sum(_FUSED.fullmatch(one.opcode) is not None for one in inside) > len(inside):
        peak = "float32 units"
        needed = _float32_cycles(compiled, inside, product)
    else:
        peak = "memory bandwidth"
        needed = _memory_cycles(compiled, inside, product)
        if products and (matrix := _matrix_cycles(compiled, inside, loop, product)):
            cycles = {**cycles, "matrix units": matrix}
    if not needed:
        return None
    cycles = {peak: needed, **cycles}
    unit = max(cycles, key=lambda name: cycles[name])
    return Bound(needed / cycles[unit], peak, unit, cycles)


def _specialised(compiled: Compiled) -> bool:
    """Whether Triton gave warps different parts of the work."""
    found = re.search(r'"ttg\.num-warps" = (\d+)', compiled.asm.get("ttgir", ""))
    return found is not None and int(found[1]) != compiled.num_warps


# --- matrix instructions ---------------------------------------------------------------------------------------------

# HMMA.16816: m, n, k one after the other; HGMMA.64x128x16; v_mfma_f32_32x32x8_bf16, v_wmma_f32_16x16x16_f16.
_TILE = re.compile(r"\.(16|8)(8)(4|8|16|32|64|128)\b")
_GROUP_TILE = re.compile(r"\.(\d+)x(\d+)x(\d+)")
_AMD_TILE = re.compile(r"v_(?:mfma|wmma)_(?:scale_)?[fi]32_(\d+)x(\d+)x(\d+)_?(?:(\d+)b_)?(\w*)")


def _matrix_cycles(
    compiled: Compiled, inside: Iterable[Instruction], loop: HotLoop | None, product: Product
) -> float | None:
    """Cycles of the matrix units for one turn; None where an instruction does not tell its shape."""
    flops: dict[Unit, float] = {}
    warps = compiled.num_warps
    for one in inside:
        if one.kind != "matrix":
            continue
        if one.opcode.startswith("UTC"):
            found = _tensor_memory_flops(compiled, loop)
            if found is None:
                return None
            flops = found
            break
        shape = _amd_shape(one) if one.opcode.startswith("v_") else _shape(one)
        if shape is None:
            return None
        unit, each, sharing = shape
        flops[unit] = flops.get(unit, 0.0) + each * warps / sharing
    clock = product.facts.multiprocessor_count * product.clock
    return sum(count * clock / product.rate(unit) for unit, count in flops.items())


def _shape(one: Instruction) -> tuple[Unit, float, int] | None:
    """What computes an instruction of NVIDIA's, its floating-point operations, and how many warps share it."""
    name = one.rest.split(" ")[0]
    group = "GMMA" in one.opcode
    found = (_GROUP_TILE if group else _TILE).search(name)
    if found is None or one.opcode.startswith(("D", "B", "O")):
        return None
    unit: Unit = "fp8" if one.opcode.startswith(("I", "Q")) else "tf32" if ".TF32" in name else "half"
    m, n, k = map(int, found.groups())
    return unit, 2.0 * m * n * k, 4 if group else 1


def _amd_shape(one: Instruction) -> tuple[Unit, float, int] | None:
    found = _AMD_TILE.match(one.opcode)
    if found is None:
        return None
    m, n, k, blocks, kind = found.groups()
    if kind.startswith("xf32"):
        unit: Unit = "tf32"
    elif kind.startswith(("fp8", "bf8", "i8", "iu8", "f8f6f4")):
        unit = "fp8"
    elif kind.startswith("f32"):
        unit = "float32"
    elif kind.startswith(("f16", "bf16")):
        unit = "half"
    else:
        return None
    return unit, 2.0 * int(m) * int(n) * int(k) * int(blocks or 1), 1


# tcgen05.mma.cta_group::1.kind::f16 [D], A, B, descriptor, predicate; and mov.b32 %r1, 136314896; which is the latter.
_TENSOR_PRODUCT = re.compile(r"tcgen05\.mma\.cta_group::(\d)\.kind::(\w+)")
_CONSTANT = re.compile(r"mov\.[bu]32\s+(%r\d+), (\d+);")
_TENSOR_DEPTHS: dict[str, tuple[Unit, int]] = {"f16": ("half", 16), "tf32": ("tf32", 8), "f8f6f4": ("fp8", 32)}


def _tensor_memory_flops(compiled: Compiled, loop: HotLoop | None) -> dict[Unit, float] | None:
    """Floating-point operations of a turn's products in tensor memory, whose shapes only the PTX tells.

    They stand in the operand that describes the instruction (PTX ISA, "Instruction descriptor"): N / 8 in bits 17 to
    22, M / 16 in bits 24 to 28.
    """
    if loop is None or loop.steps is None:
        return None
    constants = {name: int(value) for name, value in _CONSTANT.findall(compiled.asm["ptx"])}
    found: list[dict[Unit, float]] = []
    for source in matrix_sources(compiled):
        flops: dict[Unit, float] = {}
        for one in source:
            product = _TENSOR_PRODUCT.match(one.opcode)
            descriptor = constants.get(one.rest.split(",")[-2].strip(), 0) if one.rest.count(",") > 3 else 0
            if product is None or product[2] not in _TENSOR_DEPTHS or not descriptor:
                return None
            unit, depth = _TENSOR_DEPTHS[product[2]]
            columns, rows = (descriptor >> 17 & 63) * 8, (descriptor >> 24 & 31) * 16
            # A pair of blocks computes a product together: half of it is each one's.
            flops[unit] = flops.get(unit, 0.0) + 2.0 * rows * columns * depth / int(product[1])
        found.append(flops)
    if not found or any(flops != found[0] for flops in found):
        return None
    return {unit: count * loop.steps for unit, count in found[0].items()}


# --- the other units -------------------------------------------------------------------------------------------------


def _nvidia_cycles(sure: Sequence[Instruction], warps: int, product: Product) -> dict[str, float]:
    always = [one for one in sure if one.guard is None]
    special = sum(one.kind == "special" for one in always)
    moved = sum(_bytes(one) for one in always)  # a warp
    return {
        "special functions": special * warps * 32 / product.special,
        "shared memory": moved * warps / _SHARED_BYTES,
        "issue": len(sure) * warps / _SCHEDULERS,
    }


def _bytes(one: Instruction) -> float:
    """Bytes that a warp's instruction moves through shared memory or the level-1 cache."""
    name = one.rest.split(" ")[0]
    if one.opcode in ("LDSM", "STSM"):
        count = re.search(r"\.MT?88\.(\d)", name)
        return 128.0 * int(count[1] if count else 1)
    if "GMMA" in one.opcode:
        tile = _GROUP_TILE.search(name)
        if tile is None:
            return 0.0
        # 32 bytes a row of A and a column of B; A may be in registers. Four warps read them once.
        operands = one.rest.split(",")
        rows = 0 if len(operands) > 1 and re.match(r"\s*R\d", operands[1]) else int(tile[1])
        return 32.0 * (rows + int(tile[2])) / 4
    if re.fullmatch(r"LD[GSL]?|ST[GSL]?|LDGSTS", one.opcode):
        return 32.0 * _width(name) / 8
    return 0.0


def _width(name: str) -> int:
    """Bits a thread of ``.E.128``, ``.U8``, …"""
    parts = name.split(".")
    for bits, names in ((256, {"256"}), (128, {"128"}), (64, {"64"}), (8, {"U8", "S8"}), (16, {"U16", "S16", "16"})):
        if names & set(parts):
            return bits
    return 32


_LDS = re.compile(r"ds_(?:read|write|load|store)(2?)(?:st64)?_\w*?(\d+)(?:_\w+)?$")


def _amd_cycles(sure: Sequence[Instruction], warps: int, product: Product) -> dict[str, float]:
    lanes = warps * product.facts.warp_size
    special = sum(one.kind == "special" for one in sure)
    vector = sum(one.opcode.startswith("v_") for one in sure)
    moved = 0.0
    for one in sure:
        if found := _LDS.match(one.opcode):
            moved += int(found[2]) / 8 * (2 if found[1] else 1)
    return {
        "special functions": special * lanes / product.special,
        "shared memory": moved * lanes / _SHARED_BYTES,
        "vector units": vector * lanes / _VECTOR_LANES,
    }


# Fused multiply-adds: products of matrices without matrix instructions, as on Turing or in full precision.
_FUSED = re.compile(r"FFMA|v_(pk_)?fma(c|_mix)?_f32(_e\d+)?|v_dual_fmac_f32")


def _float32_cycles(compiled: Compiled, inside: Iterable[Instruction], product: Product) -> float:
    """Cycles of a turn's fused multiply-adds, two operations each, in all of a multiprocessor's float32 units."""
    count = sum((1 + ("_pk_" in one.opcode)) for one in inside if _FUSED.fullmatch(one.opcode))
    rate = product.scalar / (product.facts.multiprocessor_count * product.clock)
    return 2 * count * compiled.num_warps * product.facts.warp_size / rate


def _memory_cycles(compiled: Compiled, inside: Iterable[Instruction], product: Product) -> float | None:
    """Cycles that a turn's bytes from and to global memory take, at a multiprocessor's part of the bandwidth."""
    bits = 0
    for one in inside:
        if one.opcode.startswith(("UTMA", "UBLK")):
            return None
        if one.kind == "copy" and GLOBAL.fullmatch(one.opcode):
            found = access_bits(one.opcode) if one.opcode.islower() else _width(one.rest.split(" ")[0])
            bits += found
    lanes = compiled.num_warps * product.facts.warp_size
    part = product.memory_bandwidth / (product.facts.multiprocessor_count * product.clock)
    return bits / 8 * lanes / part
