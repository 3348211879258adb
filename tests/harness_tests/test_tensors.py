"""The awkward tensors are what they say."""

from __future__ import annotations

import pytest
import torch

from tests.harness.tensors import LAYOUTS, randn, randn_like


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(4, 6, 8), (5, 7), (9,), ()], ids=str)
def test_shape_dtype_and_leaf(shape, layout):
    x = randn(*shape, dtype=torch.bfloat16, layout=layout, requires_grad=True)
    assert x.shape == shape
    assert x.dtype == torch.bfloat16
    assert x.is_leaf
    assert x.requires_grad
    assert x.isfinite().all()


def test_strides():
    assert randn(4, 6, 8, layout="transposed").stride() == (48, 1, 6)
    assert randn(4, 6, layout="expanded").stride() == (0, 1)
    assert randn(4, 6, layout="strided").stride() == (12, 2)
    assert randn(4, 6, layout="sliced").stride() == (9, 1)
    assert randn(4, 6, layout="offset").storage_offset() == 1


@pytest.mark.parametrize("layout", ["sliced", "strided", "offset"])
def test_all_that_surrounds_the_values_is_nan(layout):
    x = randn(4, 6, layout=layout)
    whole = torch.tensor([], dtype=x.dtype).set_(x.untyped_storage())
    assert whole.isnan().sum() == whole.numel() - x.numel()
    assert whole.numel() > x.numel()


def test_fresh_numbers_in_each_call():
    x = randn(8, 8)
    assert not torch.equal(x, randn_like(x))


def test_an_unknown_layout_is_an_error():
    with pytest.raises(ValueError, match="layout must be one of"):
        randn(3, 4, layout="diagonal")
