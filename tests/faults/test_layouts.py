"""Tensors and gradients that are no contiguous block: transposed, cut out, offset, expanded."""

from __future__ import annotations

import pytest
import torch

from tests.faults.common import DIFFERENTIABLE, gradients_of, outputs_of
from tests.harness.tensors import _laid_out

# A cache and packed weights are read where they lie, with a last stride of 1: their operators say so.
LAYOUTS = ("transposed", "sliced", "strided", "offset")


def laid(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers in other memory."""
    if not tensor.is_floating_point():
        return tensor
    return _laid_out(tensor.detach().cpu(), layout, tensor.device).requires_grad_(tensor.requires_grad)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=str)
def test_inputs(kernel_runner, operator, layout):
    inputs = operator.inputs(kernel_runner.device)
    outputs = outputs_of(operator, inputs)
    others = [laid(t, layout) for t in inputs]
    other_outputs = outputs_of(operator, others)
    for a, b in zip(outputs, other_outputs, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    for a, b in zip(
        gradients_of(operator, inputs, outputs), gradients_of(operator, others, other_outputs), strict=True
    ):
        if a is not None:
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=str)
def test_incoming_gradients(kernel_runner, operator):
    """``.sum().backward()`` sends a gradient whose strides are all 0; a transposed consumer a transposed one."""
    inputs = operator.inputs(kernel_runner.device)
    outputs = outputs_of(operator, inputs)
    ones = gradients_of(operator, inputs, outputs)
    for incoming in (
        lambda o: torch.ones((), dtype=o.dtype, device=o.device).expand(o.shape),
        lambda o: laid(torch.ones_like(o), "transposed"),
        lambda o: laid(torch.ones_like(o), "offset"),
    ):
        outputs = outputs_of(operator, inputs)
        for a, b in zip(ones, gradients_of(operator, inputs, outputs, incoming), strict=True):
            if a is not None:
                torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
