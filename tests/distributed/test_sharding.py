"""Every operator on tensors that are spread over devices: right, and without a collective that is not meant."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import fusedops
from tests.distributed.meshes import counts, mesh_of, whole
from tests.harness.errors import check_error
from tests.harness.tensors import randn

R, P, S = Replicate(), Partial(), Shard


@dataclass(frozen=True)
class Case:
    """A call on shards of tensors.

    Attributes:
        call: of the inputs; its result may be a tuple.
        inputs: (shape, placement) of each; a placement for each dimension of the mesh, or one for all.
        outputs: placements of the results.
        forward, backward: collectives of the call and of its backward.
        grads: placements of the gradients, where they matter.
        kernels: whether to run it on the kernels too.
    """

    call: Callable[..., Any]
    inputs: tuple[tuple[tuple[int, ...], Any], ...]
    outputs: tuple[Any, ...]
    grads: tuple[Any, ...] = ()
    forward: dict[str, int] = field(default_factory=dict)
    backward: dict[str, int] = field(default_factory=dict)
    kernels: bool = False


def _grouped(x, w, b):
    offsets = torch.tensor([3, 7])
    if isinstance(x, DTensor):
        offsets = distribute_tensor(offsets, x.device_mesh, [R] * x.device_mesh.ndim, src_data_rank=None)
    return fusedops.grouped_linear(x, w, offsets, b, "silu")


def _varlen(q, k, v):
    ends = torch.tensor([0, 3, 3, 8])
    if isinstance(q, DTensor):
        ends = distribute_tensor(ends, q.device_mesh, [R] * q.device_mesh.ndim, src_data_rank=None)
    return fusedops.attention_varlen(q, k, v, ends, ends, causal=True, return_lse=True)


def _attention(**options):
    return lambda q, k, v: fusedops.attention(q, k, v, return_lse=True, **options)


X, ROWS = (4, 8, 16), (16,)
Q, KV = (4, 8, 6, 8), (4, 4, 6, 8)
CASES = {
    # The norms: any dimension that is not normalised.
    "layer norm, batch": Case(
        lambda x, w, b: fusedops.layer_norm(x, 16, w, b), ((X, S(0)), (ROWS, R), (ROWS, R)), (S(0),), (S(0), P, P),
        kernels=True,
    ),
    "layer norm, sequence": Case(
        lambda x, w, b: fusedops.layer_norm(x, 16, w, b), ((X, S(1)), (ROWS, R), (ROWS, R)), (S(1),), (S(1), P, P)
    ),
    "layer norm, recomputed": Case(
        lambda x, w, b: fusedops.layer_norm(x, 16, w, b, recompute=True),
        ((X, S(1)), (ROWS, R), (ROWS, R)), (S(1),), (S(1), P, P),
    ),
    "rms norm, two dimensions": Case(
        lambda x, w: fusedops.rms_norm(x, (8, 16), w, weight_offset=1.0), ((X, S(0)), ((8, 16), R)), (S(0),), (S(0), P)
    ),
    "rms norm, uneven": Case(lambda x, w: fusedops.rms_norm(x, 16, w), (((5, 16), S(0)), (ROWS, R)), (S(0),)),
    "rms norm, no weight": Case(lambda x: fusedops.rms_norm(x, 16), ((X, S(0)),), (S(0),), (S(0),)),
    "add layer norm": Case(
        lambda x, r, w, b: fusedops.add_layer_norm(x, r, 16, w, b), ((X, S(1)), (X, S(1)), (ROWS, R), (ROWS, R)),
        (S(1), S(1)), (S(1), S(1), P, P),
    ),
    "add rms norm, the sum alone": Case(
        lambda x, r, w: fusedops.add_rms_norm(x, r, 16, w)[1], ((X, S(1)), (X, S(1)), (ROWS, R)), (S(1),), (S(1), S(1))
    ),
    "l2 norm": Case(lambda x: fusedops.l2_norm(x, 1), ((X, S(2)),), (S(2),), (S(2),)),
    "group norm": Case(
        lambda x, w, b: fusedops.group_norm(x, 2, w, b), (((4, 8, 3, 5), S(0)), ((8,), R), ((8,), R)), (S(0),),
        (S(0), P, P),
    ),
    # A linear layer: rows of the input, rows of the weight, or the summed dimension.
    "linear, batch": Case(
        lambda x, w, b, r: fusedops.linear(x, w, b, "gelu", residual=r),
        ((X, S(0)), ((24, 16), R), ((24,), R), ((4, 8, 24), S(0))), (S(0),), (S(0), P, P, S(0)), kernels=True,
    ),
    "linear, column": Case(
        lambda x, w, b, r: fusedops.linear(x, w, b, "silu", residual=r),
        ((X, R), ((24, 16), S(0)), ((24,), S(0)), ((4, 8, 24), S(2))), (S(2),), (P, S(0), S(0), S(2)), kernels=True,
    ),
    "linear, column, recomputed": Case(
        lambda x, w, b: fusedops.linear(x, w, b, "gelu", recompute=True),
        ((X, R), ((24, 16), S(0)), ((24,), S(0))), (S(2),), (P, S(0), S(0)), kernels=True,
    ),
    "linear, row": Case(
        lambda x, w: fusedops.linear(x, w), ((X, S(2)), ((24, 16), S(1))), (P,), (S(2), S(1)), kernels=True
    ),
    # A bias and a residual are terms of the sum: no device has them whole.
    "linear, row, bias and residual": Case(
        lambda x, w, b, r: fusedops.linear(x, w, b, residual=r),
        ((X, S(2)), ((24, 16), S(1)), ((24,), R), ((4, 8, 24), R)), (P,), (S(2), S(1), R, R),
    ),
    # What is not linear cannot be computed from terms: the inputs are gathered, as torch's own operators do.
    "linear, row, activation": Case(
        lambda x, w: fusedops.linear(x, w, None, "relu"), ((X, S(2)), ((24, 16), S(1))), (R,),
        forward={"all_gather_into_tensor": 2},
    ),
    "gated linear, batch": Case(
        lambda x, g, u, b, c: fusedops.gated_linear(x, g, u, b, c),
        ((X, S(1)), ((24, 16), R), ((24, 16), R), ((24,), R), ((24,), R)), (S(1),), (S(1), P, P, P, P),
    ),
    "gated linear, column": Case(
        lambda x, g, u, b, c: fusedops.gated_linear(x, g, u, b, c),
        ((X, R), ((24, 16), S(0)), ((24, 16), S(0)), ((24,), S(0)), ((24,), S(0))), (S(2),),
        (P, S(0), S(0), S(0), S(0)), kernels=True,
    ),
    "gated linear, column, uneven": Case(
        lambda x, g, u: fusedops.gated_linear(x, g, u), ((X, R), ((5, 16), S(0)), ((5, 16), S(0))), (S(2),)
    ),
    "gated linear, column, recomputed": Case(
        lambda x, g, u: fusedops.gated_linear(x, g, u, recompute=True),
        ((X, R), ((24, 16), S(0)), ((24, 16), S(0))), (S(2),), (P, S(0), S(0)),
    ),
    "gated linear, packed, batch": Case(
        lambda x, w: fusedops.gated_linear(x, w), ((X, S(0)), ((48, 16), R)), (S(0),), (S(0), P)
    ),
    "gated linear, packed, rows": Case(
        lambda x, w: fusedops.gated_linear(x, w), ((X, R), ((48, 16), S(0))), (R,),
        forward={"all_gather_into_tensor": 1}, backward={"all_gather_into_tensor": 1},
    ),
    "grouped linear, column": Case(
        _grouped, (((9, 16), R), ((2, 24, 16), S(1)), ((2, 24), S(1))), (S(1),), (P, S(1), S(1))
    ),
    "batched linear, groups": Case(
        lambda x, w, b: fusedops.batched_linear(x, w, b, "gelu"),
        ((X, S(0)), ((4, 24, 16), S(0)), ((4, 24), S(0))), (S(0),), (S(0), S(0), S(0)),
    ),
    "batched linear, rows": Case(
        lambda x, w, b: fusedops.batched_linear(x, w, b, "relu"),
        ((X, S(1)), ((4, 24, 16), R), ((4, 24), R)), (S(1),), (S(1), P, P),
    ),
    "batched linear, row": Case(
        lambda x, w, b: fusedops.batched_linear(x, w, b),
        ((X, S(2)), ((4, 24, 16), S(2)), ((4, 24), R)), (P,), (S(2), S(2), R),
    ),
    "layer norm linear, batch": Case(
        lambda x, n, m, w, b: fusedops.layer_norm_linear(x, n, m, w, b, "gelu"),
        ((X, S(0)), (ROWS, R), (ROWS, R), ((24, 16), R), ((24,), R)), (S(0),), (S(0), P, P, P, P),
    ),
    "rms norm linear, column": Case(
        lambda x, n, w, b: fusedops.rms_norm_linear(x, n, w, b, "silu"),
        ((X, R), (ROWS, R), ((24, 16), S(0)), ((24,), S(0))), (S(2),), (P, P, S(0), S(0)),
    ),
    # Attention: batch, heads, and queries where no place matters.
    "attention, batch": Case(
        lambda q, k, v, m, s: fusedops.attention(q, k, v, attn_mask=m, sinks=s, return_lse=True),
        ((Q, S(0)), (KV, S(0)), (KV, S(0)), ((4, 1, 6, 6), S(0)), ((8,), R)), (S(0), S(0)),
        (S(0), S(0), S(0), S(0), P),
    ),
    "attention, batch, one mask": Case(
        lambda q, k, v, m: fusedops.attention(q, k, v, attn_mask=m), ((Q, S(0)), (KV, S(0)), (KV, S(0)), ((6, 6), R)),
        (S(0),), (S(0), S(0), S(0), P),
    ),
    "attention, heads": Case(
        _attention(causal="bottom_right"), ((Q, S(1)), (KV, S(1)), (KV, S(1))), (S(1), S(1)), (S(1), S(1), S(1)),
        kernels=True,
    ),
    "attention, heads, everything": Case(
        lambda q, k, v, m, a, s: fusedops.attention(q, k, v, attn_mask=m, alibi_slopes=a, sinks=s, window=(3, 2)),
        ((Q, S(1)), (KV, S(1)), (KV, S(1)), ((8, 6, 6), S(0)), ((8,), S(0)), ((8,), S(0))), (S(1),),
        (S(1), S(1), S(1), S(0), S(0), S(0)),
    ),
    "attention, heads, one key head": Case(
        _attention(causal=True), ((Q, S(1)), ((4, 1, 6, 8), R), ((4, 1, 6, 8), R)), (S(1), S(1)), (S(1), P, P)
    ),
    "attention, queries": Case(_attention(), ((Q, S(2)), (KV, R), (KV, R)), (S(2), S(2)), (S(2), P, P)),
    "attention, the drop-in": Case(
        lambda q, k, v: fusedops.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        ((Q, S(1)), (KV, S(1)), (KV, S(1))), (S(1),), (S(1), S(1), S(1)),
    ),
    "attention, packed, heads": Case(
        _varlen, (((8, 8, 8), S(1)), ((8, 4, 8), S(1)), ((8, 4, 8), S(1))), (S(1), S(0)), (S(1), S(1), S(1))
    ),
}  # fmt: skip
# On a mesh of two dimensions: one placement for each.
MESHES = {
    "layer norm, batch and sequence": Case(
        lambda x, w, b: fusedops.layer_norm(x, 16, w, b), ((X, (S(0), S(1))), (ROWS, (R, R)), (ROWS, (R, R))),
        ((S(0), S(1)),), ((S(0), S(1)), (P, P), (P, P)),
    ),
    "linear, batch and column": Case(
        lambda x, w, b: fusedops.linear(x, w, b, "gelu"),
        ((X, (S(0), R)), ((24, 16), (R, S(0))), ((24,), (R, S(0)))), ((S(0), S(2)),),
        ((S(0), P), (P, S(0)), (P, S(0))),
    ),
    "linear, batch and row": Case(
        lambda x, w, b: fusedops.linear(x, w, b),
        ((X, (S(0), S(2))), ((24, 16), (R, S(1))), ((24,), (R, R))), ((S(0), P),), ((S(0), S(2)), (P, S(1)), (P, R)),
    ),
    "gated linear, batch and column": Case(
        lambda x, g, u: fusedops.gated_linear(x, g, u),
        ((X, (S(0), R)), ((24, 16), (R, S(0))), ((24, 16), (R, S(0)))), ((S(0), S(2)),),
        ((S(0), P), (P, S(0)), (P, S(0))),
    ),
    "attention, batch and heads": Case(
        _attention(causal=True), ((Q, (S(0), S(1))), (KV, (S(0), S(1))), (KV, (S(0), S(1)))),
        ((S(0), S(1)), (S(0), S(1))), ((S(0), S(1)),) * 3,
    ),
    "attention, heads on both": Case(
        _attention(causal=True), ((Q, (S(1), S(1))), (KV, (S(1), S(1))), (KV, (S(1), S(1)))),
        ((S(1), S(1)), (S(1), S(1))), ((S(1), S(1)),) * 3,
    ),
}  # fmt: skip


def _all(placements: Any, dims: int) -> tuple[Any, ...]:
    return placements if isinstance(placements, tuple) else (placements,) * dims


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def run(rank, world, table, name, tensors, grads, shape, kernels):
    """[results and gradients], how they are placed, and the collectives."""
    case, mesh = globals()[table][name], mesh_of(*shape)
    leaves = [
        distribute_tensor(t, mesh, _all(p, len(shape)), src_data_rank=None).requires_grad_()
        for t, (_, p) in zip(tensors, case.inputs, strict=True)
    ]
    with fusedops.backend("triton") if kernels else contextlib.nullcontext():
        with CommDebugMode() as forward:
            results = _tuple(case.call(*leaves))
        # Of a sum the gradient is each term's.
        incoming = [
            distribute_tensor(g, mesh, [R if p.is_partial() else p for p in y.placements], src_data_rank=None)
            for g, y in zip(grads, results, strict=True)
        ]
        with CommDebugMode() as backward:
            found = torch.autograd.grad(results, leaves, incoming, allow_unused=True)
    made = [*results, *found]
    placed = [None if t is None else t.placements for t in made]
    return [None if t is None else whole(t) for t in made], placed, counts(forward), counts(backward)


def single(case, tensors, grads):
    """Results and gradients of one process, on torch's operators."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    with fusedops.backend("torch"):
        results = _tuple(case.call(*leaves))
        found = torch.autograd.grad(results, leaves, [g.to(y.dtype) for g, y in zip(grads, results, strict=True)],
                                    allow_unused=True)  # fmt: skip
    return [*results, *found]


