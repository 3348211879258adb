"""linear gives torch's results, forward and backward, for every size, layout, dtype, activation and bias."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fusedops
from fusedops.linear.activations import ACTIVATIONS
from tests.harness.tensors import randn
from tests.linear.problems import DTYPES, EVERY_ACTIVATION, TORCHS, check, tensors, use_config


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", EVERY_ACTIVATION, ids=str)
def test_every_activation_and_dtype(runner, activation, dtype):
    check(*tensors(runner, (67, 70), 75, dtype), activation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_derivative_in_a_pass_of_its_own(kernel_runner, monkeypatch, activation, dtype):
    use_config(monkeypatch, prologue=False)
    check(*tensors(kernel_runner, (67, 70), 75, dtype), activation)


@pytest.mark.parametrize(
    ("rows", "out_features", "in_features"),
    [(1, 1, 1), (1, 70, 33), (7, 1, 13), (5, 3, 1), (64, 64, 64), (1, 128, 64), (130, 2, 70), (3, 130, 2)],
)
def test_any_size(runner, rows, out_features, in_features):
    check(*tensors(runner, (rows, in_features), out_features), "gelu_tanh")


EDGES = (0, 1, 2, 15, 17, 63, 100, 129)


@pytest.mark.parametrize("kernel", ["tiled", "torch"])
@pytest.mark.parametrize("rows", EDGES)
def test_sizes_beside_the_tiles(kernel_runner, monkeypatch, rows, kernel):
    """Every pair of two of the three sizes: a Latin square."""
    use_config(monkeypatch, kernel)
    for i, out_features in enumerate(EDGES):
        in_features = EDGES[(i + EDGES.index(rows)) % len(EDGES)]
        dtype = (torch.float32, torch.bfloat16)[i % 2]
        check(*tensors(kernel_runner, (rows, in_features), out_features, dtype), "gelu")


@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3), (2, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_any_leading_dimensions(runner, lead, bias):
    check(*tensors(runner, (*lead, 20), 12, bias=bias), "silu")


@pytest.mark.parametrize("activation", [None, "gelu"], ids=str)
@pytest.mark.parametrize("layout", ["transposed", "sliced", "strided", "expanded", "offset"])
@pytest.mark.parametrize("which", ["x", "weight", "bias", "grad_output"])
def test_any_strides_and_neighbours_that_are_nan(runner, which, layout, activation):
    """The layouts but transposed and expanded lie between NaN: a load past an edge would show."""
    x, weight, bias = tensors(runner, (5, 7, 21), 19, torch.bfloat16, layouts={which: layout})
    grad_layout = layout if which == "grad_output" else "contiguous"
    grad = randn(5, 7, 19, dtype=torch.bfloat16, device=runner.device, layout=grad_layout)
    check(x, weight, bias, activation, grad)


@pytest.mark.parametrize("activation", [None, "gelu"], ids=str)
def test_a_sum_sends_a_gradient_without_strides(runner, activation):
    x, weight, bias = tensors(runner, (5, 21), 19)
    check(x, weight, bias, activation, torch.ones((), device=runner.device).expand(5, 19))


def test_a_transposed_weight_is_not_copied_and_its_gradient_lies_as_it_does(kernel_runner, monkeypatch):
    """GPT-2 keeps (in_features, out_features) and passes ``weight.t()``."""
    x, stored, bias = tensors(kernel_runner, (6, 21), 19)
    stored = stored.detach().t().contiguous().requires_grad_()
    weight = stored.t()
    from fusedops.linear import kernels_forward

    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **flags: launched.append(args) or kernel[grid](*args, **flags)

    kernel = kernels_forward.linear_forward_kernel
    monkeypatch.setattr(kernels_forward, "linear_forward_kernel", Kernel())
    y = fusedops.linear(x, weight, bias, "gelu")
    assert launched[0][1].data_ptr() == stored.data_ptr()
    (gradient,) = torch.autograd.grad(y.sum(), weight)
    assert gradient.stride() == weight.stride()
    check(x, weight.detach().requires_grad_(), bias, "gelu")


@pytest.mark.parametrize("bias_dtype", ["input", "float32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [None, "silu"], ids=str)
def test_float32_parameters_beside_a_16_bit_input(runner, activation, dtype, bias_dtype):
    x, weight, bias = tensors(runner, (9, 40), 24, dtype, parameter_dtype=torch.float32)
    if bias_dtype == "input":
        bias = bias.detach().to(dtype).requires_grad_()
    check(x, weight, bias, activation)


@pytest.mark.parametrize("activation", EVERY_ACTIVATION, ids=str)
def test_float64_on_the_torch_backend(activation):
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (4, 5), (4,)))
    y = fusedops.linear(x, weight, bias, activation)
    assert y.dtype == torch.float64
    with fusedops.backend("torch"):
        assert torch.autograd.gradcheck(lambda *t: fusedops.linear(*t, activation), (x + 3, weight, bias))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"], ids=str)
@pytest.mark.parametrize("shape", [(0, 4, 5), (2, 0, 5), (3, 4, 0), (0, 0, 0)], ids=lambda s: "M{}_N{}_K{}".format(*s))
def test_empty(runner, shape, activation, bias):
    rows, out_features, in_features = shape
    x, weight, b = tensors(runner, (rows, in_features), out_features, bias=bias)
    leaves = [t for t in (x, weight, b) if t is not None]
    y = fusedops.linear(x, weight, b, activation)
    assert y.shape == (rows, out_features)
    expected = TORCHS[activation](b.expand(rows, -1) if bias else torch.zeros_like(y))
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-7)
    grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
    for leaf, grad in zip(leaves, grads, strict=True):
        assert grad.shape == leaf.shape
    assert not grads[0].any()
    assert not grads[1].any()
    if bias:
        (right,) = torch.autograd.grad(TORCHS[activation](b.expand(rows, -1)), b, torch.ones_like(y))
        torch.testing.assert_close(grads[2], right, rtol=1e-6, atol=1e-6)


def test_the_two_gelus_differ_as_torchs_do(runner):
    z = torch.linspace(-4, 4, 64, device=runner.device)[:, None]
    one = torch.ones(1, 1, device=runner.device)
    difference = fusedops.linear(z, one, None, "gelu") - fusedops.linear(z, one, None, "gelu_tanh")
    expected = TORCHS["gelu"](z) - TORCHS["gelu_tanh"](z)
    assert expected.abs().max() > 4e-4
    torch.testing.assert_close(difference, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("activation", EVERY_ACTIVATION, ids=str)
def test_large_and_special_values(runner, activation):
    """NaN passes, an infinity stays one, and where the activation saturates the gradient is finite."""
    z = torch.tensor([float("nan"), float("inf"), 1e4, 100.0, 0.0, -0.0, -100.0, -1e4], device=runner.device)
    x = z[:, None].requires_grad_()
    one = torch.ones(1, 1, device=runner.device)
    results = []
    for function in (lambda: fusedops.linear(x, one, None, activation), lambda: TORCHS[activation](x @ one)):
        y = function()
        results.append((y, *torch.autograd.grad(y, x, torch.ones_like(y))))
    for ours, theirs in zip(*results, strict=True):
        # torch's own gelu of an infinity is NaN on some CPUs.
        known = ~theirs.isnan().flatten() | z.isnan()
        torch.testing.assert_close(ours[known], theirs[known], rtol=2e-6, atol=1e-6, equal_nan=True)
    if runner.name != "torch":
        assert results[0][0][1] == (1.0 if activation in ("sigmoid", "tanh", "hardsigmoid") else float("inf"))
    assert results[0][0][2:].isfinite().all()
    assert results[0][1][2:].isfinite().all()


@pytest.mark.parametrize(
    "config",
    [
        {"rows": 16, "cols": 32, "depth": 16, "group": 1},
        {"rows": 16, "cols": 16, "depth": 32, "group": 2},
        {"rows": 128, "cols": 128, "depth": 32, "num_warps": 4},
        {"rows": 32, "cols": 256, "depth": 64, "num_warps": 2},
    ],
    ids=["small_tiles", "patches_of_two", "finished_in_quarters", "wide_and_finished_in_quarters"],
)
def test_any_configuration_gives_the_result(kernel_runner, monkeypatch, config):
    use_config(monkeypatch, **config)
    check(*tensors(kernel_runner, (35, 40), 50, torch.bfloat16), "gelu")


@pytest.mark.parametrize("splits", [1, 3])
def test_the_bias_gradient_of_many_rows(kernel_runner, monkeypatch, splits):
    """A frozen weight and input: the column sums are shared by programs, each with a partial sum."""
    from fusedops.linear import kernels_preactivation

    facts = replace(kernels_preactivation.device_facts(kernel_runner.device), multiprocessor_count=splits)
    monkeypatch.setattr(kernels_preactivation, "device_facts", lambda device: facts)
    x, weight, bias = tensors(kernel_runner, (900, 8), 5)
    check(x.detach(), weight.detach(), bias, "silu")
