"""Decoding's trials: right and wrong results, and the problems that calls of the public function look up."""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops.attention.trials_decode import problems_of
from fusedops.attention.tuning_decode import DECODE, MOST_SPLITS, DecodeConfig, DecodeProblem, splits_for
from fusedops.autotune.resolve import using
from fusedops.autotune.trial import make_trial
from fusedops.runtime.device import INTERPRETER, TARGETS
from tests.attention.launches import launching
from tests.autotune.trials import check_sample, check_trial, met_by


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"heads": 3, "d_v": 24, "page": 16},
        {"page": 21, "queries": 32},
        {"dtype": "bfloat16", "cache_dtype": "int8"},
        {"dtype": "float16", "cache_dtype": "float8_e4m3fn", "page": 32},
    ],
    ids=str,
)
def test_trials(kernel_runner, sizes):
    made = {"d_k": 16, "d_v": 16, "size": 256, "heads": 4, "dtype": "float32"} | sizes
    check_trial(DECODE, DecodeProblem.of(**made), kernel_runner.device)


@pytest.mark.parametrize(
    ("made", "text"),
    [({"dtype": "float64"}, "float64"), ({"d_k": 300}, "head size 300"), ({"page": 3}, None)],
)
def test_what_has_no_trial_says_why(made, text):
    problem = DecodeProblem.of(**{"d_k": 16, "d_v": 16, "size": 64, "dtype": "float32"} | made)
    if text is None:  # a page of 17 stands for it
        assert make_trial(DECODE, problem, torch.device("cpu")).cache.keys.shape[2] == 17
        return
    with pytest.raises(NotImplementedError, match=text):
        make_trial(DECODE, problem, torch.device("cpu"))


@pytest.mark.parametrize("call", [{}, {"page_size": 16}, {"window": 9}, {"length": 5}], ids=str)
def test_a_call_looks_up_what_is_listed(kernel_runner, call):
    device = kernel_runner.device
    batch, heads, kv_heads, room, d, dv = 2, 4, 2, 64, 16, 24
    length, window, page = call.get("length", 1), call.get("window"), call.get("page_size")
    q = torch.zeros(batch, heads, length, d, device=device)
    lead = (8, kv_heads, page) if page else (batch, kv_heads, room)
    caches = [torch.zeros(*lead, n, device=device) for n in (d, dv)]
    table = torch.zeros(batch, room // page, dtype=torch.int32, device=device) if page else None
    lengths = torch.full((batch,), 20, device=device)
    found = met_by(
        lambda: fusedops.attention_decode(
            q, *caches, cache_seqlens=lengths, block_table=table, window=None if window is None else (window, 0)
        )
    )
    listed = problems_of(
        facts=TARGETS["sm_75"], batch=batch, heads=heads, kv_heads=kv_heads, room=room, d=d, dv=dv, dtype="float32",
        **call,
    )  # fmt: skip
    assert found == {(operator.name, problem) for operator, problem in listed}


def test_every_configuration_gives_right_results(kernel_runner):
    problem = DecodeProblem.of(16, 16, 256, heads=2, dtype="float32")
    check_sample(DECODE, problem, kernel_runner.device, 4)


@pytest.mark.parametrize("target", TARGETS)
def test_keys_are_divided_so_that_every_multiprocessor_reads(target):
    facts = TARGETS[target]
    long, full = (DecodeProblem.of(128, 128, 65536, heads=heads) for heads in (8, 1024))
    config = DECODE.default(long, facts)
    splits = splits_for(config, long, 1, facts)
    assert facts.multiprocessor_count <= 8 * splits <= 8 * MOST_SPLITS
    assert splits_for(config, full, 1, facts) <= 2
    short = DecodeProblem.of(128, 128, 128, heads=1)
    assert splits_for(config, short, 1, facts) == 1
    assert DECODE.unfit(config, long, facts) is None


def test_a_searched_configuration_decides_the_launch(kernel_runner, monkeypatch):
    q = torch.zeros(1, 2, 1, 16, device=kernel_runner.device)
    cache = torch.zeros(1, 2, 512, 16, device=kernel_runner.device)
    lengths = torch.full((1,), 500, device=kernel_runner.device)
    problem = DecodeProblem.of(16, 16, 512, heads=2, dtype="float32")
    seen = []

    def launch(run, kernel, *args, grid, **kwargs):
        seen.append((kernel.fn.__name__, grid, kwargs.get("BLOCK_N")))
        run(kernel, *args, grid=grid, **kwargs)

    config = DecodeConfig(16, 64, 4, 2, programs_per_multiprocessor=1)
    with using(DECODE, problem, config), launching(monkeypatch, launch):
        fusedops.attention_decode(q, cache, cache, cache_seqlens=lengths)
    splits = splits_for(config, problem, 1, INTERPRETER)
    assert seen == [("decode_kernel", (2 * splits,), 64), ("merge_kernel", (2,), None)]
