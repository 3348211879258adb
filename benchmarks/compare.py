"""What the comparisons with other libraries share: loading them, judging their results, timing them, reporting."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import torch

import fusedops
from benchmarks import plots
from benchmarks.measure import GpuTimer, Run, Sample, ceilings
from benchmarks.report import OURS, RESULTS, file_name, header, progress, ratios, told, write
from fusedops.inspection.offline import capture_launches
from fusedops.runtime.device import device_facts

Offer = TypeVar("Offer")
Tensors = Sequence["torch.Tensor | None"]


# --- libraries -------------------------------------------------------------------------------------------------------


def load(providers: Mapping[str, Callable[[], Offer]], names: Iterable[str]) -> tuple[dict[str, Offer], dict[str, str]]:
    """What each provider that is installed offers, and the reason why each other one is left out.

    Args:
        providers: functions that import a library and return what it offers.
        names: of ``providers``.
    """
    found: dict[str, Offer] = {}
    left_out: dict[str, str] = {}
    for name in names:
        try:
            found[name] = providers[name]()
        except ModuleNotFoundError as error:
            left_out[name] = f"{error.name} is not installed"
        except Exception as error:  # built for another torch, no such function in this version, …
            left_out[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found, left_out


def compiled(function: Callable[..., Any], mode: str | None = None) -> Callable[..., Any]:
    """torch.compile for the very sizes of a problem, by the first call after :func:`fresh`."""
    import torch._functorch.config as config

    # A graph whose backward runs more than once must keep its buffers.
    config.donated_buffer = False
    # Inductor makes C++ on a CPU, where only a dry run comes by.
    if not torch.cuda.is_available():
        return torch.compile(function, backend="aot_eager", dynamic=False, fullgraph=True)
    return torch.compile(function, mode=mode, dynamic=False, fullgraph=True)


def fresh() -> None:
    """Forget what torch.compile has compiled: it gives up on a function after a few sizes."""
    torch._dynamo.reset()


# --- is it right? ----------------------------------------------------------------------------------------------------

# Largest relative distance ‖found - exact‖ / ‖exact‖ of a right result: four roundings in a row to a 16-bit dtype, each
# of at most 2⁻⁸ or 2⁻¹¹; for float32 what sums of a million products may differ by in another order.
CLOSE = {torch.bfloat16: 4 * 2.0**-8, torch.float16: 4 * 2.0**-11, torch.float32: 1e-5}


def distance(
    function: Callable[..., Sequence[torch.Tensor]],
    exact: Callable[..., Sequence[torch.Tensor]],
    tensors: Tensors,
    by_row: Sequence[bool],
    gradients: Sequence[torch.Tensor],
    rows_at_once: int,
) -> float:
    """Largest relative distance of a function's outputs and gradients from float64's. NaN counts as infinite.

    Args:
        function: from ``tensors`` to outputs of one row for each row of the input.
        exact: the same in torch's operators, called with float64 tensors of some rows.
        by_row: for each tensor whether it has those rows; the gradients of the others are sums over rows.
        gradients: of the outputs.
        rows_at_once: that ``exact`` gets.
    """
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    wanted = [leaf for leaf in leaves if leaf is not None]
    outputs = function(*leaves)
    found = [t.detach() for t in (*outputs, *torch.autograd.grad(outputs, wanted, gradients))]
    rowwise = [True] * len(outputs) + [has for has, t in zip(by_row, tensors, strict=True) if t is not None]
    wrong = torch.zeros(len(found), dtype=torch.float64, device=found[0].device)
    total = torch.zeros_like(wrong)
    sums: list[torch.Tensor | None] = [None] * len(found)
    for rows in torch.arange(len(found[0])).split(rows_at_once):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        chunk = [
            None if t is None else (t.detach()[part] if has else t.detach()).double().requires_grad_()
            for t, has in zip(tensors, by_row, strict=True)
        ]
        results = exact(*chunk)
        arriving = [gradient[part].double() for gradient in gradients]
        expected = torch.autograd.grad(results, [t for t in chunk if t is not None], arriving)
        for i, right in enumerate(t.detach() for t in (*results, *expected)):
            if rowwise[i]:
                wrong[i] += (found[i][part].double() - right).square().sum()
                total[i] += right.square().sum()
            else:
                before = sums[i]
                sums[i] = right if before is None else before + right
    for i, sum_ in enumerate(sums):
        if sum_ is not None:
            wrong[i] = (found[i].double() - sum_).square().sum()
            total[i] = sum_.square().sum()
    return float((wrong / total).sqrt().nan_to_num(nan=float("inf")).max())


def attempt(call: Callable[[], Offer]) -> Offer | Exception:
    """What a call returns, or what it raised: one provider's failure is its result, the others are still wanted."""
    try:
        return call()
    except Exception as error:
        return error


