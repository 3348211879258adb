"""Packed sequences of unequal lengths: each is attended to as if it were alone."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops.attention.options import Options
from fusedops.runtime.backend import HAS_TRITON
from fusedops.runtime.dropout import draw_seed, keep_scale
from tests.attention.launches import Watch, launching
from tests.attention.packed import ends, expected, incoming
from tests.attention.problems import NAMES, double, exact, gradients, names_of, plain
from tests.harness.errors import check_error
from tests.harness.tensors import randn

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _near(batch, head, i, j, args):
        return (i - j) % 7 != tl.load(args[0] + batch) + head

    @triton.jit
    def _bend(score, batch, head, i, j, args):
        return score * (1.0 + 0.5 * batch) + 0.03 * (i - 2 * j + head)

    @triton.jit
    def _unbend(grad, score, batch, head, i, j, args):
        return grad * (1.0 + 0.5 * batch)


# Longer than a tile (64 in the interpreter), shorter, without keys, without queries. Both sides end in a tail.
LENGTHS_Q, LENGTHS_K = (5, 70, 9, 0), (9, 66, 0, 4)
TAIL_Q, TAIL_K = 3, 2
SMALL = (5, 9, 0), (9, 3, 4)
# The errors of fewer elements are a matter of luck: they are compared with those of more numbers.
_FEW = 1024


def inputs_of(
    runner,
    lengths_q=LENGTHS_Q,
    lengths_k=LENGTHS_K,
    tail_q=TAIL_Q,
    tail_k=TAIL_K,
    heads=2,
    kv_heads=1,
    d=16,
    dv=16,
    dtype=torch.float32,
    layout="contiguous",
    poison=True,
):
    """(q, k, v), which require gradients. ``poison``: NaN past the last sequence."""
    rows_q, rows_k = sum(lengths_q), sum(lengths_k)
    make = {"dtype": dtype, "device": runner.device, "layout": layout}
    tensors = [
        randn(rows_q + tail_q, heads, d, **make),
        randn(rows_k + tail_k, kv_heads, d, **make),
        randn(rows_k + tail_k, kv_heads, dv, **make),
    ]
    if poison and layout != "expanded":
        for tensor, rows in zip(tensors, (rows_q, rows_k, rows_k), strict=True):
            tensor[rows:] = float("nan")
    return tuple(t.requires_grad_() for t in tensors)


def varlen(cu_q, cu_k, longest=(None, None)):
    def function(q, k, v, mask=None, slopes=None, sinks=None, **options):
        return fusedops.attention_varlen(
            q, k, v, cu_q, cu_k, *longest, attn_mask=mask, alibi_slopes=slopes, sinks=sinks, return_lse=True, **options
        )

    return function


def check(
    runner,
    make,
    lengths_q=LENGTHS_Q,
    lengths_k=LENGTHS_K,
    *,
    longest=None,
    cu_dtype=torch.int64,
    rules=None,
    rules_alone=None,
    **options: Any,
):
    """Output, lse and every gradient keep the error rule; what lies past the last sequence is exactly zero.

    Args:
        make: gives (q, k, v, attn_mask, alibi_slopes, sinks) or some first ones of these.
        rules: score_mod and mask_mod. ``rules_alone`` gives those of a sequence by its number.
    """
    inputs = make()
    lengths = lengths_q, lengths_k
    if longest is None:
        longest = (None, None) if len(inputs) < 4 or inputs[3] is None else tuple(map(max, lengths))
    cu = [ends(n, runner.device, cu_dtype) for n in lengths]
    grads_in = incoming(inputs)
    outputs, grads = gradients(varlen(*cu, longest), inputs, grads_in, **options, **(rules or {}))
    compare = {"function": plain if rules is None else exact, "lengths": lengths, "rules": rules_alone, **options}
    references = expected(inputs, grads_in, **compare)
    more = []
    if any(0 < result.numel() < _FEW for result in (*outputs, *grads)):
        for _ in range(4):
            others = make()
            more.append(expected(others, incoming(others), **compare))
    names = names_of(inputs)
    for part, what, results in ((0, ("out", "lse"), outputs), (1, [f"gradient of {name}" for name in names], grads)):
        for place, (name, result) in enumerate(zip(what, results, strict=True)):
            (truth, base), *samples = (
                (exactly[part][place].double(), plainly[part][place]) for exactly, plainly in (references, *more)
            )
            samples = samples if result.numel() < _FEW else ()
            check_error(result, truth, base, gradient=part == 1, what=name, more=samples)
    used = sum(lengths_q), sum(lengths_q), sum(lengths_k), sum(lengths_k)
    for tensor, rows in zip((outputs[0], *grads[:3]), used, strict=True):
        assert (tensor[rows:] == 0).all()
    assert (outputs[1][:, used[0] :] == float("-inf")).all()
    return outputs, grads


LENGTHS = {
    "one sequence": ((20,), (30,), (0, 0)),
    "longer than a tile": ((70,), (130,), (0, 0)),
    "several in a tile": ((3, 1, 7, 2), (2, 9, 1, 5), (0, 0)),
    "a tail longer than a tile": ((5, 6), (7, 3), (70, 75)),
    "first empty": ((0, 5, 6), (0, 7, 8), (2, 0)),
    "last empty": ((5, 6, 0), (7, 8, 0), (0, 3)),
    "no queries in between": ((15, 0, 0, 16), (17, 4, 3, 18), (0, 0)),
    "no keys in between": ((15, 4, 3, 16), (17, 0, 0, 18), (0, 0)),
    "all without keys": ((5, 4), (0, 0), (1, 3)),
    "all without queries": ((0, 0), (5, 4), (3, 1)),
    "all empty": ((0, 0, 0), (0, 0, 0), (4, 5)),
    "all empty, no tokens": ((0, 0), (0, 0), (0, 0)),
    "no sequences": ((), (), (4, 5)),
    "no sequences, no tokens": ((), (), (0, 0)),
}


@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(runner, lengths):
    of_q, of_k, tails = LENGTHS[lengths]
    check(runner, lambda: inputs_of(runner, of_q, of_k, *tails), of_q, of_k, cu_dtype=torch.int32)


@pytest.mark.parametrize("lengths", ["no keys in between", "no queries in between", "all empty", "no sequences"])
def test_empty_sequences_with_options(runner, lengths):
    of_q, of_k, tails = LENGTHS[lengths]
    longest = max(of_q, default=0), max(of_k, default=0)

    def make():
        mask = randn(1, 2, longest[0], 1, device=runner.device, requires_grad=True)
        slopes = torch.rand(len(of_q), 2).to(runner.device).requires_grad_()
        sinks = randn(2, device=runner.device, requires_grad=True)
        return (*inputs_of(runner, of_q, of_k, *tails), mask, slopes, sinks)

    check(runner, make, of_q, of_k, longest=longest, causal="bottom_right")


# name: (mask shape or None, kind of mask, shape of slopes or None, sinks, options)
LONGEST = max(LENGTHS_Q), max(LENGTHS_K)
OPTIONS = {
    "top left": (None, None, None, False, {"causal": True}),
    "bottom right": (None, None, None, False, {"causal": "bottom_right", "scale": -0.3}),
    "window": (None, None, None, False, {"window": (4, 2)}),
    "causal window of the top left": (None, None, None, False, {"window": (9, 0), "causal": "top_left"}),
    "softcap, sinks": (None, None, None, True, {"softcap": 1.5, "window": (80, None)}),
    "slopes of heads": (None, None, (2,), False, {}),
    "slopes of sequences": (None, None, (4, 2), False, {"causal": "bottom_right"}),
    "bool mask of sequences": ((4, 1, LONGEST[0], 1), "bool", None, False, {"causal": True}),
    "float mask of two dimensions": (LONGEST, "float", None, False, {}),
    "float mask of keys": ((4, 1, 1, LONGEST[1]), "float", None, False, {}),
    "float mask of queries": ((1, 2, LONGEST[0], 1), "float", None, False, {"causal": "bottom_right"}),
    "a number as a mask": ((), "float", None, False, {}),
    "everything": ((4, 1, *LONGEST), "float", (4, 2), True,
                   {"causal": "bottom_right", "window": (30, 0), "softcap": 2.0, "scale": 0.3}),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options(runner, name):
    mask_shape, kind, slopes_shape, has_sinks, options = OPTIONS[name]

    def make():
        mask = slopes = sinks = None
        if kind == "bool":
            mask = (torch.rand(mask_shape) > 0.3).to(runner.device)
        elif kind == "float":
            mask = randn(*mask_shape, device=runner.device)
            hidden = (torch.rand(mask_shape) < 0.1).to(runner.device) & (mask.numel() > 1)
            mask = mask.masked_fill(hidden, float("-inf")).requires_grad_()
        if slopes_shape is not None:
            slopes = (torch.rand(slopes_shape) * 0.2).to(runner.device).requires_grad_()
        if has_sinks:
            sinks = randn(2, device=runner.device, requires_grad=True)
        return (*inputs_of(runner), mask, slopes, sinks)

    check(runner, make, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits(runner, dtype):
    def make():
        sinks = randn(4, dtype=dtype, device=runner.device, requires_grad=True)
        return *inputs_of(runner, *SMALL, heads=4, kv_heads=2, d=24, dv=40, dtype=dtype), None, None, sinks

    check(runner, make, *SMALL, causal="bottom_right")


@pytest.mark.parametrize("layout", ["transposed", "sliced", "strided"])
def test_layouts(runner, layout):
    check(runner, lambda: inputs_of(runner, *SMALL, layout=layout), *SMALL, causal=True)


def test_views_of_one_projection(runner):
    """q, k and v as slices of one tensor, as models make them."""
    whole = randn(14, 3, 2, 16, device=runner.device, requires_grad=True)
    cu = ends((5, 9), runner.device, torch.int32)
    out = fusedops.attention_varlen(*whole.unbind(1), cu, cu, causal=True)
    parts = [t.detach().contiguous().requires_grad_() for t in whole.unbind(1)]
    expected = fusedops.attention_varlen(*parts, cu, cu, causal=True)
    assert torch.equal(out, expected)
    grad = torch.randn_like(out)
    (together,) = torch.autograd.grad(out, whole, grad)
    assert torch.equal(together, torch.stack(torch.autograd.grad(expected, parts, grad), 1))


def test_mask_longer_than_the_longest_sequence(runner):
    """max_seqlen may be more than the longest length: what lies beyond gets a gradient of zero."""

    def make():
        return *inputs_of(runner, *SMALL), randn(3, 1, 80, 70, device=runner.device, requires_grad=True)

    _, grads = check(runner, make, *SMALL, longest=(80, 70))
    assert (grads[3][:, :, max(SMALL[0]) :] == 0).all()
    assert (grads[3][:, :, :, max(SMALL[1]) :] == 0).all()


def test_rules(runner):
    """A rule's ``batch`` is the number of the sequence, its i and j are places in it."""
    table = torch.tensor([0, 3, 1, 2], device=runner.device)

    def near(batch, head, i, j, table):
        return (i - j) % 7 != table[batch] + head

    def bend(score, batch, head, i, j):
        return score * (1.0 + 0.5 * batch) + 0.03 * (i - 2 * j + head)

    def rules(number):
        return {
            "mask_mod": fusedops.MaskMod(None, (table,), lambda b, h, i, j, t: near(b + number, h, i, j, t)),
            "score_mod": fusedops.ScoreMod(None, definition=lambda s, b, h, i, j: bend(s, b + number, h, i, j)),
        }

    given = {
        "mask_mod": fusedops.MaskMod(_near if HAS_TRITON else None, (table,), near),
        "score_mod": fusedops.ScoreMod(*((_bend, _unbend) if HAS_TRITON else (None,)), definition=bend),
    }
    check(
        runner, lambda: inputs_of(runner), rules=given, rules_alone=rules, causal="bottom_right", softcap=2.0
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout(runner, dtype):
    """Each head's rows of the mask are counted along all tokens, so that sequences draw different numbers."""
    inputs = inputs_of(runner, kv_heads=2, dtype=dtype)
    total = len(inputs[0])
    cu = [ends(lengths, runner.device) for lengths in (LENGTHS_Q, LENGTHS_K)]
    do = randn(total, 2, 16, dtype=dtype, device=runner.device)

    def dropped(q, k, v):
        keep = keep_scale(draw_seed(q), 2 * total, max(LENGTHS_K), 0.4).view(2, total, -1)
        outs, begin_q, begin_k = [], 0, 0
        for n, m in zip(LENGTHS_Q, LENGTHS_K, strict=True):
            parts = [t.transpose(0, 1) for t in (q[begin_q : begin_q + n], k[begin_k : begin_k + m])]
            weights = (parts[0] @ parts[1].mT / 4).softmax(-1)
            weights = (weights * keep[:, begin_q : begin_q + n, :m]).to(q.dtype)
            outs.append((weights @ v[begin_k : begin_k + m].transpose(0, 1)).transpose(0, 1))
            begin_q, begin_k = begin_q + n, begin_k + m
        outs.append(torch.zeros_like(do[: total - begin_q], dtype=q.dtype))
        return torch.cat(outs), None

    def ours(q, k, v):
        return fusedops.attention_varlen(q, k, v, *cu, dropout_p=0.4), None

    (out, _), grads = gradients(ours, inputs, (do, None))
    (base, _), base_grads = gradients(dropped, inputs, (do, None))
    (truth, _), true_grads = gradients(dropped, [double(t) for t in inputs], (do.double(), None))
    check_error(out, truth, base, what="out")
    for name, *results in zip("qkv", grads, true_grads, base_grads, strict=True):
        check_error(*results, gradient=True, what=f"gradient of {name}")


def test_the_longest_lengths_change_nothing(runner):
    q, k, v = (t.detach() for t in inputs_of(runner, *SMALL))
    cu = [ends(lengths, runner.device) for lengths in SMALL]
    results = []
    for longest in ((None, None), (9, 9), (300, 11), (None, 9), (9, None)):
        torch.manual_seed(5)
        options = {"causal": True, "dropout_p": 0.2, "return_lse": True}
        results.append(fusedops.attention_varlen(q, k, v, *cu, *longest, **options))
    for out, lse in results[1:]:
        if runner.kernels:
            assert torch.equal(out, results[0][0])
            assert torch.equal(lse, results[0][1])
        else:  # padded otherwise: torch's products may sum in another order
            torch.testing.assert_close((out, lse), results[0])


@pytest.mark.parametrize("dtypes", [(torch.int32, torch.int64), (torch.int64, torch.int32)], ids=str)
def test_integers_of_both_sizes_and_any_strides(runner, dtypes):
    q, k, v = (t.detach() for t in inputs_of(runner, *SMALL))
    cu_q, cu_k = (ends(n, runner.device, dtype) for n, dtype in zip(SMALL, dtypes, strict=True))
    strided = torch.stack((cu_q, cu_q - 1), 1)[:, 0]
    plainly = fusedops.attention_varlen(q, k, v, *(ends(n, runner.device) for n in SMALL))
    assert torch.equal(fusedops.attention_varlen(q, k, v, strided, cu_k), plainly)


def test_lse_has_the_heads_first(runner):
    q, k, v = inputs_of(runner, *SMALL)
    out, lse = fusedops.attention_varlen(q, k, v, *(ends(n, runner.device) for n in SMALL), return_lse=True)
    assert out.shape == (17, 2, 16)
    assert out.is_contiguous()
    assert (lse.shape, lse.dtype) == ((2, 17), torch.float32)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_no_tokens(runner, sizes):
    q = randn(sizes[0], 4, 8, device=runner.device, requires_grad=True)
    k, v = (randn(sizes[1], 2, 8, device=runner.device, requires_grad=True) for _ in range(2))
    sinks = randn(4, device=runner.device, requires_grad=True)
    cu_q, cu_k = (ends((n,), runner.device) for n in sizes)
    out, lse = fusedops.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True)
    with_sinks = fusedops.attention_varlen(q, k, v, cu_q, cu_k, sinks=sinks)
    assert out.shape == with_sinks.shape == (sizes[0], 4, 8)
    assert lse.shape == (4, sizes[0])
    assert (out == 0).all()
    assert (with_sinks == 0).all()
    for result in (out, with_sinks):
        leaves = [q, k, v] if result is out else [q, k, v, sinks]
        for leaf, grad in zip(leaves, torch.autograd.grad(result.sum(), leaves), strict=True):
            assert grad.shape == leaf.shape
            assert (grad == 0).all()


