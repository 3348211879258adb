"""What patching did or would do: the report, its text, its table and its dictionary."""

from __future__ import annotations

import re
import textwrap
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fusedops.patching.memory_estimate import ActivationMemory

# A difference beyond this many times the noise floor is said to be more than rounding explains. The floor is the
# largest of a few draws and the fused operators round in other places and an unlike number of times: a few times the
# floor is nothing, an order of magnitude is something else.
SUSPICIOUS = 10.0

# ``model = fusedops.patch(model)`` is an easy mistake.
_IN_PLACE = "fusedops.patch changes the model in place and returns a report; go on with the model itself"


class PatchError(ValueError):
    """A model could not be patched or put back as asked. The model is as it was before the call."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """One place of a model that calls a fused operator.

    Attributes:
        path: the module's name in the model, as ``model.named_modules()`` gives it ("" for the model itself).
        original: the class that was there; for a pair, "Linear -> GELU".
        rule: which rule recognised it: "norm", "linear+activation", "attention", "function", or one of your own.
        calls: the fusedops function that it calls.
    """

    path: str
    original: str
    rule: str
    calls: str


@dataclass(frozen=True, slots=True)
class Left:
    """One place that was recognised and left alone.

    Attributes:
        path, original: as of :class:`Replacement`.
        reason: every reason.
    """

    path: str
    original: str
    reason: str


Changes = tuple[tuple[Replacement, tuple[tuple[str, str], ...]], ...]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The outputs of a model before and after patching, compared.

    Attributes:
        max_abs_error: largest absolute difference between the two, over all floating-point outputs.
        max_abs_value: largest finite magnitude among these outputs before patching.
        where: which output has the largest difference, such as ``output.logits``.
        tensors: how many tensors were compared.
        noise_floor: how far the values of ``where`` moved when the model ran as it was, but with every result of its
            innermost modules multiplied by 1 + δ, δ random within half a unit in the last place of the result's own
            dtype: the largest of three such runs, and no less than half a unit in the last place of the output's
            largest value. None where this could not be measured (a model without floating-point outputs, or whose
            modules take no hooks).
        conclusive: False where every output, before patching and after, is empty, zero or not a finite number (a head
            that begins at zero, inputs that lead to NaN): wrong results would look the same.
    """

    max_abs_error: float
    max_abs_value: float
    where: str
    tensors: int
    noise_floor: float | None = None
    conclusive: bool = True

    @property
    def explained(self) -> bool:
        """Whether the difference is at most ten times the noise floor: what other ways of rounding lead to.

        True where there is no noise floor; False where nothing was compared (:attr:`conclusive`).
        """
        return self.complaint is None

    @property
    def complaint(self) -> str | None:
        """What is wrong, in a sentence; None where the difference is explained."""
        if not self.conclusive:
            return (
                f"nothing was compared: every output ({self.tensors} tensors) is zero or not a finite number, unpatched"
                " and patched alike; check on inputs, and with weights, whose outputs tell"
            )
        if self.noise_floor is None or self.max_abs_error <= SUSPICIOUS * self.noise_floor:
            return None
        times = "above" if not self.noise_floor else f"{self.max_abs_error / self.noise_floor:.3g} times"
        return (
            f"the outputs differ by {self.max_abs_error:.3g} in {self.where}, {times} the noise floor of"
            f" {self.noise_floor:.3g}: more than rounding explains"
        )

    def __str__(self) -> str:
        floor = "not measured" if self.noise_floor is None else f"{self.noise_floor:.3g}"
        return (
            f"largest difference {self.max_abs_error:.3g} in {self.where} (noise floor {floor};"
            f" {self.tensors} tensors, values up to {self.max_abs_value:.3g})"
        )


