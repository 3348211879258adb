"""Generation step by step with a cache equals attention over the whole sequence, in each kind of cache."""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops.nn import KVCache
from tests.harness.tensors import randn

KINDS = {
    "contiguous": {},
    "paged": {"page_size": 16},
    "odd_pages": {"page_size": 23},
    "ring": {"window": 7},
    "int8": {"dtype": torch.int8},
    "fp8": {"dtype": torch.float8_e4m3fn},
    "int8_paged": {"dtype": torch.int8, "page_size": 16},
}
LENGTH = 48


@pytest.fixture(autouse=True)
def torch_backend():
    """The bookkeeping is the same on both; one test runs the kernels."""
    with fusedops.backend("torch"):
        yield


def make(kind, batch=2, layers=1, length=LENGTH):
    return KVCache(layers, batch, 2, None if "window" in KINDS[kind] else length, 16, 8, **KINDS[kind])


def inputs(tokens, batch=2):
    return randn(batch, 4, tokens, 16), randn(batch, 2, tokens, 16), randn(batch, 2, tokens, 8)


def close(kind, actual, expected):
    # Rounded to 8 bits, keys and values err by 1/254 (int8) and 1/16 (fp8) of themselves.
    allowed = {"int8": 0.03, "int8_paged": 0.03, "fp8": 0.15}.get(kind, 1e-5)
    assert (actual - expected).abs().max() <= allowed


def whole(q, k, v, kind, **options):
    window = KINDS[kind].get("window")
    window = None if window is None else (window, 0)
    return fusedops.attention(q, k, v, causal=True, window=window, **options)


