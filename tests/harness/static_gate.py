"""What the static gate found, at the end of a run in one table: its tests may have run in several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

    from benchmarks.static_gate import Change

_PROPERTY = "static gate"

# Rows of a table: a change of a kernel that many cases launch has hundreds, which the command shows.
_MOST = 40


def record(record_property: Callable[[str, object], None], changes: Sequence[Change]) -> None:
    """Let a test's report carry what it found; ``record_property`` is pytest's fixture."""
    if changes:
        record_property(_PROPERTY, [list(change) for change in changes])


def summarise(reporter: pytest.TerminalReporter) -> None:
    """Print what the tests recorded: kernels that are worse than the gate allows, and figures that are better."""
    rows = [
        row
        for outcome in ("passed", "failed")
        for report in reporter.getreports(outcome)
        for name, recorded in report.user_properties
        if name == _PROPERTY
        for row in recorded
    ]
    if not rows:
        return
    from benchmarks.static_gate import Change, failure, stale

    changes = sorted((Change(*row) for row in rows), key=lambda change: change.key)
    for text in (failure(changes, _MOST), stale(changes, _MOST)):
        if text:
            reporter.section("static gate")
            reporter.write_line(text)
