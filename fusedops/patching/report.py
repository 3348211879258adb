"""What patching did or would do: the report, its text and its dictionary."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


class PatchError(ValueError):
    """A model could not be patched or put back as asked. The model is as it was before the call."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """One place of a model that calls a fused operator.

    Attributes:
        path: the module's name in the model, as ``model.named_modules()`` gives it ("" for the model itself).
        original: the class that was there; for a pair, "Linear -> GELU".
        rule: which rule recognised it: "norm", "linear+activation" or "attention".
        calls: the fusedops function that it calls.
    """

    path: str
    original: str
    rule: str
    calls: str


@dataclass(frozen=True, slots=True)
class Left:
    """One place that was recognised and left alone. ``reason`` holds every reason."""

    path: str
    original: str
    reason: str


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The outputs of a model before and after patching, compared.

    Attributes:
        max_abs_error: largest absolute difference between the two, over all floating-point outputs.
        max_abs_value: largest finite magnitude among these outputs before patching.
        where: which output has the largest difference, such as ``output.logits``.
        tensors: how many tensors were compared.
    """

    max_abs_error: float
    max_abs_value: float
    where: str
    tensors: int


@dataclass(frozen=True, slots=True)
class PatchReport:
    """What was replaced in a model, what was recognised and left alone and why.

    ``str(report)`` is a table in which the layers of a deep model share a line; :meth:`to_dict` is for JSON.

    Attributes:
        replaced: what this call replaced (for :func:`fusedops.plan`: what it would replace).
        left: what was recognised and left alone.
        already: what an earlier call had replaced.
        check: the comparison that ``check=`` asked for.
        notes: remarks on the model as a whole.
        applied: False for a plan.
    """

    replaced: tuple[Replacement, ...] = ()
    left: tuple[Left, ...] = ()
    already: tuple[Replacement, ...] = ()
    check: CheckResult | None = None
    notes: tuple[str, ...] = ()
    applied: bool = True

    def to_dict(self) -> dict[str, Any]:
        """The report as dictionaries, lists, strings, numbers and None."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def __str__(self) -> str:
        verb = "replaced" if self.applied else "to replace"
        lines = [
            f"fusedops: {len(self.replaced)} {verb}, {len(self.left)} left alone"
            + (f", {len(self.already)} already replaced" if self.already else "")
        ]
        for title, entries in ((verb, self.replaced), ("already replaced", self.already)):
            lines += _section(title, ((x.path, f"{x.original} => {x.calls}") for x in entries))
        lines += _section("left alone", ((x.path, f"{x.original}: {x.reason}") for x in self.left))
        if self.check is not None:
            check = self.check
            lines.append(
                f"check: largest difference {check.max_abs_error:.3g} in {check.where}"
                f" ({check.tensors} tensors, values up to {check.max_abs_value:.3g})"
            )
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def _section(title: str, entries: Iterable[tuple[str, str]]) -> list[str]:
    """Entries of one text together: how many, the text, and below it their paths with layer numbers as ``*``."""
    groups: dict[str, dict[str, list[str]]] = {}
    for path, text in entries:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
        groups.setdefault(text, {}).setdefault(pattern, []).append(path or "(the model itself)")
    lines = []
    for text, patterns in groups.items():
        lines.append(f"{sum(map(len, patterns.values())):>5} x {text}")
        # A pattern that stands for one path alone is shown as that path.
        shown = ", ".join(paths[0] if len(paths) == 1 else pattern for pattern, paths in patterns.items())
        lines += textwrap.wrap(shown, 110, initial_indent=" " * 8, subsequent_indent=" " * 8, break_on_hyphens=False)
    return [f"{title}:", *lines] if lines else []
