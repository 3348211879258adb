"""An operator made up for tests: doubling numbers. Its configurations differ in how they go wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from fusedops.autotune.operator import Config, Operator, Work
from fusedops.autotune.resolve import resolve
from fusedops.autotune.trial import Trial
from fusedops.runtime.device import DeviceFacts

WAYS = ("right", "raises", "wrong", "nothing", "hangs", "exits", "impossible", "prints")


class Doubling(NamedTuple):
    n: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class DoublingConfig(Config):
    """``way``: what running it does. ``block``: milliseconds of the processor's time that it takes."""

    way: Literal["right", "raises", "wrong", "nothing", "hangs", "exits", "aborts", "impossible", "prints", "once"] = (
        "right"
    )
    block: int = 8
    num_warps: int = 4
    num_stages: int = 1


def prune(config: DoublingConfig, problem: Doubling, facts: DeviceFacts) -> str | None:
    return "it is impossible" if config.way == "impossible" else None


def work(config: DoublingConfig, problem: Doubling, facts: DeviceFacts) -> Work:
    return Work(1, config.num_warps, scalar=1e9 * config.block, memory=8 * problem.n)


class DoublingTrial(Trial):
    def __init__(self, problem: Doubling, device: torch.device, empty: bool) -> None:
        self.problem, self.device = problem, device
        make = torch.empty if empty else torch.ones
        self.input = make(problem.n, device=device)

    def run(self) -> Sequence[torch.Tensor]:
        config = resolve(DOUBLING, self.problem, self.device)
        output = torch.empty_like(self.input)
        end = time.process_time() + config.block / 1000
        while time.process_time() < end:
            pass
        if config.way == "raises":
            raise ValueError("this configuration raises")
        if config.way == "hangs":
            time.sleep(1000)
        if config.way == "exits":
            os._exit(3)
        if config.way == "aborts":
            os.abort()
        if config.way == "prints":
            os.write(1, b'{"right": true}\n')  # as the compiler's libraries do
            print('{"right": true}', flush=True)
        if config.way == "once":  # crashes once: an accident. The note names the file that remembers.
            try:
                with open(self.problem.note, "x"):
                    os._exit(4)
            except FileExistsError:
                pass
        if config.way == "nothing":
            return (output,)
        torch.mul(self.input, 2.01 if config.way == "wrong" else 2, out=output)
        return (output,)

    def plain(self) -> Sequence[torch.Tensor]:
        return (self.input * 2,)

    def exact(self) -> Sequence[torch.Tensor]:
        return (self.input.double() * 2,)


def trial_of(problem: Doubling, device: torch.device, empty: bool = False) -> Trial:
    if problem.note == "no inputs":
        raise NotImplementedError("nobody can make inputs for it")
    return DoublingTrial(problem, device, empty)


DOUBLING = Operator(
    name="doubling",
    problem=Doubling,
    config=DoublingConfig,
    default=lambda problem, facts: DoublingConfig(),
    space=lambda problem: [DoublingConfig(block=2), *map(DoublingConfig, WAYS)],
    prune=prune,
    work=work,
    trials="tests.autotune.made_up",
    sources=(),
    bucketed=lambda problem: ("n",),
)
