"""What docs/patching.md and the README say of patching: the page's Python runs, its report and commands are real."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import torch
from typer.main import get_command

import fusedops
import fusedops.patching
from fusedops.cli.app import app
from fusedops.patching.rules import RULES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "patching.md").read_text()


def test_the_pages_python_runs(capsys):
    torch.manual_seed(0)
    names = {}
    try:
        for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(compile(code, "docs/patching.md", "exec"), names)
    finally:
        fusedops.patching.unregister_rule("scale")
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert capsys.readouterr().out.startswith(shown)


def test_the_pages_commands_exist():
    for line in re.findall(r"^\$ fusedops (.*)$", PAGE, re.MULTILINE):
        words = shlex.split(line)
        command = get_command(app).commands[words[0]]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options


def test_the_page_lists_the_rules():
    table = PAGE.partition("## What is recognised")[2].partition("## What changes")[0]
    assert set(re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)) == {rule.name for rule in RULES} - {"experts"}
