"""Attention over a sequence cut over ranks is that of one device, by every method, order and option."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops.distributed import context_parallel_attention, positions, shard_sequence, unshard_sequence
from fusedops.distributed.context_parallel_parts import Parts
from fusedops.distributed.context_parallel_plan import Layout
from tests.attention.problems import double, exact, gradients, plain
from tests.harness.errors import check_error
from tests.harness.tensors import randn


@dataclass(frozen=True)
class Case:
    """A call; ``length`` is that of a rank's shard."""

    method: str = "ring"
    order: str = "contiguous"
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    heads: int = 4
    kv_heads: int = 2
    length: int = 6
    d: int = 16
    dv: int = 8
    sinks: bool = False
    softcap: float = 0.0
    scale: float | None = None
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        default = Case()
        names = [n for n in self.__dataclass_fields__ if getattr(self, n) != getattr(default, n)]
        return ",".join(f"{n}={getattr(self, n)}" for n in names).replace(" ", "").replace("torch.", "") or "plain"

    @property
    def options(self) -> dict[str, Any]:
        return {n: getattr(self, n) for n in ("causal", "window", "softcap", "scale")}

    def inputs(self, world: int) -> list[torch.Tensor]:
        """q, k, v of the whole sequence, and sinks."""
        shapes = (self.heads, self.d), (self.kv_heads, self.d), (self.kv_heads, self.dv)
        made = [
            randn(2, heads, world * self.length, size, dtype=self.dtype, requires_grad=True) for heads, size in shapes
        ]
        return [*made, randn(self.heads, requires_grad=True)] if self.sinks else made


def places(rank: int, world: int, seqlen: int, order: str) -> torch.Tensor:
    """The positions of a rank, said once more."""
    whole = torch.arange(seqlen)
    if order == "contiguous":
        return whole.chunk(world)[rank]
    chunks = whole.chunk(2 * world)
    return torch.cat((chunks[rank], chunks[2 * world - 1 - rank]))


def call(rank, world, case, inputs, grads, kernels=False, repeat=1):
    """[(out, lse, gradients…)] of a rank's shard, once for each repetition."""
    at = places(rank, world, inputs[0].shape[2], case.order)
    results = []
    for _ in range(repeat):
        leaves = [t[:, :, at].detach().requires_grad_() for t in inputs[:3]]
        sinks = inputs[3].detach().requires_grad_() if case.sinks else None
        with fusedops.backend("triton") if kernels else contextlib.nullcontext():
            outputs = context_parallel_attention(
                *leaves, method=case.method, order=case.order, sinks=sinks, return_lse=True, **case.options
            )
            wanted = leaves if sinks is None else [*leaves, sinks]
            found = torch.autograd.grad(outputs, wanted, [g[:, :, at] for g in grads])
        results.append([t.detach() for t in (*outputs, *found)])
    return results


def joined(results, world, order, seqlen):
    """Of the ranks' (out, lse, dq, dk, dv[, dsinks]) those of the whole."""
    at = torch.cat([places(rank, world, seqlen, order) for rank in range(world)]).argsort()
    whole = [torch.cat(shards, 2)[:, :, at] for shards in zip(*(r[:5] for r in results), strict=True)]
    return whole + [sum(shards) for shards in zip(*(r[5:] for r in results), strict=True)]


NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def incoming(case, world):
    """Gradients of out and lse of the whole sequence."""
    shape = 2, case.heads, world * case.length
    return [randn(*shape, case.dv, dtype=case.dtype), randn(*shape)]


def expected(case, inputs, grads):
    """[(exact, plain)] of out, lse and the gradients."""

    def with_sinks(function):
        return lambda q, k, v, sinks=None, **options: function(q, k, v, None, None, sinks, **options)

    truth = gradients(with_sinks(exact), [double(t) for t in inputs], [g.double() for g in grads], **case.options)
    base = gradients(with_sinks(plain), inputs, grads, **case.options)
    return list(zip((*truth[0], *truth[1]), (*base[0], *base[1]), strict=True))


