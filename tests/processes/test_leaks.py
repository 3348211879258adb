"""A thousand steps leave no tensor and no memory behind."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusedops


def tensors():
    gc.collect()
    return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())


# A step that leaves one small object behind leaves more than this in a thousand.
LIMIT = 32 * 1024


def check(step, warm=30, steps=1000):
    """AssertionError where every thousand steps leave tensors or memory behind.

    Python keeps freed objects for later: what grows in the first rounds and no more is no leak.
    """
    limit = max(LIMIT * steps / 1000, 8192)
    for _ in range(warm):
        step()
    before = tensors()
    tracemalloc.start()
    try:
        for _ in range(4):
            gc.collect()
            size = tracemalloc.get_traced_memory()[0]
            for _ in range(steps):
                step()
            gc.collect()
            size = tracemalloc.get_traced_memory()[0] - size
            if size < limit:
                break
        assert tensors() <= before  # what other tests left may go meanwhile
        assert size < limit, f"{size} bytes more after each {steps} steps"
    finally:
        tracemalloc.stop()


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        fusedops.nn.LayerNorm(16), fusedops.nn.Linear(16, 16, activation="gelu"), fusedops.nn.GatedMLP(16, 16)
    )


@pytest.mark.parametrize("kind", ["plain", "checkpointed", "reentrant", "compiled"])
def test_a_thousand_steps(kind):
    network, x = model(), torch.randn(4, 16)
    if kind == "compiled":
        torch._dynamo.reset()
        network = torch.compile(network, backend="aot_eager")

    def step():
        with fusedops.backend("torch"):
            if kind in ("checkpointed", "reentrant"):
                entry = x.detach().requires_grad_()
                loss = checkpoint(network, entry, use_reentrant=kind == "reentrant").sum()
            else:
                loss = network(x).sum()
            loss.backward()
            for p in network.parameters():
                p.grad = None

    check(step)


@pytest.mark.interpreter
def test_steps_of_the_kernels(kernel_runner):
    network = model().to(kernel_runner.device)
    x = torch.randn(4, 16, device=kernel_runner.device)

    def step():
        network(x).sum().backward()
        for p in network.parameters():
            p.grad = None

    for _ in range(3):
        step()
    before = tensors()
    for _ in range(15):
        step()
    assert tensors() <= before  # of bytes the interpreter keeps some of its own


def test_patching_and_unpatching_again_and_again():
    network = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.GELU())

    def step():
        fusedops.patch(network)
        fusedops.unpatch(network)

    check(step, warm=5, steps=200)


def test_a_leak_is_found():
    kept = []
    with pytest.raises(AssertionError, match="more after each"):
        check(lambda: kept.append(bytearray(40)))
    with pytest.raises(AssertionError):
        check(lambda: kept.append(torch.zeros(1)), steps=10)
