"""score_mod, mask_mod, block_mask and document_ids: a user's own rules, on every backend, with their gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention

import fusedops
from fusedops.runtime.backend import HAS_TRITON
from tests.attention.problems import Problem, check, exact, fused, gradients
from tests.harness.tensors import randn

if HAS_TRITON:
    from tests.attention import rules

CPU = torch.device("cpu")
BASE = Problem(batch=2, heads=2, kv_heads=1, q=20, k=24)
LONG = Problem(heads=2, kv_heads=1, q=70, k=90)


def triton_function(name):
    return getattr(rules, name) if HAS_TRITON else None


def bent(device):
    return fusedops.ScoreMod(
        triton_function("bent"),
        triton_function("bent_gradient"),
        args=(torch.tensor([[0.1, -0.3], [0.2, 0.4]], device=device),),
        definition=lambda score, batch, head, i, j, table: (
            table.to(score.dtype)[batch, head] * score * score - 0.01 * (j - i).abs()
        ),
    )


def biased(device):
    return fusedops.ScoreMod(
        triton_function("biased"),
        triton_function("unchanged"),
        args=(torch.randn(400, device=device), torch.randn(2, 200, device=device).T[:, 0]),
        definition=lambda score, batch, head, i, j, distance, key: (
            score + distance[j - i + 200].to(score.dtype) + key[j].to(score.dtype)
        ),
    )


def dilated(device):
    return fusedops.MaskMod(triton_function("dilated"), definition=lambda batch, head, i, j: (j - i) % (head + 2) == 0)


def prefix(device):
    return fusedops.MaskMod(
        triton_function("prefix"),
        args=torch.tensor([7, 2], device=device),
        definition=lambda batch, head, i, j, lengths: (j < lengths[batch]) | (j <= i),
    )


def lower(device):
    return fusedops.MaskMod(triton_function("lower"), definition=lambda batch, head, i, j: j <= i)


SCORE_MODS = {"bent": bent, "biased": biased}
MASK_MODS = {"dilated": dilated, "prefix": prefix}


# ----------------------------------------------------------------------------------------------- score_mod, mask_mod


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", SCORE_MODS)
def test_score_mod(runner, rule, dtype):
    """One that is not linear, other for each batch and head, and one that reads two tensors."""
    check(BASE, runner, dtype, thorough=True, score_mod=SCORE_MODS[rule](runner.device))


@pytest.mark.parametrize("rule", MASK_MODS)
def test_mask_mod(runner, rule):
    check(BASE, runner, torch.float32, mask_mod=MASK_MODS[rule](runner.device))


def test_both_over_several_tiles(runner):
    check(LONG, runner, torch.float32, score_mod=bent(runner.device), mask_mod=prefix(runner.device))


def test_together_with_everything_else(runner):
    """All that hides holds together: mask_mod, causal, window, and the −inf of the mask."""
    problem = BASE.but(
        causal="bottom_right", window=(12, None), mask="float", mask_shape=(2, 1, 20, 24), alibi="heads", sinks=True,
        softcap=3.0, dropout_p=0.2, scale=-0.3, wanted=("q", "k", "v", "attn_mask"),
    )  # fmt: skip
    check(problem, runner, torch.float32, score_mod=bent(runner.device), mask_mod=dilated(runner.device))


def test_a_mask_mod_is_the_bool_mask_that_it_describes(runner):
    q, k, v, _ = BASE.inputs(runner.device)
    i, j = torch.arange(20)[:, None], torch.arange(24)
    mask = torch.stack(((j - i) % 2 == 0, (j - i) % 3 == 0)).to(runner.device)
    ours = fusedops.attention(q, k, v, mask_mod=dilated(runner.device))
    torch.testing.assert_close(ours, fusedops.attention(q, k, v, attn_mask=mask))


def test_a_query_that_a_rule_lets_see_no_key(runner):
    """Output and gradients 0, lse −inf."""

    def definition(batch, head, i, j, blind):
        return (i != blind[0]) & (j >= 0)

    rule = fusedops.MaskMod(triton_function("all_but_one"), torch.tensor([3], device=runner.device), definition)
    q, k, v, _ = LONG.inputs(runner.device)
    do, dlse = randn(1, 2, 70, 16, device=runner.device), randn(1, 2, 70, device=runner.device)
    (out, lse), (dq, _, _) = gradients(fused, (q, k, v), (do, dlse), mask_mod=rule)
    assert (out[:, :, 3] == 0).all()
    assert (lse[:, :, 3] == float("-inf")).all()
    assert (dq[:, :, 3] == 0).all()
    check(LONG, runner, torch.float32, mask_mod=rule)


@pytest.mark.parametrize("which", [{"k": 0}, {"q": 0}, {"batch": 0}], ids=str)
def test_empty(runner, which):
    problem = BASE.but(**which)
    inputs = problem.inputs(runner.device)[:3]
    (out, lse), grads = gradients(
        fused, inputs, (torch.ones(problem.batch, 2, problem.q, 16, device=runner.device), None),
        score_mod=bent(runner.device), mask_mod=prefix(runner.device),
    )  # fmt: skip
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    assert all(g.shape == t.shape and (g == 0).all() for g, t in zip(grads, inputs, strict=True))


def test_a_triton_function_as_it_is(kernel_runner):
    """It stands for a rule without args, gradient and definition."""
    q, k, v, _ = BASE.inputs(kernel_runner.device)
    same = fusedops.attention(q, k, v, mask_mod=lower(kernel_runner.device))
    assert torch.equal(fusedops.attention(q, k, v, mask_mod=rules.lower), same)
    torch.testing.assert_close(same, fusedops.attention(q, k, v, causal=True))
    with torch.no_grad():
        ours = fusedops.attention(q, k, v, score_mod=rules.affine)
        # A number added to each score changes nothing.
        torch.testing.assert_close(ours, fusedops.attention(q, k, v, scale=3 / 4))


def test_without_a_gradient_function(kernel_runner):
    """The kernels refuse a call that would need it, before the forward; v's gradient does not."""
    rule = fusedops.ScoreMod(rules.affine, definition=lambda score, batch, head, i, j: 3 * score + 1)
    q, k, v, _ = BASE.inputs(kernel_runner.device)
    for given in ((q, k.detach(), v), (q.detach(), k, v)):
        with pytest.raises(fusedops.BackendError, match="score_mod has no gradient function"):
            fusedops.attention(*given, score_mod=rule)
        reasons = fusedops.explain(fusedops.attention, *given, score_mod=rule).reasons
        assert any("no gradient function" in reason for reason in reasons)
    check(BASE.but(wanted=("v",)), kernel_runner, torch.float32, score_mod=rule)
    with fusedops.backend("torch"):
        check(BASE, kernel_runner, torch.float32, score_mod=rule)


