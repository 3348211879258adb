"""Every module of fusedops.nn inside torch.compile; the operators under compiled autograd and Inductor."""

from __future__ import annotations

import pytest
import torch

import fusedops
from tests.dynamo.test_operators import assert_same, gradients, outputs
from tests.harness.operators import MODULES, OPERATORS
from tests.harness.tensors import randn_like

LENGTHS = (5, 7)


def results(module, call, inputs, options, grads=None):
    """(outputs, gradients of the inputs and parameters)."""
    out = call(*inputs, **options)
    outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o is not None]
    grads = [torch.ones_like(o) for o in outs] if grads is None else grads
    return outs, torch.autograd.grad(outs, [*inputs, *module.parameters()], grads)


def same_as_eager(spec, module, compiled, device, length):
    inputs = [t.requires_grad_() for t in spec.make(device, torch.float32, length)]
    outs, grads = results(module, module, inputs, spec.call)
    traced, traced_grads = results(module, compiled, inputs, spec.call)
    assert_same(traced, outs)
    assert_same(traced_grads, grads)


# Of each module one variant; the encoder layer that begins with attention is the next test's.
COMPILED = [m for m in MODULES if ":" not in m.name and m.name != "TransformerEncoderLayer"]


@pytest.mark.parametrize("spec", COMPILED, ids=str)
def test_compiled_equals_eager(kernel_runner, spec):
    """One graph for two lengths, of which the module is not told: the second one makes the graph dynamic."""
    torch._dynamo.reset()
    module = spec.build(kernel_runner.device)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(specialize_float=True):
        same_as_eager(spec, module, compiled, kernel_runner.device, LENGTHS[0])
        with torch._dynamo.config.patch(error_on_recompile=True):
            same_as_eager(spec, module, compiled, kernel_runner.device, LENGTHS[1])


def test_a_dimension_marked_dynamic(kernel_runner):
    """torch raises if a graph, or a check of ours, fixes a size that is marked so."""
    torch._dynamo.reset()
    module = fusedops.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, device=kernel_runner.device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for length in LENGTHS:
        x = torch.randn(2, length, 16, device=kernel_runner.device, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 1)
        with torch._dynamo.config.patch(error_on_recompile=length != LENGTHS[0]):
            assert torch.equal(compiled(x), module(x))


# One for each autograd formula.
FORMULAS = (
    "add_rms_norm", "group_norm", "linear:gelu", "gated_linear", "grouped_linear", "rms_norm_linear", "attention",
)  # fmt: skip
BOTH = ("linear:gelu",)


@pytest.mark.parametrize(
    ("operator", "forward"),
    [(o, how) for o in OPERATORS if o.name in FORMULAS for how in ("eager", "compiled")[: 1 + (o.name in BOTH)]],
    ids=str,
)
def test_compiled_autograd(kernel_runner, operator, forward):
    """Of a forward that ran eagerly, and of one that was compiled, which leaves a graph of its own for the backward."""
    from torch._dynamo import compiled_autograd

    torch._dynamo.reset()
    tensors = operator.inputs(kernel_runner.device)
    function = operator.function
    if forward == "compiled":
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    eager = outputs(operator, operator.function, tensors)
    grads = [randn_like(out) for out in eager]
    expected = gradients(operator, eager, grads, tensors)
    outs = outputs(operator, function, tensors)
    leaves = [tensors[i] for i in operator.differentiable]
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        torch.autograd.backward(outs, grads, inputs=leaves)
    assert_same([leaf.grad for leaf in leaves], expected)


@pytest.mark.parametrize("name", ["LayerNorm", "MLP", "MultiheadAttention"])
def test_inductor(kernel_runner, name):
    """To the bit: in these graphs nothing is computed but by our operators."""
    torch._dynamo.reset()
    (spec,) = [m for m in MODULES if m.name == name]
    module = spec.build(kernel_runner.device)
    same_as_eager(spec, module, torch.compile(module, fullgraph=True), kernel_runner.device, LENGTHS[0])