def verdict(found: float | Exception, dtype: torch.dtype) -> str:
    """Why a provider is not timed; empty: it is right."""
    if isinstance(found, Exception):
        return short(found)
    return "" if found <= CLOSE[dtype] else f"WRONG: {found:.1e} from float64"


def short(error: Exception) -> str:
    lines = f"{type(error).__name__}: {error}".splitlines()
    return lines[0][:200]


# --- timing and reporting --------------------------------------------------------------------------------------------


def measure(
    distances: Mapping[str, float | Exception],
    dtype: torch.dtype,
    make_run: Callable[[str], Run],
    yardstick: Callable[[], Run] | None,
    timer: GpuTimer,
    seconds: float,
) -> tuple[dict[str, Sample], Sample | None, dict[str, str]]:
    """Time every provider that is right, and a yardstick, in turn.

    Args:
        distances: each provider's from float64, or what it raised.
        make_run, yardstick: make what to time; None: there is no yardstick.

    Returns:
        the providers' durations; the yardstick's; and for each provider why it was not timed, empty where it was.
    """
    runs: dict[str, Run] = {}
    errors: dict[str, str] = {}
    for name, found in distances.items():
        errors[name] = verdict(found, dtype)
        if not errors[name]:
            try:
                runs[name] = make_run(name)
                runs[name]()
            except Exception as error:
                errors[name] = short(error)
                runs.pop(name, None)
    key = ""  # no provider's name
    try:
        samples = timer.measure(runs if yardstick is None else {**runs, key: yardstick()}, seconds)
    except Exception as error:  # such as no memory: the other sizes are still wanted
        return {}, None, {name: reason or short(error) for name, reason in errors.items()}
    return samples, samples.pop(key, None), errors


def finite(found: float | Exception) -> float | None:
    """A distance for a JSON file, which has no infinity; None for one that is none."""
    return None if isinstance(found, Exception) or found == float("inf") else found


def sample_row(sample: Sample | None) -> dict[str, Any]:
    """A sample's columns in a CSV file."""
    if sample is None:
        return dict.fromkeys(("seconds_median", "seconds_low", "seconds_high", "count"))
    return {
        "seconds_median": sample.median,
        "seconds_low": sample.low,
        "seconds_high": sample.high,
        "count": sample.count,
    }


# --- a benchmark's three ways: timed, once on the CPU, from the compiled code ----------------------------------------


class Outcome(Protocol):
    """One provider's result in one case."""

    @property
    def provider(self) -> str: ...
    @property
    def error(self) -> str | None: ...
    def row(self) -> dict[str, Any]:
        """For a CSV file."""


Found = TypeVar("Found", bound=Outcome)
Problem = TypeVar("Problem")


@dataclass(frozen=True, slots=True)
class Timing:
    """What a problem is timed with.

    Attributes:
        device: where.
        timer: its clock.
        seconds: for each size and direction.
        ceilings: what the device reaches with the simplest work, by :func:`benchmarks.measure.ceilings`.
    """

    device: torch.device
    timer: GpuTimer
    seconds: float
    ceilings: Mapping[str, float]


def no_gpu(name: str, instead: str = "--static reads the compiled kernels without one") -> int:
    """Say that nothing can be timed here, and what can be done; the exit code."""
    print(
        f"{name}: torch finds no CUDA or ROCm device here, so nothing can be timed; {instead}; --dry-run runs every"
        " library once on the CPU",
        file=sys.stderr,
    )
    return 1


def loaded(
    providers: Mapping[str, Callable[[], Offer]], names: Iterable[str]
) -> tuple[dict[str, Offer], dict[str, str]]:
    """:func:`load`, and say on standard error what is left out."""
    found, left_out = load(providers, names)
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    return found, left_out


