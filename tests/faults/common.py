"""What the tests of faults share: every operator called, with its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.harness.operators import OPERATORS, Operator

STEADY = [operator for operator in OPERATORS if not operator.random]
DIFFERENTIABLE = [operator for operator in STEADY if operator.differentiable]


def outputs_of(operator: Operator, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    found = operator.function(*inputs)
    return [found] if isinstance(found, torch.Tensor) else list(found)


def gradients_of(
    operator: Operator, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], incoming: Any = torch.ones_like
) -> list[torch.Tensor | None]:
    """Of every input that requires one; ``incoming`` makes each output's gradient."""
    wanted = [t for t in inputs if t.requires_grad]
    given = [o for o in outputs if o.requires_grad]
    return list(torch.autograd.grad(given, wanted, [incoming(o) for o in given], allow_unused=True))
