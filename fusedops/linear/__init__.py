"""Matrix product, bias and activation in one: ``linear``."""

from fusedops.linear.activations import register_activation

__all__ = ["register_activation"]
