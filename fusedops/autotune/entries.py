"""What is known of a problem on a device: the configuration to use, what it took, and what was tried."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from typing import Any, Literal, get_args

from fusedops.autotune.operator import Operator, problem_key
from fusedops.autotune.versions import VERSIONS, current_versions, minor

__all__ = [
    "AutotuneWarning",
    "Candidate",
    "Entry",
    "Outcome",
    "Plain",
    "Source",
    "better",
    "current_versions",
    "mismatches",
    "op_name",
    "utc_now",
]

Source = Literal["tuned", "heuristic"]
Outcome = Literal["timed", "demoted", "pruned", "wrong", "failed", "estimated"]
Plain = int | bool | str | None

_OP = re.compile(r"[a-z][a-z0-9_]{0,40}")
_DATE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(Z|\+00:00)", re.ASCII)
_LONGEST_WORD, _LONGEST_REASON, _LARGEST = 200, 2000, 1 << 63


class AutotuneWarning(UserWarning):
    """The store of tuned configurations could not be read or written as it should; the operation went on."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration that was tried.

    Attributes:
        config: the configuration, as JSON.
        outcome: ``timed``; ``estimated`` (no GPU was there); ``demoted`` (spills registers, say: tried last, if at
            all); ``pruned`` before it ran;
            ``wrong`` results; ``failed`` to compile or run.
        median: seconds; None where it was not timed.
        spread: seconds, a deviation of that.
        reason: why it was not timed, for people.
    """

    config: dict[str, Plain]
    outcome: Outcome
    median: float | None = None
    spread: float | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        # A compiler's message may be long, and coloured for a terminal.
        return {**_fields(self), "reason": None if self.reason is None else _readable(self.reason)}

    @classmethod
    def from_json(cls, value: object) -> Candidate:
        """The candidate that :meth:`to_json` wrote; ValueError says what is wrong with another value."""
        given = _given(cls, value)
        candidate = cls(
            config=_plain(given["config"], "config"),
            outcome=_one_of(given["outcome"], get_args(Outcome), "outcome"),
            median=_seconds(given["median"], "median"),
            spread=_seconds(given["spread"], "spread", least=0.0),
            reason=_reason(given["reason"]),
        )
        if candidate.outcome == "timed" and candidate.median is None:
            raise ValueError("median: a candidate that was timed has one")
        return candidate


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a problem on a device.

    Attributes:
        op: name of the :class:`fusedops.autotune.operator.Operator`.
        problem: the problem, as JSON.
        config: the configuration to use.
        source: ``tuned``: timed on such a device. ``heuristic``: nobody measured it.
        median: seconds that the configuration took; None where it was not measured.
        spread: seconds, a deviation of that.
        default: the configuration that would be used without this entry.
        default_median: seconds that the default took.
        date: when it was found: UTC, ISO 8601, seconds (:func:`utc_now`).
        versions: what it was found with, as :func:`fusedops.autotune.versions.current_versions` has it.
        candidates: what was tried.
    """

    op: str
    problem: dict[str, Plain]
    config: dict[str, Plain]
    source: Source
    median: float | None
    spread: float | None
    default: dict[str, Plain]
    default_median: float | None
    date: str
    versions: dict[str, str | None]
    candidates: tuple[Candidate, ...] = ()

    @property
    def key(self) -> str:
        """The problem in one line, as :meth:`fusedops.autotune.operator.Operator.key` has it."""
        return problem_key(self.problem)

    def to_json(self) -> dict[str, Any]:
        return {**_fields(self), "candidates": [candidate.to_json() for candidate in self.candidates]}

    @classmethod
    def from_json(cls, value: object) -> Entry:
        """The entry that :meth:`to_json` wrote.

        Raises:
            ValueError: it is none; the message says what is wrong. Whether problem and configuration are the
                operator's is not known here: its ``problem_from_json`` and the configuration's ``from_json`` tell.
        """
        given = _given(cls, value)
        candidates = given["candidates"]
        if not isinstance(candidates, list):
            raise ValueError(f"candidates: {_shown(candidates)} is no list")
        versions = given["versions"]
        if not isinstance(versions, dict) or set(versions) != set(VERSIONS):
            raise ValueError(f"versions: {_shown(versions)} is no object with {', '.join(VERSIONS)}")
        for name, version in versions.items():
            if version is not None:
                _word(version, f"versions.{name}")
        entry = cls(
            op=op_name(given["op"]),
            problem=_plain(given["problem"], "problem"),
            config=_plain(given["config"], "config"),
            source=_one_of(given["source"], get_args(Source), "source"),
            median=_seconds(given["median"], "median"),
            spread=_seconds(given["spread"], "spread", least=0.0),
            default=_plain(given["default"], "default"),
            default_median=_seconds(given["default_median"], "default_median"),
            date=_date(given["date"]),
            versions=dict(versions),
            candidates=tuple(map(_candidate, range(len(candidates)), candidates)),
        )
        if entry.source == "tuned" and entry.median is None:
            raise ValueError("median: an entry that was tuned has one")
        return entry


