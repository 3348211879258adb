"""``fusedops doctor``: what is installed here, which backend would run, and why."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

import fusedops
from fusedops.cli.calls import SampleCall, sample_calls
from fusedops.cli.output import human_bytes, print_json, stdout
from fusedops.demo.rounding import compare
from fusedops.runtime.backend import backend_mode
from fusedops.runtime.device import device_facts
from fusedops.runtime.settings import SETTINGS, VARIABLES


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Report versions, devices, the backend that would run and why, the settings and the cache folder.

    Where kernels would run, one small call of each operator is made and compared with torch's result.
    The exit code is 1 when something is wrong that would keep fusedops from working as it is set up.

    Example: `fusedops doctor --json` (for a report of a fault).
    """
    found = examine()
    if json:
        print_json(found)
    else:
        _print(found)
    if found["problems"]:
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
    """Everything that ``fusedops doctor`` reports, as plain JSON values with stable keys.

    Keys: ``versions`` (null: there is none), ``devices``, ``backend`` (``mode``, and for each device each operator's
    ``backend``, ``reasons`` and ``check``), ``settings`` (by environment variable), ``cache`` and ``problems``.
    """
    problems: list[str] = []
    versions = _versions(problems)
    devices = _devices()
    return {
        "versions": versions,
        "devices": devices,
        "backend": _backend(devices, problems),
        "settings": _settings(),
        "cache": _cache(problems),
        "problems": problems,
    }


def _versions(problems: list[str]) -> dict[str, str | None]:
    return {
        "fusedops": fusedops.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "triton": _triton_version(problems),
        "transformers": _installed("transformers"),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "driver": _driver(),
    }


def _triton_version(problems: list[str]) -> str | None:
    try:
        return str(importlib.import_module("triton").__version__)
    except ModuleNotFoundError as error:
        if error.name == "triton":
            return None
        problems.append(f"Triton is installed, but cannot be imported: {error}")
    except Exception as error:  # a broken installation may raise anything; the report is to come all the same
        problems.append(f"Triton is installed, but cannot be imported: {type(error).__name__}: {error}")
    return None


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Version of NVIDIA's driver; None where there is none, or where it does not say."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(answer.stdout.split()), None)


def _devices() -> list[dict[str, Any]]:
    """The GPUs that torch sees; the CPU where there is none, or where kernels are interpreted on it."""
    found: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        found += [_gpu(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    if not found or SETTINGS.interpret:
        found.append({"device": "cpu", "name": platform.machine(), "threads": torch.get_num_threads()})
    return found


def _gpu(device: torch.device) -> dict[str, Any]:
    facts = device_facts(device)
    return {
        "device": str(device),
        "name": facts.name,
        "vendor": facts.vendor,
        "arch": facts.arch,
        "multiprocessors": facts.multiprocessor_count,
        "shared_memory_bytes": facts.shared_memory,
        "warp_size": facts.warp_size,
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory,
    }


def _backend(devices: list[dict[str, Any]], problems: list[str]) -> dict[str, Any]:
    mode = backend_mode()
    report: dict[str, Any] = {"mode": mode, "devices": {}}
    for name in (entry["device"] for entry in devices):
        operators = {call.name: _operator(call) for call in sample_calls(torch.device(name))}
        report["devices"][name] = operators
        reasons = list(dict.fromkeys(reason for found in operators.values() for reason in found["reasons"]))
        if mode == "triton" and reasons:
            problems.append(f"FUSEDOPS_BACKEND=triton, but on {name}: {'; '.join(reasons)}")
        elif mode == "auto" and reasons and name != "cpu":
            problems.append(f"{name} runs on torch's operators: {'; '.join(reasons)}")
        problems += [
            f"{operator} on {name}: {found['check']}"
            for operator, found in operators.items()
            if found["check"] not in (None, "right")
        ]
    return report


def _operator(call: SampleCall) -> dict[str, Any]:
    explanation = call.explain()
    return {
        "backend": explanation.backend,
        "reasons": list(explanation.reasons),
        "check": _check(call) if explanation.backend == "triton" else None,
    }


def _check(call: SampleCall) -> str:
    """Run the call's kernel and compare with torch, and both with float64: "right", or what went wrong."""
    try:
        result = call.run()
        with fusedops.backend("torch"):
            rounding = compare(result, call.run(), call.in_double().run())
    except Exception as error:  # compiler, driver, loader: whatever a broken installation raises is the answer
        return f"{type(error).__name__}: {error}"
    return "right" if rounding.explained else f"wrong: off by {rounding.patched:.1e}, torch by {rounding.plain:.1e}"


def _settings() -> dict[str, dict[str, Any]]:
    """Each variable's value in force, and whether the environment sets it."""
    report = {}
    resolved = {"cache_dir": SETTINGS.cache_path(), "record_file": SETTINGS.record_path()}
    for field, variable in VARIABLES.items():
        value = resolved.get(field, getattr(SETTINGS, field))
        if isinstance(value, tuple):
            value = os.pathsep.join(map(str, value))
        value = str(value) if isinstance(value, Path) else value
        report[variable] = {"value": value, "set": bool(os.environ.get(variable, "").strip())}
    return report


def _cache(problems: list[str]) -> dict[str, Any]:
    folder = SETTINGS.cache_path()
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    writable = _writable(folder)
    if not writable:
        problems.append(f"the cache folder {folder} cannot be written (FUSEDOPS_CACHE_DIR names another)")
    return {
        "path": str(folder),
        "exists": folder.is_dir(),
        "writable": writable,
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
    }


def _writable(folder: Path) -> bool:
    """Whether the folder, or the nearest one above it that exists, may be written. Nothing is created."""
    for existing in (folder, *folder.parents):
        if existing.exists():
            return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return False


def _print(found: dict[str, Any]) -> None:
    console = stdout()
    console.print(_table("Versions", [(name, value or "none") for name, value in found["versions"].items()]))
    for entry in found["devices"]:
        rows = [(key, human_bytes(v) if key.endswith("_bytes") else str(v)) for key, v in entry.items()]
        console.print(_table("Device", [(key.removesuffix("_bytes").replace("_", " "), value) for key, value in rows]))
    for device, operators in found["backend"]["devices"].items():
        table = Table("operator", "backend", "why", title=f"Backend on {device}", title_justify="left")
        for operator, entry in operators.items():
            table.add_row(operator, entry["backend"], escape("\n".join(entry["reasons"]) or _verdict(entry["check"])))
        console.print(table)
    settings = [
        (name, f"{entry['value']}{'' if entry['set'] else '  (default)'}") for name, entry in found["settings"].items()
    ]
    console.print(_table("Settings", settings))
    cache = found["cache"]
    size = f"{human_bytes(cache['bytes'])} in {cache['files']} files" if cache["exists"] else "not created yet"
    console.print(
        _table("Cache", [("folder", cache["path"]), ("size", size), ("writable", "yes" if cache["writable"] else "no")])
    )
    for problem in found["problems"]:
        console.print(f"[bold red]problem:[/] {escape(problem)}")
    if not found["problems"]:
        console.print("[bold green]No problem found.[/]")


def _verdict(check: str | None) -> str:
    return "the torch backend is asked for" if check is None else f"a small call gives {check} results"


def _table(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(name, escape(value))
    return table
