"""Registers, spilled bytes and shared memory, read from compiled kernels without a driver.

NVIDIA: ``cuobjdump`` and ``ptxas``, which come with Triton. AMD: the metadata in the assembly text.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedops.inspection.remembered import remembered


class ToolError(RuntimeError):
    """One of NVIDIA's binary tools is missing or failed; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel occupies.

    Attributes:
        registers: 32-bit registers a thread (AMD: vector registers a lane, accumulation registers included).
        spill_bytes: bytes a thread that the register allocator moves to memory and back (the larger of stores and
            loads on NVIDIA; the scratch memory of spilling kernels on AMD). 0: nothing is spilt.
    """

    registers: int
    spill_bytes: int


def nvidia_resources(cubin: bytes, ptx: str, capability: int) -> Resources:
    """Resources of a kernel's machine code.

    Args:
        cubin: the machine code.
        ptx: the PTX it was assembled from; assembled again for the exact figure where a stack frame is in use.
        capability: 90 for sm_90, …

    Raises:
        ToolError: cuobjdump or ptxas is missing or fails.
    """
    usage = disassembly("cuobjdump", "--dump-resource-usage", cubin=cubin)
    registers = _number(r"REG:(\d+)", usage)
    # A stack frame holds spilt registers, but also local arrays and call frames: ptxas tells them apart.
    spills = _ptxas_spills(ptx, capability) if _number(r"STACK:(\d+)", usage) else 0
    return Resources(registers, spills)


def amd_resources(assembly: str) -> Resources:
    """Resources from the metadata that ends a kernel's assembly (AMDGPU usage guide, "code object V5 metadata")."""
    spills = _number(r"\.vgpr_spill_count:\s*(\d+)", assembly)
    scratch = _number(r"\.private_segment_fixed_size:\s*(\d+)", assembly)
    return Resources(_number(r"\.vgpr_count:\s*(\d+)", assembly), scratch if spills else 0)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ToolError(f"no {pattern} in: {text[-500:]}")
    return int(found.group(1))


def _ptxas_spills(ptx: str, capability: int) -> int:
    report = ptxas_report(ptx, capability)
    return max(_number(r"(\d+) bytes spill stores", report), _number(r"(\d+) bytes spill loads", report))


def ptxas_report(ptx: str, capability: int) -> str:
    """What ``ptxas -v`` says of a kernel's PTX: registers, spilled bytes, warnings.

    Raises:
        ToolError: ptxas is missing or fails.
    """
    arch = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    if arch is None:
        raise ToolError("the PTX names no target")
    assembler = _assembler(capability)
    # Another assembler than Triton's own may say something else.
    other = "" if _is_tritons(assembler) else f"{assembler} "
    options = _tritons_options()
    key = f"{_version()} {other}{capability} {options} {ptx}"
    return remembered("ptxas", key.encode(), lambda: _assembled(assembler, options, arch[1], ptx))


@functools.cache
def _tritons_options() -> tuple[str, ...]:
    """What Triton tells the assembler of the allocation of registers: without it other code comes out, which spills
    other registers. No interface gives it: it stands in the source of what assembles."""
    import triton.backends.nvidia.compiler as compiler

    source = Path(compiler.__file__).read_text()
    return tuple(dict.fromkeys(re.findall(r"--regAllocOptLevel=\d", source)))


def _assembled(assembler: str, options: Sequence[str], arch: str, ptx: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        output = str(Path(folder, "kernel.cubin"))
        return _run(assembler, "-v", *options, f"--gpu-name={arch}", str(path), "-o", output)


def _version() -> str:
    """Triton's, which brings the tools."""
    from fusedops.autotune.versions import triton_version

    return str(triton_version())


def _is_tritons(tool: str) -> bool:
    import triton.backends

    return any(Path(tool).is_relative_to(folder) for folder in triton.backends.__path__)


def _assembler(capability: int) -> str:
    """The ptxas that Triton itself uses for this capability."""
    import triton.backends.nvidia.compiler as compiler

    chosen: Any = getattr(compiler, "get_ptxas", None)
    try:
        return str(chosen(capability).path)
    except (TypeError, AttributeError):  # another signature, in an older or newer Triton
        return _tool("ptxas-blackwell" if capability >= 100 else "ptxas")


def _tool(name: str) -> str:
    """Path of a tool in Triton's own folder, else on the PATH."""
    import triton.backends

    for folder in triton.backends.__path__:
        path = Path(folder, "nvidia", "bin", name)
        if path.exists():
            return str(path)
    found = shutil.which(name)
    if found is None:
        raise ToolError(f"{name} is neither in Triton's folder nor on the PATH; it comes with Triton's CUDA build")
    return found


def disassembly(name: str, *options: str, cubin: bytes) -> str:
    """What one of NVIDIA's binary tools prints of machine code.

    Raises:
        ToolError: it is missing or fails.
    """
    key = f"{_version()} {name} {list(options)} "
    return remembered("tools", key.encode() + cubin, lambda: _read(name, options, cubin))


def _read(name: str, options: Sequence[str], cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return _run(_tool(name), *options, str(path))


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ToolError(f"{Path(command[0]).name} failed ({result.returncode}): {result.stderr.strip()[:500]}")
    return result.stdout + result.stderr
