"""Kernels compile for GPUs that are not there, and what the compiler reports about them is read right."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from fusedops.inspection.offline import capture_launches, target_facts
from fusedops.inspection.resources import Resources, ToolError, amd_resources
from tests.harness.compile import CompileWorker

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def probes(compiler: CompileWorker) -> dict[str, Any]:
    return compiler.call("tests.inspection.probes:find")


@needs_triton
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_a_simple_kernel_spills_nothing(probes, target):
    found = probes[f"simple {target}"]
    assert found["name"] == "simple_kernel"
    assert found["spill_bytes"] == 0
    assert found["shared"] == 0
    assert 0 < found["registers"] < 64
    assert found["num_warps"] == 4


@needs_triton
@pytest.mark.parametrize("target", ["sm_80", "sm_100"])
def test_a_kernel_that_holds_too_much_spills(probes, target):
    found = probes[f"greedy {target}"]
    assert found["registers"] == 32
    assert found["spill_bytes"] >= 4 * (64 * 64 // 32 - 32)


@needs_triton
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_a_products_operands_lie_in_shared_memory(probes, target):
    assert probes[f"product {target}"]["shared"] >= 64 * 64 * 2


@needs_triton
def test_a_captured_launch_does_not_run(probes):
    assert probes["arch"] == "sm_90"
    assert probes["grid"] == [4]
    assert probes["untouched"]
    assert probes["again"]


@needs_triton
def test_a_compiled_kernel_knows_its_arguments(probes):
    assert probes["parameters"] == ["X", "Y", "n"]
    assert probes["constants"] == {"BLOCK": 256}


@needs_triton
def test_an_argument_of_one_none_or_in_a_tuple_is_found_under_its_name(probes):
    assert probes["unusual parameters"] == ["PAIR[1]", "Y"]
    assert probes["unusual constants"] == {"PAIR[0]": None, "stride": 1, "BLOCK": 128}


@needs_triton
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_launch_with_tensor_descriptors(probes, target):
    """From sm_90 on the device has instructions for them; before, their copies are made of others."""
    found = probes[f"described {target}"]
    assert found["parameters"] == ["X", "Y", "row"]
    assert found["tma"] == (target == "sm_90")
    assert found["spill_bytes"] == 0


@needs_triton
def test_public_functions_launch_while_launches_are_captured(probes):
    assert "norm_forward_kernel" in probes["public"]
    assert any("backward" in name for name in probes["public"])
    assert probes["public_after"] == "torch"


@needs_triton
def test_everything_is_as_before_afterwards(probes):
    assert probes["arch_after"] == "interpreter"
    assert "launch_after" in probes


@needs_triton
@pytest.mark.parametrize(
    ("probe", "cause"), [("wrong", "wrong_kernel for sm_90"), ("assembler", "simple_kernel for sm_90")]
)
def test_a_kernel_that_does_not_compile_is_a_short_error(probes, probe, cause):
    message = probes[probe]
    assert message.startswith(cause)
    assert len(message) < 4000
    assert ".visible" not in message


def test_an_unknown_target():
    with pytest.raises(ValueError, match=r"target must be one of sm_75, .*; got 'sm_12'"):
        target_facts("sm_12")


@pytest.mark.interpreter
def test_a_process_that_interprets_kernels_cannot_compile_them():
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"), capture_launches("sm_90"):
        pass


def test_without_triton(monkeypatch):
    monkeypatch.setattr("fusedops.inspection.offline.HAS_TRITON", False)
    with pytest.raises(RuntimeError, match="needs Triton"), capture_launches("sm_90"):
        pass


AMD = """
    .private_segment_fixed_size: {scratch}
    .sgpr_count:     24
    .sgpr_spill_count: 0
    .vgpr_count:     130
    .vgpr_spill_count: {spills}
"""


def test_amds_metadata():
    assert amd_resources(AMD.format(scratch=0, spills=0)) == Resources(130, 0)
    assert amd_resources(AMD.format(scratch=64, spills=9)) == Resources(130, 64)
    assert amd_resources(AMD.format(scratch=64, spills=0)) == Resources(130, 0)  # a local array, no spill
    with pytest.raises(ToolError):
        amd_resources("s_endpgm")
