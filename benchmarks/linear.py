"""How fast is the linear family beside other libraries', and beside the bare matrix product?

    python benchmarks/linear.py [--layers …] [--rows 1 16 …] [--directions …] [--activation relu] [--quick]
    python benchmarks/linear.py --static [--targets sm_80 sm_90 sm_100] [--kernels …]

On a GPU: times layers of GPT-2, BERT, ViT-L and Llama-3-8B in fusedops, torch eager, torch.compile (max-autotune),
Liger, flash-attn, Apex and Transformer Engine, as far as they are installed, by the device's own clock, the L2 cache
flushed before every repeat, all of them and the bare matrix products (torch.mm: cuBLAS, hipBLASLt) in turn, medians.
fusedops appears as it is configured by default and with each of its candidate kernels. Each provider is first compared
with float64; one that is wrong is marked and not timed. Writes CSV and JSON to --output (default: benchmarks/results).

``--static`` needs no GPU: it compiles fusedops' kernels and a plain textbook product with the same tiles, and reads
from their code the main loop's instructions, registers and shared memory. Writes CSV and JSON where --output is given.

``--dry-run`` compares every provider with float64 on the CPU, at a tiny size: it times nothing.

Exit codes: 0 right, 1 no GPU, or fusedops is wrong or fails, 2 usage.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # works in a checkout that is not installed

import torch  # noqa: E402

import fusedops  # noqa: E402
from benchmarks import compare, linear_providers, linear_static  # noqa: E402
from benchmarks.cases import ACTIVATIONS  # noqa: E402
from benchmarks.compare import DTYPES, OURS  # noqa: E402
from benchmarks.device_check import file_name  # noqa: E402
from benchmarks.linear_providers import DIRECTIONS, LAYERS, Inputs, Layer, Problem, Provider  # noqa: E402
from benchmarks.measure import GpuTimer, Sample, human_seconds, markdown_table  # noqa: E402
from fusedops.runtime.device import device_facts  # noqa: E402

ROWS = (1, 16, 128, 1024, 4096, 16384)
QUICK_LAYERS = ("gpt2.fc1", "llama3_8b.attention_output", "llama3_8b.gate_up")
QUICK_ROWS = (16, 4096)
PRODUCT = "product"

# By how much the default may be slower than the best candidate before it is named; what repeats differ by.
_SLOWER = 1.03


@dataclass(frozen=True, slots=True)
class Result:
    """One provider's layer at one number of rows in one direction.

    Attributes:
        flops: of the matrix products.
        kernels: which fusedops took by default; None for other providers.
        distance: largest relative distance of output and gradients from float64's; None where it failed.
        sample, product: its durations, and the bare products'; None where it was not timed.
        error: why it was not; None: it was.
    """

    layer: str
    direction: str
    provider: str
    rows: int
    inputs: int
    outputs: int
    activation: str | None
    dtype: str
    flops: int
    kernels: str | None
    distance: float | None
    sample: Sample | None = None
    product: Sample | None = None
    error: str | None = None

    @property
    def rate(self) -> float:
        """Floating-point operations a second."""
        return self.flops / self.sample.median if self.sample else math.nan

    @property
    def of_product(self) -> float:
        """How fast beside the bare products: 1 is as fast."""
        return self.product.median / self.sample.median if self.sample and self.product else math.nan

    def row(self) -> dict[str, Any]:
        """For a CSV file."""
        return {
            **{k: v for k, v in asdict(self).items() if k not in ("sample", "product", "error")},
            **compare.sample_row(self.sample),
            "product_seconds": self.product.median if self.product else None,
            "teraflops": self.rate / 1e12 if self.sample else None,
            "ratio_to_product": self.of_product if self.sample else None,
            "error": self.error,
        }


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    if options.static:
        return static(options)
    if not (torch.cuda.is_available() or options.dry_run):
        print(
            "linear: torch finds no CUDA or ROCm device here; --static reads the compiled kernels without one",
            file=sys.stderr,
        )
        return 1
    found, left_out = _load(options)
    if options.dry_run:
        return dry_run(found, options)
    return timed(found, left_out, torch.device("cuda", torch.cuda.current_device()), options)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    others = [name for name in linear_providers.PROVIDERS if not name.startswith(OURS)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, help="Default: all.")
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS, help="Default: all.")
    parser.add_argument("--rows", nargs="+", type=int, help="Tokens or pixels (default: 1 … 16384).")
    parser.add_argument("--activation", choices=ACTIVATIONS, help="Instead of the models' own.")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="Default: bfloat16.")
    parser.add_argument("--providers", nargs="+", choices=others, help="Beside fusedops; default: all.")
    parser.add_argument("--seconds", type=float, help="For each size and direction (default: 0.4; quick: 0.1).")
    parser.add_argument("--output", type=Path, help="Folder for the results (timed: benchmarks/results).")
    parser.add_argument("--json", action="store_true", help="Prints JSON instead of tables.")
    parser.add_argument(
        "--quick", action="store_true", help="A few layers and rows, without torch.compile, which searches for minutes."
    )
    parser.add_argument("--static", action="store_true", help="Reads the compiled kernels' code; needs no GPU.")
    parser.add_argument(
        "--targets", nargs="+", choices=linear_static.TARGETS, default=linear_static.TARGETS, help="Of --static."
    )
    parser.add_argument(
        "--kernels", nargs="+", choices=linear_static.KERNELS, default=tuple(linear_static.KERNELS), help="Of --static."
    )
    parser.add_argument("--dry-run", action="store_true", help="Runs everything once on the CPU and times nothing.")
    options = parser.parse_args(arguments)
    timing = ("layers", "rows", "activation", "providers", "seconds", "quick", "dry_run")
    if options.static and (given := [f"--{name.replace('_', '-')}" for name in timing if getattr(options, name)]):
        parser.error(f"--static takes no {', '.join(given)}")
    quick = options.quick
    options.layers = options.layers or (QUICK_LAYERS if quick else tuple(LAYERS))
    options.rows = options.rows or (QUICK_ROWS if quick else ROWS)
    options.providers = options.providers or [name for name in others if not (quick and name == "torch.compile")]
    if options.seconds is None:
        options.seconds = 0.1 if quick else 0.4
    if min(options.rows) < 1:
        parser.error("--rows must be positive")
    return options


def _load(options: argparse.Namespace) -> tuple[linear_providers.Found, dict[str, str]]:
    """The providers that are asked for, fusedops always; prints why one is left out."""
    ours = [name for name in linear_providers.PROVIDERS if name.startswith(OURS)]
    if options.dry_run:
        ours = [OURS]  # without a GPU all of them are torch
    found, left_out = linear_providers.load([*ours, *options.providers])
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    return found, left_out


def _layer(name: str, options: argparse.Namespace) -> Layer:
    layer = LAYERS[name]
    return replace(layer, activation=options.activation) if options.activation and layer.activation else layer


# --- timed -----------------------------------------------------------------------------------------------------------


def timed(
    providers: linear_providers.Found,
    left_out: dict[str, str],
    device: torch.device,
    options: argparse.Namespace,
) -> int:
    """Compare, time, and write what was found; the exit code."""
    timer = GpuTimer(device)
    dtype = DTYPES[options.dtype]
    problems = [Problem(name, _layer(name, options), rows, dtype) for name in options.layers for rows in options.rows]
    results: list[Result] = []
    # An error, rather than a timing of torch under our name.
    with compare.progress() as progress, fusedops.backend("triton"):
        task = progress.add_task("", total=len(problems) * len(options.directions))
        for problem in problems:
            compare.fresh()
            inputs = Inputs.of(problem, device)
            offering = _offering(problem, providers, inputs)
            distances = _distances(problem, offering, inputs)
            for direction in options.directions:
                progress.update(task, description=f"{problem.name} {problem.rows} {direction}")
                results += _measure(problem, direction, offering, distances, inputs, timer, options.seconds)
                progress.advance(task)
            del inputs
            torch.cuda.empty_cache()
    facts = device_facts(device)
    report = {
        **compare.header(left_out),
        "device": asdict(facts),
        "results": [result.row() for result in results],
    }
    path = (options.output or ROOT / "benchmarks" / "results") / f"linear-{file_name(facts.name)}"
    compare.write(path, report)
    print(json.dumps(report, indent=1) if options.json else f"{table(results)}\n\n{summary(results)}")
    print(f"written: {path}.csv and .json", file=sys.stderr)
    return 1 if any(result.error for result in results if result.provider == OURS) else 0


def _offering(problem: Problem, providers: linear_providers.Found, inputs: Inputs) -> dict[str, Provider]:
    """The providers that have the problem's layer, each with its function made once; one that raises, raises later."""
    offering = {}
    for name, provider in providers.items():
        made = compare.attempt(partial(provider.offer, problem))
        if made is None:
            continue
        if not isinstance(made, Exception):
            provider = replace(provider, offer=lambda problem, made=made: made)
            if compare.attempt(partial(linear_providers.serves, problem, provider, inputs)) is False:
                continue
        offering[name] = provider
    return offering