@pytest.mark.interpreter
def test_without_a_definition_the_torch_backend_raises():
    q, k, v, _ = BASE.inputs(CPU)
    with fusedops.backend("torch"):
        for options in ({"score_mod": rules.affine}, {"score_mod": fusedops.ScoreMod(rules.bent, rules.bent_gradient)}):
            with pytest.raises(fusedops.BackendError, match=r"^attention: .*score_mod's definition, which it has not"):
                fusedops.attention(q, k, v, **options)
        with pytest.raises(fusedops.BackendError, match=r"^attention: .*mask_mod's definition, which it has not"):
            fusedops.attention(q, k, v, mask_mod=rules.lower)


def test_a_rule_without_a_triton_function_has_its_definition():
    q, k, v, _ = BASE.inputs(CPU)
    rule = fusedops.MaskMod(None, definition=lambda batch, head, i, j: j <= i)
    with fusedops.backend("torch"):
        torch.testing.assert_close(fusedops.attention(q, k, v, mask_mod=rule), fusedops.attention(q, k, v, causal=True))


def test_rules_of_one_function_and_other_args(runner):
    """What a call reads are its own rule's tensors."""
    q, k, v, _ = BASE.inputs(runner.device)
    rule = prefix(runner.device)
    outs = []
    for lengths in ([1, 1], [24, 24]):
        args = torch.tensor(lengths, device=runner.device)
        outs.append(fusedops.attention(q, k, v, mask_mod=fusedops.MaskMod(rule.function, args, rule.definition)))
    torch.testing.assert_close(outs[0], fusedops.attention(q, k, v, causal=True))
    torch.testing.assert_close(outs[1], fusedops.attention(q, k, v))


def test_compiled_equals_eager(kernel_runner):
    score_mod, mask_mod = bent(kernel_runner.device), prefix(kernel_runner.device)

    def function(q, k, v):
        return fusedops.attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod).sin()

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    inputs = BASE.inputs(kernel_runner.device)[:3]
    eager, traced = function(*inputs), compiled(*inputs)
    assert torch.equal(eager, traced)
    for a, b in zip(*(torch.autograd.grad(y.sum(), inputs) for y in (eager, traced)), strict=True):
        assert torch.equal(a, b)


