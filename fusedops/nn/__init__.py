"""Modules that call fusedops' operators.

Those named as one of torch.nn's are subclasses of it with its constructor and state_dict keys: a checkpoint of the one
loads into the other, and code that asks ``isinstance`` treats them alike. So are ``AddLayerNorm`` and ``AddRMSNorm`` to
the norms they end with. ``LayerNormLinear`` and ``LayerNormMLP`` name their parameters as Transformer Engine's do,
``GatedLinear`` and ``GatedMLP`` as Llama's modules do, ``MLP`` as timm's.
"""

from fusedops.nn.attention import MultiheadAttention
from fusedops.nn.cache import KVCache
from fusedops.nn.linear import LayerNormLinear, LayerNormMLP, Linear
from fusedops.nn.mlp import MLP, GatedLinear, GatedMLP
from fusedops.nn.norm import AddLayerNorm, AddRMSNorm, GroupNorm, LayerNorm, RMSNorm
from fusedops.nn.transformer import TransformerEncoderLayer

__all__ = [
    "MLP",
    "AddLayerNorm",
    "AddRMSNorm",
    "GatedLinear",
    "GatedMLP",
    "GroupNorm",
    "KVCache",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "TransformerEncoderLayer",
]
