"""Tensors that are spread over devices (torch.distributed.tensor.DTensor), known without importing what makes them.

Importing it takes long, and most processes have none: so the sharding rules of our operators are registered when it
has been imported by someone else and the first of its tensors may arrive.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_registered = False


def sharded(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor. Then the operator is called on every backend: it is what has sharding rules."""
    kind = type(tensor)
    return kind not in _PLAIN and kind.__name__ == "DTensor" and hasattr(tensor, "placements")


def summed(tensor: Any) -> Any:
    """A DTensor without devices' terms of a sum: what is not linear, such as dropout, comes after the sum."""
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])


def prepare() -> bool:
    """Have the sharding rules registered if there can be a DTensor at all. True, always."""
    global _registered
    if not _registered and "torch.distributed.tensor" in sys.modules:
        _registered = True
        with contextlib.suppress(
            ImportError
        ):  # of names that torch does not promise: then DTensor says what is missing
            from fusedops.distributed.sharding import register_rules

            register_rules()
    return True


# While a graph is traced this is called once and for all, when the trace gets there, as an ordinary function.
prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]
