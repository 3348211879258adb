"""The store in one process: what is kept, what is set aside, and that nothing in a file or a disk stops a call."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

import filelock
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedops.autotune import files, store
from fusedops.autotune.entries import AutotuneWarning, Entry, current_versions, utc_now
from fusedops.autotune.identity import Identity
from fusedops.autotune.store import Store, merge, read_bundle, write_bundle
from fusedops.norm.tuning import NORM, NormProblem
from fusedops.runtime.device import TARGETS
from tests.autotune.made_entries import CANDIDATES, H100, MI300X, by_key, entry

ELSEWHERE = Identity.of(TARGETS["sm_80"])


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch):
    monkeypatch.setattr(store, "_warned", set())


@contextlib.contextmanager
def warned(*parts: str):
    """Exactly these warnings come, one for each text that is part of it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(warning.message) for warning in caught]
    assert all(warning.category is AutotuneWarning for warning in caught), texts
    assert len(texts) == len(parts), texts
    for part, text in zip(parts, texts, strict=True):
        assert part in text


def content(path: Path) -> dict:
    return json.loads(path.read_text())


def changed(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**content(path), **changes}))


@pytest.fixture
def filled(tmp_path) -> Store:
    """A store with one entry for each of two devices."""
    made = Store(tmp_path / "store")
    assert made.put(H100, [entry(64)])
    assert made.put(MI300X, [entry(128)])
    return made


# --- what is kept


def test_what_is_put_is_there_for_every_process(tmp_path):
    entries = [entry(64), entry(128), entry(64, op="linear")]
    mine = Store(tmp_path / "a" / "b")
    with warned():
        assert mine.put(H100, entries)
        for reader in (mine, Store(mine.folder)):
            assert reader.get(H100, "norm") == by_key(*entries[:2])
            assert reader.get(H100, "linear") == by_key(entries[2])
            assert reader.get(H100, "attention") == reader.get(MI300X, "norm") == {}
    path = mine.path(H100, "norm")
    assert path == tmp_path / "a" / "b" / H100.key / "norm.json"
    found = content(path)
    assert {name: found[name] for name in ("format", "device", "op")} == {
        "format": 1,
        "device": H100.to_json(),
        "op": "norm",
    }
    assert found["entries"] == {made.key: made.to_json() for made in entries[:2]}
    assert len(path.read_text().splitlines()) == 4 + 2 + 1  # an entry a line
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask  # as any other file: others may be meant to read it


def test_nothing_stored():
    assert Store(Path("/nowhere/at/all")).get(H100, "norm") == {}
    assert Store(Path(os.devnull)).get(H100, "norm") == {}
    assert (
        Store(Path("/nowhere")).devices() == Store(Path("/nowhere")).verify() == Store(Path("/nowhere")).prune() == []
    )


def test_the_better_entry_stays(filled):
    better, worse = entry(64, date="2025-07-01T00:00:00Z"), entry(64, date="2024-01-01T00:00:00Z")
    heuristic = entry(64, source="heuristic", date="2026-01-01T00:00:00Z")
    for new, stays in ((worse, entry(64)), (heuristic, entry(64)), (better, better), (entry(64), better)):
        assert filled.put(H100, [new])
        assert filled.get(H100, "norm") == Store(filled.folder).get(H100, "norm") == by_key(stays)
    assert filled.put(H100, [worse, entry(256), better, heuristic])  # of several in one call as well
    assert filled.get(H100, "norm") == by_key(better, entry(256))


def test_nothing_new_is_not_written(filled):
    before = filled.path(H100, "norm").stat()
    assert filled.put(H100, [entry(64), entry(64, source="heuristic")])
    assert filled.path(H100, "norm").stat() == before


def test_a_callers_dict_is_its_own(filled):
    filled.get(H100, "norm").clear()
    assert filled.get(H100, "norm") == by_key(entry(64))


