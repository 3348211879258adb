"""linear inside torch.compile, checkpointing, autocast, fake tensors and torch.library's own checks."""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops.runtime.device import TARGETS, pretend
from tests.harness.tensors import randn
from tests.linear.problems import EVERY_ACTIVATION, TORCHS, tensors, use_config

FLOATS = (torch.float32,) * 3


def call_op(x, weight, bias, activation, *, residual=None, seed=None, dropout_p=0.0, save=False, recompute=False):
    """The library op as the public function calls it."""
    return torch.ops.fusedops.linear.default(
        *op_arguments(x, weight, bias, activation, residual, seed, dropout_p, save, recompute)
    )


def op_arguments(x, weight, bias, activation, residual=None, seed=None, dropout_p=0.0, save=False, recompute=False):
    return x, weight, bias, residual, seed, None, activation, dropout_p, x.dtype, save, recompute, "ieee"


@pytest.mark.parametrize(("activation", "bias"), [(None, False), ("relu", True), ("gelu", True)], ids=str)
def test_opcheck(kernel_runner, activation, bias):
    leaves = tensors(kernel_runner, (3, 5, 24), 12, bias=bias)
    op = torch.ops.fusedops.linear.default
    torch.library.opcheck(op, op_arguments(*leaves, activation))
    x, weight, b = (t if t is None else t.detach() for t in leaves)
    y, saved = call_op(x, weight, b, activation, save=True)
    torch.library.opcheck(op, op_arguments(x, weight, b, activation, save=True))
    read = {None: None, "relu": y}.get(activation, saved)
    for transposed in (False, True):
        torch.library.opcheck(
            torch.ops.fusedops.linear_backward.default,
            (torch.randn_like(y), x, weight, read, None, activation, 0.0, [True, True, bias], *FLOATS, transposed,
             "ieee"),
        )  # fmt: skip
    torch.library.opcheck(
        torch.ops.fusedops.linear_backward.default,
        (torch.randn_like(y), None, None, read, None, activation, 0.0, [False, False, True], *FLOATS, False, "ieee"),
    )


def test_opcheck_with_everything(kernel_runner):
    leaves = tensors(kernel_runner, (3, 5, 24), 12)
    residual = randn(3, 5, 12, device=kernel_runner.device, requires_grad=True)
    seed = torch.tensor([7], device=kernel_runner.device)
    op = torch.ops.fusedops.linear.default
    for recompute in (False, True):
        torch.library.opcheck(op, op_arguments(*leaves, "relu", residual, seed, 0.5, recompute=recompute))
    x, weight, _ = (t.detach() for t in leaves)
    main_grad = torch.zeros_like(weight)
    torch.library.opcheck(
        torch.ops.fusedops.linear_backward_accumulate.default,
        (torch.randn(3, 5, 12, device=x.device), x, weight, residual.detach(), seed, "relu", 0.5, [True, True, True],
         *FLOATS, False, "ieee", main_grad),
    )  # fmt: skip


# With one output, and with two, of which one is kept for the backward.
@pytest.mark.parametrize(
    ("activation", "dynamic"), [("relu", False), ("gelu", True)], ids=["relu_static", "gelu_dynamic"]
)
def test_compiled_equals_eager(runner, activation, dynamic):
    def function(x, weight, bias):
        return fusedops.linear(x, weight, bias, activation)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 6):
        leaves = tensors(runner, (2, rows, 24), 12)
        eager, traced = function(*leaves), compiled(*leaves)
        assert torch.equal(eager, traced)
        grad = torch.randn_like(eager)
        for a, b in zip(*(torch.autograd.grad(y, leaves, grad) for y in (eager, traced)), strict=True):
            assert torch.equal(a, b)
    with torch.no_grad():
        assert torch.equal(function(*leaves), compiled(*leaves))


def test_compiled_with_a_transposed_weight_and_float32_parameters(runner):
    """As GPT-2's Conv1D calls it in mixed precision."""

    def function(x, stored, bias):
        return fusedops.linear(x, stored.t(), bias, "gelu_tanh")

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = randn(3, 24, dtype=torch.bfloat16, device=runner.device, requires_grad=True)
    leaves = (x, *(randn(*s, device=runner.device, requires_grad=True) for s in ((24, 12), (12,))))
    eager, traced = function(*leaves), compiled(*leaves)
    assert torch.equal(eager, traced)
    for a, b in zip(*(torch.autograd.grad(y.float().sum(), leaves) for y in (eager, traced)), strict=True):
        assert torch.equal(a, b)


