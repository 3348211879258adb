"""``patch``, ``unpatch``, ``patched`` and ``plan``: the rules applied to a model."""

from __future__ import annotations

import contextlib
import difflib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from fusedops.patching import check as checking
from fusedops.patching.classes import fuse, fused_rule, is_fused, original_class, set_class
from fusedops.patching.findings import Finding
from fusedops.patching.report import Left, PatchError, PatchReport, Replacement, Subject
from fusedops.patching.rules import RULES, WHOLE, Rule, registered_rules
from fusedops.runtime.backend import backend_mode, device_reasons

# Patterns of module names: one, several, or None for no restriction.
Patterns = str | Iterable[str] | None

# The reason of what include and exclude rule out.
RULED_OUT = "ruled out by include and exclude"


@dataclass(frozen=True, slots=True)
class _Plan:
    report: PatchReport
    swaps: tuple[tuple[nn.Module, str], ...]


def plan(model: nn.Module, *, include: Patterns = None, exclude: Patterns = None) -> PatchReport:
    """What :func:`patch` would do to a model, which stays as it is.

    Args:
        model: any torch.nn.Module.
        include, exclude: as for :func:`patch`.

    Returns:
        The report that :func:`patch` would return; print it.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module, or a pattern is not a string.
        ValueError: a pattern fits no module of the model.

    Examples:
        >>> import torch, fusedops
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
        >>> [entry.calls for entry in fusedops.plan(model).replaced]
        ['fusedops.linear(activation="gelu")', 'fusedops.layer_norm']
    """
    return replace(_examine("plan", model, include, exclude).report, applied=False)


def patch(
    model: nn.Module,
    *,
    strict: bool = False,
    check: Any = None,
    include: Patterns = None,
    exclude: Patterns = None,
) -> PatchReport:
    """Let the parts of a model that fusedops can prove equivalent call its fused operators, in training and inference.

    Replaced are norms (torch's and what computes the same, which is tried out on random numbers), linear layers with
    the activation after them, gated pairs of linear layers, attention that goes through transformers' registry or is
    one of torch's modules, and calls of torch's attention and norm functions in a module's own methods:
    docs/models.md lists models and what is fused in them. The modules remain the objects that they are: only their
    classes change, each to a subclass of its own. Parameters, hooks, optimisers, ``state_dict``, ``save_pretrained``,
    pickling and copying work as before, and so do hooks, LoRA or parametrizations that are added to a patched model
    (the part they touch then runs unfused). A module that two models share is patched in both.

    Patching a patched model replaces only what it finds new. The model is changed completely or not at all.

    Args:
        model: any torch.nn.Module; a model inside torch.compile's wrapper or DistributedDataParallel is found.
        strict: raise when nothing can be replaced, or when something that was recognised is left alone (what
            ``include`` and ``exclude`` rule out does not count).
        check: inputs to run the model on before and after, without gradients and in evaluation mode, to report the
            largest difference, and beside it the noise floor: how far the outputs move when every step of the model
            rounds a little differently, measured in four more runs (see :class:`CheckResult`). A tuple of positional
            arguments, a mapping of keyword arguments, ``(args, kwargs)`` (a tuple of a tuple and a mapping), or one
            tensor.
        include: replace only what lies at or below modules whose names fit the pattern (or one of several): names as
            ``model.named_modules()`` gives them, ``*``, ``?`` and ``[...]`` as in file names (``*`` also stands for
            dots). None: everywhere.
        exclude: replace nothing at or below modules whose names fit. It is stronger than ``include``.

    Returns:
        A report of what was replaced and of what was left alone and why; print it.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module, ``check`` is none of the above, or a pattern is not a string.
        ValueError: a pattern fits no module of the model.
        PatchError: ``strict`` is not met, or the check found other shapes, dtypes or NaNs. The model is as before.

    Examples:
        >>> import torch, fusedops
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
        >>> report = fusedops.patch(model, check=(torch.randn(2, 8),))
        >>> len(report.replaced), report.check.max_abs_error < 1e-5, report.check.explained
        (2, True, True)
    """
    return _patch(model, strict, check, include, exclude)[0]


def unpatch(model: nn.Module) -> int:
    """Give every module of a patched model its own class back.

    Args:
        model: any torch.nn.Module; one that is not patched stays as it is.

    Returns:
        How many modules were changed back.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module.
        PatchError: something else (a parametrization, FSDP) has since put a class of its own on top of a patched
            module's. Remove that first. The model is as before.

    Examples:
        >>> import torch, fusedops
        >>> norm = torch.nn.LayerNorm(8)
        >>> report = fusedops.patch(norm)
        >>> type(norm).__name__, fusedops.unpatch(norm), type(norm).__name__
        ('FusedLayerNorm', 1, 'LayerNorm')
    """
    _check_model("unpatch", model)
    fused = []
    for path, module in model.named_modules():
        kind = type(module)
        if is_fused(kind):
            fused.append(module)
        elif _covers_fused(kind):
            raise PatchError(
                f"unpatch: {path or 'the model'} was given the class {kind.__name__} after it was patched;"
                " remove what did that first"
            )
    _restore(fused)
    return len(fused)


