"""The error rule of a trial: what passes, what does not, and what nothing can be compared with."""

from __future__ import annotations

import math

import pytest
import torch

from fusedops.autotune.trial import Trial

NAN, INF = math.nan, math.inf


class Given(Trial):
    """Half-precision results of torch's own operators, and the exact ones."""

    def __init__(self, plain, exact):
        self.given = torch.tensor(plain, dtype=torch.float16), torch.tensor(exact, dtype=torch.float64)

    def run(self):
        raise NotImplementedError

    def plain(self):
        return (self.given[0],)

    def exact(self):
        return (self.given[1],)


def wrong(plain, exact, result):
    return Given(plain, exact).wrong((torch.tensor(result, dtype=torch.float16),))


@pytest.mark.parametrize(
    ("plain", "exact", "result"),
    [([1, 2], [1, 2], [1, 2]), ([1, 2], [1, 2], [1, 2.0039]), ([0, 0], [0, 0], [0, 0]), ([], [], [])],
)
def test_what_rounding_explains_is_right(plain, exact, result):
    assert wrong(plain, exact, result) is None


@pytest.mark.parametrize("result", [[1, 2.02], [NAN, 2], [1, INF], [-INF, 2], [1, 2, 3], [[1, 2]]])
def test_anything_else_is_wrong(result):
    assert wrong([1, 2], [1, 2], result) is not None


def test_torchs_own_error_widens_what_passes():
    assert wrong([1, 2.25], [1, 2], [1, 2.7]) is None
    assert "off by 1;" in wrong([1, 2.25], [1, 2], [1, 3])


@pytest.mark.parametrize(("plain", "exact"), [([INF], [70000]), ([NAN], [1]), ([INF], [INF]), ([NAN], [NAN])])
def test_nothing_is_compared_with_what_is_not_finite(plain, exact):
    with pytest.raises(ValueError, match="not finite"):
        wrong(plain, exact, [1])
