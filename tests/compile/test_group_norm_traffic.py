"""Group norm moves each element as often as it must be moved, 128 bits at a time: read from its compiled code."""

from __future__ import annotations

import importlib.util

import pytest

from tests.harness.compile import all_cases

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

CASES = [name for name in all_cases() if name.startswith("group_norm/")]
# Neither channels nor positions of these come in multiples of 128 bits.
UNALIGNED = {
    f"group_norm/{case}_bfloat16" for d in ("forward", "backward") for case in (f"{d}_odd", f"{d}_looped_channels_last")
}
TARGETS = ["sm_80", "sm_90"]

# Loads and stores of an element of each tensor, by kernel. Groups that are held are read once; larger ones once for
# the sums and once for the output, by one kernel or by two.
SUMS, OUTPUT = ({"X": 1}, {}), ({"X": 1}, {"Y": 1})
GRADIENT_SUMS, GRADIENT = ({"DY": 1, "X": 1}, {}), ({"DY": 1, "X": 1}, {"DX": 1})
LIMITS = {
    "group_norm_forward_kernel": OUTPUT,
    "group_norm_forward_looped_kernel": ({"X": 2}, {"Y": 1}),
    "group_norm_statistics_kernel": SUMS,
    "group_norm_normalize_kernel": OUTPUT,
    "group_norm_backward_kernel": GRADIENT,
    "group_norm_backward_looped_kernel": ({"DY": 2, "X": 2}, {"DX": 1}),
    "group_norm_backward_sums_kernel": GRADIENT_SUMS,
    "group_norm_input_gradient_kernel": GRADIENT,
}
TENSORS = ("X", "Y", "DY", "DX")
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_bytes_an_element(compiler, case, target):
    launches = [launch for launch in compiler.traffic(case, target) if launch.name.startswith("group_norm")]
    assert launches
    for launch in launches:
        loads, stores = LIMITS[launch.name]
        # A pipelined loop also has the loads of its first steps before it: they are its own, ahead of time.
        looped = None if launch.name == "group_norm_forward_kernel" else True
        constants = launch.constants
        tile = constants.get("BLOCK_N", 1) * constants["BLOCK_C"] * constants["BLOCK_S"]
        size = tile * ITEMSIZE[case.rpartition("_")[2]]
        for argument in TENSORS:
            assert launch.traffic.loaded(argument, looped) == loads.get(argument, 0) * size, argument
            assert launch.traffic.stored(argument, looped) == stores.get(argument, 0) * size, argument


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", [case for case in CASES if case not in UNALIGNED])
def test_accesses_of_128_bits(compiler, case, target):
    for launch in compiler.traffic(case, target):
        for argument in TENSORS:
            for kind in ("load", "store"):
                widths = launch.traffic.widths(argument, kind)
                assert not widths or min(widths) >= 128, f"{launch.name}: {kind}s of {argument} are {widths} bits wide"
