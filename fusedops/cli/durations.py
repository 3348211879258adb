"""Durations as people write them."""

from __future__ import annotations

import math
import re

import typer

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST = 1000 * 365 * 86400.0


def seconds(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``10m``, ``1h30m`` or ``7d``; a usage error says what is taken.

    Examples:
        >>> seconds("90"), seconds("1h30m")
        (90.0, 5400.0)
    """
    compact = text.strip().lower().replace(" ", "")
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd]?)", compact)
    if (
        not parts
        or "".join(number + unit for number, unit in parts) != compact
        or (len(parts) > 1 and not all(p[1] for p in parts))
    ):
        raise typer.BadParameter(f"takes a duration such as 90s, 10m, 1h30m or 7d; got {text!r}")
    total = sum(float(number) * _UNITS[unit or "s"] for number, unit in parts)
    if not (total > 0 and math.isfinite(total)):
        raise typer.BadParameter(f"takes a duration of more than no time; got {text!r}")
    if total > _LONGEST:
        raise typer.BadParameter(f"takes a duration of less than a thousand years; got {text!r}")
    return total


def human(value: float | None) -> str:
    """A short time as people write it: 812 ns, 12.3 µs, 4.56 ms, 7.8 s, 12 m 30 s; a dash for None."""
    if value is None:
        return "–"
    for factor, unit in ((1e9, "ns"), (1e6, "µs"), (1e3, "ms")):
        if value * factor < 999.5:
            return f"{value * factor:.3g} {unit}"
    if value < 60:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} m {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} m"
