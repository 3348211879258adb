"""Modules that call fusedops' operators.

Those named as one of torch.nn's are subclasses of it with its constructor and state_dict keys: a checkpoint of the one
loads into the other, and code that asks ``isinstance`` treats them alike. So are ``AddLayerNorm`` and ``AddRMSNorm`` to
the norms they end with. ``LayerNormLinear`` and ``LayerNormMLP`` name their parameters as Transformer Engine's do.
"""

from fusedops.nn.linear import LayerNormLinear, LayerNormMLP, Linear
from fusedops.nn.norm import AddLayerNorm, AddRMSNorm, GroupNorm, LayerNorm, RMSNorm

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "GroupNorm",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
]
