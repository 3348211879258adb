"""A captured launch, compiled and read: one row of ``fusedops inspect``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fusedops.inspection.elements import ElementBytes, element_bytes
from fusedops.inspection.figures import Figures, figures
from fusedops.inspection.loops import hot_loop
from fusedops.inspection.offline import CompilationError, Compiled, Launch, compile_launch
from fusedops.inspection.operators import Captured
from fusedops.inspection.resources import ToolError
from fusedops.inspection.sass import Instruction, code
from fusedops.inspection.traffic import memory_traffic
from fusedops.runtime.device import DeviceFacts


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel for one device.

    Attributes:
        op, problem, source: as of :class:`fusedops.inspection.operators.Captured`.
        kernel: its name; None: nothing was launched.
        facts: of the device.
        config: the configuration's fields; None: another's kernels choose their own.
        tile: the kernel's compile-time arguments named ``BLOCK…``.
        figures: what the code tells; None: it does not compile.
        elements: bytes an element of the largest tensors, of a kernel without matrix instructions; None: not to be
            told.
        notes: what a reader should know.
        error: why there are no figures.
        code: the machine code asked for, a line each: its kind (None: a label) and its text.
    """

    op: str
    problem: str
    source: str
    kernel: str | None
    facts: DeviceFacts
    config: Mapping[str, Any] | None = None
    tile: Mapping[str, int] = field(default_factory=dict)
    figures: Figures | None = None
    elements: ElementBytes | None = None
    notes: tuple[str, ...] = ()
    error: str | None = None
    code: tuple[tuple[str | None, str], ...] = ()

    @classmethod
    def failed(cls, captured: Captured, kernel: str | None, error: str) -> Row:
        config = None if captured.config is None else captured.config.to_json()
        return cls(
            captured.op, captured.problem, captured.source, kernel, captured.facts, config, notes=captured.notes,
            error=error,
        )  # fmt: skip

    @property
    def identity(self) -> tuple[Any, ...]:
        """What rows that say the same have in common: a kernel that several problems of a call launch."""
        told = self.problem if self.figures is None else repr(self.figures)
        return self.op, self.source, self.facts, self.kernel, told, self.error

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "problem": self.problem,
            "source": self.source,
            "kernel": self.kernel,
            "target": self.facts.arch,
            "device": self.facts.name,
            "config": None if self.config is None else dict(self.config),
            "tile": dict(self.tile),
            "figures": None if self.figures is None else asdict(self.figures),
            "bytes_an_element": None if self.elements is None else asdict(self.elements),
            "notes": list(self.notes),
            "error": self.error,
            **({"code": [list(line) for line in self.code]} if self.code else {}),
        }


def row_of(captured: Captured, launch: Launch, with_code: bool = False, whole: bool = False) -> Row:
    """Compile one launch and read it; what keeps it from that is the row's error.

    Args:
        with_code: the row tells the hot loop's machine code, or the kernel's where it has no loop.
        whole: the whole kernel's.
    """
    try:
        compiled = compile_launch(launch, captured.facts)
        found = figures(compiled, captured.facts, captured.memory_bound)
        lines = _lines(compiled, whole) if with_code else ()
    except (CompilationError, ToolError) as error:
        return Row.failed(captured, launch.name, str(error))
    notes = list(captured.notes)
    if compiled.shared > captured.facts.shared_memory:
        most = captured.facts.shared_memory
        notes.append(f"it cannot be launched: {compiled.shared} bytes of shared memory a program; there are {most}")
    return Row(
        op=captured.op,
        problem=captured.problem,
        source=captured.source,
        kernel=launch.name,
        facts=captured.facts,
        config=None if captured.config is None else captured.config.to_json(),
        tile={k: v for k, v in compiled.constants.items() if k.startswith("BLOCK") and isinstance(v, int)},
        figures=found,
        elements=_elements(launch, compiled) if found.loop is None or not found.loop.matrix else None,
        notes=tuple(notes),
        code=lines,
    )


def _elements(launch: Launch, compiled: Compiled) -> ElementBytes | None:
    """Bytes an element of the kernel's largest tensors."""
    arguments = {**dict(zip(launch.kernel.arg_names, launch.args, strict=False)), **launch.kwargs}
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    most = max((tensor.numel() for tensor in tensors.values()), default=0)
    sizes = {name: tensor.element_size() for name, tensor in tensors.items() if tensor.numel() == most}
    if not any(name.startswith("BLOCK") for name in compiled.constants):
        return None
    try:
        found = element_bytes(compiled, memory_traffic(compiled), sizes)
    except ValueError:
        return None
    # Where one of the arguments named BLOCK… is no side of the tile, less than an element seems to be moved.
    return found if found.loaded + found.stored >= min(sizes.values(), default=0) else None


def _lines(compiled: Compiled, whole: bool) -> tuple[tuple[str | None, str], ...]:
    instructions, labels = code(compiled)
    loop = hot_loop(compiled, instructions, labels)
    chosen: Sequence[int] = range(len(instructions)) if whole or loop is None else sorted(loop.body)
    at = {index: name for name, index in labels.items()}
    lines: list[tuple[str | None, str]] = []
    for index in chosen:
        if index in at:
            lines.append((None, f"{at[index]}:"))
        lines.append((instructions[index].kind, _text(instructions[index])))
    return tuple(lines)


def _text(one: Instruction) -> str:
    guard = "" if one.guard is None else f"{one.guard.strip()} "
    return f"{guard}{one.opcode}{one.rest}".rstrip()
