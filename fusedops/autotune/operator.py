"""What the tuner knows of an operator: its problems, its configurations, how to try one, and what one costs.

Each family's ``tuning.py`` makes one :class:`Operator` for each kind of problem it has.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any, Generic, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from fusedops.runtime.device import DeviceFacts

Problem = TypeVar("Problem", bound=tuple)
C = TypeVar("C", bound="Config")

Unit = Literal["half", "fp8", "tf32", "float32"]

# Numbers of a configuration that are counts; all others are sides of a tile and numbers of warps: powers of two, or 0.
_COUNTS = frozenset({"num_stages", "splits", "programs_per_multiprocessor", "group"})
_LARGEST = 1 << 16
# Steps of a loop that are in flight, at most.
MOST_STAGES = 8
# Of a problem: more elements than any tensor has.
_LARGEST_SIZE = 1 << 62


class Config:
    """Base of the families' frozen configuration dataclasses, whose fields are ints, bools and strings only."""

    __slots__ = ()

    def to_json(self) -> dict[str, int | bool | str | None]:
        return asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_json(cls: type[C], value: object) -> C:
        """The configuration that :meth:`to_json` wrote.

        Raises:
            ValueError: it is none of this class: a field is missing or unknown, or has another type or an impossible
                value. Files come from anywhere; nothing in one is trusted.
        """
        values = checked_fields(cls, value)
        for name, number in values.items():
            if type(number) is int:
                power = number & (number - 1) == 0
                if not 0 <= number <= _LARGEST or not (power or name in _COUNTS):
                    raise ValueError(f"{name}: {number} is no size of a tile and no count")
        return cls(**values)


class Work(NamedTuple):
    """What a problem costs with a configuration, as far as it can be told before anything is compiled.

    Attributes:
        programs: blocks of threads of the kernel that takes longest.
        num_warps: warps of each.
        product: floating-point operations of matrix products, a tile's padding included.
        unit: what computes them.
        scalar: other floating-point operations, padding included.
        special: exponentials, divisions, square roots and the like.
        memory: bytes that must pass between device memory and the multiprocessors at least, everything once.
        cached: bytes that the programs read and write in all, repeated reads of neighbours included.
        shared_memory: bytes a program; 0 where the problem does not tell.
        launches: kernels that are launched.
        in_flight: bytes of loads that a program has on their way at any time; 0 where the problem does not tell.
        registers: a thread's, of what its program surely holds at once: sums, tiles; 0 where the problem does not tell.
        operands: bytes that matrix products read from shared memory in all; 0 where the problem does not tell.
        waits: how often a program has nothing to do until loads arrive, after its first ones: the steps of a loop whose
            loads are not asked for a step ahead.
        steps: of the main loop, of all programs together; 0 where the problem does not tell.
    """

    programs: int
    num_warps: int
    product: float = 0.0
    unit: Unit = "half"
    scalar: float = 0.0
    special: float = 0.0
    memory: float = 0.0
    cached: float = 0.0
    shared_memory: int = 0
    launches: int = 1
    in_flight: float = 0.0
    registers: float = 0.0
    operands: float = 0.0
    waits: float = 0.0
    steps: float = 0.0


_made: list[Operator] = []
_lock = threading.Lock()
_forgotten = 0


def forget() -> None:
    """Forget what was resolved in this process, so that the next call of each kernel looks it up again."""
    global _forgotten
    with _lock:
        _forgotten += 1
        for operator in _made:
            operator.memory.clear()


def times_forgotten() -> int:
    """How often :func:`forget` was called: what was looked up before the last time no longer holds."""
    return _forgotten