def sample(case):
    """Inputs, gradients, and what one process makes of them in float64 and float32."""
    tensors = [randn(*shape) for shape, _ in case.inputs]
    with fusedops.backend("torch"):
        grads = [randn(*y.shape) for y in _tuple(case.call(*tensors))]
    exact = single(case, [t.double() for t in tensors], [g.double() for g in grads])
    return tensors, grads, exact, single(case, tensors, grads)


def check(ranks, table, name, shape, kernels=False):
    case = globals()[table][name]
    tensors, grads, exact, plain = sample(case)
    # Of few numbers the errors are a matter of luck, and a sum over devices is rounded once more for each.
    others = [sample(case)[2:] for _ in range(4)]
    results = ranks.run(run, table, name, tensors, grads, shape, kernels)
    expected = [_all(p, len(shape)) for p in (*case.outputs, *case.grads)]
    for found, placed, forward, backward in results:
        assert (forward, backward) == (case.forward, case.backward)
        assert placed[: len(expected)] == expected
        for ours, firsts in zip(found, results[0][0], strict=True):
            assert ours is firsts is None or torch.equal(ours, firsts)
    for place, (actual, reference, base) in enumerate(zip(results[0][0], exact, plain, strict=True)):
        if actual is None:
            assert base is None
        else:
            more = [(e[place], b[place]) for e, b in others]
            check_error(actual, reference, base, gradient=place >= len(grads), what=f"{name} {place}", more=more)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(two_ranks, name):
    check(two_ranks, "CASES", name, (2,))


