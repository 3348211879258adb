"""Jagged nested tensors in ``scaled_dot_product_attention``: torch's own function, and each sequence alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusedops
from tests.attention.packed import each_alone, ends
from tests.attention.problems import double, exact, gradients, plain
from tests.harness.errors import check_error
from tests.harness.tensors import randn

SDPA = fusedops.scaled_dot_product_attention


def jagged(lengths, heads, size, runner, dtype=torch.float32, offsets=None):
    """(values, a nested tensor (batch, heads, jagged length, size) of them)."""
    values = randn(sum(lengths), heads, size, dtype=dtype, device=runner.device, requires_grad=True)
    offsets = ends(lengths, runner.device) if offsets is None else offsets
    return values, torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)


def alone(values, lengths, grads, function, **options):
    """(values of the result, gradients) of a function of tests.attention.problems, each sequence alone."""
    options["causal"] = options.pop("is_causal", False)
    options.pop("enable_gqa", None)
    if function is exact:
        values, grads = [double(t) for t in values], grads.double()
    leaves = [t.detach().requires_grad_() for t in values]
    (out, _), results = gradients(each_alone(function, *lengths), leaves, (grads, None), **options)
    return out, results


# name: (lengths of queries, of keys, heads, key heads, size, value size, options)
CALLS = {
    "one length": ((5, 9, 20), None, 2, 2, 16, 16, {}),
    "longer than a tile": ((70, 3), None, 2, 2, 16, 16, {"is_causal": True}),
    "queries and keys differ": ((15, 9, 20), (27, 30, 16), 2, 2, 16, 16, {}),
    "queries and keys differ, causal": ((15, 9, 40), (27, 30, 46), 2, 2, 16, 16, {"is_causal": True}),
    "empty sequences": ((0, 9, 34, 0), (7, 0, 33, 0), 2, 2, 16, 16, {"scale": -0.3}),
    "grouped heads": ((5, 9, 20), None, 4, 2, 16, 16, {"enable_gqa": True}),
    "another size of values": ((5, 9, 20), None, 2, 2, 24, 40, {"is_causal": True, "scale": 0.2}),
    "no sequences": ((), None, 2, 2, 16, 16, {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_each_sequence_alone(runner, call, dtype):
    of_q, of_k, heads, kv_heads, size, size_v, options = CALLS[call]
    q, query = jagged(of_q, heads, size, runner, dtype)
    k, key = jagged(of_q if of_k is None else of_k, kv_heads, size, runner, dtype)
    v, value = jagged(of_q if of_k is None else of_k, kv_heads, size_v, runner, dtype)
    out = SDPA(query, key, value, **options)
    assert out.is_nested
    assert out.shape[:2] == query.shape[:2]
    assert out.shape[2] == query.shape[2]  # the same jagged length, so that the result may be added to query
    assert out.shape[3] == size_v
    out = out.transpose(1, 2).values()
    grad = randn(*out.shape, dtype=dtype, device=runner.device)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    if not of_q:
        assert out.shape == (0, heads, size_v)
        return
    lengths = of_q, of_k or of_q
    truth, true_grads = alone((q, k, v), lengths, grad, exact, **options)
    base, base_grads = alone((q, k, v), lengths, grad, plain, **options)
    check_error(out, truth, base, what="out")
    for name, *results in zip(("query", "key", "value"), grads, true_grads, base_grads, strict=True):
        check_error(*results, gradient=True, what=f"gradient of {name}")


@pytest.mark.parametrize("grouped", [False, True], ids=["", "enable_gqa"])
def test_is_torchs_function(runner, grouped):
    """torch's own jagged attention on a CPU takes neither causal, nor grouped heads, nor empty sequences."""
    offsets = torch.tensor([0, 5, 14, 34], device=runner.device)
    leaves, nested = zip(*(jagged((5, 9, 20), 2, 16, runner, offsets=offsets) for _ in range(3)), strict=True)
    ours, torchs = SDPA(*nested, enable_gqa=grouped), F.scaled_dot_product_attention(*nested)
    assert ours.shape == torchs.shape
    assert ours.layout == torchs.layout
    grad = randn(34, 2, 16, device=runner.device)
    results = []
    for out in (ours, torchs):
        values = out.transpose(1, 2).values()
        results.append((values, *torch.autograd.grad(values, leaves, grad)))
    truth, true_grads = alone(leaves, ((5, 9, 20),) * 2, grad, exact)
    for place, (ours, torchs, exactly) in enumerate(zip(*results, (truth, *true_grads), strict=True)):
        check_error(ours, exactly, torchs, gradient=place > 0)


