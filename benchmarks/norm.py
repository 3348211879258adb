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
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # works in a checkout that is not installed

import torch  # noqa: E402

import fusedops  # noqa: E402
from benchmarks import compare, norm_providers, norm_static  # noqa: E402
from benchmarks.compare import DTYPES, OURS  # noqa: E402
from benchmarks.device_check import file_name  # noqa: E402
from benchmarks.measure import GpuTimer, Run, Sample, human_seconds, markdown_table  # noqa: E402
from benchmarks.norm_providers import DIRECTIONS, OPERATORS, Inputs, Problem  # noqa: E402
from fusedops.runtime.device import TARGETS, device_facts  # noqa: E402

WIDTHS = tuple(2**n for n in range(8, 17))
COPY = "copy"


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
    options = _options(arguments)
    if options.static:
        return static(options)
    found, left_out = _load(options, tuple(norm_providers.PROVIDERS))
    if options.dry_run:
        return dry_run(found, options)
    if not torch.cuda.is_available():
        print(
            "norm: torch finds no CUDA or ROCm device here; --static reads the compiled kernels without one",
            file=sys.stderr,
        )
        return 1
    return timed(found, left_out, torch.device("cuda", torch.cuda.current_device()), options)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=OPERATORS, help="Default: all.")
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS, help="Default: all.")
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS, help="Elements a row (default: 256 … 65536).")
    parser.add_argument("--mib", type=float, default=64.0, help="Least size of a tensor: gives the rows (default: 64).")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="Default: bfloat16.")
    parser.add_argument(
        "--providers", nargs="+", choices=norm_providers.PROVIDERS, help="Beside fusedops; default: all."
    )
    parser.add_argument("--seconds", type=float, default=0.4, help="For each size and direction (default: 0.4).")
    parser.add_argument("--output", type=Path, help="Folder for the results (timed: benchmarks/results).")
    parser.add_argument("--json", action="store_true", help="Prints JSON instead of tables.")
    parser.add_argument("--static", action="store_true", help="Reads the compiled kernels' code; needs no GPU.")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=norm_static.TARGETS, help="Of --static.")
    parser.add_argument("--dry-run", action="store_true", help="Runs everything once on the CPU and times nothing.")
    options = parser.parse_args(arguments)
    if min(options.widths) < 1:
        parser.error("--widths must be positive")
    if options.mib <= 0:
        parser.error("--mib must be positive")
    return options


def _load(options: argparse.Namespace, names: tuple[str, ...]) -> tuple[norm_providers.Found, dict[str, str]]:
    """The providers among ``names`` that are asked for, ours always; prints why one is left out."""
    wanted = [name for name in names if name == OURS or name in (options.providers or names)]
    found, left_out = norm_providers.load(wanted)
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    return found, left_out


def _rows(width: int, dtype: torch.dtype, mib: float) -> int:
    return math.ceil(mib * 2**20 / (width * dtype.itemsize))


# --- timed -----------------------------------------------------------------------------------------------------------


def timed(
    providers: norm_providers.Found,
    left_out: dict[str, str],
    device: torch.device,
    options: argparse.Namespace,
) -> int:
    """Compare, time, and write what was found; the exit code."""
    timer = GpuTimer(device)
    dtype = DTYPES[options.dtype]
    problems = [Problem(o, _rows(w, dtype, options.mib), w, dtype) for o in options.operators for w in options.widths]
    results: list[Result] = []
    # An error, rather than a timing of torch under our name.
    with compare.progress() as progress, fusedops.backend("triton"):
        task = progress.add_task("", total=len(problems) * len(options.directions))
        for problem in problems:
            inputs = Inputs.of(problem, device)
            distances = _distances(problem, providers, inputs)
            for direction in options.directions:
                progress.update(task, description=f"{problem.operator} {problem.width} {direction}")
                results += _measure(problem, direction, providers, distances, inputs, timer, options.seconds)
                progress.advance(task)
            del inputs
            torch.cuda.empty_cache()
    facts = device_facts(device)
    report = {
        **compare.header(left_out),
        "device": asdict(facts),
        "results": [result.row() for result in results],
    }
    path = (options.output or ROOT / "benchmarks" / "results") / f"norm-{file_name(facts.name)}"
    compare.write(path, report)
    plot(results, f"{facts.name}, {options.dtype}", path.with_suffix(".png"))
    print(json.dumps(report, indent=1) if options.json else table(results))
    print(f"written: {path}.csv, .json and .png", file=sys.stderr)
    return 1 if any(result.error for result in results if result.provider == OURS) else 0


