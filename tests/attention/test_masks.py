"""Masks: bool and float, broadcast in every way, their gradient, and queries that see no key."""

from __future__ import annotations

import pytest
import torch

import fusedops
from tests.attention.problems import Problem, check, double, exact, fused, gradients, plain
from tests.harness.errors import check_error
from tests.harness.tensors import randn

BASE = Problem(batch=2, heads=2, kv_heads=1, q=20, k=70)

SHAPES = [
    (2, 2, 20, 70),
    (1, 1, 20, 70),
    (2, 1, 1, 70),
    (1, 2, 20, 1),
    (1, 1, 1, 1),
    (2, 20, 70),
    (20, 70),
    (70,),
    (),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_shapes_that_broadcast(runner, kind, shape):
    check(BASE.but(mask=kind, mask_shape=shape), runner, torch.float32)


@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_with_causal_both_hold(runner, kind, causal):
    problem = Problem(heads=1, kv_heads=1, q=70, k=66, mask=kind, mask_shape=(1, 1, 1, 66), causal=causal)
    check(problem, runner, torch.float32)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("layout", ["transposed", "sliced", "strided", "expanded"])
def test_layouts(runner, kind, layout):
    q, k, v, _ = BASE.inputs(runner.device)
    mask = randn(2, 2, 20, 70, device=runner.device, layout=layout)
    if kind == "bool":
        # A comparison gives a tensor laid out like its operand, but for expanded ones.
        mask = (randn(1, 1, 1, 70, device=runner.device) > 0).expand(2, 2, 20, 70) if layout == "expanded" else mask > 0
    else:
        mask.requires_grad_()
    check(BASE, runner, torch.float32, inputs=(q, k, v, mask))


@pytest.mark.parametrize("mask_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_float_mask_of_another_dtype(runner, dtype, mask_dtype):
    q, k, v, _ = BASE.inputs(runner.device, dtype)
    mask = randn(1, 1, 20, 70, dtype=mask_dtype, device=runner.device, requires_grad=True)
    do = randn(2, 2, 20, 16, dtype=dtype, device=runner.device)

    def attention(*inputs):
        return fusedops.attention(*inputs[:3], attn_mask=inputs[3]), None

    (out, _), grads = gradients(attention, (q, k, v, mask), (do, None))
    assert out.dtype == dtype
    assert [g.dtype for g in grads] == [dtype, dtype, dtype, mask_dtype]
    (truth, _), true_grads = gradients(exact, [double(t) for t in (q, k, v, mask)], (do.double(), None))
    (base, _), base_grads = gradients(plain, (q, k, v, mask), (do, None))
    check_error(out, truth, base, what="out")
    check_error(grads[3], true_grads[3], base_grads[3], gradient=True, what="gradient of attn_mask")


def blind_rows(kind, shape, device):
    """A mask that hides every key from the queries 3 and 17 (and some from others)."""
    seen = torch.rand(shape) > 0.3
    seen[..., 3, :] = False
    seen[..., 17, :] = False
    seen[..., 5, 0] = True
    if kind == "bool":
        return seen.to(device)
    mask = randn(*shape, device=device)
    return mask.masked_fill(~seen.to(device), float("-inf")).requires_grad_()


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_query_that_sees_no_key(runner, kind, causal):
    q, k, v, _ = BASE.inputs(runner.device)
    inputs = (q, k, v, blind_rows(kind, (1, 1, 20, 70), runner.device))
    do = randn(2, 2, 20, 16, device=runner.device)
    dlse = randn(2, 2, 20, device=runner.device)
    (out, lse), grads = gradients(fused, inputs, (do, dlse), causal=causal)
    for row in (3, 17):
        assert (out[:, :, row] == 0).all()
        assert (lse[:, :, row] == float("-inf")).all()
        assert (grads[0][:, :, row] == 0).all()
        if kind == "float":
            assert (grads[3][:, :, row] == 0).all()
    check(BASE.but(causal=causal), runner, torch.float32, inputs=inputs)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_no_query_sees_a_key(runner, kind):
    q, k, v, _ = BASE.inputs(runner.device)
    if kind == "bool":
        mask = torch.zeros(2, 1, 1, 70, dtype=torch.bool, device=runner.device)
    else:
        mask = torch.full((2, 1, 1, 70), float("-inf"), device=runner.device, requires_grad=True)
    leaves = [q, k, v, mask] if kind == "float" else [q, k, v]
    out = fusedops.attention(q, k, v, attn_mask=mask)
    assert (out == 0).all()
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert (grad == 0).all()


@pytest.mark.parametrize("lengths", [(90, 20), (70, 66)], ids=str)
def test_bottom_right_with_more_queries_than_keys(runner, lengths):
    """The first queries see no key."""
    problem = Problem(heads=1, kv_heads=1, q=lengths[0], k=lengths[1], causal="bottom_right")
    q, k, v, _ = problem.inputs(runner.device)
    out = fusedops.attention(q, k, v, causal="bottom_right")
    blind = lengths[0] - lengths[1]
    assert (out[:, :, :blind] == 0).all()
    assert (out[:, :, blind:] != 0).all()
    check(problem, runner, torch.float32, inputs=(q, k, v, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mask_of_the_most_negative_number(runner, dtype):
    """Masks made of finfo.min, not −inf: a row of them alone has equal scores, so its values are averaged.

    log Σ exp(s) of such a row is the number itself in float32: probabilities must not be computed from it alone.
    """
    q, k, v, _ = BASE.inputs(runner.device, dtype)
    low = torch.finfo(dtype).min
    mask = randn(2, 1, 20, 70, dtype=dtype, device=runner.device)
    mask = mask.masked_fill(torch.rand(2, 1, 20, 70).to(runner.device) < 0.5, low)
    mask[:, :, 3] = low
    mask.requires_grad_()
    do = randn(2, 2, 20, 16, dtype=dtype, device=runner.device)

    def attention(*inputs):
        return fusedops.attention(*inputs[:3], attn_mask=inputs[3]), None

    (out, _), grads = gradients(attention, (q, k, v, mask), (do, None))
    (truth, _), true_grads = gradients(exact, [double(t) for t in (q, k, v, mask)], (do.double(), None))
    (base, _), base_grads = gradients(plain, (q, k, v, mask), (do, None))
    check_error(out, truth, base, what="out")
    torch.testing.assert_close(out[:, :, 3].float(), v.mean(2).expand(2, 2, 16).float(), rtol=0.02, atol=0.01)
    for name, *results in zip(("q", "k", "v", "attn_mask"), grads, true_grads, base_grads, strict=True):
        check_error(*results, gradient=True, what=f"gradient of {name}")


def test_where_many_heads_share_a_mask(runner):
    """Few tiles and many heads: several programs share the sum of a mask's gradient."""
    check(
        Problem(batch=3, heads=4, kv_heads=2, q=9, k=11, mask="float", mask_shape=(1, 1, 9, 11)), runner, torch.float32
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_torchs_operator_on_a_gpu_gives_blind_queries_zeros(kind, dtype):
    """What the torch backend relies on, whichever of torch's kernels serves the call."""
    device = torch.device("cuda")
    q, k, v, _ = BASE.but(q=64, k=128, d=64).inputs(device, dtype)
    mask = blind_rows(kind, (1, 1, 64, 128), device)
    mask = mask if kind == "bool" else mask.detach().to(dtype)
    with fusedops.backend("torch"):
        out = fusedops.attention(q, k, v, attn_mask=mask)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert (out[:, :, [3, 17]] == 0).all()
    assert (grads[0][:, :, [3, 17]] == 0).all()
    assert all(torch.isfinite(t).all() for t in (out, *grads))
