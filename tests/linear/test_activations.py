"""Activations and their derivatives are as exact as torch's, over the whole range where they bend."""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops.linear import register_activation
from fusedops.linear.activations import ACTIVATIONS
from fusedops.runtime.backend import HAS_TRITON
from tests.harness.errors import check_error
from tests.linear.problems import TORCHS, use_config


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

    @triton.jit
    def log_abs(z):
        return tl.log(tl.abs(z))

    @triton.jit
    def log_abs_backward(dy, z):
        return dy / z


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
@pytest.mark.parametrize("prologue", [True, False], ids=["prologue", "pass"])
@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated_linear"])
def test_a_derivative_that_is_infinite_at_zero(kernel_runner, monkeypatch, table, gated, prologue):
    """A tile past the matrix's end is zeros, whose derivative must not reach a sum."""
    use_config(monkeypatch, prologue=prologue)
    register_activation(
        "log_abs", lambda z: z.abs().log(), lambda z: 1 / z, log_abs, log_abs_backward
    )  # fmt: skip
    x, weight, bias = (torch.randn(*s, device=kernel_runner.device) for s in ((10, 16), (17, 16), (17,)))
    leaves = [x, weight, weight.flip(0).contiguous(), bias, bias.flip(0)] if gated else [x, weight, bias]
    leaves = [t.requires_grad_() for t in leaves]

    def plain(x, *parameters):
        if not gated:
            return torch.nn.functional.linear(x, *parameters).abs().log()
        gate, up, bias_gate, bias_up = parameters
        return torch.nn.functional.linear(x, gate, bias_gate).abs().log() * torch.nn.functional.linear(x, up, bias_up)

    ours = fusedops.gated_linear(*leaves, "log_abs") if gated else fusedops.linear(*leaves, "log_abs")
    grads = torch.autograd.grad(ours.sum(), leaves)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    for grad, right in zip(grads, torch.autograd.grad(plain(*wide).sum(), wide), strict=True):
        torch.testing.assert_close(grad.double(), right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_far_out(kernel_runner, name):
    """In bfloat16, whose numbers go to 3e38, as far as torch's own derivative is a number."""
    z = torch.tensor([-3e38, -1e15, -3e12, -200.0, 200.0, 3e12, 1e15, 3e38], dtype=torch.bfloat16)
    z = z.to(kernel_runner.device)[:, None].requires_grad_()
    one = torch.ones(1, 1, dtype=torch.bfloat16, device=z.device)
    (ours,) = torch.autograd.grad(fusedops.linear(z, one, None, name).sum(), z)
    (theirs,) = torch.autograd.grad(TORCHS[name](z).sum(), z)
    finite = theirs.isfinite()
    torch.testing.assert_close(ours[finite], theirs[finite], rtol=0.02, atol=1e-6)


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


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_device_functions_in_each_others_places(table):
    with pytest.raises(
        ValueError, match=r"device_forward must be a function of 1 argument, \(z\); got .*softsign_backward"
    ):
        register_activation("softsign", abs, softsign_derivative, softsign_backward, softsign_backward)
    with pytest.raises(
        ValueError, match=r"device_backward must be a function of 2 arguments, \(dy, s\); got .*softsign"
    ):
        register_activation("softsign", abs, softsign_derivative, softsign, softsign)
