"""The fused functions inside torch.compile, checkpointing, autocast, fake tensors and torch.library's own checks."""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops.runtime.device import TARGETS, pretend
from tests.harness.tensors import randn
from tests.linear.problems import TORCHS, use_config
from tests.norm_linear.problems import BOTH, NAMES, tensors

LAYER, RMS = BOTH
FLOATS = [torch.float32] * 5


@pytest.mark.parametrize(
    ("function", "activation", "missing"), [(LAYER, "gelu", ()), (RMS, None, ("norm_weight", "bias"))], ids=str
)
def test_opcheck(kernel_runner, function, activation, missing):
    leaves = tensors(kernel_runner, function, (3, 5, 24), 12, missing=missing)
    arguments = (1e-5, 0.0, function.kind, activation)
    op = torch.ops.fusedops.norm_linear.default
    torch.library.opcheck(op, (*leaves, *arguments, torch.float32, False, "ieee"))
    x, norm_weight, norm_bias, weight, _ = leaves = [t if t is None else t.detach() for t in leaves]
    y, saved, mean, rstd = op(*leaves, *arguments, torch.float32, True, "ieee")
    read = saved if activation else None
    given = {
        "everything": (x, norm_weight, norm_bias, weight, read, mean, rstd),
        "input": (x, norm_weight, None, weight, read, mean, rstd),
        "weight": (x, norm_weight, norm_bias, None, read, None, None),
        "bias": (None, None, None, None, read, None, None),
    }
    for wanted in given if activation else ("everything",):
        needs = [t is not None and wanted in (name, "everything") for name, t in zip(NAMES, leaves, strict=True)]
        torch.library.opcheck(
            torch.ops.fusedops.norm_linear_backward.default,
            (torch.randn_like(y), *given[wanted], *arguments, needs, *FLOATS, wanted == "weight", "ieee"),
        )


@pytest.mark.parametrize(
    ("function", "dynamic"), [(LAYER, True), (RMS, False)], ids=["layer_norm_linear_dynamic", "rms_norm_linear_static"]
)
def test_compiled_equals_eager(runner, function, dynamic):
    def call(*leaves):
        return function.fused(*leaves, "gelu")

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 6):
        leaves = tensors(runner, function, (2, rows, 24), 12)
        wanted = [t for t in leaves if t is not None]
        eager, traced = call(*leaves), compiled(*leaves)
        assert torch.equal(eager, traced)
        grad = torch.randn_like(eager)
        for a, b in zip(*(torch.autograd.grad(y, wanted, grad) for y in (eager, traced)), strict=True):
            assert torch.equal(a, b)
    with torch.no_grad():
        assert torch.equal(call(*leaves), compiled(*leaves))


def test_compiled_with_rms_norms_default_eps(runner):
    torch._dynamo.reset()
    compiled = torch.compile(fusedops.rms_norm_linear, fullgraph=True, backend="aot_eager")
    x, norm_weight, _, weight, bias = tensors(runner, RMS, (3, 24), 12, torch.bfloat16)
    arguments = (x, norm_weight, weight, bias)
    assert torch.equal(compiled(*arguments), fusedops.rms_norm_linear(*arguments))


def test_a_compiled_graph_holds_the_operator(kernel_runner):
    names = []

    def keep(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    leaves = [t.detach() for t in tensors(kernel_runner, LAYER, (3, 24), 12)]
    torch.compile(lambda *t: LAYER.fused(*t, "silu"), backend=keep, fullgraph=True)(*leaves)
    assert "fusedops.norm_linear.default" in names


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [None, "gelu"], ids=str)
@pytest.mark.parametrize("function", BOTH, ids=str)
def test_autocast_gives_the_dtypes_of_torchs_composition(runner, function, activation, dtype):
    x, norm_weight, norm_bias, weight, bias = leaves = tensors(runner, function, (3, 24), 12, dtype)
    with torch.autocast(runner.device.type, dtype=torch.bfloat16):
        y = function.fused(*leaves, activation)
        if function.center:
            normalised = torch.nn.functional.layer_norm(x, (24,), norm_weight, norm_bias, 1e-5)
        else:
            normalised = torch.nn.functional.rms_norm(x, (24,), norm_weight, 1e-5)
        theirs = TORCHS[activation](torch.nn.functional.linear(normalised, weight, bias))
    assert y.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(y, theirs, rtol=0.03, atol=0.03)
    grad = torch.randn_like(y)
    wanted = [t for t in leaves if t is not None]
    pairs = zip(*(torch.autograd.grad(out, wanted, grad) for out in (y, theirs)), strict=True)
    for leaf, (a, b) in zip(wanted, pairs, strict=True):
        assert a.dtype == b.dtype == leaf.dtype
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.08)


def test_autocast_equals_the_two_functions_to_the_bit(runner):
    """A float32 input is normalised in float32 and rounded once, whether in the norm or before the product."""
    leaves = tensors(runner, LAYER, (3, 24), 12)
    with torch.autocast(runner.device.type, dtype=torch.bfloat16):
        outputs = LAYER.fused(*leaves, "gelu"), LAYER.composed(*leaves, "gelu")
    assert torch.equal(*outputs)
    for a, b in zip(*(torch.autograd.grad(y.float().square().sum(), leaves) for y in outputs), strict=True):
        assert torch.equal(a, b)


