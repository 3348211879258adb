"""Gradients are computed for what asks for one, whatever subset that is."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.faults.common import DIFFERENTIABLE, gradients_of, outputs_of


@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=str)
def test_every_subset(kernel_runner, operator):
    inputs = operator.inputs(kernel_runner.device)
    everything = dict(
        zip(operator.differentiable, gradients_of(operator, inputs, outputs_of(operator, inputs)), strict=True)
    )
    places = operator.differentiable
    subsets = [s for size in range(1, len(places)) for s in itertools.combinations(places, size)]
    for subset in subsets if len(subsets) <= 14 else subsets[:: len(subsets) // 12]:
        for place in places:
            inputs[place] = inputs[place].detach().requires_grad_(place in subset)
        found = gradients_of(operator, inputs, outputs_of(operator, inputs))
        for place, gradient in zip(subset, found, strict=True):
            if everything[place] is None:
                assert gradient is None
            else:
                torch.testing.assert_close(gradient, everything[place], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=str)
def test_nothing_asks(kernel_runner, operator):
    inputs = [t.detach() for t in operator.inputs(kernel_runner.device)]
    assert not any(o.requires_grad for o in outputs_of(operator, inputs))
    inputs = operator.inputs(kernel_runner.device)
    with torch.no_grad():
        assert not any(o.requires_grad for o in outputs_of(operator, inputs))
    with torch.inference_mode():
        assert all(o.is_inference() for o in outputs_of(operator, inputs))
