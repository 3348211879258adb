"""torch's own modules: norms and Linear→activation, forward and backward, as before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusedops
from tests.harness.errors import check_error
from tests.patching.models import MLP, block, twin

NORMS = {
    "layer norm": lambda: nn.LayerNorm(9),
    "layer norm of two dimensions": lambda: nn.LayerNorm((5, 9), eps=1e-3),
    "layer norm without bias": lambda: nn.LayerNorm(9, bias=False),
    "layer norm without parameters": lambda: nn.LayerNorm(9, elementwise_affine=False),
    "rms norm": lambda: nn.RMSNorm(9),
    "rms norm with eps": lambda: nn.RMSNorm((5, 9), eps=1e-2),
    "rms norm without parameters": lambda: nn.RMSNorm(9, elementwise_affine=False),
}
ACTIVATIONS = {
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "gelu": nn.GELU,
    "gelu tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
}


def _randomised(norm):
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


def _results(model, x, grad):
    """Output, and the gradients of the input and of every parameter."""
    x = x.detach().requires_grad_()
    output = model(x)
    return [output, *torch.autograd.grad(output, [x, *model.parameters()], grad)]


def _same_results(plain, runner, shape):
    plain = plain.to(runner.device)
    patched, exact = twin(plain), twin(plain).double()
    report = fusedops.patch(patched)
    assert report.replaced
    assert not report.left
    x = torch.randn(shape, device=runner.device)
    grad = torch.randn_like(plain(x))
    results = [
        _results(model, x.to(dtype), grad.to(dtype))
        for model, dtype in ((patched, torch.float32), (exact, torch.float64), (plain, torch.float32))
    ]
    for i, (actual, reference, baseline) in enumerate(zip(*results, strict=True)):
        check_error(actual, reference, baseline, gradient=i > 0, what=f"result {i}")


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_a_norm_computes_what_it_did(norm, runner):
    _same_results(_randomised(norm()), runner, (3, 5, 9))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_a_linear_with_its_activation_computes_what_it_did(activation, bias, runner):
    _same_results(nn.Sequential(nn.Linear(9, 7, bias=bias), activation()), runner, (2, 5, 9))


def test_both_training_and_evaluation():
    plain = MLP()
    patched = twin(plain)
    fusedops.patch(patched)
    x = torch.randn(4, 8)
    for mode in (True, False):
        results = []
        for model in (plain.train(mode), patched.train(mode)):
            torch.manual_seed(0)
            results.append(model(x))
        assert torch.equal(*results)


def test_the_fused_functions_are_called(calls):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.RMSNorm(8))
    fusedops.patch(model)
    model(torch.randn(2, 8))
    assert calls == {"linear": 1, "layer_norm": 1, "rms_norm": 1}


def test_chains_of_users_modules_are_found(calls):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([MLP(), MLP(activation=nn.ReLU)])

        def forward(self, x):
            for part in self.blocks:
                x = x + part(x=x)
            return x

    model = Model().eval()
    x = torch.randn(3, 8)
    expected = model(x)
    report = fusedops.patch(model)
    assert [(entry.path, entry.calls) for entry in report.replaced] == [
        ("blocks.0.up", 'fusedops.linear(activation="silu")'),
        ("blocks.1.up", 'fusedops.linear(activation="relu")'),
    ]
    assert torch.equal(model(x), expected)
    assert calls["linear"] == 2


@pytest.mark.parametrize("mode", ["training", "evaluation", "torch's fast path"])
def test_a_transformer_layer_of_torch(mode, calls):
    plain = nn.TransformerEncoderLayer(8, 2, 12, 0.0, activation=nn.GELU(), batch_first=True).train(mode == "training")
    patched = twin(plain)
    report = fusedops.patch(patched)
    assert [entry.path for entry in report.replaced] == ["", "self_attn", "norm1", "norm2"]
    assert not report.left
    x = torch.randn(2, 5, 8)
    results = []
    with torch.set_grad_enabled(mode != "torch's fast path"):
        for model in (plain, patched):
            torch.manual_seed(0)
            results.append(model(x))
    torch.testing.assert_close(*results)


def test_a_patched_sequential_is_still_a_container(calls):
    model = block()
    fusedops.patch(model)
    x = torch.randn(2, 8)
    model.append(nn.ReLU())
    assert len(model) == 5
    assert torch.equal(model(x), nn.Sequential(*model)(x))
    assert torch.equal(model[:2](x), model[1](model[0](x)))
    model[1] = nn.Softsign()
    calls.clear()
    assert torch.equal(model[:2](x), nn.functional.softsign(model[0](x)))
    assert calls["linear"] == 0
    assert torch.equal(nn.Sequential()(x), x)


def test_on_its_own_a_fused_linear_is_a_linear():
    model = block()
    linear = model[0]
    x = torch.randn(2, 8)
    expected = linear(x)
    fusedops.patch(model)
    assert torch.equal(linear(x), expected)
    assert torch.equal(linear(input=x), expected)


def test_wrong_arguments_still_raise():
    model = MLP()
    fusedops.patch(model)
    for args, kwargs in (((), {}), ((torch.ones(1, 8), 1), {}), ((), {"y": 1}), ((1,), {"x": 1})):
        with pytest.raises(TypeError):
            model(*args, **kwargs)
