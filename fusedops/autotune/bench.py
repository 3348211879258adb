"""Measures candidates in this process: they are compiled, checked and timed."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fusedops.autotune.compiling import CompileReport, compile_configs
from fusedops.autotune.modes import look_up_only
from fusedops.autotune.operator import Config, Operator
from fusedops.autotune.protocol import CandidateFailed, CandidateWrong, DeviceBusy, Finished, Unmeasurable, ignore
from fusedops.autotune.resolve import using
from fusedops.autotune.timing import Sampler, Timer, timer_for
from fusedops.autotune.trial import Trial, make_trial
from fusedops.runtime.backend import backend
from fusedops.runtime.device import device_facts
from fusedops.runtime.settings import SETTINGS

# Candidates that stay ready to be timed though a call leaves them out.
_KEPT = 8


class LocalBench:
    """Measures in this process: whatever a candidate does to the process, it does to this one.

    Args:
        device: where; ``cpu`` in a process that interprets kernels.
        threads: how many candidates are compiled at once.
        timer: what times a run; by default the device's.
    """

    def __init__(self, device: torch.device, *, threads: int | None = None, timer: Timer | None = None) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._threads = threads or default_threads()
        self._timer = timer
        self._about: tuple[Operator[Any, Any], tuple] | None = None
        self._trial: Trial | None = None
        self._samplers: dict[Config, Sampler] = {}

    def open(self, operator: Operator[Any, Any], problem: tuple) -> None:
        self._forget()
        self._about = operator, problem

    def compile(
        self,
        configs: Sequence[Config],
        limit_s: float | None = None,
        finished: Finished = ignore,
        **options: Any,
    ) -> dict[Config, CompileReport]:
        """``options``: those of :func:`fusedops.autotune.compiling.compile_configs`."""
        if self._device.type != "cuda":  # the interpreter compiles nothing
            for config in configs:
                finished(config, CompileReport())
            return {config: CompileReport() for config in configs}
        facts = device_facts(self._device)
        try:
            options = {"threads": self._threads, **options}
            return compile_configs(*self._opened, facts, configs, limit_s=limit_s, finished=finished, **options)
        except (NotImplementedError, RuntimeError) as error:
            raise Unmeasurable(str(error)) from error

    def prepare(self, reference: bool = True) -> Trial:
        """Make the inputs, and what results are compared with, unless they are there already.

        Raises:
            Unmeasurable: that cannot be done.
        """
        if self._trial is None:
            operator, problem = self._opened
            try:
                self._trial = make_trial(operator, problem, self._device)
            except Exception as error:
                raise Unmeasurable(f"no inputs can be made for this problem: {_told(error)}") from error
        if reference:
            try:
                self._trial.prepare()
            except Exception as error:
                raise Unmeasurable(f"the reference cannot be computed: {_told(error)}") from error
        return self._trial

    def check(self, config: Config) -> float:
        trial = self.prepare()
        try:
            with self._candidate(config):
                began = time.perf_counter()
                with poisoned_memory():
                    results = trial.run()
                self._synchronize()
                seconds = time.perf_counter() - began
        except Exception as error:
            self._forget()
            raise CandidateFailed(_told(error)) from error
        try:
            wrong = trial.wrong(results)
        except Exception as error:
            wrong = f"its results are not those of the reference: {_told(error)}"
        if wrong is not None:
            self._forget()
            raise CandidateWrong(wrong)
        return seconds

    def time(self, configs: Sequence[Config], repeats: int) -> dict[Config, list[float] | CandidateFailed]:
        found: dict[Config, list[float] | CandidateFailed] = {config: [] for config in configs}
        with device_lock(self._device):
            for config, sample in self.samples(configs, [repeats] * len(configs)):
                seconds = found[config]
                if isinstance(sample, CandidateFailed):
                    found[config] = sample
                elif sample is not None and isinstance(seconds, list):
                    seconds.append(sample)
        return found

    def samples(
        self, configs: Sequence[Config], counts: Sequence[int]
    ) -> Iterator[tuple[Config, float | CandidateFailed | None]]:
        """Time in rounds, every other one backwards: each candidate before (None) and after each of its samples.

        What runs second may find a warmer or a throttled device: turning the order round takes that out.
        """
        if len(self._samplers) > _KEPT:  # a captured graph keeps memory of its own
            self._samplers = {config: self._samplers[config] for config in configs if config in self._samplers}
        left = dict(zip(configs, counts, strict=True))
        turn = 0
        while any(left.values()):
            order = list(configs) if turn % 2 == 0 else list(reversed(configs))
            turn += 1
            for config in order:
                if not left[config]:
                    continue
                yield config, None
                try:
                    seconds = self._sample(config)
                except CandidateFailed as error:
                    left[config] = 0
                    yield config, error
                else:
                    left[config] -= 1
                    yield config, seconds

    def close(self) -> None:
        self._forget()
        self._about = self._timer = None

    @property
    def _opened(self) -> tuple[Operator[Any, Any], tuple]:
        if self._about is None:
            raise RuntimeError("the bench has no problem: open(operator, problem) comes first")
        return self._about

    def _sample(self, config: Config) -> float:
        trial = self.prepare(reference=False)
        try:
            with self._candidate(config):
                sampler = self._samplers.get(config)
                if sampler is None:
                    if self._timer is None:
                        self._timer = timer_for(self._device)
                    sampler = self._samplers[config] = self._timer.prepare(trial.run)
                seconds = sampler()
        except Exception as error:
            self._forget()
            raise CandidateFailed(_told(error)) from error
        if not (math.isfinite(seconds) and seconds > 0):
            raise CandidateFailed(f"it was timed at {seconds} s")
        return seconds

    @contextlib.contextmanager
    def _candidate(self, config: Config) -> Iterator[None]:
        on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()
        with on_device, backend("triton"), look_up_only(), using(*self._opened, config):
            yield

    def _forget(self) -> None:
        """A candidate that went wrong may have written anywhere: its successors get inputs and a reference anew."""
        self._trial = None
        self._samplers.clear()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def lost(self) -> bool:
        """Whether the device refuses everything, as after an illegal access, until the process ends."""
        try:
            self._synchronize()
        except RuntimeError:
            return True
        return False


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within the context ``torch.empty`` is full of NaN (the largest integer): what a kernel leaves out shows."""
    deterministic: Any = torch.utils.deterministic
    before, fill = torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory
    try:
        # Not use_deterministic_algorithms, which also imports torch's compiler, to tell it: seconds in each worker.
        # Operators that have no deterministic form only warn, and not even that is wanted here.
        torch.set_deterministic_debug_mode("warn")
        deterministic.fill_uninitialized_memory = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_deterministic_debug_mode(before)
        deterministic.fill_uninitialized_memory = fill


