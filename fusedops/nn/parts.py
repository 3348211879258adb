"""When a module may read the parameters of its parts instead of calling them."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as torch_module

from fusedops.runtime.sharded import sharded

# A parameter is a fake tensor while a graph is traced from the module.
_PLAIN = (torch.nn.Parameter, torch.Tensor, FakeTensor)


def hooked(part: Any) -> bool:
    """Whether the calls of this part, forward or backward, are hooked."""
    return bool(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)


def unobserved(part: Any, *kinds: type) -> bool:
    """Whether the part is of one of these classes itself, and nobody could tell if it were not called.

    Not so where it was exchanged for another class (LoRA, quantised, parametrized), its calls are hooked or its forward
    was replaced. The fused class that fusedops.patch gives to a part counts as its own.
    """
    kind = type(part)
    return (
        kind.__dict__.get("fused_original", kind) in kinds
        and not hooked(part)
        and "forward" not in part.__dict__
        and not torch_module._has_any_global_hook()
    )


def reads(part: Any, *kinds: type) -> bool:
    """Whether calling the part does no more than its class does with its weight and bias, so that these may be read.

    As :func:`unobserved`, and its parameters are not of a class of their own.
    """
    return unobserved(part, *kinds) and _plain(part.weight) and (part.bias is None or _plain(part.bias))


def _plain(parameter: torch.Tensor) -> bool:
    return type(parameter) in _PLAIN or sharded(parameter)
