"""Attention's trials: right and wrong results, the problems that they and the public functions look up."""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops.attention import trials
from fusedops.attention.tuning import ATTENTION, AttentionConfig, AttentionProblem, copies_by_descriptors
from fusedops.autotune.resolve import using
from fusedops.autotune.trial import make_trial
from fusedops.runtime.device import TARGETS, device_facts, pretend
from tests.attention.launches import launching, nothing
from tests.autotune.trials import check_sample, check_trial, met_by, named, tensors_of

CPU = torch.device("cpu")
KERNELS = ("forward", "backward_kv", "backward_q")


def problem(kernel, d=16, dv=16, rows=32, keys=32, heads=4, queries=2, dtype="float32", **rules):
    return AttentionProblem.of(kernel, d, dv, rows, keys, heads=heads, queries=queries, dtype=dtype, **rules)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"causal": True},
        {"rows": 16, "keys": 64, "d": 24, "dv": 8, "causal": True, "window": True},
        {"rows": 64, "keys": 16, "window": True, "heads": 4, "queries": 3},
        {"rows": 1, "keys": 64, "causal": True, "queries": 4},
    ],
    ids=["plain", "causal", "window", "heads that no group divides", "decoding"],
)
def test_attention(kernel_runner, kernel, dtype, sizes):
    check_trial(ATTENTION, problem(kernel, dtype=dtype, **sizes), kernel_runner.device)


ALL = "softcap+dropout+mask+alibi+score_mod+mask_mod+sinks"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("features", ["bool_mask", "mask_mod+blocks", "dropout+mask+packed", ALL])
def test_what_is_done_to_scores(kernel_runner, kernel, features):
    length = 256 if "blocks" in features or "packed" in features else 32
    asked = problem(kernel, rows=length, keys=length, causal=True, heads=2, features=features)
    trial = check_trial(ATTENTION, asked, kernel_runner.device)
    if "packed" in features:
        assert len(trial.parts) == 2  # sequences


@pytest.mark.parametrize("features", ["mask", "dropout+mask+packed", ALL])
def test_the_gradient_of_a_mask(kernel_runner, features):
    asked = problem("backward_mask", rows=32, keys=64, causal=True, heads=3, queries=1, features=features)
    check_trial(ATTENTION, asked, kernel_runner.device)


def test_a_mask_for_all_heads(kernel_runner, monkeypatch):
    """As for masks that would be too large for one a head: the gradient is summed over all heads."""
    monkeypatch.setattr(trials, "_MASK_ELEMENTS", 1)
    trial = check_trial(ATTENTION, problem("backward_mask", causal=True, features="dropout+mask"), kernel_runner.device)
    assert trial.run()[0].shape == (1, 1, 32, 32)


def test_more_heads_than_a_batch_has(kernel_runner, monkeypatch):
    monkeypatch.setattr(trials, "_HEADS", 2)
    for kernel in (*KERNELS, "backward_mask"):
        asked = problem(kernel, rows=16, keys=16, features="dropout+mask")
        trial = check_trial(ATTENTION, asked, kernel_runner.device)
        assert (trial.batch, trial.heads) == (2, 2)


def test_rows_in_pieces(kernel_runner, monkeypatch):
    """What plain torch does not compute at once, or at all, gives the same verdicts."""
    monkeypatch.setattr(trials, "_AT_ONCE", 500)
    monkeypatch.setattr(trials, "_COMPARED", 8)
    monkeypatch.setattr(trials, "_COMPARED_OF_A_MASK", 8)
    for kernel in (*KERNELS, "backward_mask"):
        asked = problem(kernel, causal=True, features="dropout+mask+alibi")
        trial = check_trial(ATTENTION, asked, kernel_runner.device)
        rows = trial.exact()[0].shape[-2]
        assert rows == {"backward_kv": 32, "backward_mask": 16}.get(kernel, 2 * 16)  # of two key heads


