"""What autograd keeps for the backward, by module: ``fusedops.memory_report``.

Saved tensors are seen by ``torch.autograd.graph.saved_tensors_hooks``; which module runs when one is saved is read from
the call stack. So no module is hooked: what is hooked runs unfused, and other numbers would come out.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from fusedops.patching import check as checking
from fusedops.patching.classes import is_fused, original_class, set_class
from fusedops.patching.report import grouped
from fusedops.runtime.backend import backend
from fusedops.runtime.device import TARGETS, pretend_unlaunched
from fusedops.runtime.sizes import change, human_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes that one module keeps for the backward.

    A tensor counts for the innermost module that was running when it was saved, and where several save one tensor, for
    the first.

    Attributes:
        path: the module's name in the model; "" for the model itself.
        kind: its class, before patching.
        unpatched, patched: with all modules inside it.
        own_unpatched, own_patched: without them.
    """

    path: str
    kind: str
    unpatched: int
    patched: int | None
    own_unpatched: int
    own_patched: int | None


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What a model keeps between its forward and its backward, unpatched and patched.

    ``str(report)`` is text and Rich prints a table, both with a line for each kind of module; :meth:`to_dict` is for
    JSON.

    Attributes:
        rows: a row for each module that keeps something, itself or inside it, in the model's order.
        unpatched: bytes in all.
        patched: bytes in all when the model is patched; None where that was not asked for.
        peak_unpatched, peak_patched: most bytes of GPU memory that a forward and backward took beyond what was
            allocated before; None on other devices.
        measured: on what it was measured, for people.
    """

    rows: tuple[MemoryRow, ...]
    unpatched: int
    patched: int | None
    peak_unpatched: int | None
    peak_patched: int | None
    measured: str

    @property
    def saved(self) -> int:
        """Bytes by which patching lowers what is kept; 0 where only one of the two was measured."""
        return 0 if self.patched is None else self.unpatched - self.patched

    def to_dict(self) -> dict[str, Any]:
        """The report as dictionaries, lists, strings, numbers and None."""
        return {**asdict(self), "rows": [asdict(row) for row in self.rows], "saved": self.saved}

    def __str__(self) -> str:
        lines = [self._headline()]
        width = max((len(where) for where, *_ in self._lines()), default=0)
        for where, kind, count, before, after in self._lines():
            counted = f"{count:>4} x {where:<{width}}  {kind:<24}{human_bytes(before):>12}"
            lines.append(counted + ("" if after is None else f"{human_bytes(after):>12}"))
        return "\n".join([*lines, *self._remarks()])

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table("module", "count", "class", "unpatched", show_footer=True)
        for column in (table.columns[1], table.columns[3]):
            column.justify = "right"
        table.columns[0].footer = "all"
        table.columns[3].footer = human_bytes(self.unpatched)
        if self.patched is not None:
            table.add_column("patched", footer=human_bytes(self.patched), justify="right")
        for where, kind, count, before, after in self._lines():
            sizes = [human_bytes(before)] if after is None else [human_bytes(before), human_bytes(after)]
            table.add_row(Text(where), str(count), Text(kind), *sizes)
        return Group(Text(self._headline(), style="bold"), table, *map(Text, self._remarks()))

    def _lines(self) -> Iterator[tuple[str, str, int, int, int | None]]:
        """(where, class, how many, bytes unpatched, patched) of modules of one kind that keep something themselves."""
        keeping = {row.path: row for row in self.rows if row.own_unpatched or row.own_patched}
        for where, paths, kind in grouped((path, row.kind) for path, row in keeping.items()):
            before = sum(keeping[path].own_unpatched for path in paths)
            after = None if self.patched is None else sum(keeping[path].own_patched or 0 for path in paths)
            yield where, kind, len(paths), before, after

    def _headline(self) -> str:
        text = f"fusedops: {human_bytes(self.unpatched)} kept for the backward"
        if self.patched is not None:
            text += f" unpatched, {human_bytes(self.patched)} patched{change(self.unpatched, self.patched)}"
        return f"{text} ({self.measured})"

    def _remarks(self) -> Iterator[str]:
        grown = any(after is not None and after > before for *_, before, after in self._lines())
        if self.patched is not None and grown and self.patched <= self.unpatched:
            yield (
                "note: where a line grows, its modules now keep what others kept before: a fused linear layer its"
                " activation's, attention its softmax's sums"
            )
        if self.peak_unpatched is not None:
            text = f"peak of a forward and backward: {human_bytes(self.peak_unpatched)}"
            yield text + ("" if self.peak_patched is None else f" unpatched, {human_bytes(self.peak_patched)} patched")


def memory_report(model: nn.Module, inputs: Any, *, patch: bool = True) -> MemoryReport:
    """Bytes that a model keeps for its backward, unpatched and patched, by module.

    The model runs forward on ``inputs`` in training mode with gradients, and what autograd saves and still holds at
    the end is counted: whole storages, each once, however many views of it are saved. Not counted are parameters,
    buffers and the inputs, which are there anyway, and what an operator holds outside autograd's saved tensors. A copy
    of a weight (autocast makes them) counts. Inside an activation checkpoint nothing is saved, and its inputs count.

    A model on a GPU runs there, with a backward for the peak. On a CPU the numbers are those of a GPU: fusedops'
    operators save there what their kernels need, and are computed by torch; of torch's own operators, those that keep
    other tensors on a CPU are made to keep what they do on a GPU (dropout booleans instead of numbers, attention with
    dropout no scores, norms float32 statistics and nothing more). So no GPU is needed, nor Triton.

    A model in evaluation mode is measured as ``model.train()`` sets it, one in training mode as it is. A compiled model
    runs uncompiled, a model inside DistributedDataParallel without that. Modules, gradients, training flags, buffers,
    attributes, hooks, inputs and the random state are as before afterwards.

    Args:
        model: any torch.nn.Module. One that is patched is measured so, and without its fused classes; it has them
            again afterwards.
        inputs: what to call it with: a tuple of positional arguments, a mapping of keyword arguments, ``(args,
            kwargs)`` (a tuple of a tuple and a mapping), or one tensor.
        patch: also measure what :func:`fusedops.patch` would make of a model that is not patched.

    Returns:
        The bytes in all and by module, unpatched and patched; print it.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module, or ``inputs`` is none of the above.
        ValueError: nothing in the outputs requires a gradient, so that nothing is kept: all parameters are frozen, or
            the model runs without gradients.
        PatchError: something else has put a class of its own on top of a patched module's.

    Examples:
        >>> import torch, fusedops
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.SiLU(), torch.nn.LayerNorm(64))
        >>> report = fusedops.memory_report(model, torch.randn(32, 8))
        >>> report.unpatched, report.patched
        (16640, 16640)
    """
    from fusedops.patching.patcher import patched, unpatch

    if not isinstance(model, nn.Module):
        raise TypeError(f"memory_report: model must be a torch.nn.Module; got {type(model).__name__}")
    if not isinstance(patch, bool):
        raise TypeError(f"memory_report: patch must be a bool; got {type(patch).__name__}")
    given = checking.Inputs.read(inputs, "memory_report: inputs")
    model = unwrapped(model)
    fused = [(module, type(module)) for module in model.modules() if is_fused(type(module))]
    after = None
    if fused:
        after = _measure(model, given)
        try:
            unpatch(model)
            before = _measure(model, given)
        finally:
            for module, kind in fused:
                set_class(module, kind)
    else:
        before = _measure(model, given)
        if patch:
            with patched(model):
                after = _measure(model, given)
    return _report(model, before, after, _device(model, given))


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile's and DistributedDataParallel's wrappers."""
    while True:
        inner = model._modules.get("_orig_mod")
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


