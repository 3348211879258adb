"""What docs/autotuning.md says: its Python runs from top to bottom, its commands exist, its table is the settings'."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

import fusedops
from fusedops.autotune.resolve import take_missed
from fusedops.autotune.workloads import of_shapes
from fusedops.cli.app import app
from fusedops.runtime.device import TARGETS
from fusedops.runtime.settings import AUTOTUNE, VARIABLES
from tests.autotune.test_resolve import settings  # noqa: F401 (a fixture)

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "autotuning.md").read_text()


def test_the_pages_python_runs(settings):  # noqa: F811
    take_missed()  # by other tests: the page calls sync, which would search it all
    names = {"fusedops": fusedops}
    with fusedops.backend("torch"):
        for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(compile(code, "docs/autotuning.md", "exec"), names)
    assert names["found"].config is not None


def test_the_pages_shapes_are_understood():
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert {operator.name for operator, _ in of_shapes(yaml.safe_load(text), TARGETS["sm_90"])} == {
        "norm",
        "linear",
        "attention",
    }


COMMANDS = re.findall(r"^\$ (?:\w+=\S+ )*fusedops (.*)$", PAGE, re.MULTILINE)
COMMANDS += re.findall(r"`fusedops ((?:autotune|record|cache) [^`]*)`", PAGE)


@pytest.mark.parametrize("line", COMMANDS)
def test_the_pages_commands_exist(line):
    words = shlex.split(line.partition("#")[0].partition(" -- ")[0])
    command = get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options


def test_the_page_lists_every_variable_and_mode():
    table = PAGE.partition("## Environment variables")[2]
    listed = set(re.findall(r"`(FUSEDOPS_\w+)`", table))
    assert listed == {name for name in VARIABLES.values() if name not in ("FUSEDOPS_BACKEND", "TRITON_INTERPRET")}
    for mode in AUTOTUNE:
        assert f"| `{mode}`" in PAGE