def test_the_result_goes_on_as_torchs_does(runner):
    """Transposed back, flattened and added to what it came from, without another length."""
    _, query = jagged((5, 9, 20), 2, 16, runner)
    out = SDPA(query, query, query)
    flat = out.transpose(1, 2).flatten(-2)
    assert flat.shape[2] == 32
    residual = flat + query.transpose(1, 2).flatten(-2)
    assert [len(t) for t in residual.unbind()] == [5, 9, 20]


def test_one_offset_tensor_is_not_needed(runner):
    """Keys and values that were made apart, of the same lengths."""
    lengths = (5, 9, 20)
    offsets = torch.tensor([0, *lengths], device=runner.device).cumsum(0)
    q, query = jagged(lengths, 2, 16, runner, offsets=offsets)
    k, key = jagged(lengths, 2, 16, runner, offsets=offsets)
    v, value = jagged(lengths, 2, 16, runner, offsets=offsets)
    apart = (torch.nested.nested_tensor_from_jagged(t, offsets.clone()).transpose(1, 2) for t in (q, k, v))
    assert torch.equal(SDPA(*apart).values(), SDPA(query, key, value).values())


@pytest.mark.parametrize("kind", ["transposed", "contiguous", "strided"])
def test_values_of_any_layout(runner, kind):
    q, query = jagged((5, 9, 20), 2, 16, runner)
    expected = SDPA(query, query, query)
    if kind == "transposed":
        values = q.detach().transpose(0, 1).contiguous().requires_grad_()  # (heads, tokens, size) in memory
        other = torch.nested.nested_tensor_from_jagged(values, query.offsets(), jagged_dim=2)
    elif kind == "contiguous":
        values, other = q, query.contiguous()
    else:
        values = torch.stack((q, q), -1).detach().requires_grad_()
        other = torch.nested.nested_tensor_from_jagged(values[..., 0], query.offsets()).transpose(1, 2)
    out = SDPA(other, other, other)
    assert torch.equal(out.values(), expected.values())
    one, two = (torch.autograd.grad(o.values().sin().sum(), t)[0] for o, t in ((out, values), (expected, q)))
    one = {"transposed": lambda: one.transpose(0, 1), "contiguous": lambda: one, "strided": lambda: one[..., 0]}[kind]()
    assert torch.equal(one, two)


STARTS, COUNTS, PADDED = (1, 0, 2, 7), (19, 24, 15, 0), 24


@pytest.mark.parametrize(
    ("holes_of", "causal"), [("queries and keys", False), ("queries and keys", True), ("keys", True), ("queries", True)]
)
def test_holes(runner, holes_of, causal):
    """Parts of padded tensors: what lies outside of them is not read, even if it is NaN, and gets no gradient."""
    starts, counts = (torch.tensor(n, device=runner.device) for n in (STARTS, COUNTS))
    places = torch.arange(PADDED, device=runner.device)
    inside = (places >= starts[:, None]) & (places < (starts + counts)[:, None])
    padded = [randn(4, PADDED, 2, 16, device=runner.device) for _ in range(3)]
    holed, leaves, nested = [True] * 3, [], []
    if holes_of == "keys":
        holed = [False, True, True]
    elif holes_of == "queries":
        holed = [True, False, False]
    offsets = ends(COUNTS, runner.device)
    whole = torch.nested.narrow(padded[0], 1, starts, counts, layout=torch.jagged)
    for values, has_holes in zip(padded, holed, strict=True):
        if has_holes:
            leaf = values.masked_fill(~inside[..., None, None], float("nan")).requires_grad_()
            view = torch.nested.nested_tensor_from_jagged(leaf.flatten(0, 1), whole.offsets(), whole.lengths())
        else:
            leaf = values[inside].requires_grad_()
            view = torch.nested.nested_tensor_from_jagged(leaf, offsets)
        leaves.append(leaf)
        nested.append(view.transpose(1, 2))
    out = SDPA(*nested, is_causal=causal)
    assert out.shape[2] == nested[0].shape[2]
    assert [t.shape[1] for t in out.unbind()] == list(COUNTS)
    grad = randn(sum(COUNTS), 2, 16, device=runner.device)
    parts = torch.cat([t.transpose(0, 1) for t in out.unbind()])
    grads = torch.autograd.grad(parts, leaves, grad)
    packed = [v[inside] for v in padded]
    truth, true_grads = alone(packed, (COUNTS,) * 2, grad, exact, is_causal=causal)
    base, base_grads = alone(packed, (COUNTS,) * 2, grad, plain, is_causal=causal)
    check_error(parts, truth, base, what="out")
    for ours, exactly, torchs, has_holes in zip(grads, true_grads, base_grads, holed, strict=True):
        if has_holes:
            assert (ours[~inside] == 0).all()
            ours = ours[inside]
        check_error(ours, exactly, torchs, gradient=True)


