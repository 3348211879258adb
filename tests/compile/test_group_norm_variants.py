"""The batch is a run-time value of group norm's kernels: a new one compiles nothing new."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.harness.compile import ROOT, cache_folder

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

# Kernels are interpreted in pytest's own process. Held, divided and (from 33 members of the batch) looped groups.
PROGRAM = """
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


def test_a_new_batch_compiles_nothing_new():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache_folder() / "triton")
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    variants = dict(line.rsplit(" ", 1) for line in run.stdout.splitlines())
    assert len(variants) == 8  # all of group norm's kernels
    assert set(variants.values()) == {"1"}