def test_gradients_past_the_last_sequence_may_be_anything(runner):
    """What a loss sends to tokens that belong to no sequence is not used, even if it is NaN."""
    longest = tuple(map(max, SMALL))
    mask, slopes = randn(1, 2, 1, longest[1], device=runner.device), torch.rand(2).to(runner.device)
    more = (*(t.requires_grad_() for t in (mask, slopes)), randn(2, device=runner.device, requires_grad=True))
    inputs = (*inputs_of(runner, *SMALL), *more)
    cu = [ends(lengths, runner.device) for lengths in SMALL]
    do, dlse = incoming(inputs)
    results = []
    for value in (0.0, float("nan")):
        do[sum(SMALL[0]) :] = value
        dlse[:, sum(SMALL[0]) :] = value
        results.append(gradients(varlen(*cu, longest), inputs, (do, dlse))[1])
    for name, zero, nan in zip(NAMES, *results, strict=True):
        assert torch.equal(zero, nan), name


def test_deterministic(runner):
    def make(*shape):
        return randn(*shape, device=runner.device, requires_grad=True)

    lengths = (70, 5), (66, 9)
    inputs = (*inputs_of(runner, *lengths), make(1, 1, 1, 66), make(2), make(2))
    cu = [ends(n, runner.device) for n in lengths]
    grads = incoming(inputs)
    runs = [gradients(varlen(*cu, (70, 66)), inputs, grads, causal=True) for _ in range(2)]
    for a, b in zip(*[(*outputs, *results) for outputs, results in runs], strict=True):
        assert torch.equal(a, b)