def test_holes_get_no_gradient_whatever_arrives(runner):
    """A sum over the values sends a gradient to rows in holes too."""
    padded = randn(2, 6, 2, 16, device=runner.device, requires_grad=True)
    counts = torch.tensor([2, 4], device=runner.device)
    nested = torch.nested.narrow(padded, 1, torch.tensor([1, 2], device=runner.device), counts, layout=torch.jagged)
    nested = nested.transpose(1, 2)
    (grad,) = torch.autograd.grad(SDPA(nested, nested, nested).values().sum(), padded)
    assert (grad[0, 0] == 0).all()
    assert (grad[0, 3:] == 0).all()
    assert (grad[1, :2] == 0).all()
    assert (grad[0, 1:3] != 0).any()


def test_without_heads(runner):
    """(batch, jagged length, size): one head, as torch's function has it for three dimensions."""
    values = randn(34, 16, device=runner.device, requires_grad=True)
    offsets = torch.tensor([0, 5, 14, 34], device=runner.device)
    nested = torch.nested.nested_tensor_from_jagged(values, offsets)
    out = SDPA(nested, nested, nested, is_causal=True)
    assert out.shape == nested.shape
    _, query = jagged((5, 9, 20), 1, 16, runner, offsets=offsets)
    query = torch.nested.nested_tensor_from_jagged(values[:, None], offsets).transpose(1, 2)
    expected = SDPA(query, query, query, is_causal=True)
    assert torch.equal(out.values(), expected.values()[0])
    grads = [torch.autograd.grad(o.values().sin().sum(), values)[0] for o in (out, expected)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("shape", [(9, 8), (2, 9, 8)], ids=["four dimensions", "five dimensions"])
def test_a_jagged_batch(runner, shape):
    """Another dimension is jagged: torch's function works on the values, as on a dense tensor."""
    leaves = [randn(7, *shape, device=runner.device, requires_grad=True) for _ in range(3)]
    offsets = torch.tensor([0, 3, 3, 7], device=runner.device)
    q, k, v = (torch.nested.nested_tensor_from_jagged(t, offsets) for t in leaves)
    ours, torchs = SDPA(q, k, v, is_causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert ours.shape == torchs.shape
    torch.testing.assert_close(ours.values(), torchs.values())
    grads = [torch.autograd.grad(o.values().sin().sum(), leaves) for o in (ours, torchs)]
    torch.testing.assert_close(*grads)
    assert fusedops.explain(SDPA, q, k, v).reasons == fusedops.explain(SDPA, *leaves).reasons


def test_dropout(runner):
    """Reproducible, about as many weights dropped as asked for, and scaled so that the mean stays."""
    _, query = jagged((40, 60), 2, 16, runner)
    values = torch.ones(100, 2, 16, device=runner.device)
    value = torch.nested.nested_tensor_from_jagged(values, query.offsets()).transpose(1, 2)
    outs = []
    for _ in range(2):
        torch.manual_seed(4)
        outs.append(SDPA(query, query, value, dropout_p=0.5).values())
    assert torch.equal(*outs)
    assert 0.9 < float(outs[0].detach().mean()) < 1.1
    assert (outs[0] != 1).all()
    gone = SDPA(query, query, value, dropout_p=1.0)
    assert (gone.values() == 0).all()


def test_autocast(runner):
    q, query = jagged((5, 9), 2, 16, runner)
    with torch.autocast(runner.device.type, dtype=torch.bfloat16):
        out = SDPA(query, query, query)
    assert out.dtype == torch.bfloat16
    expected = SDPA(*(query.bfloat16() for _ in range(3)))
    assert torch.equal(out.values(), expected.values())
    (grad,) = torch.autograd.grad(out.values().float().sum(), q)
    assert grad.dtype == torch.float32


@pytest.mark.parametrize("holes", [False, True], ids=["", "holes"])
def test_compiled_equals_eager(kernel_runner, holes):
    """With holes the forward alone, to be quick."""

    def function(query):
        return SDPA(query.sin(), query, query, is_causal=True).cos().values()

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    values = randn(14, 2, 16, device=kernel_runner.device, requires_grad=not holes)
    offsets = torch.tensor([0, 5, 14], device=kernel_runner.device)
    lengths = torch.tensor([4, 7], device=kernel_runner.device) if holes else None
    nested = torch.nested.nested_tensor_from_jagged(values, offsets, lengths, min_seqlen=4, max_seqlen=9)
    outs = [call(nested.transpose(1, 2)) for call in (function, compiled)]
    assert torch.equal(*outs)
    if not holes:
        assert torch.equal(*(torch.autograd.grad(out.square().sum(), values)[0] for out in outs))


def test_explain(runner):
    _, query = jagged((5, 9), 2, 16, runner)
    with fusedops.backend("auto"):
        wide = query.double()
        assert any("float64" in reason for reason in fusedops.explain(SDPA, wide, wide, wide).reasons)
        if runner.kernels:
            assert fusedops.explain(SDPA, query, query, query).backend == "triton"


def nest(*lengths, heads=2, size=8, dtype=torch.float32):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.ones(sum(lengths), heads, size, dtype=dtype)
    return torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)


QUERY = nest(2, 3)
DENSE = torch.ones(2, 2, 3, 8)
FOUR_HEADS = nest(2, 3, heads=4)

WRONG = {
    "key is dense": (TypeError, "key must be a nested tensor of layout torch.jagged", (QUERY, DENSE, DENSE), {}),
    "query is dense": (TypeError, "key must be a strided tensor", (DENSE, QUERY, QUERY), {}),
    "value is None": (TypeError, "value must be a nested tensor", (QUERY, QUERY, None), {}),
    "value is of another dtype": (TypeError, "value must be of the dtype of query", (QUERY, QUERY, QUERY.half()), {}),
    "key is of integers": (TypeError, "key must be a floating-point tensor", (QUERY, QUERY.long(), QUERY), {}),
    "other sequences": (ValueError, "key must be of as many sequences as query, 2", (QUERY, nest(2, 3, 4), QUERY), {}),
    "lengths of value differ": (ValueError, "value must be of sequences as long as key's",
                                  (QUERY, QUERY, nest(3, 2)), {}),
    "tokens of value differ": (ValueError, "value must be of key's 2 heads and 5 tokens",
                                 (QUERY, QUERY, nest(3, 4)), {}),
    "heads of value differ": (ValueError, "value must be of key's 2 heads and 5 tokens",
                                (QUERY, QUERY, FOUR_HEADS), {}),
    "heads differ": (ValueError, "key must be of query's 4 heads .enable_gqa", (FOUR_HEADS, QUERY, QUERY), {}),
    "heads do not divide": (ValueError, "key must be of a number of heads that divides query's 4",
                            (FOUR_HEADS, nest(2, 3, heads=3), nest(2, 3, heads=3)), {"enable_gqa": True}),
    "another head size": (ValueError, "key must be of query's head size 8", (QUERY, nest(2, 3, size=7), QUERY), {}),
    "another jagged dimension": (ValueError, "key must be jagged along dimension 2",
                                 (QUERY, QUERY.transpose(1, 2), QUERY), {}),
    "two dimensions": (ValueError, "query must be of three or more dimensions",
                       (torch.nested.nested_tensor_from_jagged(torch.ones(5), torch.tensor([0, 5])), QUERY, QUERY), {}),
    "a mask": (ValueError, "attn_mask must be None where query, key and value are nested",
               (QUERY, QUERY, QUERY, torch.ones(3, 3)), {}),
    "dropout_p is too large": (ValueError, "dropout_p must be from 0 to 1", (QUERY, QUERY, QUERY), {"dropout_p": 2.0}),
    "is_causal is a number": (TypeError, "is_causal must be a bool", (QUERY, QUERY, QUERY), {"is_causal": 1}),
    "scale is a string": (TypeError, "scale must be a number", (QUERY, QUERY, QUERY), {"scale": "low"}),
    "enable_gqa is a number": (TypeError, "enable_gqa must be a bool", (QUERY, QUERY, QUERY), {"enable_gqa": 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_wrong_argument(case, backend):
    error, match, args, options = WRONG[case]
    for call in (SDPA, lambda *a, **o: fusedops.explain(SDPA, *a, **o)):
        with fusedops.backend(backend), pytest.raises(error, match=f"scaled_dot_product_attention: {match}"):
            call(*args, **options)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_the_strided_layout_is_refused():
    strided = torch.nested.nested_tensor([torch.ones(2, 3, 8), torch.ones(2, 5, 8)])
    with pytest.raises(TypeError, match=r"query must be a nested tensor of layout torch\.jagged.*torch\.strided"):
        SDPA(strided, strided, strided)
