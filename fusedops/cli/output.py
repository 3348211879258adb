"""What the subcommands share: the two consoles, JSON, and human sizes and lists."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console

from fusedops.runtime.sizes import human_bytes as human_bytes


def stdout() -> Console:
    """For results."""
    return Console(highlight=False, emoji=False)


def stderr() -> Console:
    """For progress and errors: standard output stays clean for a pipe."""
    return Console(stderr=True, highlight=False, emoji=False)


def print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=2))


def fail(message: str) -> typer.Exit:
    """Print an error; the caller raises what this returns, which ends the command with exit code 1."""
    stderr().print(f"[bold red]error:[/] {_escape(message)}", soft_wrap=True)
    return typer.Exit(1)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