@dataclass(frozen=True, slots=True)
class _Measured:
    """Bytes by module, each module's own; and the peak of GPU memory."""

    own: Mapping[str, int]
    peak: int | None


def _device(model: nn.Module, inputs: checking.Inputs) -> torch.device:
    tensors = [*model.parameters(), *(t for t in tree_leaves((inputs.args, inputs.kwargs)) if _is_tensor(t))]
    return next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _measure(model: nn.Module, inputs: checking.Inputs) -> _Measured:
    from fusedops.autotune.modes import look_up_only, mode

    device = _device(model, inputs)
    with ExitStack() as stack:
        stack.enter_context(unchanged(model))
        stack.enter_context(torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []))
        # Other launch configurations keep no other tensors: nothing is searched here.
        stack.enter_context(look_up_only())
        stack.enter_context(mode("cached"))
        if any("_orig_mod" in module._modules for module in model.modules()):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if device.type == "cpu":
            stack.enter_context(as_on_a_gpu())
        before = _reset_peak(device)
        arguments = checking.copied(inputs.args), checking.copied(inputs.kwargs)
        own, outputs = kept_for_backward(model, *arguments)
        if device.type != "cuda":
            return _Measured(own, None)
        _differentiate(model, arguments, outputs)
        return _Measured(own, torch.cuda.max_memory_allocated(device) - before)


