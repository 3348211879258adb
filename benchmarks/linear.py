"""How fast is the linear family beside other libraries', and beside the bare matrix product?

    python benchmarks/linear.py [--layers …] [--rows 1 16 …] [--directions …] [--activation relu] [--quick]
    python benchmarks/linear.py --static [--targets sm_80 sm_90 sm_100] [--kernels …]

On a GPU: times layers of GPT-2, BERT, ViT-L and Llama-3-8B in fusedops, torch eager, torch.compile (max-autotune),
Liger, flash-attn, Apex and Transformer Engine, as far as they are installed, by the device's own clock, the L2 cache
flushed before every repeat, all of them and the bare matrix products (torch.mm: cuBLAS, hipBLASLt) in turn, medians.
fusedops appears as it is configured by default and with each of its candidate kernels. Each provider is first compared
with float64; one that is wrong is marked and not timed. Writes CSV, JSON and a plot, in percent of the bare products,
to --output (default: benchmarks/results).

``--static`` needs no GPU: it compiles fusedops' kernels and a plain textbook product with the same tiles, and reads
from their code the main loop's instructions, registers and shared memory. Writes CSV and JSON where --output is given.

``--dry-run`` compares every provider with float64 on the CPU, at a tiny size: it times nothing.

Exit codes: 0 right, 1 no GPU, or fusedops is wrong or fails, 2 usage.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # works in a checkout that is not installed

import torch  # noqa: E402

from benchmarks import compare, linear_providers, linear_static, options  # noqa: E402
from benchmarks.compare import Timing  # noqa: E402
from benchmarks.linear_providers import ACTIVATIONS, DIRECTIONS, LAYERS, Inputs, Layer, Problem, Provider  # noqa: E402
from benchmarks.measure import Run, Sample, human_seconds, markdown_table  # noqa: E402
from benchmarks.options import DTYPES  # noqa: E402
from benchmarks.plots import Plot  # noqa: E402
from benchmarks.report import OURS  # noqa: E402

ROWS = (1, 16, 128, 1024, 4096, 16384)
QUICK_LAYERS = ("gpt2.fc1", "llama3_8b.attention_output", "llama3_8b.gate_up")
QUICK_ROWS = (16, 4096)
PRODUCT = "product"
CASE = ("layer", "direction", "rows")
PLOT = Plot(("layer",), ("direction",), "rows", "percent_of_product", "the bare products")

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
            "percent_of_product": 100 * self.of_product if self.sample else None,
            "error": self.error,
        }


def main(arguments: list[str] | None = None) -> int:
    asked = _options(arguments)
    if asked.static:
        return static(asked)
    if not (torch.cuda.is_available() or asked.dry_run):
        return compare.no_gpu("linear")
    ours = [name for name in linear_providers.PROVIDERS if name.startswith(OURS)]
    if asked.dry_run:
        ours = [OURS]  # without a GPU all of them are torch
    found, left_out = compare.loaded(linear_providers.PROVIDERS, [*ours, *asked.providers])
    if asked.dry_run:
        return dry_run(found, asked)
    return timed(found, left_out, torch.device("cuda", torch.cuda.current_device()), asked)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    others = [name for name in linear_providers.PROVIDERS if not name.startswith(OURS)]
    quick = "A few layers and rows, without torch.compile, which searches for minutes; --static: one target."
    targets = linear_static.TARGETS
    parser = options.parser(
        __doc__, others, quick=quick, directions=DIRECTIONS, targets=targets, default_targets=targets
    )
    parser.add_argument("--layers", nargs="+", choices=LAYERS, help="Default: all.")
    parser.add_argument("--rows", nargs="+", type=int, help="Tokens or pixels (default: 1 … 16384).")
    parser.add_argument("--activation", choices=ACTIVATIONS, help="Instead of the models' own.")
    parser.add_argument(
        "--kernels", nargs="+", choices=linear_static.KERNELS, default=tuple(linear_static.KERNELS), help="Of --static."
    )
    asked = options.parse(
        parser, arguments, timing=("layers", "rows", "activation", "providers"), others=others, slow=("torch.compile",)
    )
    asked.layers = asked.layers or (QUICK_LAYERS if asked.quick else tuple(LAYERS))
    asked.rows = asked.rows or (QUICK_ROWS if asked.quick else ROWS)
    if min(asked.rows) < 1:
        parser.error("--rows must be positive")
    return asked


def _layer(name: str, asked: argparse.Namespace) -> Layer:
    layer = LAYERS[name]
    return replace(layer, activation=asked.activation) if asked.activation and layer.activation else layer


# --- timed -----------------------------------------------------------------------------------------------------------


def timed(
    providers: linear_providers.Found,
    left_out: dict[str, str],
    device: torch.device,
    asked: argparse.Namespace,
) -> int:
    """Compare, time, and write what was found; the exit code."""
    dtype = DTYPES[asked.dtype]

    def measure(problem: Problem, timing: Timing) -> list[Result]:
        inputs = Inputs.of(problem, device)
        offering = _offering(problem, providers, inputs)
        distances = _distances(problem, offering, inputs)
        return [
            result
            for direction in asked.directions
            for result in _measure(problem, direction, offering, distances, inputs, timing)
        ]

    def show(results: Sequence[Result]) -> str:
        return f"{table(results)}\n\n{summary(results)}"

    problems = {
        f"{name} {rows}": Problem(name, _layer(name, asked), rows, dtype)
        for name in asked.layers
        for rows in asked.rows
    }
    return compare.timed("linear", problems, measure, show, CASE, PLOT, left_out, device, asked)


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
    timing: Timing,
) -> list[Result]:
    samples, product, errors = compare.measure(
        distances, problem.dtype,
        lambda name: linear_providers.run_in(direction, providers[name], problem, inputs),
        lambda: linear_providers.products(direction, problem, timing.device),
        timing.timer, timing.seconds,
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


def dry_run(providers: linear_providers.Found, asked: argparse.Namespace) -> int:
    """Every provider that runs on a CPU, each direction once."""

    def judge(problem: Problem) -> tuple[dict[str, float | Exception], Callable[[str, str], Run]]:
        inputs = Inputs.of(problem, torch.device("cpu"))
        offering = _offering(problem, providers, inputs)
        return _distances(problem, offering, inputs), lambda direction, name: linear_providers.run_in(
            direction, offering[name], problem, inputs
        )

    dtype = DTYPES[asked.dtype]
    problems = {name: Problem(name, _layer(name, asked).tiny(), 8, dtype) for name in asked.layers}
    return compare.dry_run(problems, judge, asked.directions, dtype)


def static(asked: argparse.Namespace) -> int:
    cases = {
        f"{target} {kernel}": partial(linear_static.inspect, kernel, target, DTYPES[asked.dtype])
        for target in asked.targets
        for kernel in asked.kernels
    }
    return compare.static(
        "linear", cases, lambda results: f"{linear_static.table(results)}\n\n{linear_static.NOTE}", {}, asked
    )


if __name__ == "__main__":
    sys.exit(main())
