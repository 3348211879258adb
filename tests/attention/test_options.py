"""Windows, softcap, ALiBi and sinks: by hand where a hand can, by the error rule elsewhere; all edges of each."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import fusedops
from fusedops.runtime.backend import HAS_TRITON
from tests.attention.problems import NAMES, Problem, check, fused, gradients
from tests.harness.tensors import randn

if HAS_TRITON:
    from tests.attention import rules

CAUSAL = [False, "top_left", "bottom_right"]

# Every option at once, one tile.
EVERY = Problem(
    heads=1, kv_heads=1, q=9, k=11, d=8, dv=6, window=(8, 4), mask="float", mask_shape=(1, 1, 9, 11), alibi="heads",
    sinks=True, softcap=3.0, dropout_p=0.2,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------- windows


def means_of_seen(v, seqlen_q, causal, window):
    """What queries of equal scores get: (queries, size), the mean of the values that the documented rule lets them see.

    Query i sees key j if i + shift - left ≤ j ≤ i + shift + right; ``causal`` makes right 0.
    """
    seqlen_k = v.shape[0]
    shift = 0 if causal == "top_left" else seqlen_k - seqlen_q
    left, right = window
    right = 0 if causal else right
    rows = []
    for i in range(seqlen_q):
        first = 0 if left is None else max(0, i + shift - left)
        last = seqlen_k - 1 if right is None else min(seqlen_k - 1, i + shift + right)
        rows.append(v[first : last + 1].mean(0) if first <= last else torch.zeros_like(v[0]))
    return torch.stack(rows)


@pytest.mark.parametrize("causal", CAUSAL, ids=str)
@pytest.mark.parametrize("lengths", [(7, 7), (5, 8), (8, 5), (90, 70)], ids=str)
def test_windows_by_hand(runner, lengths, causal):
    seqlen_q, seqlen_k = lengths
    q = torch.zeros(1, 1, seqlen_q, 1, device=runner.device)
    k = torch.zeros(1, 1, seqlen_k, 1, device=runner.device)
    v = torch.randn(seqlen_k, 2)
    sides = (None, 0, 2, seqlen_k - 1, seqlen_k, 1000)
    for window in itertools.product(sides, sides if causal is False else (None, 3)):
        expected = means_of_seen(v.double(), seqlen_q, causal, window)
        out, lse = fused(q, k, v.to(runner.device)[None, None], causal=causal, window=window)
        torch.testing.assert_close(
            out[0, 0].cpu(), expected.float(), rtol=1e-5, atol=1e-6, msg=lambda m, w=window: f"{w}: {m}"
        )
        blind = (expected == 0).all(1)
        assert torch.equal(lse[0, 0].isneginf().cpu(), blind)


@pytest.mark.parametrize("length", [20, 66])
def test_a_window_of_the_diagonal_alone(runner, length):
    """W = 0: the output is the key's value, the scores get the gradient of lse alone."""
    q, k, v, _ = Problem(heads=1, kv_heads=1, q=length, k=length).inputs(runner.device)
    do, dlse = randn(1, 1, length, 16, device=runner.device), randn(1, 1, length, device=runner.device)
    (out, lse), (dq, dk, dv) = gradients(fused, (q, k, v), (do, dlse), window=(0, 0))
    assert torch.equal(out, v)
    torch.testing.assert_close(lse, 0.25 * (q * k).sum(-1))
    assert torch.equal(dv, do)
    # do·v and do·out are equal but for the order of their sums: 2·16 roundings of terms of that size.
    noise = 32 * torch.finfo(torch.float32).eps * (do.abs() * v.abs()).sum(-1)[..., None]
    for grad, other in ((dq, k), (dk, q)):
        wrong = (grad - 0.25 * dlse[..., None] * other).abs()
        assert (wrong <= 0.25 * noise * other.abs() + 1e-6 * dlse.abs()[..., None]).all()