def _distances(problem: Problem, providers: dict[str, Provider], inputs: Inputs) -> dict[str, float | Exception]:
    """Each provider's distance from float64, or what it raised."""
    return {
        name: compare.attempt(partial(linear_providers.distance, problem, provider, inputs))
        for name, provider in providers.items()
    }


def _measure(
    problem: Problem,
    direction: str,
    providers: dict[str, Provider],
    distances: dict[str, float | Exception],
    inputs: Inputs,
    timer: GpuTimer,
    seconds: float,
) -> list[Result]:
    device = inputs.gradient.device
    samples, product, errors = compare.measure(
        distances, problem.dtype,
        lambda name: linear_providers.run_in(direction, providers[name], problem, inputs),
        lambda: linear_providers.products(direction, problem, device),
        timer, seconds,
    )  # fmt: skip
    kernels = linear_providers.choices(problem, direction, inputs) if OURS in samples else None
    return [
        Result(
            layer=problem.name,
            direction=direction,
            provider=name,
            rows=problem.rows,
            inputs=problem.layer.inputs,
            outputs=problem.layer.outputs,
            activation=problem.layer.activation,
            dtype=str(problem.dtype).removeprefix("torch."),
            flops=problem.flops(direction),
            kernels=kernels if name == OURS else None,
            distance=compare.finite(distances[name]),
            sample=samples.get(name),
            product=product if name in samples else None,
            error=error or None,
        )
        for name, error in errors.items()
    ]