@pytest.mark.parametrize("name", CASES)
def test_four_ranks(four_ranks, name):
    check(four_ranks, "CASES", name, (4,))


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_of_two_dimensions(four_ranks, name):
    check(four_ranks, "MESHES", name, (2, 2))


@pytest.mark.interpreter
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kernels])
def test_the_kernels(two_ranks, name):
    check(two_ranks, "CASES", name, (2,), kernels=True)


def test_every_operator_has_a_rule():
    from fusedops.distributed.rules import RULES

    ops = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("fusedops::")}
    assert set(RULES) == {op for op in ops if not op.startswith("test_")}


def spread(mesh, tensor, *placements):
    placements = placements if len(placements) == mesh.ndim else placements * mesh.ndim
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def inference(rank, world):
    """The operators without a gradient: each result, placed as expected, without a collective."""
    torch.manual_seed(0)
    mesh = mesh_of(world)
    x, weight, bias = torch.randn(4, 6, 64), torch.randn(8, 64), torch.randn(8)
    x8, scale_x = fusedops.quantize_fp8(x, per_row=True)
    w8, scale_w = fusedops.quantize_fp8(weight, per_row=True)
    w4, scales = fusedops.quantize_weight(weight, bits=4, group_size=16)
    k, v, q = torch.randn(4, 4, 16, 8), torch.randn(4, 4, 16, 8), torch.randn(4, 8, 2, 8)
    new_k, new_v = torch.randn(4, 4, 2, 8), torch.randn(4, 4, 2, 8)
    lengths, table = torch.tensor([3, 9, 0, 14]), torch.arange(4)[:, None]

    def fp8(x, w, sx, sw, b):
        return fusedops.fp8_linear(x, w, sx, sw, b, out_dtype=torch.float32)

    def quantized(x, w, s, b, activation="relu"):
        return fusedops.quantized_linear(x, w, s, b, activation, group_size=16)

    def decode(q, k, v, lengths, new_k, new_v):
        return fusedops.attention_decode(q, k, v, cache_seqlens=lengths, k=new_k, v=new_v)

    def paged(q, k, v, lengths, table):
        return fusedops.attention_decode(q, k, v, cache_seqlens=lengths, block_table=table)

    f8, w4s, cache = (x8, w8, scale_x, scale_w, bias), (x, w4, scales, bias), (q, k, v, lengths, new_k, new_v)
    cases = [
        (fp8, f8, (S(1), R, S(1), R, R), S(1)),
        (fp8, f8, (R, S(0), R, S(0), S(0)), S(2)),
        (fp8, f8, (S(2), S(1), R, R, R), P),
        (quantized, w4s, (S(0), R, R, R), S(0)),
        (quantized, w4s, (R, S(0), S(0), S(0)), S(2)),
        (lambda *a: quantized(*a, None), w4s, (S(2), S(1), S(1), R), P),
        (decode, cache, (S(0),) * 6, S(0)),
        (decode, cache, (S(1), S(1), S(1), R, S(1), S(1)), S(1)),
        (paged, (q, k, v, lengths, table), (S(1), S(1), S(1), R, R), S(1)),
    ]
    for function, tensors, placements, expected in cases:
        given = [spread(mesh, t.clone(), p) for t, p in zip(tensors, placements, strict=True)]
        with torch.no_grad():
            with CommDebugMode() as mode:
                result = function(*given)
            whole_tensors = [t.clone() for t in tensors]
            single = function(*whole_tensors)
        assert not counts(mode)
        assert result.placements == (expected,)
        torch.testing.assert_close(whole(result), single)
        if function is decode:  # which writes to the cache
            for ours, theirs in zip(given, whole_tensors, strict=True):
                assert torch.equal(whole(ours), theirs)


