"""What a search measures with, as far as it knows: a bench, and what may go wrong on one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fusedops.autotune.compiling import CompileReport
from fusedops.autotune.operator import Config, Operator


class CandidateFailed(Exception):  # noqa: N818
    """A candidate cannot be used: it raised, hung, or crashed its process. The message says which and how."""


class CandidateWrong(CandidateFailed):
    """A candidate's results are wrong. The message says by how much."""


class Unmeasurable(Exception):  # noqa: N818
    """Nothing can be measured for this problem on this device, whatever the candidate. The message says why."""


class DeviceBusy(Unmeasurable):
    """Another process kept timing on this device for as long as we would wait."""


class CannotSpawn(Exception):  # noqa: N818
    """No worker process can be had for this operator and device. The message says why."""


Finished = Callable[[Config, CompileReport], None]


def ignore(config: Config, report: CompileReport) -> None:
    pass


class Bench(Protocol):
    """Compiles, checks and times the candidates of one problem after the other, on one device."""

    def open(self, operator: Operator[Any, Any], problem: tuple) -> None:
        """Take up a problem: what follows is about its candidates.

        Raises:
            Unmeasurable: no candidate can be run.
        """

    def compile(
        self, configs: Sequence[Config], limit_s: float | None = None, finished: Finished = ignore
    ) -> dict[Config, CompileReport]:
        """What each compiles to; ``finished`` is called with each as it is done with.

        Those missing were not begun within ``limit_s`` seconds; the first always is.

        Raises:
            Unmeasurable: no candidate can be compiled.
        """

    def check(self, config: Config) -> float:
        """Compare what it computes with the reference. Returns seconds that its run took, all preparations included.

        Raises:
            CandidateWrong: it is wrong.
            CandidateFailed: it cannot be run.
            Unmeasurable: no candidate can be run.
        """

    def time(self, configs: Sequence[Config], repeats: int) -> dict[Config, list[float] | CandidateFailed]:
        """Seconds that each takes, ``repeats`` times, in rounds in which each has its turn; or why one failed.

        Raises:
            Unmeasurable: no candidate can be run, or (DeviceBusy) timed.
        """

    def close(self) -> None:
        """Give back what is held, and end what is running. The bench may be opened again."""
