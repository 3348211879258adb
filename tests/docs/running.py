"""In the compiling process: a page's Python, and the examples of a module."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io


def run(code: str, file: str) -> str:
    """Run a program whose lines stand in ``file``."""
    exec(compile(code, file, "exec"), {"__name__": "__page__"})
    return "done"


def examples(module: str, flags: int) -> tuple[int, str]:
    """How many examples of a module ran, and what those that failed print."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        found = doctest.testmod(importlib.import_module(module), optionflags=flags)
    return found.attempted, told.getvalue() if found.failed else ""
