"""``patch``, ``unpatch``, ``patched`` and ``plan``: the rules applied to a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fusedops.patching import check as checking
from fusedops.patching.classes import fuse, is_fused, original_class, set_class
from fusedops.patching.report import Left, PatchError, PatchReport, Replacement
from fusedops.patching.rules import RULES


@dataclass(frozen=True, slots=True)
class _Plan:
    report: PatchReport
    swaps: tuple[tuple[nn.Module, str], ...]


def plan(model: nn.Module) -> PatchReport:
    """What :func:`patch` would do to a model, which stays as it is.

    Args:
        model: any torch.nn.Module.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module.

    Example:
        >>> import torch, fusedops
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
        >>> [entry.calls for entry in fusedops.plan(model).replaced]
        ['fusedops.linear(activation="gelu")', 'fusedops.layer_norm']
    """
    return replace(_examine("plan", model).report, applied=False)


def patch(model: nn.Module, *, strict: bool = False, check: Any = None) -> PatchReport:
    """Let the parts of a model that fusedops can prove equivalent call its fused operators, in training and inference.

    Replaced are nn.LayerNorm and nn.RMSNorm, a Linear with the activation (ReLU, GELU, SiLU) that follows it in an
    nn.Sequential or in a module whose method just applies its children in turn (the MLPs of BERT and GPT-2 are such),
    and the attention of Hugging Face models of the BERT, RoBERTa, ELECTRA, DistilBERT and GPT-2 families. The modules
    remain the objects that they are: only their classes change, each to a subclass of its own. Parameters, hooks,
    optimisers, ``state_dict``, ``save_pretrained``, pickling and copying work as before, and so do hooks, LoRA or
    parametrizations that are added to a patched model (the part they touch then runs unfused). A module that two
    models share is patched in both.

    Patching a patched model replaces only what it finds new. The model is changed completely or not at all.

    Args:
        model: any torch.nn.Module; a model inside torch.compile's wrapper or DistributedDataParallel is found.
        strict: raise when nothing can be replaced, or when something that was recognised is left alone.
        check: inputs to run the model on before and after, without gradients and in evaluation mode, to report the
            largest difference: a tuple of positional arguments, a mapping of keyword arguments,
            ``(args, kwargs)`` (a tuple of a tuple and a mapping), or one tensor.

    Returns:
        A report of what was replaced and of what was left alone and why; print it.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module, or ``check`` is none of the above.
        PatchError: ``strict`` is not met, or the check found other shapes, dtypes or NaNs. The model is as before.

    Example:
        >>> import torch, fusedops
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
        >>> report = fusedops.patch(model, check=(torch.randn(2, 8),))
        >>> len(report.replaced), report.check.max_abs_error < 1e-5
        (2, True)
    """
    return _patch(model, strict=strict, check=check)[0]


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

    Example:
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
        elif any(is_fused(base) for base in kind.__mro__):
            raise PatchError(
                f"unpatch: {path or 'the model'} was given the class {kind.__name__} after it was patched;"
                " remove what did that first"
            )
    _restore(fused)
    return len(fused)


@contextlib.contextmanager
def patched(model: nn.Module, *, strict: bool = False, check: Any = None) -> Iterator[PatchReport]:
    """Context manager: :func:`patch` the model, and at the end put back what this patched.

    Args:
        model, strict, check: as for :func:`patch`.

    Example:
        >>> import torch, fusedops
        >>> norm = torch.nn.LayerNorm(8)
        >>> with fusedops.patched(norm) as report:
        ...     print(type(norm).__name__)
        FusedLayerNorm
        >>> type(norm).__name__
        'LayerNorm'
    """
    report, modules = _patch(model, strict=strict, check=check)
    try:
        yield report
    finally:
        _restore(modules)


def _patch(model: nn.Module, *, strict: bool, check: Any) -> tuple[PatchReport, list[nn.Module]]:
    """The report, and the modules whose class was changed."""
    found = _examine("patch", model)
    inputs = None if check is None else checking.Inputs.read(check)
    report = found.report
    if strict:
        _check_strict(report)
    before = None if inputs is None else checking.run(model, inputs)
    changed: list[nn.Module] = []
    try:
        for module, rule in found.swaps:
            if fuse(module, rule):
                changed.append(module)
        if inputs is not None and before is not None:
            report = replace(report, check=checking.compare(before, checking.run(model, inputs)))
    except BaseException:
        _restore(changed)
        raise
    return report, changed


def _restore(modules: list[nn.Module]) -> None:
    for module in modules:
        set_class(module, original_class(type(module)))


def _check_strict(report: PatchReport) -> None:
    if report.left:
        shown = "; ".join(f"{entry.path or 'the model'} ({entry.reason})" for entry in report.left[:5])
        more = f"; and {len(report.left) - 5} more" if len(report.left) > 5 else ""
        raise PatchError(f"patch(strict=True): {len(report.left)} modules would be left alone: {shown}{more}")
    if not report.replaced and not report.already:
        raise PatchError("patch(strict=True): nothing in this model can be replaced")


def _check_model(function: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model must be a torch.nn.Module; got {type(model).__name__}")


def _examine(function: str, model: nn.Module) -> _Plan:
    """Ask every rule about every module."""
    _check_model(function, model)
    replaced, left, already = [], [], []
    swaps: dict[int, tuple[nn.Module, str]] = {}
    notes = []
    for path, module in model.named_modules():
        if "_orig_mod" in module._modules:
            notes.append(
                f"{path or 'the model'} is compiled: the module inside is patched, its next call compiles again"
            )
        if isinstance(module, torch.jit.ScriptModule):
            continue  # compiled already; its parts have no classes to swap
        for rule in RULES:
            for finding in rule.find(module):
                where = ".".join(filter(None, (path, finding.path)))
                entry = Replacement(where, finding.original, rule.name, finding.calls)
                reasons = finding.obstacles()
                taken = any(swaps.get(id(m), (m, kind))[1] != kind for m, kind in finding.swaps)
                if finding.done:
                    already.append(entry)
                elif reasons or taken:
                    reasons += ["another rule replaces this module"] if taken else []
                    left.append(Left(where, finding.original, "; ".join(reasons)))
                else:
                    replaced.append(entry)
                    for swapped, kind in finding.swaps:
                        swaps[id(swapped)] = swapped, kind
    if any("'eager'" in entry.calls for entry in replaced):
        notes.append(
            "eager attention runs unfused while output_attentions or a forward hook may read its attention weights"
        )
    report = PatchReport(tuple(replaced), tuple(left), tuple(already), None, tuple(notes))
    return _Plan(report, tuple(swaps.values()))
