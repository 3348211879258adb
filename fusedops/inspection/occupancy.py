"""How many programs a multiprocessor holds at once, from what each occupies."""

from __future__ import annotations

import re
from typing import NamedTuple

from fusedops.autotune.roofline import product_of
from fusedops.inspection.offline import Compiled, target_facts
from fusedops.runtime.device import DeviceFacts
from fusedops.runtime.launch import ceil_div

# What the hardware hands out at a time. What a multiprocessor has (threads, blocks, registers, shared memory) is among
# the figures of a device's product (:mod:`fusedops.autotune.roofline`).
#
# NVIDIA: CUDA C++ programming guide, table "technical specifications per compute capability", and the occupancy
# calculator of CUDA's toolkit: registers in units of 256 a warp, the warps that they allow in fours (one a scheduler),
# shared memory in units of 128 bytes (Turing: 256), of which the system reserves 1 KiB a block from compute capability
# 8.0 on. Tensor memory: 512 columns (PTX ISA, "Tensor memory").
_REGISTER_UNIT = 256
_SCHEDULERS = 4
_RESERVED = 1024
_TENSOR_COLUMNS = 512
# AMD: LLVM's "User guide for AMDGPU backend", table of compute program resources: vector registers a lane in units of 8
# (RDNA 3: 24); and the CDNA and RDNA ISA guides: SIMDs a compute unit, wavefronts a SIMD, units of LDS in bytes.
_AMD_UNITS = {"gfx90a": 8, "gfx942": 8, "gfx950": 8, "gfx1100": 24}
_AMD_SIMDS = {"gfx90a": 4, "gfx942": 4, "gfx950": 4, "gfx1100": 2}
_AMD_SHARED = {"gfx90a": 512, "gfx942": 512, "gfx950": 1280, "gfx1100": 1024}


class Occupancy(NamedTuple):
    """What a multiprocessor (AMD: compute unit) holds.

    Attributes:
        blocks: blocks of threads at once; 0: not one fits.
        share: of the warps (wavefronts) that it has room for, 0 to 1.
        limit: what keeps more blocks away: ``registers``, ``shared memory``, ``tensor memory``, ``threads`` or
            ``blocks``.
    """

    blocks: int
    share: float
    limit: str


def occupancy(
    target: str | DeviceFacts, num_warps: int, registers: int, shared: int, tensor_columns: int = 0
) -> Occupancy:
    """How many blocks of a kernel a multiprocessor holds.

    Args:
        target: a key of :data:`fusedops.runtime.device.TARGETS`, or the facts of any device.
        num_warps: warps (wavefronts) a block.
        registers: a thread (AMD: vector registers a lane).
        shared: bytes of shared memory (LDS) a block.
        tensor_columns: columns of tensor memory a block (sm_100).

    Returns:
        Blocks at once, their share of the warps, and what limits it.

    Raises:
        ValueError: ``target`` is unknown.

    Examples:
        >>> from fusedops.inspection.occupancy import occupancy
        >>> occupancy("sm_90", num_warps=8, registers=168, shared=64 << 10)
        Occupancy(blocks=1, share=0.125, limit='registers')
    """
    facts = target_facts(target)
    product = product_of(facts)
    most_warps = product.threads // facts.warp_size
    fit = {"threads": most_warps // num_warps, "blocks": product.blocks}
    if facts.vendor == "amd":
        simds = _AMD_SIMDS.get(facts.arch, 4)
        unit = _AMD_UNITS.get(facts.arch, 8)
        lanes = product.registers // (simds * facts.warp_size)  # vector registers of a SIMD's lane
        each = min(most_warps // simds, lanes // (max(1, ceil_div(registers, unit)) * unit))
        fit["registers"] = each * simds // num_warps
        unit = _AMD_SHARED.get(facts.arch, 512)
    else:
        each = max(1, ceil_div(registers * facts.warp_size, _REGISTER_UNIT)) * _REGISTER_UNIT
        fit["registers"] = product.registers // each // _SCHEDULERS * _SCHEDULERS // num_warps
        unit, shared = (128, shared + _RESERVED) if facts.capability >= 80 else (256, shared)
    if shared:
        fit["shared memory"] = product.shared_memory // (ceil_div(shared, unit) * unit)
    if tensor_columns:
        fit["tensor memory"] = _TENSOR_COLUMNS // tensor_columns
    # Of equals, what the kernel's author can change comes first.
    names = ("registers", "shared memory", "tensor memory", "threads", "blocks")
    limit = min((name for name in names if name in fit), key=lambda name: fit[name])
    return Occupancy(fit[limit], fit[limit] * num_warps / most_warps, limit)


def occupancy_of(compiled: Compiled, facts: DeviceFacts) -> Occupancy:
    """How many blocks of a compiled kernel a multiprocessor of a device holds.

    Args:
        compiled: the kernel.
        facts: of the device (:func:`fusedops.inspection.offline.target_facts`).

    Returns:
        Blocks at once, their share of the warps, and what limits it.

    It raises nothing: an architecture without an entry has the figures of the nearest older one.

    Examples:
        >>> import torch, fusedops
        >>> from fusedops.inspection.occupancy import occupancy_of
        >>> from fusedops.inspection.offline import compile_launches, target_facts
        >>> with fusedops.backend("triton"):
        ...     kernel = compile_launches("sm_90", lambda: fusedops.rms_norm(torch.ones(4, 4096), 4096))[0]
        >>> occupancy_of(kernel, target_facts("sm_90")).blocks >= 2
        True
    """
    columns = re.findall(r"tcgen05\.alloc\.[^;]*,\s*(\d+);", compiled.asm.get("ptx", ""))
    return occupancy(facts, compiled.num_warps, compiled.registers, compiled.shared, sum(map(int, columns)))
