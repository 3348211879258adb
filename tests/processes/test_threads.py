"""Operators called from several threads at once: each has its own backend and its own results."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

import fusedops
from tests.harness.operators import OPERATORS

THREADS = 8


def called(operator, inputs):
    """Outputs and gradients."""
    outputs = operator.function(*inputs)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    leaves = [inputs[i] for i in operator.differentiable]
    if not leaves:
        return outputs
    wanted = [o for o in outputs if o.requires_grad]
    return [*outputs, *torch.autograd.grad(wanted, leaves, [torch.ones_like(o) for o in wanted], allow_unused=True)]


@pytest.mark.parametrize("operator", [each for each in OPERATORS if not each.random], ids=str)
def test_the_same_in_every_thread(operator):
    """On torch's operators: Triton's interpreter is not for several threads."""
    inputs = [operator.inputs("cpu", length=3 + number) for number in range(THREADS)]
    barrier = Barrier(THREADS)

    def work(number):
        barrier.wait()
        with fusedops.backend("torch"):
            return called(operator, inputs[number])

    with fusedops.backend("torch"):
        alone = [called(operator, each) for each in inputs]
    with ThreadPoolExecutor(THREADS) as pool:
        together = list(pool.map(work, range(THREADS)))
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a is b is None or torch.equal(a, b)


def test_each_thread_has_its_own_backend():
    barrier = Barrier(2)
    x = torch.randn(2, 8)

    def asked(name):
        with fusedops.backend(name):
            barrier.wait()  # both are inside
            shown = str(fusedops.explain(fusedops.rms_norm, x, 8))
            barrier.wait()
        return shown

    with ThreadPoolExecutor(2) as pool:
        torchs, tritons = pool.map(asked, ("torch", "triton"))
    assert "asked for: torch" in torchs
    assert "asked for: triton" in tritons


def test_patching_in_threads():
    """Models of their own, patched and unpatched at the same time."""
    barrier = Barrier(THREADS)

    def work(number):
        torch.manual_seed(number)
        model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.GELU())
        x = torch.randn(3, 8)
        before = model(x)
        barrier.wait()
        for _ in range(5):
            report = fusedops.patch(model)
            assert len(report.replaced) == 2
            torch.testing.assert_close(model(x), before)
            fusedops.unpatch(model)
        return torch.equal(model(x), before)

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(work, range(THREADS)))