def test_no_gradient_keeps_no_graph(runner):
    with torch.no_grad():
        cu = [ends(lengths, runner.device) for lengths in SMALL]
        assert fusedops.attention_varlen(*inputs_of(runner, *SMALL), *cu).grad_fn is None


# Operators that read a number on the host, or whose result has a size that only the device knows.
_WAITING = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2")


@contextlib.contextmanager
def no_waiting(runner, monkeypatch):
    """Raises where the host reads a tensor: as CUDA does when told to; in the interpreter, outside of kernels."""
    if runner.name == "gpu":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    in_kernel = []

    def refuse(what):
        if not in_kernel:
            raise AssertionError(f"{what} waits for the device")

    def seen(function, _):
        if function.overloadpacket.__name__ in _WAITING:
            refuse(function)

    def guarded(name, method):
        def call(*args, **kwargs):
            refuse(f"Tensor.{name}")
            return method(*args, **kwargs)

        return call

    def launch(run, kernel, *args, **kwargs):
        in_kernel.append(kernel)
        try:
            run(kernel, *args, **kwargs)
        finally:
            in_kernel.pop()

    with monkeypatch.context() as patches, launching(monkeypatch, launch), Watch(seen):
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
            patches.setattr(torch.Tensor, name, guarded(name, getattr(torch.Tensor, name)))
        yield