@pytest.mark.parametrize("causal", CAUSAL, ids=str)
def test_a_window_of_all_keys_changes_nothing(runner, causal):
    """W = S - 1 and beyond; W = S - 2 hides one key from one query."""
    inputs = Problem(q=40, k=40).inputs(runner.device)[:3]
    grads = randn(1, 2, 40, 16, device=runner.device), randn(1, 2, 40, device=runner.device)
    (out, _), without = gradients(fused, inputs, grads, causal=causal)
    for side in (39, 40, 10**9, 2**40):
        (windowed, _), same = gradients(fused, inputs, grads, causal=causal, window=(side, side))
        torch.testing.assert_close(windowed, out)
        torch.testing.assert_close(same, without)
    shorter, _ = fused(*inputs, causal=causal, window=(38, None))
    changed = (shorter - out).abs().amax((0, 1, 3)) > 1e-4
    assert changed.nonzero().flatten().tolist() == [39]


# (window, causal, lengths): several tiles of the interpreter's, some of them whole, some outside.
WINDOWS = [
    ((20, 0), False, (140, 140)),
    ((3, 30), False, (70, 130)),
    ((10, None), "top_left", (130, 70)),
    ((70, None), "bottom_right", (66, 150)),
    ((None, 5), False, (130, 66)),
    ((66, 66), "top_left", (70, 140)),
]


@pytest.mark.parametrize(("window", "causal", "lengths"), WINDOWS, ids=str)
def test_windows_over_several_tiles(runner, window, causal, lengths):
    problem = Problem(heads=1, kv_heads=1, q=lengths[0], k=lengths[1], window=window, causal=causal)
    check(problem, runner, torch.float32)


# ------------------------------------------------------------------------------------------------------- softcap


def test_softcap_by_hand(runner):
    """cap · tanh(score / cap): one query, the identity as values, so that the output is the probabilities."""
    q = torch.ones(1, 1, 1, 1, device=runner.device)
    k = torch.tensor([0.0, 0.1, -1.5, 6.0, 80.0, -1e30], device=runner.device).view(1, 1, 6, 1)
    v = torch.eye(6, device=runner.device)[None, None]
    for cap in (0.5, 4.0):
        weights = torch.tensor([math.exp(cap * math.tanh(0.7 * x / cap)) for x in k.flatten().tolist()])
        out, lse = fused(q, k, v, softcap=cap, scale=0.7)
        torch.testing.assert_close(out.flatten().cpu(), weights / weights.sum())
        torch.testing.assert_close(lse.flatten().cpu(), weights.sum().log()[None])


@pytest.mark.parametrize("scale", [0.05, 5.0, 300.0])
def test_softcap_of_scores_of_any_size(runner, scale):
    check(Problem(heads=1, kv_heads=1, q=36, k=70, softcap=5.0, scale=scale), runner, torch.float32)


def test_the_order_of_what_changes_a_score(runner):
    """Cap, then score_mod, then attn_mask and ALiBi, then what hides: other orders give other numbers here."""

    def definition(score, batch, head, i, j):
        return 3 * score + 1

    rule = fusedops.ScoreMod(rules.affine if runner.kernels else None, definition=definition)
    x, added = [0.4, 5.0, -3.0, 2.0], [80.0, -2.0, 1.5, 1.0]
    q = torch.ones(1, 1, 1, 1, device=runner.device)
    k = torch.tensor(x, device=runner.device).view(1, 1, 4, 1)
    v = torch.eye(4, device=runner.device)[None, None]
    # Bottom-right: the query lies at key 3, and the window hides key 0 from it, however large its score.
    out, lse = fused(
        q, k, v, torch.tensor(added, device=runner.device), torch.tensor([0.7], device=runner.device),
        softcap=2.0, score_mod=rule, window=(2, 0),
    )  # fmt: skip
    logits = [3 * 2 * math.tanh(a / 2) + 1 + b - 0.7 * (3 - j) for j, (a, b) in enumerate(zip(x, added, strict=True))]
    logits = torch.tensor([-math.inf, *logits[1:]], dtype=torch.float64)
    torch.testing.assert_close(out.flatten().cpu(), logits.softmax(0).float())
    torch.testing.assert_close(lse.flatten().cpu(), logits.logsumexp(0, keepdim=True).float())


# --------------------------------------------------------------------------------------------------------- ALiBi


