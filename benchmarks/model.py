"""How fast are whole models, plain, compiled, with Liger and with fusedops, and how much memory do they take?

    python benchmarks/model.py [--models gpt2 llama bert] [--providers …] [--quick]
    python benchmarks/model.py --device cpu

On a GPU: times training steps (forward, backward, AdamW) of a model of GPT-2 small's shape and one of Llama's, and
inference of one of BERT base's, with random weights in bfloat16: plain, with torch.compile, Liger's kernels (where
installed), fusedops.patch, both fusedops.patch and torch.compile, and torch.compile's backend "fusedops". Tells tokens
a second (medians over steps), and the most memory in use in a step. The first loss and every gradient, or the hidden
states, are compared with float32's; what is further from them than twice plain's distance, and than 16-bit rounding
explains, is marked and not timed. Writes CSV, JSON and a plot to --output (default: benchmarks/results).

``--device cpu`` times small models on the CPU, plain and patched, in turn. fusedops runs torch's operators there: this
tells what its modules cost, and nothing of its kernels.

``--dry-run`` runs every variant once on the CPU, at a tiny size in float32, beside float64: it times nothing.

Exit codes: 0 right, 1 no GPU, or fusedops is wrong or fails, 2 usage.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # works in a checkout that is not installed

import torch  # noqa: E402

import fusedops  # noqa: E402
from benchmarks import compare, models, options, plots  # noqa: E402
from benchmarks.compare import CLOSE  # noqa: E402
from benchmarks.measure import Sample, human_seconds, interleave, markdown_table  # noqa: E402
from benchmarks.models import VARIANTS, NotOfferedError, Shape, Stepper  # noqa: E402
from benchmarks.options import DTYPES  # noqa: E402
from benchmarks.report import OURS, RESULTS, file_name, header, machine, ratios, told, write  # noqa: E402
from fusedops.runtime.device import device_facts  # noqa: E402

CASE = ("model",)
PLAIN = "plain"
WARM_UP = 3
LEAST_STEPS, MOST_STEPS = 5, 30


@dataclass(frozen=True, slots=True)
class Result:
    """One model in one way.

    Attributes:
        provider: the variant.
        distance: of loss and gradients, or hidden states, from those in float32; None where it failed.
        sample: durations of steps; None where it was not timed.
        plain: plain's median, in seconds.
        peak_bytes: most device memory in use in a step; None on the CPU.
        error: why it was not timed; None: it was.
    """

    model: str
    provider: str
    training: bool
    layers: int
    batch: int
    length: int
    dtype: str
    distance: float | None
    sample: Sample | None = None
    plain: float | None = None
    peak_bytes: int | None = None
    error: str | None = None

    @property
    def tokens_per_second(self) -> float | None:
        return self.batch * self.length / self.sample.median if self.sample else None

    @property
    def percent_of_plain(self) -> float | None:
        return 100 * self.plain / self.sample.median if self.sample and self.plain else None

    def row(self) -> dict[str, Any]:
        """For a CSV file."""
        return {
            **{k: v for k, v in asdict(self).items() if k not in ("sample", "plain", "error")},
            **compare.sample_row(self.sample),
            "tokens_per_second": self.tokens_per_second,
            "percent_of_plain": self.percent_of_plain,
            "error": self.error,
        }


def main(arguments: list[str] | None = None) -> int:
    asked = _options(arguments)
    if importlib.util.find_spec("transformers") is None:
        print("model: transformers is not installed, whose models are timed: pip install transformers", file=sys.stderr)
        return 1
    if asked.dry_run:
        return dry_run(asked)
    if asked.device == "cpu":
        return timed(torch.device("cpu"), asked)
    if not torch.cuda.is_available():
        return compare.no_gpu("model", "--device cpu times small models on the CPU, without fusedops' kernels")
    return timed(torch.device("cuda", torch.cuda.current_device()), asked)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    others = [name for name in VARIANTS if name != OURS]
    parser = options.parser(__doc__, others, quick="Two layers of each model, fewer steps.")
    parser.add_argument("--models", nargs="+", choices=models.FULL, help="Default: all.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="Default: cuda (ROCm too).")
    given = parser.parse_args(arguments)
    asked = options.parse(parser, arguments, others=others)
    asked.models = asked.models or tuple(models.FULL)
    asked.seconds = given.seconds if given.seconds is not None else (0.5 if asked.quick else 4.0)
    if given.dtype is None and (asked.device == "cpu" or asked.dry_run):
        asked.dtype = "float32"
    if asked.device == "cpu" and not asked.dry_run:
        if given.providers is not None:
            parser.error(f"--device cpu times {PLAIN} and {OURS} alone: it takes no --providers")
        asked.providers = []
    wanted = (PLAIN, OURS, *asked.providers)
    asked.providers = [name for name in VARIANTS if name in wanted]
    return asked


def _shapes(asked: argparse.Namespace) -> list[Shape]:
    if asked.dry_run:
        shapes = models.TINY
    elif asked.device == "cpu":
        shapes = models.SMALL
    else:
        shapes = models.QUICK if asked.quick else models.FULL
    return [shapes[name] for name in asked.models]


# --- timed -----------------------------------------------------------------------------------------------------------


def timed(device: torch.device, asked: argparse.Namespace) -> int:
    """Compare, time, and write what was found, after each model and variant; the exit code."""
    on_gpu = device.type == "cuda"
    name = device_facts(device).name if on_gpu else "CPU"
    report: dict[str, Any] = {
        **header({}),
        "benchmark": "model",
        "device": asdict(device_facts(device)) if on_gpu else {"name": name, **machine()},
        "kernels": on_gpu,  # False: fusedops ran torch's operators
        "dtype": asked.dtype,
        "case": list(CASE),
        "not_reached": [],
        "results": [],
    }
    path = (asked.output or RESULTS) / f"model-{file_name(name)}"
    checks = {shape.model: Check(shape, DTYPES[asked.dtype], device) for shape in _shapes(asked)}
    results: list[Result] = []
    with fusedops.backend("triton" if on_gpu else "torch"):
        for result in _alone(checks, report, asked) if on_gpu else _in_turn(checks, asked):
            results.append(result)
            print(f"{result.model} {result.provider}: {_cell(result)}", file=sys.stderr, flush=True)
            report["results"] = [each.row() for each in results]
            write(path, report)
    write(path, report)
    plot = plots.Plot(("model",), (), "provider", "percent_of_plain", "plain's speed")
    drawn = plots.bars(plot, report["results"], f"{name}, {asked.dtype}", path.with_suffix(".png"))
    closing = "On the CPU fusedops runs torch's operators: none of its kernels was timed."
    if on_gpu:
        closing = told(ratios(report))
    print(json.dumps(report, indent=1) if asked.json else f"{table(results)}\n\n{closing}")
    for label, reason in report["left_out"].items():
        print(f"left out: {label}: {reason}", file=sys.stderr)
    if report["not_reached"]:
        print(f"not reached: {'; '.join(report['not_reached'])}", file=sys.stderr)
    print(f"written: {path}.csv, .json{' and .png' if drawn else ''}", file=sys.stderr)
    return 1 if any(result.error for result in results if result.provider.startswith(OURS)) else 0


def _alone(checks: dict[str, Check], report: dict[str, Any], asked: argparse.Namespace) -> Iterator[Result]:
    """One model after the other, so that its memory is its own; each variant of all before the next one."""
    deadline = time.monotonic() + (asked.budget or float("inf"))
    for provider in asked.providers:
        for check in checks.values():
            label = f"{check.shape.model} {provider}"
            if time.monotonic() > deadline:
                report["not_reached"].append(label)
                continue
            try:
                result = _measure(check, provider, asked.seconds)
            except NotOfferedError as error:
                report["left_out"][label] = str(error)
                continue
            finally:
                _free(check.device)
            yield result


def _in_turn(checks: dict[str, Check], asked: argparse.Namespace) -> Iterator[Result]:
    """On the CPU: steps of all variants alternate, so that what else the machine does hits them alike."""
    for check in checks.values():
        steppers, errors, distances = {}, {}, {}
        for provider in asked.providers:
            stepper = Stepper.of(check.shape, VARIANTS[provider], check.dtype, check.device)
            distances[provider], errors[provider] = check.judge(provider, stepper)
            if errors[provider] is None:
                steppers[provider] = stepper
        durations = interleave(dict(steppers), 15 if asked.quick else 40)
        check.plain = Sample.of(durations[PLAIN])
        for provider in asked.providers:
            sample = Sample.of(durations[provider]) if provider in durations else None
            found = {"distance": compare.finite(distances[provider]), "sample": sample, "error": errors[provider]}
            yield _result(check, provider, found)


def _free(device: torch.device) -> None:
    """Nothing of a variant may count in the next one's memory, and nothing compiled may serve it."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Check:
    """A model's right results, and how far a variant may be from them."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, exact: torch.dtype = torch.float32):
        self.shape, self.dtype, self.device, self.exact = shape, dtype, device, exact
        self.plain: Sample | None = None
        self._right: tuple[torch.Tensor, ...] | None = None
        self._limit = CLOSE[dtype]

    def judge(self, provider: str, stepper: Stepper) -> tuple[float, str | None]:
        """The variant's distance, and what is wrong with it; None: nothing. The first one that is judged is plain."""
        if self._right is None:
            # The same weights, those that are rounded to the dtype.
            reference = Stepper.of(self.shape, lambda model: model.to(self.exact), self.dtype, self.device)
            self._right = reference.results()
        found = models.distance(stepper.results(), self._right, self.device)
        if provider == PLAIN:
            self._limit = max(self._limit, 2 * found)
        wrong = None if found <= self._limit else f"WRONG: {found:.1e} from {str(self.exact).removeprefix('torch.')}"
        return found, wrong


