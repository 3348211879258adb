"""Where a configuration comes from: every source in its order, and why each did not answer."""

from __future__ import annotations

import functools
import importlib.resources
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusedops.autotune.entries import Entry, mismatches
from fusedops.autotune.identity import Identity
from fusedops.autotune.operator import Config, Operator
from fusedops.autotune.store import AutotuneWarning, Store, read_bundle
from fusedops.runtime.device import DeviceFacts
from fusedops.runtime.settings import SETTINGS

_Bundle = list[tuple[Identity, dict[str, dict[str, Entry]]]]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A source that was asked.

    Attributes:
        source: which, for people: ``your store``, ``shipped with fusedops``, a file's path, …, and for which GPU.
        key: the problem whose entry was found; None: there is none.
        entry: that entry.
        reason: why it does not serve; None: it does.
    """

    source: str
    key: str | None
    entry: Entry | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Found:
    """What serves a problem.

    Attributes:
        config: the configuration.
        source: as of :class:`Attempt`; ``default``.
        entry: where it is from; None for the default.
        exact: it was searched (or, heuristically, ranked) for this very problem, on this very GPU.
        stale: what has changed since it was timed, if anything has.
        attempts: the sources that were asked before, and this one last.
    """

    config: Any
    source: str
    entry: Entry | None
    exact: bool
    stale: tuple[str, ...] = ()
    attempts: tuple[Attempt, ...] = field(default=(), repr=False)

    @property
    def tuned(self) -> bool:
        """Whether a search on this GPU, of this problem, with these kernels, has answered."""
        return self.exact and self.entry is not None and self.entry.source == "tuned" and not self.stale


def store() -> Store:
    """The user's store, under ``FUSEDOPS_CACHE_DIR``."""
    return _store(SETTINGS.cache_path() / "configs")


_store = functools.lru_cache(maxsize=None)(Store)


def look_up(operator: Operator, problem: Any, facts: DeviceFacts, *, use_stored: bool = True) -> Found:
    """The configuration of a problem on a device. It never raises: what cannot be read is passed over.

    Args:
        use_stored: False: the default, whatever is stored.
    """
    attempts: list[Attempt] = []
    if use_stored:
        asked = []
        for source, entries, same in _sources(operator, facts):
            asked.append((source, entries))
            found = _exact(operator, problem, facts, source, entries, attempts)
            if found is not None:
                config, entry, stale = found
                return Found(config, source, entry, same, stale, tuple(attempts))
        for source, entries in asked:
            found = _nearest(operator, problem, facts, source, entries, attempts)
            if found is not None:
                config, entry, stale = found
                return Found(config, f"{source}, nearest size", entry, False, stale, tuple(attempts))
    return Found(operator.default(problem, facts), "default", None, False, (), tuple(attempts))


def _sources(operator: Operator, facts: DeviceFacts) -> Iterator[tuple[str, Mapping[str, Entry], bool]]:
    """(name, entries by problem, whether they are of this very GPU), in the order in which they are asked."""
    identity = Identity.of(facts)
    yield "your store", store().get(identity, operator.name), True
    bundles = [(str(path), _bundle(path)) for path in _named_files()]
    bundles += [("shipped with fusedops", _bundle(path)) for path in shipped_files()]
    for source, bundle in bundles:
        for other, operators in bundle:
            if other.same_gpu(identity):
                yield source, operators.get(operator.name, {}), True
    for source, bundle in bundles:
        for other, operators in bundle:
            if other.same_arch(identity) and not other.same_gpu(identity):
                yield f"{source}, for {other.name} of the same architecture", operators.get(operator.name, {}), False


def _exact(
    operator: Operator,
    problem: Any,
    facts: DeviceFacts,
    source: str,
    entries: Mapping[str, Entry],
    attempts: list[Attempt],
) -> tuple[Config, Entry, tuple[str, ...]] | None:
    key = operator.key(problem)
    entry = entries.get(key)
    if entry is None:
        attempts.append(Attempt(source, None, None, "no entry"))
        return None
    return _tried(operator, problem, facts, source, key, entry, attempts)