class Subject:
    """The model that a report is about, which it does not keep alive, and the modules that each entry changes.

    Args:
        model: the model.
        changes: for each entry of the report, the path of every module that gets another class, with the name of what
            makes that class.
    """

    __slots__ = ("_model", "changes")

    def __init__(self, model: nn.Module | None, changes: Changes) -> None:
        self._model = None if model is None else weakref.ref(model)
        self.changes = changes

    @property
    def model(self) -> nn.Module | None:
        """None where the model is gone, or is in another process."""
        return None if self._model is None else self._model()

    def __reduce__(self) -> Any:
        return Subject, (None, self.changes)


@dataclass(frozen=True, slots=True)
class PatchReport:
    """What was replaced in a model, what was recognised and left alone and why.

    ``str(report)`` is text in which the layers of a deep model share a line; Rich prints a table of the same
    (``rich.print(report)``); :meth:`to_dict` is for JSON; :meth:`activation_memory` estimates what is saved in memory.

    Attributes:
        replaced: what this call replaced (for :func:`fusedops.plan`: what it would replace).
        left: what was recognised and left alone.
        already: what an earlier call had replaced.
        check: the comparison that ``check=`` asked for.
        notes: remarks on the model as a whole.
        applied: False for a plan.
        subject: the model that this is about, which is not kept alive.
    """

    replaced: tuple[Replacement, ...] = ()
    left: tuple[Left, ...] = ()
    already: tuple[Replacement, ...] = ()
    check: CheckResult | None = None
    notes: tuple[str, ...] = ()
    applied: bool = True
    subject: Subject | None = field(default=None, compare=False, repr=False)

    if not TYPE_CHECKING:  # type checkers find these mistakes themselves

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise TypeError(f"a PatchReport cannot be called: {_IN_PLACE}")

        def __getattr__(self, name: str) -> Any:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_"):  # others are looked up by protocols: copy, pickle, notebooks
                message += f": {_IN_PLACE}"
            raise AttributeError(message, name=name, obj=self)

    def to_dict(self) -> dict[str, Any]:
        """The report as dictionaries, lists, strings, numbers and None."""
        return {
            "replaced": [asdict(entry) for entry in self.replaced],
            "left": [asdict(entry) for entry in self.left],
            "already": [asdict(entry) for entry in self.already],
            "check": None if self.check is None else {**asdict(self.check), "explained": self.check.explained},
            "notes": list(self.notes),
            "applied": self.applied,
        }

    def activation_memory(
        self, batch: int, sequence: int, dtype: torch.dtype | str = torch.bfloat16, *, inputs: Any = None
    ) -> ActivationMemory:
        """Estimate how much less a training step keeps for its backward when the model is patched.

        A copy of the model with tensors that have shapes and no data (torch's fake tensors) runs forward, in training
        mode, and the bytes that autograd saves are counted as :func:`fusedops.memory_report` does: without any
        replacement, with those of one kind alone, with all. Nothing is computed, no GPU is needed, and the model is
        not touched. Parameters, buffers and inputs do not count.

        Args:
            batch: sequences a batch.
            sequence: tokens a sequence.
            dtype: of parameters and activations; also by name: "bf16", "fp16", "fp32".
            inputs: what the model is called with, where that cannot be told from the model: tensors of any values on
                any device, in one of the forms that :func:`fusedops.memory_report` takes. Their shapes then decide, and
                ``batch`` and ``sequence`` are only reported. Known without: Hugging Face models that take token ids or
                images or audio alone, and models that begin with a Linear, an Embedding or a norm over the last
                dimension.

        Returns:
            The estimate by kind of replacement and in all; print it. ``reason`` says why where there is none.

        Raises:
            TypeError: an argument is of the wrong type.
            ValueError: ``batch`` or ``sequence`` is not positive, no dtype has the name, or the report's model does not
                exist any more.

        Examples:
            >>> import torch, fusedops
            >>> model = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
            >>> report = fusedops.plan(model)
            >>> memory = report.activation_memory(batch=8, sequence=512)
            >>> 0 < memory.patched < memory.unpatched
            True
        """
        from fusedops.patching.memory_estimate import estimate

        return estimate(self, batch, sequence, dtype, inputs)

    def __str__(self) -> str:
        lines = [self._headline()]
        for title, entries in ((self._verb(), self.replaced), ("already replaced", self.already)):
            lines += _section(title, ((x.path, f"{x.original} => {x.calls}") for x in entries))
        lines += _section("left alone", ((x.path, f"{x.original}: {x.reason}") for x in self.left))
        if self.check is not None:
            lines.append(f"check: {self.check}")
        lines += [f"note: {note}" for note in self._remarks()]
        return "\n".join(lines)

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        parts: list[RenderableType] = [Text(self._headline(), style="bold")]
        for title, entries, last in (
            (self._verb(), [(x.path, (x.original, x.calls)) for x in self.replaced], "calls"),
            ("already replaced", [(x.path, (x.original, x.calls)) for x in self.already], "calls"),
            ("left alone", [(x.path, (x.original, x.reason)) for x in self.left], "why"),
        ):
            if entries:
                table = Table(title=title, title_justify="left")
                table.add_column("where", overflow="fold")
                table.add_column("count", justify="right")
                table.add_column("original", overflow="fold")
                table.add_column(last, overflow="fold")
                for where, paths, texts in grouped(entries):
                    table.add_row(Text(where), str(len(paths)), *map(Text, texts))
                parts.append(table)
        if self.check is not None:
            parts.append(Text(f"check: {self.check}", style="" if self.check.explained else "yellow"))
        parts += [Text(f"note: {note}") for note in self._remarks()]
        return Group(*parts)

    def _verb(self) -> str:
        return "replaced" if self.applied else "to replace"

    def _headline(self) -> str:
        already = f", {len(self.already)} already replaced" if self.already else ""
        return f"fusedops: {len(self.replaced)} {self._verb()}, {len(self.left)} left alone{already}"

    def _remarks(self) -> Iterator[str]:
        yield from self.notes
        complaint = None if self.check is None else self.check.complaint
        if complaint is not None:
            yield complaint


