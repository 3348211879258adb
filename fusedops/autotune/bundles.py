"""Configurations of many devices and operators in one file: exported ones, shipped ones, a team's own."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusedops.autotune import files
from fusedops.autotune.entries import AutotuneWarning, Entry, better, op_name
from fusedops.autotune.identity import Identity

Operators = dict[str, dict[str, Entry]]
Bundle = list[tuple[Identity, Operators]]


def read_bundle(path: Path) -> Bundle:
    """What :func:`write_bundle` wrote. Entries that are invalid are left out, with one warning.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no bundle, or a later fusedops wrote it.
    """
    bundle, wrong = read_bundle_telling(path)
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        warnings.warn(f"{path}: left out: {wrong[0]}{more}", AutotuneWarning, stacklevel=2)
    return bundle


def read_bundle_telling(path: Path) -> tuple[Bundle, list[str]]:
    """As :func:`read_bundle`, with what is wrong with each entry that is left out instead of a warning."""
    value, _ = files.read(Path(path))
    wrong: list[str] = []
    return _devices(value.get("devices"), wrong), wrong


def _devices(value: object, wrong: list[str]) -> Bundle:
    if not isinstance(value, list):
        raise ValueError('it holds no list of "devices"')
    bundles: list[Bundle] = []
    for index, device in enumerate(value):
        if not isinstance(device, dict) or not isinstance(device.get("operators"), dict):
            wrong.append(f"devices[{index}] has no operators")
            continue
        try:
            identity = Identity.from_json(device.get("device"))
        except ValueError as error:
            wrong.append(f"devices[{index}]: {error}")
            continue
        found: Operators = {}
        for op, entries in device["operators"].items():
            valid, invalid = checked_entries(op, entries)
            wrong += (f"{identity.name}: {reason}" for reason in invalid.values())
            if valid:
                found[op] = valid
        bundles.append([(identity, found)])
    return merge(*bundles)


def checked_entries(op: object, value: object) -> tuple[dict[str, Entry], dict[str, str]]:
    """The valid entries of an operator's ``{key: entry}``, and for the other keys what is wrong with them."""
    try:
        name = op_name(op)
        if not isinstance(value, dict):
            raise ValueError(f"{name} has no entries")
    except ValueError as error:
        return {}, {"": str(error)}
    valid: dict[str, Entry] = {}
    invalid: dict[str, str] = {}
    for key, entry in value.items():
        try:
            valid[key] = checked_entry(name, key, entry)
        except ValueError as error:
            shown = key if key.isprintable() else ascii(key)
            invalid[key] = f"{name} {shown[:200]}: {error}"
    return valid, invalid


def checked_entry(op: str, key: str, value: object) -> Entry:
    """The entry that stands under an operator and key; ValueError where it is none, or is another's."""
    entry = Entry.from_json(value)
    if entry.op != op:
        raise ValueError(f"it is of {entry.op}")
    # Tools that sort JSON change the order of a problem's fields, and nothing else.
    names = [word.partition("=")[0] for word in key.split(" ")]
    if set(names) == set(entry.problem):
        entry = replace(entry, problem={name: entry.problem[name] for name in names})
    if entry.key != key:
        raise ValueError(f"it is of the problem {entry.key}")
    return entry


def write_bundle(path: Path, bundle: Iterable[tuple[Identity, Mapping[str, Mapping[str, Entry]]]]) -> None:
    """Write a bundle, sorted: the same entries always make the same file, byte for byte, with a line for each.

    Raises:
        OSError: it could not be written; an earlier file of that name is as it was.
        ValueError: an entry is invalid.
    """
    devices = []
    for identity, operators in sorted(merge(bundle), key=lambda item: item[0].key):
        texts: dict[str, dict[str, Any]] = {}
        for op in sorted(operators):
            texts[op] = {key: checked_json(operators[op][key]) for key in sorted(operators[op])}
        device = {"device": identity.to_json(), "operators": texts}
        devices.append(" " + files.object_text(device, deep=3, indent=1))
    listed = ",\n".join(devices)
    files.write(Path(path), f'{{"format": {files.FORMAT}, "devices": [\n{listed}\n]}}\n')


def checked_json(entry: Entry) -> dict[str, Any]:
    """An entry's JSON, of which it is sure that it can be read again; ValueError else."""
    value = entry.to_json()
    Entry.from_json(value)
    return value


def merge(*bundles: Iterable[tuple[Identity, Mapping[str, Mapping[str, Entry]]]]) -> Bundle:
    """All entries of the bundles; of two for the same problem on the same device the better, in whatever order."""
    merged: dict[Identity, Operators] = {}
    for bundle in bundles:
        for identity, operators in bundle:
            mine = merged.setdefault(identity, {})
            for op, entries in operators.items():
                mine[op] = merged_entries(mine.get(op, {}), entries)
    return list(merged.items())


def merged_entries(a: Mapping[str, Entry], b: Mapping[str, Entry]) -> dict[str, Entry]:
    return {**a, **{key: better(a[key], entry) if key in a else entry for key, entry in b.items()}}


def each(bundle: Bundle) -> Iterator[tuple[Identity, Entry]]:
    """Every entry of a bundle with its device."""
    for identity, operators in bundle:
        for entries in operators.values():
            for entry in entries.values():
                yield identity, entry
