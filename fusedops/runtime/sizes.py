"""Sizes as people read them."""

from __future__ import annotations


def human_bytes(size: int) -> str:
    """A size as people write it: 512 B, 3.4 KiB, 139.8 GiB."""
    value = abs(float(size))
    sign = "-" if size < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{size} B" if unit == "B" else f"{sign}{value:.1f} {unit}"
        value /= 1024
    return f"{sign}{value:.1f} TiB"


def change(before: int, after: int) -> str:
    """How much less (or more) of something there is, to be appended to a sentence; "" where nothing changed.

    Examples:
        >>> change(200, 150), change(100, 101), change(7, 7)
        (', 25 % less', ', 1 % more', '')
    """
    if not before or before == after:
        return ""
    return f", {abs(before - after) / before * 100:.2g} % {'less' if after < before else 'more'}"
