"""Files that many processes read and write: whole, or not there. None is trusted."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fusedops.autotune.entries import utc_now

FORMAT = 1
# A store's file has a line of some hundred bytes a candidate; more than this was not written by fusedops.
MOST_BYTES = 64 << 20


class NewerFormatError(ValueError):
    """A file of a later fusedops, which is to be left as it is."""


# What tells one content of a file from another, as far as the file system knows.
Signature = tuple[int, int, int]


def signature(status: os.stat_result) -> Signature:
    return status.st_mtime_ns, status.st_size, status.st_ino


def read(path: Path) -> tuple[dict[str, Any], os.stat_result]:
    """The JSON object in a file of our format, and the file's status.

    Raises:
        OSError: the file cannot be read.
        NewerFormatError: a later fusedops wrote it.
        ValueError: it is nothing that fusedops wrote; the message says why.
    """
    # Without O_NONBLOCK, opening a named pipe would wait for somebody to write to it.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
    return parse(data), status


def parse(data: bytes) -> dict[str, Any]:
    """As :func:`read`, from a file's bytes."""
    try:
        value = json.loads(data.decode(), parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except MemoryError:
        raise ValueError("it does not fit into memory") from None
    except ValueError as error:  # not JSON, not UTF-8, an integer of thousands of digits
        raise ValueError(f"it cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    number = value.get("format")
    if type(number) is not int or number < 1:
        raise ValueError('it has no "format": it is not a file of fusedops')
    if number > FORMAT:
        raise NewerFormatError(f"it has format {number}, of a later fusedops; this one knows {FORMAT}")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large")
    return number


dumps = json.JSONEncoder(allow_nan=False).encode


def object_text(value: Mapping[str, Any], deep: int, indent: int = 0) -> str:
    """JSON with a line for each member, down to ``deep`` levels: people and version control read it by lines."""
    if deep == 0 or not value:
        return dumps(value)
    space = " " * (indent + 1)
    members = (
        (name, object_text(part, deep - 1, indent + 1) if isinstance(part, dict) else dumps(part))
        for name, part in value.items()
    )
    lines = ",\n".join(f"{space}{dumps(name)}: {text}" for name, text in members)
    return f"{{\n{lines}\n{' ' * indent}}}"


def write(path: Path, text: str) -> None:
    """Put a file in another's place at once, and for good: a crash leaves the one or the other, whole.

    Where ``path`` is a link, the link itself is replaced, and what it leads to is left alone.

    Raises:
        OSError: it could not be done; the earlier file is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(temporary, flags, 0o666), "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    with contextlib.suppress(OSError):  # some systems cannot: the new name then lasts when they come to write it
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def left_over(path: Path) -> list[Path]:
    """Temporary files of writers of ``path`` that were killed, or that write now."""
    return sorted(path.parent.glob(f".{path.name}.*.tmp"))


@contextlib.contextmanager
def locked(path: Path, timeout: float) -> Iterator[bool]:
    """Hold the lock of a file against other writers; whether there is one, for not every file system has locks.

    Raises:
        OSError: (TimeoutError) somebody else kept it for ``timeout`` seconds, or it could not be made.
    """
    import filelock  # readers do without

    lock = path.with_name(f".{path.stem}.lock")
    if lock.is_symlink():  # it would be opened for writing, wherever it leads
        lock.unlink()
    held = filelock.FileLock(lock, timeout=timeout)
    try:
        held.acquire(poll_interval=0.01)
    except NotImplementedError:
        yield False
        return
    try:
        yield True
    finally:
        held.release()


def set_aside(path: Path) -> Path:
    """Rename a file that is of no use, for people to look at. OSError where that cannot be done."""
    stem = f"{path.name}.corrupt-{utc_now().replace(':', '').replace('-', '')}"
    aside, number = path.with_name(stem), 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{stem}-{number}")
    os.rename(path, aside)
    return aside