Q = torch.ones(1, 2, 5, 8)
DEFINITION = lambda *a: a[-1] > 0  # noqa: E731
WRONG = {
    "score_mod is a string": (TypeError, "score_mod must be a fusedops.ScoreMod", {"score_mod": "relu"}),
    "score_mod is a Python function": (TypeError, "score_mod must be a fusedops.ScoreMod", {"score_mod": DEFINITION}),
    "score_mod is a MaskMod": (
        TypeError, "score_mod must be a fusedops.ScoreMod",
        {"score_mod": fusedops.MaskMod(None, definition=DEFINITION)},
    ),
    "mask_mod is a tensor": (TypeError, "mask_mod must be a fusedops.MaskMod", {"mask_mod": torch.ones(5, 5)}),
    "mask_mod is a ScoreMod": (
        TypeError, "mask_mod must be a fusedops.MaskMod", {"mask_mod": fusedops.ScoreMod(None, definition=DEFINITION)}
    ),
    "args elsewhere": (
        ValueError, "mask_mod must be a rule whose args are on q's device",
        {"mask_mod": fusedops.MaskMod(None, torch.ones(2, device="meta"), DEFINITION)},
    ),
    "block_mask is a tensor": (TypeError, "block_mask must be a fusedops.BlockMask", {"block_mask": torch.ones(5, 5)}),
    "block_mask of other lengths": (
        ValueError, r"block_mask must be of shape \(1, 2, 5, 5\)",
        {"block_mask": fusedops.BlockMask.from_document_ids(torch.zeros(6).long())},
    ),
    "block_mask of another batch": (
        ValueError, r"block_mask must be of shape \(1, 2, 5, 5\)",
        {"block_mask": fusedops.BlockMask.from_document_ids(torch.zeros(3, 5).long())},
    ),
    "document_ids are floating": (TypeError, "document_ids must be an integer tensor", {"document_ids": torch.ones(5)}),
    "document_ids of another length": (
        ValueError, r"document_ids must be of shape \(1, 5\) or \(5,\)", {"document_ids": torch.ones(6).long()}
    ),
    "document_ids are elsewhere": (
        ValueError, "document_ids must be on the device of q", {"document_ids": torch.ones(5, device="meta").long()}
    ),
    "two of them": (
        ValueError, "document_ids must be None where mask_mod is given",
        {"document_ids": torch.ones(5).long(), "mask_mod": fusedops.MaskMod(None, definition=DEFINITION)},
    ),
    "two others": (
        ValueError, "document_ids must be None where block_mask is given",
        {
            "document_ids": torch.ones(5).long(),
            "block_mask": fusedops.BlockMask.from_document_ids(torch.zeros(5).long()),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_wrong_argument(name, backend):
    error, message, options = WRONG[name]
    with fusedops.backend(backend):
        for call in (fusedops.attention, lambda *a, **k: fusedops.explain(fusedops.attention, *a, **k)):
            with pytest.raises(error, match=f"^attention: {message}"):
                call(Q, Q, Q, **options)


def test_document_ids_for_queries_and_keys_of_unequal_lengths_name_the_way_out():
    with pytest.raises(ValueError, match=r"document_ids must be None where queries \(5\) .*from_document_ids"):
        fusedops.attention(Q, torch.ones(1, 2, 6, 8), torch.ones(1, 2, 6, 8), document_ids=torch.ones(5).long())


@pytest.mark.parametrize("kind", [fusedops.ScoreMod, fusedops.MaskMod], ids=lambda k: k.__name__)
def test_a_wrong_rule(kind):
    with pytest.raises(TypeError, match=f"^{kind.__name__}: function must be a function decorated with triton.jit"):
        kind(lambda *a: a[0])
    with pytest.raises(TypeError, match=f"^{kind.__name__}: function must be .*or give a definition"):
        kind(None)
    with pytest.raises(TypeError, match=f"^{kind.__name__}: definition must be a function of tensors"):
        kind(None, definition=3)
    with pytest.raises(TypeError, match=f"^{kind.__name__}: args must be tensors"):
        kind(None, args=(1.0,), definition=DEFINITION)
    with pytest.raises(ValueError, match=f"^{kind.__name__}: args must be tensors that require no gradient"):
        kind(None, args=torch.ones(2, requires_grad=True), definition=DEFINITION)
    if kind is fusedops.ScoreMod:
        with pytest.raises(TypeError, match=r"^ScoreMod: gradient must be a function decorated with triton.jit"):
            kind(None, lambda *a: a[0], definition=DEFINITION)


# ------------------------------------------------------------------------------------- block_mask, document_ids

# Two blocks of 128 a side, and four tiles of the interpreter's.
BLOCKS = Problem(heads=2, kv_heads=1, q=200, k=200, d=8)


def documents(kind):
    if kind == "ascending":
        return torch.arange(200) // 130
    return torch.arange(200) * 7 % 3 + torch.arange(200) // 150 * 2


def of_one_document(ids):
    """The rule that document_ids stand for."""

    def definition(batch, head, i, j, ids):
        return ids[i] == ids[j]

    return fusedops.MaskMod(None, args=ids, definition=definition)


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("kind", ["ascending", "mixed"])
def test_document_ids(runner, kind, causal):
    ids = documents(kind).to(runner.device)
    problem = BLOCKS.but(causal=causal)
    check(problem, runner, torch.float32, given={"document_ids": ids}, mask_mod=of_one_document(ids))


def test_document_ids_of_each_batch_and_of_all(runner):
    ids = torch.stack((documents("ascending"), documents("mixed"))).to(runner.device)
    q, k, v = (randn(2, 1, 200, 8, device=runner.device) for _ in range(3))
    mask = ids[:, None, :, None] == ids[:, None, None, :]
    out = fusedops.attention(q, k, v, document_ids=ids)
    torch.testing.assert_close(out, fusedops.attention(q, k, v, attn_mask=mask))
    for given in (ids[:1], ids[0]):
        out = fusedops.attention(q, k, v, document_ids=given)
        torch.testing.assert_close(out, fusedops.attention(q, k, v, attn_mask=mask[:1]))


def test_documents_are_separate(runner):
    """Each as if it were alone."""
    ids = documents("ascending").to(runner.device)
    q, k, v = (randn(1, 1, 200, 8, device=runner.device) for _ in range(3))
    first = fusedops.attention(q[:, :, :130], k[:, :, :130], v[:, :, :130], causal=True)
    second = fusedops.attention(q[:, :, 130:], k[:, :, 130:], v[:, :, 130:], causal=True)
    out = fusedops.attention(q, k, v, causal=True, document_ids=ids)
    torch.testing.assert_close(out, torch.cat((first, second), 2))


def sparse(device):
    """Whole blocks seen, hidden, and seen in part, other ones for each head."""
    return fusedops.MaskMod(
        triton_function("shifted"),
        args=torch.tensor([90, -60], device=device),
        definition=lambda batch, head, i, j, reach: j <= i + reach[head],
    )


@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right", "window": (100, None)}], ids=["", "causal window"])
def test_block_mask(runner, options):
    """Other blocks for each head, lengths that differ, and queries that see no key."""
    rule = sparse(runner.device)
    mask = fusedops.BlockMask.from_mask_mod(rule, None, 2, 150, 200, runner.device)
    problem = BLOCKS.but(q=150, **options)
    check(problem, runner, torch.float32, given={"block_mask": mask}, mask_mod=rule)


def test_block_mask_together_with_everything_else(runner):
    rule = sparse(runner.device)
    mask = fusedops.BlockMask.from_mask_mod(rule, None, 2, 200, 200, runner.device)
    problem = BLOCKS.but(
        mask="float", mask_shape=(1, 1, 1, 200), alibi="heads", sinks=True, softcap=3.0, dropout_p=0.2,
        wanted=("q", "k", "v", "attn_mask"),
    )  # fmt: skip
    check(problem, runner, torch.float32, given={"block_mask": mask}, mask_mod=rule)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_block_mask_of_torchs_flex_attention(runner):
    def rule(batch, head, i, j):
        return (j <= i) & (i - j < 60 + 80 * head)

    theirs = flex_attention.create_block_mask(rule, None, 2, 200, 200, device=str(runner.device), BLOCK_SIZE=64)
    ours = fusedops.MaskMod(None, definition=rule)
    check(BLOCKS, runner, torch.float32, given={"block_mask": theirs}, mask_mod=ours)
    q, k, v, _ = BLOCKS.but(kv_heads=2).inputs(runner.device, requires_grad=False)
    out = fusedops.attention(q, k, v, block_mask=theirs)
    expected = flex_attention.flex_attention(q, k, v, block_mask=theirs)
    torch.testing.assert_close(out, expected)


def test_a_block_mask_serves_many_calls(runner):
    """Of any batch and head where it has one of each, and with other bounds each time."""
    ids = documents("ascending").to(runner.device)
    mask = fusedops.BlockMask.from_document_ids(ids)
    q, k, v = (randn(2, 2, 200, 8, device=runner.device) for _ in range(3))
    dense = (ids[:, None] == ids)[None, None]
    for options in ({}, {"causal": True}, {"window": (30, 5)}):
        out, lse = fused(q, k, v, block_mask=mask, **options)
        expected, lse_of_dense = exact(q.double(), k.double(), v.double(), dense, **options)
        torch.testing.assert_close(out, expected.float())
        torch.testing.assert_close(lse, lse_of_dense.float())