@pytest.mark.parametrize("parts", [(5, 1, 1, 3, 1), (16, 1, 16), (20, 2, 19, 1)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_the_whole(kind, parts):
    options = {"softcap": 3.0, "scale": 0.4, "sinks": torch.randn(4), "alibi_slopes": torch.rand(4)}
    q, k, v = inputs(sum(parts))
    cache = make(kind)
    outs = []
    for part in parts:
        begin = sum(out.shape[2] for out in outs)
        outs.append(cache.attend(*(t[:, :, begin : begin + part] for t in (q, k, v)), **options))
        cache.advance(part)
    assert cache.seqlens.tolist() == [sum(parts)] * 2
    close(kind, torch.cat(outs, dim=2), whole(q, k, v, kind, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_unequal_lengths(kind):
    """Prompts padded at their ends, then steps of which some tokens are rejected."""
    q, k, v = inputs(30)
    lengths = torch.tensor([9, 4])
    cache = make(kind)
    cache.attend(*(t[:, :, :12] for t in (q, k, v)))
    cache.advance(lengths)
    full = whole(q, k, v, kind)
    for accepted in ([3, 1], [0, 2], [2, 3]):
        places = [slice(int(length), int(length) + 3) for length in lengths]
        out = cache.attend(*(torch.stack([t[row, :, p] for row, p in enumerate(places)]) for t in (q, k, v)))
        close(kind, out, torch.stack([full[row, :, place] for row, place in enumerate(places)]))
        cache.advance(torch.tensor(accepted))
        lengths = lengths + torch.tensor(accepted)
    assert torch.equal(cache.seqlens, lengths.int())


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_prompt_after_a_short_one(kind):
    """The lengths differ, or the cache is not plain: in parts."""
    q, k, v = inputs(40)
    cache = make(kind)
    cache.attend(*(t[:, :, :6] for t in (q, k, v)))
    cache.advance(6)
    out = cache.attend(*(t[:, :, 6:] for t in (q, k, v)))
    close(kind, out, whole(q, k, v, kind)[:, :, 6:])


def test_layers_have_their_own_keys_and_common_lengths():
    cache = make("paged", layers=2)
    steps = [[inputs(n) for _ in range(2)] for n in (4, 1, 1)]
    for step in steps:
        outs = [cache.attend(*step[layer], layer) for layer in range(2)]
        cache.advance(step[0][0].shape[2])
    for layer, out in enumerate(outs):
        q, k, v = (torch.cat([step[layer][i] for step in steps], dim=2) for i in range(3))
        close("paged", out, whole(q, k, v, "paged")[:, :, -1:])


@pytest.mark.parametrize("kind", KINDS)
def test_beams(kind):
    q, k, v = inputs(10, batch=3)
    beams = torch.tensor([2, 0, 0])
    cache = make(kind, batch=3)
    cache.attend(*(t[:, :, :8] for t in (q, k, v)))
    cache.advance(torch.tensor([8, 5, 3]))
    cache.reorder(beams)
    assert cache.seqlens.tolist() == [3, 8, 8]
    step = inputs(1, batch=3)
    out = cache.attend(*step)
    for row, beam in enumerate(beams.tolist()):
        length = [8, 5, 3][beam]
        qs, ks, vs = (
            torch.cat([t[beam, :, :length], new[row]], dim=1)[None] for t, new in zip((q, k, v), step, strict=True)
        )
        close(kind, out[row], whole(qs, ks, vs, kind)[0, :, -1:])


def test_pages_are_taken_as_needed_and_given_back():
    cache = KVCache(1, 3, 2, 64, 16, 8, page_size=16, num_pages=5)
    assert cache.free_pages == 5
    cache.attend(*inputs(16, batch=3))
    cache.advance(16)
    assert cache.free_pages == 2
    with pytest.raises(ValueError, match="1 further tokens need 3 pages; 2 of 5 are free: reset sequences"):
        cache.attend(*inputs(1, batch=3))
    cache.reset([1])
    assert cache.free_pages == 3
    assert cache.seqlens.tolist() == [16, 0, 16]
    cache.attend(*inputs(1, batch=3))
    used = [page for row in range(3) for page in cache.block_table[row, : len(cache._pages[row])].tolist()]
    assert len(used) == len(set(used)) == 5
    cache.reset()
    assert cache.free_pages == 5


def test_rejected_tokens_are_not_held_against_the_room():
    """The host's bounds grow by what is fed; when they reach the end the true lengths are asked for."""
    for kind in ("contiguous", "paged"):
        cache = make(kind, length=32)
        for _ in range(20):
            cache.attend(*inputs(3))
            cache.advance(torch.tensor([1, 1]))
        assert cache.seqlens.tolist() == [20, 20]


def test_a_full_cache_is_an_error_that_changes_nothing():
    cache = make("contiguous", length=8)
    cache.attend(*inputs(6))
    cache.advance(6)
    before = cache.keys[0].clone()
    with pytest.raises(ValueError, match="KVCache: 3 further tokens do not fit: a sequence has 6 of max_length 8"):
        cache.attend(*inputs(3))
    assert torch.equal(cache.keys[0], before)
    assert cache.attend(*inputs(2)).shape == (2, 4, 2, 8)


def test_a_ring_goes_on_for_ever():
    cache = make("ring")
    assert cache.keys[0].shape[2] == 7 + 16
    q, k, v = inputs(130)
    full = whole(q, k, v, "ring")
    for begin in range(0, 130, 13):
        out = cache.attend(*(t[:, :, begin : begin + 13] for t in (q, k, v)))
        cache.advance(13)
        close("ring", out, full[:, :, begin : begin + 13])
    cache.attend(*inputs(20))
    with pytest.raises(ValueError, match="count must be one int where more than 16 tokens were written to a ring"):
        cache.advance(torch.tensor([20, 3]))


@pytest.mark.parametrize("kind", ["contiguous", "paged", "ring", "int8"])
def test_compiled_steps_are_compiled_once_and_known_afterwards(kind):
    q, k, v = inputs(40)
    cache = make(kind)
    cache.attend(*(t[:, :, :5] for t in (q, k, v)))
    cache.advance(5)
    cache.reserve(30)

    def step(q, k, v):
        out = cache.attend(q, k, v)
        cache.advance(1)
        return out

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    expected = whole(q, k, v, kind)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for place in range(5, 25):
            out = compiled(*(t[:, :, place : place + 1] for t in (q, k, v)))
            close(kind, out, expected[:, :, place : place + 1])
    out = cache.attend(*(t[:, :, 25:] for t in (q, k, v)))
    close(kind, out, expected[:, :, 25:])
    cache.advance(15)
    assert cache.seqlens.tolist() == [40, 40]
    if kind == "contiguous":
        with pytest.raises(ValueError, match="20 further tokens do not fit: a sequence has 40 of max_length 48"):
            cache.reserve(20)


def test_bytes():
    cache = KVCache(2, 3, 4, 32, 16, 8, dtype=torch.int8)
    assert cache.nbytes() == 2 * 3 * 4 * 32 * (16 + 8 + 4 + 4) + 3 * 4
    assert str(cache).startswith("KVCache(contiguous, 2 layers, 3 sequences, max_length=32, int8, ")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"num_layers": 0}, ValueError, "num_layers must be at least 1"),
        ({"batch_size": 1.5}, TypeError, "batch_size must be an int"),
        ({"max_length": None}, TypeError, r"max_length must be an int \(None with window alone\)"),
        ({"window": -1}, ValueError, "window must be at least 0"),
        ({"window": 4, "page_size": 16}, ValueError, "page_size must be None where window is given"),
        ({"num_pages": 4}, ValueError, "num_pages must be None where page_size is"),
        ({"page_size": 8}, ValueError, "page_size must be at least 16"),
        ({"dtype": torch.int32}, ValueError, "dtype must be a floating dtype, torch.int8, float8"),
    ],
)
def test_wrong_arguments(change, error, text):
    arguments = {"num_layers": 1, "batch_size": 2, "num_kv_heads": 2, "max_length": 8, "head_dim": 16} | change
    with pytest.raises(error, match=f"KVCache: {text}"):
        KVCache(**arguments)


def test_wrong_calls():
    cache = make("contiguous")
    q, k, v = inputs(1)
    for wrong, text in {
        (q[0], k, v): r"q must be a tensor \(batch, heads, tokens, size\)",
        (q[:1], k, v): r"q must be of shape \(2, a multiple of 2, tokens, 16\)",
        (q, k[..., :8], v): r"k must be of shape \(2, 2, 1, 16\)",
        (q, k, k): r"v must be of shape \(2, 2, 1, 8\)",
    }.items():
        with pytest.raises((TypeError, ValueError), match=f"KVCache.attend: {text}"):
            cache.attend(*wrong)
    with pytest.raises(ValueError, match="layer must be from 0 to 0"):
        cache.attend(q, k, v, 1)
    cache.attend(q, k, v)
    with pytest.raises(ValueError, match="count must be at most 1, what attend has written"):
        cache.advance(2)
    with pytest.raises(ValueError, match=r"count must be an int or \(2,\) int32 or int64"):
        cache.advance(torch.ones(2))
    with pytest.raises(ValueError, match="rows must be numbers from 0 to 1"):
        cache.reset([2])
    with pytest.raises(ValueError, match=r"indices must be \(2,\) integers"):
        cache.reorder(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="indices must be numbers from 0 to 1"):
        cache.reorder(torch.tensor([0, 2]))
