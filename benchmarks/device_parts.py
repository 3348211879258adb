"""The parts of ``device_check.py`` that are no benchmark of their own; each runs in a process of its own.

    python benchmarks/device_parts.py tune|launches|trace --output FILE.json [--budget SECONDS] [--dry-run]

``tune`` searches the problems whose configurations ship with fusedops and merges what it measured into the file of this
GPU in --configs. ``launches`` times the host's work of a kernel's launch and of small operators on the device.
``trace`` profiles a training step of a patched model. Each writes JSON to --output.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # works in a checkout that is not installed

import torch  # noqa: E402

import fusedops  # noqa: E402

CONFIGS = ROOT / "fusedops" / "configs"
# Seconds that a problem may take: so that the budget reaches more than a few of them.
_EACH = 6.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--output", type=Path, required=True, help="A JSON file.")
    parser.add_argument("--budget", type=float, default=60.0, help="Seconds (default: 60).")
    parser.add_argument("--configs", type=Path, default=CONFIGS, help="Folder of tune (default: fusedops/configs).")
    parser.add_argument("--dry-run", action="store_true", help="On the CPU, at tiny sizes.")
    options = parser.parse_args(arguments)
    found = PARTS[options.part](options)
    options.output.write_text(json.dumps(found, indent=1) + "\n")
    print(found["summary"])
    # Triton's interpreter, unrepaired, does not run every kernel: a dry run tells, and goes on.
    broken = [call for call in found.get("failed", ()) if call.endswith("fusedops")]
    return 1 if broken and not options.dry_run else 0


def _device(dry: bool) -> torch.device:
    return torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- autotune --------------------------------------------------------------------------------------------------------


def tune(options: argparse.Namespace) -> dict[str, Any]:
    """Search what ships, the operators in turn, and write what was measured beside what ships already."""
    from fusedops.autotune import workloads
    from fusedops.autotune.bundles import merge, read_bundle, write_bundle
    from fusedops.autotune.entries import Entry
    from fusedops.autotune.identity import Identity
    from fusedops.autotune.record import Recorded, distinct
    from fusedops.autotune.search import BUDGET_SPENT, Result
    from fusedops.runtime.device import device_facts

    device = _device(options.dry_run)
    facts = device_facts(device)
    if options.dry_run:
        from fusedops.norm.tuning import NORM, NormProblem

        problems = distinct([(NORM, NormProblem(32, 4, "forward", rows=16, dtype="float32"))])
    else:
        names = ("Llama-3-8B", *(name for name in workloads.USUAL if name != "Llama-3-8B"))
        problems = in_turn(distinct(workloads.usual(facts, names=names)), lambda item: item.operator.name)
    left: list[Recorded] = [item for item in problems if item.operator.impossible(item.problem, facts) is None]
    entries: dict[str, dict[str, Entry]] = {}
    results: list[Result] = []
    path = options.configs / f"{Identity.of(facts).name.lower().replace(' ', '_')}.json"

    def found(result: Result) -> None:
        """After every problem: what was measured stays, whatever becomes of the rest."""
        results.append(result)
        entry = result.entry
        if entry is None or entry.source != "tuned":
            return
        entries.setdefault(result.op, {})[entry.key] = replace(entry, candidates=())
        before = read_bundle(path) if path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bundle(path, merge(before, [(Identity.of(facts), entries)]))

    jobs = min(16, os.cpu_count() or 1)
    with contextlib.suppress(KeyboardInterrupt):  # the time is up: what there is, is told
        fusedops.autotune.tune(left, budget_s=options.budget, key_budget_s=_EACH, device=device, jobs=jobs, found=found)
    rows = [_told(result) for result in results]
    reached = sum(result.refused != BUDGET_SPENT for result in results)
    gains = [row["gain"] for row in rows if row["gain"]]
    summary = f"{sum(map(len, entries.values()))} of {len(left)} problems have a measured configuration"
    summary += f" ({reached} begun)"
    if gains:
        summary += f"; the median gain over the default is {statistics.median(gains):.2f}, the largest {max(gains):.2f}"
    return {"summary": summary, "file": path.name, "problems": rows}


def _told(result: Any) -> dict[str, Any]:
    entry = result.entry
    timed = entry is not None and entry.median and entry.default_median
    return {
        "op": result.op,
        "problem": result.problem,
        "seconds": entry.median if entry else None,
        "default_seconds": entry.default_median if entry else None,
        "gain": entry.default_median / entry.median if timed else None,
        "config": dict(entry.config) if entry else None,
        "complete": result.complete,
        "refused": result.refused,
    }


def in_turn(items: list[Any], kind: Callable[[Any], str]) -> list[Any]:
    """The first of each kind, then the second of each, and so on: every kind gets its share of a budget."""
    groups: dict[str, list[Any]] = {}
    for item in items:
        groups.setdefault(kind(item), []).append(item)
    longest = max(map(len, groups.values()), default=0)
    return [group[i] for i in range(longest) for group in groups.values() if i < len(group)]


# --- launches --------------------------------------------------------------------------------------------------------


def launches(options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of the host a call, the device's queue never full: medians of rounds."""
    import triton

    from benchmarks.host import CALLS
    from benchmarks.launch_kernel import add_kernel

    device = _device(options.dry_run)
    each, rounds = (1, 3) if options.dry_run else (100, 20)
    x, y, out = (torch.ones(128, device=device) for _ in range(3))

    def kernel() -> None:
        add_kernel[(1,)](x, y, out, 100, BLOCK=128, num_warps=4)

    times = {"a Triton kernel": _host_us(kernel, device, each, rounds)}
    failed: dict[str, str] = {}
    with fusedops.backend("triton"), torch.no_grad():
        for name, make in CALLS.items():
            inputs, ours, theirs = make()
            inputs = [t.to(device, torch.float32 if options.dry_run else t.dtype) for t in inputs]
            for who, call in (("fusedops", ours), ("torch", theirs)):
                try:
                    times[f"{name}, {who}"] = _host_us(partial(call, *inputs), device, each, rounds)
                except Exception as error:  # one operator's failure is its result; the others are still wanted
                    failed[f"{name}, {who}"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    found: dict[str, Any] = {"triton": triton.__version__, "host_us": times, "failed": failed}
    if device.type == "cuda":
        found["graph_us"] = _graph_us(kernel, device)
    found["summary"] = f"a Triton launch takes the host {times['a Triton kernel']:.1f} µs"
    beside = {
        name: times[f"{name}, fusedops"] / times[f"{name}, torch"]
        for name in CALLS
        if not {f"{name}, fusedops", f"{name}, torch"} & set(failed)
    }
    if beside:
        worst = max(beside, key=lambda name: beside[name])
        ours_us, torchs_us = times[f"{worst}, fusedops"], times[f"{worst}, torch"]
        found["summary"] += f"; {worst} {ours_us:.1f} µs, torch's {torchs_us:.1f}"
    found["summary"] += f"; {len(failed)} failed" * bool(failed)
    return found


def _host_us(call: Callable[[], object], device: torch.device, each: int, rounds: int) -> float:
    for _ in range(3):
        call()
    found = []
    for _ in range(rounds):
        _wait(device)
        began = time.perf_counter()
        for _ in range(each):
            call()
        found.append((time.perf_counter() - began) / each * 1e6)
    _wait(device)
    return statistics.median(found)


def _graph_us(kernel: Callable[[], object], device: torch.device, count: int = 100) -> float:
    """Microseconds of the device a launch, where a CUDA graph of many is replayed."""
    kernel()
    _wait(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            kernel()
    return _host_us(lambda: (graph.replay(), _wait(device)), device, 1, 20) / count


# --- trace -----------------------------------------------------------------------------------------------------------


def trace(options: argparse.Namespace) -> dict[str, Any]:
    """Three training steps of a patched Llama-shaped model under torch.profiler: its kernels, and a trace file."""
    from torch.profiler import ProfilerActivity, profile

    from benchmarks import models

    device = _device(options.dry_run)
    shape = (models.TINY if options.dry_run else models.QUICK)["llama"]
    dtype = torch.float32 if options.dry_run else torch.bfloat16
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with fusedops.backend("triton" if on_gpu else "torch"):
        stepper = models.Stepper.of(shape, models.VARIANTS["fusedops"], dtype, device)
        for _ in range(3):
            stepper()
        _wait(device)
        with profile(activities=activities) as profiler:
            for _ in range(3):
                stepper()
            _wait(device)
    file = options.output.with_suffix(".json.gz")
    profiler.export_chrome_trace(str(file))
    rows = kernels_of(profiler.key_averages(), on_gpu)
    total = sum(row["us"] for row in rows)
    summary = f"{len(rows)} {'kernels' if on_gpu else 'operators'}, {total / 3e3:.2f} ms a step"
    if rows:
        summary += f"; {rows[0]['name'][:60]} takes {rows[0]['us'] / total:.0%}"
    return {"summary": summary, "file": file.name, "steps": 3, "kernels": rows[:40]}


def kernels_of(events: Any, on_gpu: bool) -> list[dict[str, Any]]:
    """What ran on the device (or, on a CPU, the operators themselves), the longest in all first."""
    rows = []
    for event in events:
        if on_gpu and event.device_type == torch.autograd.DeviceType.CPU:
            continue
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if us > 0:
            rows.append({"name": event.key, "us": us, "count": event.count})
    return sorted(rows, key=lambda row: -row["us"])


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "tune": tune,
    "launches": launches,
    "trace": trace,
}

if __name__ == "__main__":
    sys.exit(main())