def test_a_file_is_read_again_only_where_it_changed(filled, monkeypatch):
    path, reads = filled.path(H100, "norm"), []
    stock = files.read
    monkeypatch.setattr(files, "read", lambda path: reads.append(path) or stock(path))
    long_ago = time.time() - 60
    os.utime(path, (long_ago, long_ago))
    for _ in range(3):
        assert len(filled.get(H100, "norm")) == 1
    assert len(reads) == 1
    Store(filled.folder).put(H100, [entry(128)])
    assert len(filled.get(H100, "norm")) == 2


def test_a_change_that_the_file_systems_clock_is_too_coarse_for_is_seen(filled, monkeypatch):
    """The same time, size and inode tell nothing of a file that is that young."""
    path = filled.path(H100, "norm")
    assert filled.get(H100, "norm") == by_key(entry(64))
    before = path.stat()
    text = path.read_text().replace('"median": 1e-05', '"median": 3e-05')
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert files.signature(path.stat()) == files.signature(before)
    assert next(iter(filled.get(H100, "norm").values())).median == 3e-5


def test_an_invalid_entry_is_refused_and_nothing_is_written(tmp_path):
    made = Store(tmp_path / "store")
    for wrong in (entry(median=-1.0), entry(op="../../norm"), entry(problem={"width": [1]}), entry(date="today")):
        with pytest.raises(ValueError, match=r"median|op|problem|date"):
            made.put(H100, [entry(64), wrong])
    for op in ("../norm", "/etc/passwd", "a/b", "", ".", "NORM"):
        with pytest.raises(ValueError, match="op: "):
            made.path(H100, op)
    assert list(tmp_path.iterdir()) == []


def test_threads_lose_nothing(tmp_path):
    made = Store(tmp_path)
    made.lock_seconds = 60.0

    def work(number: int) -> None:
        for width in range(5):
            assert made.put(H100, [entry(10 * number + width)])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = by_key(*(entry(10 * number + width) for number in range(4) for width in range(5)))
    assert made.get(H100, "norm") == Store(tmp_path).get(H100, "norm") == expected


# --- files that are of no use


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


