"""What docs/compile.md says: its Python runs, its report is the backend's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fusedops
import fusedops.dynamo

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "compile.md").read_text()


@pytest.mark.interpreter
def test_the_pages_python_runs_and_reports_what_it_shows(capsys):
    torch._dynamo.reset()
    names = {}
    with fusedops.backend("triton"):
        for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(compile(code, "model.py", "exec"), names)
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert capsys.readouterr().out.startswith(shown)


def test_the_page_names_every_function_that_the_backend_calls():
    from fusedops.dynamo import attention, linears, norms

    table = PAGE.partition("### What it finds")[2].partition("### What is guaranteed")[0]
    modules = (attention, linears, norms)
    called = {name for name in fusedops.__all__ for m in modules if vars(m).get(name) is getattr(fusedops, name)}
    assert {"linear", "gated_linear", "scaled_dot_product_attention", "add_rms_norm"} <= called
    for name in called - {"group_norm", "layer_norm", "rms_norm"}:
        assert f"`{name}" in table, name
