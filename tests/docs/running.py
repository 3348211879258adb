"""In the compiling process: a page's Python."""

from __future__ import annotations


def run(code: str, file: str) -> str:
    """Run a program whose lines stand in ``file``."""
    exec(compile(code, file, "exec"), {"__name__": "__page__"})
    return "done"