def _reset_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _differentiate(model: nn.Module, arguments: Any, outputs: list[torch.Tensor]) -> None:
    """A backward whose gradients go nowhere."""
    sources: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
    sources += [t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
    torch.autograd.grad(outputs, sources, [torch.ones_like(t) for t in outputs], allow_unused=True)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Within it the model is in training mode; afterwards its flags, buffers and attributes are as before."""
    modules = list(model.modules())
    attributes = [dict(module.__dict__) for module in modules]
    tensors = [dict(module._buffers) for module in modules]
    values = {id(b): (b, b.detach().clone()) for held in tensors for b in held.values() if b is not None}
    try:
        if not model.training:
            model.train()
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for module, held, buffers in zip(modules, attributes, tensors, strict=True):
            module._buffers.update(buffers)
            for name in [name for name in module._buffers if name not in buffers]:
                del module._buffers[name]
            for name in [name for name in module.__dict__ if name not in held]:
                del module.__dict__[name]
            module.__dict__.update(held)
        with torch.no_grad():
            for buffer, value in values.values():
                buffer.copy_(value)


# Whether torch's RMS norm is one operator on a GPU, rather than a composition everywhere.
_ONE_KERNEL = hasattr(torch.ops.aten, "_fused_rms_norm_backward")


class _Norm(torch.autograd.Function):
    """Keeps what a norm of torch's keeps on a GPU: input, weight, and float32 statistics. Never walked back."""

    @staticmethod
    def forward(ctx: Any, compute: Any, statistics: Any, input: Any, weight: Any, bias: Any) -> torch.Tensor:
        ctx.save_for_backward(input, weight, input.new_empty(statistics, dtype=torch.float32))
        return compute(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("the model is only measured here")


def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> torch.Tensor:
    def compute(x: Any, w: Any, _: Any) -> torch.Tensor:
        return nn.functional.rms_norm(x, normalized_shape, w, eps)

    rows = input.shape[: input.dim() - len(normalized_shape)]
    return _Norm.apply(compute, (1, *rows), input, weight, None)


def _layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5, *_: Any
) -> torch.Tensor:
    def compute(x: Any, w: Any, b: Any) -> torch.Tensor:
        return nn.functional.layer_norm(x, normalized_shape, w, b, eps)

    rows = input.shape[: input.dim() - len(normalized_shape)]
    return _Norm.apply(compute, (2, *rows), input, weight, bias)


def _group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: Any = 1e-5, *_: Any
) -> torch.Tensor:
    def compute(x: Any, w: Any, b: Any) -> torch.Tensor:
        return nn.functional.group_norm(x, num_groups, w, b, eps)

    return _Norm.apply(compute, (2, input.shape[0], num_groups), input, weight, bias)


_NORMS: dict[Any, Callable[..., torch.Tensor]] = {
    nn.functional.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    nn.functional.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    **({nn.functional.rms_norm: _rms_norm, torch.rms_norm: _rms_norm} if _ONE_KERNEL else {}),
}


class _GpuOperators(TorchFunctionMode):
    """Lets torch's operators on CPU tensors keep for their backward what they keep on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        args = list(args)
        if func in (nn.functional.dropout, torch.dropout):
            input, p, training = (
                _argument(args, kwargs, i, name, default)
                for i, (name, default) in enumerate((("input", None), ("p", 0.5), ("training", True)))
            )
            training = kwargs.get("train", training)
            if training and 0 < p < 1 and not _argument(args, kwargs, 3, "inplace", False):
                return torch.native_dropout(input, p, True)[0]
        elif func in _NORMS:
            return _NORMS[func](*args, **kwargs)
        # With dropout the CPU's attention keeps the scores. A GPU's keeps what it does without, and a seed.
        elif func is nn.functional.scaled_dot_product_attention:
            _replace(args, kwargs, 4, "dropout_p", 0.0)
        elif func is nn.functional.multi_head_attention_forward and not kwargs.get("need_weights", True):
            _replace(args, kwargs, 10, "dropout_p", 0.0)
        return func(*args, **kwargs)


def _argument(args: list[Any], kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _replace(args: list[Any], kwargs: dict[str, Any], place: int, name: str, value: Any) -> None:
    if len(args) > place:
        args[place] = value
    else:
        kwargs[name] = value


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Within it CPU tensors' operators save for the backward what a GPU's do: fusedops' and torch's."""
    # Which GPU does not matter: what is saved is the same on all.
    with backend("triton"), pretend_unlaunched(TARGETS["sm_90"]), _GpuOperators():
        yield


