"""``fusedops inspect`` in a process that compiles: pytest's own interprets kernels."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

from typer.testing import CliRunner


def run(arguments: list[str], environment: dict[str, str] | None = None) -> dict[str, object]:
    """Exit code, standard output and standard error of a command line."""
    from fusedops.cli.app import app

    settings = {"COLUMNS": "200", "TERM": "xterm", **(environment or {})}
    with mock.patch.dict(os.environ, settings):
        result = CliRunner().invoke(app, ["inspect", *arguments], terminal_width=200)
    crashed = result.exception is not None and not isinstance(result.exception, SystemExit)
    return {"code": -1 if crashed else result.exit_code, "out": result.stdout, "err": result.stderr}


def run_in(folder: str, text: str, arguments: list[str]) -> dict[str, object]:
    """The same in a folder with a module ``others.py``."""
    Path(folder, "others.py").write_text(text)
    before = os.getcwd()
    os.chdir(folder)
    sys.modules.pop("others", None)
    try:
        return run(arguments)
    finally:
        os.chdir(before)
        sys.modules.pop("others", None)


def without_liger(arguments: list[str]) -> dict[str, object]:
    with mock.patch.dict(sys.modules, {"liger_kernel": None}):
        return run(arguments)


def interrupted(arguments: list[str]) -> dict[str, object]:
    """Ctrl-C while the first kernel is waited for."""

    def stop(futures: object) -> None:
        raise KeyboardInterrupt

    with mock.patch("fusedops.cli.inspect.as_completed", stop):
        return run(arguments)


def wide(arguments: list[str], width: int) -> str:
    """What a terminal of some width shows."""
    import io

    from rich.console import Console

    screen = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with mock.patch("fusedops.cli.inspect_text.stdout", return_value=screen):
        assert run(arguments)["code"] == 0
    return screen.file.getvalue()  # type: ignore[attr-defined]