def test_inference_operators(two_ranks, four_ranks):
    two_ranks.run(inference)
    four_ranks.run(inference)


def options_are_told_apart(rank, world):
    """DTensor remembers how a call was placed: not for a call with other options."""
    mesh = mesh_of(world)
    x, w = (spread(mesh, torch.randn(4, 16), S(1)), spread(mesh, torch.randn(8, 16), S(1)))
    for _ in range(2):
        assert fusedops.linear(x, w).placements == (P,)
        assert fusedops.linear(x, w, activation="relu").placements == (R,)
        x2 = spread(mesh, torch.randn(4, 4, 16), S(0))
        assert fusedops.rms_norm(x2, (4, 16)).placements == fusedops.rms_norm(x2, 16).placements == (S(0),)
        x3 = spread(mesh, torch.randn(4, 4, 16), S(1))
        assert fusedops.rms_norm(x3, 16).placements == (S(1),)
        assert fusedops.rms_norm(x3, (4, 16)).placements == (R,)
        q = spread(mesh, torch.randn(2, 4, 4, 8), S(2))
        assert fusedops.attention(q, q, q, causal=True).placements == (R,)
        k = spread(mesh, torch.randn(2, 4, 4, 8), R)
        assert fusedops.attention(q, k, k).placements == (S(2),)