def test_autocast_makes_no_float32_tensor_between_the_two(kernel_runner, monkeypatch):
    from fusedops.norm_linear import autograd

    dtypes = []
    op = autograd.linear_op
    monkeypatch.setattr(autograd, "linear_op", lambda x, *rest: dtypes.append(x.dtype) or op(x, *rest))
    leaves = tensors(kernel_runner, LAYER, (3, 24), 12)
    with torch.autocast(kernel_runner.device.type, dtype=torch.bfloat16):
        LAYER.fused(*leaves)
    assert dtypes == [torch.bfloat16]


def test_autocast_does_not_reach_into_the_backward(kernel_runner):
    leaves = tensors(kernel_runner, LAYER, (3, 24), 12)
    y = LAYER.fused(*leaves, "gelu")
    plain = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    with torch.autocast(kernel_runner.device.type, dtype=torch.bfloat16):
        inside = torch.autograd.grad(y.sum(), leaves)
    for a, b in zip(plain, inside, strict=True):
        assert torch.equal(a, b)


def test_meta_and_fake_tensors_need_no_data(kernel_runner):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def call(device):
        leaves = [
            torch.empty(s, dtype=torch.bfloat16, device=device, requires_grad=True)
            for s in ((2, 3, 8), (8,), (8,), (5, 8))
        ]
        y = fusedops.layer_norm_linear(*leaves, activation="gelu")
        assert (y.shape, y.dtype) == ((2, 3, 5), torch.bfloat16)
        assert [g.shape for g in torch.autograd.grad(y.sum(), leaves)] == [t.shape for t in leaves]

    call("meta")
    with FakeTensorMode():
        call(kernel_runner.device)


@pytest.mark.parametrize("function", BOTH, ids=str)
def test_export_then_run_and_backward(kernel_runner, function):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            leaves = tensors(kernel_runner, function, (1, 24), 12)[1:]
            self.leaves = torch.nn.ParameterList([t.detach() for t in leaves if t is not None])

        def forward(self, x):
            leaves = list(self.leaves)
            if not function.center:
                leaves.insert(1, None)
            return function.fused(x, *leaves, "gelu")

    model = Model()
    x = randn(3, 24, device=kernel_runner.device, requires_grad=True)
    exported = torch.export.export(model, (x,))
    assert any("fusedops.norm_linear" in str(node.target) for node in exported.graph.nodes)
    y = exported.module()(x)
    assert torch.equal(y, model(x))
    grads = [torch.autograd.grad(out.sum(), x)[0] for out in (y, model(x))]
    assert torch.equal(*grads)


@pytest.mark.parametrize("function", BOTH, ids=str)
def test_an_op_that_cannot_launch_computes_the_definition(function):
    """A graph that was made for the kernels and runs where there are none: here because of its float64 tensors."""
    sizes = ((2, 3, 5), (5,), (5,), (4, 5), (4,))
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in sizes]
    op = torch.ops.fusedops.norm_linear

    def call(*leaves):
        return op(*leaves, 1e-5, 0.5, function.kind, "silu", torch.float64, False, "ieee")[0]

    if function.center:
        assert torch.autograd.gradcheck(call, leaves)
    else:
        assert torch.autograd.gradcheck(lambda x, n, w, b: call(x, n, None, w, b), [*leaves[:2], *leaves[3:]])


@pytest.fixture
def float32_precision():
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision("highest")


@pytest.mark.interpreter
@pytest.mark.parametrize("allowed", [False, True], ids=["full", "tf32"])
def test_the_tf32_setting_reaches_every_product(monkeypatch, allowed):
    """Forward and backward, which keeps what held in the forward; the interpreter rounds operands to TF32 as asked."""
    from fusedops.runtime import precision

    x, weight = torch.randn(5, 40, requires_grad=True), torch.randn(7, 40, requires_grad=True)
    grad = torch.randn(5, 7)
    use_config(monkeypatch)
    monkeypatch.setattr(precision, "tf32_allowed", lambda tensor: allowed)
    with fusedops.backend("triton"), pretend(TARGETS["sm_80"]):
        y = fusedops.rms_norm_linear(x, None, weight, eps=1e-5)
        monkeypatch.setattr(precision, "tf32_allowed", lambda tensor: not allowed)
        results = [y, *torch.autograd.grad(y, (x, weight), grad)]
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    truth = RMS.plain(wide[0], None, None, wide[1], None)
    exact = [truth, *torch.autograd.grad(truth, wide, grad.double())]
    for ours, right in zip(results, exact, strict=True):
        error = (ours - right).abs().max() / right.abs().max()
        assert (error > 2e-5) == allowed, error


def test_a_compiled_graph_follows_the_tf32_setting(kernel_runner, monkeypatch, float32_precision):
    from fusedops.runtime import precision

    monkeypatch.setattr(precision, "tf32_allowed", lambda tensor: precision._tf32_setting())
    x, _, _, weight, _ = (t if t is None else t.detach() for t in tensors(kernel_runner, RMS, (3, 24), 12))
    seen = []

    def keep(graph, _):
        seen.extend(node.args[-1] for node in graph.graph.nodes if "norm_linear.default" in str(node.target))
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: fusedops.rms_norm_linear(x, None, w), backend=keep, fullgraph=True)
    compiled(x, weight)
    float32_precision("high")
    compiled(x, weight)
    assert seen == ["ieee", "tf32"]