def table(results: Sequence[Result]) -> str:
    """A table a layer and direction: a row for each number of rows, a column a provider."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.layer, result.direction), []).append(result)
    parts = []
    for (layer, direction), group in groups.items():
        names = list(dict.fromkeys(result.provider for result in group))
        lines = []
        for rows in dict.fromkeys(result.rows for result in group):
            cells = {result.provider: result for result in group if result.rows == rows}
            times = [cell.product.median for cell in cells.values() if cell.product]
            flops = next(iter(cells.values())).flops
            product = f"{human_seconds(times[0])}, {flops / times[0] / 1e12:.3g}" if times else "–"
            kernels = _short_kernels(cells[OURS].kernels) if OURS in cells else "–"
            lines.append((str(rows), product, *(_cell(cells.get(name)) for name in names), kernels))
        some = group[0]
        ends = f", {some.activation}" if some.activation else ""
        title = f"{layer} ({some.inputs} -> {some.outputs}{ends}), {direction}"
        parts.append(f"{title}\n\n{markdown_table(('rows', PRODUCT, *names, 'fusedops takes'), lines)}")
    parts.append("Each: time, TFLOP/s, and how fast beside the bare product, which is 1.")
    return "\n\n".join(parts)


def _cell(result: Result | None) -> str:
    if result is None:
        return "–"
    if result.sample is None:
        return (result.error or "")[:40]
    return f"{human_seconds(result.sample.median)}, {result.rate / 1e12:.3g}, {result.of_product:.2f}"


def _short_kernels(kernels: str | None) -> str:
    """One name where all products take the same kernel."""
    if kernels is None:
        return "–"
    names = {taken.split()[-1] for taken in kernels.split(", ")}
    return names.pop() if len(names) == 1 else kernels


def summary(results: Sequence[Result]) -> str:
    """How often the default configuration is slower than the best of fusedops' own candidates, and where."""
    slower = []
    compared = 0
    for result in results:
        if result.provider != OURS or result.sample is None:
            continue
        others = [
            other
            for other in results
            if other.provider.startswith(f"{OURS}, ")
            and other.sample is not None
            and (other.layer, other.direction, other.rows) == (result.layer, result.direction, result.rows)
        ]
        if others:
            compared += 1
            best = min(others, key=lambda other: other.sample.median if other.sample else math.inf)
            factor = result.sample.median / best.sample.median if best.sample else math.nan
            if factor > _SLOWER:
                where = f"{result.layer}, {result.rows} rows, {result.direction}"
                slower.append(f"\n{where}: {factor:.2f} times the time of {best.provider}")
    return (
        f"The default is more than {_SLOWER - 1:.0%} slower than its best candidate in {len(slower)} of {compared}."
        + "".join(slower)
    )


