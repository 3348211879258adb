"""The user's store of configurations: a JSON file a device and operator, which any number of processes share.

Readers take no lock: a file is whole, or it is not there. A writer holds the file's lock while it reads the file again,
merges, and puts a new one in its place. What cannot be read is set aside, what cannot be written stays in memory, and
either is said once; neither stops what was going on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from fusedops.autotune import files
from fusedops.autotune.bundles import (
    Bundle,
    checked_entries,
    checked_entry,
    checked_json,
    each,
    merge,
    merged_entries,
    read_bundle,
    write_bundle,
)
from fusedops.autotune.entries import AutotuneWarning, Entry, better, mismatches, op_name
from fusedops.autotune.identity import Identity
from fusedops.autotune.operator import Operator

__all__ = ["AutotuneWarning", "Found", "Removed", "Store", "merge", "read_bundle", "write_bundle"]

# A file younger than this may change again without a file system noticing: its clock ticks every few milliseconds.
_SETTLED_NS = 100_000_000

_warned: set[str] = set()
_warned_lock = threading.Lock()


def _warn_once(topic: str, message: str) -> None:
    with _warned_lock:
        if topic in _warned:
            return
        _warned.add(topic)
    warnings.warn(message, AutotuneWarning, stacklevel=3)


@dataclass(frozen=True, slots=True)
class Found:
    """Something that :meth:`Store.verify` found wrong.

    Attributes:
        path: the file.
        key: the entry's key; None where it concerns the file.
        what: what is wrong.
    """

    path: Path
    key: str | None
    what: str


@dataclass(frozen=True, slots=True)
class Removed:
    """An entry that :meth:`Store.prune` removes: its device, operator and key, and why."""

    identity: Identity
    op: str
    key: str
    why: str


class Store:
    """A folder of entries: ``<folder>/<Identity.key>/<op>.json``.

    Examples:
        >>> import tempfile
        >>> from fusedops.runtime.device import INTERPRETER
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Store(Path(folder)).get(Identity.of(INTERPRETER), "norm")
        {}
    """

    lock_seconds = 10.0

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._lock = threading.Lock()
        self._cache: dict[Path, tuple[files.Signature, dict[str, Entry]]] = {}
        # What could not be written, by file, and of which device each file is.
        self._unsaved: dict[Path, dict[str, Entry]] = {}
        self._device: dict[Path, Identity] = {}

    def path(self, identity: Identity, op: str) -> Path:
        """The file of a device and operator. ValueError: ``op`` is no operator's name."""
        return self.folder / identity.key / f"{op_name(op)}.json"

    def get(self, identity: Identity, op: str) -> dict[str, Entry]:
        """The entries of a device and operator by key, those included that could not be written.

        Takes no lock and reads a file again only where it changed. A file that cannot be read counts as empty. The
        dict is the caller's own.
        """
        path = self.path(identity, op)
        with self._lock:
            return merged_entries(self._read(path, identity, op), self._unsaved.get(path, {}))

    def _read(self, path: Path, identity: Identity, op: str) -> dict[str, Entry]:
        try:
            now = files.signature(os.stat(path))
            cached = self._cache.get(path)
            if cached is not None and cached[0] == now:
                return cached[1]
            raw, status = _load(path, identity, op)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            _warn_once(f"unreadable {path}", f"{path} cannot be read ({error}); it is left out")
            return {}
        except files.NewerFormatError as error:
            _warn_once(f"newer {path}", f"{path}: {error}. It is left as it is, and not used")
            return {}
        except ValueError as error:
            self._set_aside_unlocked(path, identity, op, str(error))
            return {}
        entries, invalid = checked_entries(op, raw)
        if time.time_ns() - status.st_mtime_ns > _SETTLED_NS:
            self._cache[path] = files.signature(status), entries
        if invalid:
            _warn_once(
                f"invalid {path}",
                f"{path}: {len(invalid)} of {len(raw)} entries are left out; {next(iter(invalid.values()))}",
            )
        return entries

    def _set_aside_unlocked(self, path: Path, identity: Identity, op: str, why: str) -> None:
        """From a reader: a writer may have put a good file there meanwhile, and does this itself where it is at it."""
        try:
            with _writing(self.folder, path, timeout=0):
                _load_or_set_aside(path, identity, op)
        except files.NewerFormatError:
            pass  # of a later fusedops, which just wrote it
        except OSError:
            _warn_once(f"corrupt {path}", f"{path} is left out: {why}")

    def put(self, identity: Identity, entries: Iterable[Entry]) -> bool:
        """Add entries of a device; of two for the same problem the better stays (:func:`better`).

        Returns:
            Whether all are in files now. Those that could not be written stay in this process's memory (with one
            warning a process) and are written with a later :meth:`put` to the same file.

        Raises:
            ValueError: an entry is invalid; nothing was added.
        """
        by_path: dict[tuple[Path, str], dict[str, Entry]] = {}
        for entry in entries:
            checked_json(entry)
            there = by_path.setdefault((self.path(identity, entry.op), entry.op), {})
            there[entry.key] = better(there[entry.key], entry) if entry.key in there else entry
        saved = [self._put(path, identity, op, new) for (path, op), new in by_path.items()]
        return all(saved)

    def _put(self, path: Path, identity: Identity, op: str, new: Mapping[str, Entry]) -> bool:
        with self._lock:
            self._device[path] = identity
            new = self._unsaved[path] = merged_entries(self._unsaved.get(path, {}), new)
        try:
            with _writing(self.folder, path, self.lock_seconds):
                raw = _load_or_set_aside(path, identity, op)
                merged = dict(raw)
                for key, entry in new.items():
                    merged[key] = _better_json(op, key, raw.get(key), entry)
                if merged != raw:
                    _write(path, identity, op, merged, new)
        except (OSError, files.NewerFormatError) as error:
            _warn_once("memory", f"{path} cannot be written ({error}); what was found stays in this process's memory")
            return False
        with self._lock:
            left = {key: entry for key, entry in self._unsaved.get(path, {}).items() if new.get(key) is not entry}
            if left:  # another thread's
                self._unsaved[path] = left
            else:
                self._unsaved.pop(path, None)
        return True

    def add(self, bundle: Bundle) -> bool:
        """Add all entries of a bundle, each under its own device. As :meth:`put`."""
        by_device: dict[Identity, list[Entry]] = {}
        for identity, entry in each(bundle):
            by_device.setdefault(identity, []).append(entry)
        saved = [self.put(identity, entries) for identity, entries in by_device.items()]
        return all(saved)

    def bundle(self, identity: Identity | None = None, op: str | None = None) -> Bundle:
        """Everything in the store, or what it has of a device or an operator: for :func:`write_bundle`."""
        found: Bundle = []
        for device in self.devices() if identity is None else [identity]:
            names = self.ops(device) if op is None else [op]
            operators = {name: entries for name in names if (entries := self.get(device, name))}
            if operators:
                found.append((device, operators))
        return found

    def devices(self) -> list[Identity]:
        """The devices of which there are entries, sorted by key."""
        found: dict[str, Identity] = {}
        for path in self._files():
            if path.parent.name not in found:
                with contextlib.suppress(OSError, ValueError):
                    identity = Identity.from_json(files.read(path)[0].get("device"))
                    if identity.key == path.parent.name:
                        found[identity.key] = identity
        found |= {self._device[path].key: self._device[path] for path in self._kept()}
        return [found[key] for key in sorted(found)]

    def ops(self, identity: Identity) -> list[str]:
        """The operators of which a device has entries, or a file that cannot be read."""
        paths = {*self._files(), *self._kept()}
        return sorted(path.stem for path in paths if path.parent.name == identity.key)

    def _kept(self) -> list[Path]:
        """The files for which entries are in memory."""
        with self._lock:
            return [path for path, entries in self._unsaved.items() if entries]

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*/*.json") if _is_op(path.stem))

    def remove(self, identity: Identity, op: str, keys: Iterable[str] | None = None) -> int:
        """Remove entries of a device and operator, all of them unless ``keys`` are given. Returns how many there were.

        Raises:
            OSError: the file cannot be written.
            ValueError: a later fusedops wrote it.
        """
        path = self.path(identity, op)
        with self._lock:
            gone = dict(self._unsaved.pop(path, {}))
            if keys is not None:
                keys = set(keys)
                self._unsaved[path] = {key: entry for key, entry in gone.items() if key not in keys}
                gone = {key: entry for key, entry in gone.items() if key in keys}
        removed = set(gone)
        if path.exists():
            with _writing(self.folder, path, self.lock_seconds):
                raw = _load_or_set_aside(path, identity, op)
                kept = {} if keys is None else {key: entry for key, entry in raw.items() if key not in keys}
                removed |= set(raw) - set(kept)
                if kept:
                    _write(path, identity, op, kept, {})
                else:
                    path.unlink(missing_ok=True)
        return len(removed)

    def clear(self, identity: Identity | None = None, op: str | None = None) -> int:
        """Remove files: all, or those of a device or an operator; with what was set aside or left over beside them.

        Files of a later fusedops too, but nothing that is no file of a store. Locks stay: others may wait for them.

        Returns:
            How many files with entries there were.

        Raises:
            OSError: one could not be removed.
        """
        removed = 0
        pattern = "*.json*" if op is None else f"{op_name(op)}.json*"
        for path in sorted(self.folder.glob(f"{'*' if identity is None else identity.key}/{pattern}")):
            op_file, _, aside = path.name.partition(".json")
            ours = _is_op(op_file) and (not aside or aside.startswith(".corrupt-"))
            if not ours or path.parent.is_symlink():
                continue
            target = path.with_name(f"{op_file}.json")
            with _writing(self.folder, target, self.lock_seconds):
                path.unlink(missing_ok=True)
            removed += not aside
        with self._lock:
            for path in list(self._unsaved):
                if (identity is None or identity.key == path.parent.name) and op in (None, path.stem):
                    del self._unsaved[path]
        return removed

    def verify(self, operators: Mapping[str, Operator] | None = None) -> list[Found]:
        """Everything that is wrong in the folder. Nothing is changed.

        Args:
            operators: by name; entries are then also compared with what their operator takes.
        """
        found: list[Found] = []
        for path in self._files():
            try:
                raw = _entries_of(files.read(path)[0], path.parent.name, path.stem)
            except (OSError, ValueError) as error:
                found.append(Found(path, None, str(error)))
                continue
            valid, invalid = checked_entries(path.stem, raw)
            found += (Found(path, key, why) for key, why in invalid.items())
            for key, entry in valid.items():
                foreign = None if operators is None else _foreign(entry, operators)
                if foreign is not None:
                    found.append(Found(path, key, foreign))
        for path in sorted(self.folder.glob("*/*.json.corrupt-*")):
            found.append(Found(path, None, "it was set aside, for it could not be read"))
        for path in sorted(self.folder.glob("*/.*.json.*.tmp")):
            found.append(Found(path, None, "a writer left it, or writes now"))
        return found

    def prune(
        self,
        operators: Mapping[str, Operator] | None = None,
        older_than: timedelta | None = None,
        dry_run: bool = False,
    ) -> list[Removed]:
        """Remove entries that are of no use any more, and say why each.

        Args:
            operators: by name; entries are removed whose operator is not among them or does not take them, or whose
                timings no longer hold here (:func:`fusedops.autotune.entries.mismatches`).
            older_than: entries are removed that were found longer ago.
            dry_run: only tell.

        Raises:
            OSError: a file cannot be written.
        """
        removed: list[Removed] = []
        for identity in self.devices():
            for op in self.ops(identity):
                try:
                    raw, _ = _load(self.path(identity, op), identity, op)
                except (OSError, ValueError):  # get() and verify() tell
                    continue
                valid, invalid = checked_entries(op, raw)
                why = {key: [reason] for key, reason in invalid.items()}
                why |= {key: _out_of_date(entry, operators, older_than) for key, entry in valid.items()}
                gone = [Removed(identity, op, key, "; ".join(reasons)) for key, reasons in why.items() if reasons]
                if gone and not dry_run:
                    self.remove(identity, op, [item.key for item in gone])
                removed += gone
        return removed


