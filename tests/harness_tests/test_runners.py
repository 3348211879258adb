"""The fixtures hold fusedops to their backend and poison what no kernel wrote."""

from __future__ import annotations

import torch

import fusedops
from fusedops.runtime.backend import backend_mode


def test_the_backend_is_the_runners(runner):
    assert backend_mode() == ("triton" if runner.kernels else "torch")
    explanation = fusedops.explain(fusedops.layer_norm, torch.ones(2, 8, device=runner.device), 8)
    assert explanation.backend == backend_mode()


def test_uninitialised_memory_is_nan_where_kernels_run(kernel_runner):
    x = torch.ones(3, device=kernel_runner.device)
    assert torch.empty(1000, device=kernel_runner.device).isnan().all()
    assert x.new_empty(1000, dtype=torch.bfloat16).isnan().all()
    assert torch.empty_like(x).isnan().all()


def test_random_numbers_differ_from_test_to_test(seed):
    assert torch.initial_seed() == seed
