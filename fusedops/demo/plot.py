"""The picture of ``fusedops demo``: two loss curves that lie on each other, and how far apart they are."""

from __future__ import annotations

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
    top.plot(plain, color="#9ecae1", linewidth=5, label="plain")
    top.plot(patched, color="#08519c", linewidth=1.2, label="patched by fusedops")
    top.set_ylabel("training loss (nats per byte)")
    top.set_title(f"Byte-level GPT on Python's standard library, fusedops on the {backend} backend")
    top.legend()
    top.grid(alpha=0.3)

    apart = [abs(a - b) for a, b in zip(patched, plain, strict=True)]
    rounding = [abs(a - b) for a, b in zip(plain, reference, strict=False)]
    bottom.plot(_visible(apart), color="#08519c", linewidth=1.2, label="|patched − plain|")
    bottom.plot(_visible(rounding), color="#d94801", linewidth=1.2, label=f"|plain − {precision}|: rounding alone")
    if any(apart) or any(rounding):
        bottom.set_yscale("log")
    if not any(apart):
        middle = {"x": 0.5, "y": 0.08, "ha": "center", "transform": bottom.transAxes}
        bottom.text(s="|patched − plain| is exactly 0 at every step", color="#08519c", **middle)
    bottom.set_xlabel("step")
    bottom.set_ylabel("difference of losses (nats per byte)")
    bottom.legend(loc="upper right")
    bottom.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def _visible(values: list[float]) -> list[float]:
    """Zeros have no place on a logarithmic axis: they become gaps."""
    return [value if value > 0 else float("nan") for value in values]
