"""The number of rows is a run-time value of the norms' kernels: a new one compiles nothing new."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.harness.compile import ROOT, compiling_environment

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

# Kernels are interpreted in pytest's own process. Held, divided and (from 33 members of the batch) looped groups.
GROUPS = """
import torch
from fusedops.inspection.offline import compile_launches
from fusedops.norm.kernels_group import group_norm_forward
from fusedops.norm.kernels_group_backward import group_norm_backward

def launches(batch, size):
    x = torch.empty(batch, 64, size, size, dtype=torch.float16)
    weight, statistics = torch.empty(64, dtype=torch.float16), torch.empty(batch, 8)
    yield from compile_launches("sm_90", lambda: group_norm_forward(x, weight, weight, 8, 1e-5, x.dtype))
    yield from compile_launches("sm_90", lambda: group_norm_backward(
        x, x, weight, statistics, statistics, 8, (True, True, True), x.dtype))

for size in (16, 96):
    code = {}
    for batch in (1, 2, 7, 16, 48, 1000):
        for kernel in launches(batch, size):
            if kernel.name.startswith("group_norm"):
                code.setdefault(kernel.name, set()).add(kernel.asm["ptx"])
    for name, variants in code.items():
        print(name, len(variants))
"""

# Rows of a matrix, and heads of a packed projection that are read by three strides; held and looped.
ROWS = """
import torch
from fusedops.inspection.offline import compile_launches
from fusedops.norm.kernels_backward import norm_backward
from fusedops.norm.kernels_forward import norm_forward

half = torch.float16
code = {}
for width in (64, 65536):
    for heads in (False, True):
        for batch, sequence in ((1, 2), (1, 7), (2, 16), (5, 48), (3, 1000)):
            if width > 64 and sequence > 16:
                continue
            x = torch.empty(batch, sequence, 3, 4, width, dtype=half)[:, :, 0].transpose(1, 2)
            x = x if heads else x.contiguous()
            weight, statistics = torch.empty(width, dtype=half), torch.empty(x.shape[:-1])
            def forward():
                return norm_forward(x, None, weight, weight, None, 1, 1e-5, 0.0, "layer", 0.0, half)
            def backward():
                return norm_backward(
                    x, None, x, weight, weight, statistics, statistics, None, 1, 1e-5, 0.0, "layer", 0.0, False,
                    (True, False, True, True), (half,) * 4)
            for kernel in (*compile_launches("sm_90", forward), *compile_launches("sm_90", backward)):
                how = "sums" if kernel.name.startswith("sum") else "by_three_strides" if heads else "matrix"
                code.setdefault(f"{kernel.name}:{how}:{width}", set()).add(kernel.asm["ptx"])
for name, variants in code.items():
    print(name, len(variants))
"""


def variants(program):
    """How many codes each kernel was compiled to, in a process that does not interpret them."""
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, env=compiling_environment(), cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return {name: int(count) for name, count in (line.rsplit(" ", 1) for line in run.stdout.splitlines())}


def test_a_new_batch_of_group_norm():
    found = variants(GROUPS)
    assert len(found) == 8  # all of group norm's kernels
    assert set(found.values()) == {1}


def test_a_new_number_of_rows():
    found = variants(ROWS)
    # Held: forward and backward; looped: forward, means and columns; each in both layouts; and two widths of sums.
    assert len(found) == 2 * 2 + 3 * 2 + 2
    assert set(found.values()) == {1}