GOOD = {"format": 1, "device": H100.to_json(), "op": "norm", "entries": {entry().key: entry().to_json()}}
TEXT = json.dumps(GOOD)
CORRUPT = {
    "empty": b"",
    "truncated": TEXT[: len(TEXT) // 2].encode(),
    "last byte lost": TEXT[:-1].encode(),
    "more after it": (TEXT + "{").encode(),
    "zeros": bytes(4096),
    "garbage": bytes(range(256)) * 16,
    "another encoding": TEXT.encode("utf-16"),
    "no object": b"[1, 2]",
    "number": b"1",
    "no format": json.dumps({**GOOD, "format": None}).encode(),
    "a format of another kind": json.dumps({**GOOD, "format": True}).encode(),
    "an earlier format": json.dumps({**GOOD, "format": 0}).encode(),
    "another program's": b'{"format": "safetensors", "data": []}',
    "no device": json.dumps({**GOOD, "device": None}).encode(),
    "another device": json.dumps({**GOOD, "device": MI300X.to_json()}).encode(),
    "another operator": json.dumps({**GOOD, "op": "linear"}).encode(),
    "entries of another kind": json.dumps({**GOOD, "entries": [1]}).encode(),
    "not a number": TEXT.replace("1e-05", "NaN", 1).encode(),
    "infinite": TEXT.replace("1e-05", "1e999", 1).encode(),
    "a huge integer": TEXT.replace("1e-05", "9" * 10_000, 1).encode(),
    "deep": TEXT.replace("1e-05", nested(200_000), 1).encode(),
}


def check_set_aside(made: Store, path: Path, reason: str = "is of no use") -> Path:
    """The file is set aside with one warning, whoever comes first; then all goes on."""
    with warned(reason):
        assert made.get(H100, "norm") == {}
        assert made.get(H100, "norm") == {}
    (aside,) = path.parent.glob("norm.json.corrupt-*")
    assert not path.exists()
    with warned():
        assert made.put(H100, [entry(256)])
        assert made.get(H100, "norm") == Store(made.folder).get(H100, "norm") == by_key(entry(256))
    return aside


@pytest.mark.parametrize("data", CORRUPT.values(), ids=CORRUPT.keys())
@pytest.mark.parametrize("first", ["reader", "writer"])
def test_a_corrupt_file_is_set_aside(filled, data, first):
    path = filled.path(H100, "norm")
    path.write_bytes(data)
    if first == "writer":
        with warned("is of no use"):
            assert filled.put(H100, [entry(256)])
        (aside,) = path.parent.glob("norm.json.corrupt-*")
        assert filled.get(H100, "norm") == by_key(entry(256))
    else:
        aside = check_set_aside(filled, path)
    assert aside.read_bytes() == data
    assert filled.get(MI300X, "norm") == by_key(entry(128))


def test_several_files_are_set_aside_beside_each_other(filled):
    path = filled.path(H100, "norm")
    for text in ("one", "two", "three"):
        path.write_text(text)
        with warned("is of no use"):
            filled.get(H100, "norm")
    assert {aside.read_text() for aside in path.parent.glob("norm.json.corrupt-*")} == {"one", "two", "three"}


def test_a_file_too_large_to_be_ours_is_not_read(filled):
    path = filled.path(H100, "norm")
    with path.open("r+b") as file:
        file.truncate(100 << 20)
    assert check_set_aside(filled, path, "more than 64 MiB").stat().st_size == 100 << 20


def test_what_is_no_file_is_set_aside(filled):
    path = filled.path(H100, "norm")
    path.unlink()
    path.mkdir()
    assert check_set_aside(filled, path).is_dir()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_named_pipe_is_not_waited_for(filled):
    path = filled.path(H100, "norm")
    path.unlink()
    os.mkfifo(path)
    assert check_set_aside(filled, path).is_fifo()


def test_a_later_fusedops_file_is_left_as_it_is(filled):
    path = filled.path(H100, "norm")
    changed(path, format=2)
    before = path.read_bytes()
    with warned("format 2, of a later fusedops", "cannot be written"):
        assert filled.get(H100, "norm") == filled.get(H100, "norm") == {}
        assert not filled.put(H100, [entry(256)])
        assert not filled.put(H100, [entry(512)])
        assert filled.get(H100, "norm") == by_key(entry(256), entry(512))  # in memory
    assert path.read_bytes() == before
    assert sorted(p.name for p in path.parent.iterdir()) == [".norm.lock", "norm.json"]
    with pytest.raises(ValueError, match="later fusedops"):
        filled.remove(H100, "norm", [entry(64).key])
    assert path.read_bytes() == before


def test_a_reader_leaves_a_file_that_a_writer_is_at(filled):
    """The writer may have just put a good one there: only who holds the lock renames."""
    path = filled.path(H100, "norm")
    path.write_text("garbage")
    with filelock.FileLock(path.with_name(".norm.lock")), warned("is left out"):
        assert filled.get(H100, "norm") == filled.get(H100, "norm") == {}
        assert path.read_text() == "garbage"
    with warned("is of no use"):
        assert filled.get(H100, "norm") == {}
    assert not path.exists()


INVALID = {
    "a negative time": {**entry(128).to_json(), "median": -1},
    "no entry": [1, 2],
    "another operator's": entry(128, op="linear").to_json(),
    "another problem's": entry(256).to_json(),
    "deep": json.loads(nested(600)),
    "code": {**entry(128).to_json(), "config": {"__reduce__": ["os.system", "true"]}},
}


@pytest.mark.parametrize("value", INVALID.values(), ids=INVALID.keys())
def test_an_invalid_entry_is_left_out_not_its_file(filled, value):
    path = filled.path(H100, "norm")
    path.write_text(json.dumps({**GOOD, "entries": {entry().key: entry().to_json(), entry(128).key: value}}))
    with warned("1 of 2 entries are left out; norm width=128"):
        assert filled.get(H100, "norm") == filled.get(H100, "norm") == by_key(entry(64))
        assert filled.put(H100, [entry(512)])
        assert filled.get(H100, "norm") == by_key(entry(64), entry(512))
    assert entry(128).key in content(path)["entries"]  # nobody asked for it to go
    assert filled.put(H100, [entry(128)])
    with warned():
        assert Store(filled.folder).get(H100, "norm") == by_key(entry(64), entry(512), entry(128))


def test_keys_are_never_names_of_files(filled):
    keys = ["../../outside", "/tmp/outside", "a\0b", "\ud800", ""]
    changed(filled.path(H100, "norm"), entries={key: entry().to_json() for key in keys})
    with warned("5 of 5 entries are left out"):
        assert filled.get(H100, "norm") == {}
    assert {found.key for found in filled.verify() if found.key is not None} == set(keys)
    assert {p.name for p in filled.folder.rglob("*") if p.is_file()} == {"norm.json", ".norm.lock"}


def test_fields_in_another_order_are_the_same_problem(filled):
    """Tools that tidy JSON files sort them."""
    path = filled.path(H100, "norm")
    path.write_text(json.dumps(content(path), indent=4, sort_keys=True))
    assert list(content(path)["entries"][entry().key]["problem"]) != list(entry().problem)
    with warned():
        assert filled.get(H100, "norm") == by_key(entry(64))


MUTATION = st.tuples(st.integers(0, len(TEXT) - 1), st.integers(0, 60), st.binary(max_size=20))


@settings(max_examples=60)
@given(st.lists(MUTATION, min_size=1, max_size=3))
def test_whatever_is_in_a_file_nothing_is_raised(tmp_path_factory, mutations):
    made = Store(tmp_path_factory.mktemp("store"))
    path = made.path(H100, "norm")
    path.parent.mkdir()
    data = TEXT.encode()
    for start, length, new in mutations:
        data = data[:start] + new + data[start + length :]
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutotuneWarning)
        assert set(made.get(H100, "norm")) <= {entry().key}
        made.verify()
        if made.put(H100, [entry(512)]):
            assert entry(512).key in Store(made.folder).get(H100, "norm")
        else:
            assert b'"format"' in data  # of a later fusedops, by chance
    assert {p.name.split(".corrupt")[0] for p in path.parent.iterdir()} <= {"norm.json", ".norm.lock"}