@pytest.mark.parametrize("longest", [(None, None), (9, 9)], ids=["", "max_seqlen"])
def test_the_host_never_waits(kernel_runner, monkeypatch, longest):
    def make(*shape):
        return randn(*shape, device=kernel_runner.device, requires_grad=True)

    inputs = inputs_of(kernel_runner, *SMALL)
    mask = make(1, 1, *longest) if longest[0] else None
    inputs = (*inputs, mask, make(3, 2), make(2))
    cu = [ends(lengths, kernel_runner.device) for lengths in SMALL]
    leaves = [t for t in inputs if t is not None]
    with no_waiting(kernel_runner, monkeypatch):
        out, lse = varlen(*cu, longest)(*inputs, causal=True, window=(9, 0), dropout_p=0.1)
        grads = torch.autograd.grad([out.sum(), lse[:, :-TAIL_Q].exp().sum()], leaves)
    assert len(grads) == len(leaves)


WAITS = {
    "item": lambda t: t.max().item(),
    "int": lambda t: int(t.max()),
    "bool": lambda t: bool(t[0]),
    "comparison": lambda t: 1 if t[0] > 0 else 2,
    "list": lambda t: t.tolist(),
    "copy": lambda t: t.cpu(),
    "equal": lambda t: torch.equal(t, t),
    "nonzero": lambda t: t.nonzero(),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("wait", WAITS)
def test_waiting_would_show(kernel_runner, monkeypatch, wait):
    with pytest.raises(AssertionError, match="waits for the device"), no_waiting(kernel_runner, monkeypatch):
        WAITS[wait](torch.arange(3))


# name: (cu_seqlens_q, cu_seqlens_k, causal): no boundaries in 87 tokens of queries and 81 of keys.
GARBAGE = {
    "beyond the tensor": ((0, 30, 1_000_000), (0, 70, 90), "bottom_right"),
    "far beyond": ((0, 2**40, 2**41), (0, 2**33, 2**40), False),
    "negative": ((0, -5, 30), (0, -(2**40), 20), "bottom_right"),
    "all negative": ((-7, -5, -1), (-3, -2, -1), False),
    "descending": ((80, 40, 0), (70, 20, 0), "bottom_right"),
    "up and down": ((0, 70, 20), (0, 20, 5), False),
    "first not zero": ((40, 50, 60), (20, 30, 81), "bottom_right"),
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_stays_inside_the_tensors(kernel_runner, garbage):
    """The interpreter raises OutOfBounds where a kernel leaves a tensor. Sequences that overlap may race."""
    inputs = inputs_of(kernel_runner, heads=1, poison=False)
    mask = randn(2, 1, 90, 90, device=kernel_runner.device, requires_grad=True)
    slopes = torch.rand(2, 1).to(kernel_runner.device).requires_grad_()
    *numbers, causal = GARBAGE[garbage]
    cu = [torch.tensor(n, device=kernel_runner.device) for n in numbers]
    overlaps = contextlib.nullcontext()
    if kernel_runner.name == "interpreter" and garbage in ("descending", "up and down"):
        from tests.harness.interpreter import DataRace

        overlaps = contextlib.suppress(DataRace)
    with overlaps:
        out, _ = varlen(*cu, (90, 90))(*inputs, mask, slopes, causal=causal)
        torch.autograd.grad(out.sum(), (*inputs, mask, slopes))
    if kernel_runner.name == "gpu":
        torch.cuda.synchronize()


def test_compiled_equals_eager(kernel_runner):
    """With lengths and numbers of sequences that change."""

    def function(q, k, v, cu_q, cu_k, longest):
        options = {"causal": "bottom_right", "window": (7, 0), "return_lse": True}
        out, lse = fusedops.attention_varlen(q, k, v, cu_q, cu_k, longest, longest, **options)
        return out.sin(), lse

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ((5, 9, 0), (9, 4, 6, 3)):
        inputs = inputs_of(kernel_runner, lengths, lengths, heads=1)
        cu = ends(lengths, kernel_runner.device)
        eager, traced = (f(*inputs, cu, cu, 14) for f in (function, compiled))
        for a, b in zip(eager, traced, strict=True):
            assert torch.equal(a, b)
        grad = torch.randn_like(eager[0])
        for a, b in zip(*(torch.autograd.grad(y[0], inputs, grad) for y in (eager, traced)), strict=True):
            assert torch.equal(a, b)


def test_compiled_equals_eager_on_the_torch_backend():
    """The forward alone: to trace the backward of the definition, which pads, takes long."""
    torch._dynamo.reset()
    compiled = torch.compile(fusedops.attention_varlen, fullgraph=True, backend="aot_eager")
    inputs = [t.detach() for t in inputs_of(SimpleNamespace(device=torch.device("cpu")), *SMALL)]
    cu = [ends(lengths, "cpu") for lengths in SMALL]
    with fusedops.backend("torch"):
        assert torch.equal(*(f(*inputs, *cu, 9, 9) for f in (fusedops.attention_varlen, compiled)))


def test_compiled_without_the_longest_lengths(kernel_runner):
    torch._dynamo.reset()
    compiled = torch.compile(fusedops.attention_varlen, fullgraph=True, backend="aot_eager")
    inputs = [t.detach() for t in inputs_of(kernel_runner, *SMALL)]
    cu = [ends(lengths, kernel_runner.device) for lengths in SMALL]
    assert torch.equal(compiled(*inputs, *cu), fusedops.attention_varlen(*inputs, *cu))


def test_export_then_run_and_backward(kernel_runner):
    class Model(torch.nn.Module):
        def forward(self, q, k, v, cu_q, cu_k):
            return fusedops.attention_varlen(q, k, v, cu_q, cu_k, causal=True)

    inputs = inputs_of(kernel_runner, *SMALL, heads=1)
    cu = [ends(lengths, kernel_runner.device) for lengths in SMALL]
    exported = torch.export.export(Model(), (*inputs, *cu)).module()
    outs = [f(*inputs, *cu) for f in (exported, Model())]
    assert torch.equal(*outs)
    for a, b in zip(*(torch.autograd.grad(out.sum(), inputs) for out in outs), strict=True):
        assert torch.equal(a, b)


def heads_first(tensors):
    return [t.detach().transpose(0, 1)[None].requires_grad_() for t in tensors]


def test_opcheck(kernel_runner):
    q, k, v = heads_first(inputs_of(kernel_runner, (5, 9, 0), (9, 0, 4), heads=1))
    cu = [ends(lengths, kernel_runner.device) for lengths in ((5, 9, 0), (9, 0, 4))]
    options = Options(sequences=cu, bottom_right=True, right=0, scale=0.3)
    torch.library.opcheck(torch.ops.fusedops.attention.default, (q, k, v, *options))


def test_opcheck_without_a_kernel():
    """float64 has no kernel: the ops compute their reference."""
    lengths = (3, 4, 0), (4, 0, 2)
    cpu = torch.device("cpu")
    inputs = [randn(9, h, 8).double().requires_grad_() for h in (2, 1, 1)]
    mask, slopes, sinks = (t.double().requires_grad_() for t in (randn(1, 2, 4, 1), torch.rand(3, 2), randn(2)))
    cu = [ends(n, cpu) for n in lengths]
    options = Options(mask, slopes, sinks, sequences=cu, right=0, scale=0.3)
    out, lse, _ = torch.ops.fusedops.attention(*(t.transpose(0, 1)[None] for t in inputs), *options)
    expected = varlen(*cu, (4, 4))(*inputs, mask, slopes, sinks, causal=True, scale=0.3)
    torch.testing.assert_close((out[0].transpose(0, 1), lse[0]), expected)
    leaves = (*inputs, mask, slopes, sinks)
    used = (out.sum() + lse[..., :7].exp().sum(), expected[0].sum() + expected[1][:, :7].exp().sum())
    torch.testing.assert_close(*(torch.autograd.grad(loss, leaves) for loss in used))


def test_checkpointing(runner):
    inputs = inputs_of(runner, (5, 9), (9, 6), poison=False)
    cu = [ends(n, runner.device) for n in ((5, 9), (9, 6))]

    def function(q, k, v):
        return fusedops.attention_varlen(q.sin(), k, v, *cu, dropout_p=0.3).cos()

    torch.manual_seed(2)
    grads = torch.autograd.grad(function(*inputs).sum(), inputs)
    torch.manual_seed(2)
    checkpoint(function, *inputs, use_reentrant=False).sum().backward()
    for tensor, grad in zip(inputs, grads, strict=True):
        assert torch.equal(tensor.grad, grad)


def test_autocast(runner):
    q, k, v = inputs_of(runner, (5, 9), (9, 6))
    cu = [ends(n, runner.device) for n in ((5, 9), (9, 6))]
    with torch.autocast(runner.device.type, dtype=torch.bfloat16):
        out = fusedops.attention_varlen(q, k, v, *cu)
    assert out.dtype == torch.bfloat16
    expected = fusedops.attention_varlen(*(t.bfloat16() for t in (q, k, v)), *cu)
    assert torch.equal(out, expected)
    assert [g.dtype for g in torch.autograd.grad(out.float().sum(), (q, k, v))] == [torch.float32] * 3


Q, K, V = torch.ones(5, 4, 8), torch.ones(6, 2, 8), torch.ones(6, 2, 3)
CU_Q, CU_K = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 6])
GOOD = (Q, K, V, CU_Q, CU_K)
MASK = torch.ones(3, 4)

