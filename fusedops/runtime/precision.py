"""In which dtype an operator computes, and how float32 matrix products are computed: torch's own settings decide."""

from __future__ import annotations

import torch

from fusedops.runtime.checks import wrong_type, wrong_value
from fusedops.runtime.device import device_facts, pretending

# Whether autocast is on for any kind of device: cheaper than to ask for one, by name.
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype that an operator of autocast's 16-bit list computes this tensor in: its own outside autocast.

    As torch's: autocast leaves float64 alone.
    """
    if not (torch.compiler.is_compiling() or _any_autocast()):
        return tensor.dtype
    kind = tensor.device.type
    if tensor.dtype != torch.float64 and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def tf32_allowed(tensor: torch.Tensor) -> bool:
    """Whether torch's setting, read now, lets a float32 product of this tensor run in TF32.

    The setting is ``torch.backends.cuda.matmul.fp32_precision`` (before torch 2.9: ``allow_tf32``), which
    ``torch.set_float32_matmul_precision`` writes too. It concerns CUDA tensors.
    """
    # What is compiled for an absent GPU is made from tensors that lie on none.
    return tensor.dtype == torch.float32 and (tensor.is_cuda or pretending()) and _tf32_setting()


def _tf32_setting() -> bool:
    matmul = torch.backends.cuda.matmul
    try:
        return bool(matmul.fp32_precision == "tf32")
    except AttributeError:
        return matmul.allow_tf32


# torch.compile guards on this setting by itself and traces the graph again when it changes, so a graph may hold it
# as a constant; it cannot trace the getter. This is what torch.compiler.assume_constant_result sets.
_tf32_setting._dynamo_marked_constant = True  # type: ignore[attr-defined]


PRECISIONS = ("ieee", "tf32", "tf32x3")


def float32_precision(tensor: torch.Tensor, asked: str | None = None) -> str:
    """How a float32 product of this tensor is computed: ``ieee``, ``tf32`` or ``tf32x3``.

    Args:
        tensor: an operand in the dtype that is multiplied. Dtypes other than float32 are multiplied as they are: ieee.
        asked: one of these by name; None: what torch's setting says now (:func:`tf32_allowed`).
    """
    if tensor.dtype != torch.float32:
        return "ieee"
    if asked is None:
        return "tf32" if tf32_allowed(tensor) else "ieee"
    return asked


def check_precision(function: str, value: str | None) -> None:
    """TypeError or ValueError unless it is None or a name that ``float32_precision`` takes."""
    takes = f"None or one of {', '.join(map(repr, PRECISIONS))}"
    if value is not None and not isinstance(value, str):
        wrong_type(function, "fp32_precision", takes, value)
    if value is not None and value not in PRECISIONS:
        wrong_value(function, "fp32_precision", takes, value)


def dot_precision(tensor: torch.Tensor, precision: str) -> str:
    """``input_precision`` of a ``tl.dot`` on this tensor: ``precision`` where the device has TF32, else ``ieee``."""
    return precision if precision == "ieee" or device_facts(tensor.device).capability >= 80 else "ieee"


def input_precision(tensor: torch.Tensor, allow_tf32: bool | None = None) -> str:
    """``input_precision`` of a ``tl.dot`` on this tensor: ``tf32`` where it is allowed and the device has it.

    Args:
        tensor: an operand.
        allow_tf32: what :func:`tf32_allowed` said when the operator was called; None: ask it now.
    """
    if allow_tf32 is None:
        allow_tf32 = tf32_allowed(tensor)
    return dot_precision(tensor, "tf32" if allow_tf32 else "ieee")
