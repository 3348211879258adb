"""Candidates compiled for a GPU that is not there; the tests' compile worker runs :func:`find`."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from fusedops.autotune.operator import Config, Operator, Work
from fusedops.autotune.resolve import resolve
from fusedops.autotune.trial import Trial
from fusedops.runtime.device import DeviceFacts, device_facts
from fusedops.runtime.launch import options


@triton.jit
def squares_kernel(X, Y, N: tl.constexpr, SEED: tl.constexpr):
    """y = x xᵀ + SEED, which makes kernels differ."""
    i = tl.arange(0, N)
    x = tl.load(X + i[:, None] * N + i[None, :])
    tl.store(Y + i[:, None] * N + i[None, :], tl.dot(x, tl.trans(x)) + SEED)


class Squares(NamedTuple):
    seed: int


@dataclass(frozen=True, slots=True)
class SquaresConfig(Config):
    n: int = 64
    num_warps: int = 4
    way: Literal["right", "raises", "sleeps"] = "right"
    most_registers: int = 0


class SquaresTrial(Trial):
    def __init__(self, problem: Squares, device: torch.device) -> None:
        self.problem, self.device = problem, device

    def run(self) -> Sequence[torch.Tensor]:
        config = resolve(SQUARES, self.problem, self.device)
        if config.way == "raises":
            raise ValueError("the launcher refuses it")
        if config.way == "sleeps":
            time.sleep(1.0)
        x = torch.empty(config.n, config.n, dtype=torch.float16, device=self.device)
        y = torch.empty(config.n, config.n, device=self.device)
        more = {"maxnreg": config.most_registers} if config.most_registers else {}
        squares_kernel[(1,)](x, y, config.n, self.problem.seed, **options(config.num_warps), **more)
        return (y,)

    def plain(self) -> Sequence[torch.Tensor]:
        raise NotImplementedError

    exact = plain


def trial_of(problem: Squares, device: torch.device, empty: bool = False) -> Trial:
    return SquaresTrial(problem, device)


SQUARES = Operator(
    name="squares",
    problem=Squares,
    config=SquaresConfig,
    default=lambda problem, facts: SquaresConfig(),
    space=lambda problem: [SquaresConfig()],
    prune=lambda config, problem, facts: None,
    work=lambda config, problem, facts: Work(1, config.num_warps),
    trials="tests.autotune.compile_probes",
    sources=(),
    bucketed=lambda problem: (),
)

# A device that no table has.
FACTS = DeviceFacts("nvidia", "sm_80", "A100 with half of everything", 54, 166912)


def find() -> dict[str, Any]:
    from fusedops.autotune.compiling import compile_config, compile_configs, report_of
    from fusedops.inspection.offline import compile_launch

    small, large, broken = SquaresConfig(), SquaresConfig(128), SquaresConfig(way="raises")
    uncompilable, spilling = SquaresConfig(num_warps=0), SquaresConfig(most_registers=32)
    configs = [small, large, broken, uncompilable, spilling]
    began: list[Config] = []
    finished: list[Config] = []
    elsewhere: list[str] = []
    stop = threading.Event()

    def another_thread() -> None:
        """Neither its device nor its output changes meanwhile."""
        while not stop.wait(0.001):
            elsewhere.append(device_facts(torch.device("cpu")).arch)
            sys.stdout.write("")

    output, driver = sys.stdout, _active_driver()
    thread = threading.Thread(target=another_thread)
    thread.start()
    reports = compile_configs(
        SQUARES, Squares(1), FACTS, configs, threads=2, started=began.append,
        finished=lambda config, report: finished.append(config),
    )  # fmt: skip
    stop.set()
    thread.join()
    found: dict[str, Any] = {
        "reports": [reports[config].to_json() for config in configs],
        "kernels": [[kernel.name for kernel in reports[config].kernels] for config in configs],
        "targets": reports[small].kernels[0].target,
        "as one": report_of(reports[small].kernels + reports[large].kernels).shared == reports[large].shared,
        "began": sorted(map(configs.index, began)),
        "finished": sorted(map(configs.index, finished)),
        "elsewhere": sorted(set(elsewhere)),
        "as before": sys.stdout is output and _active_driver() is driver,
    }
    # Not begun in time: all but the first.
    found["in no time"] = len(compile_configs(SQUARES, Squares(2), FACTS, configs[:2], threads=1, limit_s=0.0))
    sleeping = SquaresConfig(way="sleeps")
    slow = compile_configs(SQUARES, Squares(1), FACTS, [sleeping], threads=2, each_s=0.2)
    found["too slow"] = slow[sleeping].to_json()
    found["serialised"] = _serialised(compile_config, compile_launch)
    found["cache hits"] = _cache_hits(compile_configs)
    return found


def _active_driver() -> Any:
    from triton.runtime.driver import driver

    return getattr(driver, "_active", None)


def _serialised(compile_config: Any, compile_launch: Any) -> Any:
    """With an assembler that complains of a kernel that multiplies with wgmma: a Hopper GPU's instruction."""
    from unittest import mock

    said = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to"
        " insufficient register resources for the wgmma pipeline in function 'squares_kernel'\n"
    )
    hopper = DeviceFacts("nvidia", "sm_90", "H100", 132, 232448)
    trial = trial_of(Squares(1), torch.device("cpu"), True)
    answers = []
    for text in (said, "ptxas info    : Used 40 registers\n"):
        with mock.patch("fusedops.autotune.compiling.ptxas_report", lambda ptx, capability, text=text: text):
            answers.append(compile_config(SQUARES, Squares(1), hopper, SquaresConfig(), trial).warnings)
    return answers


class _RealDriver:
    """What a launch asks a GPU's driver before it has a kernel."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 80, 32)


def _cache_hits(compile_configs: Any) -> list[bool]:
    """Whether launches find in Triton's disk cache what was compiled before."""
    from unittest import mock

    from triton import knobs
    from triton.runtime.driver import driver

    hits: list[bool] = []
    compile_configs(SQUARES, Squares(4), FACTS, [SquaresConfig(32)], threads=1)
    x, y = torch.zeros(32, 32, dtype=torch.float16), torch.zeros(32, 32)
    listener = lambda *, src, metadata, metadata_group, times, cache_hit: hits.append(cache_hit)  # noqa: E731
    name = "_active" if hasattr(driver, "_active") else "active"
    with mock.patch.object(driver, name, _RealDriver()), mock.patch.object(knobs.compilation, "listener", listener):
        for number in (4, 5 + torch.randint(1 << 20, ()).item()):  # the second is new in every run
            squares_kernel.run(x, y, 32, number, grid=(1,), warmup=True, **options(4))
    return hits
