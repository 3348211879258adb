"""Block masks: which blocks attention visits, and which of those it must ask about, against brute force."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch
from torch.nn.attention import flex_attention

import fusedops
from fusedops.attention.block_mask import BLOCK, BlockMask
from fusedops.attention.modifiers import MaskMod
from fusedops.runtime.backend import HAS_TRITON

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def causal(batch, head, i, j, args):
        return j <= i

    @triton.jit
    def window(batch, head, i, j, args):
        return (j - i >= -50) & (j - i <= 20)

    @triton.jit
    def prefix_of_batch(batch, head, i, j, args):
        return j < tl.load(args[0] + batch)

    @triton.jit
    def reach_of_head(batch, head, i, j, args):
        return j <= i + 90 * head

    @triton.jit
    def some_queries(batch, head, i, j, args):
        return (i // 100) % 2 == 1

    @triton.jit
    def table(batch, head, i, j, args):
        return tl.load(args[0] + head * 512 + (i + 2 * j) % 512)

    @triton.jit
    def materialize_kernel(OUT, RULE, heads, seqlen_q, seqlen_k, ROWS: tl.constexpr, COLS: tl.constexpr):
        """Program i asks a rule about one tile, laid with its queries along the columns."""
        tiles_k = tl.cdiv(seqlen_k, COLS)
        tiles_q = tl.cdiv(seqlen_q, ROWS)
        tile = tl.program_id(0) % (tiles_q * tiles_k)
        pair = tl.program_id(0) // (tiles_q * tiles_k)
        i = (tile // tiles_k * ROWS + tl.arange(0, ROWS))[None, :]
        j = (tile % tiles_k * COLS + tl.arange(0, COLS))[:, None]
        inside = (i < seqlen_q) & (j < seqlen_k)
        seen = RULE.function(
            pair // heads, pair % heads, tl.minimum(i, seqlen_q - 1), tl.minimum(j, seqlen_k - 1), RULE.args
        )
        tl.store(OUT + (pair * seqlen_q + i) * seqlen_k + j, seen.to(tl.int8), mask=inside)


# Each rule in plain torch; a kernel's function of the same name is above.
DEFINITIONS = {
    "causal": lambda batch, head, i, j: j <= i,
    "window": lambda batch, head, i, j: (j - i >= -50) & (j - i <= 20),
    "prefix_of_batch": lambda batch, head, i, j, lengths: j < lengths[batch],
    "reach_of_head": lambda batch, head, i, j: j <= i + 90 * head,
    "some_queries": lambda batch, head, i, j: (i // 100) % 2 == 1,
    "table": lambda batch, head, i, j, bits: bits[head, (i + 2 * j) % 512],
}


def rule(name, device):
    args = {
        "prefix_of_batch": lambda: (torch.tensor([128, 300, 0, 77], device=device),),
        "table": lambda: ((torch.rand(2, 512) < 0.9999).to(device),),
    }.get(name, tuple)()
    return MaskMod(globals().get(name), args, DEFINITIONS[name])


def brute_kinds(mask):
    """Of each block of a mask (batch, heads, seqlen_q, seqlen_k): 0 nothing seen, 1 some, 2 all."""
    *lead, seqlen_q, seqlen_k = mask.shape
    blocks = [(s + BLOCK - 1) // BLOCK for s in (seqlen_q, seqlen_k)]
    kinds = torch.zeros(*lead, *blocks, dtype=torch.int8)
    for b, h, a, c in itertools.product(*map(range, kinds.shape)):
        part = mask[b, h, a * BLOCK : (a + 1) * BLOCK, c * BLOCK : (c + 1) * BLOCK]
        kinds[b, h, a, c] = int(part.any()) + int(part.all() and part.shape[1] == BLOCK)
    return kinds


def brute_lists(kinds):
    """(blocks in part, blocks in full) of each row of kinds, as lists."""
    rows = kinds.flatten(0, -2).tolist()
    return [tuple([c for c, kind in enumerate(row) if kind == wanted] for wanted in (1, 2)) for row in rows]


def read_lists(index, count):
    """What :meth:`BlockMask.lists` gives, read back; each row must be a permutation of all blocks."""
    assert index.is_contiguous()
    assert count.is_contiguous()
    assert index.dtype == count.dtype == torch.int32
    assert count.shape == (*index.shape[:-1], 2)
    assert index.sort(-1).values.eq(torch.arange(index.shape[-1], device=index.device)).all()
    rows = zip(index.flatten(0, -2).tolist(), count.flatten(0, -2).tolist(), strict=True)
    return [(row[:some], row[some : some + full]) for row, (some, full) in rows]


def band(seqlen_q, seqlen_k, low, high):
    """(seqlen_q, seqlen_k) bool: i + low ≤ j ≤ i + high."""
    seen = [
        [(low is None or low <= j - i) and (high is None or j - i <= high) for j in range(seqlen_k)]
        for i in range(seqlen_q)
    ]
    return torch.tensor(seen)


SHAPES = [(None, None, 300, 200), (2, 2, 130, 384), (None, 2, 1, 257)]
SHAPE_IDS = ["more_queries", "batch_and_heads", "one_query"]


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
@pytest.mark.parametrize("name", DEFINITIONS)
def test_kinds_of_a_rule(runner, name, shape):
    mask = BlockMask.from_mask_mod(rule(name, runner.device), *shape, runner.device)
    assert mask.shape == tuple(s or 1 for s in shape)
    assert mask.kinds.dtype == torch.int8
    dense = mask.materialize()
    assert dense.shape == mask.shape
    assert dense.dtype == torch.bool
    assert torch.equal(mask.kinds.cpu(), brute_kinds(dense.cpu()))


@pytest.mark.parametrize("most", [1, 3, 8, 100])
def test_a_definition_is_evaluated_in_pieces(monkeypatch, most):
    """The same kinds, whatever fits in a piece, and no piece is larger than allowed."""
    module = importlib.import_module("fusedops.attention.block_mask")
    monkeypatch.setattr(module, "_ELEMENTS", most * BLOCK**2)
    largest = []

    def definition(batch, head, i, j, lengths):
        shape = torch.broadcast_shapes(*(t.shape for t in (batch, head, i, j)))
        largest.append(shape.numel())
        return (j <= i + 90 * head) & (j < lengths[batch])

    whole = MaskMod(None, (torch.tensor([128, 300]),), definition)
    with fusedops.backend("torch"):
        mask = BlockMask.from_mask_mod(whole, 2, 3, 300, 400, "cpu")
    assert max(largest) <= most * BLOCK**2
    assert torch.equal(mask.kinds, brute_kinds(mask.materialize()))


@pytest.mark.parametrize(
    "bounds", [(None, None), (None, 0), (-70, 5), (-200, None), (60, 300), (5, -5), (-(2**70), 2**70)]
)
@pytest.mark.parametrize("shape", [(300, 200), (128, 384), (130, 520)], ids=str)
def test_lists_are_those_of_the_mask_within_the_bounds(bounds, shape):
    """Blocks that the bounds cut are asked about, those outside left out, the others as the mask has them."""
    kinds = torch.randint(0, 3, (2, 2, -(-shape[0] // BLOCK), -(-shape[1] // BLOCK)), dtype=torch.int8)
    mask = BlockMask(rule("causal", "cpu"), (2, 2, *shape), kinds)
    of_bounds = brute_kinds(band(*shape, *bounds)[None, None])
    expected = torch.minimum(kinds, of_bounds)  # brute_kinds knows of the ragged end
    key_index, key_count, query_index, query_count = mask.lists(*bounds)
    assert key_index.shape == kinds.shape
    assert query_index.shape == kinds.mT.shape
    assert read_lists(key_index, key_count) == brute_lists(expected)
    assert read_lists(query_index, query_count) == brute_lists(expected.mT)


def test_lists_are_kept(runner):
    mask = BlockMask.from_mask_mod(rule("window", runner.device), None, None, 300, 300, runner.device)
    first = mask.lists(None, 0)
    assert mask.lists(None, 0)[0] is first[0]
    assert mask.lists(-299, 0)[0] is first[0], "a bound that hides nothing is none"
    for high in range(1, 9):  # more than are kept
        mask.lists(None, high)
    assert len(mask._kept) <= 4
    again = mask.lists(None, 0)
    assert again[0] is not first[0]
    assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_in_a_compiled_function():
    """A mask comes from outside, or is made of ids inside."""

    def lists(mask, ids):
        made = BlockMask.from_document_ids(ids)
        return *mask.lists(None, 0), *made.lists(-200, 0), *made.mask_mod.args

    mask, ids = BlockMask.from_document_ids(torch.arange(300) // 90), torch.arange(200) // 150
    compiled = torch.compile(lists, backend="eager", fullgraph=True)(mask, ids)
    assert not mask._kept
    assert all(torch.equal(a, b) for a, b in zip(compiled, lists(mask, ids), strict=True))


IDS = {
    "ascending": lambda n: torch.arange(n) // 90,
    "descending": lambda n: -(torch.arange(n) // 90),
    "one": lambda n: torch.full((n,), 2**40),
    "with_gaps": lambda n: (torch.arange(n) // 128) * 5 - 2**40,
    "shuffled": lambda n: torch.randint(0, 3, (n,)),
    "of_a_batch": lambda n: torch.stack((torch.arange(n) // 90, torch.arange(n) // 200)),
    "bytes": lambda n: (torch.arange(n) // 90).to(torch.uint8),
    "strided": lambda n: (torch.arange(2 * n) // 200).int()[::2],
}


@pytest.mark.parametrize("lengths", [(300, None), (256, 400)], ids=["one_length", "two_lengths"])
@pytest.mark.parametrize("kind", IDS)
def test_documents(runner, kind, lengths):
    ids = IDS[kind](lengths[0]).to(runner.device)
    ids_k = None if lengths[1] is None else IDS[kind](lengths[1]).to(runner.device)
    mask = BlockMask.from_document_ids(ids, ids_k)
    of_q, of_k = (t if t.dim() == 2 else t[None] for t in (ids, ids if ids_k is None else ids_k))
    expected = of_q[:, None, :, None] == of_k[:, None, None, :]
    assert mask.shape == expected.shape
    assert torch.equal(mask.materialize(), expected)
    brute = brute_kinds(expected.cpu())
    kinds = mask.kinds.cpu()
    if kind != "shuffled":
        assert torch.equal(kinds, brute)
    # A block may be asked about for nothing, but never be taken for what it is not.
    assert (kinds[kinds != 1] == brute[kinds != 1]).all()


def test_documents_of_a_batch_beside_shared_ones(runner):
    ids, shared = IDS["of_a_batch"](200).to(runner.device), IDS["ascending"](200).to(runner.device)
    mask = BlockMask.from_document_ids(ids, shared)
    assert torch.equal(mask.materialize()[:, 0], ids[:, :, None] == shared)
    mask = BlockMask.from_document_ids(shared, ids)
    assert torch.equal(mask.materialize()[:, 0], shared[:, None] == ids[:, None, :])


def test_document_ids_may_change_afterwards(runner):
    ids = IDS["ascending"](200).to(runner.device)
    mask = BlockMask.from_document_ids(ids)
    before = mask.materialize()
    ids.zero_()
    assert torch.equal(mask.materialize(), before)


# --- FlexAttention's -------------------------------------------------------------------------------------------------

TORCHS_IDS = torch.tensor([0] * 100 + [1] * 150 + [2] * 127 + [3] * 200)
TORCHS = {
    "causal": lambda device: lambda batch, head, i, j: i >= j,
    "window": lambda device: lambda batch, head, i, j: (i - j).abs() <= 60,
    "documents": lambda device: (lambda ids: lambda batch, head, i, j: (ids[i] == ids[j]) & (i >= j))(
        TORCHS_IDS.to(device)
    ),
    "of_batch_and_head": lambda device: (lambda reach: lambda batch, head, i, j: j <= i + reach[batch, head])(
        torch.tensor([[0, 90, -300], [400, -20, 10]], device=device)
    ),
    "everything": lambda device: flex_attention.noop_mask,
}


@pytest.mark.parametrize("size", [128, 64, 256, (64, 256), 96], ids=str)
@pytest.mark.parametrize("name", TORCHS)
def test_a_mask_of_flex_attention(runner, name, size):
    device = runner.device
    lengths = (300, 400) if name != "everything" else (256, 200)
    lead = (2, 3) if name == "of_batch_and_head" else (None, None)
    theirs = TORCHS[name](device)
    mask = BlockMask.from_torch(
        flex_attention.create_block_mask(theirs, *lead, *lengths, device=device, BLOCK_SIZE=size)
    )
    dense = flex_attention.create_mask(theirs, *lead, *lengths, device=device)
    assert mask.shape == (lead[0] or 1, lead[1] or 1, *lengths)
    assert torch.equal(mask.materialize(), dense.expand(mask.shape))
    assert torch.equal(mask.kinds.cpu(), brute_kinds(dense.expand(mask.shape).cpu()))


@pytest.mark.parametrize("lead", [(), (2,), (2, 1)], ids=str)
@pytest.mark.parametrize("size", [128, 64])
def test_what_the_lists_of_flex_attention_say_goes_before_its_rule(size, lead):
    """Blocks listed as full are seen, blocks not listed are not, whatever the rule says there."""
    count = torch.tensor([1, 2, 0]).expand(*lead, 3)
    index = torch.tensor([[2, 0, 1], [0, 1, 2], [0, 1, 2]]).int().expand(*lead, 3, 3)
    full_count = torch.tensor([1, 0, 2]).expand(*lead, 3)
    full_index = torch.tensor([[1, 0, 2], [0, 1, 2], [0, 2, 1]]).int().expand(*lead, 3, 3)
    lengths = (3 * size - 10, 3 * size - 20)
    theirs = flex_attention.BlockMask.from_kv_blocks(
        count, index, full_count, full_index, BLOCK_SIZE=size, mask_mod=lambda batch, head, i, j: (i + j) % 3 == 0,
        seq_lengths=lengths,
    )  # fmt: skip
    i, j = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])
    kinds = torch.tensor([[0, 2, 1], [1, 1, 0], [2, 0, 2]])[i // size, j // size]
    expected = (kinds == 2) | ((kinds == 1) & ((i + j) % 3 == 0))
    mask = BlockMask.from_torch(theirs)
    assert mask.shape == (*(1, 1)[len(lead) :], *lead, *lengths)
    assert torch.equal(mask.materialize(), expected.expand(mask.shape))
    assert torch.equal(mask.kinds, brute_kinds(expected.expand(mask.shape)))


def test_more_blocks_than_are_evaluated_at_once(monkeypatch):
    monkeypatch.setattr(importlib.import_module("fusedops.attention.block_mask_torch"), "_BLOCKS", 2)
    theirs = TORCHS["window"]("cpu")
    mask = BlockMask.from_torch(flex_attention.create_block_mask(theirs, None, None, 384, 384, device="cpu"))
    assert torch.equal(mask.materialize(), flex_attention.create_mask(theirs, None, None, 384, 384, device="cpu"))


@pytest.mark.parametrize("tile", [(128, 128), (64, 32)], ids=str)
@pytest.mark.parametrize("made", ["documents", "torch"])
def test_the_kernels_functions_say_what_their_definitions_say(kernel_runner, made, tile):
    from fusedops.attention.kernels_block_mask import Function

    device = kernel_runner.device
    if made == "documents":
        mask = BlockMask.from_document_ids(IDS["of_a_batch"](200).to(device), IDS["ascending"](140).to(device))
        shape = (2, 2, *mask.shape[2:])  # the rule looks at no head
    else:
        theirs = TORCHS["of_batch_and_head"](device)
        mask = BlockMask.from_torch(flex_attention.create_block_mask(theirs, 2, 3, 150, 270, device=device))
        shape = mask.shape
    out = torch.full(shape, -1, dtype=torch.int8, device=device)
    tiles = -(-shape[2] // tile[0]) * -(-shape[3] // tile[1]) * shape[0] * shape[1]
    args = Function(mask.mask_mod.function, mask.mask_mod.args)
    materialize_kernel[(tiles,)](out, args, *shape[1:], ROWS=tile[0], COLS=tile[1])
    assert torch.equal(out, mask.materialize().expand(shape).to(torch.int8))


# --- empty, moved, shown, wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(None, None, 0, 200), (1, 2, 200, 0), (None, None, 0, 0), (0, 2, 9, 9)], ids=str)
def test_empty(runner, shape):
    mask = BlockMask.from_mask_mod(rule("causal", runner.device), *shape, runner.device)
    shape = tuple(1 if s is None else s for s in shape)
    blocks = [-(-s // BLOCK) for s in shape[2:]]
    assert mask.shape == shape
    assert mask.kinds.shape == (*shape[:2], *blocks)
    key_index, key_count, query_index, query_count = mask.lists(None, 0)
    assert key_index.shape == mask.kinds.shape
    assert key_count.shape == (*shape[:2], blocks[0], 2)
    assert query_index.shape == (*shape[:2], *blocks[::-1])
    assert query_count.shape == (*shape[:2], blocks[1], 2)
    assert not key_count[:, :, :, 1].any() or blocks[1]
    assert mask.materialize().shape == shape


def test_empty_documents(runner):
    nothing, some = torch.zeros(2, 0, device=runner.device).int(), torch.zeros(130, device=runner.device).int()
    assert BlockMask.from_document_ids(nothing).kinds.shape == (2, 1, 0, 0)
    assert BlockMask.from_document_ids(nothing, some).kinds.shape == (2, 1, 0, 2)
    mask = BlockMask.from_document_ids(some, nothing)
    assert mask.kinds.shape == (2, 1, 2, 0)
    assert mask.materialize().shape == (2, 1, 130, 0)
    assert mask.sparsity() == 0.0


def test_to_another_device(runner):
    mask = BlockMask.from_document_ids(IDS["ascending"](300))
    moved = mask.to(runner.device)
    assert moved.device.type == runner.device.type
    assert moved.shape == mask.shape
    assert all(arg.device.type == runner.device.type for arg in moved.mask_mod.args)
    assert torch.equal(moved.materialize().cpu(), mask.materialize())
    assert mask.to("meta").lists(None, 0)[0].shape == mask.kinds.shape


def test_numbers_that_describe_a_mask():
    mask = BlockMask(
        rule("causal", "cpu"), (1, 2, 256, 384), torch.tensor([[0, 1, 2], [0, 0, 2]]).char().expand(1, 2, 2, 3)
    )
    assert mask.sparsity() == pytest.approx(50.0)
    assert mask.numel() == 2 * 256 * 384
    assert "shape=(1, 2, 256, 384), blocks=(2, 3)" in repr(mask)


def test_a_ragged_block_of_keys_is_never_full():
    """Also where it is given so; what was given stays as it was."""
    kinds = torch.full((1, 1, 2, 2), 2, dtype=torch.int8)
    mask = BlockMask(rule("causal", "cpu"), (1, 1, 130, 130), kinds)
    assert mask.kinds[0, 0].tolist() == [[2, 1], [2, 1]]
    assert (kinds == 2).all()


MOD = MaskMod(None, (torch.zeros(1),), lambda batch, head, i, j, nothing: j <= i)
NO_DEFINITION = MaskMod(globals().get("causal"), (), None) if HAS_TRITON else None
KINDS = torch.zeros(1, 1, 1, 2, dtype=torch.int8)
INT_IDS = torch.zeros(2, 3).int()
of_rule, of_ids = BlockMask.from_mask_mod, BlockMask.from_document_ids
ZEROS = BlockMask(MOD, (1, 1, 9, 200), KINDS)
WRONG = {
    "no rule": (TypeError, "mask_mod must be", lambda: of_rule(max, 1, 1, 9, 9, "cpu")),
    "a rule elsewhere": (ValueError, "mask_mod must be .* on meta", lambda: of_rule(MOD, 1, 1, 9, 9, "meta")),
    "batch is a float": (TypeError, "batch must be an int", lambda: of_rule(MOD, 1.0, 1, 9, 9, "cpu")),
    "heads is a bool": (TypeError, "heads must be an int", lambda: of_rule(MOD, 1, True, 9, 9, "cpu")),
    "no length": (TypeError, "seqlen_q must be an int", lambda: of_rule(MOD, 1, 1, None, 9, "cpu")),
    "negative length": (ValueError, "seqlen_k must be at least 0", lambda: of_rule(MOD, 1, 1, 9, -9, "cpu")),
    "unknown device": (ValueError, "device must be", lambda: of_rule(MOD, 1, 1, 9, 9, "abacus")),
    "shape of three": (ValueError, "shape must be of four", lambda: BlockMask(MOD, (1, 9, 200), KINDS)),
    "shape of a float": (TypeError, "shape must be an int", lambda: BlockMask(MOD, (1, 1, 9.0, 200), KINDS)),
    "other kinds": (ValueError, "kinds must be of shape .*3", lambda: BlockMask(MOD, (1, 1, 9, 300), KINDS)),
    "kinds of int32": (TypeError, "kinds must be an int8", lambda: BlockMask(MOD, (1, 1, 9, 200), KINDS.int())),
    "float ids": (TypeError, "document_ids must be a tensor of an int", lambda: of_ids(torch.ones(3))),
    "ids in a list": (TypeError, "document_ids must be a tensor", lambda: of_ids([0, 1])),
    "bool ids of keys": (TypeError, "document_ids_k must be", lambda: of_ids(INT_IDS, INT_IDS > 0)),
    "ids of three dimensions": (ValueError, "document_ids must be of shape", lambda: of_ids(INT_IDS[None])),
    "ids elsewhere": (ValueError, "document_ids_k must be on", lambda: of_ids(INT_IDS, INT_IDS.to("meta"))),
    "batches differ": (ValueError, "document_ids_k must be of a batch of 2",
                       lambda: of_ids(INT_IDS, torch.zeros(3, 3).int())),
    "not torch's": (TypeError, "block_mask must be a torch", lambda: BlockMask.from_torch(KINDS)),
    "bound of a float": (TypeError, "low must be an int or None", lambda: ZEROS.lists(1.5)),
    "bound of a bool": (TypeError, "high must be an int", lambda: ZEROS.lists(0, True)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    error, text, call = WRONG[name]
    with pytest.raises(error, match=text):
        call()


def test_a_mask_of_flex_attention_with_too_few_rows():
    count, index = torch.ones(1, 1, 2).int(), torch.zeros(1, 1, 2, 3).int()
    theirs = flex_attention.BlockMask.from_kv_blocks(count, index, seq_lengths=(300, 384))
    with pytest.raises(ValueError, match="block_mask must be a mask that lists all 3 rows"):
        BlockMask.from_torch(theirs)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_a_rule_without_a_definition():
    with fusedops.backend("torch"), pytest.raises(ValueError, match=r"from_mask_mod: mask_mod must have a definition"):
        BlockMask.from_mask_mod(NO_DEFINITION, 1, 1, 9, 9, "cpu")
    with pytest.raises(ValueError, match=r"materialize: mask_mod must have a definition"):
        BlockMask(NO_DEFINITION, (1, 1, 9, 200), KINDS).materialize()


def test_a_rule_without_a_kernels_function(kernel_runner):
    whole = MaskMod(None, (), DEFINITIONS["causal"])
    with pytest.raises(fusedops.BackendError, match="mask_mod has a definition only"):
        BlockMask.from_mask_mod(whole, 1, 1, 9, 9, kernel_runner.device)
    if kernel_runner.name == "interpreter":
        with fusedops.backend("auto"):
            assert BlockMask.from_mask_mod(whole, 1, 1, 9, 9, kernel_runner.device).kinds.tolist() == [[[[1]]]]


@pytest.mark.gpu
def test_no_host_synchronisation():
    device = torch.device("cuda")
    ids = IDS["ascending"](300).to(device)
    causal_rule = rule("causal", device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for mask in (BlockMask.from_document_ids(ids), BlockMask.from_mask_mod(causal_rule, 1, 1, 300, 300, device)):
            mask.lists(-50, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_lists_in_a_cuda_graph():
    ids = IDS["ascending"](300).cuda()
    mask = BlockMask.from_document_ids(ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mask.lists(None, 0)
    assert not mask._kept, "what only a graph makes must not be kept"
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, mask.lists(None, 0), strict=True))
