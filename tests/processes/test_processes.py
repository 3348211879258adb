"""Operators in other processes: forked, spawned, by torch.multiprocessing, in a loader's workers."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys

import pytest
import torch

import fusedops
from tests.docs.pages import ROOT
from tests.processes import programs


def started(method):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system starts no process by {method}")
    return multiprocessing.get_context(method)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_step_in_another_process(method):
    """The parent has used the operators before: a forked child has what they left behind."""
    here = programs.step(3)
    context = started(method)
    queue = context.Queue()
    process = context.Process(target=programs.send, args=(3, queue))
    process.start()
    there = queue.get(timeout=120)
    process.join(60)
    assert process.exitcode == 0
    assert there == pytest.approx(here, rel=1e-5, abs=1e-6)


def test_a_shared_tensor():
    context = torch.multiprocessing.get_context("spawn")
    tensor = torch.randn(4, 8)
    tensor.share_memory_()
    queue = context.SimpleQueue()
    process = context.Process(target=programs.share, args=(tensor, queue))
    process.start()
    found = torch.tensor(queue.get())
    process.join(60)
    with fusedops.backend("torch"):
        torch.testing.assert_close(found, fusedops.rms_norm(tensor, 8))


@pytest.mark.parametrize("workers", [0, 2])
def test_in_the_workers_of_a_loader(workers):
    loader = torch.utils.data.DataLoader(programs.Normalised(), batch_size=2, num_workers=workers)
    batches = list(loader)
    assert [tuple(batch.shape) for batch in batches] == [(2, 8)] * 3
    assert torch.cat(batches).mean(-1).abs().max() < 1e-5


def test_import_with_warnings_as_errors():
    code = "import fusedops, fusedops.nn, fusedops.patching, fusedops.autotune, fusedops.distributed, fusedops.dynamo"
    command = [sys.executable, "-W", "error", "-c", f"import torch; {code}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_import_without_the_global_lock():
    """Free-threaded Python, where torch has a build for it."""
    import shutil

    python = shutil.which("python3.14t") or shutil.which("python3.13t")
    if python is None:
        pytest.skip("no free-threaded Python is installed here")
    done = subprocess.run([python, "-c", "import torch"], capture_output=True)
    if done.returncode:
        pytest.skip("the free-threaded Python that is installed here has no torch")
    code = "import fusedops, sys; assert not sys._is_gil_enabled()"
    subprocess.run([python, "-c", code], cwd=ROOT, check=True)
