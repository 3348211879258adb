"""The command as a whole: its help, its version, its exit codes for wrong usage."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import fusedops
from fusedops.cli.app import app

COMMANDS = ("doctor", "inspect", "demo", "autotune", "plan", "record")
GROUPS = ("cache",)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["no-such-command"],
        ["--no-such-option"],
        ["doctor", "extra"],
        ["demo", "--no-such-option"],
        ["cache"],
        ["cache", "no-such-command"],
    ],
    ids=[
        "no arguments",
        "unknown command",
        "unknown option",
        "stray argument",
        "unknown option of a command",
        "group alone",
        "unknown command of a group",
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"fusedops {fusedops.__version__}\n")


def test_python_dash_m_runs_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "fusedops", "--version"], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"fusedops {fusedops.__version__}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert command == "record" or "--json" in result.output  # whose output is its command's


def test_every_help_text_is_a_sentence() -> None:
    group = get_command(app)
    assert set(group.commands) == {*COMMANDS, *GROUPS}
    texts = {"fusedops": group.help}
    commands = dict(group.commands)
    for name in GROUPS:
        commands |= {f"{name} {inner}": command for inner, command in group.commands[name].commands.items()}
    for name, command in commands.items():
        texts[name] = command.help
        for parameter in command.params:
            if parameter.name != "help":
                texts[f"{name} {parameter.opts[0]}"] = parameter.help
    for name, text in texts.items():
        assert text, name
        assert text[0].isupper(), name
        assert text.rstrip().endswith("."), name