def path_pattern(path: str) -> str:
    """A module's path with layer numbers as ``*``.

    Examples:
        >>> path_pattern("encoder.layer.11.output")
        'encoder.layer.*.output'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def grouped(entries: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, list[str], Any]]:
    """Entries (path, text) of one path pattern and one text: (where to show, their paths, the text)."""
    groups: dict[tuple[str, Any], list[str]] = {}
    for path, text in entries:
        groups.setdefault((path_pattern(path), text), []).append(path)
    for (pattern, text), paths in groups.items():
        yield _place(pattern, paths), paths, text


def _place(pattern: str, paths: list[str]) -> str:
    """Where modules of one pattern are: the pattern, or their own paths where it would tell too little.

    That is for one alone, for two known by numbers (of an ``nn.Sequential``), and where there is nothing but numbers.
    """
    if len(paths) == 1:
        return paths[0] or "(the model itself)"
    numbers = set(pattern) <= {"*", "."}
    if not numbers and not (len(paths) == 2 and pattern.endswith("*")):
        return pattern
    shown = paths if len(paths) <= 6 else [*paths[:3], "...", paths[-1]]
    return ", ".join(shown)


def _section(title: str, entries: Iterable[tuple[str, str]]) -> list[str]:
    """Entries of one text together: how many, the text, and below it their paths with layer numbers as ``*``."""
    groups: dict[str, list[tuple[str, int]]] = {}
    for where, paths, text in grouped(entries):
        groups.setdefault(text, []).append((where, len(paths)))
    lines = []
    for text, places in groups.items():
        lines.append(f"{sum(count for _, count in places):>5} x {text}")
        shown = ", ".join(where for where, _ in places)
        lines += textwrap.wrap(shown, 110, initial_indent=" " * 8, subsequent_indent=" " * 8, break_on_hyphens=False)
    return [f"{title}:", *lines] if lines else []
