"""Facts about the device that a kernel runs on, or is compiled for.

Nothing here touches a driver before :func:`device_facts` is called with a CUDA device.
"""

from __future__ import annotations

import contextlib
import functools
import threading
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
        memory: bytes of device memory; 0 where nobody asked.
    """

    vendor: Literal["nvidia", "amd", "interpreter"]
    arch: str
    name: str
    multiprocessor_count: int
    shared_memory: int
    warp_size: int = 32
    cache: int = _CACHE
    memory: int = 0

    def __hash__(self) -> int:
        # Every look-up of a configuration hashes its device. Python keeps a string's hash.
        return hash(self.name)

    @property
    def capability(self) -> int:
        """NVIDIA's compute capability as one number (90 for sm_90); 0 for other vendors."""
        return _capability(self.arch) if self.vendor == "nvidia" else 0


@functools.cache
def _capability(arch: str) -> int:
    return int(arch.removeprefix("sm_"))


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

_facts: dict[torch.device, DeviceFacts] = {}
# By thread: what is pretended there.
_pretended: dict[int, DeviceFacts] = {}
# Threads whose calls take the kernels' way while nothing is launched.
_unlaunched: set[int] = set()


def device_facts(device: torch.device) -> DeviceFacts:
    """Facts of a torch device; the interpreter's for a CPU device. Asks the driver once a device."""
    if _pretended and (pretended := _pretended.get(threading.get_ident())) is not None:
        return pretended
    return _facts.get(device) or _first_facts(device)


def pretending() -> bool:
    """Whether this thread pretends that its tensors lie on another device."""
    return bool(_pretended) and threading.get_ident() in _pretended


def launches_nothing() -> bool:
    """Whether this thread's operators compute by their reference formulas whatever :func:`device_facts` says."""
    return bool(_unlaunched) and threading.get_ident() in _unlaunched


def _first_facts(device: torch.device) -> DeviceFacts:
    if device.type != "cuda":
        facts = INTERPRETER
    elif device.index is None:  # another device tomorrow
        return device_facts(torch.device("cuda", torch.cuda.current_device()))
    else:
        facts = _ask_driver(device.index)
    _facts[device] = facts
    return facts


def _ask_driver(index: int) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(index)
    count, cache = properties.multi_processor_count, getattr(properties, "L2_cache_size", _CACHE)
    memory = getattr(properties, "total_memory", 0)
    if torch.version.hip is not None:
        arch = properties.gcnArchName.split(":")[0]
        shared = getattr(properties, "shared_memory_per_block", 65536)
        warp_size = getattr(properties, "warp_size", 64)
        return DeviceFacts("amd", arch, properties.name, count, shared, warp_size, cache, memory)
    arch = f"sm_{properties.major}{properties.minor}"
    known = TARGETS.get(arch)
    # Older torch builds do not report the opt-in maximum; the architecture's own figure, or what every CUDA
    # device has without opting in, then stands in.
    shared = getattr(properties, "shared_memory_per_block_optin", known.shared_memory if known else 49152)
    return DeviceFacts("nvidia", arch, properties.name, count, shared, cache=cache, memory=memory)


@contextlib.contextmanager
def pretend(facts: DeviceFacts) -> Iterator[None]:
    """Let :func:`device_facts` answer ``facts`` for every device: offline compilation for an absent GPU.

    In this thread only: others may launch kernels meanwhile.
    """
    thread = threading.get_ident()
    before = _pretended.get(thread)
    _pretended[thread] = facts
    try:
        yield
    finally:
        if before is None:
            del _pretended[thread]
        else:
            _pretended[thread] = before


@contextlib.contextmanager
def pretend_unlaunched(facts: DeviceFacts) -> Iterator[None]:
    """As :func:`pretend`, and no kernel is needed: the operators compute by their reference formulas.

    So a call with CPU tensors takes the way that it takes on that device, saves for its backward what it saves there,
    and has the right values, where Triton is missing too.
    """
    thread = threading.get_ident()
    inside = thread in _unlaunched
    with pretend(facts):
        _unlaunched.add(thread)
        try:
            yield
        finally:
            if not inside:
                _unlaunched.discard(thread)


def device_guard(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current for a launch (Triton launches on the current device)."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _NO_GUARD
