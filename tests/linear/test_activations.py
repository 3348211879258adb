"""Activations and their derivatives are as exact as torch's, over the whole range where they bend."""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops.linear import register_activation
from fusedops.linear.activations import ACTIVATIONS
from fusedops.runtime.backend import HAS_TRITON
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


# --- an activation of the user's -------------------------------------------------------------------------------------

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def softsign(z):
        return z / (1.0 + tl.abs(z))

    @triton.jit
    def softsign_backward(dy, z):
        n = 1.0 + tl.abs(z)
        return dy / (n * n)

    @triton.jit
    def softsign_backward_of_output(dy, y):
        n = 1.0 - tl.abs(y)
        return dy * (n * n)


def softsign_derivative(z):
    return (1 + z.abs()) ** -2


@pytest.fixture
def table():
    """The table of activations, put back afterwards."""
    before = dict(ACTIVATIONS)
    yield ACTIVATIONS
    ACTIVATIONS.clear()
    ACTIVATIONS.update(before)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("derivative_of", ["preactivation", "output"])
def test_an_activation_of_the_users(runner, table, derivative_of):
    of_output = derivative_of == "output"
    assert fusedops.linear.register_activation is register_activation
    register_activation(
        "softsign",
        torch.nn.functional.softsign,
        (lambda y: (1 - y.abs()) ** 2) if of_output else softsign_derivative,
        softsign,
        softsign_backward_of_output if of_output else softsign_backward,
        derivative_of=derivative_of,
    )
    results = []
    for dtype, function in (
        (torch.float32, lambda x, w, b: fusedops.linear(x, w, b, "softsign")),
        (torch.float64, lambda x, w, b: torch.nn.functional.softsign(torch.nn.functional.linear(x, w, b))),
        (torch.float32, lambda x, w, b: torch.nn.functional.softsign(torch.nn.functional.linear(x, w, b))),
    ):
        generator = torch.Generator().manual_seed(0)
        leaves = [
            torch.randn(s, generator=generator).to(runner.device, dtype).requires_grad_()
            for s in ((9, 21), (13, 21), (13,))
        ]
        output = function(*leaves)
        results.append((output, *torch.autograd.grad(output.sum(), leaves)))
    for ours, exact, theirs in zip(*results, strict=True):
        check_error(ours, exact, theirs, gradient=ours is not results[0][0])
    if derivative_of == "output":
        assert fusedops.nn.Linear(4, 4, activation="softsign")(torch.ones(1, 4)).shape == (1, 4)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"name": 3}, TypeError, "name must be a str"),
        ({"name": "gelu"}, ValueError, "name must be an identifier other than .*'gelu'"),
        ({"name": "two words"}, ValueError, "name must be an identifier"),
        ({"forward": None}, TypeError, "forward must be a function of a tensor"),
        ({"derivative": "z"}, TypeError, "derivative must be a function of a tensor"),
        ({"device_forward": abs}, TypeError, "device_forward must be a function decorated with triton.jit"),
        ({"device_backward": None}, TypeError, "device_backward must be a function decorated with triton.jit"),
        ({"derivative_of": "input"}, ValueError, "derivative_of must be 'preactivation' or 'output'; got 'input'"),
        ({"cost": 1.5}, TypeError, "cost must be an int"),
        ({"cost": -1}, ValueError, "cost must be 0 or more"),
    ],
)
def test_wrong_argument_of_register_activation(table, changes, error, message):
    arguments = {
        "name": "softsign",
        "forward": torch.nn.functional.softsign,
        "derivative": softsign_derivative,
        "device_forward": softsign,
        "device_backward": softsign_backward,
        **changes,
    }
    with pytest.raises(error, match=f"^register_activation: {message}"):
        register_activation(**arguments)
    assert "softsign" not in table
