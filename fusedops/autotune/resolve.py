"""The one place where a kernel's launch configuration is looked up."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from fusedops.autotune.operator import Config, Operator, forget, times_forgotten
from fusedops.autotune.record import record
from fusedops.runtime.device import DeviceFacts, device_facts, pretending
from fusedops.runtime.settings import SETTINGS

P = TypeVar("P", bound=tuple)
C = TypeVar("C", bound=Config)


def resolve(operator: Operator[P, C], problem: P, device: torch.device) -> C:
    """The configuration for a problem on a device. It never raises.

    Looked for in memory, the user's store, the files that ``FUSEDOPS_CONFIG_PATH`` names, the files shipped with
    fusedops for this GPU, those for others of its architecture; then the same for the nearest size; then the
    operator's default. Under ``autotune.mode("on")`` a problem that has no entry of its own is searched first.

    Args:
        operator: a family's, such as :data:`fusedops.norm.tuning.NORM`.
        problem: the operator's key; hashed here on every call.
        device: where the kernel will run.
    """
    known = operator.memory.get(device_facts(device))
    if known is not None:
        config = known.get(problem)
        if config is not None:
            return config
    return _first(operator, problem, device)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.using: dict[tuple[str, tuple], Config] = {}


_thread = _Thread()
_lock = threading.Lock()
# How many threads use a configuration of their own for a problem: meanwhile nothing is remembered for it.
_used: dict[tuple[str, tuple], int] = {}


@contextlib.contextmanager
def using(operator: Operator[P, C], problem: P, config: C) -> Iterator[None]:
    """Within the context, in this thread, :func:`resolve` answers ``config`` for exactly this problem."""
    key = (operator.name, problem)
    before = _thread.using.get(key)
    with _lock:
        _used[key] = _used.get(key, 0) + 1
        for known in list(operator.memory.values()):
            known.pop(problem, None)
    _thread.using[key] = config
    try:
        yield
    finally:
        if before is None:
            del _thread.using[key]
        else:
            _thread.using[key] = before
        with _lock:
            _used[key] -= 1
            if not _used[key]:
                del _used[key]


_sinks: list[list[tuple[Operator, Any]]] = []


@contextlib.contextmanager
def collecting() -> Iterator[list[tuple[Operator, Any]]]:
    """Within the context every problem that any thread resolves is appended to the list, once or more often."""
    met: list[tuple[Operator, Any]] = []
    with _lock:
        _sinks.append(met)
    forget()
    try:
        yield met
    finally:
        with _lock:
            _sinks[:] = [sink for sink in _sinks if sink is not met]


def _first(operator: Operator[P, C], problem: P, device: torch.device) -> C:
    """Where memory does not answer. What is found is remembered, unless a later call may find better."""
    key = (operator.name, problem)
    mine = _thread.using.get(key)
    if mine is not None:
        return mine  # type: ignore[return-value]
    for sink in _sinks:
        sink.append((operator, problem))
    facts = device_facts(device)
    since = times_forgotten()
    waiting = _waiting.get((facts, *key))
    if waiting is not None and waiting[0] == since and why_not_now(device) is not None:
        return waiting[1]  # type: ignore[return-value]
    try:
        config, final = _found(operator, problem, facts, device)
    except Exception as error:  # whatever a store, a file or a search came to: the call itself can go on
        _LOG.warning("fusedops autotune: %s: %s: %s; a default serves", operator.name, type(error).__name__, error)
        config, final = operator.default(problem, facts), False
    if final:
        with _lock:
            if key not in _used:
                operator.remember(facts, problem, config, since)
    return config


# What serves where a search has to wait, and when (times_forgotten) it was looked up: such calls look up only once.
_waiting: dict[tuple[DeviceFacts, str, tuple], tuple[int, Config]] = {}


def _found(operator: Operator[P, C], problem: P, facts: DeviceFacts, device: torch.device) -> tuple[C, bool]:
    """The configuration, and whether that is the last word while the mode stays as it is."""
    from fusedops.autotune.lookup import look_up
    from fusedops.autotune.modes import current_mode, only_looks_up

    mode = current_mode()
    found = look_up(operator, problem, facts, use_stored=mode != "off")
    if mode == "off" or only_looks_up() or pretending():
        return found.config, not only_looks_up()
    if found.stale:
        _tell_once(
            "stale",
            f"{found.source} was timed with other versions ({'; '.join(found.stale)}); it is used"
            " until it is searched again: fusedops cache list --stale",
        )
    if found.tuned:
        return found.config, True
    missed(operator, problem)
    if mode == "record":
        record(operator, problem, facts, SETTINGS.record_path())
    if mode == "on":
        if why_not_now(device) is not None:
            _waiting[facts, operator.name, problem] = times_forgotten(), found.config
            return found.config, False
        return _searched(operator, problem, device), True
    if facts.vendor != "interpreter":
        _tell(operator, problem, facts, None if found.entry is None else found.source)
    return found.config, True


_missed: dict[tuple[str, tuple], None] = {}
_MOST_MISSED = 4096


def missed(operator: Operator, problem: tuple) -> None:
    """Remember a problem that no search has answered, for :func:`fusedops.autotune.sync`."""
    with _lock:
        if len(_missed) < _MOST_MISSED:
            _missed[operator.name, problem] = None


def take_missed() -> list[tuple[str, tuple]]:
    """The problems that were missed in this process since this was last called."""
    with _lock:
        problems = list(_missed)
        _missed.clear()
    return problems


def why_not_now(device: torch.device) -> str | None:
    """Why nothing may be searched in the midst of a call; None: it may."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and timings are not"
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return "ranks must agree: call fusedops.autotune.sync()"
    return None


