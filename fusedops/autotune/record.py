"""Problems that a run meets, written down to be searched later: one JSON object a line."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fusedops.autotune.operator import Operator, operator_named
from fusedops.runtime.device import DeviceFacts


class Recorded(NamedTuple):
    """A problem, and the device that met it."""

    operator: Operator
    problem: Any
    device: str = ""


_lock = threading.Lock()
_written: set[tuple[Path, str]] = set()
_failed: set[Path] = set()


def record(operator: Operator, problem: tuple, facts: DeviceFacts, path: Path) -> None:
    """Append a problem that this process has not yet appended. A file that cannot be written is told of once."""
    line = json.dumps({"op": operator.name, "problem": operator.problem_json(problem), "device": facts.name})
    with _lock:
        if (path, line) in _written or path in _failed:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # One write of a whole line to a file that is open for appending: lines of other processes stay whole.
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, line.encode() + b"\n")
            finally:
                os.close(descriptor)
        except OSError as error:
            _failed.add(path)
            warnings.warn(f"fusedops cannot record problems in {path}: {error.strerror}", stacklevel=2)
            return
        _written.add((path, line))


def read_recorded(path: Path) -> tuple[list[Recorded], list[str]]:
    """The distinct problems of a file, in its order, and a message for each line that is none.

    Args:
        path: of a file that ``fusedops record`` or ``FUSEDOPS_AUTOTUNE=record`` wrote: JSON, a problem a line.

    Returns:
        the problems, for :func:`fusedops.autotune.tune`; the messages.

    Raises:
        OSError: the file cannot be read.

    Examples:
        >>> from pathlib import Path
        >>> from fusedops.autotune import read_recorded
        >>> file = Path("recorded.jsonl")
        >>> _ = file.write_text("no problem\\n")
        >>> read_recorded(file)[0]
        []
    """
    found: dict[tuple[str, tuple], Recorded] = {}
    wrong = []
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise ValueError("not a JSON object")
            operator = operator_named(value.get("op", ""))
            problem = operator.problem_from_json(value.get("problem"))
        except (ValueError, RecursionError) as error:
            wrong.append(f"{path}, line {number}: {error}")
            continue
        found.setdefault((operator.name, problem), Recorded(operator, problem, str(value.get("device", ""))))
    return list(found.values()), wrong


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from file


def distinct(pairs: Iterable[tuple[Operator, Any]]) -> list[Recorded]:
    """Each problem once, in their order."""
    return list({(operator.name, problem): Recorded(operator, problem) for operator, problem in pairs}.values())
