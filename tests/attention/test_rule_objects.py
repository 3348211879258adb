"""Rules and block masks as objects: copied, pickled, made in other places, named in compiled and exported graphs."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch

import fusedops
from fusedops.attention.modifiers import functions_of


def prefix(batch, head, i, j, lengths):
    return (j < lengths[batch]) | (j <= i)


def louder(score, batch, head, i, j):
    return 2 * score


def example():
    return fusedops.MaskMod(None, (torch.tensor([2]),), prefix)


def call(**options):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 8, generator=generator) for _ in range(3))
    with fusedops.backend("torch"):
        return fusedops.attention(q, k, v, **options)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_is_the_same_rule(copied):
    rules = {"mask_mod": example(), "score_mod": fusedops.ScoreMod(None, definition=louder)}
    for name, rule in rules.items():
        assert copied(rule).name == rule.name
        assert torch.equal(call(**{name: copied(rule)}), call(**{name: rule}))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_a_block_mask(copied):
    mask = fusedops.BlockMask.from_document_ids(torch.tensor([0, 0, 1, 1, 1, 2]))
    assert torch.equal(copied(mask).materialize(), mask.materialize())
    assert torch.equal(call(block_mask=copied(mask)), call(block_mask=mask))


def test_a_triton_function_in_a_pickle():
    triton = pytest.importorskip("triton")
    del triton
    from tests.attention import rules

    functions = [getattr(rules, name) for name in dir(rules) if hasattr(getattr(rules, name), "fn")]
    for function in functions:
        rule = fusedops.MaskMod(function)
        assert pickle.loads(pickle.dumps(rule)).function is function
        assert copy.deepcopy(rule).function is function


def test_an_unknown_name_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"no rule is named 'elsewhere\.rule' here: make its MaskMod or ScoreMod"):
        functions_of("elsewhere.rule")


def test_different_rules_of_one_name():
    def made(least):
        return fusedops.MaskMod(None, definition=lambda batch, head, i, j: j >= least)

    first, second = made(1), made(3)
    assert first.name != second.name
    assert not torch.equal(call(mask_mod=first), call(mask_mod=second))


def test_threads_get_names_of_their_own():
    names: list[str] = []

    def work():
        names.extend(fusedops.MaskMod(None, definition=lambda batch, head, i, j: i == j).name for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names)) == len(names) == 400


class Unhashable:
    __hash__ = None

    def __call__(self, batch, head, i, j):
        return i == j


def test_any_callable_is_a_definition():
    rule = fusedops.MaskMod(None, definition=Unhashable())
    q = v = torch.randn(1, 2, 6, 8)
    with fusedops.backend("torch"):
        torch.testing.assert_close(fusedops.attention(q, q, v, mask_mod=rule), v)


def test_numbers_are_read_as_true_and_false():
    numbers = fusedops.MaskMod(None, definition=lambda batch, head, i, j: (j <= i).int())
    torch.testing.assert_close(call(mask_mod=numbers), call(causal=True))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fusedops.MaskMod(None), TypeError, "MaskMod: function must be"),
        (lambda: fusedops.MaskMod(prefix), TypeError, "MaskMod: function must be a function decorated with triton.jit"),
        (lambda: fusedops.MaskMod(None, 3, prefix), TypeError, "MaskMod: args must be a tuple of tensors"),
        (lambda: fusedops.MaskMod(None, (3,), prefix), TypeError, "MaskMod: args must be tensors"),
        (
            lambda: fusedops.MaskMod(None, torch.ones(1, requires_grad=True), prefix),
            ValueError,
            "MaskMod: args must be",
        ),
        (lambda: fusedops.ScoreMod(None, prefix, definition=louder), TypeError, "ScoreMod: gradient must be"),
        (lambda: fusedops.ScoreMod(None, definition=3), TypeError, "ScoreMod: definition must be a function"),
    ],
)
def test_wrong_argument(make, error, message):
    with pytest.raises(error, match=f"^{message}"):
        make()


def test_args_that_come_to_require_a_gradient():
    rule = example()
    rule.args[0].data = rule.args[0].data.float()
    rule.args[0].requires_grad_()
    with pytest.raises(ValueError, match="mask_mod must be a rule whose args require no gradient"):
        call(mask_mod=rule)


def test_a_rule_is_made_outside_of_compiled_code():
    torch._dynamo.reset()
    compiled = torch.compile(lambda: fusedops.MaskMod(None, definition=prefix).name, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="outside of the compiled function"):
        compiled()


def test_documents_in_compiled_code(runner):
    ids = torch.tensor([0] * 5 + [1] * 4, device=runner.device)
    q, k, v = (torch.randn(1, 2, 9, 8, device=runner.device) for _ in range(3))

    def function(q, k, v, ids):
        return fusedops.attention(q, k, v, document_ids=ids, causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, ids), function(q, k, v, ids))


def test_another_window_compiles_nothing_again(kernel_runner):
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    q, k, v = (torch.randn(1, 2, 9, 8, device=kernel_runner.device) for _ in range(3))
    compiled = torch.compile(
        lambda q, k, v, left: fusedops.attention(q, k, v, window=(left, 0)), backend=count, dynamic=True, fullgraph=True
    )
    for left in (3, 5, 7):
        assert torch.equal(compiled(q, k, v, left), fusedops.attention(q, k, v, window=(left, 0)))
    assert len(graphs) == 1


def test_packed_opcheck_without_a_kernel():
    """float64 has no kernel: what the op computes instead lies as its fake says."""
    from fusedops.attention.options import Options

    q, k, v = (torch.randn(1, 8, 2, 4).double().transpose(1, 2) for _ in range(3))
    starts = torch.tensor([0, 3, 8])
    options = Options(sequences=[starts, starts], scale=0.5)
    torch.library.opcheck(
        torch.ops.fusedops.attention.default, (q, k, v, *options), test_utils=("test_schema", "test_faketensor")
    )
