"""What ``fusedops inspect`` prints for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fusedops.cli.output import human_bytes, stdout
from fusedops.cli.problems import short
from fusedops.inspection.figures import Figures, LoopFigures
from fusedops.inspection.report import Row

# Columns that the table needs.
_WIDE = 150


def show(rows: Sequence[Row]) -> None:
    """Print rows: as tables on a wide terminal, else a few lines each."""
    console = stdout()
    for device in dict.fromkeys(row.facts for row in rows):
        here = [row for row in rows if row.facts == device]
        console.print(f"[bold]{escape(device.name)}[/] ({device.arch})", soft_wrap=True)
        if console.is_terminal and console.width >= _WIDE:
            _table(console, here)
        else:
            for row in here:
                _plainly(console, row)
        for row in here:
            _code(console, row)


def _table(console: Console, rows: Sequence[Row]) -> None:
    table = Table(
        "kernel", "configuration", "registers", "spilt B", "shared", "blocks", "occupancy", "matrix", "special",
        "memory", "other", "loaded", "stored", "bits", "at most",
    )  # fmt: skip
    for column in table.columns[2:-1]:
        column.justify, column.no_wrap = "right", True
    for column in table.columns[:2]:
        column.overflow = "fold"
    notes = []
    before = None
    for row in rows:
        if row.problem != before:
            table.add_section()
        before = row.problem
        name = _name(row)
        found = row.figures
        if found is None:
            table.add_row(escape(name), escape(_configuration(row)), "[red]failed[/]")
            notes.append(f"{name}: {row.error}")
            continue
        loop = found.loop
        counts = [_count(loop, kind) for kind in ("matrix", "special", "memory", "other")]
        table.add_row(
            escape(name), escape(_configuration(row)), str(found.registers), _warned(found.spill_bytes),
            human_bytes(found.shared), str(found.blocks_per_multiprocessor), f"{found.occupancy:.0%}", *counts,
            _moved(found.loaded), _moved(found.stored), " ".join(map(str, found.widths)), _share(found),
        )  # fmt: skip
        notes += [f"{name}: {note}" for note in (*_warnings(found), *row.notes)]
    console.print(table)
    for note in dict.fromkeys(notes):
        console.print(f"  {escape(note)}", soft_wrap=True)


def _plainly(console: Console, row: Row) -> None:
    lines = [f"[bold]{escape(_name(row))}[/]"]
    if row.config is not None:
        lines.append(f"  {escape(_configuration(row))}")
    lines.append(f"  {escape(short(row.problem))}")
    found = row.figures
    if found is None:
        lines.append(f"  [red]failed:[/] {escape(str(row.error))}")
    else:
        spilt = f"[red]{found.spill_bytes} bytes spilt[/]" if found.spill_bytes else "none spilt"
        lines.append(f"  {found.registers} registers, {spilt}; {human_bytes(found.shared)} of shared memory a program")
        lines.append(
            f"  {found.blocks_per_multiprocessor} blocks a multiprocessor, occupancy {found.occupancy:.0%}, limited by"
            f" {found.occupancy_limit}"
        )
        lines.append(f"  {_loop(found)}")
        lines += [f"  {line}" for line in _traffic(row, found)]
        lines.append(f"  {_bound(found)}")
        if found.bound is not None:
            cycles = ", ".join(f"{count:.0f} {unit}" for unit, count in found.bound.cycles.items())
            lines.append(f"  cycles a turn of a program, at least: {cycles}")
        lines += [f"  [yellow]{escape(warning)}[/]" for warning in _warnings(found)]
    lines += [f"  note: {escape(note)}" for note in row.notes]
    for line in lines:
        console.print(line, soft_wrap=True)


def _loop(found: Figures) -> str:
    loop = found.loop
    if loop is None:
        return f"{found.instructions} instructions, no loop"
    steps = {None: "", 1: ""}.get(loop.steps, f", {loop.steps} steps a turn")
    return (
        f"hot loop: {loop.matrix} matrix, {loop.special} special, {loop.memory} memory, {loop.other} other"
        f" instructions{steps}; {found.instructions} in the kernel"
    )


def _traffic(row: Row, found: Figures) -> list[str]:
    if found.loaded is None or found.stored is None:
        return ["bytes a program: not to be told where tensor descriptors copy"]
    widths = f" in accesses of {', '.join(map(str, found.widths))} bits" if found.widths else ""
    lines = [f"a program loads {human_bytes(found.loaded)}{widths} and stores {human_bytes(found.stored)}, a turn"]
    if found.loop is None:
        lines = [lines[0].removesuffix(", a turn")]
    if row.elements is not None:
        each = row.elements
        mark = ", parameters and sums included" if each.all_arguments else ""
        lines.append(
            f"bytes an element of its largest tensors: {each.loaded:.4g} loaded, {each.stored:.4g} stored{mark}"
        )
    return lines


def _name(row: Row) -> str:
    source = "" if row.source == "fusedops" else f" ({row.source})"
    return f"{row.op} {row.kernel or ''}".rstrip() + source


def _configuration(row: Row) -> str:
    if row.config is not None:
        return " ".join(
            name if value is True else f"{name}={value}"
            for name, value in row.config.items()
            if value not in (False, None, "")
        )
    found = row.figures
    if found is None:
        return "–"
    tile = [f"{name}={size}" for name, size in row.tile.items()]
    return " ".join([*tile, f"num_warps={found.num_warps}", f"num_stages={found.num_stages}"])


def _count(loop: LoopFigures | None, kind: str) -> str:
    if loop is None:
        return "–"
    count = getattr(loop, kind)
    return f"{count}/{loop.steps}" if loop.steps not in (None, 1) else str(count)


def _warned(count: int) -> str:
    return f"[red]{count}[/]" if count else "0"


def _moved(count: int | None) -> str:
    return "–" if count is None else human_bytes(count)


def _bound(found: Figures) -> str:
    bound = found.bound
    if bound is None:
        return "bound: not to be told"
    limit = "" if bound.share > 0.995 else f", by {bound.unit}"
    return f"at most {bound.share:.0%} of the {bound.peak}'{'' if bound.peak.endswith('s') else 's'} peak{limit}"


def _share(found: Figures) -> str:
    bound = found.bound
    return "–" if bound is None else f"{bound.share:.0%}, {bound.peak if bound.share > 0.995 else bound.unit}"


def _warnings(found: Figures) -> list[str]:
    return ["the assembler serialises its asynchronous products (C7511)"] * found.serialised


def _code(console: Console, row: Row) -> None:
    if not row.code:
        return
    console.print(f"[bold]{escape(_name(row))}[/]", soft_wrap=True)
    for kind, text in row.code:
        console.print(escape(text if kind is None else f"  {kind:8s} {text}"), soft_wrap=True)