def _distances(problem: Problem, providers: norm_providers.Found, inputs: Inputs) -> dict[str, float | Exception]:
    """Each provider's distance from float64, or what it raised."""
    compare.fresh()
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
    timer: GpuTimer,
    seconds: float,
) -> list[Result]:
    moved = problem.least_bytes(direction)

    def make_run(name: str) -> Run:
        return norm_providers.run_in(direction, providers[name][problem.operator], inputs)

    def make_copy() -> Run:
        source = torch.empty(moved // 2, dtype=torch.uint8, device=inputs.x.device).random_()  # a copy reads and writes
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    samples, copy, errors = compare.measure(distances, problem.dtype, make_run, make_copy, timer, seconds)
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
    for (operator, direction), group in _groups(results).items():
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


def _groups(results: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.operator, result.direction), []).append(result)
    return groups


def plot(results: Sequence[Result], title: str, path: Path) -> None:
    """A panel an operator and direction, a line a provider: percent of a copy over the width."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = _groups(results)
    operators, directions = (list(dict.fromkeys(key[i] for key in groups)) for i in (0, 1))
    names = list(dict.fromkeys(result.provider for result in results))
    size = (4.2 * len(directions), 3.2 * len(operators))
    figure, axes = pyplot.subplots(len(operators), len(directions), figsize=size, squeeze=False, sharey=True)
    for (operator, direction), group in groups.items():
        panel = axes[operators.index(operator)][directions.index(direction)]
        for number, name in enumerate(names):
            line = [(r.width, r.percent_of_copy) for r in group if r.provider == name and r.sample]
            if line:
                style = {"color": f"C{number}", "marker": "o", "linewidth": 2.0 if name == OURS else 1.0}
                panel.plot(*zip(*line, strict=True), label=name, **style)
        panel.axhline(100, color="grey", linewidth=0.8, linestyle=":")
        panel.set_xscale("log", base=2)
        panel.set_ylim(bottom=0)
        panel.set_title(f"{operator}, {direction}")
        panel.set_xlabel("width")
        panel.set_ylabel("percent of a copy")
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize="small")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# --- without a GPU ---------------------------------------------------------------------------------------------------


def dry_run(providers: norm_providers.Found, options: argparse.Namespace) -> int:
    """Every provider that runs on a CPU, each direction once."""
    wrong = 0
    device = torch.device("cpu")
    with fusedops.backend("torch"):
        for operator in options.operators:
            problem = Problem(operator, 8, 48, DTYPES[options.dtype])
            inputs = Inputs.of(problem, device)
            for name, found in _distances(problem, providers, inputs).items():
                reason = compare.verdict(found, problem.dtype)
                wrong += bool(reason) and name == OURS
                if not reason:
                    for direction in options.directions:
                        norm_providers.run_in(direction, providers[name][operator], inputs)()
                print(f"{operator}: {name}: {reason or 'agrees with float64'}")
    print(f"dry run: {len(options.operators)} operators ran on the torch backend, {wrong} wrong; nothing was timed")
    return 1 if wrong else 0


def static(options: argparse.Namespace) -> int:
    try:
        with norm_static.capture_launches(options.targets[0]):
            pass
    except RuntimeError as error:  # no Triton, or one that interprets
        print(f"norm: {error}", file=sys.stderr)
        return 1
    providers, left_out = _load(options, norm_static.PROVIDERS)
    dtype = DTYPES[options.dtype]
    results: list[norm_static.StaticResult] = []
    cases = [
        (target, Problem(operator, max(norm_static.MINIMUM_ROWS, _rows(width, dtype, options.mib)), width, dtype), name)
        for target in options.targets
        for operator in options.operators
        for width in options.widths
        for name in providers
        if operator in providers[name]
    ]
    with compare.progress() as progress:
        task = progress.add_task("", total=len(cases))
        for target, problem, name in cases:
            progress.update(task, description=f"{target} {problem.operator} {problem.width} {name}")
            results += norm_static.inspect(name, providers[name][problem.operator], problem, target, options.directions)
            progress.advance(task)
    report = {
        **compare.header(left_out),
        "results": [result.as_dict() for result in results],
    }
    print(json.dumps(report, indent=1) if options.json else f"{norm_static.table(results)}\n\n{norm_static.NOTE}")
    if options.output is not None:
        compare.write(options.output / "norm-static", report)
        compare.write_rows(options.output / "norm-static.csv", [result.row() for result in results])
        print(f"written: {options.output / 'norm-static'}.csv and .json", file=sys.stderr)
    failed = [result for result in results if result.error and result.provider == OURS]
    for result in failed[:5]:
        print(f"norm: {result.operator} {result.width} {result.target}: {result.error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
