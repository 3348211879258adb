"""Which backend serves a call, and every reason why.

Two backends exist: ``triton`` (our kernels, on a supported GPU or in Triton's interpreter) and ``torch`` (torch's
own operators). A public function asks :func:`use_triton` with the reasons that its operator family lists.
"""

from __future__ import annotations

import importlib.util
import inspect
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.autograd import forward_ad

from fusedops.runtime.device import DeviceFacts, device_facts, launches_nothing
from fusedops.runtime.settings import BACKENDS, SETTINGS, Backend, Settings

HAS_TRITON = importlib.util.find_spec("triton") is not None

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Oldest NVIDIA architecture that the kernels are compiled and tested for.
_MINIMUM_CAPABILITY = 75


# Triton's interpreter (3.6 to 3.9) multiplies bfloat16's bit patterns, and cuts instead of rounding; tests repair that.
interpreter_knows_bfloat16 = False
# It reads float8's infinities, NaN and smallest numbers as others; likewise.
interpreter_knows_float8 = False


class BackendError(RuntimeError):
    """The Triton backend was demanded for a call that it cannot serve. The message lists every reason."""


class FallbackWarning(UserWarning):
    """A call with GPU tensors runs on torch's operators instead of fusedops' kernels."""


class _ThreadState(threading.local):
    forced: Backend | None = None


_thread = _ThreadState()
# torch.compile guards on plain globals, not on thread-local state: traced code reads this copy, so that a graph
# compiled under ``backend("torch")`` is not reused outside it.
_traced_mode: Backend = SETTINGS.backend
# The contexts that are open in any thread, the newest last.
_open: list[list[Backend]] = []
_lock = threading.Lock()
_warned: set[tuple[str, str]] = set()


def backend_mode() -> Backend:
    """What this thread asks for: the innermost :class:`backend` context, else ``FUSEDOPS_BACKEND``."""
    if torch.compiler.is_compiling():
        return _traced_mode
    forced = _thread.forced
    return SETTINGS.backend if forced is None else forced


class backend:  # noqa: N801 (a context manager, used like a function)
    """Context manager: run fusedops' operators on the named backend, in this thread.

    Args:
        name: ``"auto"``, ``"triton"`` (an error where the kernels cannot serve a call) or ``"torch"``.

    Raises:
        ValueError: ``name`` is none of these.

    Examples:
        >>> import torch, fusedops
        >>> x = torch.ones(2, 8)
        >>> with fusedops.backend("torch"):
        ...     y = fusedops.layer_norm(x, 8)
        ...     print(fusedops.explain(fusedops.layer_norm, x, 8).backend)
        torch
    """

    def __init__(self, name: Backend) -> None:
        if name not in BACKENDS:
            raise ValueError(f"name must be one of {', '.join(map(repr, BACKENDS))}; got {name!r}")
        self.name = name
        self._before: list[tuple[Backend | None, list[Backend]]] = []

    def __enter__(self) -> backend:
        entry = [self.name]
        self._before.append((_thread.forced, entry))
        _thread.forced = self.name
        with _lock:
            _open.append(entry)
            _update_traced_mode()
        return self

    def __exit__(self, *exception: object) -> None:
        _thread.forced, entry = self._before.pop()
        with _lock:
            # By identity: another thread may have opened a context of the same name meanwhile.
            _open[:] = [other for other in _open if other is not entry]
            _update_traced_mode()


def _update_traced_mode() -> None:
    global _traced_mode
    _traced_mode = _open[-1][0] if _open else SETTINGS.backend


def might_use_triton(device: torch.device) -> bool:
    """A cheap first answer: False where no reason needs to be listed because torch serves the call anyway."""
    if torch.compiler.is_compiling():
        return _might_use_triton(_traced_mode, device)
    # Reading device.type builds a string, which costs more than all the rest of this call: remember the answers.
    answers = _answers[_thread.forced]
    answer = answers.get(device)
    if answer is None:
        answer = answers[device] = _might_use_triton(backend_mode(), device)
    return answer


_answers: dict[Backend | None, dict[torch.device, bool]] = {name: {} for name in (None, *BACKENDS)}


def _might_use_triton(mode: Backend, device: torch.device) -> bool:
    if mode == "auto":
        return device.type == "cuda" or (SETTINGS.interpret and device.type == "cpu")
    # A meta tensor has no data for a kernel; torch's shape functions answer whatever the mode.
    return mode == "triton" and device.type != "meta"


try:
    _transforms = torch._C._are_functorch_transforms_active
except AttributeError:  # a name that torch does not promise: without it, the operators themselves raise

    def _transforms() -> bool:
        return False


def transformed() -> bool:
    """Whether torch.func's transforms (grad, vmap, jvp, …) or forward-mode differentiation are at work here.

    The kernels have no rules for these, torch's own operators have.
    """
    return _transforms() or forward_ad._current_level >= 0