def test_options_are_told_apart(two_ranks):
    two_ranks.run(options_are_told_apart)


def dropped(rank, world, shape):
    """Which elements are dropped, by how the tensors are placed; two draws of the last."""
    mesh = mesh_of(*shape)
    eye, columns = spread(mesh, torch.eye(64), R), spread(mesh, torch.eye(64), *[R] * (len(shape) - 1), S(0))
    found = []
    for placements in ((R,) * len(shape), (S(0),) * len(shape), (*(R,) * (len(shape) - 1), S(0))):
        torch.manual_seed(5)
        x = spread(mesh, torch.ones(16, 64), *placements).requires_grad_()
        _, y = fusedops.add_rms_norm(x, x * 0, 64, dropout_p=0.5)
        assert y.placements == placements
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(whole(grad), whole(y))  # the backward draws the same
        (grad,) = torch.autograd.grad(fusedops.linear(x, eye, dropout_p=0.5).sum(), x)
        assert grad.placements == placements
        found.append(whole(y))
    y = fusedops.linear(spread(mesh, torch.ones(16, 64), R), columns, dropout_p=0.5)
    assert y.placements[-1] == S(1)
    found.append(whole(y))
    q, v = torch.zeros(2, 8, 16, 8), torch.ones(2, 8, 16, 8)
    for dim in (0, 1):
        placements = (*(R,) * (len(shape) - 1), S(dim))
        found.append(whole(fusedops.attention(*(spread(mesh, t, *placements) for t in (q, q, v)), dropout_p=0.5)))
    return found


