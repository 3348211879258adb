"""The ``fusedops`` command, a module a subcommand.

Exit codes: 0 right, 1 failed, 2 usage. With ``--json`` a command prints one JSON object on standard output and
nothing else there; progress bars go to standard error.
"""

from __future__ import annotations


def main() -> None:
    """Run the command line and end the process with its exit code."""
    from fusedops.cli.app import app

    app(prog_name="fusedops")
