"""Facts about the device that a kernel runs on, or is compiled for.

Nothing here touches a driver before :func:`device_facts` is called with a CUDA device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

_NO_GUARD = nullcontext()


# Where the driver does not tell: less than any product of the last years has.
_CACHE = 32 << 20


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the choice of a launch configuration depends on.

    Attributes:
        vendor: maker of the device; ``interpreter`` for Triton's interpreter on the CPU.
        arch: ``sm_90``, ``gfx942``, …; ``interpreter`` for the interpreter.
        name: the device's own name, for people.
        multiprocessor_count: streaming multiprocessors (NVIDIA) or compute units (AMD).
        shared_memory: bytes of shared memory (LDS) that one program may use.
        warp_size: threads a warp (wavefront).
        cache: bytes of the level-2 cache that all multiprocessors share.
    """

    vendor: Literal["nvidia", "amd", "interpreter"]
    arch: str
    name: str
    multiprocessor_count: int
    shared_memory: int
    warp_size: int = 32
    cache: int = _CACHE

    @property
    def capability(self) -> int:
        """NVIDIA's compute capability as one number (90 for sm_90); 0 for other vendors."""
        return int(self.arch.removeprefix("sm_")) if self.vendor == "nvidia" else 0


INTERPRETER = DeviceFacts("interpreter", "interpreter", "Triton interpreter", 4, 1 << 30)

# A representative product for each architecture that kernels are compiled for. Shared memory: the opt-in maximum
# a block, in bytes, less the 1 KiB that the system reserves (CUDA C++ programming guide, table "technical
# specifications per compute capability"); AMD: LDS a workgroup (CDNA and RDNA ISA guides).
TARGETS: dict[str, DeviceFacts] = {
    "sm_75": DeviceFacts("nvidia", "sm_75", "T4", 40, 65536),
    "sm_80": DeviceFacts("nvidia", "sm_80", "A100", 108, 166912),
    "sm_86": DeviceFacts("nvidia", "sm_86", "A10", 72, 101376),
    "sm_89": DeviceFacts("nvidia", "sm_89", "L40S", 142, 101376),
    "sm_90": DeviceFacts("nvidia", "sm_90", "H100", 132, 232448),
    "sm_100": DeviceFacts("nvidia", "sm_100", "B200", 148, 232448),
    "sm_120": DeviceFacts("nvidia", "sm_120", "RTX 5090", 170, 101376),
    "gfx90a": DeviceFacts("amd", "gfx90a", "MI250X", 110, 65536, 64),
    "gfx942": DeviceFacts("amd", "gfx942", "MI300X", 304, 65536, 64),
    "gfx950": DeviceFacts("amd", "gfx950", "MI355X", 256, 163840, 64),
    "gfx1100": DeviceFacts("amd", "gfx1100", "RX 7900 XTX", 96, 65536, 32),
}

_facts: dict[int, DeviceFacts] = {}
_pretended: DeviceFacts | None = None


def device_facts(device: torch.device) -> DeviceFacts:
    """Facts of a torch device; the interpreter's for a CPU device. Asks the driver once a device."""
    if _pretended is not None:
        return _pretended
    if device.type != "cuda":
        return INTERPRETER
    index = torch.cuda.current_device() if device.index is None else device.index
    facts = _facts.get(index)
    if facts is None:
        facts = _facts[index] = _ask_driver(index)
    return facts


def _ask_driver(index: int) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(index)
    count, cache = properties.multi_processor_count, getattr(properties, "L2_cache_size", _CACHE)
    if torch.version.hip is not None:
        arch = properties.gcnArchName.split(":")[0]
        shared = getattr(properties, "shared_memory_per_block", 65536)
        warp_size = getattr(properties, "warp_size", 64)
        return DeviceFacts("amd", arch, properties.name, count, shared, warp_size, cache)
    arch = f"sm_{properties.major}{properties.minor}"
    known = TARGETS.get(arch)
    # Older torch builds do not report the opt-in maximum; the architecture's own figure, or what every CUDA
    # device has without opting in, then stands in.
    shared = getattr(properties, "shared_memory_per_block_optin", known.shared_memory if known else 49152)
    return DeviceFacts("nvidia", arch, properties.name, count, shared, cache=cache)


@contextlib.contextmanager
def pretend(facts: DeviceFacts) -> Iterator[None]:
    """Let :func:`device_facts` answer ``facts`` for every device: offline compilation for an absent GPU."""
    global _pretended
    before, _pretended = _pretended, facts
    try:
        yield
    finally:
        _pretended = before


def device_guard(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current for a launch (Triton launches on the current device)."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _NO_GUARD
