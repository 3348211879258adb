"""Library ops under torch's two vmaps: a call for each element, also where tensors come in lists or are written to."""

from __future__ import annotations

import pytest
import torch

from fusedops.runtime import library

scaled_sum = library.register(
    "test_scaled_sum(Tensor x, Tensor[] more, float factor) -> (Tensor, Tensor)",
    kernel=lambda x, more, factor: (factor * sum(more, x.clone()), x * 1.0),
    fake=lambda x, more, factor: (torch.empty_like(x), torch.empty_like(x)),
)


def _fill(x: torch.Tensor, value: torch.Tensor) -> None:
    x.copy_(value)


fill = library.register("test_fill(Tensor(a!) x, Tensor value) -> ()", kernel=_fill, fake=lambda x, value: None)


def test_lists_of_tensors():
    x, y, z = torch.randn(4, 3), torch.randn(3), torch.randn(3, 4)
    total, same = torch.func.vmap(lambda x, z: scaled_sum(x, [y, z], 2.0), in_dims=(0, 1))(x, z)
    torch.testing.assert_close(total, 2 * (x + y + z.T))
    assert torch.equal(same, x)


def test_one_vmap_within_another():
    x, y = torch.randn(2, 3), torch.randn(4, 3)
    inner = torch.func.vmap(lambda x, y: scaled_sum(x, [y], 1.0)[0], in_dims=(None, 0))
    found = torch.func.vmap(inner, in_dims=(0, None))(x, y)
    torch.testing.assert_close(found, x[:, None] + y[None])


def test_out_dims_and_a_batch_elsewhere():
    x = torch.randn(3, 4)
    found, _ = torch.func.vmap(lambda x: scaled_sum(x, [], 1.0), in_dims=1, out_dims=1)(x)
    assert torch.equal(found, x)


def test_what_is_written_to():
    x, values = torch.zeros(4, 3), torch.randn(4, 3)
    torch.func.vmap(fill, out_dims=None)(x, values)
    assert torch.equal(x, values)
    with pytest.raises(RuntimeError, match="cannot write a batch to x, which has none"):
        torch.func.vmap(fill, in_dims=(None, 0), out_dims=None)(torch.zeros(3), values)


def test_no_element_is_a_clear_error():
    with pytest.raises(RuntimeError, match="vmap over a dimension of size 0 is not supported"):
        torch.func.vmap(lambda x: scaled_sum(x, [], 1.0))(torch.zeros(0, 3))


def test_a_dimension_of_one_is_a_batch_too():
    x, values = torch.zeros(1, 3), torch.randn(1, 3)
    torch.func.vmap(fill, out_dims=None)(x, values)
    assert torch.equal(x, values)
