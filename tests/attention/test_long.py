"""Long sequences: offsets past 2³¹, no intermediate of the size of the scores, and blocks that are never visited."""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops.attention.block_mask import BLOCK
from tests.attention.launches import Watch, launching, nothing, only
from tests.attention.test_offsets import FAR, far_apart
from tests.harness.tensors import randn


@pytest.mark.interpreter
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_tokens_of_packed_sequences_far_apart(kernel_runner, causal):
    """The second sequence begins past 2³¹ elements, in q, k, v, the incoming gradient and the mask."""
    shape = (6, 1, 4)
    assert 4 * FAR > 2**31
    inputs = [*(far_apart(shape, 0) for _ in range(3)), far_apart((2, 1, 4, 4), 2)]
    grad = far_apart(shape, 0)
    cu = torch.tensor([0, 4, 6])
    results = []
    for tensors in (inputs, [t.contiguous() for t in inputs]):
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = fusedops.attention_varlen(*leaves[:3], cu, cu, 4, 4, attn_mask=leaves[3], causal=causal)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    for far, near in zip(*results, strict=True):
        assert torch.equal(far, near)


@pytest.mark.interpreter
@pytest.mark.parametrize("heads", [1, 2])
def test_more_rows_than_an_int32_counts(monkeypatch, heads):
    """batch · heads · seqlen_q > 2³¹: rows of lse, of what the backward needs, and of the dropout's mask.

    Of each launch the last program runs, and memory that is not touched costs nothing.
    """
    length = 64
    batch = 2**31 // (length * heads) + 1
    try:
        torch.empty(2, batch, heads, length)
    except RuntimeError:
        pytest.skip("18 GB of memory cannot even be reserved here")
    one = [randn(1, heads, length, 1, dtype=torch.float16) for _ in range(4)]
    q, k, v, do = (t.expand(batch, -1, -1, -1) for t in one)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    with fusedops.backend("triton"), launching(monkeypatch, only(-1)):
        out, lse = fusedops.attention(*leaves, return_lse=True)
        grads = torch.autograd.grad(out, leaves, do)
        torch.manual_seed(1)
        dropped = fusedops.attention(*leaves, dropout_p=0.5)
        (dv,) = torch.autograd.grad(dropped, leaves[2:], do)
    with fusedops.backend("triton"):
        small = [t.detach().requires_grad_() for t in one[:3]]
        expected, expected_lse = fusedops.attention(*small, return_lse=True)
        wanted = torch.autograd.grad(expected, small, one[3])
    assert torch.equal(out[-1, -1], expected[0, -1])
    assert torch.equal(lse[-1, -1], expected_lse[0, -1])
    for grad, want in zip(grads, wanted, strict=True):
        assert torch.equal(grad[-1, -1], want[0, -1])
    # The same mask in both directions: out is linear in v, with the gradient's transpose.
    one_way, other_way = (dropped[-1, -1].float() * do[-1, -1].float()).sum(), (v[-1, -1] * dv[-1, -1].float()).sum()
    torch.testing.assert_close(one_way.detach(), other_way.detach(), rtol=2e-3, atol=2e-3)
    assert not torch.allclose(dropped[-1, -1], out[-1, -1], atol=1e-2)


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_a_million_tokens(kernel_runner, monkeypatch, packed):
    """The last queries and keys of 2²⁰, with a window: as if the last ones were alone. What is before them is NaN."""
    length, last = 2**20, 256
    near = [randn(last, 1, 4) for _ in range(4)]
    tensors = []
    for values in near:
        whole = torch.full((length, 1, 4), float("nan"))
        whole[-last:] = values
        tensors.append(whole.requires_grad_())
    window = {"window": (70, 0)}

    def run(q, k, v, do):
        if packed:
            cu = torch.tensor([0, len(q) // 2 - 30, len(q)])
            out, lse = fusedops.attention_varlen(q, k, v, cu, cu, return_lse=True, **window)
        else:
            q4, k4, v4 = (t.transpose(0, 1)[None] for t in (q, k, v))
            out, lse = fusedops.attention(q4, k4, v4, return_lse=True, **window)
            out, lse = out[0].transpose(0, 1), lse[0]
        return out, lse.transpose(0, 1), *torch.autograd.grad(out, (q, k, v), do)

    # The last tile of keys, and that of queries, which with a limit to the right come last tile first. The second
    # packed sequence has the tiles from number begin // 64 + 1 on.
    first = (length // 2 - 30) // 64 + 1 if packed else 0
    with launching(monkeypatch, only(first, first + length // 2 // 64, -1)):
        results = run(*tensors)
    for result, expected in zip(results, run(*(t.requires_grad_() for t in near)), strict=True):
        assert result[-20:].isfinite().all()
        torch.testing.assert_close(result[-20:], expected[-20:], rtol=1e-5, atol=1e-6)


S, D = 1024, 16


def _options(device):
    """Names and options whose tensors are small beside seqlen²."""
    slopes, sinks = torch.rand(2, device=device), torch.randn(2, device=device)
    ids = torch.arange(S, device=device) // 300
    return {
        "nothing": {},
        "causal": {"causal": True},
        "most": {"causal": True, "window": (300, 0), "softcap": 3.0, "dropout_p": 0.1,
                 "alibi_slopes": slopes.requires_grad_(), "sinks": sinks.requires_grad_()},
        "mask of keys": {"attn_mask": randn(1, 1, 1, S, device=device, requires_grad=True)},
        "mask of queries": {"attn_mask": randn(1, 2, S, 1, device=device, requires_grad=True)},
        "documents": {"document_ids": ids},
        "packed": {"alibi_slopes": torch.rand(4, 2, device=device).requires_grad_()},
    }  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize("name", _options("cpu"))
def test_nothing_of_the_size_of_the_scores(kernel_runner, monkeypatch, name):
    """Every tensor that forward and backward make, kernels aside (which make none), is of the order of q's."""
    options = _options(kernel_runner.device)[name]
    q, k, v = (randn(S, 2, D, requires_grad=True) for _ in range(3))
    largest = []

    def seen(function, results):
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, torch.Tensor):
                largest.append((result.untyped_storage().nbytes(), str(function)))

    leaves = [q, k, v, *(t for t in options.values() if isinstance(t, torch.Tensor) and t.requires_grad)]
    with Watch(seen), launching(monkeypatch, nothing):
        if name == "packed":
            cu = torch.arange(5) * (S // 4)
            out, lse = fusedops.attention_varlen(q, k, v, cu, cu, return_lse=True, **options)
        else:
            heads_first = (t.transpose(0, 1)[None] for t in (q, k, v))
            out, lse = fusedops.attention(*heads_first, return_lse=True, **options)
        torch.autograd.grad([out.sum(), lse.sum()], leaves)
    operators = {function for _, function in largest}
    assert any("empty" in function for function in operators)  # those beneath the operators are seen
    assert max(largest)[0] <= 2 * q.numel() * q.element_size(), max(largest)
    assert max(largest)[0] < S * S  # bytes, of scores of one head


def _visible(kind, queries, keys):
    """(queries, keys) bool, the options that hide the others, and the side of a block."""
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    shift = keys - queries
    if kind == "window":
        return (j - i - shift >= -40) & (j - i - shift <= 5), {"window": (40, 5)}, 64
    if kind == "causal":
        return j <= i, {"causal": True}, 64
    if kind == "causal window":
        return (j <= i + shift) & (j >= i + shift - 70), {"causal": "bottom_right", "window": (70, 0)}, 64
    ids = torch.tensor([0] * 128 + [1] * 180 + [2] * 76)
    return ids[:, None] == ids, {"document_ids": ids}, BLOCK


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("kind", ["window", "causal", "causal window", "documents"])
def test_blocks_outside_are_never_visited(kernel_runner, kind):
    """A block of keys, or of queries, full of NaN: it reaches the blocks that see it, and no other one, bit for bit."""
    queries, keys = (384, 384) if kind == "documents" else (192, 256)
    mask, options, block = _visible(kind, queries, keys)
    met = mask.unflatten(0, (-1, block)).unflatten(2, (-1, block)).any(3).any(1)  # (blocks of queries, of keys)
    assert not met.all()
    q, do = (randn(1, 1, queries, 16) for _ in range(2))
    k, v = (randn(1, 1, keys, 16) for _ in range(2))

    def run(q, k, v, do):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out, lse = fusedops.attention(*leaves, return_lse=True, **options)
        return out, lse[..., None], *torch.autograd.grad(out, leaves, do)

    clean = run(q, k, v, do)
    assert all(t.isfinite().all() or t is clean[1] for t in clean)
    for side in (0, 1):
        for at in (0, met.shape[side] - 1):
            tensors = [t.clone() for t in (q, k, v, do)]
            for tensor in (tensors[0], tensors[3]) if side == 0 else tensors[1:3]:
                tensor[:, :, at * block : (at + 1) * block] = float("nan")
            poisoned = run(*tensors)
            if side == 0:  # gradients of the keys that these queries do not see
                unmet, compared = ~met[at], zip(poisoned[3:], clean[3:], strict=True)
            else:  # results and gradients of the queries that do not see these keys
                unmet, compared = ~met[:, at], zip(poisoned[:3], clean[:3], strict=True)
            for ours, expected in compared:
                ours, expected = (t[0, 0].unflatten(0, (-1, block)) for t in (ours, expected))
                assert torch.equal(ours[unmet], expected[unmet])
                assert unmet.all() or ours[~unmet].isnan().any()


@pytest.mark.interpreter
@pytest.mark.parametrize("mask_shape", [(1, 1, 192, 256), (1, 1, 1, 256)], ids=str)
def test_the_gradient_of_a_mask_visits_no_block_outside(kernel_runner, mask_shape):
    """NaN in keys that no query sees, and in queries that see no key, reaches no gradient."""
    q, k, v = (randn(1, 1, n, 16) for n in (192, 256, 256))
    k[:, :, 192:], v[:, :, 192:] = float("nan"), float("nan")  # top left: the last query sees key 191 at most
    mask = randn(*mask_shape, requires_grad=True)
    leaves = [*(t.requires_grad_() for t in (q, k, v)), mask]
    out = fusedops.attention(*leaves[:3], attn_mask=mask, causal=True)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert out.isfinite().all()
    for grad in grads:
        assert grad.isfinite().all()
    assert (grads[3][..., 192:] == 0).all()
    assert (grads[1][:, :, 192:] == 0).all()


@pytest.mark.interpreter
def test_queries_that_see_no_key_are_not_visited(kernel_runner):
    """More queries than keys, ends aligned: what the first blocks of queries hold reaches no gradient."""
    q, do = (randn(1, 1, 256, 16) for _ in range(2))
    k, v = (randn(1, 1, 64, 16) for _ in range(2))
    q[:, :, :128], do[:, :, :128] = float("nan"), float("nan")
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = fusedops.attention(*leaves, causal="bottom_right")
    grads = torch.autograd.grad(out, leaves, do)
    last = [t.detach().requires_grad_() for t in (q[:, :, 128:], k, v)]
    expected = fusedops.attention(*last, causal="bottom_right")
    wanted = torch.autograd.grad(expected, last, do[:, :, 128:])
    assert (out[:, :, :128] == 0).all()
    assert torch.equal(out[:, :, 128:], expected)
    assert (grads[0][:, :, :128] == 0).all()
    for grad, want in zip((grads[0][:, :, 128:], *grads[1:]), wanted, strict=True):
        assert torch.equal(grad, want)
