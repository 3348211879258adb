"""``python -m fusedops``: the command, where no script is installed or the path does not reach it."""

from fusedops.cli import main

main()
