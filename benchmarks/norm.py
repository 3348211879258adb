"""How fast are the norms beside other libraries', in bytes a second and in percent of a copy?

    python benchmarks/norm.py [--operators …] [--widths …] [--directions …] [--mib 64] [--dtype bfloat16]
    python benchmarks/norm.py --static [--targets sm_80 sm_90 gfx942]

On a GPU: times fusedops, torch eager, torch.compile, Liger, flash-attn, Apex and quack, as far as they are installed,
by the device's own clock, the L2 cache flushed before every repeat, all of them and a copy of the same bytes in turn,
medians. The rate is of the least bytes that must move. Each provider is first compared with float64; one that is wrong
is marked and not timed. Writes CSV, JSON and a plot to --output (default: benchmarks/results).

``--static`` needs no GPU: it compiles fusedops' kernels, and Liger's where it is installed, and reads from their code
what they load and store, in how wide accesses, and what registers and shared memory they take. Writes CSV and JSON
where --output is given.

``--dry-run`` compares every provider with float64 on the CPU, at a tiny size: it times nothing.

Exit codes: 0 right, 1 no GPU, or fusedops is wrong or fails, 2 usage.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # works in a checkout that is not installed

import torch  # noqa: E402

from benchmarks import compare, norm_providers, norm_static, options  # noqa: E402
from benchmarks.compare import Timing  # noqa: E402
from benchmarks.measure import Run, Sample, copy_of, human_seconds, markdown_table  # noqa: E402
from benchmarks.norm_providers import DIRECTIONS, OPERATORS, Inputs, Problem  # noqa: E402
from benchmarks.options import DTYPES  # noqa: E402
from benchmarks.plots import Plot  # noqa: E402
from benchmarks.report import OURS  # noqa: E402
from fusedops.runtime.device import TARGETS  # noqa: E402

WIDTHS = tuple(2**n for n in range(8, 17))
QUICK_WIDTHS = (1024, 4096, 16384)
QUICK_DIRECTIONS = ("forward", "backward")
COPY = "copy"
CASE = ("operator", "direction", "rows", "width")
PLOT = Plot(("operator",), ("direction",), "width", "percent_of_copy", "a copy")


@dataclass(frozen=True, slots=True)
class Result:
    """One provider's operator at one width in one direction.

    Attributes:
        least_bytes: what must move.
        distance: largest relative distance of outputs and gradients from float64's; None where it failed.
        sample, copy: its durations, and a copy's of the same bytes; None where it was not timed.
        error: why it was not; None: it was.
    """

    operator: str
    direction: str
    provider: str
    rows: int
    width: int
    dtype: str
    least_bytes: int
    distance: float | None
    sample: Sample | None = None
    copy: Sample | None = None
    error: str | None = None

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.least_bytes / self.sample.median if self.sample else math.nan

    @property
    def percent_of_copy(self) -> float:
        return 100 * self.copy.median / self.sample.median if self.sample and self.copy else math.nan

    def row(self) -> dict[str, Any]:
        """For a CSV file."""
        return {
            **{k: v for k, v in asdict(self).items() if k not in ("sample", "copy", "error")},
            **compare.sample_row(self.sample),
            "copy_seconds": self.copy.median if self.copy else None,
            "gigabytes_per_second": self.rate / 1e9 if self.sample else None,
            "percent_of_copy": self.percent_of_copy if self.sample else None,
            "error": self.error,
        }


def main(arguments: list[str] | None = None) -> int:
    asked = _options(arguments)
    if not (asked.static or asked.dry_run or torch.cuda.is_available()):
        return compare.no_gpu("norm")
    names = norm_static.PROVIDERS if asked.static else tuple(norm_providers.PROVIDERS)
    wanted = [name for name in names if name == OURS or name in asked.providers]
    found, left_out = compare.loaded(norm_providers.PROVIDERS, wanted)
    if asked.static:
        return static(found, left_out, asked)
    if asked.dry_run:
        return dry_run(found, asked)
    return timed(found, left_out, torch.device("cuda", torch.cuda.current_device()), asked)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    others = tuple(norm_providers.PROVIDERS)  # fusedops too: alone, it is what --static is quick with
    quick = "A few widths, without a forward and backward in one, and without torch.compile; --static: one target."
    parser = options.parser(
        __doc__, others, quick=quick, directions=DIRECTIONS, targets=tuple(TARGETS), default_targets=norm_static.TARGETS
    )
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, help="Default: all.")
    parser.add_argument("--widths", nargs="+", type=int, help="Elements a row (default: 256 … 65536).")
    parser.add_argument("--mib", type=float, default=64.0, help="Least size of a tensor: gives the rows (default: 64).")
    asked = options.parse(parser, arguments, others=others, slow=("torch.compile",))
    if asked.quick and asked.directions == DIRECTIONS:
        asked.directions = QUICK_DIRECTIONS
    asked.widths = asked.widths or (QUICK_WIDTHS if asked.quick else WIDTHS)
    asked.operators = asked.operators or (norm_static.OPERATORS if asked.static else OPERATORS)
    if asked.static and set(asked.operators) - set(norm_static.OPERATORS):
        parser.error(f"--static takes --operators {' '.join(norm_static.OPERATORS)}")
    if min(asked.widths) < 1:
        parser.error("--widths must be positive")
    if asked.mib <= 0:
        parser.error("--mib must be positive")
    return asked


# --- timed -----------------------------------------------------------------------------------------------------------


def timed(
    providers: norm_providers.Found,
    left_out: dict[str, str],
    device: torch.device,
    asked: argparse.Namespace,
) -> int:
    """Compare, time, and write what was found; the exit code."""
    dtype = DTYPES[asked.dtype]

    def measure(problem: Problem, timing: Timing) -> list[Result]:
        inputs = Inputs.of(problem, device)
        distances = _distances(problem, providers, inputs)
        return [
            result
            for direction in asked.directions
            for result in _measure(problem, direction, providers, distances, inputs, timing)
        ]

    problems = {
        f"{operator} {width}": Problem.of(operator, width, dtype, asked.mib)
        for operator in asked.operators
        for width in asked.widths
    }
    return compare.timed("norm", problems, measure, table, CASE, PLOT, left_out, device, asked)


def _distances(problem: Problem, providers: norm_providers.Found, inputs: Inputs) -> dict[str, float | Exception]:
    """Each provider's distance from float64, or what it raised."""
    return {
        name: compare.attempt(partial(norm_providers.distance, problem, functions[problem.operator], inputs))
        for name, functions in providers.items()
        if problem.operator in functions
    }


