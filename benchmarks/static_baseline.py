"""What the static gate holds of each kernel, and the file that it is kept in, ``static_baseline.json``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
BASELINE = Path(__file__).with_name("static_baseline.json")

COMMAND = "python -m benchmarks.static_gate"


class Key(NamedTuple):
    """One kernel that a case launches, compiled for a target. A second launch of it is named ``kernel#2``."""

    case: str
    kernel: str
    target: str

    def __str__(self) -> str:
        return " ".join(self)


class Loop(NamedTuple):
    """Instructions of the main loop by kind, each counted once, and how many steps of Triton's loop they are."""

    matrix: int
    special: int
    memory: int
    other: int
    steps: int | None

    @property
    def total(self) -> int:
        return self.matrix + self.special + self.memory + self.other


@dataclass(frozen=True, slots=True)
class Entry:
    """What one kernel consists of; the figures are those of :class:`fusedops.inspection.figures.Figures`.

    Attributes:
        tile: sizes of the blocks, as ``M=128 N=64``: with ``warps`` and ``stages`` the configuration.
        registers: a thread.
        spill_bytes: bytes a thread that do not fit into registers.
        shared: bytes of shared memory a program.
        blocks: blocks of threads that a multiprocessor holds at once.
        instructions: of the whole kernel.
        loop: the main loop; None: there is none.
        loaded, stored: bytes a program moves, every loop counted as one turn; None: not to be told.
        serialised: the assembler waits for each single asynchronous product.
    """

    tile: str
    warps: int
    stages: int | None
    registers: int
    spill_bytes: int
    shared: int
    blocks: int
    instructions: int
    loop: Loop | None
    loaded: int | None
    stored: int | None
    serialised: bool

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> Entry:
        """From what :meth:`tests.harness.compile.CompileWorker.figures` tells of a launch."""
        loop = figures["loop"]
        return cls(
            tile=" ".join(f"{name.removeprefix('BLOCK_')}={size}" for name, size in sorted(figures["tile"].items())),
            warps=figures["num_warps"],
            stages=figures["num_stages"],
            registers=figures["registers"],
            spill_bytes=figures["spill_bytes"],
            shared=figures["shared"],
            blocks=figures["blocks_per_multiprocessor"],
            instructions=figures["instructions"],
            loop=None if loop is None else Loop(**{name: loop[name] for name in Loop._fields}),
            loaded=figures["loaded"],
            stored=figures["stored"],
            serialised=figures["serialised"],
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "loop": None if self.loop is None else self.loop._asdict()}


Entries = Mapping[Key, Entry]


def entries(case: str, target: str, figures: Iterable[Mapping[str, Any]]) -> dict[Key, Entry]:
    """What the launches of a case consist of; ``figures`` in the order of the launches."""
    launches: Counter[str] = Counter()
    found = {}
    for launch in figures:
        name = launch["name"]
        launches[name] += 1
        found[Key(case, name if launches[name] == 1 else f"{name}#{launches[name]}", target)] = Entry.of(launch)
    return found


def render(triton: str, found: Entries) -> str:
    """The file's text: the version of Triton, then the kernels in order, one a line."""
    lines = [f"{json.dumps(str(key))}: {json.dumps(found[key].as_dict())}" for key in sorted(found)]
    return f'{{\n"triton": {json.dumps(triton)},\n"kernels": {{\n' + ",\n".join(lines) + "\n}\n}\n"


def load(path: Path = BASELINE) -> tuple[str, dict[Key, Entry]]:
    """The version of Triton that a baseline was made with, and its entries.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not one that :func:`render` wrote.
    """
    text = path.read_text()
    try:
        content = json.loads(text)
        found = {}
        for name, fields in content["kernels"].items():
            loop = fields.pop("loop")
            found[Key(*name.split(" "))] = Entry(**fields, loop=None if loop is None else Loop(**loop))
        return content["triton"], found
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no baseline of this version: {error}; write it with {COMMAND} --update") from error


def write(path: Path, triton: str, found: Entries) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(render(triton, found))
    unfinished.replace(path)
