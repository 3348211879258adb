"""A small call of each operator: what ``doctor`` and ``demo`` ask about, and what ``doctor`` tries out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import fusedops
from fusedops.runtime.backend import Explanation


@dataclass(frozen=True, slots=True)
class SampleCall:
    """A public function with arguments for it."""

    function: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.function.__name__

    def run(self) -> torch.Tensor:
        return self.function(*self.args, **self.kwargs)

    def explain(self) -> Explanation:
        return fusedops.explain(self.function, *self.args, **self.kwargs)

    def in_double(self) -> SampleCall:
        """The same call with float64 tensors."""
        return replace(self, args=tuple(_double(a) for a in self.args))


def _double(value: object) -> object:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def sample_calls(device: torch.device, dtype: torch.dtype = torch.float32) -> Iterator[SampleCall]:
    """One small call of each kind of operator, the same numbers every time."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    yield SampleCall(fusedops.layer_norm, (draw(8, 96), 96, draw(96), draw(96)))
    yield SampleCall(fusedops.rms_norm, (draw(8, 96), 96, draw(96)))
    yield SampleCall(fusedops.group_norm, (draw(2, 16, 6, 6), 4, draw(16), draw(16)))
    yield SampleCall(fusedops.linear, (draw(16, 64), draw(32, 64), draw(32), "gelu"))
    yield SampleCall(fusedops.gated_linear, (draw(16, 64), draw(32, 64), draw(32, 64)))
    q, k, v = (draw(1, 2, 16, 32) for _ in range(3))
    yield SampleCall(fusedops.attention, (q, k, v), {"causal": True})
    q, k, v = (draw(24, 2, 32) for _ in range(3))
    ends = torch.tensor([0, 10, 24], dtype=torch.int32).to(device)
    yield SampleCall(fusedops.attention_varlen, (q, k, v, ends, ends), {"causal": True})