def test_a_compiled_graph_holds_the_operator(kernel_runner):
    names = []

    def keep(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    x, weight, bias = (t.detach() for t in tensors(kernel_runner, (3, 24), 12))
    torch.compile(lambda *t: fusedops.linear(*t, "silu"), backend=keep, fullgraph=True)(x, weight, bias)
    assert "fusedops.linear.default" in names


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", EVERY_ACTIVATION, ids=str)
def test_autocast_gives_torchs_dtypes(runner, activation, dtype):
    leaves = tensors(runner, (3, 24), 12, dtype)
    with torch.autocast(runner.device.type, dtype=torch.bfloat16):
        y = fusedops.linear(*leaves, activation)
        theirs = TORCHS[activation](torch.nn.functional.linear(*leaves))
    assert y.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(y, theirs, rtol=0.03, atol=0.03)
    grad = torch.randn_like(y)
    pairs = zip(*(torch.autograd.grad(out, leaves, grad) for out in (y, theirs)), strict=True)
    for leaf, (a, b) in zip(leaves, pairs, strict=True):
        assert a.dtype == b.dtype == leaf.dtype
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_autocast_accepts_the_dtypes_that_it_makes_the_same(runner):
    x, weight, bias = tensors(runner, (3, 24), 12)
    with torch.autocast(runner.device.type, dtype=torch.bfloat16):
        assert fusedops.linear(x.half(), weight, bias.bfloat16(), "gelu").dtype == torch.bfloat16
        with pytest.raises(TypeError, match="linear: weight must be of input's dtype"):
            fusedops.linear(x, weight.double())


def test_autocast_does_not_reach_into_the_backward(kernel_runner):
    leaves = tensors(kernel_runner, (3, 24), 12)
    y = fusedops.linear(*leaves, "gelu")
    plain = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    with torch.autocast(kernel_runner.device.type, dtype=torch.bfloat16):
        inside = torch.autograd.grad(y.sum(), leaves)
    for a, b in zip(plain, inside, strict=True):
        assert torch.equal(a, b)


def test_autocast_compiled(runner):
    def function(x, weight, bias):
        return fusedops.linear(x, weight, bias, "gelu")

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    leaves = tensors(runner, (3, 24), 12)
    with torch.autocast(runner.device.type, dtype=torch.bfloat16):
        assert torch.equal(function(*leaves), compiled(*leaves))
    assert compiled(*leaves).dtype == torch.float32


def test_meta_and_fake_tensors_need_no_data(kernel_runner):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def call(device):
        x, weight = (
            torch.empty(s, dtype=torch.bfloat16, device=device, requires_grad=True) for s in ((2, 3, 8), (5, 8))
        )
        y = fusedops.linear(x, weight, None, "gelu")
        assert (y.shape, y.dtype) == ((2, 3, 5), torch.bfloat16)
        assert [g.shape for g in torch.autograd.grad(y.sum(), (x, weight))] == [(2, 3, 8), (5, 8)]

    call("meta")
    with FakeTensorMode():
        call(kernel_runner.device)


def test_export_then_run_and_backward(kernel_runner):
    model = fusedops.nn.Linear(24, 12, activation="gelu", device=kernel_runner.device)
    x = randn(3, 24, device=kernel_runner.device, requires_grad=True)
    exported = torch.export.export(model, (x,))
    assert any("fusedops.linear" in str(node.target) for node in exported.graph.nodes)
    y = exported.module()(x)
    assert torch.equal(y, model(x))
    grads = [torch.autograd.grad(out.sum(), x)[0] for out in (y, model(x))]
    assert torch.equal(*grads)


@pytest.mark.parametrize("activation", EVERY_ACTIVATION, ids=str)
def test_an_op_that_cannot_launch_computes_the_definition(activation):
    """A graph that was made for the kernels and runs where there are none: here because of its float64 tensors."""
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 2, 3), (2, 3), (2,)))
    assert torch.autograd.gradcheck(lambda *t: call_op(*t, activation)[0], (x, weight, bias))
    assert torch.autograd.gradcheck(lambda *t: call_op(*t, activation, recompute=True)[0], (x, weight, bias))
    # With everything, where the derivative is a function of a tensor that only the backward reads.
    seed, residual = torch.tensor([3]), torch.randn(2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *t: call_op(*t[:3], activation, residual=t[3], seed=seed, dropout_p=0.4)[0], (x, weight, bias, residual)
    )


def test_the_definition_chooses_its_dtypes_under_autocast_too(monkeypatch):
    from fusedops.linear import autograd

    monkeypatch.setattr(autograd, "can_launch", lambda tensor: False)
    x, weight = (torch.randn(s, requires_grad=True) for s in ((3, 24), (12, 24)))
    grad = torch.randn(3, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = call_op(x, weight, None, "silu")
        ours = (y, *torch.autograd.grad(y, (x, weight), grad))
    z = torch.nn.functional.silu(x @ weight.t())
    for a, b in zip(ours, (z, *torch.autograd.grad(z, (x, weight), grad)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# TF32


@pytest.fixture
def float32_precision():
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision("highest")


@pytest.mark.interpreter
@pytest.mark.parametrize("allowed", [False, True], ids=["full", "tf32"])
@pytest.mark.parametrize("target", ["sm_75", "sm_80"])
def test_the_setting_reaches_every_product(monkeypatch, allowed, target):
    """Forward and backward, which keeps what held in the forward; the interpreter rounds operands to TF32 as asked."""
    from fusedops.runtime import precision

    x, weight, grad = torch.randn(5, 40, requires_grad=True), torch.randn(7, 40, requires_grad=True), torch.randn(5, 7)
    use_config(monkeypatch)
    monkeypatch.setattr(precision, "tf32_allowed", lambda tensor: allowed)
    with fusedops.backend("triton"), pretend(TARGETS[target]):
        y = fusedops.linear(x, weight)
        monkeypatch.setattr(precision, "tf32_allowed", lambda tensor: not allowed)
        results = [y, *torch.autograd.grad(y, (x, weight), grad)]
    exact = [x.double() @ weight.double().t(), grad.double() @ weight.double(), grad.double().t() @ x.double()]
    for ours, right in zip(results, exact, strict=True):
        error = (ours - right).abs().max() / right.abs().max()
        assert (error > 2e-5) == (allowed and target == "sm_80"), error


def test_a_compiled_graph_follows_the_setting(kernel_runner, monkeypatch, float32_precision):
    from fusedops.runtime import precision

    monkeypatch.setattr(precision, "tf32_allowed", lambda tensor: precision._tf32_setting())
    x, weight, _ = (t.detach() for t in tensors(kernel_runner, (3, 24), 12))
    seen = []

    def keep(graph, _):
        seen.extend(node.args[-1] for node in graph.graph.nodes if str(node.target) == "fusedops.linear.default")
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(fusedops.linear, backend=keep, fullgraph=True)
    compiled(x, weight)
    float32_precision("high")
    compiled(x, weight)
    assert seen == ["ieee", "tf32"]
