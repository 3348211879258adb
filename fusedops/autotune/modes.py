"""What a miss leads to: the process's mode, and threads that only look up."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from fusedops.autotune.operator import forget
from fusedops.runtime.settings import AUTOTUNE, SETTINGS, Autotune


class _Thread(threading.local):
    only_looks_up = False


_thread = _Thread()
_lock = threading.Lock()
# The contexts that are open, the newest last. Of the process, not of a thread: autograd runs a backward in threads of
# its own.
_open: list[list[Autotune]] = []


def current_mode() -> Autotune:
    """The newest open :class:`mode`, else ``FUSEDOPS_AUTOTUNE``."""
    try:
        return _open[-1][0]
    except IndexError:
        return SETTINGS.autotune


class mode:  # noqa: N801 (a context manager, used like a function)
    """Context manager: what the process does where a launch configuration has not been searched for yet.

    It holds for all threads: autograd computes gradients in threads of its own.

    Args:
        name: ``"cached"``: a default serves the call. ``"on"``: it is searched then and there, which takes up to 20
            seconds a problem; never while a CUDA graph is captured, under
            ``torch.use_deterministic_algorithms(True)``, or in a job of several ranks (see :func:`sync`).
            ``"off"``: defaults only, whatever is stored. ``"record"``: as ``cached``, and each problem is appended to
            ``FUSEDOPS_RECORD_FILE``.

    Raises:
        ValueError: ``name`` is none of these.

    Examples:
        >>> import torch, fusedops
        >>> with fusedops.autotune.mode("off"):
        ...     y = fusedops.layer_norm(torch.ones(2, 8), 8)
    """

    def __init__(self, name: Autotune) -> None:
        if name not in AUTOTUNE:
            raise ValueError(f"name must be one of {', '.join(map(repr, AUTOTUNE))}; got {name!r}")
        self.name = name
        self._entries: list[list[Autotune]] = []

    def __enter__(self) -> mode:
        entry = [self.name]
        self._entries.append(entry)
        with _lock:
            _open.append(entry)
        forget()
        return self

    def __exit__(self, *exception: object) -> None:
        entry = self._entries.pop()
        with _lock:
            # By identity: another thread may have opened a context of the same name meanwhile.
            _open[:] = [other for other in _open if other is not entry]
        forget()


@contextlib.contextmanager
def look_up_only() -> Iterator[None]:
    """Within the context this thread neither searches nor records: it serves a search."""
    before, _thread.only_looks_up = _thread.only_looks_up, True
    try:
        yield
    finally:
        _thread.only_looks_up = before


def only_looks_up() -> bool:
    return _thread.only_looks_up