def timed(
    name: str,
    problems: Mapping[str, Problem],
    measure: Callable[[Problem, Timing], Sequence[Found]],
    show: Callable[[Sequence[Found]], str],
    case: tuple[str, ...],
    plot: plots.Plot | None,
    left_out: Mapping[str, str],
    device: torch.device,
    options: argparse.Namespace,
) -> int:
    """Compare, time, and write what was found, after each problem; the exit code.

    Args:
        name: of the benchmark.
        problems: by their names.
        measure: one problem's results, of every provider and direction.
        show: the results as tables.
        case: columns that say which case a result is of.
        plot: what to draw.
        left_out: providers, and why.
        options: of :func:`benchmarks.options.parse`.
    """
    deadline = time.monotonic() + (options.budget or float("inf"))
    timer = GpuTimer(device)
    timing = Timing(device, timer, options.seconds, ceilings(timer, device))
    facts = device_facts(device)
    report = {
        **header(left_out),
        "benchmark": name,
        "device": asdict(facts),
        "dtype": options.dtype,
        "ceilings": timing.ceilings,
        "case": list(case),
        "not_reached": [],
        "results": [],
    }
    path = (options.output or RESULTS) / f"{name}-{file_name(facts.name)}"
    results: list[Found] = []
    # An error, rather than a timing of torch under our name.
    with progress() as bar, fusedops.backend("triton"):
        task = bar.add_task("", total=len(problems))
        for label, problem in problems.items():
            if time.monotonic() > deadline:
                report["not_reached"].append(label)
                continue
            bar.update(task, description=label)
            fresh()
            try:
                results += measure(problem, timing)
            except torch.OutOfMemoryError as error:  # its tensors alone do not fit: the other sizes are still wanted
                report["not_reached"].append(f"{label}: {short(error)}")
            torch.cuda.empty_cache()
            report["results"] = [result.row() for result in results]
            write(path, report)
            bar.advance(task)
    write(path, report)
    title = f"{facts.name}, {options.dtype}"
    drawn = plot is not None and plots.draw(plot, report["results"], title, path.with_suffix(".png"))
    print(json.dumps(report, indent=1) if options.json else f"{show(results)}\n\n{told(ratios(report))}")
    if report["not_reached"]:
        print(f"not reached: {'; '.join(report['not_reached'])}", file=sys.stderr)
    print(f"written: {path}.csv, .json{' and .png' if drawn else ''}", file=sys.stderr)
    return 1 if any(result.error for result in results if result.provider == OURS) else 0


def dry_run(
    problems: Mapping[str, Problem],
    judge: Callable[[Problem], tuple[Mapping[str, float | Exception], Callable[[str, str], Run]]],
    directions: Sequence[str],
    dtype: torch.dtype,
) -> int:
    """Compare every provider that runs on a CPU with float64, run each direction once; the exit code.

    Args:
        problems: tiny ones, by their names.
        judge: a problem's distances by provider, and what makes (direction, provider) something to run.
    """
    wrong = 0
    with fusedops.backend("torch"):
        for label, problem in problems.items():
            fresh()
            distances, make_run = judge(problem)
            for provider, found in distances.items():
                reason = verdict(found, dtype)
                wrong += bool(reason) and provider == OURS
                if not reason:
                    for direction in directions:
                        make_run(direction, provider)()
                print(f"{label}: {provider}: {reason or 'agrees with float64'}")
    print(f"dry run: {len(problems)} problems ran on the torch backend, {wrong} wrong; nothing was timed")
    return 1 if wrong else 0


def static(
    name: str,
    cases: Mapping[str, Callable[[], Sequence[Any]]],
    show: Callable[[list[Any]], str],
    left_out: Mapping[str, str],
    options: argparse.Namespace,
) -> int:
    """Compile kernels and read their code; the exit code.

    Args:
        cases: what reads each, by its name: results with ``error``, ``as_dict()``, perhaps ``row()``, and ``provider``
            or ``source``.
    """
    try:
        with capture_launches(options.targets[0]):
            pass
    except RuntimeError as error:  # no Triton, or one that interprets
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    results: list[Any] = []
    failed: list[str] = []
    with progress() as bar:
        task = bar.add_task("", total=len(cases))
        for label, inspect in cases.items():
            bar.update(task, description=label)
            found = inspect()
            results += found
            failed += [
                f"{label}: {result.error}"
                for result in found
                if result.error and OURS in (getattr(result, "provider", None), getattr(result, "source", None))
            ]
            bar.advance(task)
    report = {**header(left_out), "benchmark": f"{name}-static", "results": [result.as_dict() for result in results]}
    print(json.dumps(report, indent=1) if options.json else show(results))
    if options.output is not None:
        path = options.output / f"{name}-static"
        write(path, report, [getattr(result, "row", result.as_dict)() for result in results])
        print(f"written: {path}.csv and .json", file=sys.stderr)
    for message in failed[:5]:
        print(f"{name}: {message}", file=sys.stderr)
    return 1 if failed else 0
