"""A second derivative is an error that names the way out, and the way out works."""

from __future__ import annotations

import pytest
import torch

import fusedops
from tests.faults.common import DIFFERENTIABLE, outputs_of


@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=str)
def test_the_kernels_refuse(kernel_runner, operator):
    inputs = operator.inputs(kernel_runner.device)
    output = next(o for o in outputs_of(operator, inputs) if o.requires_grad)
    wanted = [t for t in inputs if t.requires_grad]
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(output.square().sum(), wanted, create_graph=True, allow_unused=True)


@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=str)
def test_the_torch_backend_has_it(operator):
    with fusedops.backend("torch"), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        inputs = operator.inputs("cpu")
        output = next(o for o in outputs_of(operator, inputs) if o.requires_grad)
        wanted = [t for t in inputs if t.requires_grad]
        first = torch.autograd.grad(output.square().sum(), wanted, create_graph=True, allow_unused=True)
        penalty = sum(g.square().sum() for g in first if g is not None)
        second = torch.autograd.grad(penalty, wanted, allow_unused=True)
    assert any(g is not None and g.isfinite().all() for g in second)
