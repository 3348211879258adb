"""The fused functions give the composition's results: every size, layout, dtype, activation, missing parameter."""

from __future__ import annotations

import itertools

import pytest
import torch

import fusedops
from tests.harness.tensors import randn
from tests.linear.problems import DTYPES, TORCHS
from tests.norm_linear.problems import BOTH, NAMES, check, tensors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
# One of each kind of derivative; tests/linear has them all.
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"], ids=str)
@pytest.mark.parametrize("function", BOTH, ids=str)
def test_every_activation_and_dtype(runner, function, activation, dtype):
    check(function, tensors(runner, function, (2, 17, 70), 45, dtype), activation)


@pytest.mark.parametrize(
    ("shape", "out_features"),
    [((1, 1), 1), ((40, 2), 19), ((5, 33), 1), ((64, 64), 64), ((70,), 19), ((2, 1, 3, 20), 7)],
    ids=str,
)
@pytest.mark.parametrize("function", BOTH, ids=str)
def test_any_size(runner, function, shape, out_features):
    check(function, tensors(runner, function, shape, out_features, torch.bfloat16), eps=1e-3)


MISSING = [m for n in range(4) for m in itertools.combinations(("norm_weight", "norm_bias", "bias"), n)]


@pytest.mark.parametrize("missing", MISSING, ids=lambda m: "_and_".join(m) or "nothing")
@pytest.mark.parametrize("function", BOTH, ids=str)
def test_missing_parameters(runner, function, missing):
    check(function, tensors(runner, function, (9, 24), 12, torch.bfloat16, missing=missing), "silu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", BOTH, ids=str)
def test_float32_parameters_beside_a_16_bit_input(runner, function, dtype):
    check(function, tensors(runner, function, (9, 40), 24, dtype, parameter_dtype=torch.float32), "gelu")


@pytest.mark.parametrize("which", ["norm", "linear"])
def test_the_two_layers_parameters_may_differ_in_dtype(runner, which):
    function = BOTH[0]
    x, *parameters = tensors(runner, function, (9, 40), 24, torch.bfloat16)
    wide = slice(0, 2) if which == "norm" else slice(2, 4)
    parameters[wide] = [p.detach().float().requires_grad_() for p in parameters[wide]]
    check(function, (x, *parameters), "relu")


@pytest.mark.parametrize("layout", ["transposed", "sliced", "strided", "expanded", "offset"])
@pytest.mark.parametrize("which", [*NAMES, "grad_output"])
def test_any_strides_and_neighbours_that_are_nan(runner, which, layout):
    function = BOTH[0]
    leaves = tensors(runner, function, (3, 5, 21), 19, torch.bfloat16, layouts={which: layout})
    grad_layout = layout if which == "grad_output" else "contiguous"
    grad = randn(3, 5, 19, dtype=torch.bfloat16, device=runner.device, layout=grad_layout)
    check(function, leaves, "gelu", grad)


def test_a_sum_sends_a_gradient_without_strides(runner):
    leaves = tensors(runner, BOTH[0], (5, 21), 19)
    check(BOTH[0], leaves, "gelu", torch.ones((), device=runner.device).expand(5, 19))


@pytest.mark.parametrize("offset", [1.0, -0.5])
def test_weight_offset(runner, offset):
    check(BOTH[1], tensors(runner, BOTH[1], (7, 24), 12), "silu", offset=offset)


def test_rms_norms_default_eps_is_torchs(runner):
    x, norm_weight, _, weight, _ = tensors(runner, BOTH[1], (7, 24), 12)
    x = (x.detach() * 1e-4).requires_grad_()  # where eps tells
    y = fusedops.rms_norm_linear(x, norm_weight, weight)
    eps = torch.finfo(torch.float32).eps
    assert torch.equal(y, fusedops.rms_norm_linear(x, norm_weight, weight, eps=eps))
    torch.testing.assert_close(y, BOTH[1].plain(x, norm_weight, None, weight, None, eps=None), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", [None, "gelu"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", BOTH, ids=str)
def test_equals_the_two_functions_to_the_bit(runner, function, dtype, activation):
    """Gradients too: the normalised tensor that the backward makes again is the forward's."""
    leaves = tensors(runner, function, (9, 70), 24, dtype)
    fused, composed = function.fused(*leaves, activation), function.composed(*leaves, activation)
    assert torch.equal(fused, composed)
    grad = torch.randn_like(fused)
    wanted = [t for t in leaves if t is not None]
    for a, b in zip(*(torch.autograd.grad(y, wanted, grad) for y in (fused, composed)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("activation", [None, "gelu"], ids=str)
@pytest.mark.parametrize("shape", [(0, 4, 5), (2, 0, 5), (3, 4, 0), (0, 0, 0)], ids=lambda s: "M{}_N{}_K{}".format(*s))
@pytest.mark.parametrize("function", BOTH, ids=str)
def test_empty(runner, function, shape, activation, bias):
    rows, out_features, in_features = shape
    leaves = tensors(runner, function, (rows, in_features), out_features, missing=() if bias else ("bias",))
    y = function.fused(*leaves, activation)
    b = leaves[-1]
    assert y.shape == (rows, out_features)
    expected = TORCHS[activation](b.expand(rows, -1) if bias else torch.zeros_like(y))
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-7)
    wanted = [t for t in leaves if t is not None]
    grads = torch.autograd.grad(y, wanted, torch.ones_like(y))
    for leaf, grad in zip(wanted, grads, strict=True):
        assert grad.shape == leaf.shape
        if leaf is not b:
            assert not grad.any()
    if bias:
        (right,) = torch.autograd.grad(TORCHS[activation](b.expand(rows, -1)), b, torch.ones_like(y))
        torch.testing.assert_close(grads[-1], right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("function", BOTH, ids=str)
def test_float64_on_the_torch_backend(function):
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (5,), (5,), (4, 5), (4,))]
    with fusedops.backend("torch"):
        assert function.fused(*leaves).dtype == torch.float64
        assert torch.autograd.gradcheck(lambda *t: function.fused(*t, "silu"), leaves)
