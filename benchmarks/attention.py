"""How fast is attention beside other libraries'?

    python benchmarks/attention.py [--kinds …] [--sizes 64 128 256] [--lengths 512 …] [--directions …] [--quick]
    python benchmarks/attention.py --static [--targets sm_80 sm_90 sm_100 gfx942] [--kinds all causal] [--sizes 64 128]

On a GPU: times attention of 16,384 tokens, all keys or the causal ones, with grouped heads, in a sliding window, and of
packed sequences of unequal lengths, in fusedops, torch (each backend of SDPA, FlexAttention), flash-attn 2 and 3, and
xformers, as far as they are installed, by the device's own clock, the L2 cache flushed before every repeat, all of them
in turn, medians. Each provider is first compared with float64; one that is wrong is marked and not timed. TFLOP/s count
the keys that are seen. Writes CSV and JSON to --output (default: benchmarks/results).

``--static`` needs no GPU: it compiles fusedops' forward and plain textbook ones with the same tiles, and reads from
their code the loops' instructions and registers. Writes CSV and JSON where --output is given.

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
from benchmarks import attention_providers, attention_static, compare  # noqa: E402
from benchmarks.attention_providers import DIRECTIONS, KINDS, TOKENS, Inputs, Problem, Provider  # noqa: E402
from benchmarks.compare import DTYPES, OURS  # noqa: E402
from benchmarks.device_check import file_name  # noqa: E402
from benchmarks.measure import GpuTimer, Sample, human_seconds, markdown_table  # noqa: E402
from fusedops.inspection.offline import capture_launches  # noqa: E402
from fusedops.runtime.device import device_facts  # noqa: E402

SIZES = (64, 128, 256)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_SIZES = (128,)
QUICK_LENGTHS = (2048, 8192)


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
            **{k: v for k, v in asdict(self).items() if k not in ("sample", "best", "error")},
            **compare.sample_row(self.sample),
            "teraflops": self.rate / 1e12 if self.sample else None,
            "ratio_to_best": self.to_best if self.sample else None,
            "error": self.error,
        }


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    if options.static:
        return static(options)
    if not (torch.cuda.is_available() or options.dry_run):
        print(
            "attention: torch finds no CUDA or ROCm device here; --static reads the compiled kernels without one",
            file=sys.stderr,
        )
        return 1
    found, left_out = attention_providers.load([OURS, *options.providers])
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    if options.dry_run:
        return dry_run(found, options)
    return timed(found, left_out, torch.device("cuda", torch.cuda.current_device()), options)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    others = [name for name in attention_providers.PROVIDERS if name != OURS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="Default: all of them.")
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, help="Of the heads (default: all).")
    parser.add_argument("--lengths", nargs="+", type=int, help="Of the sequences (default: 512 … 16384).")
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, help="Default: all.")
    parser.add_argument("--dtype", choices=DTYPES, help="Default: bfloat16; of --static: float16 too.")
    parser.add_argument("--providers", nargs="+", choices=others, help="Beside fusedops; default: all.")
    parser.add_argument("--seconds", type=float, help="For each size and direction (default: 0.4; quick: 0.1).")
    parser.add_argument("--output", type=Path, help="Folder for the results (timed: benchmarks/results).")
    parser.add_argument("--json", action="store_true", help="Prints JSON instead of tables.")
    parser.add_argument(
        "--quick", action="store_true", help="One head size, few lengths, without FlexAttention, which compiles long."
    )
    parser.add_argument("--static", action="store_true", help="Reads the compiled kernels' code; needs no GPU.")
    parser.add_argument(
        "--targets", nargs="+", choices=attention_static.TARGETS, default=attention_static.TARGETS, help="Of --static."
    )
    parser.add_argument("--dry-run", action="store_true", help="Runs everything once on the CPU and times nothing.")
    options = parser.parse_args(arguments)
    timing = ("lengths", "directions", "providers", "seconds", "quick", "dry_run")
    if options.static and (given := [f"--{name.replace('_', '-')}" for name in timing if getattr(options, name)]):
        parser.error(f"--static takes no {', '.join(given)}")
    if options.static:
        for name, taken in (("kinds", attention_static.KINDS), ("sizes", attention_static.SIZES)):
            asked = getattr(options, name) or taken
            if set(asked) - set(taken):
                parser.error(f"--static takes --{name} {' '.join(map(str, taken))}; got {' '.join(map(str, asked))}")
            setattr(options, name, asked)
    quick = options.quick
    options.dtypes = (options.dtype,) if options.dtype else ("bfloat16", *(("float16",) if options.static else ()))
    options.kinds = options.kinds or tuple(KINDS)
    options.sizes = options.sizes or (QUICK_SIZES if quick else SIZES)
    options.lengths = options.lengths or (QUICK_LENGTHS if quick else LENGTHS)
    options.directions = options.directions or DIRECTIONS
    options.providers = options.providers or [name for name in others if not (quick and name == "FlexAttention")]
    if options.seconds is None:
        options.seconds = 0.1 if quick else 0.4
    if not 1 <= min(options.lengths) <= max(options.lengths) <= TOKENS:
        parser.error(f"--lengths must be from 1 to {TOKENS}")
    return options


def _problems(options: argparse.Namespace) -> list[Problem]:
    found = [
        Problem.of(kind, size, length, DTYPES[options.dtypes[0]])
        for kind in options.kinds
        for size in options.sizes
        for length in options.lengths
    ]
    return [problem for problem in found if problem is not None]


# --- timed -----------------------------------------------------------------------------------------------------------


def timed(
    providers: attention_providers.Found,
    left_out: dict[str, str],
    device: torch.device,
    options: argparse.Namespace,
) -> int:
    """Compare, time, and write what was found; the exit code."""
    timer = GpuTimer(device)
    problems = _problems(options)
    results: list[Result] = []
    # An error, rather than a timing of torch under our name.
    with compare.progress() as progress, fusedops.backend("triton"):
        task = progress.add_task("", total=len(problems) * len(options.directions))
        for problem in problems:
            compare.fresh()
            inputs = Inputs.of(problem, device)
            offering = _offering(problem, providers, device)
            distances = _distances(offering, inputs)
            for direction in options.directions:
                progress.update(task, description=f"{problem.kind} D {problem.size} {problem.length} {direction}")
                results += _measure(problem, direction, offering, distances, inputs, timer, options.seconds)
                progress.advance(task)
            del inputs, offering
            torch.cuda.empty_cache()
    facts = device_facts(device)
    report = {
        **compare.header(left_out),
        "device": asdict(facts),
        "results": [result.row() for result in results],
    }
    path = (options.output or ROOT / "benchmarks" / "results") / f"attention-{file_name(facts.name)}"
    compare.write(path, report)
    print(json.dumps(report, indent=1) if options.json else f"{table(results)}\n\n{summary(results)}")
    print(f"written: {path}.csv and .json", file=sys.stderr)
    return 1 if any(result.error for result in results if result.provider == OURS) else 0


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
    timer: GpuTimer,
    seconds: float,
) -> list[Result]:
    samples, _, errors = compare.measure(
        distances, problem.dtype, lambda name: attention_providers.run_in(direction, providers[name], inputs),
        None, timer, seconds,
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


def summary(results: Sequence[Result]) -> str:
    """In how many of the cases fusedops is the fastest, and where it is not."""
    ours = [result for result in results if result.provider == OURS and result.sample]
    slower = []
    for result in ours:
        if result.to_best > 1:
            where = (result.kind, result.size, result.length, result.direction)
            same = [r for r in results if r.sample and (r.kind, r.size, r.length, r.direction) == where]
            best = min(same, key=lambda other: other.to_best)
            slower.append(
                f"\n{result.kind}, D {result.size}, {result.batch} x {result.length}, {result.direction}:"
                f" {result.to_best:.2f} times the time of {best.provider}"
            )
    return f"fusedops is the fastest in {len(ours) - len(slower)} of {len(ours)}." + "".join(slower)


# --- without a GPU ---------------------------------------------------------------------------------------------------


def dry_run(providers: attention_providers.Found, options: argparse.Namespace) -> int:
    """Every provider that runs on a CPU, each direction once."""
    wrong = 0
    # One a kind and head size: at their tiny sizes the lengths are the same.
    problems = {(problem.kind, problem.size): problem.tiny() for problem in _problems(options)}
    with fusedops.backend("torch"):
        for problem in problems.values():
            device = torch.device("cpu")
            inputs = Inputs.of(problem, device)
            compare.fresh()
            offering = _offering(problem, providers, device)
            for provider, found in _distances(offering, inputs).items():
                reason = compare.verdict(found, problem.dtype)
                wrong += bool(reason) and provider == OURS
                if not reason:
                    for direction in options.directions:
                        attention_providers.run_in(direction, offering[provider], inputs)()
                print(f"{problem.kind} D {problem.size}: {provider}: {reason or 'agrees with float64'}")
    print(f"dry run: {len(problems)} problems ran on the torch backend, {wrong} wrong; nothing was timed")
    return 1 if wrong else 0


def static(options: argparse.Namespace) -> int:
    try:
        with capture_launches(options.targets[0]):
            pass
    except RuntimeError as error:  # no Triton, or one that interprets
        print(f"attention: {error}", file=sys.stderr)
        return 1
    results: list[attention_static.StaticResult] = []
    cases = [
        (target, size, kind, dtype)
        for target in options.targets
        for size in options.sizes
        for kind in options.kinds
        for dtype in options.dtypes
    ]
    with compare.progress() as progress:
        task = progress.add_task("", total=len(cases))
        for target, size, kind, dtype in cases:
            progress.update(task, description=f"{target} D {size} {kind} {dtype}")
            results += attention_static.inspect(target, size, kind == "causal", DTYPES[dtype])
            progress.advance(task)
    report = {**compare.header({}), "results": [result.as_dict() for result in results]}
    read = f"{attention_static.table(results)}\n\n{attention_static.summary(results)}\n\n{attention_static.NOTE}"
    print(json.dumps(report, indent=1) if options.json else read)
    if options.output is not None:
        compare.write(options.output / "attention-static", report)
        print(f"written: {options.output / 'attention-static'}.csv and .json", file=sys.stderr)
    failed = [result for result in results if result.error and result.source == OURS]
    for result in failed[:5]:
        print(f"attention: {result.target} D {result.size}: {result.error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
