"""The norms' trials: right and wrong results, the problems that they and the public functions look up."""

from __future__ import annotations

import itertools

import pytest
import torch

import fusedops
from fusedops.autotune.resolve import using
from fusedops.autotune.trial import make_trial
from fusedops.norm import trials
from fusedops.norm.tuning import (
    GROUP_NORM,
    NORM,
    GroupNormConfig,
    GroupNormProblem,
    NormConfig,
    NormProblem,
)
from fusedops.runtime.device import TARGETS, device_facts, pretend
from tests.attention.launches import launching, nothing
from tests.autotune.trials import check_sample, check_trial, met_by, named, tensors_of

DTYPES = [("float32", 4), ("bfloat16", 2), ("float16", 4)]  # the last beside a float32 stream


def norm_problems():
    for kind, (dtype, itemsize), residual, dropout in itertools.product(
        ("layer", "rms", "l2"), DTYPES, (False, True), (False, True)
    ):
        if dtype == "float16" and not residual:
            continue
        weight, bias = kind != "l2", kind == "layer"
        yield NormProblem(72, itemsize, "forward", dropout, 0, 16, kind, dtype, weight, bias, residual)
        for output in (False, True):
            yield NormProblem(
                72, itemsize, "backward", dropout, weight + bias, 16, kind, dtype, weight, bias and output, residual,
                output,
            )  # fmt: skip


@pytest.mark.parametrize("problem", [*norm_problems()][::3], ids=NORM.key)
def test_norms(kernel_runner, problem):
    check_trial(NORM, problem, kernel_runner.device)


def test_gradients_of_one_parameter(kernel_runner):
    for weight in (False, True):
        problem = NormProblem(40, 4, "backward", sums=1, rows=16, dtype="float32", weight=weight)
        trial = check_trial(NORM, problem, kernel_runner.device)
        assert [tuple(t.shape) for t in trial.run()] == [(16, 40), (40,)]


GROUP_PROBLEMS = [
    GroupNormProblem(3, 16, last, itemsize, direction, 4, 2, dtype, weight, bias and forward, sums, input_)
    for last, (dtype, itemsize) in itertools.product((False, True), DTYPES[:2])
    for forward, direction in ((True, "forward"), (False, "backward"))
    for weight, bias, sums, input_ in (
        [(True, True, 0, True), (False, True, 0, True)]
        if forward
        else [(True, False, 2, True), (True, False, 1, True), (False, False, 1, False)]
    )
]


@pytest.mark.parametrize("problem", GROUP_PROBLEMS[::2], ids=GROUP_NORM.key)
def test_group_norms(kernel_runner, problem):
    check_trial(GROUP_NORM, problem, kernel_runner.device)


def test_a_sample_of_the_space_is_right(kernel_runner):
    wide = {"rows": 4, "dtype": "float32"}
    for problem in (
        NormProblem(1500, 4, "forward", residual=True, **wide),
        NormProblem(1500, 4, "backward", sums=2, residual=True, **wide),
    ):
        check_sample(NORM, problem, kernel_runner.device, 3)
    for direction, sums in (("forward", 0), ("backward", 2)):
        problem = GroupNormProblem(3, 1024, False, 4, direction, 2, 2, "float32", sums=sums)
        check_sample(GROUP_NORM, problem, kernel_runner.device, 3)


@pytest.mark.interpreter
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_configuration_is_used(monkeypatch, direction):
    blocks = []

    def watch(run, kernel, *args, **kwargs):
        blocks.append(kwargs["BLOCK_M"] if "BLOCK_M" in kwargs else kwargs["BLOCK_N"])

    problem = NormProblem(64, 4, direction, rows=16, dtype="float32")
    trial = make_trial(NORM, problem, torch.device("cpu"))
    group = GroupNormProblem(2, 16, False, 4, direction, 4, 2, "float32")
    of_groups = make_trial(GROUP_NORM, group, torch.device("cpu"))
    with launching(monkeypatch, watch):
        for block_m in (2, 4):
            with using(NORM, problem, NormConfig(block_m, 64, False, 4)):
                trial.run()
        assert blocks == [2, 4]
        for block_n in (2, 4):
            with using(GROUP_NORM, group, GroupNormConfig(block_n, 2, 16, False, 4)):
                of_groups.run()
        assert blocks == [2, 4, 2, 4]


