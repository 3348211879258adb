"""The norms move each element as often as it must be moved, 128 bits at a time: read from their compiled code."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.harness.compile import all_cases

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

CASES = [name for name in all_cases() if re.match(r"norm/(forward|backward)_(?!group_norm)", name)]
TARGETS = ["sm_80", "sm_90"]
COMBINATIONS = [
    (name, target) for name in CASES for target in TARGETS if target in (all_cases()[name].targets or TARGETS)
]

# Loads and stores of an element of each matrix-sized argument, by kernel. Rows that are held are read once; wider ones
# once for the statistics and once for the output, where the sum with the residual is read again instead of its terms.
HELD_FORWARD = ({"X": 1, "RESIDUAL": 1}, {"Y": 1, "RESIDUAL_OUT": 1})
LOOPED_FORWARD = ({"X": 2}, {"Y": 1})
LOOPED_ADD = ({"X": 1, "RESIDUAL": 1, "RESIDUAL_OUT": 1}, {"Y": 1, "RESIDUAL_OUT": 1})
BACKWARD = ({"DY": 1, "SAVED": 1, "GRAD_RESIDUAL": 1}, {"DX": 1, "DRESIDUAL": 1})
MEANS = ({"DY": 1, "SAVED": 1}, {})

LIMITS = {
    "norm_forward_kernel": HELD_FORWARD,
    "norm_forward_looped_kernel": LOOPED_FORWARD,
    "norm_backward_kernel": BACKWARD,
    "norm_backward_means_kernel": MEANS,
    "norm_backward_columns_kernel": BACKWARD,
}
MATRICES = {"X", "RESIDUAL", "Y", "RESIDUAL_OUT", "DY", "SAVED", "GRAD_RESIDUAL", "DX", "DRESIDUAL"}
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}


def itemsize(case: str, argument: str) -> int:
    """Bytes of an element; in the cases named so, the stream of the residual is float32."""
    if "float32_stream" in case and argument in ("RESIDUAL", "RESIDUAL_OUT", "DRESIDUAL", "GRAD_RESIDUAL", "SAVED"):
        return 4
    return ITEMSIZE[case.rpartition("_")[2]]


@pytest.mark.parametrize(("case", "target"), COMBINATIONS)
def test_bytes_an_element(compiler, case, target):
    seen = set()
    for launch in compiler.traffic(case, target):
        if launch.name not in LIMITS:
            continue
        seen.add(launch.name)
        loads, stores = LIMITS[launch.name]
        if launch.name == "norm_forward_looped_kernel" and "RESIDUAL_OUT" in launch.traffic.arguments:
            loads, stores = LOOPED_ADD
        tile = launch.constants.get("BLOCK_M", 1) * launch.constants["BLOCK_N"]
        matrices = MATRICES & set(launch.traffic.arguments)
        assert matrices & loads.keys(), "no matrix is read"
        for argument in matrices:
            # A pipelined loop also has the loads of its first steps before it: they are its own, ahead of time.
            looped = True if "backward" in launch.name else None
            size = tile * itemsize(case, argument)
            assert launch.traffic.loaded(argument, looped) == loads.get(argument, 0) * size, argument
            assert launch.traffic.stored(argument, looped) == stores.get(argument, 0) * size, argument
    assert seen, "the case launched none of the norms' kernels"


@pytest.mark.parametrize(("case", "target"), COMBINATIONS)
def test_accesses_of_128_bits(compiler, case, target):
    """Every load and store of a row, in every case: all have aligned rows."""
    for launch in compiler.traffic(case, target):
        for argument in MATRICES & set(launch.traffic.arguments):
            for kind in ("load", "store"):
                widths = launch.traffic.widths(argument, kind)
                assert not widths or min(widths) >= 128, f"{launch.name}: {kind}s of {argument} are {widths} bits wide"