def _is_op(name: str) -> bool:
    try:
        return bool(op_name(name))
    except ValueError:
        return False


@contextlib.contextmanager
def _writing(folder: Path, path: Path, timeout: float) -> Iterator[None]:
    """Hold the lock of one of the store's files, whose folder is made. OSError where it is not to be written to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent.is_symlink():
        raise OSError(errno.ELOOP, f"the store's folder {folder} would be left by a link", str(path.parent))
    with files.locked(path, timeout) as alone:
        for temporary in files.left_over(path) if alone else ():
            temporary.unlink(missing_ok=True)
        yield


def _load(path: Path, identity: Identity, op: str) -> tuple[dict[str, Any], os.stat_result]:
    """The entries in a file as they are there. ValueError: it is no file of this device and operator."""
    value, status = files.read(path)
    return _entries_of(value, identity.key, op), status


def _entries_of(value: Mapping[str, Any], device: str, op: str) -> dict[str, Any]:
    if value.get("op") != op:
        raise ValueError("it is of another operator")
    if Identity.from_json(value.get("device")).key != device:
        raise ValueError("it is of another device")
    entries = value.get("entries")
    if not isinstance(entries, dict):
        raise ValueError("it has no entries")
    return entries


def _load_or_set_aside(path: Path, identity: Identity, op: str) -> dict[str, Any]:
    """As :func:`_load`, under the lock: {} where there is no file, or none any more, for it was of no use."""
    try:
        return _load(path, identity, op)[0]
    except FileNotFoundError:
        return {}
    except files.NewerFormatError:
        raise
    except ValueError as error:
        aside = files.set_aside(path)
        _warn_once(f"corrupt {aside}", f"{path} is of no use: {error}. It was renamed to {aside.name}")
        return {}


def _better_json(op: str, key: str, there: object, entry: Entry) -> object:
    try:
        other = checked_entry(op, key, there)
    except ValueError:
        return entry.to_json()
    return there if better(other, entry) is other else entry.to_json()


def _write(path: Path, identity: Identity, op: str, entries: Mapping[str, Any], new: Mapping[str, Entry]) -> None:
    try:
        text = _text(identity, op, entries)
    except RecursionError:  # what could be read just so; no entry is nested
        text = _text(identity, op, {key: entry.to_json() for key, entry in checked_entries(op, entries)[0].items()})
    if len(text) > files.MOST_BYTES:
        # Nobody would read it. Timings of what was tried only shorten later searches.
        valid = checked_entries(op, entries)[0]
        shorter = {key: entry if key in new else replace(entry, candidates=()) for key, entry in valid.items()}
        text = _text(identity, op, {key: entry.to_json() for key, entry in shorter.items()})
        if len(text) > files.MOST_BYTES:
            raise OSError(errno.EFBIG, f"it would have more than {files.MOST_BYTES >> 20} MiB", str(path))
    files.write(path, text)


def _text(identity: Identity, op: str, entries: Mapping[str, Any]) -> str:
    """A file's text, with a line for each entry."""
    ordered = {key: entries[key] for key in sorted(entries)}
    value = {"format": files.FORMAT, "device": identity.to_json(), "op": op, "entries": ordered}
    return "{" + ",\n".join(f'"{name}": {_part(name, part)}' for name, part in value.items()) + "}\n"


def _part(name: str, part: Any) -> str:
    return files.object_text(part, deep=1) if name == "entries" else files.dumps(part)


def _foreign(entry: Entry, operators: Mapping[str, Operator]) -> str | None:
    """Why an entry is of no operator here; None: it is."""
    operator = operators.get(entry.op)
    if operator is None:
        return f"there is no operator {entry.op}"
    try:
        operator.problem_from_json(entry.problem)
        operator.config.from_json(entry.config)
    except ValueError as error:
        return str(error)
    return None


def _out_of_date(entry: Entry, operators: Mapping[str, Operator] | None, older_than: timedelta | None) -> list[str]:
    reasons = []
    if operators is not None:
        foreign = _foreign(entry, operators)
        reasons += [foreign] if foreign is not None else mismatches(entry, operators[entry.op])
    if older_than is not None:
        found = datetime.fromisoformat(entry.date[:19]).replace(tzinfo=timezone.utc)
        if datetime.now(timezone.utc) - found > older_than:
            reasons.append(f"it was found on {entry.date[:10]}")
    return reasons
