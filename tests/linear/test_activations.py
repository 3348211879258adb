"""Activations and their derivatives are as exact as torch's, over the whole range where they bend."""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops.linear.activations import ACTIVATIONS
from tests.harness.errors import check_error


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_over_the_range_where_they_bend(runner, name):
    """Through a weight that is the identity, so that the product adds no error: values are a(z), gradients a′(z)."""
    z = torch.linspace(-12, 12, 4096, device=runner.device).reshape(256, 16)
    weight = torch.eye(16, device=runner.device)
    results = []
    for dtype, function in (
        (torch.float32, lambda t: fusedops.linear(t, weight, None, name)),
        (torch.float64, ACTIVATIONS[name].forward),
        (torch.float32, ACTIVATIONS[name].forward),
    ):
        leaf = z.to(dtype).requires_grad_()
        output = function(leaf)
        results.append((output, *torch.autograd.grad(output.sum(), leaf)))
    ours, exact, theirs = results
    check_error(ours[0], exact[0], theirs[0], what=name)
    check_error(ours[1], exact[1], theirs[1], gradient=True, what=f"derivative of {name}")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivative_of_the_table(name):
    """What the reference multiplies by is the derivative that autograd finds."""
    activation = ACTIVATIONS[name]
    z = torch.linspace(-12, 12, 4096, dtype=torch.float64, requires_grad=True)
    output = activation.forward(z)
    (expected,) = torch.autograd.grad(output.sum(), z)
    found = activation.derivative(z if activation.derivative_of == "preactivation" else output)
    torch.testing.assert_close(found, expected)
