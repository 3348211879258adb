"""The one rule for how far a result may be from the exact one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The spacing of ``dtype``'s numbers at each value (float64)."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(values.double().abs().clamp_min(info.smallest_normal))
    return torch.ldexp(torch.full_like(values, info.eps, dtype=torch.float64), exponent - 1)


def check_error(
    actual: torch.Tensor,
    reference: torch.Tensor,
    baseline: torch.Tensor,
    *,
    gradient: bool = False,
    what: str = "result",
    more: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
) -> None:
    """Assert that ``actual`` is about as near to the exact result as torch's own composition is.

    * every element: ``|actual - reference| ≤ f · max|baseline - reference| + 2 ulp`` with f = 2, or 3 for a gradient,
      the ulp being that of the element;
    * on average: ``mean|actual - reference| ≤ 1.2 · mean|baseline - reference| + 2 ulp``, the ulp being that of
      float32, in which everything is accumulated, plus 2 ulp of the result's dtype over the square root of the number
      of elements: by so much the mean of few roundings varies;
    * an infinity or NaN stands exactly where the reference has it, and nowhere else.

    Where the baseline is not finite but the reference is (torch's fully masked softmax rows), it does not count.

    Args:
        actual: what fusedops computed.
        reference: the same computed in float64.
        baseline: torch's plain composition in the dtypes of ``actual``.
        gradient: ``actual`` is a gradient.
        what: name of the tensor in the message.
        more: for a result of few elements, whose errors are a matter of luck: (reference, baseline) of the same
            operation on other numbers. Their errors count among torch's, and the average is left out.

    Raises:
        AssertionError: the rule is broken; the message tells the worst element.
    """
    assert reference.dtype == torch.float64, f"{what}: the reference must be float64, not {reference.dtype}"
    assert actual.dtype == baseline.dtype, f"{what}: dtype {actual.dtype}, torch's is {baseline.dtype}"
    assert actual.shape == reference.shape == baseline.shape, (
        f"{what}: shape {tuple(actual.shape)}, reference {tuple(reference.shape)}, torch's {tuple(baseline.shape)}"
    )
    if actual.numel() == 0:
        return
    result, exact, plain = (t.detach().cpu().double() for t in (actual, reference, baseline))
    finite = exact.isfinite()
    special = (result == exact) | (result.isnan() & exact.isnan())
    misplaced = ~torch.where(finite, result.isfinite(), special)
    if misplaced.any():
        at = _index(misplaced.double())
        raise AssertionError(
            f"{what}: {int(misplaced.sum())} of {result.numel()} elements are {result[at].item()} or the like; "
            f"the first is at {at}, where the reference has {exact[at].item()}"
        )
    if not finite.any():
        return
    error = (result - exact).abs()[finite]
    samples = [(exact, plain), *((r.detach().cpu().double(), b.detach().cpu().double()) for r, b in more)]
    plain_error = torch.cat([(b - r).abs()[r.isfinite() & b.isfinite()] for r, b in samples])
    plain_max, plain_mean = (float(plain_error.max()), float(plain_error.mean())) if plain_error.numel() else (0.0, 0.0)

    factor = 3 if gradient else 2
    allowed = factor * plain_max + 2 * ulp(exact[finite], actual.dtype)
    if (error > allowed).any():
        worst = int((error / allowed).argmax())
        at = tuple(finite.nonzero()[worst].tolist())
        raise AssertionError(
            f"{what}: wrong by {error[worst]:.3e} at {at}; allowed {allowed[worst]:.3e} = {factor} x torch's largest "
            f"error {plain_max:.3e} + 2 ulp (got {result[at].item():.8g}, reference {exact[at].item():.8g})"
        )
    if more:
        return
    few = float(ulp(exact[finite], actual.dtype).mean()) / math.sqrt(error.numel())
    allowed_mean = 1.2 * plain_mean + 2 * float(ulp(exact[finite], torch.float32).mean()) + 2 * few
    assert error.mean() <= allowed_mean, (
        f"{what}: mean error {error.mean():.3e}; allowed {allowed_mean:.3e} = 1.2 x torch's {plain_mean:.3e} + 2 ulp"
    )


def _index(score: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(score.argmax(), score.shape))
