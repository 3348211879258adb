"""On a GPU: are the kernels right, and how fast are they beside torch's own?

    python benchmarks/device_check.py [--budget 240] [--output FOLDER] [--only attention] [--no-tests]

Runs the tests marked ``gpu``, then times every operator in bfloat16, forward and backward, against torch eager: by the
device's own clock, the L2 cache flushed before every repeat, ours and torch's in turn, medians. Writes
``<device>.json`` and ``<device>.md`` in benchmarks/results. What does not fit in the budget is left out and listed.
``--dry-run`` runs every case once on the CPU, at tiny sizes on the torch backend: it times nothing.

Exit codes: 0 right, 1 a test failed or a result is wrong, 2 usage, or no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # works in a checkout that is not installed

import torch  # noqa: E402

import fusedops  # noqa: E402
from benchmarks.cases import OURS, Case, all_cases  # noqa: E402
from benchmarks.measure import GpuTimer, Run, Sample, human_seconds, markdown_table  # noqa: E402
from fusedops.runtime.device import device_facts  # noqa: E402

# The tests may take this share of the budget before they are stopped.
_TESTS_SHARE = 0.55

# Relative distance ‖ours - torch's‖ / ‖torch's‖ of two right results in bfloat16: both round to 2^-9.
_CLOSE = 2e-2


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=240.0, help="Seconds for everything (default: 240).")
    parser.add_argument("--output", type=Path, help="Folder for the results (default: benchmarks/results).")
    parser.add_argument("--only", help="Times only the operators whose name contains this.")
    parser.add_argument("--no-tests", action="store_true", help="Leaves the tests out.")
    parser.add_argument("--dry-run", action="store_true", help="Runs every case once on the CPU and times nothing.")
    options = parser.parse_args(arguments)
    cases = [case for case in all_cases(tiny=options.dry_run) if (options.only or "") in case.operator]
    if not cases:
        parser.error(f"--only {options.only}: no operator has such a name")
    if options.dry_run:
        return dry_run(cases)
    if not torch.cuda.is_available():
        print("device_check: torch finds no CUDA or ROCm device here; --dry-run runs without one", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    folder = options.output or ROOT / "benchmarks" / "results"
    return check(cases, device, options.budget, folder, not options.no_tests)


def dry_run(cases: list[Case]) -> int:
    wrong = 0
    with fusedops.backend("torch"):
        for case in cases:
            runs = case.prepare(torch.device("cpu"))
            distance = largest_distance(runs)
            verdict = "agrees with" if distance <= _CLOSE else f"DIFFERS ({distance:.1e}) from"
            wrong += distance > _CLOSE
            print(f"{case.name}: {verdict} {', '.join(name for name in runs if name != OURS)}")
    print(f"dry run: {len(cases)} cases ran once each on the torch backend, {wrong} wrong; nothing was timed")
    return 1 if wrong else 0


def check(cases: list[Case], device: torch.device, budget: float, folder: Path, tests: bool) -> int:
    """Test, time and write the report; the exit code."""
    began = time.monotonic()
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": {**asdict(device_facts(device)), "memory": torch.cuda.get_device_properties(device).total_memory},
        "versions": versions(),
        "tests": run_tests(budget * _TESTS_SHARE) if tests else None,
        "ceilings": {},
        "cases": [],
        "failed": [],
        "left_out": [],
    }
    timer = GpuTimer(device)
    report["ceilings"] = ceilings(timer, device)
    deadline = began + 0.95 * budget
    with fusedops.backend("triton"):  # an error, rather than a timing of torch under our name
        for number, case in enumerate(cases):
            left = deadline - time.monotonic()
            if left <= 0:
                report["left_out"] = [skipped.name for skipped in cases[number:]]
                break
            try:
                result = time_case(case, timer, device, min(0.6, left / 2))
            except Exception as error:  # one case's failure is its result; the others are still wanted
                report["failed"].append({"case": case.name, "error": f"{type(error).__name__}: {error}"[:2000]})
                print(f"{case.name}: {type(error).__name__}", flush=True)
                torch.cuda.empty_cache()
                continue
            report["cases"].append(result)
            print(f"{case.name}: {result['speedup']:.2f} x torch", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(report["device"]["name"])
    path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    text = markdown(report)
    path.with_suffix(".md").write_text(text)
    print(f"\n{text}\nwritten: {path.with_suffix('.json')} and .md, after {time.monotonic() - began:.0f} s")
    return 0 if right(report) else 1


def right(report: dict[str, Any]) -> bool:
    tests_right = report["tests"] is None or report["tests"]["result"] == "passed"
    return tests_right and not report["failed"] and all(case["agrees"] for case in report["cases"])


def versions() -> dict[str, str | None]:
    import triton

    return {
        "fusedops": fusedops.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
    }


def commit() -> str | None:
    """The checkout's commit, with a ``+`` where files differ from it; None: this is no checkout, or git is missing."""
    try:
        command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def run_tests(seconds: float) -> dict[str, Any]:
    """Run the tests marked ``gpu`` in a process of their own, for so long at most."""
    if importlib.util.find_spec("pytest") is None:
        return {"result": "not run", "summary": "pytest is not installed", "seconds": 0.0}
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--tb=short"]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(6, os.cpu_count() or 1))]  # most of a first run is compilation, on the CPU
    print(" ".join(command[1:]), flush=True)
    began = time.monotonic()
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        result = {0: "passed", 5: "no test found"}.get(process.returncode, "failed")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its workers too, which would disturb the timings
        output, _ = process.communicate()
        result = "unfinished"
    spent = time.monotonic() - began
    print("\n".join(output.splitlines()[-40:]), flush=True)
    return {"result": result, "summary": summary(output), "seconds": round(spent, 1)}