def _measure(check: Check, provider: str, seconds: float) -> Result:
    found: dict[str, Any] = {"distance": None, "error": None}
    try:
        stepper = Stepper.of(check.shape, VARIANTS[provider], check.dtype, check.device)
        apart, found["error"] = check.judge(provider, stepper)
        found["distance"] = compare.finite(apart)
        if provider == f"{OURS}, backend" and check.device.type == "cuda":
            found["error"] = found["error"] or _replaced_nothing()
        if found["error"] is None:
            found["sample"], found["peak_bytes"] = measure_steps(stepper, check.device, seconds)
    except NotOfferedError:
        raise
    except Exception as error:  # one variant's failure is its result; the others are still wanted
        found["error"] = compare.short(error)
    if provider == PLAIN:
        check.plain = found.get("sample")
    return _result(check, provider, found)


def _result(check: Check, provider: str, found: dict[str, Any]) -> Result:
    shape = check.shape
    return Result(
        model=shape.model, provider=provider, training=shape.training, layers=shape.layers, batch=shape.batch,
        length=shape.length, dtype=str(check.dtype).removeprefix("torch."),
        plain=check.plain.median if check.plain else None, **found,
    )  # fmt: skip


def _replaced_nothing() -> str | None:
    from fusedops.dynamo import last_report

    report = last_report()
    return None if report is not None and report.replaced else "the backend replaced nothing"


