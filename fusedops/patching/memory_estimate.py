"""How much a training step of a given size keeps less when a model is patched: traced on shapes, without data."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from fusedops.patching import check as checking
from fusedops.patching.classes import fuse, is_fused, original_class, set_class
from fusedops.patching.memory import as_on_a_gpu, kept_for_backward, unwrapped
from fusedops.patching.report import PatchReport, grouped
from fusedops.runtime.sizes import change, human_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType


DTYPES = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16,
    "half": torch.float16, "fp32": torch.float32, "float32": torch.float32,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Saving:
    """Bytes that replacements of one kind save, when they alone are made.

    Attributes:
        where: their paths, layer numbers as ``*``.
        count: how many.
        original: the class that was there.
        calls: the fusedops function that is called instead.
        bytes: how much less is kept; negative: more.
    """

    where: str
    count: int
    original: str
    calls: str
    bytes: int


@dataclass(frozen=True, slots=True)
class ActivationMemory:
    """What a training step keeps for its backward, without parameters and inputs.

    Attributes:
        batch, sequence, dtype: the size that was asked for.
        savings: by kind of replacement, each made alone. They need not add up: two may save the same tensor.
        unpatched, patched: bytes in all; None where there is no estimate.
        reason: why there is none, "" where there is one.
    """

    batch: int
    sequence: int
    dtype: str
    savings: tuple[Saving, ...]
    unpatched: int | None
    patched: int | None
    reason: str = ""

    @property
    def saved(self) -> int | None:
        """Bytes by which patching lowers what is kept."""
        return None if self.unpatched is None or self.patched is None else self.unpatched - self.patched

    def to_dict(self) -> dict[str, Any]:
        """The estimate as dictionaries, lists, strings, numbers and None."""
        return {**asdict(self), "savings": [asdict(saving) for saving in self.savings], "saved": self.saved}

    def __str__(self) -> str:
        lines = [self._headline()]
        lines += [
            f"{human_bytes(x.bytes):>12}  {x.count} x {x.original} => {x.calls} ({x.where})" for x in self.savings
        ]
        return "\n".join(lines)

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        head = Text(self._headline(), style="bold")
        if not self.savings:
            return head
        table = Table("where", "count", "original", "calls", "saved alone")
        for column in (table.columns[1], table.columns[4]):
            column.justify = "right"
        for saving in self.savings:
            texts = (saving.where, str(saving.count), saving.original, saving.calls, human_bytes(saving.bytes))
            table.add_row(*map(Text, texts))
        return Group(head, table)

    def _headline(self) -> str:
        size = f"{self.batch} x {self.sequence}, {self.dtype}"
        if self.unpatched is None or self.patched is None:
            return f"activation memory ({size}): no estimate: {self.reason}"
        return (
            f"activation memory ({size}): {human_bytes(self.unpatched)} unpatched,"
            f" {human_bytes(self.patched)} patched{change(self.unpatched, self.patched)}"
        )


def estimate(report: PatchReport, batch: int, sequence: int, dtype: torch.dtype | str, inputs: Any) -> ActivationMemory:
    """For :meth:`PatchReport.activation_memory`; see there."""
    for name, value in (("batch", batch), ("sequence", sequence)):
        if type(value) is not int:
            raise TypeError(f"activation_memory: {name} must be an int; got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"activation_memory: {name} must be positive; got {value}")
    if isinstance(dtype, str):
        if dtype.lower() not in DTYPES:
            raise ValueError(f"activation_memory: dtype must be a torch.dtype or one of {_NAMES}; got {dtype!r}")
        dtype = DTYPES[dtype.lower()]
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(
            f"activation_memory: dtype must be a floating-point torch.dtype, or one of {_NAMES}; got {dtype!r}"
        )
    given = None if inputs is None else checking.Inputs.read(inputs, "activation_memory: inputs")
    subject = report.subject
    model = None if subject is None else subject.model
    if subject is None or model is None:
        raise ValueError("activation_memory: the model that this report is about does not exist any more")
    asked = (batch, sequence, str(dtype).removeprefix("torch."))
    try:
        traced = _Traced(model, batch, sequence, dtype, given)
        unpatched = traced.bytes_with(())
        kinds: dict[tuple[str, str], list[tuple[str, Any]]] = {}
        for entry, swaps in subject.changes:
            kinds.setdefault((entry.original, entry.calls), []).append((entry.path, swaps))
        savings = []
        for (original, calls), places in kinds.items():
            alone = [swap for _, part in places for swap in part]
            where = ", ".join(shown for shown, _, _ in grouped((path, "") for path, _ in places))
            saved = unpatched - traced.bytes_with(alone)
            savings.append(Saving(where, len(places), original, calls, saved))
        everything = [swap for _, part in subject.changes for swap in part]
        patched = traced.bytes_with(everything)
    except NotKnownError as error:
        return ActivationMemory(*asked, (), None, None, str(error))
    except Exception as error:  # whatever a model does that has no shapes without data
        reason = f"the model cannot be traced without data: {type(error).__name__}: {_first_line(error)}"
        return ActivationMemory(*asked, (), None, None, reason)
    return ActivationMemory(*asked, tuple(savings), unpatched, patched)


_NAMES = ", ".join(DTYPES)


class NotKnownError(Exception):
    """The message says what of a model is not known."""


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


class _Traced:
    """A copy of a model, unpatched, with tensors that have no data, and what it is called with."""

    def __init__(
        self, model: nn.Module, batch: int, sequence: int, dtype: torch.dtype, given: checking.Inputs | None
    ) -> None:
        outer = dict(model.named_modules())
        inner = unwrapped(model)
        known = {id(module): path for path, module in inner.named_modules()}
        self._paths = {path: known.get(id(module)) for path, module in outer.items()}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._model = self._copy(inner, dtype).train()
        inputs = usual_inputs(inner, batch, sequence, dtype) if given is None else given
        self._inputs = tree_map(lambda value: self._faked(value, dtype), (inputs.args, dict(inputs.kwargs)))

    def _copy(self, model: nn.Module, dtype: torch.dtype) -> nn.Module:
        held = [value for module in model.modules() for value in module.__dict__.values()]
        memo = {id(t): self._faked(t, dtype) for t in (*model.parameters(), *model.buffers(), *held) if _is_tensor(t)}
        twin = copy.deepcopy(model, memo)
        for module in twin.modules():
            if is_fused(type(module)):
                set_class(module, original_class(type(module)))
        return twin

    def _faked(self, value: Any, dtype: torch.dtype) -> Any:
        if not _is_tensor(value):
            return value
        parameter = isinstance(value, nn.Parameter)
        if type(value) not in (torch.Tensor, nn.Parameter) or value.layout is not torch.strided:
            raise NotKnownError(f"the model holds a {type(value).__name__} of {value.layout} layout")
        kind = dtype if value.is_floating_point() else value.dtype
        with self._mode:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=kind, device="cpu")
            if parameter:
                return nn.Parameter(fake, requires_grad=value.requires_grad)
            return fake.requires_grad_(value.requires_grad and value.is_leaf)

    def bytes_with(self, swaps: Any) -> int:
        """Bytes kept when the modules at these paths have their fused classes, and no others."""
        with self._fused(swaps), _quiet(), self._mode, as_on_a_gpu(), torch.enable_grad(), torch.random.fork_rng([]):
            own, _ = kept_for_backward(self._model, *self._inputs)
        return sum(own.values())

    @contextmanager
    def _fused(self, swaps: Any) -> Iterator[None]:
        changed = []
        try:
            for path, maker in swaps:
                inside = self._paths.get(path)
                module = None if inside is None else self._model.get_submodule(inside)
                if module is not None and fuse(module, maker):
                    changed.append(module)
            yield
        finally:
            for module in changed:
                set_class(module, original_class(type(module)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Fake tensors log an error before they raise it, and it is told as the estimate's reason."""
    log = logging.getLogger("torch._subclasses.fake_tensor")

    def none(record: logging.LogRecord) -> bool:
        return False

    log.addFilter(none)
    try:
        yield
    finally:
        log.removeFilter(none)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def usual_inputs(model: nn.Module, batch: int, sequence: int, dtype: torch.dtype) -> checking.Inputs:
    """What the model is called with for this batch and sequence; its values do not matter.

    Raises:
        NotKnownError: that cannot be told.
    """
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", None)
    if config is not None and isinstance(main, str):
        return checking.Inputs((), _of_transformers(config, main, batch, sequence, dtype))
    for module in model.modules():
        if next(module.children(), None) is not None:
            continue
        if isinstance(module, nn.Embedding):
            return checking.Inputs((torch.zeros(batch, sequence, dtype=torch.long),), {})
        shape = getattr(module, "normalized_shape", None)
        if isinstance(module, nn.Linear):
            shape = (module.in_features,)
        if shape is None:
            break
        # torch.nn's transformers have the sequence first unless told otherwise.
        first = next((m.batch_first for m in model.modules() if isinstance(m, nn.MultiheadAttention)), True)
        lead = (batch, sequence) if first else (sequence, batch)
        return checking.Inputs((torch.zeros(*lead, *shape, dtype=dtype),), {})
    raise NotKnownError("what the model is called with cannot be told from it: give inputs=")


def _of_transformers(config: Any, main: str, batch: int, sequence: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A Hugging Face model's main input; an image's or recording's size is that of the config."""
    ids = torch.zeros(batch, sequence, dtype=torch.long)
    vision = getattr(config, "vision_config", None) or config
    size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", 3)
    bands, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    inputs = {}
    if main == "input_ids":
        inputs[main] = ids
    elif main == "pixel_values" and size is not None:
        sides = tuple(size) if isinstance(size, tuple | list) else (size, size)
        inputs[main] = torch.zeros(batch, channels, *sides, dtype=dtype)
    elif main == "input_features" and bands and frames:
        inputs[main] = torch.zeros(batch, bands, 2 * frames, dtype=dtype)
    else:
        raise NotKnownError(f"what the model's {main} looks like is not known: give inputs=")
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    return inputs
