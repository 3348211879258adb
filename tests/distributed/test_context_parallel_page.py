"""What docs/context-parallel.md says: its example runs, alone and on ranks, and its tables are the model's."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.distributed.test_context_parallel import Case, recorded

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "context-parallel.md").read_text()
MODEL = runpy.run_path(str(ROOT / "scripts" / "context_parallel_model.py"))


def run_example(rank, world):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {}
    exec(compile(code, "docs/context-parallel.md", "exec"), names)
    return names["losses"], [p.detach() for p in names["model"].parameters()]


def test_the_example_trains_as_on_one_device(two_ranks):
    losses, parameters = run_example(0, 1)
    assert losses[0] != losses[-1]
    for of_rank, trained in two_ranks.run(run_example):
        assert of_rank == pytest.approx(losses, rel=1e-5)
        for ours, alone in zip(trained, parameters, strict=True):
            assert (ours - alone).abs().max() < 1e-5


def test_the_tables_are_the_scripts(capsys):
    MODEL["main"]([])
    printed = capsys.readouterr().out
    for line in printed.splitlines():
        assert not line or line in PAGE.splitlines()
    tables = [line for line in PAGE.partition("## How it scales")[2].splitlines() if line.startswith("| ")]
    assert tables == [line for line in printed.splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
@pytest.mark.parametrize("kv_heads", [1, 4, 8])
def test_the_bytes_are_those_that_are_sent(four_ranks, method, kv_heads):
    case = Case(method=method, order="zigzag", causal=True, heads=8, kv_heads=kv_heads)
    shape = {"heads": 8, "kv_heads": kv_heads, "size": case.d, "size_v": case.dv, "batch": 2, "bytes_an_element": 4}
    attention = MODEL["Attention"](4, case.length, **shape)
    predicted = attention.ring_bytes() if method == "ring" else attention.all_to_all_bytes()
    for forward, backward, _ in four_ranks.run(recorded, case):
        sent = tuple(sum(sum(event[1]) for event in events if event[0] == "posted") for events in (forward, backward))
        assert sent == predicted


def test_the_formulas_operations_are_the_scores_that_are_computed():
    from fusedops.distributed.context_parallel_plan import Layout

    layout = Layout(8, 256, "zigzag", None, 0)
    scores = sum(c.scores() for source in range(8) for c in layout.calls(3, source)) / 8
    forward, backward = MODEL["Attention"](8, 256, heads=1, size=64, size_v=32).step_operations()
    assert forward == pytest.approx(2 * scores * (64 + 32), rel=0.01)
    assert backward == pytest.approx(2 * scores * (3 * 64 + 2 * 32), rel=0.01)
