"""What ``fusedops demo`` prints for people."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from fusedops.cli.output import human_bytes, stdout
from fusedops.demo.rounding import FACTOR
from fusedops.runtime.settings import SETTINGS


class Show:
    """Prints the results for people; prints nothing when ``quiet``."""

    def __init__(self, quiet: bool) -> None:
        self._console = stdout()
        self._console.quiet = quiet

    def backend(self, result: dict[str, Any]) -> None:
        found = result["backend"]
        self._console.print(f"Backend: [bold]{found['name']}[/], on {result['device']}", soft_wrap=True)
        for reason in found["reasons"]:
            self._text(f"  why not Triton: {reason}")
        if found["name"] == "triton" and SETTINGS.interpret:
            self._text("  Triton's interpreter stands in for a GPU: it is for tests, and a hundred times slower")

    def encoder(self, found: dict[str, Any]) -> None:
        self._head(f"A pretrained sentence encoder: {found['model']}, {found['parameters'] / 1e6:.1f} M parameters")
        self._text(found["report_text"])
        table = Table(title=f"Similarity to: {found['query']}", title_justify="left")
        table.add_column("sentence")
        table.add_column("plain", justify="right")
        table.add_column("patched", justify="right")
        for row in found["ranking"]:
            table.add_row(escape(row["sentence"]), f"{row['plain']:.4f}", f"{row['patched']:.4f}")
        self._console.print(table)
        self._text(f"Ranking before and after: {'the same order' if found['same_order'] else 'NOT the same order'}")
        self._rounding("the embeddings", found["rounding"], found["reference"])
        self._rule(found)

    def gpt(self, found: dict[str, Any]) -> None:
        self._head(
            f"A byte-level GPT, {found['parameters'] / 1e6:.1f} M parameters, trained for {found['steps']} steps in"
            f" {found['precision']} on {found['text_bytes'] / 1e6:.1f} MB of Python's standard library"
            f" ({found['text_files']} files)"
        )
        self._text(found["report_text"])
        plain, patched = found["losses"]["plain"], found["losses"]["patched"]
        table = Table(
            "step", "plain", "patched", "difference", title="Training loss, nats per byte", title_justify="left"
        )
        for step in _spread(len(plain), 9):
            table.add_row(
                str(step + 1), f"{plain[step]:.4f}", f"{patched[step]:.4f}", f"{patched[step] - plain[step]:+.1e}"
            )
        self._console.print(table)
        self._text(f"plain    {sparkline(plain)}\npatched  {sparkline(patched)}")
        self._text(f"Largest difference of the two curves: {found['largest_difference']:.1e}")
        gradient, reference = found["gradient_rounding"], found["reference"]
        self._rounding(f"the losses of the first {found['reference_steps']} steps", found["rounding"], reference)
        self._rounding(f"a gradient of the first step ({gradient['parameter']})", gradient, reference)
        self._rule(found)
        if found["peak_bytes"]["plain"] is not None:
            self._cost(found)
        self._text(f"Picture: {found['picture']}")

    def verdict(self, right: bool) -> None:
        self._head("Right: rounding explains every difference." if right else "WRONG: see above.")

    def _cost(self, found: dict[str, Any]) -> None:
        table = Table("", "plain", "patched", "patched / plain")
        seconds, peak = found["step_seconds"], found["peak_bytes"]
        table.add_row(
            "step time",
            *(f"{seconds[name] * 1e3:.2f} ms" for name in ("plain", "patched")),
            f"{seconds['patched'] / seconds['plain']:.3f}",
        )
        table.add_row(
            "peak memory",
            *(human_bytes(peak[name]) for name in ("plain", "patched")),
            f"{peak['patched'] / peak['plain']:.3f}",
        )
        self._console.print(table)

    def _rounding(self, what: str, rounding: dict[str, Any], reference: str) -> None:
        verdict = "kept" if rounding["explained_by_rounding"] else "EXCEEDED"
        self._text(
            f"Largest difference of {what}: {rounding['largest_difference']:.1e}\n"
            f"  distance from {reference}: plain {rounding['plain_error']:.1e},"
            f" patched {rounding['patched_error']:.1e}; limit {rounding['limit']:.1e}, {verdict}"
        )

    def _rule(self, found: dict[str, Any]) -> None:
        self._text(
            f"Rule: patched may be {FACTOR:g} times as far from {found['reference']} as plain is, plus 2 ulp:"
            " so much is rounding."
        )
        if not found["report"]["replaced"]:
            self._text("NOTHING was replaced, so nothing was compared")

    def _head(self, text: str) -> None:
        self._console.print(f"\n[bold]{escape(text)}[/]", soft_wrap=True)

    def _text(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)


def _spread(count: int, most: int) -> list[int]:
    """At most ``most`` indices over ``range(count)``, evenly, the first and the last among them."""
    most = min(count, most)
    return [round(i * (count - 1) / (most - 1)) for i in range(most)] if most > 1 else [0]


def sparkline(values: list[float], width: int = 60) -> str:
    """A curve in one line of block characters, the highest value the tallest block."""
    shown = [values[index] for index in _spread(len(values), width)]
    low, high = min(shown), max(shown)
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(blocks[round((value - low) / (high - low) * 7) if high > low else 0] for value in shown)
