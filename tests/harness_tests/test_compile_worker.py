"""The process that compiles answers, says what is wrong, and is started again after it died."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.harness.compile import CompileWorker, all_cases

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def worker() -> Iterator[CompileWorker]:
    worker = CompileWorker()
    yield worker
    worker.close()


def test_a_worker_answers_and_survives_errors(worker):
    with pytest.raises(AssertionError, match="KeyError: 'norm/nothing'"):
        worker.compile("norm/nothing", "sm_90")
    with pytest.raises(AssertionError, match="ValueError: target must be one of"):
        worker.compile("norm/forward_many_rows_a_program_64_float16", "sm_1")
    assert worker.kernels("norm/forward_many_rows_a_program_64_float16", "sm_90") == ["norm_forward_kernel"]
    worker._process.kill()
    worker._process.wait()
    (launch,) = worker.compile("norm/forward_many_rows_a_program_64_float16", "sm_90")
    assert launch["name"] == "norm_forward_kernel"
    assert launch["registers"] > 0


def test_a_worker_tells_what_is_loaded_and_stored(worker):
    (kernel,) = worker.traffic("norm/forward_one_row_4096_bfloat16", "sm_90")
    assert kernel.constants["BLOCK_N"] == 4096
    assert kernel.traffic.loaded("X") == kernel.traffic.stored("Y") == 2 * 4096 * kernel.constants["BLOCK_M"]


def test_cases_are_named_by_their_family():
    assert "norm/forward_many_rows_a_program_64_float16" in all_cases()


def test_what_ptxas_said_is_not_asked_again(monkeypatch, tmp_path):
    from fusedops.inspection import resources, sass
    from tests.harness import compile as harness

    asked = []
    monkeypatch.setenv("FUSEDOPS_TEST_CACHE", str(tmp_path))
    for module in (resources, sass):
        monkeypatch.setattr(module, "ptxas_report", lambda ptx, capability: asked.append(ptx) or f"of {ptx}")
    harness.remember_ptxas()
    for _ in range(2):
        assert resources.ptxas_report("one", 90) == sass.ptxas_report("one", 90) == "of one"
    assert resources.ptxas_report("other", 90) == "of other"
    resources.ptxas_report("one", 80)
    assert asked == ["one", "other", "one"]