def measure_steps(step: Callable[[], object], device: torch.device, seconds: float) -> tuple[Sample, int]:
    """Durations of steps on a GPU, one after the other, and the most of its memory that was in use meanwhile."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    durations: list[float] = []
    began = time.perf_counter()
    while len(durations) < LEAST_STEPS or (len(durations) < MOST_STEPS and time.perf_counter() - began < seconds):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize(device)  # a step is far longer than the launch of its first kernel
        durations.append(time.perf_counter() - start)
    return Sample.of(durations), torch.cuda.max_memory_allocated(device)


def table(results: Sequence[Result]) -> str:
    """A row a model, a column a variant."""
    names = [name for name in VARIANTS if any(result.provider == name for result in results)]
    lines = []
    for model in dict.fromkeys(result.model for result in results):
        cells = {result.provider: result for result in results if result.model == model}
        some = next(iter(cells.values()))
        what = "training" if some.training else "inference"
        title = f"{model}, {some.layers} layers, {what}, {some.batch} x {some.length}"
        lines.append((title, *(_cell(cells.get(name)) for name in names)))
    note = "Each: tokens a second, time a step, speed over plain's, and the most memory in use."
    return f"{markdown_table(('model', *names), lines)}\n\n{note}"


def _cell(result: Result | None) -> str:
    if result is None:
        return "–"
    if result.sample is None or result.tokens_per_second is None:
        return (result.error or "–")[:60]
    speed = f"{result.percent_of_plain / 100:.2f}x" if result.percent_of_plain else "–"
    peak = f", {result.peak_bytes / 2**30:.2f} GiB" if result.peak_bytes is not None else ""
    return f"{result.tokens_per_second:,.0f}, {human_seconds(result.sample.median)}, {speed}{peak}"


# --- without a GPU ---------------------------------------------------------------------------------------------------


def dry_run(asked: argparse.Namespace) -> int:
    """Every variant of every model once on the CPU, beside float64; the exit code."""
    device, dtype = torch.device("cpu"), DTYPES[asked.dtype]
    wrong = count = 0
    with fusedops.backend("torch"):
        for shape in _shapes(asked):
            check = Check(shape, dtype, device, torch.float64)
            for provider in asked.providers:
                try:
                    stepper = Stepper.of(shape, VARIANTS[provider], dtype, device)
                    _, reason = check.judge(provider, stepper)
                    stepper()
                except NotOfferedError as error:
                    print(f"{shape.model}: {provider}: left out: {error}")
                    continue
                except Exception as error:
                    reason = compare.short(error)
                finally:
                    _free(device)
                count += 1
                wrong += bool(reason) and provider.startswith(OURS)
                print(f"{shape.model}: {provider}: {reason or 'agrees with float64'}")
    print(f"dry run: {count} models and variants took a step on the torch backend, {wrong} wrong; nothing was timed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
