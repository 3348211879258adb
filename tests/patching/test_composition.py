"""Patched models under what models are put through: compilation, export, autocast, sharding, tracing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusedops
from tests.patching.models import MLP, attended, bert, block, classes, gpt2, inputs, logits_and_gradients, twin


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("build", [block, MLP])
def test_compiled_modules(build):
    model = build().eval()
    x = torch.randn(2, 8)
    expected = model(x)
    fusedops.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    compiled(x).sum().backward()
    assert model[0].weight.grad.abs().sum() > 0 if build is block else model.up.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("build", [bert, gpt2])
def test_compiled_models(build, attn):
    model = build(attn, **{"n_layer" if build is gpt2 else "num_hidden_layers": 1})
    batch = inputs(model)
    fusedops.patch(model)
    expected, expected_gradients = logits_and_gradients(model, batch)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual, gradients = logits_and_gradients(compiled, batch)
    torch.testing.assert_close(attended(actual, batch), attended(expected, batch), rtol=1e-5, atol=1e-6)
    for name, gradient in gradients.items():
        reference = expected_gradients[name.removeprefix("_orig_mod.")]
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)


def test_a_compiled_model_follows_patching():
    """Dynamo's guards notice the classes: no stale graph runs."""
    model = block()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    x = torch.randn(2, 8)
    expected = compiled(x)
    fusedops.patch(compiled)
    assert torch.equal(compiled(x), expected)
    assert len(graphs) == 2
    assert fusedops.unpatch(compiled) == 3
    assert torch.equal(compiled(x), expected)


def test_exported():
    model = bert()
    ids = inputs(model)["input_ids"]
    expected = model(ids).logits
    fusedops.patch(model)
    program = torch.export.export(model, (ids,))
    torch.testing.assert_close(program.module()(ids).logits, expected, rtol=1e-5, atol=1e-6)


def test_symbolically_traced():
    """torch.fx treats fused norms and linears as the leaves that torch's own are."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.LayerNorm(8))
    fusedops.patch(model)
    traced = torch.fx.symbolic_trace(model)
    x = torch.randn(2, 8)
    assert torch.equal(traced(x), model(x))


@pytest.mark.parametrize("build", [block, bert, gpt2])
def test_autocast(build):
    model = build()
    plain = twin(model)
    fusedops.patch(model)
    batch = inputs(model) if hasattr(model, "config") else {"input": torch.randn(2, 8)}
    results = []
    for part in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            output = part(**batch)
        output = getattr(output, "logits", output)
        output.float().sum().backward()
        results.append((output, [p.grad for p in part.parameters()]))
    (expected, expected_gradients), (actual, gradients) = results
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert (gradient is None) == (reference is None)
        if gradient is not None:
            assert gradient.dtype == reference.dtype
            torch.testing.assert_close(gradient, reference, rtol=0.05, atol=0.05 * reference.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_of_other_dtypes(dtype):
    model = gpt2().to(dtype)
    batch = inputs(model, "no mask")
    expected = model(**batch).logits
    fusedops.patch(model)
    actual = model(**batch).logits
    assert actual.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(actual, expected, rtol=8 * eps, atol=8 * eps)


def test_meta_and_moved_models():
    model = gpt2(pad_token_id=None)
    fusedops.patch(model)
    before = classes(model)
    meta = twin(model).to("meta")
    assert classes(meta) == before
    assert meta(input_ids=torch.zeros(2, 7, dtype=torch.long, device="meta")).logits.shape == (2, 7, 40)
    assert classes(model.half().float()) == before


def test_functional_call_and_per_sample_gradients():
    model = block()
    fusedops.patch(model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(3, 8)

    def loss(parameters, sample):
        return torch.func.functional_call(model, parameters, (sample,)).sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    model(x).sum().backward()
    torch.testing.assert_close(gradients["0.weight"].sum(0), model[0].weight.grad)
