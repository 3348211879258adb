"""``benchmarks/report.py`` and ``plots.py``: a report's head, its files, the worst ratio, and pictures."""

from __future__ import annotations

import builtins
import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import plots, report
from benchmarks.report import OURS


def row(provider: str, seconds: float | None, length: int = 2048, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "window", "window": None, "length": length, "provider": provider, "seconds_median": seconds, **changes
    }  # fmt: skip


def made_up(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"case": ["kind", "window", "length"], "results": list(rows)}


def test_a_head_tells_when_where_and_with_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "PEERS", ("pytest", "no-such-library"))
    head = report.header({"apex": "apex is not installed"})
    assert head["versions"]["torch"] == torch.__version__
    assert head["versions"]["pytest"] == pytest.__version__
    assert "no-such-library" not in head["versions"]
    assert {"commit", "triton", "cuda", "driver", "python", "fusedops"} <= set(head["versions"])
    assert head["machine"]["cpus"] >= 1
    assert head["machine"]["processor"]
    assert head["left_out"] == {"apex": "apex is not installed"}
    assert head["date"].endswith("+00:00")
    json.dumps(head)


def test_a_report_is_written_as_json_and_as_lines(tmp_path: Path) -> None:
    rows = [row(OURS, 1e-4), row("torch", None)]
    report.write(tmp_path / "new" / "norm", {"results": rows})
    assert json.loads((tmp_path / "new" / "norm.json").read_text())["results"] == rows
    with (tmp_path / "new" / "norm.csv").open() as file:
        assert [line["provider"] for line in csv.DictReader(file)] == [OURS, "torch"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["norm.csv", "norm.json"]


def test_ratios_are_to_the_fastest_other_library_the_worst_first() -> None:
    found = report.ratios(
        made_up(
            row(OURS, 2e-4),
            row("SDPA math", 1.5e-4),
            row("SDPA cuDNN", 1e-4),
            row(OURS, 1e-4, 4096),
            row("SDPA cuDNN", 3e-4, 4096),
            row(f"{OURS}, skinny", 1e-5, 4096),
            row(OURS, None, 8192),
            row("SDPA cuDNN", 1e-4, 8192),
            row(OURS, 1e-4, 16384),
        )
    )
    assert [(entry["case"], entry["peer"]) for entry in found] == [
        ("window, length 2048", "SDPA cuDNN"), ("window, length 4096", "SDPA cuDNN")
    ]  # fmt: skip
    assert [entry["ratio"] for entry in found] == pytest.approx([2.0, 1 / 3])
    assert report.told(found).splitlines() == [
        "fusedops is the fastest in 1 of 2.", "window, length 2048: 2.00 times the time of SDPA cuDNN"
    ]  # fmt: skip
    assert "No case" in report.told([])


def test_only_the_worst_ratios_are_told() -> None:
    found = report.ratios(made_up(*(row(who, t, n) for n in range(5) for who, t in ((OURS, 2 + n), ("torch", 1)))))
    lines = report.told(found, most=2).splitlines()
    assert lines[0] == "fusedops is the fastest in 0 of 5."
    assert lines[1].startswith("window, length 4: 6.00 times")
    assert lines[-1] == "… and 3 more"
    assert len(lines) == 4


def test_file_name() -> None:
    assert report.file_name("NVIDIA H200") == "nvidia-h200"
    assert report.file_name("AMD Instinct MI300X (gfx942)") == "amd-instinct-mi300x-gfx942"


PLOT = plots.Plot(("kind",), ("size",), "length", "percent", "a copy")
DRAWN = [
    {"kind": kind, "size": 64, "length": length, "percent": percent, "provider": who}
    for kind in ("all", "causal")
    for length, percent in ((512, 40.0), (1024, 80.0))
    for who in (OURS, "torch")
]


def test_a_plot_has_a_panel_for_each_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    drawn: list[str] = []
    genuine = Axes.set_title
    monkeypatch.setattr(Axes, "set_title", lambda self, text, **more: drawn.append(text) or genuine(self, text, **more))
    rows = [*DRAWN, {**DRAWN[0], "kind": "failed", "percent": None}]
    assert plots.draw(PLOT, rows, "made up", tmp_path / "a.png")
    assert drawn == ["all, size 64", "causal, size 64"]
    assert (tmp_path / "a.png").stat().st_size > 5000
    assert plots.bars(plots.Plot(("kind",), (), "provider", "percent", "plain"), rows, "made up", tmp_path / "b.png")
    assert (tmp_path / "b.png").stat().st_size > 5000


@pytest.mark.parametrize("draw", [plots.draw, plots.bars])
def test_without_matplotlib_the_plot_is_left_out(
    draw: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not draw(PLOT, DRAWN, "made up", tmp_path / "a.png")
    assert "matplotlib is not installed" in capsys.readouterr().err
    assert not draw(PLOT, [{**DRAWN[0], "percent": None}], "made up", tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_without_rich_there_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name.partition(".")[0] == "rich":
            raise ModuleNotFoundError(name)
        return genuine(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    with report.progress() as bar:
        task = bar.add_task("", total=2)
        bar.update(task, description="norm")
        bar.advance(task)
