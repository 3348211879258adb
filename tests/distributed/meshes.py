"""What the tests of tensors that are spread over devices share."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

NAMES = {1: ("tp",), 2: ("dp", "tp")}


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh of all ranks; one a process for each shape, since each makes process groups."""
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES[len(shape)])


def counts(mode: Any) -> dict[str, int]:
    """How many collectives of which kind a CommDebugMode has seen."""
    return {str(name).rpartition(".")[2]: number for name, number in mode.get_comm_counts().items() if number}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on every rank."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
