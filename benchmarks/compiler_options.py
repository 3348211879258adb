"""What launch options that no configuration has would do to the compiled kernels. No GPU is needed.

    python -m benchmarks.compiler_options attention/causal_128_bfloat16_forward --target sm_90 maxnreg=168 num_ctas=2

compiles each launch of a compile case (``tests/compile``) as it is and once more with each of the options, or with
several at once (``maxnreg=168,num_stages=3``), and prints what came of it. ``maxnreg``, the most registers a thread may
have; ``num_ctas``, blocks of threads that share a tile; whatever else Triton's launches take. An option may also be a
compile-time argument of the kernel (``BLOCK_N=128``). docs/kernels.md has the findings.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.measure import markdown_table
from fusedops.inspection.figures import Figures, figures
from fusedops.inspection.offline import Launch, capture_launches, compile_launch
from fusedops.runtime.device import TARGETS
from tests.harness.compile import all_cases

_COLUMNS = (
    "kernel", "target", "options", "registers", "spilled B", "shared KB", "blocks", "matrix", "special", "memory",
    "other", "at most", "limited by",
)  # fmt: skip


def parse(text: str) -> dict[str, int | bool]:
    """``maxnreg=168,num_stages=3``; values are integers, ``true`` or ``false``. ValueError for anything else."""
    options: dict[str, int | bool] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not name.isidentifier() or not equals:
            raise ValueError(f"an option is NAME=VALUE, as maxnreg=168; got {part!r}")
        options[name] = value == "true" if value in ("true", "false") else int(value)
    return options


def row(launch: Launch, target: str, options: dict[str, Any], text: str) -> tuple[str, ...]:
    """One line of the table; a launch that does not compile with the options has the reason."""
    names = (launch.name, target, text)
    try:
        with _silent():
            compiled = compile_launch(replace(launch, kwargs={**launch.kwargs, **options}), target)
        found = figures(compiled)
    except Exception as error:  # a compiler may raise anything, and the other options are still wanted
        return (*names, f"{error}".splitlines()[0][:80], *("–",) * 9)
    return (*names, *_cells(found))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without what the compiler itself writes to the standard error: all of its code, where it fails."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _cells(found: Figures) -> tuple[str, ...]:
    loop, bound = found.loop, found.bound
    steps = loop.steps or 1 if loop else 1
    counts = ("–",) * 4 if loop is None else (loop.matrix, loop.special, loop.memory, loop.other)
    held = (found.registers, found.spill_bytes, round(found.shared / 1024), found.blocks_per_multiprocessor)
    return (
        *map(str, held),
        *(str(n) if isinstance(n, str) else f"{n / steps:g}" for n in counts),
        *(("–", "–") if bound is None else (f"{bound.share:.0%} of the {bound.peak}", bound.unit)),
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiler_options", description=__doc__.splitlines()[0])
    parser.add_argument("case", help="a compile case, as attention/causal_128_bfloat16_forward")
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE", help="launch options to try, each by itself")
    parser.add_argument("-t", "--target", action="append", choices=TARGETS, help="default: sm_90; may be repeated")
    parser.add_argument("--kernel", help="only the launches of this kernel")
    given = parser.parse_intermixed_args(arguments)
    cases = all_cases()
    if given.case not in cases:
        family = given.case.partition("/")[0]
        near = [name for name in cases if name.startswith(family)] or sorted({name.partition("/")[0] for name in cases})
        parser.error(f"no case is named {given.case}; there are {', '.join(near)}")
    try:
        tried = [("as it is", {}), *((text, parse(text)) for text in given.options)]
    except ValueError as error:
        parser.error(str(error))
    rows = []
    for target in given.target or ["sm_90"]:
        with capture_launches(target) as launches:
            cases[given.case].make()()
        chosen = [launch for launch in launches if given.kernel in (None, launch.name)]
        if not chosen:
            parser.error(f"{given.case} launches {', '.join(launch.name for launch in launches)}, not {given.kernel}")
        rows += [row(launch, target, options, text) for launch in chosen for text, options in tried]
    print(markdown_table(_COLUMNS, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
