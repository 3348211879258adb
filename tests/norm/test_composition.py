"""The norms inside torch.compile, checkpointing, autocast, fake tensors and torch.library's own checks."""

from __future__ import annotations

import pytest
import torch

import fusedops
from tests.harness.tensors import randn
from tests.norm.problems import NORMS


@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_opcheck(kernel_runner, center, affine):
    x = randn(3, 4, 24, device=kernel_runner.device, layout="transposed", requires_grad=True)
    weight = randn(24, device=kernel_runner.device, requires_grad=True) if affine else None
    bias = randn(24, device=kernel_runner.device, requires_grad=True) if affine and center else None
    kind = "layer" if center else "rms"
    op = torch.ops.fusedops.norm.default
    arguments = (1, 1e-5, 0.0, kind, 0.0, torch.float32, False)
    torch.library.opcheck(op, (x, None, weight, bias, None, *arguments))
    x, weight, bias = (t if t is None else t.detach() for t in (x, weight, bias))
    _, _, mean, rstd = op(x, None, weight, bias, None, *arguments)
    needs, dtypes = [True, False, affine, bias is not None], [torch.float32] * 4
    torch.library.opcheck(
        torch.ops.fusedops.norm_backward.default,
        (torch.randn_like(x), None, x, weight, bias, mean, rstd, None, 1, 1e-5, 0.0, kind, 0.0, False, needs, *dtypes),
    )


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "plain"])
def test_opcheck_of_the_formula(kind, residual):
    """What the op computes where its kernels cannot run: results in the strides that the fake function promises."""
    x, r = (randn(3, 4, 24, dtype=torch.float64).transpose(0, 1) for _ in range(2))
    weight = randn(24, dtype=torch.float64)
    op, arguments = torch.ops.fusedops.norm.default, (1, 1e-5, 0.0, kind, 0.0, torch.float64, False)
    inputs = (x.requires_grad_(), r if residual else None, weight.requires_grad_(), None, None)
    torch.library.opcheck(op, (*inputs, *arguments))
    x, weight = x.detach(), weight.detach()
    _, _, mean, rstd = op(x, None, weight, None, None, *arguments)
    needs, dtypes = [True, False, True, False], [torch.float64] * 4
    torch.library.opcheck(
        torch.ops.fusedops.norm_backward.default,
        (torch.randn_like(x), None, x, weight, None, mean, rstd, None, 1, 1e-5, 0.0, kind, 0.0, False, needs, *dtypes),
    )


# The norms are one operator: which of the two it is and whether sizes are symbols are independent.
@pytest.mark.parametrize(
    ("norm", "dynamic"), [(NORMS[0], True), (NORMS[1], False)], ids=["layer_dynamic", "rms_static"]
)
def test_compiled_equals_eager(runner, norm, dynamic):
    def function(x, weight):
        return norm.fused(x, (24,), weight, None)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 6):
        x, weight = (randn(*s, device=runner.device, requires_grad=True) for s in ((rows, 24), (24,)))
        eager, traced = function(x, weight), compiled(x, weight)
        assert torch.equal(eager, traced)
        grad = torch.randn_like(eager)
        for a, b in zip(*(torch.autograd.grad(y, (x, weight), grad) for y in (eager, traced)), strict=True):
            assert torch.equal(a, b)


def test_a_compiled_graph_follows_the_backend_context(kernel_runner):
    x = randn(3, 24, device=kernel_runner.device)

    def function(x):
        return fusedops.layer_norm(x, 24)

    graphs = []

    def keep(graph, _):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=keep, fullgraph=True)
    compiled(x)
    with fusedops.backend("torch"):
        compiled(x)
    assert any("fusedops.norm" in name for name in graphs[0])
    assert not any("fusedops.norm" in name for name in graphs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_autocast_gives_torchs_dtype(runner, norm, dtype):
    x, weight = (randn(*s, dtype=dtype, device=runner.device, requires_grad=True) for s in ((3, 24), (24,)))
    torchs = torch.nn.functional.layer_norm if norm.center else torch.nn.functional.rms_norm
    with torch.autocast(runner.device.type, dtype=torch.bfloat16):
        y = norm.fused(x, (24,), weight, None)
        assert y.dtype == torchs(x, (24,), weight).dtype
    grads = torch.autograd.grad(y.float().sum(), (x, weight))
    assert [g.dtype for g in grads] == [dtype, dtype]


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_meta_and_fake_tensors_need_no_data(kernel_runner, norm):
    from torch._subclasses.fake_tensor import FakeTensorMode

    meta = norm.fused(torch.empty(3, 24, dtype=torch.bfloat16, device="meta"), (24,), None, None)
    assert (meta.shape, meta.dtype) == ((3, 24), torch.bfloat16)
    with FakeTensorMode():
        fake = norm.fused(torch.empty(3, 24, dtype=torch.bfloat16, device=kernel_runner.device), (24,), None, None)
    assert (fake.shape, fake.dtype) == ((3, 24), torch.bfloat16)


def test_export_then_run_and_backward(kernel_runner):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(24, device=kernel_runner.device))

        def forward(self, x):
            return fusedops.rms_norm(x, 24, self.weight)

    model = Model()
    x = randn(3, 24, device=kernel_runner.device, requires_grad=True)
    exported = torch.export.export(model, (x,))
    assert any("fusedops.norm" in str(node.target) for node in exported.graph.nodes)
    y = exported.module()(x)
    assert torch.equal(y, model(x))
    grads = [torch.autograd.grad(out.sum(), x)[0] for out in (y, model(x))]
    assert torch.equal(*grads)


def test_a_traced_width(kernel_runner):
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(x):
        return fusedops.layer_norm(x, x.shape[-1]) + fusedops.rms_norm(x, x.shape[1:])

    graph = make_fx(function, tracing_mode="symbolic")(randn(3, 8, device=kernel_runner.device))
    x = randn(2, 20, device=kernel_runner.device)
    assert torch.equal(graph(x), function(x))


FUNCTIONS = {
    "layer_norm": (fusedops.layer_norm, torch.nn.functional.layer_norm, ((4,),)),
    "rms_norm": (fusedops.rms_norm, torch.nn.functional.rms_norm, ((4,),)),
    "l2_norm": (fusedops.l2_norm, torch.nn.functional.normalize, ()),
    "group_norm": (fusedops.group_norm, torch.nn.functional.group_norm, (2,)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_dtypes_under_autocast_on_a_gpu(monkeypatch, name, dtype):
    """With fake tensors: torch decides by the device that a tensor says it is on."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    function, torchs, arguments = FUNCTIONS[name]
    enabled, half = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.float16)
    try:
        with FakeTensorMode():
            x = torch.empty(2, 8, 4, device="cuda", dtype=dtype)
            expected = torchs(x, *arguments).dtype
            for kernels in (False, True):  # which of the two paths the function takes
                monkeypatch.setattr(f"{function.__module__}.might_use_triton", lambda _, kernels=kernels: kernels)
                monkeypatch.setattr(f"{function.__module__}.use_triton", lambda *_: True)
                assert function(x, *arguments).dtype == expected
                for asked in (torch.float32, torch.float16, torch.bfloat16):
                    assert function(x, *arguments, out_dtype=asked).dtype == asked
    finally:
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", half)
