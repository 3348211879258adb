"""Modules with torch.nn's constructors and state_dict keys that call fusedops' operators.

Each is a subclass of the torch.nn module of its name, so that a checkpoint of the one loads into the other, and code
that asks ``isinstance`` treats them alike.
"""

from fusedops.nn.modules import GroupNorm, LayerNorm, Linear, RMSNorm

__all__ = ["GroupNorm", "LayerNorm", "Linear", "RMSNorm"]
