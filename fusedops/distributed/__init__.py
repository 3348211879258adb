"""fusedops on more than one device, on torch.distributed."""

from typing import TYPE_CHECKING, Any

from fusedops.distributed.context_parallel import (
    context_parallel_attention,
    positions,
    shard_sequence,
    unshard_sequence,
)

if TYPE_CHECKING:
    from fusedops.distributed.tensor_parallel import SequenceParallelNorm, TensorParallel, tensor_parallel_plan

__all__ = [
    "SequenceParallelNorm",
    "TensorParallel",
    "context_parallel_attention",
    "positions",
    "shard_sequence",
    "tensor_parallel_plan",
    "unshard_sequence",
]

# These import torch.distributed.tensor, which takes long.
_LATE = ("SequenceParallelNorm", "TensorParallel", "tensor_parallel_plan")


def __getattr__(name: str) -> Any:
    if name in _LATE:
        from fusedops.distributed import tensor_parallel

        return getattr(tensor_parallel, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