# --- without a GPU ---------------------------------------------------------------------------------------------------


def dry_run(providers: linear_providers.Found, options: argparse.Namespace) -> int:
    """Every provider that runs on a CPU, each direction once."""
    wrong = 0
    with fusedops.backend("torch"):
        for name in options.layers:
            problem = Problem(name, _layer(name, options).tiny(), 8, DTYPES[options.dtype])
            inputs = Inputs.of(problem, torch.device("cpu"))
            compare.fresh()
            offering = _offering(problem, providers, inputs)
            for provider, found in _distances(problem, offering, inputs).items():
                reason = compare.verdict(found, problem.dtype)
                wrong += bool(reason) and provider == OURS
                if not reason:
                    for direction in options.directions:
                        linear_providers.run_in(direction, offering[provider], problem, inputs)()
                print(f"{name}: {provider}: {reason or 'agrees with float64'}")
    print(f"dry run: {len(options.layers)} layers ran on the torch backend, {wrong} wrong; nothing was timed")
    return 1 if wrong else 0


def static(options: argparse.Namespace) -> int:
    try:
        with linear_static.capture_launches(options.targets[0]):
            pass
    except RuntimeError as error:  # no Triton, or one that interprets
        print(f"linear: {error}", file=sys.stderr)
        return 1
    results: list[linear_static.StaticResult] = []
    cases = [(target, kernel) for target in options.targets for kernel in options.kernels]
    with compare.progress() as progress:
        task = progress.add_task("", total=len(cases))
        for target, kernel in cases:
            progress.update(task, description=f"{target} {kernel}")
            results += linear_static.inspect(kernel, target, DTYPES[options.dtype])
            progress.advance(task)
    report = {**compare.header({}), "results": [result.as_dict() for result in results]}
    print(json.dumps(report, indent=1) if options.json else f"{linear_static.table(results)}\n\n{linear_static.NOTE}")
    if options.output is not None:
        compare.write(options.output / "linear-static", report)
        compare.write_rows(options.output / "linear-static.csv", [result.row() for result in results])
        print(f"written: {options.output / 'linear-static'}.csv and .json", file=sys.stderr)
    failed = [result for result in results if result.error and result.source == OURS]
    for result in failed[:5]:
        print(f"linear: {result.case} {result.target}: {result.error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
