"""fusedops' layers under the layer names of Hugging Face's ``kernels`` library.

Model code marks layers by name (transformers marks its RMSNorm classes so), and ``kernels.kernelize`` gives each the
forward that a mapping holds under that name: usually one downloaded from the Hub, here one of fusedops, from this
package and without network. :func:`fusedops.patch` replaces more, and undoes it; this is for programs that choose their
kernels by ``kernels``' mappings.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusedops.linear.functional_gated import gated_linear
from fusedops.nn.parts import unobserved
from fusedops.norm.functional import layer_norm, rms_norm
from fusedops.patching.classes import is_plain

try:
    import kernels
except ImportError as error:
    raise ImportError("fusedops.integrations.kernels needs Hugging Face's kernels: pip install kernels") from error

# kernels' names of the devices whose tensors torch calls CUDA tensors.
DEVICES = ("cuda", "rocm")


def _own(module: nn.Module, *args: Any) -> Any:
    """The forward that the module's class has; ``kernelize`` sets another on the instance."""
    return type(module).forward(module, *args)


# kernels demands of a layer: no constructor and no members beside forward and these two flags, and a forward with as
# many arguments as the one that it replaces. So there is no common base, and what they share is functions.
class RMSNorm(nn.Module):
    """In place of a layer named ``RMSNorm``: weight · x / √(mean(x²) + eps).

    Where weight and input differ in dtype, the layers of that name differ in what they return; then the layer computes
    as it did.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _rms_norm(self, hidden_states, 0.0)


class RMSNormZeroCentered(nn.Module):
    """In place of a layer named ``RMSNormZeroCentered``: (1 + weight) · x / √(mean(x²) + eps)."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _rms_norm(self, x, 1.0)


class LayerNorm(nn.Module):
    """In place of torch.nn.LayerNorm, where it was given the name ``LayerNorm``."""

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        if not is_plain(input):
            return _own(self, input)
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class SwiGLUMLP(nn.Module):
    """In place of a layer named ``SwiGLUMLP``: ``down_proj(silu(gate_proj(x)) * up_proj(x))``, Llama's MLP."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _gated_mlp(self, x, "silu")


class GeGLUMLP(nn.Module):
    """In place of a layer named ``GeGLUMLP``: ``down_proj(gelu_tanh(gate_proj(x)) * up_proj(x))``, Gemma's MLP."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _gated_mlp(self, x, "gelu_tanh")


def _rms_norm(module: Any, x: torch.Tensor, weight_offset: float) -> torch.Tensor:
    weight = module.weight
    eps = getattr(module, "variance_epsilon", None)
    if eps is None:
        eps = getattr(module, "eps", None)
    if eps is None or not is_plain(x) or weight.dtype != x.dtype:
        return _own(module, x)
    return rms_norm(x, weight.shape, weight, eps, weight_offset=weight_offset)


def _gated_mlp(module: Any, x: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = module.gate_proj, module.up_proj
    if not (is_plain(x) and unobserved(gate, nn.Linear) and unobserved(up, nn.Linear)):
        return _own(module, x)
    hidden = gated_linear(x, gate.weight, up.weight, gate.bias, up.bias, activation)
    return module.down_proj(hidden)


LAYERS: dict[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (RMSNorm, RMSNormZeroCentered, LayerNorm, SwiGLUMLP, GeGLUMLP)
}


@dataclass(frozen=True, slots=True)
class Repository:
    """What a mapping holds in place of a repository: a layer of this package.

    Attributes:
        layer_name: a key of :data:`LAYERS`.
    """

    layer_name: str

    def load(self) -> type[nn.Module]:
        """The layer's class, whose forward ``kernels`` takes."""
        return LAYERS[self.layer_name]

    def __str__(self) -> str:
        return f"fusedops, layer {self.layer_name}"


def mapping(devices: Iterable[str] = DEVICES, layers: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
    """A mapping for ``kernels.register_kernel_mapping`` and ``kernels.use_kernel_mapping``.

    Args:
        devices: kernels' names of device types. On others than ``cuda`` and ``rocm`` torch's operators compute.
        layers: which of :data:`LAYERS`; default: all. ``SwiGLUMLP`` stands for an MLP with silu and ``GeGLUMLP`` for
            one with tanh's GELU, whatever the layer that bears the name has.

    Returns:
        A :class:`Repository` for each layer's name and device type.

    Raises:
        ValueError: no such layer.

    Examples:
        >>> from fusedops.integrations.kernels import mapping
        >>> sorted(mapping(layers=["RMSNorm"])["RMSNorm"])
        ['cuda', 'rocm']
    """
    names = list(LAYERS) if layers is None else list(layers)
    for name in names:
        if name not in LAYERS:
            raise ValueError(f"mapping: layers are {', '.join(LAYERS)}; got {name!r}")
    devices = list(devices)
    return {name: dict.fromkeys(devices, Repository(name)) for name in names}


def register(devices: Iterable[str] = DEVICES, layers: Iterable[str] | None = None) -> None:
    """Add fusedops' layers to the mapping that ``kernels.kernelize`` reads, for good.

    A layer that had an entry has this one afterwards. transformers registers its own mapping when a model is loaded
    with ``use_kernels=True``: register after that and call ``kernels.kernelize(model, mode=...)``.

    Args:
        devices, layers: as for :func:`mapping`.

    Raises:
        ValueError: no such layer.

    Examples:
        >>> import fusedops.integrations.kernels
        >>> fusedops.integrations.kernels.register(layers=["RMSNorm"])
        >>> model = kernels.kernelize(model, mode=kernels.Mode.TRAINING)  # doctest: +SKIP
    """
    kernels.register_kernel_mapping(mapping(devices, layers))


def use(devices: Iterable[str] = DEVICES, layers: Iterable[str] | None = None) -> AbstractContextManager[None]:
    """Context manager: within it ``kernels.kernelize`` finds fusedops' layers, and no others.

    Args:
        devices, layers: as for :func:`mapping`.

    Returns:
        The context manager.

    Raises:
        ValueError: no such layer.

    Examples:
        >>> import kernels, torch
        >>> from fusedops.integrations.kernels import use
        >>> @kernels.use_kernel_forward_from_hub("RMSNorm")
        ... class Norm(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6
        ...
        ...     def forward(self, x):
        ...         return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        >>> norm = Norm()
        >>> with use(devices=["cpu"]):
        ...     _ = kernels.kernelize(norm, mode=kernels.Mode.TRAINING, device="cpu")
        >>> norm.forward.__func__.__module__
        'fusedops.integrations.kernels'
    """
    context: AbstractContextManager[None] = kernels.use_kernel_mapping(mapping(devices, layers), inherit_mapping=False)
    return context