class _Kept:
    """What autograd holds in place of a saved tensor; it goes when autograd lets the tensor go."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


_CALL = nn.Module._call_impl.__code__


def kept_for_backward(model: nn.Module, args: Any, kwargs: Any) -> tuple[dict[str, int], list[torch.Tensor]]:
    """Run the model forward: bytes that autograd holds afterwards, by the path of the innermost module that ran.

    Also the outputs that require gradients, whose graph holds these bytes.

    Raises:
        ValueError: there are none.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    saved: list[tuple[weakref.ref[_Kept], str]] = []

    def pack(tensor: torch.Tensor) -> _Kept:
        # Detached: an output that held itself through its own graph would never go.
        kept = _Kept(tensor.detach())
        saved.append((weakref.ref(kept), _running(paths)))
        return kept

    def unpack(kept: _Kept) -> torch.Tensor:
        return kept.tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = model(*args, **kwargs)
    outputs = [t for t in tree_leaves(_plain(output)) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not outputs:
        raise ValueError(
            "memory_report: nothing that the model returns requires a gradient, so nothing is kept for a backward"
            " (all parameters are frozen, or it runs without gradients); let a parameter or an input require one"
        )
    counted: set[int] = set()
    for tensor in (*model.parameters(), *model.buffers(), *tree_leaves((args, kwargs))):
        counted.update(key for key, _ in _storages(tensor))
    own: dict[str, int] = {}
    for reference, path in saved:
        kept = reference()
        for key, size in () if kept is None else _storages(kept.tensor):
            if key not in counted:
                counted.add(key)
                own[path] = own.get(path, 0) + size
    return own, outputs


def _running(paths: Mapping[int, str]) -> str:
    """Path of the innermost module whose call is going on in this thread; the model's where none is known."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code is _CALL:
            path = paths.get(id(frame.f_locals["self"]))
            if path is not None:
                return path
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _plain(output: Any) -> list[Any]:
    return [leaf for _, leaf in checking.leaves("output", output)]


def _storages(value: Any) -> Iterator[tuple[int, int]]:
    """(identity, bytes) of what holds a tensor's elements; of a wrapper (DTensor, a quantised tensor) its parts'."""
    if not isinstance(value, torch.Tensor):
        return
    if is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        for name in names:
            yield from _storages(getattr(value, name))
    elif value.layout is torch.strided:
        storage = value.untyped_storage()
        yield storage._cdata, storage.nbytes()
    elif value.layout is torch.sparse_coo:
        yield from _storages(value._indices())
        yield from _storages(value._values())
    else:
        yield id(value), value.element_size() * value.numel()


def _report(model: nn.Module, before: _Measured, after: _Measured | None, device: torch.device) -> MemoryReport:
    def inside(own: Mapping[str, int], path: str) -> int:
        prefix = f"{path}." if path else ""
        return sum(size for name, size in own.items() if name == path or name.startswith(prefix))

    rows = []
    for path, module in model.named_modules():
        unpatched, patched = inside(before.own, path), None if after is None else inside(after.own, path)
        if unpatched or patched:
            kind = original_class(type(module)).__name__
            own_patched = None if after is None else after.own.get(path, 0)
            rows.append(MemoryRow(path, kind, unpatched, patched, before.own.get(path, 0), own_patched))
    if device.type == "cpu":
        where = "measured on the CPU, as a GPU keeps it"
    else:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        where = f"measured on {name}"
    return MemoryReport(
        tuple(rows),
        sum(before.own.values()),
        None if after is None else sum(after.own.values()),
        before.peak,
        None if after is None else after.peak,
        where,
    )