def check(ranks, case, kernels=False):
    world = ranks.world
    inputs, grads = case.inputs(world), incoming(case, world)
    sent = [t.detach().contiguous() for t in inputs]
    results = [repeated[0] for repeated in ranks.run(call, case, sent, grads, kernels)]
    found = joined(results, world, case.order, world * case.length)
    samples = [expected(case, inputs, grads)]
    if case.sinks:  # of few elements, whose errors are a matter of luck
        samples += [expected(case, case.inputs(world), incoming(case, world)) for _ in range(4)]
    for place, actual in enumerate(found):
        name = NAMES[place]
        more = [sample[place] for sample in samples[1:]] if name == "dsinks" else ()
        check_error(actual, *samples[0][place], gradient=name not in ("out", "lse"), what=name, more=more)


METHODS, ORDERS = ("ring", "all_to_all"), ("contiguous", "zigzag")
SEEN = [{}, {"causal": True}, {"window": (7, 2)}, {"causal": True, "window": (4, None)}]
CASES = [
    Case(method=method, order=order, dtype=dtype, **seen)
    for method, order, seen, dtype in itertools.product(METHODS, ORDERS, SEEN, (torch.float32, torch.bfloat16))
]
OPTIONS = [
    Case(causal=True, sinks=True, kv_heads=1),
    Case(causal="bottom_right", softcap=2.0, scale=-0.4, kv_heads=4),
    Case(order="zigzag", causal=True, softcap=3.0, sinks=True, dtype=torch.float16),
    Case(order="zigzag", window=(0, 0), scale=0.0),
    Case(window=(0, 9), length=5, d=5, dv=3),
    Case(window=(None, 3), length=1),
    Case(order="zigzag", causal=True, length=2, window=(3, 0)),
    Case(method="all_to_all", causal=True, sinks=True, softcap=2.0, kv_heads=1),
    Case(method="all_to_all", order="zigzag", scale=-0.4, kv_heads=4, sinks=True),
]


@pytest.mark.parametrize("case", CASES + OPTIONS, ids=str)
def test_two_ranks(two_ranks, case):
    check(two_ranks, case)


@pytest.mark.parametrize("case", CASES + OPTIONS, ids=str)
def test_four_ranks(four_ranks, case):
    check(four_ranks, replace(case, length=2) if case.length == 6 and case.window is None else case)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "case",
    [
        Case(order="zigzag", causal=True, length=10, sinks=True, heads=2, kv_heads=1),
        Case(window=(3, 5), length=7, softcap=2.0, heads=1, kv_heads=1),  # bounds off the diagonal on both sides
        Case(order="zigzag", causal=True, length=10, heads=2, kv_heads=1, dtype=torch.bfloat16),
        Case(method="all_to_all", order="zigzag", causal=True, length=10, heads=2, kv_heads=1),
    ],
    ids=str,
)
def test_the_kernels(two_ranks, case):
    check(two_ranks, case, kernels=True)


def test_float64(two_ranks):
    """Which no kernel takes: torch's operators, in float64 all through."""
    case = Case(order="zigzag", causal=True, softcap=3.0, sinks=True, dtype=torch.float64)
    inputs, grads = case.inputs(2), [g.double() for g in incoming(case, 2)]
    results = [r[0] for r in two_ranks.run(call, case, [t.detach() for t in inputs], grads)]
    for name, actual, (reference, _) in zip(
        NAMES, joined(results, 2, "zigzag", 12), expected(case, inputs, grads), strict=True
    ):
        torch.testing.assert_close(actual.double(), reference, rtol=1e-6 if name == "dsinks" else 1e-12, atol=1e-12)


def awkward(rank, world):
    """Strides of any kind; the gradients of a sum (stride 0), of one output, of one input."""
    torch.manual_seed(rank)
    options = {"order": "zigzag", "causal": True}
    tensors = [randn(1, 2, 6, 8, layout=layout) for layout in ("transposed", "sliced", "strided")]
    plain_tensors = [t.contiguous() for t in tensors]
    for method in METHODS:
        results = []
        for given in (tensors, plain_tensors):
            leaves = [t.detach().requires_grad_() for t in given]
            out, lse = context_parallel_attention(*leaves, method=method, return_lse=True, **options)
            grads = [
                *torch.autograd.grad(out.sum(), leaves, retain_graph=True),
                *torch.autograd.grad(lse.sum(), leaves[:2]),
            ]
            for place in range(3):
                alone = [t.detach().requires_grad_(i == place) for i, t in enumerate(given)]
                out, _ = context_parallel_attention(*alone, method=method, return_lse=True, **options)
                (grad,) = torch.autograd.grad(out.sum(), [alone[place]])
                assert torch.equal(grad, grads[place])
            results.append([out, lse, *grads])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    for shape in ((0, 2, 4, 8), (1, 2, 0, 8)):
        q = torch.zeros(shape, requires_grad=True)
        for method in METHODS:
            out, lse = context_parallel_attention(q, q, q, method=method, return_lse=True, **options)
            (grad,) = torch.autograd.grad(out.sum(), q)
            assert out.shape == grad.shape == q.shape
            assert lse.shape == q.shape[:3]