@contextlib.contextmanager
def patched(
    model: nn.Module,
    *,
    strict: bool = False,
    check: Any = None,
    include: Patterns = None,
    exclude: Patterns = None,
) -> Iterator[PatchReport]:
    """Context manager: :func:`patch` the model, and at the end put back what this patched.

    What was patched before stays patched, so that such contexts may lie inside each other.

    Args:
        model, strict, check, include, exclude: as for :func:`patch`.

    Yields:
        PatchReport: as :func:`patch` returns it.

    Raises:
        PatchError: as :func:`patch` and, at the end, as :func:`unpatch`: a module was given another class meanwhile.
            The others are put back.

    Examples:
        >>> import torch, fusedops
        >>> norm = torch.nn.LayerNorm(8)
        >>> with fusedops.patched(norm) as report:
        ...     print(type(norm).__name__)
        FusedLayerNorm
        >>> type(norm).__name__
        'LayerNorm'
    """
    report, modules = _patch(model, strict, check, include, exclude)
    try:
        yield report
    finally:
        _restore(modules)
        covered = [type(module).__name__ for module in modules if _covers_fused(type(module))]
    if covered:
        raise PatchError(f"patched: given another class inside, and not put back: {', '.join(covered)}")


def _patch(
    model: nn.Module, strict: bool, check: Any, include: Patterns, exclude: Patterns
) -> tuple[PatchReport, list[nn.Module]]:
    """The report, and the modules whose class was changed."""
    if not isinstance(strict, bool):
        raise TypeError(f"patch: strict must be a bool; got {type(strict).__name__}")
    found = _examine("patch", model, include, exclude)
    inputs = None if check is None else checking.Inputs.read(check)
    report = found.report
    if strict:
        _check_strict(report)
    before = None if inputs is None else checking.observe(model, inputs)
    changed: list[nn.Module] = []
    try:
        for module, rule in found.swaps:
            if fuse(module, rule):
                changed.append(module)
        if inputs is not None and before is not None:
            compared = checking.compare(before, checking.run(model, inputs))
            report = replace(report, check=compared)
            complaint = compared.complaint
            if complaint is not None and strict:
                raise PatchError(f"patch(strict=True): {complaint}")
            if complaint is not None:
                warnings.warn(f"fusedops.patch: {complaint}", stacklevel=4)
    except BaseException:
        _restore(changed)
        raise
    return report, changed


def _covers_fused(kind: type) -> bool:
    """Whether this class was made on top of a fused one."""
    return not is_fused(kind) and any(is_fused(base) for base in kind.__mro__)


def _restore(modules: list[nn.Module]) -> None:
    for module in modules:
        set_class(module, original_class(type(module)))


def _check_strict(report: PatchReport) -> None:
    left = [entry for entry in report.left if entry.reason != RULED_OUT]
    if left:
        shown = "; ".join(f"{entry.path or 'the model'} ({entry.reason})" for entry in left[:5])
        more = f"; and {len(left) - 5} more" if len(left) > 5 else ""
        raise PatchError(f"patch(strict=True): {len(left)} modules would be left alone: {shown}{more}")
    if not report.replaced and not report.already:
        raise PatchError("patch(strict=True): nothing in this model can be replaced")


def _check_model(function: str, model: Any) -> None:
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise TypeError(
            f"{function}: model must be a torch.nn.Module; got the class {model.__name__}: make an instance"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model must be a torch.nn.Module; got {type(model).__name__}")


class _Filter:
    """Which paths ``include`` and ``exclude`` let pass."""

    def __init__(self, function: str, model: nn.Module, include: Patterns, exclude: Patterns) -> None:
        paths = [path for path, _ in model.named_modules()]
        self.include = _patterns(function, "include", include, paths)
        self.exclude = _patterns(function, "exclude", exclude, paths) or []

    def __call__(self, path: str) -> bool:
        # The module itself and all that it lies in: a pattern speaks of what is below it too.
        parts = path.split(".")
        places = ["", *(".".join(parts[: n + 1]) for n in range(len(parts)))]
        included = self.include is None or any(fits(pattern, places) for pattern in self.include)
        return included and not any(fits(pattern, places) for pattern in self.exclude)


def fits(pattern: str, paths: Iterable[str]) -> bool:
    """Whether a pattern fits one of the paths."""
    return any(fnmatchcase(path, pattern) for path in paths)


def _patterns(function: str, argument: str, given: Patterns, paths: list[str]) -> list[str] | None:
    if given is None:
        return None
    patterns = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    if not patterns or "" in patterns:
        raise ValueError(f"{function}: {argument}={given!r} holds no pattern; None is for no restriction")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"{function}: {argument} must be a pattern of module names or several; got {type(pattern).__name__}"
            )
        if not fits(pattern, paths):
            near = [path for path in paths if path.endswith(pattern)] or difflib.get_close_matches(pattern, paths)
            hint = f"; there are {', '.join(map(repr, near[:3]))}" if near else ""
            if fits(f"*.{pattern}", paths):
                hint = f"; did you mean '*.{pattern}'?"
            raise ValueError(f"{function}: {argument}={pattern!r} fits the name of no module of the model{hint}")
    return patterns


