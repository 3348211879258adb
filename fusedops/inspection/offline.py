"""Compile the launches of an operator for any GPU, on a machine that has none.

A launcher is called with CPU tensors while :func:`capture_launches` pretends to be the GPU and writes each
``kernel[grid](…)`` down instead of running it; :func:`compile_launch` compiles one of them through Triton's ordinary
path, with a driver that answers the one question asked: which GPU is it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fusedops.inspection.resources import Resources, amd_resources, nvidia_resources
from fusedops.runtime.backend import HAS_TRITON
from fusedops.runtime.device import TARGETS, DeviceFacts, pretend


class CompilationError(RuntimeError):
    """A kernel does not compile for a target. The message is the compiler's, shortened."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One captured ``kernel[grid](*args, **kwargs)``.

    Attributes:
        kernel: the ``triton.jit`` function.
        args, kwargs: what it was called with, CPU tensors for pointers.
        grid: how many programs, on each axis.
    """

    kernel: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.fn.__name__


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel compiled for a target.

    Attributes:
        name: the kernel's.
        target: the architecture: ``sm_90``, ``gfx942``, …
        registers: a thread (AMD: vector registers a lane).
        spill_bytes: bytes a thread that do not fit into registers.
        shared: bytes of shared memory (LDS) a program.
        num_warps: warps (wavefronts) a block of threads, those that the compiler added included.
        num_ctas: blocks of threads a program: 1, or the size of its cluster.
        num_stages: loads in flight of Triton's pipelined loops; None: it does not say.
        seconds: that compiling took; about 0 where Triton's own cache had it.
        parameters: names of the kernel's arguments that the compiled code takes, in its order. Left out: compile-time
            constants, None, and integers that were 1 (Triton makes constants of them).
        constants: value of every argument that was compiled in.
        asm: the compiler's stages by name: ``ttir``, ``ttgir``, ``ptx``, ``cubin``, ``amdgcn``, …
    """

    name: str
    target: str
    registers: int
    spill_bytes: int
    shared: int
    num_warps: int
    num_ctas: int
    num_stages: int | None
    parameters: tuple[str, ...]
    constants: Mapping[str, Any]
    seconds: float = field(compare=False)
    asm: Mapping[str, Any] = field(repr=False, compare=False)


def target_facts(target: str | DeviceFacts) -> DeviceFacts:
    """Facts of a target by name.

    Args:
        target: a key of :data:`fusedops.runtime.device.TARGETS`, or facts, which are returned as they are.

    Returns:
        What kernels and launchers ask of a device: architecture, multiprocessors, shared memory and the like.

    Raises:
        ValueError: another name; the message has the known ones.

    Examples:
        >>> from fusedops.inspection.offline import target_facts
        >>> target_facts("sm_90").capability, target_facts("gfx942").vendor, target_facts("gfx942").warp_size
        (90, 'amd', 64)
    """
    if isinstance(target, DeviceFacts):
        return target
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}; got {target!r}")
    return TARGETS[target]


# What each thread captures, the innermost context last. Other threads launch as ever.
_captures: dict[int, list[list[Launch]]] = {}
_lock = threading.Lock()
_run: Any = None


@contextlib.contextmanager
def capture_launches(target: str | DeviceFacts) -> Iterator[list[Launch]]:
    """Within the context this thread runs no kernel: each launch is appended to the list that is returned.

    Launchers choose their configurations as if the tensors lay on ``target``. What they return is uninitialised. The
    public functions launch too, on CPU tensors, under ``fusedops.backend("triton")``.

    Args:
        target: a key of :data:`fusedops.runtime.device.TARGETS`, or the facts of any device.

    Yields:
        list[Launch]: what this thread has launched, filled meanwhile.

    Raises:
        ValueError: ``target`` is unknown.
        RuntimeError: Triton is missing, or interprets kernels in this process.

    Examples:
        >>> import torch, fusedops
        >>> from fusedops.inspection.offline import capture_launches, compile_launch
        >>> with fusedops.backend("triton"), capture_launches("sm_90") as launches:
        ...     _ = fusedops.layer_norm(torch.ones(4, 64), 64)
        >>> compile_launch(launches[0], "sm_90").spill_bytes
        0
    """
    global _run
    facts = target_facts(target)
    _check_triton()
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    thread = threading.get_ident()
    with _lock:
        if not _captures:
            _run, JITFunction.run = JITFunction.run, _record
        _captures.setdefault(thread, []).append(launches)
    try:
        with pretend(facts):
            yield launches
    finally:
        with _lock:
            _captures[thread].pop()
            if not _captures[thread]:
                del _captures[thread]
            if not _captures:
                JITFunction.run = _run


