"""On a GPU: are the kernels right, which configurations are the fastest, and how fast are they beside other libraries?

    python benchmarks/device_check.py [--budget 350] [--output FOLDER] [--configs FOLDER] [--parts attention decode …]

Within the budget (default: 350 seconds for everything), each in a process of its own, so that what crashes or hangs
ends nothing but itself: the tests marked ``gpu``; ``autotune`` of the problems whose configurations ship; the quick
benchmarks beside every library that is installed; the host's work a launch; a profile of a training step. A part gets
its share of the time that is left; what does not fit is left out and listed.

Writes ``<gpu>/<date>.json`` and ``.md`` with plots and the trace to --output (default: benchmarks/results), and the
measured configurations to --configs (default: fusedops/configs, where they ship from). Names the worst ratio to
another library last.

``--dry-run`` runs every part on the CPU, at tiny sizes, and measures nothing.

Exit codes: 0 right, 1 a part failed, did not finish, or found a wrong result, 2 usage, or no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # works in a checkout that is not installed

import torch  # noqa: E402

from benchmarks.__main__ import command_of  # noqa: E402
from benchmarks.device_report import markdown, worst_of  # noqa: E402
from benchmarks.report import RESULTS, file_name, header, told  # noqa: E402
from fusedops.runtime.device import device_facts  # noqa: E402

# The parts in their order, and their shares of the time.
SHARES = {
    "tests": 110, "tune": 60, "attention": 40, "decode": 25, "linear": 25, "norm": 25, "model": 40, "launches": 10,
    "trace": 15,
}  # fmt: skip
BENCHMARKS = ("attention", "decode", "linear", "norm", "model")
# What a part needs besides its measurements: Python and torch start, the last size is finished, files are written.
_STARTING, _OF_LIMIT = 6.0, 0.8
# What a part that is over its time may take to say what it has.
_GRACE = 6.0


@dataclass(frozen=True)
class Run:
    """What a command came to.

    Attributes:
        result: ``done``, ``failed`` or ``timed out``.
        output: of standard output and standard error.
    """

    result: str
    code: int | None
    output: str
    seconds: float


@dataclass
class Check:
    """One run of the check.

    Attributes:
        folder: for the parts' files, which are put together afterwards.
        configs: where measured configurations go.
        environment: of the parts.
    """

    folder: Path
    configs: Path
    dry: bool
    environment: dict[str, str] = field(default_factory=dict)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=350.0, help="Seconds for everything (default: 350).")
    parser.add_argument("--output", type=Path, help="Folder for the results (default: benchmarks/results).")
    parser.add_argument("--configs", type=Path, help="Folder for measured configurations (default: fusedops/configs).")
    parser.add_argument("--parts", nargs="+", choices=SHARES, default=list(SHARES), help="Default: all.")
    parser.add_argument("--dry-run", action="store_true", help="Runs every part on the CPU and measures nothing.")
    options = parser.parse_args(arguments)
    if options.budget <= 0:
        parser.error("--budget must be positive")
    if not (options.dry_run or torch.cuda.is_available()):
        print("device_check: torch finds no CUDA or ROCm device here; --dry-run runs without one", file=sys.stderr)
        return 2
    parts = [name for name in SHARES if name in options.parts]
    with tempfile.TemporaryDirectory() as folder:
        output = options.output or (Path(folder) / "results" if options.dry_run else RESULTS)
        configs = options.configs or (Path(folder) / "configs" if options.dry_run else ROOT / "fusedops" / "configs")
        check = Check(Path(folder), configs, options.dry_run, _environment(Path(folder), options.dry_run))
        report = run_parts(check, parts, options.budget)
        return finish(check, report, output)


def _environment(folder: Path, dry: bool) -> dict[str, str]:
    """Of the parts: a store of their own, so that what was tuned here before decides nothing and what this run tunes is
    used by what comes after it."""
    environment = {**os.environ, "FUSEDOPS_CACHE_DIR": str(folder / "store"), "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment.pop("TRITON_INTERPRET", None)
    if dry:
        environment["OMP_NUM_THREADS"] = "1"
    return environment


def run_parts(check: Check, parts: Sequence[str], budget: float) -> dict[str, Any]:
    """Every part within the budget; the report."""
    began = time.monotonic()
    report: dict[str, Any] = {
        **header({}),
        "dry_run": check.dry,
        "device": {"name": "dry run"} if check.dry else _device(),
        "budget_seconds": budget,
        "parts": {},
    }
    for number, name in enumerate(parts):
        left = budget - (time.monotonic() - began)
        limit = left * SHARES[name] / sum(SHARES[each] for each in parts[number:])
        if limit < 2:
            report["parts"][name] = {"result": "left out", "summary": "the time was up", "seconds": 0.0}
            continue
        print(f"\n== {name}, {limit:.0f} s at most", flush=True)
        with warming(check, parts) if name == "tests" and not check.dry else contextlib.nullcontext():
            try:
                found = run_part(check, name, limit)
            except Exception as error:  # of this script: the other parts are still wanted
                found = {"result": "failed", "summary": f"{type(error).__name__}: {error}"[:500], "seconds": 0.0}
        report["parts"][name] = found
        print(f"   {found['result']}: {found['summary']} ({found['seconds']:.0f} s)", flush=True)
    report["seconds"] = round(time.monotonic() - began, 1)
    report["worst"] = worst_of(report)
    return report


def _device() -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device())
    return asdict(device_facts(device))


def finish(check: Check, report: dict[str, Any], output: Path) -> int:
    """Write the report and the parts' files; the exit code."""
    folder = output / file_name(report["device"]["name"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / datetime.datetime.fromisoformat(report["date"]).strftime("%Y-%m-%d-%H%M")
    files = [*sorted(check.folder.glob("*.png")), *sorted(check.folder.glob("*.json.gz"))]
    report["files"] = []
    for file in files:
        report["files"].append(f"{path.name}-{file.name}")
        shutil.copyfile(file, folder / report["files"][-1])
    path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    text = markdown(report)
    path.with_suffix(".md").write_text(text)
    print(f"\n{text}\nwritten: {path}.json and .md, after {report['seconds']:.0f} s")
    print(told(report["worst"], most=3))
    return 0 if right(report) else 1


def right(report: dict[str, Any]) -> bool:
    return all(part["result"] in ("done", "left out") for part in report["parts"].values())


# --- parts -----------------------------------------------------------------------------------------------------------


def run_part(check: Check, name: str, limit: float) -> dict[str, Any]:
    """A part's ``result``, ``summary`` in a line, ``seconds``, and ``data``: what it found, or nothing."""
    environment = check.environment
    if name == "tests":
        return run_tests(check, limit)
    if name in BENCHMARKS:
        return _run_benchmark(check, name, limit)
    written = check.folder / f"{name}.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "device_parts.py"), name, "--output", str(written)]
    command += ["--budget", f"{soft(limit):.1f}", "--configs", str(check.configs)]
    if check.dry:
        command.append("--dry-run")
        if name in ("tune", "launches"):
            environment = {**environment, "TRITON_INTERPRET": "1"}
    run = run_command(command, limit, environment)
    data = _read(written)
    return _part(run, data, data["summary"] if data else None)


def _run_benchmark(check: Check, name: str, limit: float) -> dict[str, Any]:
    mode = "dry-run" if check.dry else "timed"
    further = ["--budget", f"{soft(limit):.1f}"] if mode == "timed" else []
    (command,) = command_of(name, mode, True, check.folder, further)
    run = run_command(command, limit, check.environment)
    written = sorted(check.folder.glob(f"{name}-*.json"))
    data = _read(written[0]) if written else None
    summary = None
    if data is not None:
        wrong = [row for row in data["results"] if row["error"] and row["provider"].startswith("fusedops")]
        summary = f"{len(data['results'])} results"
        summary += f", {len(data['not_reached'])} problems not reached" * bool(data["not_reached"])
        summary += f", fusedops failed: {wrong[0]['error']}" if wrong else ""
    return _part(run, data, summary)


def soft(limit: float) -> float:
    """Seconds after which a part begins nothing more, so that it is done within its limit."""
    return max(1.0, _OF_LIMIT * limit - _STARTING)


def _part(run: Run, data: Any, summary: str | None) -> dict[str, Any]:
    lines = [line for line in run.output.splitlines() if line.strip()]
    part = {
        "result": run.result,
        "summary": summary or (lines or ["no output"])[-1][:300],
        "seconds": round(run.seconds, 1),
        "data": data,
    }
    if run.result != "done":
        part["output"] = lines[-40:]
    return part


def _read(path: Path) -> Any:
    """A JSON file that a part wrote; None: it did not."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def run_tests(check: Check, limit: float) -> dict[str, Any]:
    """The tests marked ``gpu``; of a dry run, whether tests are found."""
    if importlib.util.find_spec("pytest") is None:
        return {"result": "left out", "summary": "pytest is not installed", "seconds": 0.0, "data": None}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    if check.dry:
        command += ["--collect-only", "tests/benchmarks/test_measure.py"]
    else:
        command += ["-m", "gpu"]
        if importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(min(8, os.cpu_count() or 1))]  # most of a first run is compilation, on the CPU
    run = run_command(command, limit, check.environment)
    part = _part(run, None, closing_line(run.output))
    if run.code == 5:
        part["summary"] = "no test was found"
    return part


def closing_line(output: str) -> str:
    """The closing line of pytest's output, such as ``312 passed, 2 skipped in 40.11s``; else its last line."""
    lines = [line.strip("= ") for line in output.splitlines() if line.strip()]
    closing = [line for line in lines if re.search(r"\d+ (passed|failed|errors?|deselected|tests?).* in [\d.]+", line)]
    return (closing or lines or ["no output"])[-1]


@contextlib.contextmanager
def warming(check: Check, parts: Sequence[str]) -> Iterator[None]:
    """While the tests run, which time nothing, the benchmarks run too, for what they compile: the compilers' caches
    keep it. What they write is thrown away."""
    processes = []
    for name in (name for name in BENCHMARKS if name in parts):
        (command,) = command_of(name, "timed", True, check.folder / "warm-up", ["--seconds", "0"])
        processes.append(_start(command, check.environment, subprocess.DEVNULL))
    try:
        yield
    finally:
        for process in processes:
            _kill(process)


# --- processes -------------------------------------------------------------------------------------------------------


def run_command(command: list[str], limit: float, environment: dict[str, str]) -> Run:
    """Run a command for so many seconds at most, its children too."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as file:  # a pipe would wait for whoever else holds its end
        process = _start(command, environment, file)
        result = "done"
        try:
            process.wait(max(0.1, limit - _GRACE))
        except subprocess.TimeoutExpired:
            result = "timed out"
            _signal(process, signal.SIGINT)  # as Ctrl-C: it may still write what it has
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(_GRACE, limit))
        _kill(process)
        file.seek(0)
        output = file.read()
    if result == "done" and process.returncode:
        result = "failed"
    return Run(result, process.returncode, output, time.monotonic() - began)


def _start(command: list[str], environment: dict[str, str], output: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip


def _signal(process: subprocess.Popen[Any], number: int) -> None:
    """To the process and its children, which would disturb what is timed next."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _kill(process: subprocess.Popen[Any]) -> None:
    _signal(process, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
