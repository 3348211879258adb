"""Comparison of a model's outputs before and after patching."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fusedops.patching.report import CheckResult, PatchError


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def read(cls, check: Any) -> Inputs:
        """The forms that ``patch(model, check=...)`` takes; see there."""
        if isinstance(check, torch.Tensor):
            return cls((check,), {})
        if isinstance(check, Mapping):
            return cls((), dict(check))
        if not isinstance(check, tuple):
            kind = type(check).__name__
            raise TypeError(
                f"patch: check must be a tuple of arguments, a mapping of keyword arguments, (args, kwargs) or a"
                f" tensor; got {kind}"
            )
        if len(check) == 2 and isinstance(check[0], tuple) and isinstance(check[1], Mapping):
            return cls(check[0], dict(check[1]))
        return cls(check, {})


def run(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """The model's outputs by name, in evaluation mode and without gradients.

    The random state, the modules' training flags and the inputs are as before afterwards.
    """
    modules = list(model.modules())
    training = [module.training for module in modules]
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    try:
        for module in modules:
            module.training = False
        with torch.no_grad(), torch.random.fork_rng(sorted(devices)):
            output = model(*_copied(inputs.args), **_copied(inputs.kwargs))
            # Copied, as a model may return a buffer that its next call writes again.
            return {name: _copied(leaf) for name, leaf in _leaves("output", output)}
    finally:
        for module, flag in zip(modules, training, strict=True):
            module.training = flag


def compare(before: dict[str, Any], after: dict[str, Any]) -> CheckResult:
    """Largest difference of the outputs.

    Raises:
        PatchError: the outputs differ in structure, shape, dtype or in what is not a floating-point number, or are
            no longer finite.
    """
    if before.keys() != after.keys():
        raise PatchError(f"check: the outputs were {', '.join(before)}; after patching they are {', '.join(after)}")
    worst, where, largest, tensors = 0.0, "", 0.0, 0
    for name, old in before.items():
        new = after[name]
        if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
            if type(old) is not type(new):
                raise PatchError(f"check: {name} was a {type(old).__name__}; it became a {type(new).__name__}")
            continue
        if old.shape != new.shape or old.dtype != new.dtype:
            raise PatchError(f"check: {name} was {_describe(old)}; it became {_describe(new)}")
        tensors += 1
        if not old.numel():
            continue
        if not (old.is_floating_point() or old.is_complex()):
            if not torch.equal(old, new):
                raise PatchError(f"check: {name} ({_describe(old)}) has other values after patching")
            continue
        old, new = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (old, new))
        # Equal infinities and NaNs in the same place count as equal.
        error = torch.where((old == new) | (old.isnan() & new.isnan()), 0.0, (old - new).abs())
        difference = error.max().item()
        if not math.isfinite(difference):
            raise PatchError(f"check: {name} has other values that are not finite numbers after patching")
        finite = old.abs()[old.isfinite()]
        largest = max(largest, finite.max().item() if finite.numel() else 0.0)
        if difference > worst or not where:
            worst, where = difference, name
    if not tensors:
        raise PatchError("check: the model returned no tensor to compare")
    return CheckResult(worst, largest, where or next(iter(before)), tensors)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    elif isinstance(value, (tuple, list)):
        for index, inner in enumerate(value):
            yield from _leaves(f"{name}[{index}]", inner)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(f"{name}.{field.name}", getattr(value, field.name))
    else:
        yield name, value


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):
        return type(value)(_copied(inner) for inner in value)
    if type(value) is dict:
        return {key: _copied(inner) for key, inner in value.items()}
    return copy.deepcopy(value)


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
