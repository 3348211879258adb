"""The same call gives the same bits, forward and backward."""

from __future__ import annotations

import pytest
import torch

from tests.faults.common import gradients_of, outputs_of
from tests.harness.operators import OPERATORS


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_the_same_bits(kernel_runner, operator):
    inputs = operator.inputs(kernel_runner.device, length=37)  # several tiles
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        outputs = outputs_of(operator, inputs)
        gradients = gradients_of(operator, inputs, outputs) if operator.differentiable else []
        runs.append([o.detach() for o in outputs] + gradients)
    for a, b in zip(*runs, strict=True):
        assert a is b is None or torch.equal(a, b)