def _record(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
    """Stands for ``JITFunction.run`` while any thread captures."""
    thread = threading.get_ident()
    mine = _captures.get(thread)
    if mine is None or thread in _compiling:  # a thread that captures may compile a launch at once
        return _run(self, *args, grid=grid, warmup=warmup, **kwargs)
    if callable(grid):
        grid = grid({**dict(zip(self.arg_names, args, strict=False)), **kwargs})
    mine[-1].append(Launch(self, args, kwargs, tuple(grid)))
    return None


def compile_launch(launch: Launch, target: str | DeviceFacts) -> Compiled:
    """Compile a captured launch for a target, specialised on its arguments as a real launch would be.

    Several threads may compile at once, and others launch kernels meanwhile.

    Args:
        launch: from :func:`capture_launches`, not necessarily under the same target.
        target: a key of :data:`fusedops.runtime.device.TARGETS`, or the facts of any device.

    Returns:
        What the compiler made of it: machine code, registers, spills, shared memory.

    Raises:
        ValueError: ``target`` is unknown.
        RuntimeError: Triton is missing, or interprets kernels in this process.
        CompilationError: the kernel does not compile.
        ToolError: a tool that reads the machine code is missing.

    Examples:
        >>> import torch, fusedops
        >>> from fusedops.inspection.offline import capture_launches, compile_launch
        >>> with fusedops.backend("triton"), capture_launches("sm_90") as launches:
        ...     _ = fusedops.rms_norm(torch.ones(4, 64), 64)
        >>> for target in ("sm_90", "gfx942"):
        ...     compiled = compile_launch(launches[0], target)
        ...     print(target, compiled.spill_bytes, "cubin" in compiled.asm, "amdgcn" in compiled.asm)
        sm_90 0 True False
        gfx942 0 False True
    """
    facts = target_facts(target)
    _check_triton()
    start = time.perf_counter()
    with _offline_driver(facts):
        try:
            kernel = launch.kernel.run(*launch.args, grid=launch.grid, warmup=True, **launch.kwargs)
        except Exception as error:
            raise CompilationError(f"{launch.name} for {facts.arch}: {_shortened(error)}") from error
    seconds = time.perf_counter() - start
    resources = _resources(kernel.asm, facts)
    metadata = kernel.metadata
    return Compiled(
        name=launch.name,
        target=facts.arch,
        registers=resources.registers,
        spill_bytes=resources.spill_bytes,
        shared=int(metadata.shared),
        num_warps=int(metadata.num_warps),
        num_ctas=int(getattr(metadata, "num_ctas", 1)),
        num_stages=getattr(metadata, "num_stages", None),
        parameters=tuple(_parameters(kernel.src.signature)),
        constants=_constants(kernel.src),
        seconds=seconds,
        asm=kernel.asm,
    )


def compile_launches(target: str | DeviceFacts, call: Callable[[], object]) -> list[Compiled]:
    """Compile every launch that ``call()`` makes: :func:`capture_launches`, then :func:`compile_launch` of each.

    Args:
        target: a key of :data:`fusedops.runtime.device.TARGETS`, or the facts of any device.
        call: launches kernels, on CPU tensors.

    Returns:
        The compiled kernels, in the order of their launches.

    Raises:
        ValueError, RuntimeError: as of :func:`capture_launches`.
        CompilationError, ToolError: as of :func:`compile_launch`.

    Examples:
        >>> import torch, fusedops
        >>> from fusedops.inspection.offline import compile_launches
        >>> x = torch.ones(4, 64, requires_grad=True)
        >>> with fusedops.backend("triton"):
        ...     kernels = compile_launches("gfx942", lambda: fusedops.layer_norm(x, 64).sum().backward())
        >>> [(kernel.target, kernel.spill_bytes) for kernel in kernels]
        [('gfx942', 0), ('gfx942', 0)]
    """
    with capture_launches(target) as launches:
        call()
    return [compile_launch(launch, target) for launch in launches]


def _resources(asm: Mapping[str, Any], facts: DeviceFacts) -> Resources:
    if facts.vendor == "amd":
        return amd_resources(asm["amdgcn"])
    return nvidia_resources(asm["cubin"], asm["ptx"], facts.capability)


def _parameters(signature: Mapping[str, Any]) -> Iterator[str]:
    """Names of what a signature passes at run time; a member of a tuple is named ``name[index]``."""
    for name, kind in signature.items():
        if isinstance(kind, tuple):
            yield from _parameters({f"{name}[{index}]": member for index, member in enumerate(kind)})
        elif kind != "constexpr":
            yield name


def _constants(source: Any) -> dict[str, Any]:
    """What was compiled in, by name; Triton's source has it by path (argument, member, …)."""
    names = list(source.signature)
    return {
        names[first] + "".join(f"[{index}]" for index in rest): value
        for (first, *rest), value in source.constants.items()
    }


def _check_triton() -> None:
    if not HAS_TRITON:
        raise RuntimeError("offline compilation needs Triton, which is not installed")
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    if not isinstance(tl.sum, JITFunction):
        raise RuntimeError("offline compilation needs a process without TRITON_INTERPRET=1, which interprets kernels")


class _OfflineDriver:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, facts: DeviceFacts) -> None:
        from triton.backends.compiler import GPUTarget

        # Kernels keep what they compiled by device: a name of its own a target keeps them apart.
        self._device = f"offline {facts.arch}"
        if facts.vendor == "amd":
            self._target = GPUTarget("hip", facts.arch, facts.warp_size)
        else:
            self._target = GPUTarget("cuda", facts.capability, facts.warp_size)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> str:
        return self._device

    def get_current_stream(self, device: str) -> int:
        return 0