@pytest.mark.parametrize(
    ("length", "heads", "described"),
    [(512, 1, True), (512, 1, False), (768, 1, False), (768, 2, False)],
    ids=["described", "too short", "misaligned", "expanded"],
)
def test_descriptors(kernel_runner, length, heads, described):
    """Where they can stand for tensors, and the ways in which they cannot."""
    if described and not copies_by_descriptors(device_facts(kernel_runner.device)):
        pytest.skip("this GPU has no tensor descriptors")
    asked = problem("forward", 8, 8, length, 512, heads, 1, "float16", causal=True, described=described)
    trial = check_trial(ATTENTION, asked, kernel_runner.device)
    assert trial.lengths == ((496, 496) if length == 512 and not described else (length, 496 if not described else 512))


@pytest.mark.parametrize("kernel", [*KERNELS, "backward_mask"])
def test_a_sample_of_the_space_is_right(kernel_runner, kernel):
    features = "softcap+mask" if kernel == "backward_mask" else "softcap"
    asked = problem(kernel, rows=64, keys=64, heads=2, causal=True, features=features)
    check_sample(ATTENTION, asked, kernel_runner.device, 4)


@pytest.mark.interpreter
@pytest.mark.parametrize("kernel", [*KERNELS, "backward_mask"])
def test_the_configuration_is_used(monkeypatch, kernel):
    tiles = []

    def watch(run, launched, *args, **kwargs):
        if launched.fn.__name__ != "rows_kernel":
            tiles.append((kwargs["BLOCK_M"], kwargs["BLOCK_N"]))

    asked = problem(kernel, features="mask")
    trial = make_trial(ATTENTION, asked, CPU)
    with launching(monkeypatch, watch):
        for tile in ((16, 32), (32, 16)):
            with using(ATTENTION, asked, AttentionConfig(*tile, 4, 1)):
                trial.run()
    assert tiles == [(16, 32), (32, 16)]