def _masks_differ(parts):
    return all(not torch.equal(a, b) for i, a in enumerate(parts) for b in parts[:i])


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
def test_dropout(two_ranks, four_ranks, shape):
    """Ranks with other rows draw another mask, ranks with the same rows the same; half is dropped."""
    ranks = two_ranks if shape == (2,) else four_ranks
    results = ranks.run(dropped, shape)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    replicated, sharded, last, columns, *attention = results[0]
    for mask in (replicated, sharded, last, columns):
        assert set(mask.unique().tolist()) == {0.0, 2.0}
        assert 0.4 < (mask == 0).double().mean() < 0.6
    assert _masks_differ(sharded.chunk(ranks.world))
    assert _masks_differ(last.chunk(shape[-1]))
    assert _masks_differ(columns.chunk(shape[-1], 1))
    for dim, out in enumerate(attention):
        assert _masks_differ(out.chunk(shape[-1] if dim else min(shape[-1], 2), dim))


def refusals(rank, world):
    mesh = mesh_of(world)
    x, w = spread(mesh, torch.ones(4, 16), S(1)), spread(mesh, torch.ones(16, 16), S(1))
    rows = spread(mesh, torch.ones(4, 16), S(0))

    def message(function, kind=RuntimeError):
        with pytest.raises(kind) as caught:
            function()
        return str(caught.value)

    # Where something is dropped the result must be sharded as the inputs are: here it could not be at all.
    row = spread(mesh, torch.ones(16), S(0))
    text = message(lambda: fusedops.add_rms_norm(row, row, 16, dropout_p=0.5))
    assert "cannot run on tensors placed so without moving seed" in text
    assert "docs/distributed.md" in text
    # A sum's terms cannot be dropped from: the inputs are moved, as for an activation.
    assert not fusedops.linear(x, w, dropout_p=0.5).placements[0].is_partial()
    # A rule may read the numbers of batch and head, which a shard has not.
    q = spread(mesh, torch.ones(2, 2, 4, 8), S(0))
    text = message(lambda: fusedops.attention(q, q, q, document_ids=torch.zeros(4, dtype=torch.int64)))
    assert "to_local" in text
    # main_grad cannot hold a part of a sum: the rows are gathered.
    weight = torch.nn.Parameter(spread(mesh, torch.ones(16, 16), R))
    weight.main_grad = spread(mesh, torch.zeros(16, 16), R)
    fusedops.linear(rows, weight, fuse_wgrad_accumulation=True).sum().backward()
    assert torch.equal(whole(weight.main_grad), torch.full((16, 16), 4.0))
    # A cache is written to where it lies.
    cache = spread(mesh, torch.zeros(4, 4, 8, 8), S(2))
    new = spread(mesh, torch.ones(4, 4, 1, 8), R)
    lengths = spread(mesh, torch.zeros(4, dtype=torch.int64), R)
    text = message(lambda: fusedops.append_kv(new, new, cache, cache, cache_seqlens=lengths))
    assert "without moving keys, values" in text
    # A wrong argument is one for a DTensor too, told in sizes of the whole.
    assert "(4, 16)" in message(lambda: fusedops.rms_norm(rows, 8), ValueError)
    assert "of normalized_shape (16,)" in message(
        lambda: fusedops.rms_norm(rows, 16, spread(mesh, torch.ones(8), R)), ValueError
    )
    # A plain tensor beside a DTensor, as with torch's operators.
    assert "mixed torch.Tensor and DTensor" in message(lambda: fusedops.rms_norm(rows, 16, torch.ones(16)))