# The offline driver of each thread that compiles. While there is one, Triton's own driver and standard output are
# stood in for: a compiling thread meets its offline driver and prints nowhere, the others meet what was there before.
_compiling: dict[int, _OfflineDriver] = {}
_stand_ins: tuple[_Driver, _Output] | None = None


class _Driver:
    """Triton's active driver while threads compile."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __getattr__(self, name: str) -> Any:
        offline = _compiling.get(threading.get_ident())
        if offline is not None:
            return getattr(offline, name)
        if self._before is None:  # nothing has asked for the real driver so far
            from triton.runtime.driver import driver

            self._before = driver.default
        return getattr(self._before, name)


class _Output:
    """Standard output while threads compile: a failing ptxas makes Triton print the whole PTX."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() in _compiling else self._before.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._before, name)


@contextlib.contextmanager
def _offline_driver(facts: DeviceFacts) -> Iterator[None]:
    thread, mine = threading.get_ident(), _OfflineDriver(facts)
    with _lock:
        outer = _compiling.get(thread)
        if not _compiling:
            _stand_in()
        _compiling[thread] = mine
    try:
        yield
    finally:
        with _lock:
            if outer is None:
                del _compiling[thread]
            else:
                _compiling[thread] = outer
            if not _compiling:
                _stand_down()


def _active() -> tuple[Any, str]:
    """Triton's driver configuration and the name of its active driver.

    The public getter would start the real driver, or fail where there is none.
    """
    from triton.runtime.driver import driver

    return driver, "_active" if hasattr(driver, "_active") else "active"


def _stand_in() -> None:
    global _stand_ins
    driver, name = _active()
    _stand_ins = _Driver(getattr(driver, name)), _Output(sys.stdout)
    driver.set_active(_stand_ins[0])
    sys.stdout = _stand_ins[1]


def _stand_down() -> None:
    global _stand_ins
    assert _stand_ins is not None
    driver, name = _active()
    # Unless somebody else has set another one meanwhile.
    if getattr(driver, name) is _stand_ins[0]:
        setattr(driver, name, _stand_ins[0]._before)
    if sys.stdout is _stand_ins[1]:
        sys.stdout = _stand_ins[1]._before
    _stand_ins = None


def _shortened(error: Exception, lines: int = 20) -> str:
    """The message without the program text that some of the compiler's errors carry."""
    text = [line[:300] for line in str(error).splitlines() if line.strip()]
    if len(text) > lines:
        text = [*text[:lines], f"… {len(text) - lines} more lines"]
    return f"{type(error).__name__}: " + "\n".join(text)
