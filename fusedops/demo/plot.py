"""The picture of ``fusedops demo``: two loss curves that lie on each other, and how far apart they are."""

from __future__ import annotations

import math
from pathlib import Path

from fusedops.demo import require

PACKAGES = ("matplotlib",)


def draw_losses(
    path: Path, plain: list[float], patched: list[float], reference: list[float], precision: str, backend: str
) -> None:
    """Write a PNG with the curves and the absolute differences, a step a point.

    Args:
        reference: the losses in higher precision, for the first steps only.
        precision: of the reference, such as ``float64``.
        backend: what ran in the patched model, for the title.
    """
    require(PACKAGES)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 6.4), sharex=True, height_ratios=(3, 2), layout="constrained", dpi=120
    )
    steps = range(1, len(plain) + 1)
    top.plot(steps, plain, color="#9ecae1", linewidth=5, label="plain")
    top.plot(steps, patched, color="#08519c", linewidth=1.2, label="patched by fusedops")
    top.set_ylabel("training loss (nats per byte)")
    top.set_title(f"Byte-level GPT on Python's standard library, fusedops on the {backend} backend")

    apart = [abs(a - b) for a, b in zip(patched, plain, strict=True)]
    rounding = [abs(a - b) for a, b in zip(plain, reference, strict=False)]
    bottom.plot(
        steps[: len(rounding)], rounding, color="#d94801", marker=".", label=f"|plain − {precision}|: rounding alone"
    )
    bottom.plot(steps, apart, color="#08519c", marker=".", linestyle="none", label="|patched − plain|")
    # Logarithmic above the threshold, with zero, which is frequent, on the axis.
    finite = [value for value in apart + rounding if math.isfinite(value)]
    bottom.set_yscale("symlog", linthresh=_threshold(finite))
    bottom.set_ylim(0, 10 * max(finite, default=1e-8) or 1e-7)
    bottom.set_xlabel("step")
    bottom.set_ylabel("difference of the losses")
    for axes, corner in ((top, "upper right"), (bottom, "upper left")):
        axes.legend(loc=corner)
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def _threshold(values: list[float]) -> float:
    """A power of ten below the smallest value that is not zero."""
    smallest = min((value for value in values if value > 0), default=1e-8)
    return float(10.0 ** math.floor(math.log10(smallest)))
