"""A problem with inputs of its own: what the tuner launches, checks and times, never a user's tensors."""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from fusedops.autotune.operator import Operator


class Trial(ABC):
    """Inputs of a problem on a device, and what is done with them.

    A family's trials module has one subclass for each of its operators, made by ``trial_of(problem, device, empty)``.
    Inputs have the strides that the problem tells of (row-major where it tells nothing), sizes that belong to the
    problem's bucket (its largest member), and numbers drawn from a generator with a fixed seed, of the size that a
    network has. With ``empty`` nothing is drawn or computed: tensors are ``torch.empty``, to be compiled for another
    device and never read.
    """

    _limits: list[tuple[torch.Tensor, float]] | None = None

    @abstractmethod
    def run(self) -> Sequence[torch.Tensor]:
        """Launch the operator, with the configuration that :func:`fusedops.autotune.resolve.resolve` answers.

        Returns new tensors every time, those that this problem's kernel computes and no others. Inputs are not written.
        """

    @abstractmethod
    def plain(self) -> Sequence[torch.Tensor]:
        """The same results by torch's own operators in the same dtypes: how far rounding alone may be off."""

    @abstractmethod
    def exact(self) -> Sequence[torch.Tensor]:
        """The same results in float32 or better, from the same inputs."""

    def compared(self, results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The part of the results that :meth:`plain` and :meth:`exact` compute; all of them unless overridden."""
        return results

    def prepare(self) -> None:
        """Compute what :meth:`wrong` compares with, once.

        Raises:
            ValueError: it is not finite.
        """
        if self._limits is None:
            self._limits = [_limit(p, e) for p, e in zip(self.plain(), self.exact(), strict=True)]

    def wrong(self, results: Sequence[torch.Tensor]) -> str | None:
        """Why results of :meth:`run` are wrong by the error rule; None: they are right.

        ``max|x - exact| ≤ 3 · max|plain - exact| + 4 ulp``, an ulp being that of the result's dtype at the largest
        value. NaN and infinities where exact has none are wrong.
        """
        self.prepare()
        assert self._limits is not None
        for index, (result, (exact, limit)) in enumerate(zip(self.compared(results), self._limits, strict=True)):
            if result.shape != exact.shape:
                return f"result {index} has shape {tuple(result.shape)}, not {tuple(exact.shape)}"
            if exact.numel() == 0:
                continue
            error = (result.to(exact.dtype) - exact).abs().max().item()
            if not error <= limit:
                return f"result {index} is off by {error:.3g}; rounding explains {limit:.3g}"
        return None


class Numbers:
    """Makes a trial's inputs, on a device, with a fixed seed; on the meta device without any memory or numbers.

    A meta tensor has all that a launch is specialised on, and torch's own operators compute nothing on it.

    Attributes:
        device: where.
        generator: what draws; None on the meta device.
    """

    def __init__(self, device: torch.device, empty: bool = False) -> None:
        self.device = torch.device("meta") if empty else device
        self.generator = None if self.device.type == "meta" else torch.Generator(device).manual_seed(1234)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def normal(self, *shape: int, dtype: torch.dtype, mean: float = 0.0, deviation: float = 1.0) -> torch.Tensor:
        """Contiguous, normally distributed."""
        return self.fill(self.empty(*shape, dtype=dtype), mean, deviation)

    def fill(self, tensor: torch.Tensor, mean: float = 0.0, deviation: float = 1.0) -> torch.Tensor:
        return tensor if self.generator is None else tensor.normal_(mean, deviation, generator=self.generator)

    def seed(self) -> torch.Tensor:
        """One int64, for dropout."""
        made = self.empty(1, dtype=torch.int64)
        return made if self.generator is None else made.random_(generator=self.generator)


def _limit(plain: torch.Tensor, exact: torch.Tensor) -> tuple[torch.Tensor, float]:
    if exact.numel() == 0:
        return exact, 0.0
    error = (plain.to(exact.dtype) - exact).abs().max().item()
    if not math.isfinite(error):  # any result would pass, or none
        raise ValueError("the results of torch's own operators are not finite: nothing can be compared with them")
    return exact, 3 * error + 4 * torch.finfo(plain.dtype).eps * exact.abs().max().item()


def make_trial(operator: Operator, problem: tuple, device: torch.device, empty: bool = False) -> Trial:
    """The trial of a problem.

    Raises:
        NotImplementedError: no inputs can be made for it; the message says why.
    """
    return importlib.import_module(operator.trials).trial_of(problem, device, empty)
