"""Nothing that others may hold is written to: inputs, saved tensors, incoming gradients."""

from __future__ import annotations

import pytest
import torch

from tests.faults.common import DIFFERENTIABLE, STEADY, outputs_of
from tests.fuzz.guards import Unchanged


@pytest.mark.parametrize("operator", STEADY, ids=str)
def test_inputs_and_gradients_stay(kernel_runner, operator):
    if kernel_runner.device.type != "cpu":
        pytest.skip("memory is compared on the CPU")
    inputs = operator.inputs("cpu")
    kept = Unchanged(inputs)
    outputs = outputs_of(operator, inputs)
    results = Unchanged([o.detach() for o in outputs])
    given = [o for o in outputs if o.requires_grad]
    if given:
        incoming = [torch.randn_like(o) for o in given]
        gradients = Unchanged(incoming)
        torch.autograd.grad(given, [t for t in inputs if t.requires_grad], incoming, allow_unused=True)
        gradients.check()
    kept.check()
    results.check()


@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=str)
def test_a_second_backward(kernel_runner, operator):
    inputs = operator.inputs(kernel_runner.device)
    outputs = [o for o in outputs_of(operator, inputs) if o.requires_grad]
    incoming = [torch.randn_like(o) for o in outputs]
    wanted = [t for t in inputs if t.requires_grad]
    first = torch.autograd.grad(outputs, wanted, incoming, retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(outputs, wanted, incoming, allow_unused=True)
    for a, b in zip(first, second, strict=True):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=str)
def test_a_residual_branch(kernel_runner, operator):
    """The incoming gradient is another branch's too."""
    inputs = operator.inputs(kernel_runner.device)
    output = next(o for o in outputs_of(operator, inputs) if o.requires_grad)
    branch = torch.zeros_like(output, requires_grad=True)
    (output + branch).square().sum().backward()
    torch.testing.assert_close(branch.grad, 2 * output.detach())
