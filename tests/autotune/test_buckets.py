"""Sizes made coarse: monotonic, bounded, few."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusedops.autotune.buckets import bucket

SIZES = st.integers(0, 1 << 40)


@given(SIZES, SIZES)
def test_a_larger_size_never_has_a_smaller_bucket(a, b):
    small, large = sorted((a, b))
    assert bucket(small) <= bucket(large)


@given(SIZES)
def test_a_bucket_is_at_least_its_size_and_not_far_from_it(size):
    found = bucket(size)
    if size >= 1 << 15:
        assert found == 1 << 15
    else:
        assert size <= found
        assert found < 2 * max(size, 1) if size <= 256 else found < 1.5 * size


@given(SIZES)
def test_a_bucket_is_its_own_bucket(size):
    assert bucket(bucket(size)) == bucket(size)


def test_powers_of_two_up_to_256_then_two_an_octave():
    found = sorted({bucket(size) for size in range(5000)})
    assert found == [1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144]


def test_the_last_bucket_stands_for_all_larger_sizes():
    assert bucket(10**9, 1024) == bucket(1025, 1024) == bucket(1024, 1024) == 1024
    assert bucket(1023, 1024) == 1024