def _told(error: BaseException, most: int = 500) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines[:5])}"[:most].removesuffix(": ")


def default_threads() -> int:
    return min(8, os.cpu_count() or 1)


# Seconds to wait for another process that times on the same device.
LOCK_S = 60.0


@contextlib.contextmanager
def device_lock(device: torch.device, wait_s: float | None = None) -> Iterator[None]:
    """One process at a time on this machine times on a device. Where no lock file can be had there is no lock.

    Raises:
        DeviceBusy: others held it for ``wait_s`` seconds (default: 60).
    """
    import filelock

    name = re.sub(r"[^\w.-]", "_", _device_name(device))
    path = SETTINGS.cache_path() / "locks" / f"{name}.lock"
    wait_s = LOCK_S if wait_s is None else wait_s
    lock = filelock.FileLock(path, timeout=wait_s)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout:
        raise DeviceBusy(f"another process has been timing on this device for {wait_s:.0f} s") from None
    except (OSError, NotImplementedError):  # a read-only folder, or a file system without locks
        yield
        return
    try:
        yield
    finally:
        lock.release()


def _device_name(device: torch.device) -> str:
    """A name that every process has for the device."""
    if device.type != "cuda":
        return device.type
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return f"{device.type}-{uuid}" if uuid is not None else pin(device).get("CUDA_VISIBLE_DEVICES", f"{device}")


def pin(device: torch.device, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that let another process see this device alone."""
    if device.type != "cuda":
        return {}
    environment = os.environ if environment is None else environment
    index = torch.cuda.current_device() if device.index is None else device.index
    if torch.version.hip is not None:
        # Also honoured by ROCm; HIP's own counts among those that it leaves.
        name = "CUDA_VISIBLE_DEVICES" if "CUDA_VISIBLE_DEVICES" in environment else "HIP_VISIBLE_DEVICES"
        return {name: _visible(environment.get(name), index) or str(index)}
    seen = _visible(environment.get("CUDA_VISIBLE_DEVICES"), index)
    if seen is not None and seen.startswith(("GPU-", "MIG-")):
        return {"CUDA_VISIBLE_DEVICES": seen}
    properties = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        # The driver tells an instance's own identifier where it runs on a part of a GPU.
        kind = "MIG" if " MIG " in f"{properties.name} " else "GPU"
        return {"CUDA_VISIBLE_DEVICES": f"{kind}-{str(uuid).removeprefix('GPU-').removeprefix('MIG-')}"}
    return {"CUDA_VISIBLE_DEVICES": seen or str(index)}


def _visible(listed: str | None, index: int) -> str | None:
    names = [name.strip() for name in (listed or "").split(",")]
    return names[index] if index < len(names) and names[index] else None
