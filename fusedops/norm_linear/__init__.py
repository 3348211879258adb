"""A norm and the linear layer behind it as one operator, which keeps no normalised tensor for the backward."""
