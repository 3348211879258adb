"""Comparison of a model's outputs before and after patching, beside what rounding alone does to them.

The noise floor is measured. The model as it was is run again, and whatever a module without further calls inside
returns is multiplied by 1 + δ, δ uniform within half a unit in the last place of its own dtype: the standard model of
rounding (Higham, Accuracy and Stability of Numerical Algorithms, section 2.2). So far the outputs move when every step
rounds a little differently, which any other correct way of computing them makes it do.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedops.patching.report import CheckResult, PatchError

# Runs whose steps round differently; the largest difference counts. One run may miss what the next one hits: a value
# that lies near a step of the function.
DRAWS = 3

_PERTURBED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_META = (
    "check: the model cannot be run, as it has shapes and no data (device meta): give it weights first"
    " (model.to_empty(device=...) and load_state_dict), or patch without check="
)


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def read(cls, check: Any, name: str = "patch: check") -> Inputs:
        """The forms that ``patch(model, check=...)`` takes; see there. ``name``: of the argument, for the error."""
        if isinstance(check, torch.Tensor):
            return cls((check,), {})
        if isinstance(check, Mapping):
            return cls((), dict(check))
        if not isinstance(check, tuple):
            kind = type(check).__name__
            raise TypeError(
                f"{name} must be a tuple of arguments, a mapping of keyword arguments, (args, kwargs) or a"
                f" tensor; got {kind}"
            )
        if len(check) == 2 and isinstance(check[0], tuple) and isinstance(check[1], Mapping):
            return cls(check[0], dict(check[1]))
        return cls(check, {})


class Observed(NamedTuple):
    """A model's outputs by name, and how far each floating-point one moves when the steps before it round differently.

    ``noise`` is None where no such run succeeded.
    """

    outputs: dict[str, Any]
    noise: dict[str, float] | None


def run(model: nn.Module, inputs: Inputs, state: str = "patched") -> dict[str, Any]:
    """The model's outputs by name, in evaluation mode and without gradients.

    The random state, the modules' training flags and the inputs are as before afterwards. ``state``: how to speak of
    the model where it raises an error.

    Raises:
        PatchError: the model has no data (it is on the meta device).
    """
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    try:
        with evaluating(model), torch.no_grad(), torch.random.fork_rng(sorted(devices)):
            output = model(*copied(inputs.args), **copied(inputs.kwargs))
            # Copied, as a model may return a buffer that its next call writes again.
            outputs = {name: copied(leaf) for name, leaf in leaves("output", output)}
    except Exception as error:
        if _without_data(model):
            raise PatchError(_META) from error
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"raised while patch's check= ran the model, {state}")
        raise
    if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in outputs.values()):
        raise PatchError(_META)
    return outputs


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it all modules are in evaluation mode; afterwards their flags are as before."""
    modules = list(model.modules())
    training = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, flag in zip(modules, training, strict=True):
            module.training = flag


def _without_data(model: nn.Module) -> bool:
    # accelerate keeps an offloaded model's tensors on the meta device between its calls.
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    return not offloaded and any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def observe(model: nn.Module, inputs: Inputs) -> Observed:
    """The outputs as :func:`run` has them, and their noise: the largest difference of :data:`DRAWS` runs to one more.

    Hooks that were there before run as ever, once a run; those that this adds are gone afterwards.
    """
    outputs = run(model, inputs, "unpatched")
    noise: dict[str, float] = {}
    try:
        with ExitStack() as stack:
            compiled = any("_orig_mod" in module._modules for module in model.modules())
            if compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            # Hooks alone may change how a model computes: what was patched before runs unfused, torch's transformer
            # layers leave their path for inference, a compiled graph is left by the stance. That is no noise.
            with _hooked(model, lambda output: output):
                plain = run(model, inputs)
            for seed in range(DRAWS):
                with _hooked(model, _Rounding(seed)):
                    moved = run(model, inputs)
                for name, difference in _differences(plain, moved):
                    noise[name] = max(noise.get(name, 0.0), difference)
    except Exception:  # whatever a model does that cannot be hooked; the check itself does not need it
        return Observed(outputs, None)
    return Observed(outputs, noise)


