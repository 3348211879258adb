"""What the benchmarks compute beside timing: statistics, work, tables."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import (
    Sample,
    human_seconds,
    interleave,
    linear_flops,
    markdown_table,
    median_interval,
    norm_bytes,
    paired_ratio,
)


def test_a_sample_holds_median_and_quartiles() -> None:
    assert Sample.of([4.0, 1.0, 3.0, 2.0, 100.0]) == Sample(3.0, 2.0, 4.0, 5)
    assert Sample.of([2.0]) == Sample(2.0, 2.0, 2.0, 1)
    with pytest.raises(ValueError, match="seconds"):
        Sample.of([])


@pytest.mark.parametrize("count", [1, 2, 5, 11, 60, 201])
def test_the_medians_interval_holds_the_true_median(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    held = 0
    for _ in range(400):
        low, high = median_interval(torch.rand(count, generator=generator).tolist())
        held += low <= 0.5 <= high
    # 95 % on average; fewer than about six values cannot promise that.
    assert held >= 0.92 * 400 if count > 5 else low <= high


def test_a_slow_moment_leaves_the_paired_ratio_alone() -> None:
    plain = [1.0, 1.0, 50.0, 1.0, 2.0]
    assert paired_ratio([1.02 * seconds for seconds in plain], plain).median == pytest.approx(1.02)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        paired_ratio([1.0], [1.0, 2.0])


def test_interleaving_turns_the_order_round() -> None:
    calls: list[str] = []
    seconds = interleave({name: lambda name=name: calls.append(name) for name in "ab"}, repeats=3, warm_up=1)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}
    assert min(min(values) for values in seconds.values()) >= 0


def counted(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_linear_flops_are_those_torch_counts(backward: bool) -> None:
    x, w = torch.randn(6, 10, requires_grad=True), torch.randn(14, 10, requires_grad=True)
    forward = counted(lambda: F.linear(x, w))
    both = counted(lambda: F.linear(x, w).sum().backward())
    assert linear_flops(6, 10, 14, backward) == (both - forward if backward else forward)


def test_norm_bytes_are_those_of_the_tensors() -> None:
    x, y, dy, dx = (torch.empty(5, 7, dtype=torch.bfloat16) for _ in range(4))
    weight, bias = (torch.empty(7, dtype=torch.bfloat16) for _ in range(2))
    assert norm_bytes(35, 2, parameters=14, backward=False) == sum(t.nbytes for t in (x, y, weight, bias))
    # The bias is not read in the backward; it is counted, as little as it is.
    assert norm_bytes(35, 2, parameters=7, backward=True) == sum(t.nbytes for t in (x, dy, dx, weight, weight))
    added = (x, x, y, x, weight)  # x, residual, y, their sum
    assert norm_bytes(35, 2, parameters=7, backward=False, residual=True) == sum(t.nbytes for t in added)
    added = (x, dy, dy, dx, weight, weight)  # the sum, dy, the sum's gradient, dx
    assert norm_bytes(35, 2, parameters=7, backward=True, residual=True) == sum(t.nbytes for t in added)


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.0, "2 s"), (0.0123, "12.3 ms"), (4.56e-5, "45.6 µs"), (1e-9, "0.001 µs"), (0.0, "0 µs")]
)
def test_human_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_markdown_table_escapes_bars() -> None:
    assert markdown_table(("a", "b"), [("x|y", "1")]) == "| a | b |\n| --- | ---: |\n| x\\|y | 1 |"
