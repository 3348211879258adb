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


def test_what_the_tools_said_is_not_asked_again(monkeypatch, tmp_path):
    from fusedops.inspection import resources, sass
    from tests.harness import compile as harness

    asked = []
    monkeypatch.setenv("FUSEDOPS_TEST_CACHE", str(tmp_path / "cache"))
    for module in (resources, sass):
        monkeypatch.setattr(module, "ptxas_report", lambda ptx, capability: asked.append(ptx) or f"of {ptx}")
    monkeypatch.setattr(resources, "_run", lambda *command: asked.append(command[1]) or f"{len(asked)}")
    harness.remember_tools()
    for _ in range(2):
        assert resources.ptxas_report("one", 90) == sass.ptxas_report("one", 90) == "of one"
    assert resources.ptxas_report("other", 90) == "of other"
    resources.ptxas_report("one", 80)
    assert asked == ["one", "other", "one"]
    files = [tmp_path / name for name in ("a", "b", "c")]
    for file, content in zip(files, "ABA", strict=True):
        file.write_text(content)
    said = [resources._run("/bin/nvdisasm", "-c", str(file)) for file in files]
    assert said == ["4", "5", "4"]
    assert resources._run("/bin/nvdisasm", "-g", str(files[0])) == "6"
    assert [resources._run("/bin/ptxas", "-v", str(files[0])) for _ in range(2)] == ["7", "8"]
