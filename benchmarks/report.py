"""What the benchmarks write: a report's head (when, where, with what), its files, and its worst ratio."""

from __future__ import annotations

import contextlib
import csv
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import fusedops
from fusedops.autotune.operator import operator_named
from fusedops.autotune.versions import current_versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OURS = "fusedops"

# Distributions of the libraries that fusedops is compared with.
PEERS = (
    "liger-kernel", "flash-attn", "flash-attn-3", "xformers", "flashinfer-python", "apex", "quack-kernels",
    "transformer-engine", "transformers",
)  # fmt: skip


def header(left_out: Mapping[str, str]) -> dict[str, Any]:
    """How a report begins: when, where, with which versions of what, and which libraries are missing."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"date": now, "machine": machine(), "versions": versions(), "left_out": dict(left_out)}


def machine() -> dict[str, Any]:
    """The host: system, processor, and how many of its cores this process may use."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"system": f"{platform.system()} {platform.release()}", "processor": _processor(), "cpus": cpus}


def _processor() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    """Of fusedops, its commit, what it runs on, and the other libraries that are installed."""
    tuned_with = current_versions(operator_named("norm"))
    found = {
        "fusedops": fusedops.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": tuned_with["triton"],
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "driver": tuned_with["driver"],
    }
    for name in PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str | None:
    """The checkout's commit, with a ``+`` where files differ from it; None: this is no checkout, or git is missing."""
    try:
        command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def file_name(device: str) -> str:
    """``NVIDIA H200`` → ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "device"


def write(path: Path, report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] | None = None) -> None:
    """``path``.json with everything, ``path``.csv with a line a result.

    Args:
        rows: of the CSV file; None: the report's results.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In one step: a reader, or a run that is stopped here, finds a whole file.
    written = path.with_suffix(".json.part")
    written.write_text(json.dumps(report, indent=1) + "\n")
    written.replace(path.with_suffix(".json"))
    write_rows(path.with_suffix(".csv"), report["results"] if rows is None else rows)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A CSV file whose columns are the first row's."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


# --- the worst ratio -------------------------------------------------------------------------------------------------


def ratios(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """fusedops' time over the fastest other library's in each of a report's cases, the worst first.

    Args:
        report: with ``results``, rows with ``provider`` and ``seconds_median``, and ``case``, the columns whose values
            say which case a row is of.

    Returns:
        for each case that both have: ``case`` in words, ``ratio`` (above 1: fusedops is slower), ``peer``, and both
        times in seconds, ``ours`` and ``theirs``. fusedops' own candidates ("fusedops, …") are no peers.
    """
    cases: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in report["results"]:
        if row["seconds_median"]:
            key = tuple(row[column] for column in report["case"])
            cases.setdefault(key, {})[row["provider"]] = row["seconds_median"]
    found = []
    for key, times in cases.items():
        others = {name: seconds for name, seconds in times.items() if not name.startswith(OURS)}
        if OURS in times and others:
            peer = min(others, key=lambda name: others[name])
            words = ", ".join(
                f"{column} {value}" if isinstance(value, int) else str(value)
                for column, value in zip(report["case"], key, strict=True)
                if value is not None
            )
            ratio = times[OURS] / others[peer]
            found.append({"case": words, "ratio": ratio, "peer": peer, "ours": times[OURS], "theirs": others[peer]})
    return sorted(found, key=lambda entry: -entry["ratio"])


def told(found: Sequence[Mapping[str, Any]], most: int = 8) -> str:
    """In how many cases fusedops is the fastest, and where it is furthest from that."""
    if not found:
        return "No case has both fusedops and another library."
    slower = [entry for entry in found if entry["ratio"] > 1]
    lines = [f"fusedops is the fastest in {len(found) - len(slower)} of {len(found)}."]
    lines += [f"{entry['case']}: {entry['ratio']:.2f} times the time of {entry['peer']}" for entry in slower[:most]]
    lines += [f"… and {len(slower) - most} more"] * (len(slower) > most)
    return "\n".join(lines)


# --- progress --------------------------------------------------------------------------------------------------------


class _Silent:
    """In place of rich's progress where rich is not installed."""

    def add_task(self, description: str, total: int) -> int:
        return 0

    def update(self, task: int, description: str) -> None:
        pass

    def advance(self, task: int) -> None:
        pass


@contextlib.contextmanager
def progress() -> Iterator[Any]:
    """A bar on standard error, where rich is installed; standard output stays clean for a pipe."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield _Silent()
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        yield bar
