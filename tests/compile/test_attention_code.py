"""Attention's machine code: asynchronous products, masks at the edges alone, no more of anything than a textbook's."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize("causal", [False, True], ids=["all_keys", "causal"])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("target", "product"), [("sm_90", "HGMMA"), ("sm_100", "UTCHMMA")])
def test_the_forward_beside_a_textbooks(compiler, target, product, size, causal):
    ours, textbook, whole = compiler.call("tests.compile.attention_code:forward", target, size, causal)
    assert [each["error"] for each in (ours, textbook, whole)] == [None, None, None]
    assert ours["matrix"] == product  # asynchronous
    assert not ours["serialised"]
    assert ours["spill_bytes"] == 0
    assert ours["matrix_count"] == textbook["matrix_count"]
    for figure in ("others", "exponentials", "registers"):
        assert ours[figure] <= textbook[figure], figure
    # The masks' comparisons are in the loops at the edges.
    assert ours["others"] < 0.9 * ours["edge_others"]
    if causal:
        for figure in ("others", "registers"):  # of the one that takes whole tiles only, and so compares less
            assert ours[figure] < whole[figure], figure
