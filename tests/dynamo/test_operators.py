"""Every operator inside torch.compile: one graph, to the bit what eager mode computes, and none for a new length."""

from __future__ import annotations

import pytest
import torch

import fusedops
from tests.harness.operators import OPERATORS, Operator
from tests.harness.tensors import randn_like

LENGTHS = (5, 7)

# Their graphs differ from others' by a constant alone; documents become a block mask, which has tests of its own.
_ALIKE = (
    "layer_norm:recompute", "layer_norm:plain_float32", "rms_norm:offset", "l2_norm:over_length", "linear:relu",
    "linear:silu", "linear:recompute", "gated_linear:recompute", "grouped_linear:gelu", "quantized_linear:int4",
    "attention:document_ids",
)  # fmt: skip
COMPILED = [operator for operator in OPERATORS if operator.name not in _ALIKE]


def test_every_public_function_is_compiled():
    """Those that compute: a test here must meet a function that is added later."""
    families = ("_norm", "linear", "attention")
    public = {name for name in fusedops.__all__ if any(word in name for word in families)}
    assert public <= {operator.name.partition(":")[0] for operator in COMPILED}


def outputs(operator: Operator, function, tensors):
    """What a call gives, as a tuple; the same random numbers in each call."""
    if operator.random:
        torch.manual_seed(3)
    out = function(*tensors)
    return out if isinstance(out, tuple) else (out,)


def gradients(operator: Operator, outs, grads, tensors):
    leaves = [tensors[i] for i in operator.differentiable]
    return torch.autograd.grad(outs, leaves, grads, allow_unused=True) if leaves else ()


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def check(operator: Operator, compiled, device, length):
    tensors = operator.inputs(device, length=length)
    eager, traced = (outputs(operator, f, tensors) for f in (operator.function, compiled))
    assert_same(traced, eager)
    grads = [randn_like(out) for out in eager]
    assert_same(*(gradients(operator, outs, grads, tensors) for outs in (traced, eager)))


@pytest.mark.parametrize("operator", COMPILED, ids=str)
def test_compiled_equals_eager(kernel_runner, operator):
    """One graph for all lengths, the first of which must not be taken for a constant."""
    torch._dynamo.reset()
    compiled = torch.compile(operator.function, fullgraph=True, dynamic=True, backend="aot_eager")
    # Else Dynamo traces each function twice, to find that defaults such as dropout_p=0.0 are constants.
    with torch._dynamo.config.patch(specialize_float=True):
        check(operator, compiled, kernel_runner.device, LENGTHS[0])
        with torch._dynamo.config.patch(error_on_recompile=True):
            check(operator, compiled, kernel_runner.device, LENGTHS[1])
