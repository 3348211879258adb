"""The command's options and its list of subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

import fusedops
from fusedops.cli.autotune import autotune
from fusedops.cli.cache import cache
from fusedops.cli.demo import demo
from fusedops.cli.doctor import doctor
from fusedops.cli.inspect import inspect
from fusedops.cli.plan import plan
from fusedops.cli.record import record

app = typer.Typer(
    help="Fused GPU operators for PyTorch, written in Triton.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fusedops {fusedops.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and end.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    pass


app.command()(doctor)
app.command()(demo)
app.command()(autotune)
app.command()(plan)
app.command()(inspect)
app.command(context_settings={"ignore_unknown_options": True})(record)
app.add_typer(cache, name="cache")
