"""Lasting groups of processes for tests of what is distributed: started once, each test's part sent to them.

A test gives a function of a module and its arguments to :meth:`Ranks.run`; every process calls it as
``function(rank, world, *args)`` in a default process group (gloo) of its own, on torch's operators unless the function
opens ``fusedops.backend("triton")``, and the results come back in the order of the ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.patching.vision import FOLDER

# What the processes have from the beginning: one server loads it, in seconds, and they are forked from that.
_LOADED = [
    "fusedops",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "tests.harness.interpreter",
]
# How long a test may take in all, and how much longer the other processes may after one has failed: they mostly wait
# for it in vain.
_PATIENCE, _GRACE = 120.0, 3.0


class RankError(AssertionError):
    """A process failed; the message holds each failed process' traceback."""


class Ranks:
    """``world`` processes, started at the first use, and anew after a failure."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[tuple[Any, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(rank, world, *args)`` in each process.

        Tensors may be arguments and results. The generator is seeded alike in all processes.

        Raises:
            RankError: a process raised, ended, or took too long.
        """
        if not self._processes:
            self._start()
        call = pickle.dumps((function, args, torch.initial_seed()))
        waiting: dict[Any, int] = {}
        for rank, (_, connection) in enumerate(self._processes):
            with contextlib.suppress(BrokenPipeError):  # it ended; so says what it sends no more
                connection.send_bytes(call)
            waiting[connection] = rank
        results: list[Any] = [None] * self.world
        failures: dict[int, str] = {}
        until = time.monotonic() + _PATIENCE
        while waiting:
            ready = wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                failures |= dict.fromkeys(waiting.values(), "gave no answer in time")
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    right, result = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    right, result = False, "the process ended"
                if right:
                    results[rank] = result
                else:
                    failures[rank] = result
                    until = min(until, time.monotonic() + _GRACE)
        if failures:
            self.close()
            raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
        return results

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_LOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="fusedops-ranks-", ignore_cleanup_errors=True)
        with _without(FOLDER):
            for rank in range(self.world):
                ours, theirs = context.Pipe()
                arguments = rank, self.world, self._folder.name, theirs
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self._processes.append((process, ours))

    def close(self) -> None:
        """End the processes; the next call starts others."""
        for _, connection in self._processes:
            connection.close()
        for process, _ in self._processes:
            process.kill()  # it holds nothing that is to be put in order, which takes seconds
            process.join()
        self._processes.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


@contextlib.contextmanager
def _without(folder: Path) -> Iterator[None]:
    """Processes started meanwhile do not look into a folder that is for those alone that have prepared for it."""
    before = sys.path[:]
    sys.path[:] = [path for path in before if path != str(folder)]
    try:
        yield
    finally:
        sys.path[:] = before


def _serve(rank: int, world: int, folder: str, connection: Connection) -> None:
    import fusedops
    from fusedops.runtime.backend import HAS_TRITON
    from fusedops.runtime.settings import SETTINGS

    if SETTINGS.interpret and HAS_TRITON:
        from tests.harness.interpreter import install

        install()
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    patience = datetime.timedelta(seconds=_PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
    while True:
        try:
            function, args, seed = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            torch.manual_seed(seed)
            with fusedops.backend("torch"):
                answer = pickle.dumps((True, function(rank, world, *args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)
