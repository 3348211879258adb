"""Unusual modules and inputs: what patching must leave as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusedops


class Tripled(nn.ReLU):
    def __call__(self, x):
        return super().__call__(x) * 3


class PlusOne(nn.Linear):
    def _call_impl(self, *args, **kwargs):
        return super()._call_impl(*args, **kwargs) + 1


class Twice(nn.Sequential):
    def __iter__(self):
        return iter([module for module in self._modules.values() for _ in range(2)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(8, 8), Tripled()),
        lambda: nn.Sequential(PlusOne(8, 8), nn.ReLU()),
        lambda: Twice(nn.Linear(8, 8), nn.ReLU()),
    ],
    ids=["activation", "linear", "sequential"],
)
def test_a_class_that_changes_how_it_is_called_is_left_alone(make):
    model, x = make(), torch.randn(4, 8)
    with fusedops.backend("torch"):
        plain = model(x)
        assert not fusedops.patch(model).replaced
        assert torch.equal(model(x), plain)


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(8), lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU())])
def test_jagged_inputs_take_the_way_they_took_before(make):
    model = make()
    x = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)
    plain = model(x)
    assert fusedops.patch(model).replaced
    for ours, before in zip(model(x).unbind(), plain.unbind(), strict=True):
        assert torch.equal(ours, before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_part_is_no_obstacle():
    traced = torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8))
    model = nn.Sequential(traced, nn.LayerNorm(8))
    with fusedops.backend("torch"):
        assert len(fusedops.patch(model).replaced) == 1
        assert model(torch.randn(2, 8)).shape == (2, 8)