def better(a: Entry, b: Entry) -> Entry:
    """The one of two entries for the same problem that stays where both are known.

    A tuned one rather than a heuristic one, then the newer, then the faster. Entries that are told apart by none of
    these are told apart by their text: stores that meet in any order end with the same entries.
    """
    return max(a, b, key=_rank)


def _rank(entry: Entry) -> tuple[bool, str, float, str]:
    speed = -math.inf if entry.median is None else -entry.median
    return entry.source == "tuned", entry.date[:19], speed, json.dumps(entry.to_json(), sort_keys=True)


def mismatches(entry: Entry, operator: Operator) -> list[str]:
    """Why an entry's timings may no longer hold here; none: they do.

    What counts is the compiler (Triton's major and minor version), the kernels' code, and whether multiplications
    and additions are fused.
    """
    now = current_versions(operator)
    then = entry.versions
    reasons = []
    if minor(then.get("triton")) != minor(now["triton"]):
        made, here = (f"Triton {minor(v)}" if v else "no Triton" for v in (then.get("triton"), now["triton"]))
        reasons.append(f"it was found with {made}, and here is {here}")
    if then.get("kernels") != now["kernels"]:
        reasons.append("the kernels' code is another")
    if then.get("fp_fusion") != now["fp_fusion"]:
        reasons.append(f"it was found with fp fusion {then.get('fp_fusion')}, and here it is {now['fp_fusion']}")
    return reasons


def utc_now() -> str:
    """The time, as entries have it.

    Examples:
        >>> len(utc_now())
        20
    """
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def op_name(value: object) -> str:
    """An operator's name, which also names files: ValueError for what could not be one."""
    if not isinstance(value, str) or not _OP.fullmatch(value):
        raise ValueError(f"op: {_shown(value)} is no operator's name")
    return value


def _fields(value: Candidate | Entry) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _given(cls: type, value: object) -> Mapping[str, Any]:
    """The fields of a JSON object, all there and no others."""
    if not isinstance(value, dict):
        raise ValueError(f"{_shown(value)} is no object with the fields of {cls.__name__}")
    names = {field.name for field in fields(cls)}
    for what, found in (("unknown", set(value) - names), ("missing", names - set(value))):
        if found:
            raise ValueError(f"{what}: {_shown(', '.join(sorted(map(str, found))))}")
    return value


def _candidate(index: int, value: object) -> Candidate:
    try:
        return Candidate.from_json(value)
    except ValueError as error:
        raise ValueError(f"candidates[{index}].{error}") from None


def _plain(value: object, what: str) -> dict[str, Plain]:
    if not isinstance(value, dict):
        raise ValueError(f"{what}: {_shown(value)} is no object")
    for name, part in value.items():
        _word(name, what)
        if isinstance(part, str):
            _word(part, f"{what}.{name}")
        elif not (part is None or (isinstance(part, int) and abs(part) < _LARGEST)):
            raise ValueError(f"{what}.{name}: {_shown(part)} is no integer of 64 bits, bool, string or null")
    return dict(value)


def _seconds(value: object, what: str, least: float | None = None) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise ValueError(f"{what}: {_shown(value)} is no time in seconds")
    if not (value > 0 if least is None else value >= least):
        raise ValueError(f"{what}: {value} is not positive")
    return float(value)


def _word(value: object, what: str) -> str:
    if not isinstance(value, str) or not value.isprintable() or len(value) > _LONGEST_WORD:
        raise ValueError(f"{what}: {_shown(value)} is no short printable text")
    return value


def _one_of(value: object, options: tuple[str, ...], what: str) -> Any:
    if value not in options:
        raise ValueError(f"{what}: {_shown(value)} is none of {', '.join(options)}")
    return value


def _date(value: object) -> str:
    found = _DATE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"date: {_shown(value)} is no UTC time like 2025-01-31T12:00:00Z")
    try:
        datetime.fromisoformat(found[1])
    except ValueError as error:
        raise ValueError(f"date: {_shown(value)}: {error}") from None
    return found[0]


def _reason(value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or value != _readable(value)):
        raise ValueError(f"reason: {_shown(value)} is no printable text of up to {_LONGEST_REASON} characters")
    return value


def _readable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text[:_LONGEST_REASON])


def _shown(value: object) -> str:
    """A value from anywhere, short, for a message."""
    text = repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= 80 else f"{text[:80]}…"