def _measure(
    problem: Problem,
    direction: str,
    providers: norm_providers.Found,
    distances: dict[str, float | Exception],
    inputs: Inputs,
    timing: Timing,
) -> list[Result]:
    moved = problem.least_bytes(direction)

    def make_run(name: str) -> Run:
        return norm_providers.run_in(direction, providers[name][problem.operator], inputs)

    def make_copy() -> Run:
        return copy_of(moved, timing.device)

    samples, copy, errors = compare.measure(distances, problem.dtype, make_run, make_copy, timing.timer, timing.seconds)
    dtype = str(problem.dtype).removeprefix("torch.")
    return [
        Result(
            operator=problem.operator,
            direction=direction,
            provider=name,
            rows=problem.rows,
            width=problem.width,
            dtype=dtype,
            least_bytes=moved,
            distance=compare.finite(distances[name]),
            sample=samples.get(name),
            copy=copy if name in samples else None,
            error=error or None,
        )
        for name, error in errors.items()
    ]


def table(results: Sequence[Result]) -> str:
    """A table an operator and direction: a row a width, a column a provider."""
    parts = []
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.operator, result.direction), []).append(result)
    for (operator, direction), group in groups.items():
        names = list(dict.fromkeys(result.provider for result in group))
        rows = []
        for width in dict.fromkeys(result.width for result in group):
            cells = {result.provider: result for result in group if result.width == width}
            some = next(iter(cells.values()))
            copies = [cell.copy.median for cell in cells.values() if cell.copy]
            copy = f"{some.least_bytes / copies[0] / 1e12:.2f} TB/s" if copies else "–"
            rows.append((f"{some.rows} x {width}", copy, *(_cell(cells.get(name)) for name in names)))
        parts.append(f"{operator}, {direction}\n\n{markdown_table(('rows x width', COPY, *names), rows)}")
    return "\n\n".join(parts)


def _cell(result: Result | None) -> str:
    if result is None:
        return "–"
    if result.sample is None:
        return (result.error or "")[:40]
    return f"{human_seconds(result.sample.median)}, {result.percent_of_copy:.0f}%"


# --- without a GPU ---------------------------------------------------------------------------------------------------


def dry_run(providers: norm_providers.Found, asked: argparse.Namespace) -> int:
    """Every provider that runs on a CPU, each direction once."""

    def judge(problem: Problem) -> tuple[dict[str, float | Exception], Callable[[str, str], Run]]:
        inputs = Inputs.of(problem, torch.device("cpu"))
        return _distances(problem, providers, inputs), lambda direction, name: norm_providers.run_in(
            direction, providers[name][problem.operator], inputs
        )

    dtype = DTYPES[asked.dtype]
    problems = {operator: Problem(operator, 64, 48, dtype) for operator in asked.operators}
    return compare.dry_run(problems, judge, asked.directions, dtype)


def static(providers: norm_providers.Found, left_out: dict[str, str], asked: argparse.Namespace) -> int:
    dtype = DTYPES[asked.dtype]
    cases = {}
    for target in asked.targets:
        for operator in asked.operators:
            for width in asked.widths:
                sized = Problem.of(operator, width, dtype, asked.mib)
                problem = Problem(operator, max(norm_static.MINIMUM_ROWS, sized.rows), width, dtype)
                for name in providers:
                    if operator in providers[name]:
                        cases[f"{target} {operator} {width} {name}"] = partial(
                            norm_static.inspect, name, providers[name][operator], problem, target
                        )
    return compare.static(
        "norm", cases, lambda results: f"{norm_static.table(results)}\n\n{norm_static.NOTE}", left_out, asked
    )


if __name__ == "__main__":
    sys.exit(main())
