"""Importing fusedops needs no GPU and no Triton, and costs little."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

import pytest


def run(code: str, **environment: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "FUSEDOPS_BACKEND")}
    result = subprocess.run(
        [sys.executable, "-c", code], env={**env, **environment}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


BLOCK_TRITON = """
import sys, importlib.abc
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import importlib.util
stock = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] == "triton" else stock(name, *rest)
"""


def test_works_without_triton():
    output = run(
        BLOCK_TRITON
        + """
import torch, fusedops
x = torch.randn(2, 8, requires_grad=True)
y = fusedops.layer_norm(x, 8)
y.sum().backward()
assert torch.equal(y, torch.nn.functional.layer_norm(x, (8,)))
y, _, mean, rstd = torch.ops.fusedops.norm(
    x.detach(), None, None, None, None, 1, 1e-5, 0.0, "layer", 0.0, torch.float32, False
)
torch.testing.assert_close(y, torch.nn.functional.layer_norm(x.detach(), (8,)))
print(*fusedops.explain(fusedops.layer_norm, x, 8).reasons, sep="|")
"""
    )
    assert output.startswith("Triton is not installed|")


IMPORT = """
import sys, time
began = time.perf_counter()
import torch
torch_there = time.perf_counter()
before = set(sys.modules)
import warnings; warnings.simplefilter("error")
import fusedops
done = time.perf_counter()
assert not torch.cuda.is_initialized()
new = {m.split(".")[0] for m in set(sys.modules) - before}
heavy = new & {"triton", "transformers", "matplotlib", "numpy", "typer", "rich", "sympy"}
parts = [m for m in ("torch._dynamo", "torch._inductor") if m in set(sys.modules) - before]
print((done - began) / (torch_there - began), *sorted(heavy), *parts)
"""


@pytest.fixture(scope="module")
def imports() -> list[list[str]]:
    """Of three fresh processes: the time of both imports over that of torch's, and the heavy modules that came."""
    return [run(IMPORT).split() for _ in range(3)]


def test_imports_nothing_heavy_warns_of_nothing_and_touches_no_driver(imports):
    assert [heavy for _, *heavy in imports] == [[]] * 3


def test_costs_less_than_half_of_torchs_own_import(imports):
    assert statistics.median(float(ratio) for ratio, *_ in imports) < 1.5


def test_a_wrong_environment_variable_is_named():
    """Which values are wrong: see test_settings.py."""
    result = subprocess.run(
        [sys.executable, "-c", "import fusedops"],
        env={**os.environ, "FUSEDOPS_BACKEND": "both"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 1
    assert "FUSEDOPS_BACKEND must be one of auto, triton, torch; got 'both'" in result.stderr
