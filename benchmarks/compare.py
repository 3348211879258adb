"""What the comparisons with other libraries share: loading them, judging their results, timing them, reporting."""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.device_check import versions
from benchmarks.measure import GpuTimer, Run, Sample

OURS = "fusedops"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

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


def header(left_out: Mapping[str, str]) -> dict[str, Any]:
    """How a report begins: when, with which versions of what, and which libraries are missing."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"date": now, "versions": versions(), "left_out": dict(left_out)}


def write(path: Path, report: Mapping[str, Any]) -> None:
    """``path``.json with everything, ``path``.csv with a line a result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    write_rows(path.with_suffix(".csv"), report["results"])


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A CSV file whose columns are the first row's."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def progress() -> Progress:
    return Progress(console=Console(stderr=True), transient=True)  # standard output stays clean for a pipe