def test_refusals(two_ranks):
    two_ranks.run(refusals)


def accumulated(rank, world):
    """The weight's gradient is added in place to a main_grad that is sharded as the weight is."""
    torch.manual_seed(0)
    mesh, x, w = mesh_of(world), torch.randn(4, 16), torch.randn(8, 16)
    for of_input, of_weight in ((R, S(0)), (S(1), S(1)), (R, R)):
        weight = torch.nn.Parameter(spread(mesh, w, of_weight))
        weight.main_grad = main = spread(mesh, torch.ones(8, 16), of_weight)
        local = main.to_local().data_ptr()
        with CommDebugMode() as mode:
            fusedops.linear(spread(mesh, x, of_input), weight, fuse_wgrad_accumulation=True).sum().backward()
        assert weight.grad is None
        assert main.to_local().data_ptr() == local
        assert not counts(mode)
        torch.testing.assert_close(whole(main), 1 + x.sum(0).expand(8, 16))


def test_main_grad(two_ranks):
    two_ranks.run(accumulated)


def compiled(rank, world):
    """Traced in one graph, it is the same, dropout too, and the rules are there though nothing was called before."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch.manual_seed(0)
    mesh = mesh_of(world)
    x, w, n = torch.randn(4, 6, 16), torch.randn(32, 16), torch.randn(16)

    def block(x, r, n, w):
        y, stream = fusedops.add_rms_norm(x, r, 16, n, dropout_p=0.5)
        z = fusedops.linear(y, w, None, "gelu")
        q = z.unflatten(-1, (4, 8)).transpose(1, 2)
        return fusedops.attention(q, q, q, causal=True), stream

    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    results = []
    for function in (block, torch.compile(block, backend=aot_autograd(fw_compiler=keep), fullgraph=True)):
        torch.manual_seed(1)
        leaves = [spread(mesh, t, p).requires_grad_() for t, p in ((x, S(0)), (x, S(0)), (n, R), (w, R))]
        out, stream = function(*leaves)
        (out.sum() + stream.sum()).backward()
        results.append([whole(t) for t in (out, stream, *(leaf.grad for leaf in leaves))])
    targets = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert {"fusedops.norm.default", "fusedops.linear_backward.default"} <= targets
    assert not any("c10d" in target for target in targets)
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(eager, traced)


def test_compiled(two_ranks):
    two_ranks.run(compiled)


def test_torch_compile_is_the_first_to_meet_a_dtensor():
    """The rules are registered while a graph is traced, too; and importing fusedops does not import DTensor."""
    code = """
import sys, torch, fusedops
assert "torch.distributed.tensor" not in sys.modules
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from torch.distributed.tensor import distribute_tensor, Shard
mesh = dist.init_device_mesh("cpu", (1,))
x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])
print(torch.compile(lambda x: fusedops.rms_norm(x, 8), backend="aot_eager", fullgraph=True)(x).placements)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "(Shard(dim=0),)", done.stderr


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "distributed.md").read_text()


def test_the_pages_python_runs():
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    shown = "".join(re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL))
    # A process of its own: the group that the page makes is the only one.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == shown, done.stderr


def test_the_page_lists_every_operator():
    from fusedops.distributed.rules import RULES

    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE, re.MULTILINE)
    assert {name for name, _ in rows} == {name for name in RULES if "backward" not in name}
    functions = {name for _, cell in rows for name in re.findall(r"`(\w+)`", cell)}
    public = {n for n in dir(fusedops) if hasattr(getattr(fusedops, n), "__fusedops_reasons__")}
    assert public <= functions
