"""The store among processes: many writers, writers that are killed, disks that are full or read-only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest

from fusedops.autotune.entries import AutotuneWarning
from fusedops.autotune.store import Store
from tests.autotune.made_entries import H100, MI300X, by_key, entry

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="this system cannot fork: the tests divide processes so"
)

PRELUDE = """
import json, os, random, resource, signal, sys, time, warnings
import filelock  # once, not in every child
from pathlib import Path
from fusedops.autotune.entries import AutotuneWarning
from fusedops.autotune.store import Store
from tests.autotune.made_entries import H100, MI300X, by_key, entry

warnings.simplefilter("error", AutotuneWarning)
folder = Path(sys.argv[1])

def in_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child

def wait_for(children):
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)
"""


def started(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


OPS = [f"toy_{number}" for number in range(20)]
WRITES = 200

HAMMER = """
first, writes, ops = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]

def write(writer):
    store = Store(folder)
    store.lock_seconds = 200.0  # what is tested is that nothing is lost, on however slow a machine
    for number in range(writes):
        made = entry(writer * writes + number, op=ops[number % len(ops)], candidates=())
        assert store.put((H100, MI300X)[number // len(ops) % 2], [made])

wait_for([in_child(lambda: write(first + writer)) for writer in range(4)])
"""


def test_eight_processes_that_write_at_once_lose_nothing(tmp_path):
    """200 writes each, one entry a write, all to the same forty files, while this process reads them."""
    processes = [started(HAMMER, tmp_path, first, WRITES, *OPS) for first in (0, 4)]
    reader, seen = Store(tmp_path), 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutotuneWarning)
        while any(process.poll() is None for process in processes):
            now = sum(len(reader.get(device, op)) for device in (H100, MI300X) for op in OPS)
            assert now >= seen  # what was once there stays
            seen = now
            time.sleep(0.5)
        for process in processes:
            output(process)
        expected = {(device, op): {} for device in (H100, MI300X) for op in OPS}
        for writer in range(8):
            for number in range(WRITES):
                made = entry(writer * WRITES + number, op=OPS[number % len(OPS)], candidates=())
                expected[(H100, MI300X)[number // len(OPS) % 2], made.op][made.key] = made
        assert sum(map(len, expected.values())) == 1600
        for (device, op), entries in expected.items():
            assert reader.get(device, op) == Store(tmp_path).get(device, op) == entries
    assert reader.verify() == []
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {f"{op}.json" for op in OPS} | {f".{op}.lock" for op in OPS}


KILL = """
kills, draw = int(sys.argv[2]), random.Random(1)
written, unfinished, left = [], 0, 0

for _ in range(kills):
    told, tell = os.pipe()
    first = written[-1] + 2 if written else 0  # the one after the last may be there or not

    def write():
        store = Store(folder)
        for width in range(first, first + 10_000):
            assert store.put(H100, [entry(width, candidates=())])
            os.write(tell, f"{width}\\n".encode())

    child = in_child(write)
    os.close(tell)
    begun = os.read(told, 1 << 16)  # the first entry is there
    time.sleep(draw.uniform(0.0, 0.015))
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    while more := os.read(told, 1 << 16):
        begun += more
    os.close(told)
    written += map(int, begun.decode().split())
    last = written[-1]
    left += len(list(folder.glob("*/.*.tmp")))
    found = Store(folder).get(H100, "norm")  # a warning would be an error
    unfinished += len(found) > len(written)
    written += [last + 1] * (entry(last + 1).key in found)  # it was killed before it could tell
    assert found == by_key(*(entry(width, candidates=()) for width in written))
print(json.dumps({"written": written, "unfinished": unfinished, "left": left}))
"""


def test_a_writer_killed_at_any_moment_leaves_a_readable_file(tmp_path):
    """Fifty kills: what put() had returned for is there each time, and the next writer goes on at once."""
    report = json.loads(output(started(KILL, tmp_path, 50)))
    assert len(report["written"]) >= 50
    made = Store(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutotuneWarning)
        assert made.get(H100, "norm") == by_key(*(entry(width, candidates=()) for width in report["written"]))
        assert made.put(H100, [entry(10**6)])
    assert made.verify() == []  # temporary files of killed writers are gone with the next write
    assert report["left"] + report["unfinished"] > 0  # some were killed in the midst of a write


FULL = """
store = Store(folder)
assert store.put(H100, [entry(64)])  # and what is imported late is imported
before = store.path(H100, "norm").read_bytes()
warnings.simplefilter("always")

def full():
    # The system's own error in the midst of writing, as a full disk's: no file may have more than this many bytes.
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100,) * 2)
    with warnings.catch_warnings(record=True) as caught:
        for width in (128, 256):
            assert not store.put(H100, [entry(width)])
        assert store.get(H100, "norm") == by_key(entry(64), entry(128), entry(256))
    (warning,) = caught
    assert issubclass(warning.category, AutotuneWarning) and "File too large" in str(warning.message), warning

wait_for([in_child(full)])
assert store.path(H100, "norm").read_bytes() == before
assert store.verify() == []

def read_only():
    if os.getuid() == 0:  # root may write anywhere
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    with warnings.catch_warnings(record=True) as caught:
        assert not store.put(H100, [entry(128)])
        assert not store.put(MI300X, [entry(128)])
        assert store.get(H100, "norm") == by_key(entry(64), entry(128))
        assert store.get(MI300X, "norm") == by_key(entry(128))
    (warning,) = caught
    assert issubclass(warning.category, AutotuneWarning) and "ermission denied" in str(warning.message), warning

for path in (store.path(H100, "norm").parent, folder):
    path.chmod(0o555)
wait_for([in_child(read_only)])
assert store.path(H100, "norm").read_bytes() == before
for path in (folder, store.path(H100, "norm").parent):
    path.chmod(0o755)
assert store.put(H100, [entry(128)])
assert Store(folder).get(H100, "norm") == by_key(entry(64), entry(128))
"""


def test_a_full_disk_and_a_read_only_folder_leave_all_in_memory():
    # Not pytest's folder: that is the user's alone, and root has to become somebody else here.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        output(started(FULL, Path(folder) / "store"))