def compare(before: Observed, after: dict[str, Any]) -> CheckResult:
    """Largest difference of the outputs, and the noise floor of the output that has it.

    Raises:
        PatchError: the outputs differ in structure, shape, dtype or in what is not a floating-point number, or are
            no longer finite.
    """
    outputs = before.outputs
    if outputs.keys() != after.keys():
        raise PatchError(f"check: the outputs were {', '.join(outputs)}; after patching they are {', '.join(after)}")
    worst, where, largest, tensors, telling = 0.0, "", 0.0, 0, False
    for name, old in outputs.items():
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
        telling = telling or _tells(old) or _tells(new)
        if not (old.is_floating_point() or old.is_complex()):
            if not torch.equal(old, new):
                raise PatchError(f"check: {name} ({_describe(old)}) has other values after patching")
            continue
        difference = _difference(old, new).max().item()
        if not math.isfinite(difference):
            raise PatchError(f"check: {name} has other values that are not finite numbers after patching")
        largest = max(largest, _largest(old))
        if difference > worst or not where:
            worst, where = difference, name
    if not tensors:
        raise PatchError("check: the model returned no tensor to compare")
    where = where or next(iter(outputs))
    return CheckResult(worst, largest, where, tensors, _floor(before, where), telling)


def _tells(tensor: torch.Tensor) -> bool:
    """Whether a value is a finite number other than zero."""
    return bool((tensor.isfinite() & (tensor != 0)).any())


def _floor(before: Observed, where: str) -> float | None:
    output = before.outputs[where]
    if before.noise is None or not isinstance(output, torch.Tensor) or not output.is_floating_point():
        return None
    # The last rounding is that of the output itself, also where no module computes it.
    rounding = torch.finfo(output.dtype).eps / 2 * _largest(output)
    return max(before.noise.get(where, 0.0), rounding)


def _largest(tensor: torch.Tensor) -> float:
    """The largest finite magnitude; 0 where there is none."""
    magnitudes = tensor.abs()
    finite = magnitudes[magnitudes.isfinite()]
    return float(finite.max().item()) if finite.numel() else 0.0


def _difference(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Absolute differences in double precision. Equal infinities, and NaNs in the same place, count as equal."""
    old, new = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (old, new))
    return torch.where((old == new) | (old.isnan() & new.isnan()), 0.0, (old - new).abs())


def _differences(plain: dict[str, Any], moved: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The largest finite difference of each floating-point output that both runs have."""
    for name, old in plain.items():
        new = moved.get(name)
        if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and old.is_floating_point()):
            continue
        if old.shape == new.shape and old.dtype == new.dtype:
            yield name, _largest(_difference(old, new))


class _Rounding:
    """Rounds a module's floating-point results differently, wherever they stand in what it returns."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._rounded(value)
        if type(value) in (list, tuple):
            return type(value)(map(self, value))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self, value))
        if isinstance(value, Mapping) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
            return self._filled(value)
        return value

    def _filled(self, value: Any) -> Any:
        """A copy of a mapping or dataclass; an output of transformers is both."""
        result = copy.copy(value)
        if isinstance(value, Mapping):
            for key, inner in value.items():
                result[key] = self(inner)
        else:
            for field in dataclasses.fields(value):
                object.__setattr__(result, field.name, self(getattr(value, field.name)))
        return result

    def _rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.dtype not in _PERTURBED or tensor.layout is not torch.strided:
            return tensor
        generator = self._generators.get(tensor.device)
        if generator is None:
            generator = torch.Generator(tensor.device).manual_seed(self._seed)
            self._generators[tensor.device] = generator
        # Half precision's δ would be lost among its smallest numbers.
        exact = tensor.double() if tensor.dtype == torch.float64 else tensor.float()
        delta = torch.rand(exact.shape, generator=generator, device=exact.device, dtype=exact.dtype) - 0.5
        moved = (exact + exact * (delta * torch.finfo(tensor.dtype).eps)).to(tensor.dtype)
        # The largest number of all stays finite: masks are made of it.
        return torch.where(moved.isfinite(), moved, tensor)


@contextmanager
def _hooked(model: nn.Module, change: Callable[[Any], Any]) -> Iterator[None]:
    """Within it, ``change`` is applied to what each call returns that calls no other module.

    Not to what was an argument of the call: an Identity, or a Dropout in evaluation mode, rounds nothing.
    """
    calls: list[int] = []  # of each call that is going on: how many calls were inside it
    handles = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append(0)

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        inside = calls.pop()
        if calls:
            calls[-1] += 1
        if inside:
            return None
        given = {id(leaf) for _, leaf in leaves("", [args, kwargs])}
        return output if id(output) in given else change(output)

    try:
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
                handles.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a model's output holds, each with its name."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(f"{name}.{key}", inner)
    elif isinstance(value, (tuple, list)):
        for index, inner in enumerate(value):
            yield from leaves(f"{name}[{index}]", inner)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(f"{name}.{field.name}", getattr(value, field.name))
    else:
        yield name, value


def copied(value: Any) -> Any:
    """A model's argument or output, so that a run cannot change the original: tensors, and what holds them."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (tuple, list):
        return type(value)(copied(inner) for inner in value)
    if type(value) is dict:
        return {key: copied(inner) for key, inner in value.items()}
    return copy.deepcopy(value)


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
