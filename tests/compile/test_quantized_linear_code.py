"""The quantised products' machine code: float8 matrix instructions, and weights read 16 bytes at a time."""

from __future__ import annotations

import importlib.util
import re

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

# Matrix instructions: QGMMA and QMMA of NVIDIA's machine code are these in PTX.
INSTRUCTIONS = {
    ("fp8_thin", "sm_89"): r"mma\.sync\.aligned\.m16n8k32\S*\.e4m3\.e4m3\.f32",
    ("fp8_thin", "sm_90"): r"wgmma\.mma_async\S*k32\.f32\.e4m3\.e4m3",
    ("fp8_mixed", "sm_90"): r"wgmma\.mma_async\S*k32\.f32\.e4m3\.e5m2",
    ("fp8_thin", "sm_100"): r"tcgen05\.mma\S*kind::f8f6f4",
    ("fp8_fnuz_large", "gfx942"): r"v_mfma_f32_\w+_fp8_fp8",
    ("fp8_thin", "gfx950"): r"v_mfma_\w+_f8f6f4",
    # Exact: converted to float16.
    ("fp8_float32_thin", "sm_90"): r"wgmma\.mma_async\S*k16\.f32\.f16\.f16",
}


def test_matrix_instructions(compiler):
    asked = [[name, target] for name, target in INSTRUCTIONS]
    used = compiler.call("tests.compile.matrix_instructions:find", "quantized_linear", asked)
    for ((name, target), pattern), instructions in zip(INSTRUCTIONS.items(), used, strict=True):
        found = [instruction for instruction in instructions if re.search(pattern, instruction)]
        assert found, f"{name} on {target} has no instruction like {pattern}"


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("case", ["int4_thin", "int8_thin"])
def test_weights_are_read_16_bytes_at_a_time_and_once(compiler, case, target):
    launch = compiler.traffic(f"quantized_linear/{case}", target)[0]
    assert launch.name == "quantized_linear_kernel"
    assert set(launch.traffic.widths("W", "load")) == {128}
    constants = launch.constants
    tile = constants["BLOCK_N"] * constants["BLOCK_K"] * constants["BITS"] // 8
    assert launch.traffic.loaded("W", looped=True) == tile
