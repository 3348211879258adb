"""What ``device_check.py`` tells: its report as a page."""

from __future__ import annotations

from typing import Any

from benchmarks.measure import human_seconds, markdown_table
from benchmarks.report import ratios, told


def worst_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """:func:`benchmarks.report.ratios` of all benchmarks together, the worst first, each with its ``benchmark``."""
    found = []
    for name, part in report["parts"].items():
        data = part.get("data")
        if data and "case" in data:
            found += [{"benchmark": name, **entry, "case": f"{name}: {entry['case']}"} for entry in ratios(data)]
    return sorted(found, key=lambda entry: -entry["ratio"])


def markdown(report: dict[str, Any]) -> str:
    """The report as a page: what ran where, how each part ended, the worst ratios, and what each part found."""
    device, found = report["device"], report["versions"]
    facts = [f"{device['arch']}, {device['multiprocessor_count']} multiprocessors"] if "arch" in device else []
    known = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    lines = [f"# {device['name']}", "", "; ".join([report["date"], *facts, known]), ""]
    if report["dry_run"]:
        lines += ["A dry run on the CPU: nothing here is a measurement.", ""]
    found_ceilings = [(part.get("data") or {}).get("ceilings") for part in report["parts"].values()]
    for ceilings in [each for each in found_ceilings if each][:1]:
        copy, product = ceilings["copy_bytes_per_second"], ceilings["product_flops_per_second"]
        lines += [f"A copy reaches {copy / 1e12:.2f} TB/s, a bfloat16 product {product / 1e12:.0f} TFLOP/s.", ""]
    rows = [(n, p["result"], f"{p['seconds']:.0f} s", p["summary"][:160]) for n, p in report["parts"].items()]
    lines += [markdown_table(("part", "result", "time", "found"), rows), ""]
    lines += ["## Beside other libraries", "", told(report["worst"], most=15).replace("\n", "\n- "), ""]
    for name, part in report["parts"].items():
        lines += _section(name, part)
    return "\n".join(lines).rstrip() + "\n"


def _section(name: str, part: dict[str, Any]) -> list[str]:
    data = part.get("data") or {}
    lines: list[str] = []
    if "case" in data:
        rows = _benchmark_rows(data)
        if rows:
            columns = ("case", "fusedops", "fastest other", "its time", "ratio")
            lines += [f"Medians, {data['dtype']}; ratio: fusedops' time over the other's.", ""]
            lines += [markdown_table(columns, rows), ""]
        if data["left_out"]:
            lines += [f"Left out: {'; '.join(f'{k}: {v}' for k, v in data['left_out'].items())}.", ""]
        if data["not_reached"]:
            lines += [f"Not reached: {'; '.join(data['not_reached'])}.", ""]
        wrong = [row for row in data["results"] if row["error"]]
        lines += [f"- {row['provider']}, {_case(data, row)}: {row['error']}" for row in wrong[:10]]
    elif name == "tune" and data:
        rows = [
            (f"{row['op']} {row['problem'][:80]}", human_seconds(row["seconds"]), human_seconds(row["default_seconds"]),
             f"{row['gain']:.2f}")
            for row in data["problems"] if row["gain"]
        ]  # fmt: skip
        lines += [markdown_table(("problem", "best", "default", "gain"), rows)] if rows else []
    elif name == "launches" and data:
        rows = [(what, f"{us:.1f}") for what, us in data["host_us"].items()]
        lines += [markdown_table(("call", "host µs"), rows)]
        lines += [f"- {what}: {error}" for what, error in data["failed"].items()]
        if "graph_us" in data:
            lines += ["", f"A launch in a replayed CUDA graph: {data['graph_us']:.2f} µs."]
    elif name == "trace" and data:
        rows = [(row["name"][:80], str(row["count"]), f"{row['us'] / 1e3:.2f} ms") for row in data["kernels"][:15]]
        lines += [markdown_table((f"kernel, of {data['steps']} steps", "calls", "time"), rows)]
    if part["result"] not in ("done", "left out"):
        lines += ["", "```text", *part.get("output", [])[-15:], "```"]
    return [f"## {name}", "", *lines, ""] if lines else []


def _benchmark_rows(data: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (entry["case"], human_seconds(entry["ours"]), entry["peer"], human_seconds(entry["theirs"]),
         f"{entry['ratio']:.2f}")
        for entry in ratios(data)
    ]  # fmt: skip


def _case(data: dict[str, Any], row: dict[str, Any]) -> str:
    return ", ".join(str(row[column]) for column in data["case"] if row[column] is not None)
