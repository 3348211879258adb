"""Matrix product, bias and activation in one: ``linear``."""
