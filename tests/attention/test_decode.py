"""attention_decode and append_kv in every kind of cache, by the error rule, with NaN wherever nothing may be read."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import fusedops
from fusedops.attention.cache import LARGEST
from fusedops.attention.tuning_decode import DecodeConfig
from tests.harness.errors import check_error
from tests.harness.tensors import randn

NAN = float("nan")


@dataclass(frozen=True)
class Caches:
    """A kind of cache, and the lengths of what is in it."""

    lengths: tuple[int, ...] = (37, 5, 0)
    new: int = 1
    heads: int = 4
    kv_heads: int = 2
    d: int = 16
    dv: int = 24
    room: int = 48
    page: int | None = None
    ring: bool = False
    dtype: torch.dtype = torch.float32
    stored: torch.dtype | None = None
    scales: str = "tokens"
    strided: bool = False

    def but(self, **changes: Any) -> Caches:
        return replace(self, **changes)

    @property
    def holds(self) -> int:
        """Tokens that a sequence has room for."""
        return self.room if self.page is None else -(-self.room // self.page) * self.page

    def make(self, device: torch.device) -> dict[str, Any]:
        """The function's tensors. Whatever holds no token is NaN, and pages lie in random order."""
        batch, dtype = len(self.lengths), self.dtype
        stored = self.stored or dtype
        pages = None
        shape = batch, self.kv_heads, self.room
        if self.page is not None:
            pages = -(-self.room // self.page)
            shape = batch * pages + 2, self.kv_heads, self.page
        made: dict[str, Any] = {"block_table": None, "k_scale": None, "v_scale": None, "ring": self.ring}
        for name, size in (("k_cache", self.d), ("v_cache", self.dv)):
            full = torch.full((*shape, size), 7 if stored == torch.int8 else NAN).to(stored).to(device)
            made[name] = full.transpose(1, 2).contiguous().transpose(1, 2) if self.strided else full
            if stored in LARGEST:
                scale = torch.rand(self.kv_heads) * 0.05 + 0.01
                made[f"{name[0]}_scale"] = (scale if self.scales == "heads" else torch.full(shape, NAN)).to(device)
        if pages is not None:
            table = torch.randperm(batch * pages + 2)[: batch * pages].reshape(batch, pages).int()
            made["block_table"] = table.to(device)
        made["cache_seqlens"] = torch.tensor(self.lengths, device=device)
        options = {"dtype": dtype, "device": device}
        history = max(*self.lengths, 1)
        for name, size in (("k", self.d), ("v", self.dv)):
            made[f"old_{name}"] = randn(batch, self.kv_heads, history, size, **options)
            made[name] = randn(batch, self.kv_heads, self.new, size, **options, layout="strided")
        made["q"] = randn(batch, self.heads, self.new, self.d, **options, layout="sliced")
        return made

    def fill(self, made: dict[str, Any]) -> None:
        """Write each sequence's old tokens, one call a sequence; those past its length go nowhere."""
        where = {name: made[name] for name in ("k_scale", "v_scale", "ring")}
        for row, length in enumerate(self.lengths):
            if length:
                k, v = (made[name][row : row + 1, :, :length] for name in ("old_k", "old_v"))
                table = made["block_table"]
                caches = made["k_cache"], made["v_cache"]
                options = dict(where)
                if table is None:
                    caches = tuple(cache[row : row + 1] for cache in caches)
                    for name in ("k_scale", "v_scale"):
                        if options[name] is not None and self.scales == "tokens":
                            options[name] = options[name][row : row + 1]
                zero = made["cache_seqlens"].new_zeros(1)
                fusedops.append_kv(
                    k, v, *caches, cache_seqlens=zero, block_table=table if table is None else table[row : row + 1],
                    **options,
                )  # fmt: skip

    def held(self, made: dict[str, Any], row: int, which: str) -> torch.Tensor:
        """(1, kv_heads, tokens, size) float64: what a sequence's tokens in the cache stand for, with the new ones."""
        length = self.lengths[row] + self.new
        cache, scale, table = made[f"{which}_cache"], made[f"{which}_scale"], made["block_table"]
        found = []
        for token in range(max(0, length - self.room) if self.ring else 0, length):
            if self.page is not None:
                at = int(table[row, token // self.page]), slice(None), token % self.page
            else:
                at = row, slice(None), token % self.room if self.ring else token
            numbers = cache[at].double()
            if scale is not None:
                numbers = numbers * (scale if self.scales == "heads" else scale[at])[:, None].double()
            found.append(numbers)
        return torch.stack(found, dim=1)[None].cpu()


def attended(q, k, v, *, window=None, alibi_slopes=None, sinks=None, softcap=0.0, scale=None):
    """(out, lse) of one sequence's last queries, in the dtype of q, by the formula."""
    heads, length = q.shape[1:3]
    k, v = (t.to(q.dtype).repeat_interleave(heads // k.shape[1], dim=1) for t in (k, v))
    s = (q @ k.transpose(-1, -2)) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    distance = (torch.arange(k.shape[2] - length, k.shape[2])[:, None] - torch.arange(k.shape[2])).to(q.device)
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(s)[None, :, None, None] * distance.abs()
    seen = distance >= 0
    if window is not None and window[0] is not None:
        seen = seen & (distance <= window[0])
    s = s.masked_fill(~seen, float("-inf"))
    logits = s if sinks is None else torch.cat([s, sinks.to(s)[None, :, None, None].expand(*s.shape[:3], 1)], dim=-1)
    p = torch.softmax(logits, dim=-1)[..., : s.shape[-1]]
    return p @ v, torch.logsumexp(logits.to(torch.promote_types(s.dtype, torch.float32)), dim=-1)


def check(runner, caches: Caches, **options: Any) -> None:
    made = caches.make(runner.device)
    caches.fill(made)
    names = "k_cache", "v_cache", "cache_seqlens", "block_table", "k", "v", "ring", "k_scale", "v_scale"
    out, lse = fusedops.attention_decode(made["q"], **{name: made[name] for name in names}, **options, return_lse=True)
    options.pop("num_splits", None)
    results = []
    for dtype in (torch.float64, caches.dtype):
        rows = []
        for row in range(len(caches.lengths)):
            q = made["q"][row : row + 1].cpu().to(dtype)
            k, v = (caches.held(made, row, which) for which in "kv")
            given = {n: o.cpu() if isinstance(o, torch.Tensor) else o for n, o in options.items()}
            rows.append(attended(q, k, v, **given))
        results.append([torch.cat(part) for part in zip(*rows, strict=True)])
    for name, actual, exact, plain in zip(("out", "lse"), (out, lse), *results, strict=True):
        check_error(actual.cpu(), exact, plain.to(actual.dtype), what=name)


KINDS = {
    "contiguous": Caches(),
    "strided": Caches(strided=True),
    "paged": Caches(page=16),
    "odd_pages": Caches(page=21),
    "large_pages": Caches(page=64, strided=True),
    "ring": Caches(ring=True, room=24, lengths=(37, 5, 24)),
    "int8": Caches(stored=torch.int8),
    "int8_heads": Caches(stored=torch.int8, scales="heads"),
    "int8_paged": Caches(stored=torch.int8, page=16),
    "e4m3": Caches(stored=torch.float8_e4m3fn),
    "e5m2_heads": Caches(stored=torch.float8_e5m2, scales="heads", page=18),
    "bfloat16_stored": Caches(stored=torch.bfloat16),
}


@pytest.mark.parametrize("new", [1, 3], ids=["step", "speculation"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cache(runner, kind, new):
    caches = KINDS[kind].but(new=new)
    check(runner, caches, window=(20, 0) if caches.ring else None)


@pytest.mark.parametrize("splits", [1, 2, 5, 128])
@pytest.mark.parametrize("kind", ["contiguous", "odd_pages", "ring", "int8"])
def test_shares_are_merged(runner, kind, splits):
    caches = KINDS[kind].but(new=2)
    check(runner, caches, num_splits=splits, window=(21, 0) if caches.ring else None)


OPTIONS = {
    "window": {"window": (3, 0)},
    "own_place_alone": {"window": (0, None)},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": -0.7},
    "no_scale": {"scale": 0.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, -0.2, 0.0])},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, float("-inf")])},
    "all": {
        "window": (11, 0), "softcap": 5.0, "scale": 0.4, "alibi_slopes": torch.tensor([0.5, 0.1, -0.2, 0.0]),
        "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0]),
    },
}  # fmt: skip


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("option", OPTIONS)
def test_options(runner, option, splits):
    given = {n: o.to(runner.device) if isinstance(o, torch.Tensor) else o for n, o in OPTIONS[option].items()}
    check(runner, Caches(new=3), num_splits=splits, **given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["contiguous", "paged", "int8", "e4m3"])
def test_half_precision(runner, kind, dtype):
    check(runner, KINDS[kind].but(dtype=dtype, d=64, dv=64), num_splits=2)


@pytest.mark.parametrize("scales", ["tokens", "heads"])
def test_small_values_do_not_vanish_in_float16(runner, scales):
    """One key has nearly all of the weight, many have a thousandth of it: times their scales, below float16's range."""
    rows, device = 400, runner.device
    q = torch.full((1, 1, 1, 16), 1.0, dtype=torch.float16, device=device)
    k = torch.zeros(1, 1, rows, 16, dtype=torch.float16, device=device)
    k[:, :, 0] = 1.75
    v = torch.full((1, 1, rows, 16), 1e-3, dtype=torch.float16, device=device)
    v[:, :, 0] = -1e-3
    caches = [torch.zeros(1, 1, rows, 16, dtype=torch.int8, device=device) for _ in range(2)]
    made = [torch.full((1,), s, device=device) for s in (1.75 / 127, 1e-3 / 127)]
    if scales == "tokens":
        made = [torch.zeros(1, 1, rows, device=device) for _ in range(2)]
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    out = fusedops.attention_decode(
        q[:, :, :1], *caches, cache_seqlens=zero, k=k, v=v, k_scale=made[0], v_scale=made[1]
    )
    p = torch.softmax((q.double() @ k.double().transpose(-1, -2)) / 4, dim=-1)
    torch.testing.assert_close(out.double(), p @ v.double(), rtol=0.01, atol=0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "new", "d", "dv"),
    [(1, 1, 1, 1, 1), (6, 2, 16, 16, 16), (71, 1, 1, 16, 16), (20, 4, 5, 40, 3), (1, 1, 1, 256, 200)],
)
def test_heads_and_sizes(runner, heads, kv_heads, new, d, dv):
    check(runner, Caches((20, 2), new=new, heads=heads, kv_heads=kv_heads, d=d, dv=dv, page=16))


def test_without_new_tokens_the_cache_is_as_it_was(runner):
    caches = Caches(new=1)
    made = caches.make(runner.device)
    caches.fill(made)
    expected = fusedops.attention_decode(
        made["q"], made["k_cache"], made["v_cache"], cache_seqlens=made["cache_seqlens"], k=made["k"], v=made["v"]
    )
    before = made["k_cache"].clone()
    longer = made["cache_seqlens"] + 1
    assert made["cache_seqlens"].tolist() == list(caches.lengths)
    out = fusedops.attention_decode(made["q"], made["k_cache"], made["v_cache"], cache_seqlens=longer)
    assert torch.equal(out, expected)
    torch.testing.assert_close(made["k_cache"], before, rtol=0, atol=0, equal_nan=True)


def test_a_query_that_sees_nothing(runner):
    """A sequence of fewer tokens than queries, and one of none: zeros, and no NaN from what lies there."""
    q = randn(2, 4, 3, 16, device=runner.device)
    caches = [torch.full((2, 2, 16, 16), NAN, device=runner.device) for _ in range(2)]
    for cache in caches:
        cache[0, :, :2] = torch.randn(2, 2, 16)
    lengths = torch.tensor([2, 0], dtype=torch.int32, device=runner.device)
    for splits in (1, 3):
        out, lse = fusedops.attention_decode(q, *caches, cache_seqlens=lengths, num_splits=splits, return_lse=True)
        assert not out[0, :, 0].any()
        assert not out[1].any()
        assert (lse[0, :, 0] == float("-inf")).all()
        assert (lse[1] == float("-inf")).all()
        assert lse[0, :, 1:].isfinite().all()


@pytest.mark.parametrize("kind", ["contiguous", "odd_pages", "int8_paged"])
def test_what_a_window_has_passed_may_be_gone(runner, kind):
    """Its rows hold anything, and its pages are no longer in the table."""
    caches = KINDS[kind]
    made = caches.make(runner.device)
    caches.fill(made)
    names = "k_cache", "v_cache", "cache_seqlens", "block_table", "ring", "k_scale", "v_scale"
    given = {name: made[name] for name in names}
    options = {"window": (5, 0), "num_splits": 2}
    expected = fusedops.attention_decode(made["q"], k=made["k"], v=made["v"], **given, **options)
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        tensor = made[name]
        if tensor is None or tensor.dtype == torch.int8:
            continue
        for row, length in enumerate(caches.lengths):
            for token in range(max(0, length - 5)):
                at = (row, token)
                if caches.page is not None:
                    at = int(made["block_table"][row, token // caches.page]), token % caches.page
                tensor[at[0], :, at[1]] = NAN
    if made["block_table"] is not None:
        for row, length in enumerate(caches.lengths):
            made["block_table"][row, : max(0, length - 5) // caches.page] = -1
    out = fusedops.attention_decode(made["q"], k=made["k"], v=made["v"], **given, **options)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", ["contiguous", "paged", "ring"])
def test_a_sequence_is_the_same_in_any_batch(kernel_runner, monkeypatch, kind):
    """Also where the tuner has found another tile best for another number of heads."""

    def tuned(operator, problem, device):
        return DecodeConfig(64, 16 if problem.heads <= 2 else 32, 4, 2)

    # The package's attribute of its name is the function.
    monkeypatch.setattr(importlib.import_module("fusedops.attention.kernels_decode"), "resolve", tuned)
    caches = KINDS[kind].but(new=2)
    made = caches.make(kernel_runner.device)
    caches.fill(made)
    options = {"ring": caches.ring, "window": (20, 0) if caches.ring else None, "num_splits": 3}
    fusedops.append_kv(
        made["k"], made["v"], made["k_cache"], made["v_cache"], cache_seqlens=made["cache_seqlens"],
        block_table=made["block_table"], ring=caches.ring,
    )  # fmt: skip
    lengths, table = made["cache_seqlens"] + 2, made["block_table"]

    def decode(rows):
        stored = [made[n] if table is not None else made[n][rows] for n in ("k_cache", "v_cache")]
        return fusedops.attention_decode(
            made["q"][rows], *stored, cache_seqlens=lengths[rows], block_table=None if table is None else table[rows],
            **options,
        )  # fmt: skip

    whole = decode(slice(None))
    for row in range(len(caches.lengths)):
        assert torch.equal(decode(slice(row, row + 1)), whole[row : row + 1])
    assert torch.equal(decode(slice(None)), whole)


# ---- writing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 5, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_appended_tokens_lie_where_they_belong_and_nothing_else_changes(runner, kind, tokens):
    caches = KINDS[kind].but(new=tokens)
    made = caches.make(runner.device)
    before = {name: made[name].clone() for name in ("k_cache", "v_cache")}
    fusedops.append_kv(
        made["k"], made["v"],
        **{n: made[n] for n in ("k_cache", "v_cache", "cache_seqlens", "block_table", "ring", "k_scale", "v_scale")},
    )  # fmt: skip
    for which in "kv":
        new, scale, cache = made[which].cpu(), made[f"{which}_scale"], made[f"{which}_cache"]
        written = torch.zeros(cache.shape[:3], dtype=torch.bool)
        for row, length in enumerate(caches.lengths):
            for token in range(length, length + tokens if caches.ring else min(length + tokens, caches.holds)):
                place = token % caches.room if caches.ring else token
                at = (row, place)
                if caches.page is not None:
                    at = int(made["block_table"][row, token // caches.page]), token % caches.page
                written[at[0], :, at[1]] = True
        kept = cache.cpu().float()[~written]
        torch.testing.assert_close(kept, before[f"{which}_cache"].cpu().float()[~written], equal_nan=True)
        for row, length in enumerate(caches.lengths):
            room = tokens if caches.ring else max(0, min(tokens, caches.holds - length))
            if not room:
                continue
            stored = caches.but(lengths=tuple(length - tokens + room for length in caches.lengths))
            found = stored.held(made, row, which)[:, :, -room:]
            expected = new[row : row + 1, :, :room].double()
            if scale is None:
                assert torch.equal(found.to(cache.dtype), expected.to(cache.dtype))
                continue
            largest = LARGEST[cache.dtype]
            unit = scale[None, :, None, None].cpu().double() if caches.scales == "heads" else (
                expected.abs().amax(-1, keepdim=True) / largest
            )  # fmt: skip
            limit = expected.clamp(-largest * unit, largest * unit)
            step = unit * 0.5 if cache.dtype == torch.int8 else limit.abs() / (16 if "e4m3" in str(cache.dtype) else 8)
            assert ((found - limit).abs() <= step * 1.001 + unit * 1e-2).all()


def test_tokens_without_room_go_nowhere(runner):
    """Past the last row, and to pages that there are not, whatever the numbers on the device."""
    k = v = randn(2, 1, 4, 16, device=runner.device)
    caches = [torch.zeros(2, 1, 16, 16, device=runner.device) for _ in range(2)]
    fusedops.append_kv(k, v, *caches, cache_seqlens=torch.tensor([14, 99], device=runner.device))
    assert torch.equal(caches[0][0, :, 14:], k[0, :, :2])
    assert not caches[0][0, :, :14].any()
    assert not caches[0][1].any()
    pages = [torch.zeros(3, 1, 16, 16, device=runner.device) for _ in range(2)]
    table = torch.tensor([[2, 77], [-5, 1]], device=runner.device)
    fusedops.append_kv(k, v, *pages, cache_seqlens=torch.tensor([14, 14], device=runner.device), block_table=table)
    assert torch.equal(pages[0][2, :, 14:], k[0, :, :2])
    assert torch.equal(pages[0][1, :, :2], k[1, :, 2:])
    assert int((pages[0] != 0).any(-1).sum()) == 4
    out = fusedops.attention_decode(
        k, *pages, cache_seqlens=torch.tensor([99, 20], device=runner.device), block_table=table
    )
    assert out.isfinite().all()


def test_an_exact_multiple_of_the_scale_comes_back(runner):
    numbers = torch.randint(-127, 128, (1, 2, 3, 32), device=runner.device).float()
    numbers[..., 0] = 127.0
    caches = [torch.zeros(1, 2, 16, 32, dtype=torch.int8, device=runner.device) for _ in range(2)]
    scales = [torch.zeros(1, 2, 16, device=runner.device) for _ in range(2)]
    zero = torch.zeros(1, dtype=torch.int32, device=runner.device)
    fusedops.append_kv(0.25 * numbers, numbers * 0.0, *caches, cache_seqlens=zero, k_scale=scales[0], v_scale=scales[1])
    assert torch.equal(caches[0][:, :, :3].float(), numbers)
    assert torch.equal(scales[0][:, :, :3], torch.full((1, 2, 3), 0.25, device=runner.device))
    assert not caches[1].any()
    assert not scales[1].any()


# ---- composition ----------------------------------------------------------------------------------------------------


def test_compiled_equals_eager_and_writes_the_cache(runner):
    def step(q, k_cache, v_cache, k, v, lengths):
        out = fusedops.attention_decode(q, k_cache, v_cache, cache_seqlens=lengths, k=k, v=v)
        lengths.add_(1)
        return out * 2

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    caches = Caches(new=1)
    made = caches.make(runner.device)
    caches.fill(made)
    names = "q", "k_cache", "v_cache", "k", "v", "cache_seqlens"
    other = {name: made[name].clone() for name in names}
    for _ in range(2):
        expected, found = step(*(made[n] for n in names)), compiled(*(other[n] for n in names))
        assert torch.equal(found, expected)
        for name in names[1:]:
            torch.testing.assert_close(other[name], made[name], rtol=0, atol=0, equal_nan=True)
    assert other["cache_seqlens"].tolist() == [length + 2 for length in caches.lengths]


@pytest.mark.parametrize("kind", ["contiguous", "int8_paged"])
def test_opcheck(kernel_runner, kind):
    caches = KINDS[kind]
    made = caches.make(kernel_runner.device)
    cache = tuple(made[n] for n in ("k_cache", "v_cache", "cache_seqlens", "block_table", "k_scale", "v_scale", "ring"))
    for tensor in cache:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.zero_()  # opcheck finds NaN unequal to itself
    torch.library.opcheck(torch.ops.fusedops.append_kv.default, (made["k"], made["v"], *cache, True))
    caches.fill(made)
    rest = (0, None, None, None, 0.0, 0.25, 2, "ieee", True)
    torch.library.opcheck(torch.ops.fusedops.attention_decode.default, (made["q"], *cache, *rest))


def test_a_write_is_noticed_by_autograd(runner):
    cache = torch.zeros(1, 1, 16, 16, device=runner.device)
    new = randn(1, 1, 1, 16, device=runner.device)
    weight = torch.ones(16, device=runner.device, requires_grad=True)
    y = (cache * weight).sum()
    fusedops.append_kv(
        new, new, cache, cache.clone(), cache_seqlens=torch.zeros(1, dtype=torch.int32, device=runner.device)
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_gradients_are_refused_rather_than_lost(runner):
    caches = Caches()
    made = caches.make(runner.device)
    stored = made["k_cache"], made["v_cache"]
    lengths = made["cache_seqlens"]
    with pytest.raises(RuntimeError, match=r"fusedops.attention_decode: a cache has no gradient.*torch.no_grad"):
        fusedops.attention_decode(made["q"].requires_grad_(), *stored, cache_seqlens=lengths)
    with pytest.raises(RuntimeError, match=r"fusedops.append_kv: a cache has no gradient"):
        fusedops.append_kv(made["k"].requires_grad_(), made["v"], *stored, cache_seqlens=lengths)
    with torch.no_grad():
        fusedops.attention_decode(made["q"], *stored, cache_seqlens=lengths)


def test_autocast(runner):
    caches = Caches()
    made = caches.make(runner.device)
    caches.fill(made)
    with torch.autocast(runner.device.type, dtype=torch.bfloat16):
        out = fusedops.attention_decode(
            made["q"], made["k_cache"], made["v_cache"], cache_seqlens=made["cache_seqlens"], k=made["k"], v=made["v"]
        )
    assert out.dtype == torch.bfloat16


def test_meta_and_fake_tensors(kernel_runner):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def shapes(device):
        q = torch.empty(2, 4, 3, 16, dtype=torch.bfloat16, device=device)
        k = torch.empty(2, 2, 3, 16, dtype=torch.bfloat16, device=device)
        caches = [torch.empty(2, 2, 32, 16, dtype=torch.bfloat16, device=device) for _ in range(2)]
        lengths = torch.empty(2, dtype=torch.int32, device=device)
        out, lse = fusedops.attention_decode(q, *caches, cache_seqlens=lengths, k=k, v=k, return_lse=True)
        return out.shape, out.dtype, lse.shape, lse.dtype

    expected = (2, 4, 3, 16), torch.bfloat16, (2, 4, 3), torch.float32
    assert shapes("meta") == expected
    with FakeTensorMode():
        assert shapes(kernel_runner.device) == expected


def test_empty_batches(runner):
    q = randn(0, 4, 1, 16, device=runner.device)
    cache = torch.zeros(0, 2, 16, 16, device=runner.device)
    lengths = torch.zeros(0, dtype=torch.int32, device=runner.device)
    new = torch.zeros(0, 2, 1, 16, device=runner.device)
    out, lse = fusedops.attention_decode(q, cache, cache, cache_seqlens=lengths, k=new, v=new, return_lse=True)
    assert out.shape == (0, 4, 1, 16)
    assert lse.shape == (0, 4, 1)


def test_float64_is_torchs(runner):
    made = Caches(dtype=torch.float64).make(runner.device)
    arguments = made["q"], made["k_cache"], made["v_cache"]
    explained = fusedops.explain(fusedops.attention_decode, *arguments, cache_seqlens=made["cache_seqlens"])
    assert explained.backend == "torch"
    with fusedops.backend("auto"):
        out = fusedops.attention_decode(*arguments, cache_seqlens=made["cache_seqlens"], k=made["k"], v=made["v"])
    assert out.dtype == torch.float64


# ---- wrong arguments ------------------------------------------------------------------------------------------------

WRONG = {
    "q_type": ({"q": None}, TypeError, "q must be a torch.Tensor"),
    "q_length": ({"q": torch.ones(3, 4, 17, 16)}, ValueError, "q must be of a length from 1 to 16"),
    "q_heads": ({"q": torch.ones(3, 3, 1, 16)}, ValueError, "k_cache must be of a number of heads that divides q's 3"),
    "q_size": ({"q": torch.ones(3, 4, 1, 8)}, ValueError, "k_cache must be of q's head size 8"),
    "batch": ({"q": torch.ones(2, 4, 1, 16)}, ValueError, "k_cache must be of the batch of q or k, 2"),
    "cache_type": ({"k_cache": torch.ones(3, 2, 48, 16).int()}, TypeError, "k_cache must be a tensor of float32"),
    "cache_dims": ({"k_cache": torch.ones(3, 2, 48)}, ValueError, "k_cache must be a strided tensor of four"),
    "cache_stride": (
        {"k_cache": torch.ones(3, 2, 16, 48).transpose(2, 3)}, ValueError, "k_cache must be of stride 1 in its last",
    ),
    "cache_dtypes": ({"v_cache": torch.ones(3, 2, 48, 24).half()}, TypeError, "v_cache must be of k_cache's dtype"),
    "cache_shapes": ({"v_cache": torch.ones(3, 2, 47, 24)}, ValueError, "v_cache must be of shape"),
    "lengths_type": ({"cache_seqlens": [1, 2, 3]}, TypeError, "cache_seqlens must be an int32 or int64 tensor"),
    "lengths_shape": ({"cache_seqlens": torch.zeros(2).int()}, ValueError, r"cache_seqlens must be of shape \(3,\)"),
    "table_and_ring": ({"block_table": torch.zeros(3, 2).int(), "ring": True}, ValueError, "ring must be False where"),
    "table_shape": ({"block_table": torch.zeros(2, 2).int()}, ValueError, r"block_table must be of shape \(3, pages"),
    "ring_without_window": ({"ring": True}, ValueError, r"window must be \(left, 0\) with left of at most 47"),
    "ring_too_small": ({"ring": True, "window": (48, 0)}, ValueError, "window must be .*the ring has 48 tokens"),
    "ring_type": ({"ring": 1}, TypeError, "ring must be a bool"),
    "window_type": ({"window": 4}, TypeError, "window must be a pair"),
    "window_right": ({"window": (4, 2)}, ValueError, "window must be a pair .*right None or 0"),
    "k_alone": ({"k": torch.ones(3, 2, 1, 16)}, ValueError, "v must be given where the other of k and v is"),
    "k_shape": (
        {"k": torch.ones(3, 1, 1, 16), "v": torch.ones(3, 1, 1, 24)}, ValueError, "k must be of shape .3, 2, tokens",
    ),
    "v_shape": ({"k": torch.ones(3, 2, 1, 16), "v": torch.ones(3, 2, 2, 24)}, ValueError, "v must be of shape"),
    "slopes": ({"alibi_slopes": torch.ones(3)}, ValueError, "alibi_slopes must be of shape"),
    "sinks": ({"sinks": torch.ones(3)}, ValueError, "sinks must be of shape"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap must be 0"),
    "scale": ({"scale": float("inf")}, ValueError, "scale must be None or a finite number"),
    "scales_of_plain": ({"k_scale": torch.ones(2)}, ValueError, "k_scale must be None where k_cache is neither"),
    "splits": ({"num_splits": 0}, ValueError, "num_splits must be None or an int from 1 to 128"),
    "splits_type": ({"num_splits": 2.0}, TypeError, "num_splits must be None or an int"),
    "return_lse": ({"return_lse": 1}, TypeError, "return_lse must be a bool"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    change, error, text = WRONG[case]
    given: dict[str, Any] = {
        "q": torch.ones(3, 4, 1, 16), "k_cache": torch.ones(3, 2, 48, 16), "v_cache": torch.ones(3, 2, 48, 24),
        "cache_seqlens": torch.zeros(3, dtype=torch.int32),
    }  # fmt: skip
    with pytest.raises(error, match=f"attention_decode: {text}"):
        fusedops.attention_decode(**given | change)


def test_wrong_scales_and_pages():
    cache = torch.zeros(3, 2, 48, 16, dtype=torch.int8)
    lengths, k = torch.zeros(3, dtype=torch.int32), torch.ones(3, 2, 1, 16)
    for scale, error, text in (
        (None, TypeError, "k_scale must be a float32 tensor where k_cache is int8"),
        (torch.ones(2).double(), TypeError, "k_scale must be a float32 tensor"),
        (torch.ones(3), ValueError, r"k_scale must be of shape \(2,\).* or \(3, 2, 48\)"),
    ):
        with pytest.raises(error, match=f"append_kv: {text}"):
            fusedops.append_kv(k, k, cache, cache.clone(), cache_seqlens=lengths, k_scale=scale, v_scale=torch.ones(2))
    pages = torch.zeros(9, 2, 8, 16)
    with pytest.raises(ValueError, match="k_cache must be of pages of at least 16 tokens"):
        fusedops.append_kv(k, k, pages, pages.clone(), cache_seqlens=lengths, block_table=torch.zeros(3, 4).int())
    pages, table = torch.zeros(0, 2, 16, 16), torch.zeros(3, 4).int()
    with pytest.raises(ValueError, match="k_cache must be of at least one page, as block_table names some"):
        fusedops.append_kv(k, k, pages, pages.clone(), cache_seqlens=lengths, block_table=table)


def test_a_pool_without_pages_holds_sequences_of_no_tokens(runner):
    q, pages = torch.ones(3, 4, 1, 16, device=runner.device), torch.zeros(0, 2, 16, 16, device=runner.device)
    lengths = torch.tensor([0, 5, -3], device=runner.device)
    out, lse = fusedops.attention_decode(
        q, pages, pages.clone(), cache_seqlens=lengths, block_table=lengths.new_zeros(3, 0), return_lse=True
    )
    assert not out.any()
    assert (lse == -math.inf).all()
