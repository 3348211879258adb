"""Plots of a report: how near each library comes to the peak."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import OURS


@dataclass(frozen=True, slots=True)
class Plot:
    """Which columns of the results make a plot: a panel for each pair of ``down`` and ``across``, a line a provider.

    Attributes:
        down, across: columns, whose values together name a panel; panels of the same ``across`` stand below each other.
        x, y: columns; y in percent of the peak.
        peak: in words.
    """

    down: tuple[str, ...]
    across: tuple[str, ...]
    x: str
    y: str
    peak: str


def draw(plot: Plot, rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> bool:
    """Write a PNG file; False where matplotlib is not installed (said on standard error) or there is nothing to draw.

    Args:
        rows: of a report.
    """
    rows = [row for row in rows if row[plot.y] is not None]
    if not rows:
        return False
    try:
        import matplotlib
    except ImportError:
        print("left out: the plot: matplotlib is not installed", file=sys.stderr)
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    def name(row: Mapping[str, Any], columns: tuple[str, ...]) -> str:
        return ", ".join(f"{c} {row[c]}" if isinstance(row[c], int) else str(row[c]) for c in columns)

    downs = list(dict.fromkeys(name(row, plot.down) for row in rows))
    acrosses = list(dict.fromkeys(name(row, plot.across) for row in rows))
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    size = (4.2 * len(acrosses), 3.2 * len(downs))
    figure, axes = pyplot.subplots(len(downs), len(acrosses), figsize=size, squeeze=False, sharey=True)
    for i, down in enumerate(downs):
        for j, across in enumerate(acrosses):
            panel = axes[i][j]
            there = [row for row in rows if (name(row, plot.down), name(row, plot.across)) == (down, across)]
            for number, provider in enumerate(providers):
                line = sorted((row[plot.x], row[plot.y]) for row in there if row["provider"] == provider)
                if line:
                    style = {"color": f"C{number}", "marker": "o", "linewidth": 2.0 if provider == OURS else 1.0}
                    panel.plot(*zip(*line, strict=True), label=provider, **style)
            panel.axhline(100, color="grey", linewidth=0.8, linestyle=":")
            panel.set_xscale("log", base=2)
            panel.set_ylim(bottom=0)
            panel.set_title(", ".join(filter(None, (down, across))), fontsize="small")
            panel.set_xlabel(plot.x.replace("_", " "))
            panel.set_ylabel(f"percent of {plot.peak}")
            if there:
                panel.legend(fontsize="x-small")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def bars(plot: Plot, rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> bool:
    """As :func:`draw`, but x is a name: groups of bars, one a value of ``down``."""
    rows = [row for row in rows if row[plot.y] is not None]
    if not rows:
        return False
    try:
        import matplotlib
    except ImportError:
        print("left out: the plot: matplotlib is not installed", file=sys.stderr)
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = list(dict.fromkeys(row[plot.down[0]] for row in rows))
    names = list(dict.fromkeys(row[plot.x] for row in rows))
    width = 0.8 / len(names)
    figure, panel = pyplot.subplots(figsize=(2.5 + 2.2 * len(groups), 3.6))
    for number, name in enumerate(names):
        found = {row[plot.down[0]]: row[plot.y] for row in rows if row[plot.x] == name}
        places = [i + (number - (len(names) - 1) / 2) * width for i, group in enumerate(groups) if group in found]
        panel.bar(places, [found[group] for group in groups if group in found], width, label=name)
    panel.axhline(100, color="grey", linewidth=0.8, linestyle=":")
    panel.set_xticks(range(len(groups)), groups)
    panel.set_ylabel(f"percent of {plot.peak}")
    panel.legend(fontsize="x-small")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
