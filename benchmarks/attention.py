"""How fast is attention beside other libraries'?

    python benchmarks/attention.py [--kinds …] [--sizes 64 128 256] [--lengths 512 …] [--directions …] [--quick]
    python benchmarks/attention.py --static [--targets sm_80 sm_90 sm_100 gfx942] [--kinds all causal] [--sizes 64 128]

On a GPU: times attention of 16,384 tokens, all keys or the causal ones, with grouped heads, in a sliding window, and of
packed sequences of unequal lengths, in fusedops, torch (each backend of SDPA, FlexAttention), flash-attn 2 and 3, and
xformers, as far as they are installed, by the device's own clock, the L2 cache flushed before every repeat, all of them
in turn, medians. Each provider is first compared with float64; one that is wrong is marked and not timed. TFLOP/s count
the keys that are seen. Writes CSV, JSON and a plot, in percent of a large bfloat16 product timed in the same run, to
--output (default: benchmarks/results).

``--static`` needs no GPU: it compiles fusedops' forward and plain textbook ones with the same tiles, and reads from
their code the loops' instructions and registers. Writes CSV and JSON where --output is given.

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

from benchmarks import attention_providers, attention_static, compare, options  # noqa: E402
from benchmarks.attention_providers import DIRECTIONS, KINDS, TOKENS, Inputs, Problem, Provider  # noqa: E402
from benchmarks.compare import Timing  # noqa: E402
from benchmarks.measure import Run, Sample, human_seconds, markdown_table  # noqa: E402
from benchmarks.options import DTYPES  # noqa: E402
from benchmarks.plots import Plot  # noqa: E402
from benchmarks.report import OURS  # noqa: E402

SIZES = (64, 128, 256)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_SIZES = (128,)
QUICK_LENGTHS = (2048, 8192)
CASE = ("kind", "direction", "size", "length")
PLOT = Plot(("kind",), ("direction", "size"), "length", "percent_of_product", "a large bfloat16 product")


@dataclass(frozen=True, slots=True)
class Result:
    """One provider's attention at one size in one direction.

    Attributes:
        size: of the heads.
        length: of the sequences, the mean where they are packed.
        flops: of the matrix products.
        distance: largest relative distance of output and gradients from float64's; None where it failed.
        sample: its durations; None where it was not timed.
        best: the fastest provider's time, in seconds; None where none was timed.
        ceiling: operations a second that a large bfloat16 product reached in the same run.
        error: why it was not timed; None: it was.
    """

    kind: str
    direction: str
    provider: str
    size: int
    length: int
    batch: int
    heads: int
    kv_heads: int
    window: int | None
    dtype: str
    flops: int
    distance: float | None
    sample: Sample | None = None
    best: float | None = None
    ceiling: float | None = None
    error: str | None = None

    @property
    def rate(self) -> float:
        """Floating-point operations a second."""
        return self.flops / self.sample.median if self.sample else math.nan

    @property
    def to_best(self) -> float:
        """Its time over the fastest provider's: 1 is the fastest."""
        return self.sample.median / self.best if self.sample and self.best else math.nan

    def row(self) -> dict[str, Any]:
        """For a CSV file."""
        return {
            **{k: v for k, v in asdict(self).items() if k not in ("sample", "best", "ceiling", "error")},
            **compare.sample_row(self.sample),
            "teraflops": self.rate / 1e12 if self.sample else None,
            "percent_of_product": 100 * self.rate / self.ceiling if self.sample and self.ceiling else None,
            "ratio_to_best": self.to_best if self.sample else None,
            "error": self.error,
        }


def main(arguments: list[str] | None = None) -> int:
    asked = _options(arguments)
    if asked.static:
        return static(asked)
    if not (torch.cuda.is_available() or asked.dry_run):
        return compare.no_gpu("attention")
    found, left_out = compare.loaded(attention_providers.PROVIDERS, [OURS, *asked.providers])
    if asked.dry_run:
        return dry_run(found, asked)
    return timed(found, left_out, torch.device("cuda", torch.cuda.current_device()), asked)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    others = [name for name in attention_providers.PROVIDERS if name != OURS]
    quick = "One head size, few lengths, without FlexAttention, which compiles long; --static: one target and size."
    targets = attention_static.TARGETS
    parser = options.parser(
        __doc__, others, quick=quick, directions=DIRECTIONS, targets=targets, default_targets=targets
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="Default: all of them.")
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, help="Of the heads (default: all).")
    parser.add_argument("--lengths", nargs="+", type=int, help="Of the sequences (default: 512 … 16384).")
    dtype_given = parser.parse_known_args(arguments)[0].dtype
    asked = options.parse(parser, arguments, timing=("lengths", "providers"), others=others, slow=("FlexAttention",))
    if asked.static:
        for name, taken in (("kinds", attention_static.KINDS), ("sizes", attention_static.SIZES)):
            given = getattr(asked, name) or taken
            if set(given) - set(taken):
                parser.error(f"--static takes --{name} {' '.join(map(str, taken))}; got {' '.join(map(str, given))}")
            setattr(asked, name, getattr(asked, name) or (QUICK_SIZES if asked.quick and name == "sizes" else taken))
    asked.dtypes = (asked.dtype, *(("float16",) if asked.static and not dtype_given else ()))
    asked.kinds = asked.kinds or tuple(KINDS)
    asked.sizes = asked.sizes or (QUICK_SIZES if asked.quick else SIZES)
    asked.lengths = asked.lengths or (QUICK_LENGTHS if asked.quick else LENGTHS)
    if not 1 <= min(asked.lengths) <= max(asked.lengths) <= TOKENS:
        parser.error(f"--lengths must be from 1 to {TOKENS}")
    return asked


