"""The process that compiles answers, says what is wrong, and is started again after it died."""

from __future__ import annotations

import importlib.util

import pytest

from tests.harness.compile import all_cases

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def test_a_worker_answers_and_survives_errors(compiler):
    with pytest.raises(AssertionError, match="KeyError: 'norm/nothing'"):
        compiler.compile("norm/nothing", "sm_90")
    with pytest.raises(AssertionError, match="AttributeError: module 'math' has no attribute 'nothing'"):
        compiler.call("math:nothing", 1)
    assert compiler.call("math:hypot", 3, 4) == 5.0
    with pytest.raises(AssertionError, match="ValueError: target must be one of"):
        compiler.compile("norm/forward_many_rows_a_program_64_float16", "sm_1")
    assert compiler.kernels("norm/forward_many_rows_a_program_64_float16", "sm_90") == ["norm_forward_kernel"]
    compiler._process.kill()
    compiler._process.wait()
    (launch,) = compiler.compile("norm/forward_many_rows_a_program_64_float16", "sm_90")
    assert launch["name"] == "norm_forward_kernel"
    assert launch["registers"] > 0


def test_a_worker_tells_what_is_loaded_and_stored(compiler):
    (kernel,) = compiler.traffic("norm/forward_one_row_4096_bfloat16", "sm_90")
    assert kernel.constants["BLOCK_N"] == 4096
    assert kernel.traffic.loaded("X") == kernel.traffic.stored("Y") == 2 * 4096 * kernel.constants["BLOCK_M"]


def test_cases_are_named_by_their_family():
    assert "norm/forward_many_rows_a_program_64_float16" in all_cases()
