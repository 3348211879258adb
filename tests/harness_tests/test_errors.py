"""The error rule accepts what is as good as torch and rejects the rest."""

from __future__ import annotations

import math

import pytest
import torch

from tests.harness.errors import check_error, ulp

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def problem(dtype):
    exact = torch.randn(64, 64, dtype=torch.float64)
    return exact, exact.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ulp_is_the_spacing_of_numbers(dtype):
    values = torch.tensor([1.0, 1.5, 2.0, -3.0, 1000.0, 0.01]).to(dtype)
    spacing = torch.nextafter(values.abs(), torch.full_like(values, torch.inf)).double() - values.abs().double()
    assert torch.equal(ulp(values.double(), dtype), spacing)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_rounded_result_passes(dtype):
    exact, rounded = problem(dtype)
    check_error(rounded, exact, rounded)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_wrong_element_fails(dtype):
    exact, rounded = problem(dtype)
    wrong = rounded.clone()
    wrong[3, 5] = 4 + 16 * torch.finfo(dtype).eps
    exact[3, 5] = rounded[3, 5] = 4
    with pytest.raises(AssertionError, match=r"output: wrong by .* at \(3, 5\)"):
        check_error(wrong, exact, rounded, what="output")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_truncation_instead_of_rounding_fails_on_average(dtype):
    exact, rounded = problem(dtype)
    beyond = rounded.double().abs() > exact.abs()
    truncated = torch.where(beyond, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)
    with pytest.raises(AssertionError, match="mean error"):
        check_error(truncated, exact, rounded)


def test_a_gradient_may_be_three_times_as_far_off():
    exact, _ = problem(torch.float32)
    plain, ours = exact.float(), exact.float()
    exact[0, :3] = plain[0, :3] = ours[0, :3] = 1
    plain[0, :3] += 1e-3
    ours[0, 0] += 2.5e-3
    check_error(ours, exact, plain, gradient=True)
    with pytest.raises(AssertionError, match="wrong by"):
        check_error(ours, exact, plain)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_fails(value):
    exact, rounded = problem(torch.float32)
    wrong = rounded.clone()
    wrong[1, 2] = value
    with pytest.raises(AssertionError, match=r"at \(1, 2\)"):
        check_error(wrong, exact, rounded)


def test_infinities_belong_where_the_reference_has_them():
    exact, rounded = problem(torch.float32)
    exact[0], rounded[0] = -math.inf, -math.inf
    check_error(rounded, exact, rounded)
    for wrong_value in (math.inf, math.nan, 0.0):
        wrong = rounded.clone()
        wrong[0, 7] = wrong_value
        with pytest.raises(AssertionError, match=r"at \(0, 7\)"):
            check_error(wrong, exact, rounded)


def test_torchs_nan_gives_no_leave():
    exact, rounded = problem(torch.float32)
    baseline = rounded.clone()
    baseline[0] = math.nan
    check_error(rounded, exact, baseline)
    with pytest.raises(AssertionError, match=r"at \(0, 0\)"):
        check_error(baseline, exact, baseline)


def test_dtype_and_shape_count():
    exact, rounded = problem(torch.float16)
    with pytest.raises(AssertionError, match="dtype"):
        check_error(rounded.float(), exact, rounded)
    with pytest.raises(AssertionError, match="shape"):
        check_error(rounded[:1], exact, rounded)
    check_error(rounded[:0], exact[:0], rounded[:0])