@dataclass(frozen=True, eq=False)
class Operator(Generic[Problem, C]):
    """One kind of tunable problem.

    Attributes:
        name: names the store's file and the command's ``--op``.
        problem: the key's type, a NamedTuple of ints, bools, strings and None.
        config: the configuration's type.
        default: what serves a problem on a device until something better is known; it always fits.
        space: every configuration that may be searched for a problem.
        prune: why a configuration cannot or should not serve a problem on a device; None: it can.
        work: what a problem costs with a configuration on a device, before anything is compiled.
        trials: module with the operator's :class:`fusedops.autotune.trial.Trial` (``trial_of(problem, ...)``) and
            ``problems_of``.
        sources: modules whose text decides whether a stored timing still holds: those of the kernels.
        bucketed: which fields of a problem are made coarse by :func:`fusedops.autotune.buckets.bucket`: problems that
            differ in nothing else are near.
    """

    name: str
    problem: type[Problem]
    config: type[C]
    default: Callable[[Problem, DeviceFacts], C]
    space: Callable[[Problem], Iterable[C]]
    prune: Callable[[C, Problem, DeviceFacts], str | None]
    work: Callable[[C, Problem, DeviceFacts], Work]
    trials: str
    sources: tuple[str, ...]
    bucketed: Callable[[Problem], tuple[str, ...]]
    # By device: what was resolved. One dict an operator, whose keys are bare problems: a look-up makes no tuple.
    memory: dict[DeviceFacts, dict[Problem, C]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        _made.append(self)

    def unfit(self, config: C, problem: Problem, facts: DeviceFacts) -> str | None:
        """Why a configuration, from wherever it comes, cannot serve a problem on a device; None: it can."""
        warps = getattr(config, "num_warps", 0)
        if warps * facts.warp_size > 1024:
            return "more than 1024 threads a program"
        return self.prune(config, problem, facts)

    def remember(self, facts: DeviceFacts, problem: Problem, config: C, since: int) -> None:
        """Let memory answer, unless all was forgotten since it was looked up (:func:`times_forgotten`)."""
        with _lock:
            if since == _forgotten:
                self.memory.setdefault(facts, {})[problem] = config

    def impossible(self, problem: Problem, facts: DeviceFacts) -> str | None:
        """Why no call could meet a problem, wherever it comes from; None: one could."""
        try:
            for name, value in self.problem_json(self.problem_from_json(self.problem_json(problem))).items():
                if isinstance(value, int) and abs(value) > _LARGEST_SIZE:
                    return f"{name}: {value} is no size"
            self.work(self.default(problem, facts), problem, facts)
        except Exception as error:  # each operator trips over another part of what makes no sense
            return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        return None

    def key(self, problem: Problem) -> str:
        """The problem in one line, as files and tables have it: ``width=4096 rows=8192 dtype=bfloat16 …``."""
        return problem_key(problem._asdict())  # type: ignore[attr-defined]

    def problem_json(self, problem: Problem) -> dict[str, int | bool | str | None]:
        return dict(problem._asdict())  # type: ignore[attr-defined]

    def problem_from_json(self, value: object) -> Problem:
        """The problem that :meth:`problem_json` wrote.

        Raises:
            ValueError: it is no problem of this operator.
        """
        return self.problem(**checked_fields(self.problem, value))


def problem_key(fields: Mapping[str, object]) -> str:
    """A problem's fields in one line (:meth:`Operator.key`)."""
    return " ".join(f"{name}={word(value)}" for name, value in fields.items())


def word(value: object) -> str:
    """A field's value, as keys have it."""
    if value is None:
        return "none"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def checked_fields(cls: type, value: object) -> dict[str, Any]:
    """The fields of a NamedTuple or dataclass of plain values, from JSON; ValueError says what is wrong."""
    if not isinstance(value, dict):
        raise ValueError(f"expected an object with {cls.__name__}'s fields; got {type(value).__name__}")
    kinds = _kinds(cls)
    named = cls._fields if hasattr(cls, "_fields") else tuple(f.name for f in fields(cls))
    unknown, missing = sorted(set(value) - set(named)), sorted(set(named) - set(value))
    if unknown or missing:
        parts = [f"unknown: {', '.join(map(str, unknown))}"] * bool(unknown)
        parts += [f"missing: {', '.join(missing)}"] * bool(missing)
        raise ValueError(f"{cls.__name__}: {'; '.join(parts)}")
    for name in named:
        if not _is(value[name], kinds[name]):
            raise ValueError(f"{cls.__name__}.{name}: {value[name]!r} is not {_kind(kinds[name])}")
    return {name: value[name] for name in named}


_kinds = lru_cache(maxsize=None)(get_type_hints)


def _is(value: object, kind: Any) -> bool:
    """Whether a JSON value is of an annotated kind: an exact int, bool or str, a Literal, or one of several."""
    origin = get_origin(kind)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in get_args(kind))
    if origin is Union or type(kind).__name__ == "UnionType":
        return any(_is(value, option) for option in get_args(kind))
    if kind is type(None) or kind is None:
        return value is None
    return type(value) is kind  # bool is a subclass of int


def _kind(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    return getattr(kind, "__name__", None) or str(kind).replace("typing.", "")


# Modules that make the operators. The families import this package, so it finds them by name, and only when asked.
_FAMILIES = (
    "fusedops.norm.tuning",
    "fusedops.linear.tuning",
    "fusedops.linear.tuning_gated",
    "fusedops.linear.tuning_grouped",
    "fusedops.linear.tuning_quantized",
    "fusedops.attention.tuning",
    "fusedops.attention.tuning_decode",
)


def operators() -> dict[str, Operator]:
    """Every operator by name, in the order of the families."""
    found: dict[str, Operator] = {}
    for module in map(importlib.import_module, _FAMILIES):
        found |= {value.name: value for value in vars(module).values() if isinstance(value, Operator)}
    return found


def operator_named(name: str) -> Operator:
    """fusedops' operator of a name, or a user's that this process has made; ValueError naming the known ones."""
    known = operators()
    if isinstance(name, str):
        if name in known:
            return known[name]
        for operator in reversed(_made):  # of a module that was loaded again the new one
            if operator.name == name:
                return operator
    raise ValueError(f"op must be one of {', '.join(known)}; got {name!r}")