def _searched(operator: Operator[P, C], problem: P, device: torch.device) -> C:
    """Search now, once a process; one thread a problem, and others wait for it."""
    from fusedops.autotune.lookup import look_up
    from fusedops.autotune.tuner import tune

    with _lock:
        lock = _searching.setdefault((operator.name, problem), threading.Lock())
    with lock:
        facts = device_facts(device)
        attempt = (facts, operator.name, problem)
        if attempt not in _attempted and not look_up(operator, problem, facts).tuned:
            _tell_once("searching", "a call searches its launch configuration, once for this GPU: up to 20 s a problem")
            _LOG.info("fusedops autotune: searching %s %s", operator.name, operator.key(problem))
            try:
                (result,) = tune([(operator, problem)], device=device)
                refused = result.refused
            except Exception as error:
                refused = f"{type(error).__name__}: {error}"
            _attempted.add(attempt)
            if refused is not None:
                told = "fusedops autotune: %s %s: %s; what there is serves"
                _LOG.warning(told, operator.name, operator.key(problem), refused)
        return look_up(operator, problem, facts).config


_searching: dict[tuple[str, tuple], threading.Lock] = {}
# What calls have searched, with whatever success: what was refused once would be again, and cost as much.
_attempted: set[tuple[DeviceFacts, str, tuple]] = set()
_LOG = logging.getLogger("fusedops.autotune")
_told: set[str] = set()


def _tell(operator: Operator, problem: tuple, facts: DeviceFacts, source: str | None) -> None:
    """The first default of a process is a warning that says what to run; each miss is in the log, for who asks for it.

    ``source``: of what serves; None: a default. Of several ranks the first one tells.
    """
    _LOG.info(_MISSED, operator.name, operator.key(problem), source or "a default")
    if source is None and os.environ.get("RANK", "0") == "0":
        _tell_once(
            "missed",
            f"no launch configuration was searched for {operator.name} on {facts.name} yet: a default serves it, and"
            " others that follow. To search once for all that your model needs: fusedops record -- COMMAND, then"
            " fusedops autotune --from its file; or FUSEDOPS_AUTOTUNE=on. FUSEDOPS_AUTOTUNE=off says nothing",
        )


_MISSED = "fusedops autotune: no search yet for %s %s; %s serves"


def _tell_once(topic: str, text: str) -> None:
    with _lock:
        if topic in _told:
            return
        _told.add(topic)
    _LOG.warning("fusedops autotune: %s", text)