def test_layouts_single_gradients_and_empty_shards(two_ranks):
    two_ranks.run(awkward)


@pytest.mark.parametrize("method", METHODS)
def test_to_the_bit_on_every_run(four_ranks, method):
    case = Case(method=method, order="zigzag", causal=True, length=4, dtype=torch.bfloat16)
    inputs = [t.detach() for t in case.inputs(4)]
    for first, second in four_ranks.run(call, case, inputs, incoming(case, 4), False, 2):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# What is computed and sent.


def seen_pairs(layout, rank, source):
    mine, theirs = (places(r, layout.world, layout.world * layout.length, layout.order) for r in (rank, source))
    distance = theirs - mine[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if layout.left is not None:
        seen &= distance >= -layout.left
    if layout.right is not None:
        seen &= distance <= layout.right
    return seen


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_plan_covers_every_pair_once(world, order):
    lengths = (0, 2, 4) if order == "zigzag" else (0, 1, 3)
    for length, left, right in itertools.product(lengths, (None, 0, 1, 3, 5, 30), (None, 0, 2, 4, 30)):
        layout = Layout(world, length, order, left, right)
        for source in range(world):
            needed = []
            for rank in range(world):
                seen = seen_pairs(layout, rank, source).int()
                for each in layout.calls(rank, source):
                    part = seen[each.rows, each.columns]
                    distance = torch.arange(part.shape[1]) - torch.arange(part.shape[0])[:, None]
                    low = -part.numel() if each.low is None else each.low
                    high = part.numel() if each.high is None else each.high
                    inside = ((distance >= low) & (distance <= high)).int()
                    assert each.scores() == inside.sum() > 0
                    part -= inside
                assert not seen.any()
                if layout.calls(rank, source):
                    needed.append((rank - source) % world)
            assert layout.reach(source) == max(needed, default=0)


@pytest.mark.parametrize("world", [2, 4, 64])
def test_zigzag_gives_every_rank_as_much(world):
    """And in one call a step; contiguous chunks do not."""
    computed = {}
    for order in ORDERS:
        layout = Layout(world, 8, order, None, 0)
        calls = [[layout.calls(rank, source) for source in range(world)] for rank in range(world)]
        computed[order] = [sum(c.scores() for step in steps for c in step) for steps in calls]
        assert all(len(step) <= 1 for steps in calls for step in steps)
    assert len(set(computed["zigzag"])) == 1
    assert sum(computed["zigzag"]) == sum(computed["contiguous"]) == (8 * world) * (8 * world + 1) // 2
    assert max(computed["contiguous"]) > 1.4 * computed["zigzag"][0]


def recorded(rank, world, case, seed=0):
    """What a rank does, in order: (posted, [bytes sent], [bytes received]), waited, forward, backward."""
    events, buffers = [], set()
    post, forward, backward = dist.batch_isend_irecv, Parts.forward, Parts.backward
    all_to_all = dist.all_to_all_single

    class Waited:
        def __init__(self, work):
            self.wait = lambda: (events.append(("waited",)), work.wait())

    def posted(operations):
        sizes = [[o.tensor.nbytes for o in operations if o.op is op] for op in (dist.isend, dist.irecv)]
        buffers.update((o.tensor.data_ptr(), o.tensor.nbytes) for o in operations if o.tag == 1)
        events.append(("posted", *sizes))
        return [Waited(work) for work in post(operations)]

    def exchanged(received, sent, group):
        events.append(("posted", [sent.nbytes // world * (world - 1)], []))
        return all_to_all(received, sent, group=group)

    def computed(name, function):
        return lambda *args: (events.append((name,)), function(*args))[1]

    torch.manual_seed(seed)
    leaves = [t.detach()[:, :, : case.length].requires_grad_() for t in case.inputs(1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", posted)
        patch.setattr(dist, "all_to_all_single", exchanged)
        patch.setattr(Parts, "forward", computed("forward", forward))
        patch.setattr(Parts, "backward", computed("backward", backward))
        out = context_parallel_attention(*leaves, method=case.method, order=case.order, **case.options)
        of_forward, held = len(events), list(buffers)
        torch.autograd.grad(out.sum(), leaves)
    return events[:of_forward], events[of_forward:], held


def test_the_next_exchange_is_posted_before_this_steps_attention(four_ranks):
    case = Case(order="zigzag", causal=True)
    block = 2 * 2 * 6 * (16 + 8) * 4
    for forward, backward, held in four_ranks.run(recorded, case):
        step = [("posted", [block], [block]), ("forward",), ("waited",), ("waited",)]
        assert forward == step * 3 + [("forward",)]
        # Two buffers of one block each: no rank ever has more than its own keys and values and these.
        assert len(held) == 2
        assert {size for _, size in held} == {block}
        # Each step: keys and values of the next one posted, computing, gradients that arrived meanwhile, theirs posted.
        shown = [event[0] for event in backward]
        first = ["posted", "backward", "posted", "waited", "waited"]
        other = ["posted", "backward", "waited", "waited", "posted", "waited", "waited"]
        last = ["backward", "waited", "waited", "posted", "waited", "waited"]
        assert shown == first + other * 2 + last


def test_blocks_go_no_further_than_they_are_needed(four_ranks):
    block = 2 * 2 * 6 * (16 + 8) * 4
    sent = {}
    for name, case in {
        "causal": Case(causal=True),
        "window": Case(causal=True, window=(5, 0)),
        "band": Case(window=(7, 0)),
        "self": Case(window=(0, 0)),
    }.items():
        results = four_ranks.run(recorded, case)
        sent[name] = [sum(sum(e[1]) for e in forward if e[0] == "posted") // block for forward, *_ in results]
        backward = [sum(sum(e[1]) for e in events if e[0] == "posted") for _, events, _ in results]
        # Gradients take as many hops, and those that have left home one back.
        homeward = {"causal": 3, "window": 3, "band": 3, "self": 0}[name]
        assert sum(backward) == (2 * sum(sent[name]) + homeward) * block
    assert sent == {"causal": [1, 2, 3, 0], "window": [1, 1, 1, 0], "band": [1, 2, 2, 0], "self": [0, 0, 0, 0]}


def together(rank, world):
    """Every other thing that calls are made in."""
    torch.manual_seed(rank)
    q, k, v = (randn(1, 4, 6, 8, requires_grad=True) for _ in range(3))
    for method in METHODS:
        options = {"method": method, "order": "zigzag", "causal": True}

        def attend(q, k, v, options=options):
            return context_parallel_attention(2 * q, k, v, **options).sin()

        expected = attend(q, k, v)
        grads = torch.autograd.grad(expected.sum(), (q, k, v))
        with torch.no_grad():
            assert torch.equal(attend(q, k, v), expected)
        for use_reentrant in (False, True):
            out = checkpoint(attend, q, k, v, use_reentrant=use_reentrant)
            out.sum().backward()
            for leaf, grad in zip((q, k, v), grads, strict=True):
                assert torch.equal(leaf.grad, grad)
                leaf.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, lse = context_parallel_attention(q, k, v, return_lse=True, **options)
        rounded = [t.bfloat16() for t in (q, k, v)]
        assert torch.equal(out, context_parallel_attention(*rounded, return_lse=True, **options)[0])
        assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.sum(), (q, k, v)))
    with pytest.raises(RuntimeError, match=r"no second derivative\. Use method=\"all_to_all\""):
        torch.autograd.grad(context_parallel_attention(q, k, v).sum(), q, create_graph=True)
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    # With lse: torch's fused operator, which serves without it, has no second derivative on every device.
    options = {"causal": True, "return_lse": True}
    out, _ = context_parallel_attention(*leaves, method="all_to_all", **options)
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    whole = [unshard_sequence(t.detach(), 2).requires_grad_() for t in leaves]
    first = torch.autograd.grad(fusedops.attention(*whole, **options)[0].square().sum(), whole, create_graph=True)
    truth = torch.autograd.grad(sum(g.square().sum() for g in first), whole)
    for actual, reference in zip(second, truth, strict=True):
        torch.testing.assert_close(actual, reference[:, :, places(rank, world, 12, "contiguous")])


def test_checkpoints_autocast_and_second_derivatives(two_ranks):
    two_ranks.run(together)


def every_option(rank, world, q, k, v, mask, slopes, ids):
    """The other options, against one device that has it all; gradients of what every rank has are sums."""
    results = []
    for order in ORDERS:
        at = places(rank, world, q.shape[2], order)
        for options in (
            {"attn_mask": mask, "alibi_slopes": slopes},
            {"attn_mask": mask[:, :1] > 0, "document_ids": ids},
            {"attn_mask": mask[0, 0], "alibi_slopes": slopes[0], "causal": True, "softcap": 3.0},
        ):
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            given = {
                n: t.detach().requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
                for n, t in options.items()
            }
            learned = [t for t in given.values() if isinstance(t, torch.Tensor) and t.requires_grad]
            truth = fusedops.attention(*leaves, **given)
            shards = [t[:, :, at] for t in leaves]
            out = context_parallel_attention(*shards, method="all_to_all", order=order, **given)
            torch.testing.assert_close(out, truth[:, :, at])
            weight = truth.detach().cos()
            reference = torch.autograd.grad((truth * weight).sum(), leaves + learned)
            found = list(torch.autograd.grad((out * weight[:, :, at]).sum(), leaves + learned))
            for grad in found:
                dist.all_reduce(grad)
            torch.testing.assert_close(tuple(found), reference)
        torch.manual_seed(rank)
        leaves = [t[:, :, at].detach().requires_grad_() for t in (q, k, torch.ones_like(v))]
        out = context_parallel_attention(*leaves, method="all_to_all", order=order, dropout_p=0.5)
        results.append((out.mean().item(), out.std().item()))
        grad = torch.autograd.grad(out.sum(), leaves[2])[0]
        dist.all_reduce(total := grad.sum()), dist.all_reduce(produced := out.sum().detach())
        torch.testing.assert_close(total, produced)  # the backward drops what the forward has dropped
    return results


def test_all_to_all_takes_the_other_options(two_ranks):
    length = 24
    ids = torch.arange(length).div(7, rounding_mode="floor")
    tensors = [randn(2, heads, length, 8) for heads in (4, 2, 2)]
    results = two_ranks.run(every_option, *tensors, randn(2, 4, length, length), torch.rand(2, 4), ids)
    for rank in results:
        for mean, deviation in rank:
            assert abs(mean - 1) < 0.1
            assert deviation > 0.05


def sharded(rank, world, order):
    x = torch.arange(2 * 8 * world * 3, dtype=torch.float64).view(2, 8 * world, 3).requires_grad_()
    at = places(rank, world, 8 * world, order)
    assert torch.equal(positions(8 * world, order=order), at)
    shard = shard_sequence(x, order=order)
    assert torch.equal(shard, x[:, at])
    assert torch.equal(shard_sequence(x.mT, -1, order=order), x.mT[..., at])
    whole = unshard_sequence(shard, order=order)
    assert torch.equal(whole, x)
    assert torch.equal(unshard_sequence(shard.mT, 2, order=order), x.mT)
    tokens = torch.arange(8 * world, dtype=torch.int32)
    assert torch.equal(unshard_sequence(shard_sequence(tokens, 0, order=order), 0, order=order), tokens)
    # Rank r's loss is (r + 1) times the sum of squares: a shard's gradient sums what all ranks' losses give it.
    (grad,) = torch.autograd.grad((whole.square() * (rank + 1)).sum(), x)
    expected = torch.zeros_like(x)
    expected[:, at] = 2 * x[:, at] * sum(range(1, world + 1))
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_shards_and_back(two_ranks, four_ranks, order):
    for ranks in (two_ranks, four_ranks):
        ranks.run(sharded, order)


def groups(rank, world):
    """Two groups of two, as meshes make them; and one of which this process is no member."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    torch.manual_seed(rank // 2)
    q, k, v = (randn(1, 2, 8, 4) for _ in range(3))
    for group in (mesh["context"], mesh["context"].get_group()):
        shards = [shard_sequence(t, 2, group=group, order="zigzag") for t in (q, k, v)]
        for method in METHODS:
            out = context_parallel_attention(*shards, group=group, order="zigzag", causal=True, method=method)
            whole = unshard_sequence(out, 2, group=group, order="zigzag")
            torch.testing.assert_close(whole, fusedops.attention(q, k, v, causal=True))
    other = dist.new_group([0, 1])
    messages = [said(lambda: context_parallel_attention(q, k, v, group=mesh))]
    if rank > 1:
        messages.append(said(lambda: context_parallel_attention(q, k, v, group=other)))
    return messages


def test_groups(four_ranks):
    for rank, messages in enumerate(four_ranks.run(groups)):
        assert "group must be a process group, or a DeviceMesh of one dimension" in messages[0]
        assert len(messages) == 1 or "group must be a group that this process is in" in messages[1]
        assert len(messages) == 1 + (rank > 1)


def said(function):
    try:
        function()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def disagreeing(rank, world):
    q = torch.zeros(1, 4, 6 + 2 * (rank == 1), 8)
    even = torch.zeros(1, 4, 6, 8)
    calls = (
        lambda: context_parallel_attention(q, q, q),
        lambda: context_parallel_attention(even, even, even, causal=rank == 0),
        lambda: context_parallel_attention(even, even, even, method=METHODS[rank % 2]),
        lambda: context_parallel_attention(
            even.to(torch.float16 if rank else torch.float32), *[even.half() if rank else even] * 2
        ),
        lambda: context_parallel_attention(even.clone().requires_grad_(rank == 0), even, even),
        lambda: context_parallel_attention(even, even, even, scale=float(rank)),
    )
    return [said(function) for function in calls]


def test_ranks_that_disagree_all_say_so(two_ranks):
    texts = [
        "q's length (the shard's) must be the same on all ranks; got, rank by rank, 6, 8",
        "causal or window must be the same on all ranks; got, rank by rank, 0, None",
        "method must be the same on all ranks; got, rank by rank, ring, all_to_all",
        "q's dtype must be the same on all ranks; got, rank by rank, float32, float16",
        "q's requires_grad must be the same on all ranks; got, rank by rank, True, False",
        "scale must be the same on all ranks; got, rank by rank, 0.0, 1.0",
    ]
    for messages in two_ranks.run(disagreeing):
        assert messages == [f"ValueError: context_parallel_attention: {text}" for text in texts]


WRONG = [
    ({"q": "x"}, TypeError, "q must be a torch.Tensor"),
    ({"q": torch.zeros(4, 6, 8)}, ValueError, "q must be of four dimensions"),
    ({"k": torch.zeros(1, 2, 4, 8)}, ValueError, r"k must be of shape \(1, heads, 6, 8\), as q is"),
    ({"k": torch.zeros(1, 3, 6, 8)}, ValueError, "k must be of a number of heads that divides q's 4"),
    ({"v": torch.zeros(1, 4, 6, 8)}, ValueError, r"v must be of shape \(1, 2, 6, head size\), as k is"),
    ({"v": torch.zeros(1, 2, 6, 8).half()}, TypeError, "v must be of the dtype of q"),
    ({"order": "sorted"}, ValueError, 'order must be "contiguous" or "zigzag"'),
    ({"order": 1}, TypeError, 'order must be "contiguous" or "zigzag"'),
    ({"method": "tree"}, ValueError, 'method must be "ring" or "all_to_all"'),
    ({"group": 3}, (TypeError, ValueError), "group must be"),
    ({"causal": "left"}, ValueError, "causal must be"),
    ({"window": 3}, TypeError, "window must be"),
    ({"return_lse": 1}, TypeError, "return_lse must be a bool"),
    ({"sinks": torch.zeros(3)}, ValueError, r"sinks must be of shape \(4,\)"),
    ({"dropout_p": 0.5}, ValueError, 'dropout_p must be not given to method="ring"; method="all_to_all" takes it'),
    ({"attn_mask": torch.zeros(6, 6)}, ValueError, 'attn_mask must be not given to method="ring"'),
    ({"alibi_slopes": torch.zeros(4)}, ValueError, 'alibi_slopes must be not given to method="ring"'),
    ({"document_ids": torch.zeros(6).long()}, ValueError, 'document_ids must be not given to method="ring"'),
    ({"method": "all_to_all", "attn_mask": torch.zeros(5, 6)}, ValueError, "attn_mask must be of a shape"),
]


@pytest.mark.parametrize(("given", "error", "text"), WRONG, ids=[text for *_, text in WRONG])
def test_wrong_arguments(given, error, text):
    right = {"q": torch.zeros(1, 4, 6, 8), "k": torch.zeros(1, 2, 6, 8), "v": torch.zeros(1, 2, 6, 8)}
    with pytest.raises(error, match=f"context_parallel_attention: {text}"):
        context_parallel_attention(**right | given)


def wrong(rank, world):
    zeros = lambda heads, length=6: torch.zeros(1, heads, length, 8)  # noqa: E731
    calls = (
        lambda: context_parallel_attention(zeros(4, 5), zeros(4, 5), zeros(4, 5), order="zigzag"),
        lambda: context_parallel_attention(zeros(6), zeros(2), zeros(2), method="all_to_all"),
        lambda: context_parallel_attention(zeros(12), zeros(3), zeros(3), method="all_to_all"),
        lambda: context_parallel_attention(
            zeros(4), zeros(4), zeros(4), method="all_to_all", attn_mask=torch.zeros(6, 6)
        ),
        lambda: context_parallel_attention(zeros(4), zeros(4), zeros(4), group=3),
        lambda: positions(6, order="zigzag"),
        lambda: positions(2.0),
        lambda: shard_sequence(torch.zeros(1, 6)),
        lambda: shard_sequence(torch.zeros(1, 8), 2),
        lambda: unshard_sequence(torch.zeros(1, 3), order="zigzag"),
    )
    return [said(function) for function in calls]


def test_wrong_arguments_on_ranks(four_ranks):
    texts = [
        'q must be of an even length for order="zigzag", two chunks of the 8',
        'q must be of a number of heads that the 4 ranks divide for method="all_to_all"',
        "k must be of a number of heads that divides the 4 ranks",
        "attn_mask must be of a shape that broadcasts to (1, 4, 24, 24)",
        "group must be a process group",
        'seqlen must be of a length that is a multiple of 8 (4 ranks, order="zigzag"): pad it',
        "seqlen must be an int",
        "tensor must be of a length that is a multiple of 4",
        "dim must be a dimension of the tensor, which has 2",
        "tensor must be of an even size in dimension 1",
    ]
    for messages in four_ranks.run(wrong):
        for text, message in zip(texts, messages, strict=True):
            assert text in message


def test_one_rank_is_plain_attention():
    q, k, v = (randn(1, 2, 6, 8) for _ in range(3))
    for method, order in itertools.product(METHODS, ORDERS):
        found = context_parallel_attention(q, k, v, method=method, order=order, causal=True, return_lse=True)
        for a, b in zip(found, fusedops.attention(q, k, v, causal=True, return_lse=True), strict=True):
            assert torch.equal(a, b)
    assert torch.equal(positions(6), torch.arange(6))
    assert shard_sequence(q, 2) is unshard_sequence(q, 2) is q


def test_it_is_a_graph_break():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def function(q, k, v):
        return context_parallel_attention(2 * q, k, v, causal=True, order="zigzag").sin()

    torch._dynamo.reset()
    inputs = [randn(1, 2, 6, 8, requires_grad=True) for _ in range(3)]
    eager, compiled = function(*inputs), torch.compile(function, backend=backend)(*inputs)
    assert torch.equal(eager, compiled)
    assert len(graphs) == 2
    for a, b in zip(*(torch.autograd.grad(y.sum(), inputs) for y in (eager, compiled)), strict=True):
        assert torch.equal(a, b)


def test_explain_says_what_serves_it():
    q = torch.zeros(1, 2, 6, 300)
    assert "head size 300" in str(fusedops.explain(context_parallel_attention, q, q, q, order="zigzag"))