def _holder(swaps: dict[int, tuple[nn.Module, str]], module: nn.Module) -> str | None:
    """The rule that has a module's class, or will have it."""
    return swaps[id(module)][1] if id(module) in swaps else fused_rule(type(module))


def _examine(function: str, model: nn.Module, include: Patterns = None, exclude: Patterns = None) -> _Plan:
    """Ask every rule about every module."""
    _check_model(function, model)
    passes = _Filter(function, model, include, exclude)
    replaced: list[Replacement] = []
    already: list[Replacement] = []
    left: list[Left] = []
    swaps: dict[int, tuple[nn.Module, str]] = {}
    names = {id(module): path for path, module in model.named_modules()}
    changes = []
    # Rules of users before fusedops' own, whatever module is asked about first.
    for group in (registered_rules(), RULES):
        for path, module, rule, finding in _findings(model, group):
            where = _joined(path, finding.path)
            entry = Replacement(where, finding.original, rule.name, finding.calls)
            holder = _holder(swaps, module)
            taken = any(_holder(swaps, m) not in (None, kind) for m, kind in finding.swaps)
            if taken and (not finding.path or holder in WHOLE):
                continue  # the module has its rule
            # Of a pair all parts have to pass. A function in a method that is rewritten anyway is replaced with it.
            passed = all(passes(_joined(path, part)) for part in (finding.path, *finding.involves))
            passed = passed or (not finding.path and holder == "owner")
            reasons = finding.obstacles()
            if finding.done:
                already.append(entry)
            elif reasons or taken:
                reasons += ["another rule replaces this module"] if taken else []
                left.append(Left(where, finding.original, "; ".join(reasons)))
                continue
            elif not passed:
                left.append(Left(where, finding.original, RULED_OUT))
                continue
            else:
                replaced.append(entry)
                swaps.update({id(m): (m, kind) for m, kind in finding.swaps})
            changes.append((entry, tuple((names[id(m)], kind) for m, kind in finding.swaps)))
    notes = _notes(model, replaced)
    if already and (include is not None or exclude is not None) and not all(passes(entry.path) for entry in already):
        notes.append("what was replaced before stays so, also where include or exclude rule it out: unpatch it first")
    # A module that one rule could not replace and another did is not left alone; nor is one left twice for one reason.
    fused = {entry.path for entry in (*replaced, *already)}
    left = [*{(entry.path, entry.reason): entry for entry in reversed(left) if entry.path not in fused}.values()][::-1]
    subject = Subject(model, tuple(changes))
    report = PatchReport(tuple(replaced), tuple(left), tuple(already), None, tuple(notes), subject=subject)
    return _Plan(report, tuple(swaps.values()))


def _joined(path: str, inner: str) -> str:
    return ".".join(filter(None, (path, inner)))


def _findings(model: nn.Module, rules: Iterable[Rule]) -> Iterator[tuple[str, nn.Module, Rule, Finding]]:
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # compiled already; its parts have no classes to swap
        for rule in rules:
            for finding in rule.find(module):
                yield path, module, rule, finding


def _notes(model: nn.Module, replaced: Iterable[Replacement]) -> list[str]:
    """Remarks on the model as a whole."""
    notes = []
    for path, module in model.named_modules():
        where = path or "the model"
        if "_orig_mod" in module._modules:
            notes.append(f"{where} is compiled: the module inside is patched, its next call compiles again")
        elif getattr(module, "_compiled_call_impl", None) is not None:
            notes.append(f"{where} is compiled: its next call compiles again")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        notes.append("scripted and traced parts stay as they are: patch comes before torch.jit")
    if any("'eager'" in entry.calls for entry in replaced):
        notes.append(
            "eager attention runs unfused while output_attentions or a forward hook may read its attention weights"
        )
    device = next((parameter.device for parameter in model.parameters()), None)
    if replaced and device is not None and device.type != "meta":
        reasons = device_reasons(device, (torch.float32,))
        if reasons or backend_mode() == "torch":
            why = "; ".join(reasons) or "the backend in force is torch"
            notes.append(f"on {device.type}, here, fusedops' functions run torch's operators: {why}")
    return notes