# --- disks that cannot be written


def failing(*args: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


FAULTS = {
    "folder": (Path, "mkdir"),
    "lock": (filelock.FileLock, "acquire"),
    "fsync": (os, "fsync"),
    "replace": (os, "replace"),
    "write": (files, "write"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_what_cannot_be_written_stays_in_memory_with_one_warning(filled, monkeypatch, fault):
    before = filled.path(H100, "norm").read_bytes()
    with monkeypatch.context() as patched, warned("No space left on device"):
        patched.setattr(*fault, failing)
        assert not filled.put(H100, [entry(128)])
        assert not filled.put(H100, [entry(256)])
        assert not filled.put(MI300X, [entry(64)])
        assert filled.get(H100, "norm") == by_key(entry(64), entry(128), entry(256))
        assert filled.get(MI300X, "norm") == by_key(entry(128), entry(64))
        assert not filled.put(ELSEWHERE, [entry(64)])
        assert dict(filled.bundle()) == {
            H100: {"norm": by_key(entry(64), entry(128), entry(256))},
            MI300X: {"norm": by_key(entry(128), entry(64))},
            ELSEWHERE: {"norm": by_key(entry(64))},
        }
    assert filled.path(H100, "norm").read_bytes() == before
    assert {p.name for p in filled.folder.rglob("*") if p.is_file()} == {"norm.json", ".norm.lock"}
    assert Store(filled.folder).get(H100, "norm") == by_key(entry(64))
    # Once there is space, what was kept is written with the next entry.
    assert filled.put(H100, [entry(512)])
    assert Store(filled.folder).get(H100, "norm") == by_key(entry(64), entry(128), entry(256), entry(512))


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "store").write_text("mine")
    made = Store(tmp_path / "store")
    with warned("cannot be written"):
        assert not made.put(H100, [entry()])
        assert made.get(H100, "norm") == by_key(entry())
    assert (tmp_path / "store").read_text() == "mine"


def test_a_file_that_may_not_be_read_is_left_out(filled, monkeypatch):
    stock = os.open

    def refusing(path: object, *args: object, **options: object) -> int:
        if str(path).endswith("norm.json"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stock(path, *args, **options)

    before = filled.path(H100, "norm").read_bytes()
    monkeypatch.setattr(os, "open", refusing)
    with warned("cannot be read", "cannot be written"):
        assert filled.get(H100, "norm") == filled.get(H100, "norm") == {}
        assert not filled.put(H100, [entry(128)])
    monkeypatch.undo()
    assert filled.path(H100, "norm").read_bytes() == before


def test_a_lock_that_another_process_keeps_is_not_waited_for_for_ever(filled):
    filled.lock_seconds = 0.05
    path = filled.path(H100, "norm")
    with filelock.FileLock(path.with_name(".norm.lock")), warned("cannot be written"):
        assert not filled.put(H100, [entry(128)])
        assert filled.get(H100, "norm") == by_key(entry(64), entry(128))
    assert filled.put(H100, [])
    assert filled.put(H100, [entry(256)])
    assert Store(filled.folder).get(H100, "norm") == by_key(entry(64), entry(128), entry(256))


def test_a_file_system_without_locks_is_written_all_the_same(filled, monkeypatch):
    def no_locks(*args: object, **options: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(filelock.FileLock, "acquire", no_locks)
    with warned():
        assert filled.put(H100, [entry(128)])
    assert Store(filled.folder).get(H100, "norm") == by_key(entry(64), entry(128))


def test_what_a_killed_writer_left_is_removed(filled):
    left = filled.path(H100, "norm").with_name(".norm.json.123-abc.tmp")
    left.write_text("half")
    assert [found.path for found in filled.verify()] == [left]
    assert filled.put(H100, [entry(128)])
    assert not left.exists()


def test_a_file_never_grows_beyond_what_is_read(filled, monkeypatch):
    """Then others' tried candidates go, which only shorten later searches, never what serves."""
    long = [entry(width, candidates=CANDIDATES * 40, date="2026-01-01T00:00:00Z") for width in (64, 128)]
    monkeypatch.setattr(files, "MOST_BYTES", 30_000)
    with warned():
        assert filled.put(H100, long[:1])
        assert filled.get(H100, "norm") == by_key(long[0])
        assert filled.put(H100, long[1:])
    kept = Store(filled.folder).get(H100, "norm")
    assert {key: len(made.candidates) for key, made in kept.items()} == {long[0].key: 0, long[1].key: 160}
    with warned("cannot be written"):
        assert not filled.put(H100, [entry(256, candidates=CANDIDATES * 400)])
    assert Store(filled.folder).get(H100, "norm") == kept


# --- links


def test_a_link_in_a_files_place_is_replaced_and_what_it_leads_to_is_left_alone(filled, tmp_path):
    path, outside = filled.path(H100, "norm"), tmp_path / "outside.json"
    path.rename(outside)
    path.symlink_to(outside)
    before = outside.read_bytes()
    assert filled.get(H100, "norm") == by_key(entry(64))  # it is read as any file
    assert filled.put(H100, [entry(128)])
    assert not path.is_symlink()
    assert filled.get(H100, "norm") == by_key(entry(64), entry(128))
    assert outside.read_bytes() == before


def test_a_link_to_something_else_is_renamed_not_what_it_leads_to(filled, tmp_path):
    path, outside = filled.path(H100, "norm"), tmp_path / "secret"
    outside.write_text("password: 1234")
    path.unlink()
    path.symlink_to(outside)
    with warned("is of no use"):
        assert filled.put(H100, [entry(128)])
    (aside,) = path.parent.glob("*.corrupt-*")
    assert aside.is_symlink()
    assert outside.read_text() == "password: 1234"


def test_a_device_folder_that_is_a_link_is_not_written_to(tmp_path):
    outside, made = tmp_path / "outside", Store(tmp_path / "store")
    outside.mkdir()
    made.folder.mkdir()
    made.path(H100, "norm").parent.symlink_to(outside)
    with warned("would be left by a link"):
        assert not made.put(H100, [entry()])
        assert made.get(H100, "norm") == by_key(entry())
    (outside / "norm.json").write_text(TEXT)
    assert made.clear() == 0
    assert [p.name for p in outside.iterdir()] == ["norm.json"]


def test_a_lock_or_temporary_file_that_is_a_link_is_not_followed(filled, tmp_path, monkeypatch):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    path = filled.path(H100, "norm")
    path.with_name(".norm.lock").unlink()
    path.with_name(".norm.lock").symlink_to(outside)
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: "00")
    path.with_name(f".norm.json.{os.getpid()}-00.tmp").symlink_to(outside)
    assert filled.put(H100, [entry(128)])
    assert outside.read_text() == "mine"


# --- keeping house


def test_devices_and_operators(filled):
    filled.put(H100, [entry(64, op="linear")])
    (filled.folder / "mine").mkdir()
    (filled.folder / "mine" / "notes.json").write_text("{}")
    assert filled.devices() == sorted([H100, MI300X], key=lambda identity: identity.key)
    assert (filled.ops(H100), filled.ops(MI300X)) == (["linear", "norm"], ["norm"])


def test_entries_are_removed(filled):
    filled.put(H100, [entry(128), entry(256)])
    assert filled.remove(H100, "norm", [entry(64).key, entry(999).key]) == 1
    assert filled.get(H100, "norm") == by_key(entry(128), entry(256))
    assert filled.remove(H100, "norm") == 2
    assert filled.get(H100, "norm") == {}
    assert not filled.path(H100, "norm").exists()
    assert filled.remove(H100, "norm") == filled.remove(H100, "linear", ["x"]) == 0
    assert filled.get(MI300X, "norm") == by_key(entry(128))


def test_entries_in_memory_are_removed(filled, monkeypatch):
    filled.put(H100, [entry(512)])
    monkeypatch.setattr(os, "replace", failing)
    with warned("cannot be written"):
        filled.put(H100, [entry(128), entry(256)])
    assert filled.remove(H100, "linear") == 0
    with pytest.raises(OSError, match="No space"):
        filled.remove(H100, "norm", [entry(512).key])
    assert len(filled.get(H100, "norm")) == 4
    monkeypatch.undo()
    assert filled.remove(H100, "norm", [entry(128).key]) == 1
    assert filled.get(H100, "norm") == by_key(entry(64), entry(256), entry(512))
    assert filled.clear(H100, "norm") == 1
    assert filled.get(H100, "norm") == {}


def test_clear(filled):
    filled.put(H100, [entry(64, op="linear")])
    filled.path(H100, "attention").write_text(json.dumps({"format": 99}))
    (filled.folder / H100.key / "norm.json.corrupt-1").write_text("x")
    others = [
        filled.folder / "README.json",
        filled.folder / H100.key / "notes.txt",
        filled.folder / H100.key / "My.json",
    ]
    for path in others:
        path.write_text("{}")
    assert filled.clear(H100, "norm") == 1
    assert filled.ops(H100) == ["attention", "linear"]
    assert filled.clear(op="norm") == 1
    assert filled.devices() == [H100]
    assert filled.clear() == 2
    assert {path for path in filled.folder.rglob("*") if path.is_file() and path.suffix != ".lock"} == set(others)
    assert filled.clear() == 0


def test_verify_finds_what_is_wrong_and_changes_nothing(filled):
    assert filled.verify() == []
    path = filled.path(H100, "norm")
    changed(path, entries={entry(64).key: entry(64).to_json(), "width=1": [1]})
    wrong = {
        filled.path(H100, "linear"): ("garbage", "cannot be read as JSON"),
        filled.path(H100, "attention"): (TEXT, "of another operator"),
        filled.path(H100, "fp8_linear"): ('{"format": 2}', "of a later fusedops"),
        filled.path(MI300X, "norm"): (TEXT, "of another device"),
        path.with_name("norm.json.corrupt-1"): ("x", "set aside"),
    }
    for file, (text, _) in wrong.items():
        file.write_text(text)
    before = {p: p.read_bytes() for p in filled.folder.rglob("*") if p.is_file()}
    with warned():
        found = filled.verify()
    by_path = {item.path: item for item in found}
    assert len(found) == len(by_path) == 6
    assert by_path[path].key == "width=1"
    for file, (_, what) in wrong.items():
        assert by_path[file].key is None
        assert what in by_path[file].what
    assert {p: p.read_bytes() for p in filled.folder.rglob("*") if p.is_file()} == before


def norm_entry(**changes: object) -> Entry:
    """An entry that the norm operator takes, and that holds here."""
    problem = NormProblem(64, 4, "forward")
    config = NORM.default(problem, TARGETS["sm_90"])
    made = entry(problem=NORM.problem_json(problem), config=config.to_json(), versions=current_versions(NORM))
    return dataclasses.replace(made, **changes)


def test_entries_that_no_operator_takes_are_found_and_pruned(tmp_path):
    made, known = Store(tmp_path), {"norm": NORM}
    good = norm_entry(date=utc_now())
    strange = [
        norm_entry(problem={**good.problem, "flavour": 1}),
        norm_entry(problem={**good.problem, "width": 32}, config={**good.config, "num_warps": 3}),
        norm_entry(op="gone"),
    ]
    assert made.put(H100, [good, *strange])
    assert made.verify() == []
    found = made.verify(known)
    assert {(item.path.stem, item.key) for item in found} == {(wrong.op, wrong.key) for wrong in strange}
    assert {item.what for item in found} >= {
        "there is no operator gone",
        "num_warps: 3 is no size of a tile and no count",
    }
    removed = made.prune(known)
    assert {(item.op, item.key) for item in removed} == {(wrong.op, wrong.key) for wrong in strange}
    assert made.bundle() == [(H100, {"norm": by_key(good)})]


def test_prune(tmp_path):
    made, known = Store(tmp_path), {"norm": NORM}
    good = norm_entry(date=utc_now())
    assert good.problem["width"] == 64
    problems = [{**good.problem, "width": width} for width in (128, 256, 512)]
    old = dataclasses.replace(good, problem=problems[0], date="2020-01-01T00:00:00Z")
    other_kernels = dataclasses.replace(good, problem=problems[1], versions={**good.versions, "kernels": "0"})
    both = dataclasses.replace(old, problem=problems[2], versions={**good.versions, "triton": "1.0"})
    assert made.put(H100, [good, old, other_kernels, both])
    raw = content(made.path(H100, "norm"))["entries"]
    changed(made.path(H100, "norm"), entries={**raw, "width=1": 1})

    def pruned(**options):
        return {item.key: item.why for item in made.prune(dry_run=True, **options)}

    invalid = pruned()
    assert list(invalid) == ["width=1"]
    assert pruned(older_than=timedelta(days=365)).keys() == {"width=1", old.key, both.key}
    assert pruned(operators=known).keys() == {"width=1", other_kernels.key, both.key}
    everything = pruned(operators=known, older_than=timedelta(days=365))
    assert everything[other_kernels.key] == "the kernels' code is another"
    assert "Triton 1.0" in everything[both.key]
    assert "found on 2020-01-01" in everything[both.key]
    assert len(content(made.path(H100, "norm"))["entries"]) == 5  # so far it only told
    assert len(made.prune(known, timedelta(days=365))) == 4
    with warned():
        assert made.get(H100, "norm") == by_key(good)


# --- bundles


def test_export_on_one_machine_and_import_on_another(filled, tmp_path):
    filled.put(H100, [entry(64, op="linear")])
    exported = tmp_path / "export.json"
    write_bundle(exported, filled.bundle())
    other = Store(tmp_path / "other machine")
    newer = entry(64, date="2026-01-01T00:00:00Z")
    other.put(H100, [newer])
    assert other.add(read_bundle(exported))
    # Each entry is still of the GPU that it was timed on, and what was newer here stayed.
    assert other.get(H100, "norm") == by_key(newer)
    assert other.get(H100, "linear") == by_key(entry(64, op="linear"))
    assert other.get(MI300X, "norm") == by_key(entry(128))
    assert other.devices() == filled.devices()
    assert filled.bundle(H100, "linear") == [(H100, {"linear": by_key(entry(64, op="linear"))})]


def test_the_same_entries_make_the_same_file(tmp_path):
    parts = [(H100, {"norm": by_key(entry(64))}), (H100, {"linear": by_key(entry(3, op="linear"))})]
    parts += [(MI300X, {"norm": by_key(entry(128), entry(64))}), (H100, {"norm": by_key(entry(256))})]
    texts = set()
    for number, order in enumerate(itertools.permutations(parts)):
        path = tmp_path / f"{number}.json"
        write_bundle(path, order)
        texts.add(path.read_bytes())
    assert len(texts) == 1
    text = texts.pop().decode()
    value = json.loads(text)
    assert value["format"] == 1
    assert [device["device"]["name"] for device in value["devices"]] == ["MI300X", "H100"]
    assert sum('"source": "tuned"' in line for line in text.splitlines()) == 5  # a line each: differences can be read
    bundle = read_bundle(path)
    write_bundle(tmp_path / "again.json", bundle)
    assert (tmp_path / "again.json").read_text() == text
    assert dict(bundle) == dict(merge(parts))


def test_bundles_merge_to_the_better_entries():
    new, old = entry(64, date="2026-01-01T00:00:00Z"), entry(64)
    a, b = [(H100, {"norm": by_key(old, entry(128))})], [(H100, {"norm": by_key(new)}), (MI300X, {"norm": by_key(old)})]
    expected = {H100: {"norm": by_key(new, entry(128))}, MI300X: {"norm": by_key(old)}}
    assert dict(merge(a, b)) == dict(merge(b, a)) == expected
    assert a == [(H100, {"norm": by_key(old, entry(128))})]  # as it was
    assert merge() == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "JSON"),
        ("[]", "no JSON object"),
        (TEXT, 'no list of "devices"'),
        ('{"devices": []}', "not a file of fusedops"),
        ('{"format": 2, "devices": []}', "later fusedops"),
        ('{"format": 1, "devices": {}}', 'no list of "devices"'),
    ],
)
def test_what_is_no_bundle_is_refused(tmp_path, text, message):
    path = tmp_path / "bundle.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_bundle(path)
    assert path.read_text() == text  # a file that somebody named is never renamed
    with pytest.raises(FileNotFoundError):
        read_bundle(tmp_path / "nowhere.json")


def test_the_valid_part_of_a_bundle_is_read(tmp_path):
    path = tmp_path / "bundle.json"
    write_bundle(path, [(H100, {"norm": by_key(entry(64), entry(128))})])
    value = content(path)
    entries = value["devices"][0]["operators"]["norm"]
    entries[entry(64).key]["median"] = "fast"
    value["devices"][0]["operators"]["../../norm"] = entries
    value["devices"][0]["operators"]["linear"] = [1]
    value["devices"] += [1, {"device": {"name": "H100"}, "operators": {}}, {"device": H100.to_json()}]
    path.write_text(json.dumps(value))
    with warned("left out: H100: norm width=64"):
        assert read_bundle(path) == [(H100, {"norm": by_key(entry(128))})]


def test_an_invalid_entry_is_not_exported(tmp_path):
    path = tmp_path / "bundle.json"
    path.write_text("before")
    with pytest.raises(ValueError, match="median"):
        write_bundle(path, [(H100, {"norm": by_key(entry(median=-1.0))})])
    assert [p.name for p in tmp_path.iterdir()] == ["bundle.json"]
    assert path.read_text() == "before"
