"""Every kernel, in each of its default configurations, compiles for every target, fits its shared memory and spills
no register."""

from __future__ import annotations

import ast
import importlib.util

import pytest

from fusedops.runtime.device import TARGETS
from tests.harness.compile import KINDS, ROOT, all_cases

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

# The register allocator may spill on the oldest target: half the registers' worth of shared memory, and few users.
MAY_SPILL = ("sm_75",)

CASES = all_cases()
COMBINATIONS = [
    pytest.param(name, target, id=f"{name}-{target}", marks=() if target in KINDS else pytest.mark.slow)
    for target in TARGETS
    for name, case in CASES.items()
    if case.targets is None or target in case.targets
]


@pytest.mark.parametrize(("case", "target"), COMBINATIONS)
def test_compiles_within_the_targets_means(compiler, case, target):
    launches = compiler.compile(case, target)
    assert launches, "the case launched no kernel"
    for launch in launches:
        name = f"{launch['name']} ({launch['num_warps']} warps, {launch['registers']} registers)"
        limit = TARGETS[target].shared_memory
        assert launch["shared"] <= limit, f"{name} wants {launch['shared']} bytes of shared memory of {limit}"
        if target not in MAY_SPILL:
            assert launch["spill_bytes"] == 0, f"{name} spills {launch['spill_bytes']} bytes a thread"


def test_every_kernel_has_a_case(compiler):
    """A kernel is a function of a ``kernels_*.py`` whose name ends in ``_kernel``: what launchers launch."""
    written = {
        node.name
        for path in ROOT.glob("fusedops/*/kernels_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    launched = {
        kernel
        for name, case in CASES.items()
        for target in (case.targets or TARGETS)
        for kernel in compiler.kernels(name, target)
    }
    assert written <= launched, f"no compile case launches {', '.join(sorted(written - launched))}"