@pytest.mark.interpreter
def test_an_empty_trial_has_no_memory(monkeypatch):
    """Sizes that no machine of a test has; kernels are launched on tensors of the meta device."""
    for kernel in (*KERNELS, "backward_mask"):
        for features in ("", ALL, "mask_mod+blocks", "mask+packed"):
            if kernel == "backward_mask" and "mask+" not in features:
                continue
            for described in {False, features == "" and kernel != "backward_mask"}:
                asked = problem(
                    kernel, 128, 128, 32768, 32768, 512, 8, "bfloat16", features=features, described=described
                )
                trial = make_trial(ATTENTION, asked, CPU, empty=True)
                with launching(monkeypatch, nothing), pretend(TARGETS["sm_90"]):
                    met = met_by(trial.run)
                    results = trial.run()
                assert ("attention", asked) in met
                assert all(tensor.is_meta for tensor in tensors_of(trial) + list(results))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (problem("forward", features="mask+bool_mask"), "bool or floating"),
        (problem("forward", features="blocks"), "block mask brings"),
        (problem("forward", features="sinks+mask"), "in this order"),
        (problem("backward_mask"), "needs a floating mask"),
        (problem("forward", described=True), "no tensor descriptors stand"),
        (problem("forward", dtype="bfloat16", precision="tf32"), "have a precision"),
        (problem("forward", heads=4, queries=2000), "no multiple of 2000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_call_has_is_refused(asked, why):
    with pytest.raises(NotImplementedError, match=why):
        make_trial(ATTENTION, asked, CPU, empty=True)


@pytest.mark.interpreter
def test_a_problem_of_another_device_is_refused():
    with pytest.raises(NotImplementedError, match="make another problem"):
        make_trial(ATTENTION, problem("forward", precision="tf32"), CPU)


def call_attention(device, *, batch, heads, seqlen_q, d, kv_heads=None, seqlen_k=None, dv=None, dtype="float32",
                   causal=False, window=None, softcap=False, dropout=False, mask=None, alibi=False, sinks=False,
                   score_mod=False, mask_mod=False, blocks=False, packed=False, training=True,
                   mask_gradient=False):  # fmt: skip
    """The public function with what these words say, and its backward."""
    from fusedops.attention import trial_rules

    kind, kv_heads, seqlen_k = getattr(torch, dtype), kv_heads or heads, seqlen_k or seqlen_q

    def randn(*shape):
        return torch.randn(shape, device=device).to(kind).requires_grad_(training)

    shapes = (heads, seqlen_q, d), (kv_heads, seqlen_k, d), (kv_heads, seqlen_k, dv or d)
    options = {"causal": causal, "window": window, "softcap": 5.0 * softcap, "dropout_p": 0.1 * dropout}
    if mask == "bool":
        options["attn_mask"] = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    elif mask:
        options["attn_mask"] = torch.zeros(seqlen_q, seqlen_k, dtype=kind, device=device, requires_grad=mask_gradient)
    options["alibi_slopes"] = torch.ones(heads, device=device) if alibi else None
    options["sinks"] = torch.zeros(heads, dtype=kind, device=device) if sinks else None
    options["score_mod"] = trial_rules.score_mod(torch.ones(heads, device=device)) if score_mod else None
    options["mask_mod"] = trial_rules.mask_mod() if mask_mod else None
    if blocks:
        options["document_ids"] = torch.zeros(seqlen_q, dtype=torch.int32, device=device)
    if packed:
        q, k, v = (randn(batch * n, h, size) for h, n, size in shapes)
        starts = [torch.arange(batch + 1, dtype=torch.int32, device=device) * n for n in (seqlen_q, seqlen_k)]
        out = fusedops.attention_varlen(q, k, v, *starts, seqlen_q, seqlen_k, **options)
    else:
        q, k, v = (randn(batch, *shape) for shape in shapes)
        out = fusedops.attention(q, k, v, **options)
    if training:
        out.backward(torch.randn_like(out))


CALLS = {
    "encoder": {},
    "evaluation": {"training": False},
    "causal, grouped": {"causal": True, "kv_heads": 1},
    "other lengths": {"seqlen_k": 40, "dv": 8},
    "window": {"causal": True, "window": (3, 0)},
    "two-sided window": {"window": (3, 4)},
    "a window that hides nothing": {"window": (100, 100)},
    "softcap and dropout": {"softcap": True, "dropout": True},
    "bool mask": {"mask": "bool"},
    "float mask": {"mask": "float"},
    "trained mask": {"mask": "float", "mask_gradient": True},
    "alibi and sinks": {"alibi": True, "sinks": True, "causal": True},
    "rules": {"score_mod": True, "mask_mod": True},
    "documents": {"blocks": True, "causal": True},
    "packed": {"packed": True, "causal": True, "kv_heads": 1},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("call", CALLS)
def test_what_attention_looks_up(kernel_runner, call):
    sizes = {"batch": 2, "heads": 2, "seqlen_q": 20, "d": 16, "dtype": "float32", **CALLS[call]}
    expected = trials.problems_of(facts=device_facts(kernel_runner.device), **sizes)
    assert met_by(lambda: call_attention(kernel_runner.device, **sizes)) == named(expected)


@pytest.mark.interpreter
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90", "gfx942", "gfx1100"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"seqlen_q": 512, "dtype": "bfloat16", "causal": True},
        {"seqlen_q": 500, "dtype": "bfloat16"},
        {"seqlen_q": 512, "dtype": "float16", "d": 20},
        {"seqlen_q": 512, "dtype": "float32"},
        {"seqlen_q": 512, "dtype": "float16", "packed": True},
        {"seqlen_q": 300, "dtype": "float16", "blocks": True},
    ],
    ids=["described", "short", "odd size", "float32", "packed", "documents"],
)
def test_what_attention_looks_up_elsewhere(monkeypatch, target, sizes):
    """Pretending to be a GPU, launching nothing."""
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "d": 64, **sizes}
    facts = TARGETS[target]
    with fusedops.backend("auto"), pretend(facts), launching(monkeypatch, nothing):
        expected = trials.problems_of(facts=facts, **sizes)
        assert met_by(lambda: call_attention(CPU, **sizes)) == named(expected)
    assert bool(expected) == (target != "gfx1100")
    if target == "sm_90":
        assert expected[0][1].described == (sizes["seqlen_q"] == 512 and sizes["dtype"] == "bfloat16")