@pytest.mark.parametrize("causal", CAUSAL, ids=str)
def test_alibi_by_hand(runner, causal):
    """-slope · |j - i - shift|, the distance counted from the diagonal."""
    slopes = torch.tensor([[0.5, 0.0], [-0.25, 2.0]])
    q = torch.zeros(2, 2, 5, 1, device=runner.device)
    k = torch.zeros(2, 2, 7, 1, device=runner.device)
    v = torch.eye(7, device=runner.device).expand(2, 2, 7, 7)
    shift = 0 if causal == "top_left" else 2
    distance = (torch.arange(7) - torch.arange(5)[:, None] - shift).double()
    logits = -slopes[:, :, None, None].double() * distance.abs()
    if causal:
        logits = logits.masked_fill(distance > 0, float("-inf"))
    out = fusedops.attention(q, k, v, alibi_slopes=slopes.to(runner.device), causal=causal)
    torch.testing.assert_close(out.cpu(), logits.softmax(-1).float())
    one = fusedops.attention(q, k, v, alibi_slopes=slopes[1].to(runner.device), causal=causal)
    torch.testing.assert_close(one.cpu(), logits[1].softmax(-1).float().expand(2, 2, 5, 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("alibi", "batch", "heads"), [("heads", 1, 24), ("batch", 2, 12)])
def test_gradient_of_slopes(runner, alibi, batch, heads, dtype):
    """Of enough heads for the mean of their errors to say something."""
    problem = Problem(batch=batch, heads=heads, kv_heads=4, q=9, k=11, d=8, alibi=alibi, causal="bottom_right")
    check(problem.but(wanted=("q", "alibi_slopes")), runner, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_slopes_and_sinks_of_another_dtype(runner, dtype):
    q, k, v, _ = Problem(q=9, k=11).inputs(runner.device)
    slopes, sinks = (torch.rand(2, device=runner.device).to(dtype).requires_grad_() for _ in range(2))
    wide = [t.detach().float().requires_grad_() for t in (slopes, sinks)]
    do = randn(1, 2, 9, 16, device=runner.device)
    grads = []
    for a, b in ((slopes, sinks), wide):
        out = fusedops.attention(q, k, v, alibi_slopes=a, sinks=b)
        grads.append((out, *torch.autograd.grad(out, (a, b, q), do)))
    assert [g.dtype for g in grads[0]] == [torch.float32, dtype, dtype, torch.float32]
    for ours, same in zip(*grads, strict=True):
        torch.testing.assert_close(ours, same.to(ours.dtype))


def test_slopes_over_several_tiles_and_strides(runner):
    """(1, heads) slopes, every second of a longer tensor, and a gradient in their shape."""
    q, k, v, _ = Problem(batch=2, heads=3, kv_heads=3, q=70, k=90, d=8).inputs(runner.device)
    slopes = (torch.rand(1, 6, device=runner.device)[:, ::2]).requires_grad_()
    check(Problem(causal=True), runner, torch.float32, inputs=(q, k, v, None, slopes, None))


# --------------------------------------------------------------------------------------------------------- sinks


def test_sinks_by_hand(runner):
    """Equal scores 0 of four keys: each has 1 / (4 + e^sink)."""
    q, k = (torch.zeros(1, 3, n, 1, device=runner.device) for n in (2, 4))
    v = torch.ones(1, 3, 4, 1, device=runner.device)
    sinks = torch.tensor([0.0, math.log(4), -1.0], device=runner.device)
    out, lse = fused(q, k, v, sinks=sinks)
    expected = 4 / (4 + sinks.exp())
    torch.testing.assert_close(out[0, :, :, 0], expected[:, None].expand(3, 2))
    torch.testing.assert_close(lse[0], (4 + sinks.exp()).log()[:, None].expand(3, 2))


@pytest.mark.parametrize(
    ("through", "dtype"), [("out+lse", torch.float32), ("out", torch.bfloat16), ("lse", torch.float32)], ids=str
)
def test_gradient_of_sinks(runner, dtype, through):
    """Of enough heads for the mean of their errors to say something; that through lse alone too."""
    problem = Problem(heads=24, kv_heads=8, q=9, k=11, d=8, sinks=True, wanted=("q", "sinks"))
    check(problem, runner, dtype, through=through.split("+"))


@pytest.mark.parametrize("mask", [None, "float"])
def test_a_sink_of_minus_infinity_is_none(runner, mask):
    q, k, v, m = Problem(mask=mask, mask_shape=(1, 1, 20, 36)).inputs(runner.device)
    sinks = torch.tensor([float("-inf"), 0.5], device=runner.device, requires_grad=True)
    grads = randn(1, 2, 20, 16, device=runner.device), randn(1, 2, 20, device=runner.device)
    (out, lse), with_sinks = gradients(fused, (q, k, v, m, None, sinks), grads)
    (expected, lse_of_none), without = gradients(fused, (q, k, v, m), grads)
    assert torch.equal(out[:, 0], expected[:, 0])
    assert torch.equal(lse[:, 0], lse_of_none[:, 0])
    assert not torch.equal(out[:, 1], expected[:, 1])
    for a, b in zip(with_sinks[:3], without[:3], strict=True):
        torch.testing.assert_close(a[:, 0], b[:, 0])
    assert with_sinks[-1][0] == 0
    assert with_sinks[-1][1] != 0


@pytest.mark.parametrize("mask", [None, "float"])
@pytest.mark.parametrize("sink", [1e4, 2e38])
def test_a_very_large_sink(runner, sink, mask):
    """It takes all weight: nothing overflows. Its negative takes none."""
    q, k, v, m = Problem(mask=mask, mask_shape=(1, 1, 20, 36)).inputs(runner.device)
    sinks = torch.tensor([sink, -sink], device=runner.device, requires_grad=True)
    do, dlse = randn(1, 2, 20, 16, device=runner.device), randn(1, 2, 20, device=runner.device)
    (out, lse), grads = gradients(fused, (q, k, v, m, None, sinks), (do, dlse))
    (expected, lse_of_none), _ = gradients(fused, (q, k, v, m), (do, dlse))
    assert (out[:, 0] == 0).all()
    torch.testing.assert_close(lse[:, 0], torch.full_like(lse[:, 0], sink))
    torch.testing.assert_close(out[:, 1], expected[:, 1])
    torch.testing.assert_close(lse[:, 1], lse_of_none[:, 1])
    for grad in grads[:3]:
        assert (grad[:, 0] == 0).all()
        assert torch.isfinite(grad).all()
    # lse is the sink: so is its gradient.
    torch.testing.assert_close(grads[-1], torch.stack((dlse[0, 0].sum(), dlse.new_zeros(()))))


@pytest.mark.parametrize("kind", ["causal", "window", "bool", "float"])
def test_a_query_that_sees_the_sink_alone(runner, kind):
    """Output 0 and lse the sink's logit; no gradient but the sink's, which is that of lse. Without the sink: −inf."""
    q, k, v, _ = Problem(q=30, k=20).inputs(runner.device)
    sinks = torch.tensor([0.75, float("-inf")], device=runner.device, requires_grad=True)
    options, mask = {}, None
    if kind == "causal":
        options = {"causal": "bottom_right"}
    elif kind == "window":
        options = {"window": (3, 2), "causal": "bottom_right"}
    else:
        mask = torch.ones(30, 20, dtype=torch.bool, device=runner.device)
        mask[:10] = False
        if kind == "float":
            mask = torch.zeros(30, 20, device=runner.device).masked_fill(~mask, float("-inf")).requires_grad_()
    dlse = randn(1, 2, 30, device=runner.device)
    dlse[:, :, 10:] = 0
    do = randn(1, 2, 30, 16, device=runner.device)
    do[:, :, 10:] = 0
    (out, lse), grads = gradients(fused, (q, k, v, mask, None, sinks), (do, dlse), **options)
    assert (out[:, :, :10] == 0).all()
    assert (out[:, :, 10:] != 0).all()
    torch.testing.assert_close(lse[:, 0, :10], torch.full_like(lse[:, 0, :10], 0.75))
    assert (lse[:, 1, :10] == float("-inf")).all()
    for grad in grads[:-1]:
        assert (grad == 0).all()
    torch.testing.assert_close(grads[-1], torch.stack((dlse[0, 0].sum(), dlse.new_zeros(()))))


# ------------------------------------------------------------------------------------------------ all of them


OPTIONS = {
    "window": {"window": (9, 4)},
    "bool": {"mask": "bool", "mask_shape": (1, 1, 20, 24)},
    "float": {"mask": "float", "mask_shape": (1, 1, 20, 24)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": "heads", "causal": True},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.2},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_negative_and_zero_scale(runner, option):
    for scale in (-0.4, 0.0):
        problem = Problem(heads=2, kv_heads=1, q=20, k=24, scale=scale, **OPTIONS[option])
        if option in ("alibi", "sinks"):  # their own gradients: a few numbers, tested above
            problem = problem.but(wanted=("q", "k", "v"))
        check(problem, runner, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_sixteen_bits(runner, option, dtype):
    problem = Problem(heads=2, kv_heads=1, q=20, k=24, wanted=("q", "k", "v", "attn_mask"), **OPTIONS[option])
    check(problem, runner, dtype)


SUBSETS = [s for s in itertools.product((False, True), repeat=6) if any(s)]


def test_every_subset_of_inputs_that_require_gradients(runner):
    inputs = EVERY.inputs(runner.device)
    grads = randn(1, 1, 9, 6, device=runner.device), randn(1, 1, 9, device=runner.device)
    _, full = gradients(fused, inputs, grads, **EVERY.options)
    for subset in SUBSETS:
        some = [t.detach().requires_grad_(wanted) for t, wanted in zip(inputs, subset, strict=True)]
        _, ours = gradients(fused, some, grads, **EVERY.options)
        names = [name for name, wanted in zip(NAMES, subset, strict=True) if wanted]
        for name, a, b in zip(names, ours, (g for g, w in zip(full, subset, strict=True) if w), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, msg=lambda m, n=name, of=names: f"{n} of {of}: {m}")


@pytest.mark.parametrize("option", [*OPTIONS, "every"])
def test_a_loss_of_lse_alone_leaves_v_at_zero(kernel_runner, option):
    """Exactly zero; the others keep the error rule."""
    problem = EVERY if option == "every" else Problem(heads=2, kv_heads=1, q=20, k=24, **OPTIONS[option])
    inputs = problem.inputs(kernel_runner.device)
    dlse = randn(1, problem.heads, problem.q, device=kernel_runner.device)
    _, grads = gradients(fused, inputs, (None, dlse), **problem.options)
    assert (grads[2] == 0).all()
    assert all((g != 0).any() for place, g in enumerate(grads) if place != 2)
    check(problem, kernel_runner, torch.float32, through=("lse",), thorough=True)


EMPTY = {
    "batch": {"batch": 0},
    "heads": {"heads": 0, "kv_heads": 0},
    "queries": {"q": 0},
    "keys": {"k": 0},
    "queries and keys": {"q": 0, "k": 0},
}


@pytest.mark.parametrize("which", EMPTY)
def test_empty(runner, which):
    """Right shapes, zeros and zero gradients; a sink that is alone has all weight."""
    problem = EVERY.but(batch=2, heads=4, kv_heads=2, alibi="batch", mask_shape=None).but(**EMPTY[which])
    for causal in CAUSAL:
        inputs = problem.inputs(runner.device)
        sinks = inputs[-1]
        out, lse = fused(*inputs, causal=causal, **problem.options)
        assert out.shape == (problem.batch, problem.heads, problem.q, 6)
        assert (out == 0).all()
        assert torch.equal(lse, sinks.detach().view(-1, 1).expand(lse.shape))
        grads = torch.autograd.grad([out.sum(), lse.sum()], inputs)
        for name, grad, tensor in zip(NAMES[:-1], grads[:-1], inputs, strict=False):
            assert grad.shape == tensor.shape, name
            assert (grad == 0).all(), name
        assert torch.equal(grads[-1], torch.full_like(sinks, lse[:, :1].numel() if lse.numel() else 0.0))