def summary(output: str) -> str:
    """The closing line of pytest's output, such as ``312 passed, 2 skipped in 40.11s``; else its last line."""
    lines = [line.strip("= ") for line in output.splitlines() if line.strip()]
    closing = [line for line in lines if re.search(r"\d+ (passed|failed|errors?|deselected).* in [\d.]+", line)]
    return (closing or lines or ["no output"])[-1]


def ceilings(timer: GpuTimer, device: torch.device) -> dict[str, float]:
    """What this device reaches with the simplest work: a copy (bytes read and written), a bfloat16 product."""
    free, _ = torch.cuda.mem_get_info(device)
    source = torch.empty(min(1 << 30, free // 8), dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    size = 8192 if free > 4 << 30 else 4096
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    copy = timer.measure({"copy": lambda: target.copy_(source)}, 0.5)["copy"].median
    product = timer.measure({"product": lambda: a @ b}, 0.5)["product"].median
    return {"copy_bytes_per_second": 2 * source.numel() / copy, "product_flops_per_second": 2 * size**3 / product}


def time_case(case: Case, timer: GpuTimer, device: torch.device, seconds: float) -> dict[str, Any]:
    runs = case.prepare(device)
    distance = largest_distance(runs)
    samples = timer.measure(runs, seconds)
    return result_of(case, samples, distance)


def result_of(case: Case, samples: dict[str, Sample], distance: float) -> dict[str, Any]:
    """A case's entry in the report. ``speedup``: the best torch median over ours."""
    ours = samples[OURS].median
    others = {name: sample.median for name, sample in samples.items() if name != OURS}
    best = min(others, key=lambda name: others[name])
    return {
        "operator": case.operator,
        "problem": case.problem,
        "direction": case.direction,
        "unit": case.unit,
        "work": case.work,
        "seconds": {name: asdict(sample) for name, sample in samples.items()},
        "best_torch": best,
        "speedup": others[best] / ours,
        "rate": case.work / ours,
        "relative_distance": distance,
        "agrees": distance <= _CLOSE,
    }


def largest_distance(runs: dict[str, Run]) -> float:
    """Largest ``‖ours - torch's‖ / ‖torch's‖`` over the results and over torch's ways. NaN counts as infinite."""
    ours = _tensors(runs[OURS]())
    distance = 0.0
    for name, run in runs.items():
        if name == OURS:
            continue
        for mine, theirs in zip(ours, _tensors(run()), strict=True):
            relative = ((mine.float() - theirs.float()).norm() / theirs.float().norm()).item()
            distance = max(distance, relative if relative == relative else float("inf"))
    return distance


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def file_name(device: str) -> str:
    """``NVIDIA H200`` → ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "device"


def markdown(report: dict[str, Any]) -> str:
    """The report as a page: what ran where, then a row a case."""
    device, found = report["device"], report["versions"]
    limits = report["ceilings"]
    copy, product = limits["copy_bytes_per_second"], limits["product_flops_per_second"]
    tests = report["tests"]
    lines = [
        f"# {device['name']}",
        "",
        f"{report['date']}; {device['arch']}, {device['multiprocessor_count']} multiprocessors; "
        + ", ".join(f"{name} {version}" for name, version in found.items() if version),
        "",
        f"A copy reaches {copy / 1e12:.2f} TB/s, a bfloat16 product {product / 1e12:.0f} TFLOP/s.",
        "",
        "Tests marked gpu: " + ("left out" if tests is None else f"{tests['result']} ({tests['summary']})") + ".",
        "",
        "bfloat16; medians by the device's clock, L2 flushed before each repeat; speed-up over torch's best way.",
        "",
    ]
    rows = [_row(case, copy) for case in report["cases"]]
    lines.append(markdown_table(("operator", "problem", "direction", "fusedops", "torch", "speed-up", "rate"), rows))
    for failure in report["failed"]:
        lines += ["", f"Failed: {failure['case']}: {failure['error'].splitlines()[0]}"]
    if report["left_out"]:
        lines += ["", f"Left out, the time was up: {'; '.join(report['left_out'])}."]
    return "\n".join(lines) + "\n"


def _row(case: dict[str, Any], copy: float) -> tuple[str, ...]:
    best = case["best_torch"]
    if case["unit"] == "byte":
        rate = f"{case['rate'] / 1e12:.2f} TB/s ({case['rate'] / copy:.0%} of a copy)"
    else:
        rate = f"{case['rate'] / 1e12:.0f} TFLOP/s"
    return (
        case["operator"],
        case["problem"],
        case["direction"],
        human_seconds(case["seconds"][OURS]["median"]) + ("" if case["agrees"] else " WRONG"),
        f"{human_seconds(case['seconds'][best]['median'])} ({best})",
        f"{case['speedup']:.2f}",
        rate,
    )


if __name__ == "__main__":
    sys.exit(main())
