"""In which dtype an operator computes, and how float32 matrix products are computed: torch's own settings decide."""

from __future__ import annotations

import torch

from fusedops.runtime.device import device_facts


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype that an operator of autocast's 16-bit list computes this tensor in: its own outside autocast.

    As torch's: autocast leaves float64 alone.
    """
    kind = tensor.device.type
    if tensor.dtype != torch.float64 and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def tf32_allowed(tensor: torch.Tensor) -> bool:
    """Whether torch's setting, read now, lets a float32 product of this tensor run in TF32.

    The setting is ``torch.backends.cuda.matmul.fp32_precision`` (before torch 2.9: ``allow_tf32``), which
    ``torch.set_float32_matmul_precision`` writes too. It concerns CUDA tensors.
    """
    return tensor.is_cuda and tensor.dtype == torch.float32 and _tf32_setting()


def _tf32_setting() -> bool:
    matmul = torch.backends.cuda.matmul
    try:
        return bool(matmul.fp32_precision == "tf32")
    except AttributeError:
        return matmul.allow_tf32


# torch.compile guards on this setting by itself and traces the graph again when it changes, so a graph may hold it
# as a constant; it cannot trace the getter. This is what torch.compiler.assume_constant_result sets.
_tf32_setting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def input_precision(tensor: torch.Tensor, allow_tf32: bool | None = None) -> str:
    """``input_precision`` of a ``tl.dot`` on this tensor: ``tf32`` where it is allowed and the device has it.

    Args:
        tensor: an operand.
        allow_tf32: what :func:`tf32_allowed` said when the operator was called; None: ask it now.
    """
    if allow_tf32 is None:
        allow_tf32 = tf32_allowed(tensor)
    return "tf32" if allow_tf32 and device_facts(tensor.device).capability >= 80 else "ieee"
