"""``fusedops record``: run a command, and write down which problems its kernels meet."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from fusedops.cli.output import fail, stderr
from fusedops.runtime.settings import SETTINGS


def record(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="What to run, after --.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to; default: recorded.jsonl in the cache folder.")
    ] = None,
) -> None:
    """Run a command with FUSEDOPS_AUTOTUNE=record, then say how many new problems were met.

    Every process that it starts records. Afterwards: `fusedops autotune --from FILE`. The exit code is the command's.

    Example: `fusedops record -- python train.py --steps 2` (two steps, where the others are like them).
    """
    from fusedops.autotune.record import read_recorded

    path = (output or SETTINGS.record_path()).absolute()
    before = _count(path)
    environment = {**os.environ, "FUSEDOPS_AUTOTUNE": "record", "FUSEDOPS_RECORD_FILE": str(path)}
    if path.is_dir():
        raise fail(f"{path}: it is a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise fail(f"{path}: {error.strerror}") from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise fail(f"{path}: its folder cannot be written")
    try:
        code = _run(command, environment)
    except OSError as error:
        raise fail(f"{command[0]}: {error.strerror}") from None
    try:
        found, wrong = read_recorded(path) if path.exists() else ([], [])
    except OSError as error:
        raise fail(f"{path}: {error.strerror}") from None
    for message in wrong:
        stderr().print(message, soft_wrap=True)
    stderr().print(f"{max(0, len(found) - before)} new problems, {len(found)} in all, in {path}", soft_wrap=True)
    if found:
        stderr().print(f"Search them: fusedops autotune --from {path}", soft_wrap=True)
    else:
        told = "Nothing that fusedops tunes ran on its kernels; fusedops doctor says which backend runs and why."
        stderr().print(told, soft_wrap=True)
    if code:
        # A command that a signal ended has a negative code; shells say 128 and the signal's number.
        raise typer.Exit(code if code > 0 else 128 - code)


def _run(command: list[str], environment: dict[str, str]) -> int:
    """The command's exit code. Ctrl-C reaches the command as well: how it ends, and when, is its own affair."""
    with subprocess.Popen(command, env=environment) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue


def _count(path: Path) -> int:
    from fusedops.autotune.record import read_recorded

    try:
        return len(read_recorded(path)[0])
    except OSError:
        return 0