@pytest.mark.interpreter
def test_an_empty_trial_has_no_memory(monkeypatch):
    """Sizes that no machine of a test has; kernels are launched on tensors of the meta device."""
    huge = {"rows": 16384, "dropout": True}
    made = [
        (NORM, NormProblem(1 << 24, 4, "forward", residual=True, **huge)),
        (NORM, NormProblem(1 << 24, 4, "backward", sums=2, residual=True, **huge)),
        (GROUP_NORM, GroupNormProblem(64, 1 << 20, True, 2, "forward", 1024)),
        (GROUP_NORM, GroupNormProblem(64, 1 << 20, False, 2, "backward", 1024, sums=2)),
    ]
    for operator, problem in made:
        trial = make_trial(operator, problem, torch.device("cpu"), empty=True)
        with launching(monkeypatch, nothing), pretend(TARGETS["sm_90"]):
            results = trial.run()
        found = tensors_of(trial) + list(results)
        assert len(found) >= 4
        assert all(tensor.is_meta for tensor in found)


def test_sizes_that_do_not_go_together_are_refused():
    with pytest.raises(NotImplementedError, match="without a residual the widest element is the input's"):
        make_trial(NORM, NormProblem(64, 4, "forward"), torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="one layout"):
        make_trial(GROUP_NORM, GroupNormProblem(3, 1, True, 2, "forward"), torch.device("cpu"))


CALLS = {
    "layer": {},
    "layer without bias": {"bias": False},
    "layer, plain": {"bias": False, "weight": False},
    "recompute": {"recompute": True},
    "rms": {"kind": "rms"},
    "rms, recompute": {"kind": "rms", "recompute": True},
    "l2": {"kind": "l2"},
    "add": {"residual": True},
    "add to a float32 stream": {"residual": True, "residual_dtype": "float32"},
    "dropout and add": {"residual": True, "dropout": True, "kind": "rms"},
    "evaluation": {"training": False},
}


def call_norm(device, *, rows, width, dtype, kind="layer", weight=None, bias=None, residual=False, residual_dtype=None,
              dropout=False, recompute=False, training=True):  # fmt: skip
    dtype = getattr(torch, dtype)
    x = torch.randn(2, rows // 2, width, device=device).to(dtype)
    r = torch.randn_like(x).to(getattr(torch, residual_dtype) if residual_dtype else dtype) if residual else None
    w = torch.ones(width, dtype=dtype, device=device) if kind != "l2" and weight is not False else None
    b = torch.zeros(width, dtype=dtype, device=device) if kind == "layer" and bias is not False else None
    for t in (x, r, w, b):
        if t is not None and training:
            t.requires_grad_()
    if kind == "l2":
        outputs = (fusedops.l2_norm(x),)
    elif residual:
        options = {"dropout_p": 0.1 if dropout else 0.0, "recompute": recompute}
        if kind == "layer":
            outputs = fusedops.add_layer_norm(x, r, width, w, b, **options)
        else:
            outputs = fusedops.add_rms_norm(x, r, width, w, **options)
    elif kind == "layer":
        outputs = (fusedops.layer_norm(x, width, w, b, recompute=recompute),)
    else:
        outputs = (fusedops.rms_norm(x, width, w, recompute=recompute),)
    if training:
        torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])


@pytest.mark.parametrize("call", CALLS)
def test_what_a_norm_looks_up(kernel_runner, call):
    sizes = {"rows": 20, "width": 48, "dtype": "bfloat16", **CALLS[call]}
    expected = trials.problems_of(facts=device_facts(kernel_runner.device), **sizes)
    assert met_by(lambda: call_norm(kernel_runner.device, **sizes)) == named(expected)


GROUP_CALLS = {
    "usual": {},
    "channels_last": {"channels_last": True},
    "plain": {"weight": False, "bias": False},
    "vectors": {"spatial": 1, "channels_last": True},
    "evaluation": {"training": False},
}


@pytest.mark.parametrize("call", GROUP_CALLS)
def test_what_group_norm_looks_up(kernel_runner, call):
    sizes = {"batch": 3, "channels": 12, "spatial": 35, "groups": 4, "dtype": "float32", **GROUP_CALLS[call]}

    def run():
        shape = (3, 12, 5, 7) if sizes["spatial"] > 1 else (3, 12)
        x = torch.randn(shape, device=kernel_runner.device)
        if sizes.get("channels_last") and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        w, b = (torch.ones(12, device=x.device) if sizes.get(name, True) else None for name in ("weight", "bias"))
        training = sizes.get("training", True)
        for t in (x, w, b):
            if t is not None and training:
                t.requires_grad_()
        y = fusedops.group_norm(x, 4, w, b)
        if training:
            y.backward(torch.randn_like(y))

    expected = trials.group_problems_of(facts=device_facts(kernel_runner.device), **sizes)
    assert met_by(run) == named(expected)
