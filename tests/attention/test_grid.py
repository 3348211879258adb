"""Every option together with every other: problems drawn at random, each against the definition in float64.

The error rule holds for the output, lse and each gradient that was asked for; a second backward gives the same bits.

What is not drawn: problems all of whose queries see few keys, or give one of them nearly all weight. There the gradient
of the scores is next to zero, which torch's plain composition finds exactly, as it subtracts a number from itself; the
kernels, which subtract do · out from it, find it up to a rounding. test_values and test_options have such problems by
hand.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.attention.problems import DTYPES, NAMES, Problem, check
from tests.harness.tensors import LAYOUTS

# 200 draws; parts, so that test processes share them.
PARTS, DRAWS = 4, 50

# A tile of the interpreter's has up to 64 rows.
QUERIES = (1, 5, 16, 17, 31, 33, 64, 65, 80)
KEYS = (6, 16, 17, 31, 33, 64, 65, 80)
SIZES = (1, 3, 8, 16, 20, 32, 40, 64, 72)


@st.composite
def problems(draw) -> Problem:
    def one_of(*values):
        return draw(st.sampled_from(values))

    q, k = one_of(*QUERIES), one_of(*KEYS)
    few = ((1, 2, 1), (1, 1, 2), (2, 1, 1))  # of what takes many tiles already
    batch, kv_heads, group = one_of(*few) if min(q, k) > 64 else one_of(*few, (1, 1, 3), (2, 1, 2))
    heads = kv_heads * group
    causal, window = one_of(False, True, "bottom_right"), None
    if one_of(True, False):
        window = one_of(4, 9, 20, k - 1, k, 200, None), one_of(0, 1, 3, 20, k - 1, k, 200, None)
        window = window if one_of(True, False) else window[::-1]
        if causal and window[0] in (0, 1, 3):
            window = (window[1], window[0])
    mask, mask_shape = one_of(None, "bool", "float"), None
    if mask is not None:
        mask_shape = tuple(one_of(size, 1) for size in (batch, heads, q, k))
    d, scale = one_of(*SIZES), one_of(None, None, 0.0, -1.0, 1.5)
    alibi, sinks = one_of(None, "heads", "batch"), one_of(False, True)
    made = {"q", "k", "v"} | ({"attn_mask"} if mask == "float" else set())
    made |= ({"alibi_slopes"} if alibi else set()) | ({"sinks"} if sinks else set())
    return Problem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q=q,
        k=k,
        d=d,
        dv=one_of(None, *SIZES),
        causal=causal,
        window=window,
        mask=mask,
        mask_shape=mask_shape,
        alibi=alibi,
        sinks=sinks,
        softcap=one_of(0.0, 1.0, 15.0),
        scale=scale and scale / d**0.5,
        dropout_p=one_of(0.0, 0.0, 0.25),
        layout=(one_of(*LAYOUTS), one_of(*LAYOUTS), one_of(*LAYOUTS)),
        wanted=tuple(name for name in NAMES if name in made and one_of(True, True, False)),
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_grid(kernel_runner, part):
    # A problem that fails is not shrunk: the errors of smaller ones are a matter of luck.
    @seed(part)
    @settings(max_examples=DRAWS, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
    @given(
        problem=problems(),
        dtype=st.sampled_from(DTYPES),
        grad_layout=st.sampled_from(LAYOUTS),
        through=st.sampled_from((("out", "lse"), ("out",), ("lse",))),
        numbers=st.integers(0, 2**31 - 1),
    )
    def draw(problem, dtype, grad_layout, through, numbers):
        torch.default_generator.manual_seed(numbers)  # of the CPU, where the numbers are drawn
        check(problem, kernel_runner, dtype, grad_layout=grad_layout, through=through, thorough=True)

    draw()
