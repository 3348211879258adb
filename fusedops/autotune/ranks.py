"""One rank searches, all ranks use what it found."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from fusedops.autotune.entries import Entry
from fusedops.autotune.identity import Identity
from fusedops.autotune.lookup import store
from fusedops.autotune.operator import forget, operator_named
from fusedops.autotune.record import Recorded, distinct
from fusedops.autotune.resolve import take_missed
from fusedops.autotune.search import Progress
from fusedops.autotune.tuner import KEY_BUDGET_S, recorded, tunable_device, tune
from fusedops.runtime.device import device_facts

_LOG = logging.getLogger("fusedops.autotune")


def sync(
    group: Any = None,
    problems: Iterable[Any] | None = None,
    *,
    budget_s: float | None = None,
    key_budget_s: float = KEY_BUDGET_S,
    device: torch.device | str | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[Entry]:
    """Let the ranks of a job agree: one searches what any of them has missed, the others receive what it found.

    A collective call: every rank of the group makes it, at the same point, such as after the first step. The first
    rank of the group searches, on its GPU, while the others wait; mind the group's timeout. Every rank then stores the
    entries and uses them at once. Without an initialised process group it is a :func:`tune` of what this process has
    missed.

    Args:
        group: a process group of torch.distributed; None: all ranks.
        problems: as of :func:`tune`; what this rank wants searched. None: what its kernels were called for since the
            last ``sync`` and no search had answered.
        budget_s, key_budget_s, device, progress: as of :func:`tune`, on the rank that searches.

    Returns:
        the entries, the same on every rank; those for another kind of GPU than this rank's are stored, and not used.

    Raises:
        TypeError, ValueError: this rank's ``problems`` are none.
        RuntimeError: the search failed, or another rank's ``problems`` are none; on every rank.

    Examples:
        >>> import fusedops
        >>> fusedops.autotune.sync()  # doctest: +SKIP
        >>> fusedops.autotune.sync(problems=[])  # of this rank; what others want is searched, and received here
        []
    """
    alone = not (dist.is_available() and dist.is_initialized())
    mine: list[Recorded] = []
    wrong: Exception | None = None
    try:
        mine = recorded(problems) if problems is not None else _missed()
    except Exception as mistake:
        if alone:
            raise
        wrong = mistake  # told after all ranks have met: the others wait
    if alone:
        results = tune(mine, budget_s=budget_s, key_budget_s=key_budget_s, device=device, progress=progress)
        return [result.entry for result in results if result.entry is not None]
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    gathered: list[Any] = [None] * ranks
    told = None if wrong is None else f"{type(wrong).__name__}: {wrong}"
    dist.all_gather_object(gathered, ([_plain(item) for item in mine], told), group=group)
    if wrong is not None:
        raise wrong
    for number, (_, told) in enumerate(gathered):
        if told is not None:
            raise RuntimeError(f"sync: rank {number} of the group has no problems to search: {told}")
    lists = [plain for plain, _ in gathered]
    answer: list[Any] = [None]
    if rank == 0:
        answer = [_search(lists, budget_s, key_budget_s, device, progress)]
    dist.broadcast_object_list(answer, src=dist.get_global_rank(group, 0) if group is not None else 0, group=group)
    error, identity, texts = answer[0]
    if error is not None:
        raise RuntimeError(f"sync: the search on the group's first rank failed: {error}")
    if identity is None:
        return []
    found = Identity.from_json(identity)
    entries = [Entry.from_json(text) for text in texts]
    if rank != 0:
        store().put(found, entries)
        with contextlib.suppress(RuntimeError, ValueError):  # no device here: nothing to compare with
            here = Identity.of(device_facts(tunable_device(device)))
            if entries and here != found:
                _LOG.warning("fusedops autotune: searched on %s; this rank's %s does not use that", found.key, here.key)
    forget()
    return entries


def _missed() -> list[Recorded]:
    return distinct((operator_named(name), problem) for name, problem in take_missed())


def _plain(item: Recorded) -> tuple[str, dict[str, Any]]:
    return item.operator.name, item.operator.problem_json(item.problem)


def _search(
    lists: list[list[tuple[str, dict[str, Any]]]],
    budget_s: float | None,
    key_budget_s: float,
    device: torch.device | str | None,
    progress: Callable[[Progress], None] | None,
) -> tuple[str | None, Any, list[Any]]:
    """(what went wrong, identity, entries), as JSON: the other ranks wait for an answer, whatever happens here."""
    try:
        wanted = distinct(
            (operator, operator.problem_from_json(problem))
            for operator, problem in ((operator_named(name), problem) for part in lists for name, problem in part)
        )
        if not wanted:
            return None, None, []
        where = tunable_device(device)
        results = tune(wanted, budget_s=budget_s, key_budget_s=key_budget_s, device=where, progress=progress)
        identity = Identity.of(device_facts(where)).to_json()
        return None, identity, [result.entry.to_json() for result in results if result.entry is not None]
    except Exception as error:
        return f"{type(error).__name__}: {error}", None, []