def _nearest(
    operator: Operator,
    problem: Any,
    facts: DeviceFacts,
    source: str,
    entries: Mapping[str, Entry],
    attempts: list[Attempt],
) -> tuple[Config, Entry, tuple[str, ...]] | None:
    for key, entry in near(operator, problem, entries):
        found = _tried(operator, problem, facts, f"{source}, nearest size", key, entry, attempts)
        if found is not None:
            return found
    return None


def near(operator: Operator, problem: Any, entries: Mapping[str, Entry]) -> list[tuple[str, Entry]]:
    """(key, entry) of each other problem that differs in bucketed sizes only, the nearest in octaves first."""
    found: list[tuple[float, str, Entry]] = []
    bucketed = operator.bucketed(problem)
    wanted = operator.problem_json(problem)
    for key, entry in entries.items():
        differing = [name for name, value in wanted.items() if entry.problem.get(name, _NOTHING) != value]
        if differing and all(name in bucketed for name in differing) and len(entry.problem) == len(wanted):
            sizes = [(wanted[name], entry.problem[name]) for name in differing]
            octaves = [math.log2(a / b) for a, b in sizes if type(a) is int and type(b) is int and a > 0 < b]
            if len(octaves) == len(sizes):
                found.append((sum(map(abs, octaves)), key, entry))
    return [(key, entry) for _, key, entry in sorted(found, key=lambda item: item[:2])]


_NOTHING = object()


def _tried(
    operator: Operator,
    problem: Any,
    facts: DeviceFacts,
    source: str,
    key: str,
    entry: Entry,
    attempts: list[Attempt],
) -> tuple[Config, Entry, tuple[str, ...]] | None:
    """The entry's configuration if it can serve; else the reason is added to the attempts."""
    stale: tuple[str, ...] = ()
    try:
        config = operator.config.from_json(entry.config)
        reason = operator.unfit(config, problem, facts)
        if reason is None:
            # What nobody timed does not go stale: it was compiled, and still has to pass the operator's rules.
            stale = tuple(mismatches(entry, operator)) if entry.source == "tuned" else ()
            if stale and SETTINGS.strict:
                reason = f"FUSEDOPS_STRICT: {'; '.join(stale)}"
    except Exception as error:  # a file's values may be anything
        reason = f"{type(error).__name__}: {error}"
    attempts.append(Attempt(source, key, entry, reason))
    return None if reason is not None else (config, entry, stale)


def _named_files() -> Iterator[Path]:
    for path in SETTINGS.config_path:
        yield from sorted(path.glob("*.json")) if path.is_dir() else [path]


@functools.cache
def shipped_files() -> tuple[Path, ...]:
    """The configurations that come with fusedops, a file a GPU."""
    folder = Path(str(importlib.resources.files("fusedops"))) / "configs"
    return tuple(sorted(folder.glob("*.json")))


_bundles: dict[Path, _Bundle] = {}


def _bundle(path: Path) -> _Bundle:
    """A file's entries; none, with a warning, where it cannot be read. It is read once a process."""
    if path not in _bundles:
        _bundles[path] = []  # also where the warning is an error
        try:
            _bundles[path] = read_bundle(path)
        except (OSError, ValueError) as error:
            warnings.warn(f"fusedops leaves out {path}: {error}", AutotuneWarning, stacklevel=2)
    return _bundles[path]


def seeds(operator: Operator, problem: Any, facts: DeviceFacts) -> list[Config]:
    """Configurations that a search should try early: what is stored for this problem anywhere, and for near ones."""
    attempts: list[Attempt] = []
    sources = list(_sources(operator, facts))
    for source, entries, _ in sources:
        _exact(operator, problem, facts, source, entries, attempts)
    for source, entries, _ in sources:
        for key, entry in near(operator, problem, entries)[:2]:
            _tried(operator, problem, facts, source, key, entry, attempts)
    return _distinct(operator, attempts)


def _distinct(operator: Operator, attempts: Iterable[Attempt]) -> list[Config]:
    """A stale entry is a seed as well."""
    configs: dict[Config, None] = {}
    for attempt in attempts:
        if attempt.entry is not None and (attempt.reason is None or attempt.reason.startswith("FUSEDOPS_STRICT")):
            configs.setdefault(operator.config.from_json(attempt.entry.config))
    return list(configs)


def forget_files() -> None:
    """Read the files that ``FUSEDOPS_CONFIG_PATH`` names, and the shipped ones, again when they are asked."""
    _bundles.clear()
