"""``attention.py --static``: what the attention forward's loops consist of, read from their code. No GPU is needed.

The public function is called on CPU tensors while launches are written down instead of run
(:mod:`fusedops.inspection.offline`), the kernel is compiled for the target, and its machine code is read
(:mod:`fusedops.inspection.sass`). Beside it stand the two forms of :mod:`fusedops.inspection.textbook`, compiled with
the same tile, warps and stages: the one that takes any lengths, as ours does, and the one that takes whole tiles only.

Ours has a loop over the tiles of keys that every query of a tile sees, and one or two over those at the edges (the
diagonal, the ends), which need masks. Most of the work is the first one's: it is the main loop, that with the fewest
other instructions. The textbook has one loop for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import fusedops
from benchmarks.compare import OURS
from benchmarks.measure import markdown_table
from fusedops.inspection.loops import counts_of, steps_of
from fusedops.inspection.offline import Launch, capture_launches, compile_launch
from fusedops.inspection.sass import Mix, code, innermost_loops, serialised
from fusedops.runtime.launch import options as launch_options

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
KINDS = ("all", "causal")
SIZES = (64, 128)
TEXTBOOK, WHOLE = "textbook", "textbook, whole tiles"

# Long enough for every architecture's largest tile, and a multiple of it.
LENGTH, HEADS = 8192, 16


@dataclass(frozen=True, slots=True)
class StaticResult:
    """One kernel's code.

    Attributes:
        source: ``fusedops``, ``textbook`` or ``textbook, whole tiles``.
        size: of the heads.
        tile: queries x keys of a step.
        matrix: the matrix instructions of the main loop, the most frequent first.
        steps: tiles of keys a turn of the loop, which the compilers may unroll.
        matrix_count, exponentials, others: instructions of the main loop, each counted once; others: all that are
            neither.
        copies, barriers: how many of the others move data or wait.
        edge_matrix, edge_others: the same of the loop with the most other instructions; None: there is but one loop.
        serialised: the assembler waits for every single asynchronous product (ptxas' warning C7511).
        error: why there is no figure; None: there is.
    """

    target: str
    size: int
    causal: bool
    dtype: str
    source: str
    kernel: str | None = None
    tile: str | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    matrix: str | None = None
    steps: int | None = None
    matrix_count: int | None = None
    exponentials: int | None = None
    others: int | None = None
    copies: int | None = None
    barriers: int | None = None
    edge_matrix: int | None = None
    edge_others: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    shared: int | None = None
    serialised: bool | None = None
    error: str | None = None

    def a_step(self, figure: str) -> float | None:
        """A figure of the main loop for each tile of queries x keys."""
        count = getattr(self, figure)
        return count / self.steps if count is not None and self.steps else None

    @property
    def others_per_matrix(self) -> float | None:
        return self.others / self.matrix_count if self.matrix_count and self.others is not None else None

    @property
    def edge_others_per_matrix(self) -> float | None:
        return self.edge_others / self.edge_matrix if self.edge_matrix and self.edge_others is not None else None

    def as_dict(self) -> dict[str, Any]:
        ratios = ("others_per_matrix", "edge_others_per_matrix")
        figures = ("matrix_count", "exponentials", "others")
        return {
            **asdict(self),
            **{name: getattr(self, name) for name in ratios},
            **{f"{name.removesuffix('_count')}_a_step": self.a_step(name) for name in figures},
        }

    row = as_dict


def inspect(target: str, size: int, causal: bool, dtype: torch.dtype) -> list[StaticResult]:
    """Our forward and the textbook's two of its tile, compiled for a target."""
    names: dict[str, Any] = {
        "target": target,
        "size": size,
        "causal": causal,
        "dtype": str(dtype).removeprefix("torch."),
    }
    q, k, v = (torch.empty(1, HEADS, LENGTH, size, dtype=dtype) for _ in range(3))  # not even touched
    try:
        with fusedops.backend("triton"), capture_launches(target) as launches:
            fusedops.attention(q, k, v, causal=causal)
        ours, kwargs = _forward(launches)
        tile = int(kwargs["BLOCK_M"]), int(kwargs["BLOCK_N"])
    except Exception as error:  # a kernel that this version cannot launch is a result; the others are still wanted
        return [StaticResult(**names, source=OURS, error=_short(error))]

    from fusedops.inspection.textbook import attention as textbook_attention

    with capture_launches(target) as launches:
        options = launch_options(kwargs["num_warps"], kwargs["num_stages"])
        for whole in (False, True):
            textbook_attention.launch(q, k, v, causal, tile, options, whole)
    found = {
        **names,
        "tile": " x ".join(map(str, tile)),
        "num_warps": kwargs["num_warps"],
        "num_stages": kwargs["num_stages"],
    }
    sources = {OURS: ours, TEXTBOOK: launches[0], WHOLE: launches[1]}
    return [_read(launch, target, {**found, "source": source}) for source, launch in sources.items()]


def _forward(launches: Sequence[Launch]) -> tuple[Launch, dict[str, Any]]:
    """The launch that works on tiles of queries and keys, and its arguments by name."""
    for launch in launches:
        arguments = {**dict(zip(launch.kernel.arg_names, launch.args, strict=False)), **launch.kwargs}
        if {"BLOCK_M", "BLOCK_N"} <= set(arguments):
            return launch, arguments
    raise LookupError(f"none of {', '.join(launch.name for launch in launches) or 'no launch'} has BLOCK_M and BLOCK_N")


def _read(launch: Launch, target: str, names: dict[str, Any]) -> StaticResult:
    names["kernel"] = launch.name
    try:
        compiled = compile_launch(launch, target)
        instructions, labels = code(compiled)
        inner = innermost_loops(instructions, labels)
        steps = steps_of(compiled, [counts_of(instructions, loop.body) for loop in inner])
        mixes = ((Mix.of(instructions[at] for at in loop.body), step) for loop, step in zip(inner, steps, strict=True))
        with_products = [(mix, step) for mix, step in mixes if mix.count("matrix")]
        resources: dict[str, Any] = {
            "registers": compiled.registers,
            "spill_bytes": compiled.spill_bytes,
            "shared": compiled.shared,
            "serialised": serialised(compiled),
        }
    except Exception as error:  # one that does not compile is a result too
        return StaticResult(**names, error=_short(error))
    if not with_products:
        return StaticResult(**names, **resources, error="no loop has matrix instructions")
    (main, main_steps), *edges = sorted(with_products, key=lambda one: _others(one[0]) / one[0].count("matrix"))
    counts: dict[str, Any] = {
        "matrix": ", ".join(main.names("matrix")),
        "steps": main_steps,
        "matrix_count": main.count("matrix"),
        "exponentials": main.count("special"),
        "others": _others(main),
        "copies": main.count("copy"),
        "barriers": main.count("barrier"),
    }
    if edges:
        edge, _ = edges[-1]
        counts.update(edge_matrix=edge.count("matrix"), edge_others=_others(edge))
    return StaticResult(**names, **resources, **counts)


def _others(mix: Mix) -> int:
    return sum(mix.count(kind) for kind in ("copy", "barrier", "other"))


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


# --- report ----------------------------------------------------------------------------------------------------------

# What ours is to have no more of, by the figure's name in the table. Of the main loop, a step; of the kernel.
_OF_A_STEP = {"matrix": "matrix_count", "exponentials": "exponentials", "others": "others"}
_OF_THE_KERNEL = {"registers": "registers", "spilled B": "spill_bytes"}


def more(ours: StaticResult, textbook: StaticResult) -> dict[str, tuple[float, float]]:
    """What ours has more of than the textbook's, by name: (ours, its).

    The loops' figures are compared for each tile of queries x keys, the same in both, so that neither unrolling nor the
    size of a matrix instruction misleads.

    Raises:
        ValueError: a figure is missing.
    """
    found = {}
    for name, figure in (*_OF_A_STEP.items(), *_OF_THE_KERNEL.items()):
        a, b = (one.a_step(figure) if name in _OF_A_STEP else getattr(one, figure) for one in (ours, textbook))
        if a is None or b is None:
            raise ValueError(f"{name} of {ours.target} D {ours.size} are not known: {ours.error or textbook.error}")
        if a > b:
            found[name] = (a, b)
    return found


def verdict(group: Sequence[StaticResult], beside: str = TEXTBOOK) -> str:
    """What ours has more of than one of the textbook's; ``no more`` where it is nothing."""
    one = {result.source: result for result in group}
    try:
        found = more(one[OURS], one[beside])
    except (KeyError, ValueError):
        return "–"
    return ", ".join(f"{name} {a:g} > {b:g}" for name, (a, b) in found.items()) or "no more"


def groups(results: Iterable[StaticResult]) -> list[list[StaticResult]]:
    """Results that stand beside one another."""
    found: dict[tuple[object, ...], list[StaticResult]] = {}
    for result in results:
        found.setdefault((result.target, result.size, result.causal, result.dtype), []).append(result)
    return list(found.values())


def table(results: Sequence[StaticResult]) -> str:
    """A row a kernel; the textbook's figures follow ours, those of the form for whole tiles last."""
    columns = (
        "target", "D", "keys", "dtype", "tile", "warps, stages", "matrix a step", "exponentials a step",
        "others a step", "others/matrix", "at edges", "registers", "spilled B", "ours has", "beside whole tiles",
    )  # fmt: skip
    return markdown_table(columns, [_row(group) for group in groups(results)])


def summary(results: Sequence[StaticResult]) -> str:
    """In how many of the cases ours has no more of anything."""
    found = groups(results)
    none = [sum(verdict(group, beside) == "no more" for group in found) for beside in (TEXTBOOK, WHOLE)]
    return (
        f"fusedops has no more of anything than the textbook's in {none[0]} of {len(found)}; than that which takes"
        f" whole tiles only, in {none[1]}."
    )


def _row(group: Sequence[StaticResult]) -> tuple[str, ...]:
    ours = group[0]
    launch = "–" if ours.num_warps is None else f"{ours.num_warps}, {ours.num_stages}"
    return (
        ours.target, str(ours.size), "causal" if ours.causal else "all", ours.dtype, ours.tile or "–", launch,
        " / ".join(dict.fromkeys(map(_matrix, group))),
        *(" / ".join(_cell(result.a_step(figure)) for result in group) for figure in ("exponentials", "others")),
        *(
            " / ".join(_cell(getattr(result, figure)) for result in group)
            for figure in ("others_per_matrix", "edge_others_per_matrix", "registers", "spill_bytes")
        ),
        verdict(group), verdict(group, WHOLE),
    )  # fmt: skip


def _matrix(result: StaticResult) -> str:
    if result.error is not None:
        return result.error[:60]
    unrolled = "" if result.steps == 1 else f", {result.steps or 'unknown'} steps a turn"
    serial = " serialised" if result.serialised else ""
    return f"{_cell(result.a_step('matrix_count'))} {result.matrix}{serial}{unrolled}"


def _cell(value: float | None) -> str:
    if value is None:
        return "–"
    return str(int(value)) if value == int(value) else f"{value:.2f}"


NOTE = (
    "Instructions of the main loop as they stand in the code, each once, for a step: a tile of queries x keys."
    " exponentials: MUFU and AMD's like; others: all but these and the matrix instructions; at edges: others/matrix of"
    " the loop that masks. After the /: a textbook forward with the same tile, warps and stages, and one that takes"
    " whole tiles only."
)
