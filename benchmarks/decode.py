"""How fast is a step of generation beside other libraries', in bytes a second of the cache and in percent of a copy?

    python benchmarks/decode.py [--kinds …] [--batches 1 8 64] [--heads 32/8 32/32] [--lengths 4096 …] [--quick]

On a GPU: times attention of one new token a sequence to contiguous, paged, int8 and float8 caches, in fusedops, torch
(SDPA as it chooses, by cuDNN and by flash; torch.compile; FlexAttention), flash-attn 2 and 3, FlashInfer and xformers,
as far as they are installed, by the device's own clock, the L2 cache flushed before every repeat, all of them and a
copy of the same bytes in turn, medians. The rate is of the bytes of the cache that the step sees. Each provider is
first compared with float64; one that is wrong is marked and not timed. Writes CSV, JSON and a plot to --output
(default: benchmarks/results).

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

from benchmarks import compare, decode_providers, options  # noqa: E402
from benchmarks.compare import Timing  # noqa: E402
from benchmarks.decode_providers import KINDS, Inputs, Problem, Step  # noqa: E402
from benchmarks.measure import Run, Sample, copy_of, human_seconds, markdown_table  # noqa: E402
from benchmarks.options import DTYPES  # noqa: E402
from benchmarks.plots import Plot  # noqa: E402
from benchmarks.report import OURS  # noqa: E402

LENGTHS = (4096, 16384, 65536, 131072)
BATCHES = (1, 8, 64)
HEADS = ("32/8", "32/32")  # query heads, key heads: Llama-3-8B, Llama-2-7B
QUICK_LENGTHS = (4096, 32768)
QUICK_BATCHES = (1, 16)
QUICK_HEADS = ("32/8",)
# Larger caches are left out: peers need as much again.
MOST_BYTES = 16 << 30
CASE = ("kind", "batch", "heads", "kv_heads", "size", "length")
PLOT = Plot(("kind",), ("batch", "heads", "kv_heads"), "length", "percent_of_copy", "a copy")


@dataclass(frozen=True, slots=True)
class Result:
    """One provider's step over one cache.

    Attributes:
        length: of the sequences, the mean where they are unequal.
        stored: dtype of the cache.
        cache_bytes: that the step sees.
        distance: relative distance of the output from float64's; None where it failed.
        sample, copy: its durations, and a copy's of the same bytes; None where it was not timed.
        error: why it was not; None: it was.
    """

    kind: str
    provider: str
    batch: int
    heads: int
    kv_heads: int
    size: int
    length: int
    stored: str
    dtype: str
    cache_bytes: int
    distance: float | None
    sample: Sample | None = None
    copy: Sample | None = None
    error: str | None = None

    @property
    def rate(self) -> float:
        """Bytes of the cache a second."""
        return self.cache_bytes / self.sample.median if self.sample else math.nan

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
    if not (torch.cuda.is_available() or asked.dry_run):
        return compare.no_gpu("decode", "fusedops inspect attention_decode reads its kernels' code")
    found, left_out = compare.loaded(decode_providers.PROVIDERS, [OURS, *asked.providers])
    if asked.dry_run:
        return dry_run(found, asked)
    return timed(found, left_out, torch.device("cuda", torch.cuda.current_device()), asked)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    others = [name for name in decode_providers.PROVIDERS if name != OURS]
    quick = "Few lengths and batches, one number of heads, without what compiles long."
    parser = options.parser(__doc__, others, quick=quick)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="Of caches; default: all.")
    parser.add_argument("--batches", nargs="+", type=int, help="Sequences (default: 1 8 64).")
    parser.add_argument("--heads", nargs="+", help="Query heads/key heads (default: 32/8 32/32).")
    parser.add_argument("--size", type=int, default=128, help="Of the heads (default: 128).")
    parser.add_argument("--lengths", nargs="+", type=int, help="Tokens in the cache (default: 4096 … 131072).")
    asked = options.parse(parser, arguments, others=others, slow=("torch.compile", "FlexAttention"))
    asked.kinds = asked.kinds or tuple(KINDS)
    asked.batches = asked.batches or (QUICK_BATCHES if asked.quick else BATCHES)
    asked.lengths = asked.lengths or (QUICK_LENGTHS if asked.quick else LENGTHS)
    if min(*asked.batches, *asked.lengths, asked.size) < 1:
        parser.error("--batches, --lengths and --size must be positive")
    pairs = []
    for text in asked.heads or (QUICK_HEADS if asked.quick else HEADS):
        heads, _, kv_heads = text.partition("/")
        if not (heads.isdigit() and kv_heads.isdigit() and int(kv_heads) and int(heads) % int(kv_heads) == 0):
            parser.error(f"--heads takes query heads/key heads, as 32/8; got {text}")
        pairs.append((int(heads), int(kv_heads)))
    asked.heads = pairs
    return asked


def _problems(asked: argparse.Namespace) -> dict[str, Problem]:
    found = {}
    for kind in asked.kinds:
        for heads, kv_heads in asked.heads:
            for batch in asked.batches:
                for length in asked.lengths:
                    problem = Problem.of(kind, batch, heads, kv_heads, asked.size, length, DTYPES[asked.dtype])
                    if problem is not None and problem.cache_bytes() <= MOST_BYTES:
                        found[f"{kind} {batch} x {length}, {heads}/{kv_heads} heads of {asked.size}"] = problem
    return found


# --- timed -----------------------------------------------------------------------------------------------------------


def timed(
    providers: decode_providers.Found,
    left_out: dict[str, str],
    device: torch.device,
    asked: argparse.Namespace,
) -> int:
    """Compare, time, and write what was found; the exit code."""

    def measure(problem: Problem, timing: Timing) -> list[Result]:
        inputs = Inputs.of(problem, device)
        return _measure(problem, providers, inputs, timing)

    return compare.timed("decode", _problems(asked), measure, table, CASE, PLOT, left_out, device, asked)


def _steps(providers: decode_providers.Found, inputs: Inputs) -> tuple[dict[str, Step], dict[str, float | Exception]]:
    """The steps of the providers that take the cache, each made once; and their distances from float64, or what they
    raised, those that cannot be made too."""
    steps: dict[str, Step] = {}
    distances: dict[str, float | Exception] = {}
    for name, provider in providers.items():
        made = compare.attempt(partial(provider.offer, inputs))
        if isinstance(made, Exception):
            distances[name] = made
        elif made is not None:
            steps[name] = made
            distances[name] = compare.attempt(partial(decode_providers.distance, made, provider, inputs))
    return steps, distances


def _measure(problem: Problem, providers: decode_providers.Found, inputs: Inputs, timing: Timing) -> list[Result]:
    steps, distances = _steps(providers, inputs)
    moved = problem.cache_bytes()
    samples, copy, errors = compare.measure(
        distances, problem.dtype, lambda name: decode_providers.run(steps[name], providers[name]),
        lambda: copy_of(moved, timing.device), timing.timer, timing.seconds,
    )  # fmt: skip
    return [
        Result(
            kind=problem.kind,
            provider=name,
            batch=problem.batch,
            heads=problem.heads,
            kv_heads=problem.kv_heads,
            size=problem.size,
            length=problem.length,
            stored=str(problem.stored).removeprefix("torch."),
            dtype=str(problem.dtype).removeprefix("torch."),
            cache_bytes=moved,
            distance=compare.finite(distances[name]),
            sample=samples.get(name),
            copy=copy if name in samples else None,
            error=error or None,
        )
        for name, error in errors.items()
    ]


def table(results: Sequence[Result]) -> str:
    """A table a kind of cache and number of heads: a row for each batch and length, a column a provider."""
    groups: dict[tuple[str, int, int, int], list[Result]] = {}
    for result in results:
        groups.setdefault((result.kind, result.heads, result.kv_heads, result.size), []).append(result)
    parts = []
    for (kind, heads, kv_heads, size), group in groups.items():
        names = list(dict.fromkeys(result.provider for result in group))
        lines = []
        for batch, length in dict.fromkeys((result.batch, result.length) for result in group):
            cells = {r.provider: r for r in group if (r.batch, r.length) == (batch, length)}
            mib = next(iter(cells.values())).cache_bytes / 2**20
            lines.append((f"{batch} x {length}", f"{mib:.0f} MiB", *(_cell(cells.get(name)) for name in names)))
        title = f"{kind} cache of {group[0].stored}, {heads} heads on {kv_heads} of {size}"
        parts.append(f"{title}\n\n{markdown_table(('sequences', 'cache', *names), lines)}")
    parts.append("Each: time, GB/s of the cache, and that in percent of a copy's rate in the same run.")
    return "\n\n".join(parts)


def _cell(result: Result | None) -> str:
    if result is None:
        return "–"
    if result.sample is None:
        return (result.error or "–")[:40]
    return f"{human_seconds(result.sample.median)}, {result.rate / 1e9:.0f}, {result.percent_of_copy:.0f}%"


# --- without a GPU ---------------------------------------------------------------------------------------------------


def dry_run(providers: decode_providers.Found, asked: argparse.Namespace) -> int:
    """Every provider that runs on a CPU, once."""

    def judge(problem: Problem) -> tuple[dict[str, float | Exception], Callable[[str, str], Run]]:
        inputs = Inputs.of(problem, torch.device("cpu"))
        steps, distances = _steps(providers, inputs)
        return distances, lambda direction, name: decode_providers.run(steps[name], providers[name])

    # One a kind and number of heads: at their tiny sizes the rest is the same.
    problems = {
        f"{problem.kind} {problem.heads}/{problem.kv_heads}": problem.tiny() for problem in _problems(asked).values()
    }
    return compare.dry_run(problems, judge, ("forward",), DTYPES[asked.dtype])


if __name__ == "__main__":
    sys.exit(main())
