"""Attention inside torch.compile, checkpointing, autocast, fake tensors, export and torch.library's own checks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusedops
from fusedops.attention.options import Options
from tests.attention.problems import Problem
from tests.harness.tensors import randn

SMALL = Problem(batch=2, heads=2, kv_heads=1, q=9, k=11, d=8, dv=6)
MASKS = {
    "none": SMALL,
    "bool": SMALL.but(mask="bool", mask_shape=(2, 1, 1, 11)),
    "float": SMALL.but(mask="float", mask_shape=(1, 1, 9, 11)),
}


@pytest.mark.parametrize(("mask", "layout"), [("none", "expanded"), ("bool", "transposed"), ("float", "contiguous")])
def test_opcheck(kernel_runner, mask, layout):
    shape = MASKS[mask].mask_shape
    problem = MASKS[mask].but(batch=1, layout=layout, mask_shape=shape and (1, *shape[1:]))
    inputs = problem.inputs(kernel_runner.device)
    options = Options(inputs[3], right=0, scale=0.3)
    op = torch.ops.fusedops.attention.default
    torch.library.opcheck(op, (*inputs[:3], *options))
    q, k, v, m = (t if t is None else t.detach() for t in inputs)
    options = options._replace(attn_mask=m)
    out, lse, statistics = op(q, k, v, *options)
    for needs in ((True, True, True, mask == "float", False, False), (False, False, True, False, False, False)):
        torch.library.opcheck(
            torch.ops.fusedops.attention_backward.default,
            (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, statistics, *options, list(needs)),
        )


def test_opcheck_of_every_option(kernel_runner):
    problem = SMALL.but(mask="float", mask_shape=(1, 1, 9, 11), alibi="heads", sinks=True)
    q, k, v, m, slopes, sinks = problem.inputs(kernel_runner.device)
    seed = torch.tensor([3], device=kernel_runner.device)
    options = Options(
        m, slopes[None].detach().requires_grad_(), sinks, seed, left=3, right=2, softcap=2.0, dropout_p=0.3
    )
    torch.library.opcheck(torch.ops.fusedops.attention.default, (q, k, v, *options))


@pytest.mark.parametrize("extra", [False, True], ids=["", "options"])
def test_opcheck_without_a_kernel(extra):
    """float64 has no kernel: the ops compute their reference, as an exported graph needs on another machine."""
    problem = MASKS["float"].but(alibi="heads", sinks=True) if extra else MASKS["float"]
    inputs = [t.double().detach().requires_grad_() for t in problem.inputs(torch.device("cpu"))]
    q, k, v, m, *more = inputs
    slopes, sinks = more or (None, None)
    options = Options(m, slopes if slopes is None else slopes[None], sinks, bottom_right=True, right=0, scale=0.3)
    given = {"alibi_slopes": slopes, "sinks": sinks}
    if extra:
        options = options._replace(left=4, softcap=2.0)
        given |= {"window": (4, 0), "softcap": 2.0}
    else:
        torch.library.opcheck(torch.ops.fusedops.attention.default, (q, k, v, *options))
    out, lse, _ = torch.ops.fusedops.attention(q, k, v, *options)
    expected = fusedops.attention(q, k, v, attn_mask=m, causal="bottom_right", scale=0.3, return_lse=True, **given)
    grads = torch.autograd.grad([out.sum(), lse.sum()], inputs)
    torch.testing.assert_close((out, lse), expected)
    torch.testing.assert_close(grads, torch.autograd.grad([t.sum() for t in expected], inputs))


@pytest.mark.parametrize("mask", MASKS)
def test_torchs_operators_compiled_equal_eager(mask):
    """The kernels, and all other options: tests/dynamo."""

    def function(q, k, v, m):
        return fusedops.attention(q, k, v, attn_mask=m, causal="bottom_right").sin()

    with fusedops.backend("torch"):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
        for length in (9, 13):
            problem = MASKS[mask].but(q=length)
            shape = problem.mask_shape
            problem = problem.but(mask_shape=shape and (*shape[:2], length if shape[2] > 1 else 1, shape[3]))
            inputs = problem.inputs(torch.device("cpu"))
            leaves = [t for t in inputs if t is not None and t.requires_grad]
            eager, traced = function(*inputs), compiled(*inputs)
            assert torch.equal(eager, traced)
            grad = torch.randn_like(eager)
            for a, b in zip(*(torch.autograd.grad(y, leaves, grad) for y in (eager, traced)), strict=True):
                assert torch.equal(a, b)


def test_a_compiled_graph_follows_the_backend_context(kernel_runner):
    inputs = SMALL.inputs(kernel_runner.device, requires_grad=False)[:3]
    graphs = []

    def keep(graph, _):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: fusedops.attention(*t), backend=keep, fullgraph=True)
    compiled(*inputs)
    with fusedops.backend("torch"):
        compiled(*inputs)
    assert any("fusedops.attention" in name for name in graphs[0])
    assert not any("fusedops.attention" in name for name in graphs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("return_lse", [False, True], ids=["", "lse"])
def test_autocast_gives_torchs_dtype(runner, dtype, return_lse):
    q, k, v, m = MASKS["float"].but(kv_heads=2).inputs(runner.device, dtype)
    with torch.autocast(runner.device.type, dtype=torch.bfloat16):
        out = fusedops.attention(q, k, v, attn_mask=m, return_lse=return_lse)
        out = out[0] if return_lse else out
        torchs = F.scaled_dot_product_attention(q, k, v, m)
        empty = fusedops.attention(q[:0], k[:0], v[:0], attn_mask=m[:0])
        drop_in = fusedops.scaled_dot_product_attention(q, k, v, m)
        assert out.dtype == drop_in.dtype == torchs.dtype == empty.dtype == torch.bfloat16
    torch.testing.assert_close(out, torchs, rtol=0.05, atol=0.02)
    grads = torch.autograd.grad(out.float().sum(), (q, k, v, m))
    assert [g.dtype for g in grads] == [dtype] * 4


def test_autocast_brings_dtypes_together(runner):
    q, k, v, _ = SMALL.but(kv_heads=2).inputs(runner.device)
    with torch.autocast(runner.device.type, dtype=torch.bfloat16):
        assert fusedops.attention(q, k.half(), v.bfloat16()).dtype == torch.bfloat16
        assert fusedops.scaled_dot_product_attention(q, k.half(), v.bfloat16()).dtype == torch.bfloat16


def test_autocast_leaves_the_definition_in_float32(runner):
    """float64 stays; the reference's own products are not rounded to autocast's dtype."""
    with fusedops.backend("auto"), torch.autocast(runner.device.type, dtype=torch.bfloat16):
        q, k, v, _ = (t if t is None else t.double() for t in SMALL.inputs(runner.device))
        out, lse = fusedops.attention(q, k, v, return_lse=True)
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))


def test_meta_and_fake_tensors_need_no_data(kernel_runner):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def shapes(device):
        q, k, v = (
            torch.empty(s, dtype=torch.bfloat16, device=device) for s in ((2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 6))
        )
        return fusedops.attention(q, k, v, causal=True)

    meta = shapes("meta")
    assert (meta.shape, meta.dtype) == ((2, 4, 9, 6), torch.bfloat16)
    with FakeTensorMode():
        fake = shapes(kernel_runner.device)
    assert (fake.shape, fake.dtype) == ((2, 4, 9, 6), torch.bfloat16)
    assert fake.transpose(1, 2).is_contiguous()


def test_export_then_run_and_backward(kernel_runner):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return fusedops.attention(q, k, v, causal=True)

    inputs = SMALL.inputs(kernel_runner.device)[:3]
    exported = torch.export.export(Model(), inputs)
    assert any("fusedops.attention" in str(node.target) for node in exported.graph.nodes)
    out = exported.module()(*inputs)
    assert torch.equal(out, Model()(*inputs))
    grads = [torch.autograd.grad(o.sum(), inputs) for o in (out, Model()(*inputs))]
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_tf32_follows_torchs_setting(kernel_runner, monkeypatch):
    """The operator gets the setting at the time of the call; float16 has none."""
    from fusedops.attention import functional
    from fusedops.runtime import precision

    seen = []
    real = functional.attention_op

    def op(*arguments):
        seen.append(arguments[-1])
        return real(*arguments)

    monkeypatch.setattr(functional, "attention_op", op)
    monkeypatch.setattr(precision, "tf32_allowed", lambda tensor: True)
    for dtype in (torch.float32, torch.float16):
        q = randn(1, 1, 4, 8, dtype=dtype, device=kernel_runner.device)
        fusedops.attention(q, q, q)
    assert seen == ["tf32", "ieee"]