WRONG = {
    "q is a list": (TypeError, "q must be a torch.Tensor", ([1.0], K, V, CU_Q, CU_K), {}),
    "k is integral": (TypeError, "k must be a floating-point tensor", (Q, K.long(), V, CU_Q, CU_K), {}),
    "v is sparse": (TypeError, "v must be a strided tensor", (Q, K, V.to_sparse(), CU_Q, CU_K), {}),
    "q has four dimensions": (ValueError, r"q must be of three dimensions \(tokens, heads, head size\)",
                              (Q[None], K, V, CU_Q, CU_K), {}),
    "v has two dimensions": (ValueError, "v must be of three dimensions", (Q, K, V[:, 0], CU_Q, CU_K), {}),
    "v is float16": (TypeError, "v must be of the dtype of q", (Q, K, V.half(), CU_Q, CU_K), {}),
    "k is elsewhere": (ValueError, "k must be on the device of q", (Q, K.to("meta"), V, CU_Q, CU_K), {}),
    "another head size": (ValueError, r"k must be of shape \(tokens, heads, 8\)", (Q, K[..., :7], V, CU_Q, CU_K), {}),
    "heads do not divide": (ValueError, "k must be of a number of heads that divides q's 4",
                            (Q, torch.ones(6, 3, 8), torch.ones(6, 3, 8), CU_Q, CU_K), {}),
    "no key heads": (ValueError, "k must be of a number of heads", (Q, K[:, :0], V[:, :0], CU_Q, CU_K), {}),
    "other tokens of v": (ValueError, r"v must be of shape \(6, 2, head size\)", (Q, K, V[1:], CU_Q, CU_K), {}),
    "other heads of v": (ValueError, r"v must be of shape \(6, 2, head size\)", (Q, K, V[:, :1], CU_Q, CU_K), {}),
    "cu_seqlens_q is a list": (TypeError, "cu_seqlens_q must be an int32 or int64 tensor", (Q, K, V, [0, 5], CU_K), {}),
    "cu_seqlens_k is floating": (TypeError, "cu_seqlens_k must be an int32 or int64 tensor",
                                 (Q, K, V, CU_Q, CU_K.float()), {}),
    "cu_seqlens_q is empty": (ValueError, "cu_seqlens_q must be of one dimension", (Q, K, V, CU_Q[:0], CU_K), {}),
    "cu_seqlens_k has two dimensions": (ValueError, "cu_seqlens_k must be of one dimension",
                                        (Q, K, V, CU_Q, CU_K[None]), {}),
    "cu_seqlens_q is elsewhere": (ValueError, "cu_seqlens_q must be on the device of q",
                                  (Q, K, V, CU_Q.to("meta"), CU_K), {}),
    "other sequences of keys": (ValueError, r"cu_seqlens_k must be of as many sequences as cu_seqlens_q",
                                (Q, K, V, CU_Q, CU_K[:2]), {}),
    "max_seqlen_q is a tensor": (TypeError, "max_seqlen_q must be None or an integer", GOOD,
                                 {"max_seqlen_q": torch.tensor(3)}),
    "max_seqlen_k is a bool": (TypeError, "max_seqlen_k must be None or an integer", GOOD, {"max_seqlen_k": True}),
    "max_seqlen_k is negative": (ValueError, "max_seqlen_k must be None or a length", GOOD, {"max_seqlen_k": -1}),
    "mask without the longest lengths": (ValueError, "attn_mask must be None, or given together with max_seqlen_q",
                                         GOOD, {"attn_mask": MASK, "max_seqlen_q": 3}),
    "mask does not broadcast": (ValueError, r"attn_mask must be of a shape that broadcasts to \(2, 4, 3, 5\)", GOOD,
                                {"attn_mask": MASK, "max_seqlen_q": 3, "max_seqlen_k": 5}),
    "slopes of other sequences": (ValueError, r"alibi_slopes must be of shape \(4,\) or \(2, 4\)", GOOD,
                                  {"alibi_slopes": torch.ones(3, 4)}),
    "sinks of sequences": (ValueError, r"sinks must be of shape \(4,\)", GOOD, {"sinks": torch.ones(2, 4)}),
    "causal is misspelt": (ValueError, "causal must be False, True", GOOD, {"causal": "bottom-right"}),
    "window is negative": (ValueError, "window must be a pair", GOOD, {"window": (-1, 0)}),
    "softcap is negative": (ValueError, "softcap must be 0", GOOD, {"softcap": -1.0}),
    "scale is a string": (TypeError, "scale must be a number", GOOD, {"scale": "small"}),
    "dropout_p is too large": (ValueError, "dropout_p must be a probability", GOOD, {"dropout_p": 1.5}),
    "return_lse is a number": (TypeError, "return_lse must be a bool", GOOD, {"return_lse": 1}),
    "score_mod is a Python function": (TypeError, "score_mod must be a fusedops.ScoreMod", GOOD,
                                       {"score_mod": lambda score, *_: score}),
    "mask_mod is a tensor": (TypeError, "mask_mod must be a fusedops.MaskMod", GOOD, {"mask_mod": torch.ones(5, 6)}),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_wrong_argument(case, backend):
    error, match, args, options = WRONG[case]
    with fusedops.backend(backend), pytest.raises(error, match=f"attention_varlen: {match}"):
        fusedops.attention_varlen(*args, **options)
    with pytest.raises(error, match=match):
        fusedops.explain(fusedops.attention_varlen, *args, **options)