def _transform_reason() -> str:
    transform = "torch.func's transforms" if _transforms() else "forward-mode differentiation"
    return f"the kernels have no rules for {transform}; torch's operators do"


# While a graph is traced, what is at work at this place of it is at work for real. (torch guards graphs on it.)
transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]
_transform_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]


def device_reasons(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> list[str]:
    """Every reason why no fusedops kernel can run on this device with these dtypes, here and now (empty: one can)."""
    if transformed():
        return [*_all_device_reasons(device, dtypes), _transform_reason()]
    if torch.compiler.is_compiling():
        return _all_device_reasons(device, dtypes)
    if _known_to_run(device, dtypes):
        return []
    reasons = _all_device_reasons(device, dtypes)
    if not reasons:
        _running[device, dtypes] = device_facts(device), SETTINGS, interpreter_knows_bfloat16
    return reasons


def _known_to_run(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether this was asked before, there was no reason, and what the answer depends on is the same."""
    known = _running.get((device, dtypes))
    return (
        known is not None
        and known[0] is device_facts(device)
        and known[1] is SETTINGS
        and known[2] is interpreter_knows_bfloat16
    )


_running: dict[tuple[torch.device, tuple[torch.dtype, ...]], tuple[DeviceFacts, Settings, bool]] = {}


def _all_device_reasons(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> list[str]:
    reasons = list(_device_reasons(device.type, device.index))
    for dtype in dict.fromkeys(dtypes):
        if dtype not in KERNEL_DTYPES:
            reasons.append(f"{_name(dtype)}: the kernels take float32, float16 and bfloat16")
    if torch.bfloat16 in dtypes and not reasons:
        reasons += _bfloat16_reasons(device.type, device.index)
    return reasons


def _interpreted_too_late() -> bool:
    """Whether Triton's own functions were made for a compiler, which a kernel that is interpreted cannot call."""
    if not HAS_TRITON:
        return False
    import triton.language

    return type(triton.language.sum).__name__ == "JITFunction"


def _device_reasons(kind: str, index: int | None) -> tuple[str, ...]:
    reasons = []
    if not HAS_TRITON and not launches_nothing():
        reasons.append("Triton is not installed")
    if kind == "cpu":
        # Offline compilation pretends that CPU tensors lie on a GPU; their launches are written down, not run.
        if not SETTINGS.interpret and device_facts(torch.device(kind)).vendor == "interpreter":
            reasons.append("the tensors are on the CPU (TRITON_INTERPRET=1 runs the kernels there, slowly)")
        elif SETTINGS.interpret and not launches_nothing() and _interpreted_too_late():
            reasons.append(
                "TRITON_INTERPRET=1 was set after Triton had been imported (by transformers, for one): set it before"
            )
    elif kind != "cuda":
        reasons.append(f"device type {kind!r}: the kernels run on CUDA and ROCm devices")
    elif SETTINGS.interpret:
        reasons.append("TRITON_INTERPRET=1 is set: the kernels take CPU tensors in this process")
    elif not torch.cuda.is_available():
        reasons.append("torch finds no CUDA or ROCm device")
    else:
        facts = device_facts(torch.device(kind, index or 0))
        if facts.vendor == "nvidia" and facts.capability < _MINIMUM_CAPABILITY:
            reasons.append(f"{facts.name} is {facts.arch}: the kernels need sm_{_MINIMUM_CAPABILITY} or newer")
    return tuple(reasons)


# Facts about a device never change in a process, so a traced graph may hold them as constants. This is what
# torch.compiler.assume_constant_result sets; calling that would import all of Dynamo with fusedops.
_device_reasons._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _bfloat16_reasons(kind: str, index: int | None) -> list[str]:
    if kind == "cpu":
        if SETTINGS.interpret and not interpreter_knows_bfloat16 and not launches_nothing():
            return ["bfloat16: Triton's interpreter (TRITON_INTERPRET=1) computes it wrongly"]
        return []
    facts = device_facts(torch.device(kind, index or 0))
    if facts.vendor == "nvidia" and facts.capability < 80:
        return [f"bfloat16 needs sm_80 or newer; {facts.name} is {facts.arch}"]
    return []


_bfloat16_reasons._dynamo_marked_constant = True  # type: ignore[attr-defined]


def float8_reasons(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> list[str]:
    """Every reason why a device that runs the kernels cannot multiply these float8 dtypes (empty: it can)."""
    return list(_float8_reasons(device.type, device.index, dtypes))


def float8_dtypes(facts: DeviceFacts) -> tuple[torch.dtype, ...]:
    """The float8 dtypes that a device's matrix units multiply, e4m3 first; empty: none."""
    # OCP's formats, or those without infinities and negative zero of AMD's CDNA 3.
    plain, fnuz = (torch.float8_e4m3fn, torch.float8_e5m2), (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    if facts.vendor == "amd":
        return {"gfx942": fnuz, "gfx950": plain}.get(facts.arch, ())
    return plain if facts.vendor == "interpreter" or facts.capability >= 89 else ()


def _float8_reasons(kind: str, index: int | None, dtypes: tuple[torch.dtype, ...]) -> tuple[str, ...]:
    facts = device_facts(torch.device(kind, index or 0) if kind == "cuda" else torch.device(kind))
    if facts.vendor == "interpreter" and SETTINGS.interpret and not interpreter_knows_float8:
        return ("float8: Triton's interpreter (TRITON_INTERPRET=1) computes it wrongly",)
    device, known = f"{facts.name} ({facts.arch})", float8_dtypes(facts)
    if not known:
        needed = "gfx942 or gfx950" if facts.vendor == "amd" else "sm_89 or newer"
        return (f"float8 needs {needed}; this is {device}",)
    names = " and ".join(map(_name, known))
    return tuple(f"{_name(t)}: {device} multiplies {names}" for t in dict.fromkeys(dtypes) if t not in known)


_float8_reasons._dynamo_marked_constant = True  # type: ignore[attr-defined]


def use_triton(operator: str, reasons: list[str], device: torch.device) -> bool:
    """True when the kernels serve the call. A refusal on a GPU warns once with all reasons.

    Raises:
        BackendError: the Triton backend is demanded and there are reasons against it.
    """
    if not reasons:
        return True
    if backend_mode() == "triton" and not launches_nothing():
        raise BackendError(f"{operator}: the Triton backend cannot serve this call: {'; '.join(reasons)}")
    if device.type == "cuda" and not torch.compiler.is_compiling():
        _warn_once(operator, "; ".join(reasons))
    return False


def _warn_once(operator: str, text: str) -> None:
    if (operator, text) not in _warned:
        _warned.add((operator, text))
        warnings.warn(f"{operator} runs on torch's operators: {text}", FallbackWarning, stacklevel=4)


def can_launch(tensor: torch.Tensor) -> bool:
    """Whether a library op may launch its kernel for this tensor; else it computes its reference formula.

    The public functions have asked :func:`use_triton` before; this serves graphs that were exported on one
    machine and run on another, the backward of what they hold, and tensors that are spread over devices, for which the
    operator is called on every backend.
    """
    return backend_mode() != "torch" and not launches_nothing() and not device_reasons(tensor.device, (tensor.dtype,))


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which backend serves a call and why; what :func:`explain` returns. ``str`` of it is for people.

    Attributes:
        function: the function's name.
        backend: ``"triton"`` or ``"torch"``: what serves the call.
        mode: what was asked for: ``"auto"``, ``"triton"`` or ``"torch"``.
        reasons: everything that keeps the kernels from serving the call; empty where nothing does.
    """

    function: str
    backend: Literal["triton", "torch"]
    mode: Backend
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        head = f"{self.function}: {self.backend} backend (asked for: {self.mode})"
        if self.backend == "torch" and not self.reasons:
            return head + "\n  the Triton kernels could serve this call"
        return head + "".join(f"\n  - {reason}" for reason in self.reasons)


def explainable(
    reasons: Callable[..., tuple[torch.device, list[str]]],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of a public function: ``reasons(*args, **kwargs)`` lists what keeps Triton from serving a call."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__fusedops_reasons__ = reasons  # type: ignore[attr-defined]
        return function

    return mark


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Say which backend would serve ``function(*args, **kwargs)``, with *every* reason against Triton.

    Nothing is computed and nothing is launched.

    Args:
        function: a public fusedops function, such as ``fusedops.layer_norm``.
        *args, **kwargs: what it would be called with.

    Returns:
        An object with ``backend`` ("triton" or "torch"), ``reasons`` (every one against Triton, a tuple of texts),
        ``mode`` (what was asked for) and ``function`` (its name); print it.

    Raises:
        TypeError: ``function`` is not a public fusedops function, or the arguments are wrong for it.
        ValueError: the arguments are wrong for it.

    Examples:
        >>> import torch, fusedops
        >>> found = fusedops.explain(fusedops.rms_norm, torch.ones(4, 8, dtype=torch.float64), 8)
        >>> found.backend, any("float64" in reason for reason in found.reasons)
        ('torch', True)
    """
    listed = getattr(function, "__fusedops_reasons__", None)
    if listed is None:
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(f"function must be a public fusedops function, such as fusedops.linear; got {name}")
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{function.__name__}: {error}") from None
    _, reasons = listed(*args, **kwargs)
    mode = backend_mode()
    served: Literal["triton", "torch"] = "triton" if not reasons and mode != "torch" else "torch"
    if mode == "torch":
        reasons = ['the torch backend is asked for (FUSEDOPS_BACKEND or fusedops.backend("torch"))', *reasons]
    return Explanation(function.__name__, served, mode, tuple(reasons))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
