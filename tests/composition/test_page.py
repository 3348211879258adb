"""What docs/composition.md and docs/decoding.md say: their Python runs, their table names all operators."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fusedops

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", ["composition", "decoding"])
def test_the_pages_python_runs(page):
    with fusedops.backend("torch"):
        for code in re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL):
            exec(compile(code, f"docs/{page}.md", "exec"), {})


def test_the_table_names_the_operators():
    rows = re.findall(r"^\| (`.*?`) \|", (DOCS / "composition.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    own = {name.removeprefix("fusedops::") for name in torch._C._dispatch_get_all_op_names() if "fusedops::" in name}
    own = {name.partition(".")[0] for name in own if not name.startswith("test_")}
    assert named == {name for name in own if "_backward" not in name}
