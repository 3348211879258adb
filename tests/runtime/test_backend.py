"""Which backend serves a call, and every reason why."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch

import fusedops
from fusedops.runtime import backend as module
from fusedops.runtime.settings import Settings

X = torch.ones(2, 8)


@pytest.fixture
def no_interpreter(monkeypatch):
    monkeypatch.setattr(module, "SETTINGS", Settings())


def test_context_nests_and_restores():
    assert module.backend_mode() == "auto"
    with fusedops.backend("torch"):
        with fusedops.backend("triton"):
            assert module.backend_mode() == "triton"
        assert module.backend_mode() == "torch"
        with pytest.raises(KeyError), fusedops.backend("auto"):
            raise KeyError
        assert module.backend_mode() == "torch"
    assert module.backend_mode() == "auto"


def test_one_context_object_can_be_entered_twice():
    context = fusedops.backend("torch")
    with context, fusedops.backend("auto"), context:
        assert module.backend_mode() == "torch"
    assert module.backend_mode() == "auto"


def test_context_holds_in_its_own_thread_only():
    seen = []
    with fusedops.backend("torch"):
        thread = threading.Thread(target=lambda: seen.append(module.backend_mode()))
        thread.start()
        thread.join()
    assert seen == ["auto"]


def test_context_refuses_an_unknown_name():
    with pytest.raises(ValueError, match="name must be one of 'auto', 'triton', 'torch'; got 'cuda'"):
        fusedops.backend("cuda")


@pytest.mark.usefixtures("no_interpreter")
def test_explain_lists_every_reason(monkeypatch):
    monkeypatch.setattr(module, "HAS_TRITON", False)
    explanation = fusedops.explain(fusedops.layer_norm, X.double(), 8)
    assert explanation.backend == "torch"
    assert len(explanation.reasons) == 3
    text = str(explanation)
    for part in ("Triton is not installed", "on the CPU", "float64"):
        assert part in text


def test_explain_says_that_torch_was_asked_for():
    with fusedops.backend("torch"):
        explanation = fusedops.explain(fusedops.rms_norm, X, 8)
    assert explanation.backend == "torch"
    assert "asked for" in explanation.reasons[0]


@pytest.mark.interpreter
def test_explain_when_the_kernels_serve():
    explanation = fusedops.explain(fusedops.rms_norm, X, 8)
    assert (explanation.backend, explanation.reasons) == ("triton", ())


def test_explain_refuses_other_functions():
    with pytest.raises(TypeError, match=r"function must be a public fusedops function.*got .*relu"):
        fusedops.explain(torch.relu, X)


def test_demanding_triton_raises_with_every_reason():
    with fusedops.backend("triton"), pytest.raises(fusedops.BackendError, match=r"layer_norm.*float64"):
        fusedops.layer_norm(X.double(), 8)


def test_a_refusal_on_a_gpu_warns_once(monkeypatch):
    monkeypatch.setattr(module, "_warned", set())
    device = torch.device("cuda", 0)
    with pytest.warns(fusedops.FallbackWarning, match=r"linear runs on torch's operators: one; two"):
        assert not module.use_triton("linear", ["one", "two"], device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not module.use_triton("linear", ["one", "two"], device)
        assert not module.use_triton("linear", ["on the CPU"], torch.device("cpu"))


def test_contexts_that_overlap_in_two_threads_leave_nothing_behind():
    first, second = fusedops.backend("torch"), fusedops.backend("triton")
    entered, left = threading.Event(), threading.Event()

    def other():
        with second:
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=other)
    with first:
        thread.start()
        assert entered.wait(10)
    left.set()
    thread.join()
    assert module._traced_mode == "auto"
    assert module.backend_mode() == "auto"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_an_interpreter_that_was_asked_for_too_late():
    """Triton's own functions are then for its compiler: torch serves, and the reason is told."""
    code = """
import os
import triton.language
os.environ["TRITON_INTERPRET"] = "1"
import torch, fusedops
x = torch.randn(2, 8)
print(fusedops.explain(fusedops.rms_norm, x, 8))
print(fusedops.rms_norm(x, 8).shape)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "was set after Triton had been imported" in done.stdout
    assert "torch.Size([2, 8])" in done.stdout
