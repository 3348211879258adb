"""How far a fused result may be from the plain one: no farther than rounding explains."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# A result in low precision is one draw of its rounding errors. The patched model's errors are another draw, of the
# same size where the kernels are right; a wrong formula is off by orders of magnitude.
FACTOR = 3.0


@dataclass(frozen=True, slots=True)
class Rounding:
    """Distances between plain and patched results, and from both to a reference in higher precision.

    Attributes:
        difference: largest absolute difference between patched and plain.
        plain: largest distance of the plain result from the reference, a measure of rounding alone.
        patched: largest distance of the patched result from the reference.
        limit: the largest ``patched`` that rounding explains.
    """

    difference: float
    plain: float
    patched: float
    limit: float

    @property
    def explained(self) -> bool:
        """Whether rounding explains the patched result. False for NaN."""
        return self.patched <= self.limit

    @property
    def share(self) -> float:
        """How much of the limit is used: at most 1 where rounding explains the result; infinite for NaN."""
        if not self.explained and not (self.patched > self.limit > 0):
            return math.inf
        return self.patched / self.limit if self.limit > 0 else 0.0

    def to_dict(self) -> dict[str, float | bool]:
        return {
            "largest_difference": self.difference,
            "plain_error": self.plain,
            "patched_error": self.patched,
            "limit": self.limit,
            "explained_by_rounding": self.explained,
        }


def compare(patched: torch.Tensor, plain: torch.Tensor, reference: torch.Tensor) -> Rounding:
    """Compare two results of equal shape with a reference in higher precision.

    ``limit = FACTOR * max|plain - reference| + 2 ulp``, an ulp being that of plain's dtype at the largest value.

    Examples:
        >>> exact = torch.tensor([1 / 3], dtype=torch.float64)
        >>> compare(exact.float(), exact.float(), exact).explained
        True
    """
    exact = reference.double()
    ulp = torch.finfo(plain.dtype).eps * exact.abs().max().item()
    error = (plain.double() - exact).abs().max().item()
    return Rounding(
        difference=(patched.double() - plain.double()).abs().max().item(),
        plain=error,
        patched=(patched.double() - exact).abs().max().item(),
        limit=FACTOR * error + 2 * ulp,
    )