def _problems(asked: argparse.Namespace) -> list[Problem]:
    found = [
        Problem.of(kind, size, length, DTYPES[asked.dtype])
        for kind in asked.kinds
        for size in asked.sizes
        for length in asked.lengths
    ]
    return [problem for problem in found if problem is not None]


# --- timed -----------------------------------------------------------------------------------------------------------


def timed(
    providers: attention_providers.Found,
    left_out: dict[str, str],
    device: torch.device,
    asked: argparse.Namespace,
) -> int:
    """Compare, time, and write what was found; the exit code."""

    def measure(problem: Problem, timing: Timing) -> list[Result]:
        inputs = Inputs.of(problem, device)
        offering = _offering(problem, providers, device)
        distances = _distances(offering, inputs)
        return [
            result
            for direction in asked.directions
            for result in _measure(problem, direction, offering, distances, inputs, timing)
        ]

    problems = {f"{problem.kind} D {problem.size} {problem.length}": problem for problem in _problems(asked)}
    return compare.timed("attention", problems, measure, table, CASE, PLOT, left_out, device, asked)


def _offering(
    problem: Problem, providers: attention_providers.Found, device: torch.device
) -> attention_providers.Found:
    """The providers that have the problem, each with its function made once; one that raises, raises later."""
    offering = {}
    for name, provider in providers.items():
        made = compare.attempt(partial(provider.offer, problem, device))
        if made is None:
            continue
        if not isinstance(made, Exception):
            provider = replace(provider, offer=lambda problem, device, made=made: made)
        offering[name] = provider
    return offering


def _distances(providers: dict[str, Provider], inputs: Inputs) -> dict[str, float | Exception]:
    """Each provider's distance from float64, or what it raised."""
    return {
        name: compare.attempt(partial(attention_providers.distance, provider, inputs))
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
    samples, _, errors = compare.measure(
        distances, problem.dtype, lambda name: attention_providers.run_in(direction, providers[name], inputs),
        None, timing.timer, timing.seconds,
    )  # fmt: skip
    best = min((sample.median for sample in samples.values()), default=None)
    return [
        Result(
            kind=problem.kind,
            direction=direction,
            provider=name,
            size=problem.size,
            length=problem.length,
            batch=len(problem.lengths),
            heads=problem.heads,
            kv_heads=problem.kv_heads,
            window=problem.window,
            dtype=str(problem.dtype).removeprefix("torch."),
            flops=problem.flops(direction),
            distance=compare.finite(distances[name]),
            sample=samples.get(name),
            best=best,
            ceiling=timing.ceilings["product_flops_per_second"],
            error=error or None,
        )
        for name, error in errors.items()
    ]


def table(results: Sequence[Result]) -> str:
    """A table a kind, head size and direction: a row for each length, a column a provider."""
    groups: dict[tuple[str, int, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.kind, result.size, result.direction), []).append(result)
    parts = []
    for (kind, size, direction), group in groups.items():
        names = list(dict.fromkeys(result.provider for result in group))
        lines = []
        for length in dict.fromkeys(result.length for result in group):
            cells = {result.provider: result for result in group if result.length == length}
            batch = next(iter(cells.values())).batch
            lines.append((f"{batch} x {length}", *(_cell(cells.get(name)) for name in names)))
        some = group[0]
        heads = f"{some.heads} heads" + (f" on {some.kv_heads}" if some.kv_heads != some.heads else "")
        window = f" of {some.window}" if some.window is not None else ""
        title = f"{kind}{window} (D {size}, {heads}), {direction}"
        parts.append(f"{title}\n\n{markdown_table(('sequences', *names), lines)}")
    parts.append("Each: time, TFLOP/s of the keys that are seen, and its time over the fastest one's, which is 1.")
    return "\n\n".join(parts)


def _cell(result: Result | None) -> str:
    if result is None:
        return "–"
    if result.sample is None:
        return (result.error or "–")[:40]
    return f"{human_seconds(result.sample.median)}, {result.rate / 1e12:.3g}, {result.to_best:.2f}"


# --- without a GPU ---------------------------------------------------------------------------------------------------


def dry_run(providers: attention_providers.Found, asked: argparse.Namespace) -> int:
    """Every provider that runs on a CPU, each direction once."""
    device = torch.device("cpu")

    def judge(problem: Problem) -> tuple[dict[str, float | Exception], Callable[[str, str], Run]]:
        inputs = Inputs.of(problem, device)
        offering = _offering(problem, providers, device)
        return _distances(offering, inputs), lambda direction, name: attention_providers.run_in(
            direction, offering[name], inputs
        )

    # One a kind and head size: at their tiny sizes the lengths are the same.
    problems = {f"{problem.kind} D {problem.size}": problem.tiny() for problem in _problems(asked)}
    return compare.dry_run(problems, judge, asked.directions, DTYPES[asked.dtype])


def static(asked: argparse.Namespace) -> int:
    cases = {
        f"{target} D {size} {kind} {dtype}": partial(
            attention_static.inspect, target, size, kind == "causal", DTYPES[dtype]
        )
        for target in asked.targets
        for size in asked.sizes
        for kind in asked.kinds
        for dtype in asked.dtypes
    }

    def show(results: list[attention_static.StaticResult]) -> str:
        return f"{attention_static.table(results)}\n\n{attention_static.summary(results)}\n\n{attention_static.NOTE}"

    return compare.static("attention", cases, show, {}, asked)


if __name__ == "__main__":
    sys.exit(main())
