"""What the compiler makes of every default configuration, beside what it made before: the gate against slower code.

``static_baseline.json`` holds figures of every kernel that ``tests/compile`` compiles (each operator in each kind of
its default configurations), for one device of each kind. ``tests/compile/test_static_gate.py`` compares them with what
the kernels compile to now, and so does this command. No GPU is needed. Worse, and an error, is

* a register that is spilt,
* a register or a byte of shared memory that costs a step of occupancy: fewer blocks a multiprocessor,
* over 3 % more instructions in the main loop, counted for each step of Triton's loop where it is known how many of them
  the compiler unrolled; in a kernel without a loop, in all of it,
* a byte more that a program loads or stores, or a number of them that can no longer be told,
* asynchronous products that the assembler serialises (ptxas' warning C7511),
* a kernel that the baseline lacks, or that only the baseline has.

A change for the better is no error, but until the baseline is written anew, it lets the gain be lost again. A change
for the worse that is worth its cost needs a new baseline too, and a commit that says why. A line is one kernel for one
target, so that the commit shows what became of each::

    python -m benchmarks.static_gate                      # compare
    python -m benchmarks.static_gate --only attention     # of one family, or of the cases that begin so
    python -m benchmarks.static_gate --update             # write static_baseline.json, and say what changed

Figures depend on the compiler: the baseline names the version of Triton it was made with, and is compared with no
other.
A kernel whose configuration changed (its tile, warps, stages) has other figures a program and a step: whether it is
better is then for a person to judge, and the table shows the change.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, NamedTuple

from benchmarks.static_baseline import BASELINE, COMMAND, TARGETS, Entries, Entry, Key, entries, load, write
from fusedops.autotune.versions import triton_version
from tests.harness.compile import CompileWorker, all_cases

# Instructions that a main loop may gain, as a share: the compilers' schedules differ by a few from change to change.
LIMIT = 0.03

ADVICE = f"""\
Where a worse figure is worth what it brings, or a kernel is new or gone, write the baseline anew; the commit says why:
    {COMMAND} --update                     (or: make static-baseline)
    {COMMAND} --update --only attention    (only the cases that begin so)"""

Number = int | float | None
Verdict = Literal["fails", "worse", "better", "other"]
_VERDICTS: tuple[Verdict, ...] = ("fails", "worse", "better", "other")


# --- comparison ------------------------------------------------------------------------------------------------------


class Change(NamedTuple):
    """A figure that differs from the baseline's.

    Attributes:
        verdict: ``fails`` (worse than the gate allows), ``worse``, ``better``, or ``other`` (neither, or unknown).
    """

    case: str
    kernel: str
    target: str
    figure: str
    before: str
    after: str
    change: str
    verdict: Verdict

    @property
    def key(self) -> Key:
        return Key(self.case, self.kernel, self.target)


def compare(before: Entries, after: Entries) -> list[Change]:
    """Every figure that differs between two sets of kernels, in the order of the kernels."""
    changes = []
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if old is None:
            changes.append(Change(*key, "missing in the baseline", "none", "launched", "new", "fails"))
        elif new is None:
            changes.append(Change(*key, "only in the baseline", "launched", "none", "gone", "fails"))
        elif old != new:
            changes += [Change(*key, *difference) for difference in _differences(old, new)]
    return changes


_Difference = tuple[str, str, str, str, Verdict]


def _differences(old: Entry, new: Entry) -> Iterator[_Difference]:
    """What explains the others comes first: another configuration moves other bytes in other loops."""
    for figure in ("tile", "warps", "stages"):
        before, after = getattr(old, figure), getattr(new, figure)
        if before != after:
            yield figure, _shown(before), _shown(after), "", "other"
    yield from _more("spill bytes a thread", old.spill_bytes, new.spill_bytes, 0)
    yield from _more("registers", old.registers, new.registers)
    yield from _more("shared memory", old.shared, new.shared)
    if old.warps == new.warps:
        yield from _more("blocks a multiprocessor", old.blocks, new.blocks, 0, worse=-1)
    else:  # blocks of other sizes: what counts is how much the multiprocessor holds
        resident = old.blocks * old.warps, new.blocks * new.warps
        yield from _more("warps a multiprocessor", *resident, 0, worse=-1)
    yield from _work(old, new)
    yield from _more("bytes loaded a program", old.loaded, new.loaded, 0)
    yield from _more("bytes stored a program", old.stored, new.stored, 0)
    yield from _more("serialised products", old.serialised, new.serialised, 0)


def _work(old: Entry, new: Entry) -> Iterator[_Difference]:
    if old.loop is None or new.loop is None:
        if old.loop != new.loop:
            yield "main loop", _loop(old), _loop(new), "", "other"
        yield from _more("instructions", old.instructions, new.instructions, LIMIT)
        return
    steps, figure = (1, 1), "main-loop instructions"
    if old.loop.steps and new.loop.steps:
        steps, figure = (old.loop.steps, new.loop.steps), "main-loop instructions a step"
    yield from _more(figure, old.loop.total / steps[0], new.loop.total / steps[1], LIMIT)
    for kind in ("matrix", "special", "memory", "other"):  # for the reader: which of them
        before, after = getattr(old.loop, kind) / steps[0], getattr(new.loop, kind) / steps[1]
        if before != after:
            yield f"… of them {kind}", _shown(before), _shown(after), _change(before, after), "other"
    yield from _more("instructions", old.instructions, new.instructions)


def _loop(entry: Entry) -> str:
    return f"{entry.loop.total} instructions" if entry.loop else "none"


def _more(
    figure: str, before: Number, after: Number, limit: float | None = None, worse: int = 1
) -> Iterator[_Difference]:
    """A figure of which more (``worse=-1``: less) is worse, and fails by more than a share; None: it never fails."""
    if before == after:
        return
    verdict: Verdict = "other"
    if before is None or after is None:
        if limit is not None and after is None:
            verdict = "fails"
    elif (after - before) * worse < 0:
        verdict = "better"
    else:
        verdict = "worse" if limit is None or abs(after - before) <= limit * before else "fails"
    yield figure, _shown(before), _shown(after), _change(before, after), verdict


def _shown(value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.1f}".removesuffix(".0")
    return f"{value:,}" if isinstance(value, int) else str(value)


def _change(before: Number, after: Number) -> str:
    if before is None or after is None or isinstance(after, bool):
        return ""
    difference = after - before
    sign, number = "-" if difference < 0 else "+", _shown(abs(difference))
    return f"{sign}{number} ({difference / before:+.1%})" if before else f"{sign}{number}"


# --- tables ----------------------------------------------------------------------------------------------------------


def table(changes: Sequence[Change], most: int | None = None) -> str:
    """The changes as a table; what is left out beyond ``most`` rows is counted below it."""
    marks = {"fails": "FAILS", "other": ""}
    rows = [("kernel", "case", "target", "figure", "before", "after", "change", "verdict")]
    rows += [
        (c.kernel, c.case, c.target, c.figure, c.before, c.after, c.change, marks.get(c.verdict, c.verdict))
        for c in changes[:most]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if len(changes) > len(changes[:most]):
        lines.append(f"… {len(changes) - len(changes[:most])} more")
    return "\n".join(lines)


def by_worst(changes: Sequence[Change]) -> dict[Verdict, list[Change]]:
    """The changes by what is worst among those of their kernel: the others of that kernel may explain it."""
    worst: dict[Key, Verdict] = {}
    for change in changes:
        worst[change.key] = min(worst.get(change.key, "other"), change.verdict, key=_VERDICTS.index)
    return {verdict: [c for c in changes if worst[c.key] == verdict] for verdict in _VERDICTS}


def failure(changes: Sequence[Change], most: int | None = None) -> str:
    """Why the gate fails: a line that counts, the kernels in question, and how to update; empty: it does not."""
    shown = by_worst(changes)["fails"]
    if not shown:
        return ""
    count = Counter(change.figure for change in shown if change.verdict == "fails")
    figures = ", ".join(f"{figure} ({number})" for figure, number in count.most_common())
    first = f"{_kernels(shown)} worse than in {BASELINE.name}, or missing: {figures}"
    return f"{first}\n\n{table(shown, most)}\n\n{ADVICE}"


def stale(changes: Sequence[Change], most: int | None = None) -> str:
    """What is better than the baseline has it, so that it should be written anew; empty: nothing is."""
    better = [change for change in changes if change.verdict == "better"]
    if not better:
        return ""
    return (
        f"{_kernels(better)} better than in {BASELINE.name}, which is out of date and lets the gain be lost again\n\n"
        f"{table(better, most)}\n\nKeep it: {COMMAND} --update"
    )


def report(changes: Sequence[Change], kernels: int) -> str:
    """What changed, in full, the worst first."""
    titles = ("Worse than the gate allows", "Worse, but allowed", "Better", "Changed")
    parts = [
        f"## {title}: {len({c.key for c in chosen})}\n\n{table(chosen)}"
        for title, chosen in zip(titles, by_worst(changes).values(), strict=True)
        if chosen
    ]
    differing = len({change.key for change in changes})
    return "\n\n".join([*parts, f"{kernels} kernels compiled; {differing or 'none'} of them differ from the baseline"])


def _kernels(changes: Sequence[Change]) -> str:
    number = len({change.key for change in changes})
    return f"{number} kernel{'s are' if number > 1 else ' is'}"


# --- the command -----------------------------------------------------------------------------------------------------


def work(only: Sequence[str] = (), targets: Sequence[str] = TARGETS) -> list[tuple[str, str]]:
    """The cases that begin with one of ``only`` (none: all), each with a target."""
    return [
        (name, target)
        for name, case in sorted(all_cases().items())
        for target in targets
        if _chosen(name, only) and (case.targets is None or target in case.targets)
    ]


def _chosen(case: str, only: Sequence[str]) -> bool:
    return not only or case.startswith(tuple(only))


def compile_all(chosen: Sequence[tuple[str, str]], jobs: int) -> tuple[dict[Key, Entry], dict[tuple[str, str], str]]:
    """Figures of cases, from as many processes as ``jobs``; and why there are none of the others."""
    from benchmarks.compare import progress

    workers: SimpleQueue[CompileWorker] = SimpleQueue()
    started = [CompileWorker() for _ in range(jobs)]
    for worker in started:
        workers.put(worker)
    errors: dict[tuple[str, str], str] = {}

    def ask(case: str, target: str) -> dict[Key, Entry]:
        worker = workers.get()
        try:
            return entries(case, target, worker.figures(case, target))
        except AssertionError as error:  # it does not compile: its message; the others are still wanted
            errors[case, target] = str(error)
            return {}
        finally:
            workers.put(worker)

    found: dict[Key, Entry] = {}
    try:
        with progress() as bar, ThreadPoolExecutor(jobs) as pool:
            for answer in bar.track(pool.map(ask, *zip(*chosen, strict=True)), len(chosen), description="compiling"):
                found.update(answer)
    finally:
        for worker in started:
            worker.close()
    return found, errors


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 nothing is worse (or it was written), 1 something is, 2 not to be told."""
    options = _options(arguments)
    path: Path = options.baseline
    triton = triton_version()
    if triton is None:
        print("compiling kernels needs Triton, which is not installed", file=sys.stderr)
        return 2
    whole = not options.only and set(options.targets) == set(TARGETS)
    try:
        version, baseline = load(path)
    except (FileNotFoundError, ValueError) as error:
        if not options.update or not (whole or isinstance(error, FileNotFoundError)):
            print(error, file=sys.stderr)
            return 2
        version, baseline = triton, {}
    if version != triton and not (options.update and whole):
        what = "so only all of it can be written anew" if options.update else "so nothing is compared"
        print(f"{path} was made with Triton {version}, and this is {triton}: {what}", file=sys.stderr)
        return 2
    chosen = work(options.only, options.targets)
    if not chosen:
        print(f"no case begins with {', '.join(options.only)} for {', '.join(options.targets)}", file=sys.stderr)
        return 2
    found, errors = compile_all(chosen, options.jobs)
    for (case, target), error in sorted(errors.items()):
        print(f"{case} for {target}: {error}", file=sys.stderr)
    if errors:
        print(f"{len(errors)} of {len(chosen)} cases do not compile", file=sys.stderr)
        return 1
    mine = {k: entry for k, entry in baseline.items() if _chosen(k.case, options.only) and k.target in options.targets}
    changes = compare(mine, found)
    if baseline:
        print(report(changes, len(found)))
    if options.update:
        rest = {key: entry for key, entry in baseline.items() if key not in mine}
        write(path, triton, {**rest, **found})
        print(f"{path}: {len(rest) + len(found)} kernels, with Triton {triton}")
        return 0
    if any(change.verdict == "fails" for change in changes):
        print(f"\n{ADVICE}")
        return 1
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help=f"write {BASELINE.name}")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help="cases that begin so, as attention")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=TARGETS, metavar="TARGET")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile at once (default: 2)")
    parser.add_argument("--baseline", type=Path, default=BASELINE, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
