"""``norm.py --static``: what the compiled norm kernels do to memory, read from their code. No GPU is needed.

A provider's forward and backward are called on CPU tensors while launches are written down instead of run
(:mod:`fusedops.inspection.offline`); each launch is compiled for the target and its code is read
(:mod:`fusedops.inspection.traffic`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import fusedops
from benchmarks.measure import markdown_table
from benchmarks.norm_providers import Function, Inputs, Problem, run_in
from fusedops.inspection.elements import element_bytes
from fusedops.inspection.offline import Compiled, Launch, capture_launches, compile_launch, target_facts
from fusedops.inspection.traffic import memory_traffic

TARGETS = ("sm_80", "sm_90", "gfx942")
PROVIDERS = ("fusedops", "liger")
DIRECTIONS = ("forward", "backward")
OPERATORS = ("layer_norm", "rms_norm", "add_rms_norm", "add_layer_norm")

# Enough rows that a tensor of fewer, such as one partial sum a multiprocessor, is not taken for one of the operator's.
MINIMUM_ROWS = 4096


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One kernel of an operator.

    Attributes:
        name, num_warps, registers, spill_bytes, shared: as of :class:`fusedops.inspection.offline.Compiled`.
        tile: elements that a program holds at once.
        loaded, stored: bytes an element of the operator's (rows, width) tensors; the parameters, the statistics and
            partial sums are left out. 0 where the kernel touches no such tensor.
        bits: the narrowest and the widest of these accesses, in bits a thread; None where there is none.
        all_arguments: the code did not tell the arguments apart (AMD, seldom): the figures are of all of them.
    """

    name: str
    num_warps: int
    registers: int
    spill_bytes: int
    shared: int
    tile: int
    loaded: float
    stored: float
    bits: tuple[int, int] | None
    all_arguments: bool


@dataclass(frozen=True, slots=True)
class StaticResult:
    """What one direction of an operator does, all its kernels together.

    Attributes:
        least_loaded, least_stored: bytes an element that no kernel can do without: each tensor once.
        error: why there is no figure; None: there is.
    """

    target: str
    provider: str
    operator: str
    direction: str
    width: int
    dtype: str
    least_loaded: int
    least_stored: int
    kernels: tuple[KernelReport, ...] = ()
    error: str | None = None

    @property
    def loaded(self) -> float:
        return sum(kernel.loaded for kernel in self.kernels)

    @property
    def stored(self) -> float:
        return sum(kernel.stored for kernel in self.kernels)

    @property
    def bits(self) -> tuple[int, int] | None:
        """The narrowest and the widest access to the operator's tensors."""
        found = [kernel.bits for kernel in self.kernels if kernel.bits is not None]
        return (min(low for low, _ in found), max(high for _, high in found)) if found else None

    def most(self, field: str) -> int:
        """The largest value of a field over the kernels."""
        return max((getattr(kernel, field) for kernel in self.kernels), default=0)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "loaded": self.loaded, "stored": self.stored, "bits": self.bits}

    def row(self) -> dict[str, Any]:
        """For a CSV file."""
        plain = {k: v for k, v in asdict(self).items() if k not in ("kernels", "error")}
        narrowest, widest = self.bits or (None, None)
        sums = {"loaded": self.loaded, "stored": self.stored, "narrowest_bits": narrowest, "widest_bits": widest}
        if self.error is not None:
            sums = dict.fromkeys(sums)
        resources = {name: self.most(name) for name in ("registers", "spill_bytes", "shared")}
        return {**plain, **sums, **resources, "kernels": len(self.kernels), "error": self.error}


def inspect(
    provider: str, function: Function, problem: Problem, target: str, directions: Sequence[str] = DIRECTIONS
) -> list[StaticResult]:
    """A provider's operator in each direction (``both`` has no kernels of its own), compiled for a target."""
    names = {"target": target, "provider": provider, "operator": problem.operator, "width": problem.width}
    results = []
    for direction in (one for one in DIRECTIONS if one in directions):
        least = _least(problem, direction)
        result = {
            **names, "direction": direction, "dtype": str(problem.dtype).removeprefix("torch."),
            "least_loaded": least[0], "least_stored": least[1],
        }  # fmt: skip
        try:
            kernels = tuple(
                _report(launch, compile_launch(launch, target), problem)
                for launch in _launches(direction, function, problem, target)
            )
            results.append(StaticResult(**result, kernels=kernels))
        except Exception as error:  # one that does not compile is a result; the others are still wanted
            results.append(StaticResult(**result, error=f"{type(error).__name__}: {error}".splitlines()[0][:300]))
    return results


def _least(problem: Problem, direction: str) -> tuple[int, int]:
    """Bytes an element that must be loaded and stored: forward x (and residual) → y (and their sum); backward dy, x
    (and the sum's gradient) → dx."""
    itemsize = problem.dtype.itemsize
    if direction == "forward":
        tensors = (2, 2) if problem.adds else (1, 1)
    else:
        tensors = (3, 1) if problem.adds else (2, 1)
    return tensors[0] * itemsize, tensors[1] * itemsize


def _launches(direction: str, function: Function, problem: Problem, target: str) -> list[Launch]:
    inputs = Inputs.of(problem, torch.device("cpu"), random=False)
    with fusedops.backend("triton"), _rocm(target), capture_launches(target) as launches:
        run = run_in(direction, function, inputs)
        before = len(launches)  # the forward that a backward needs
        run()
    return launches[before:]


@contextlib.contextmanager
def _rocm(target: str) -> Iterator[None]:
    """For a library that asks torch which vendor's GPUs it was built for, to choose its warps."""
    before = torch.version.hip
    if target_facts(target).vendor == "amd":
        torch.version.hip = before or "pretended"
    try:
        yield
    finally:
        torch.version.hip = before


def _report(launch: Launch, compiled: Compiled, problem: Problem) -> KernelReport:
    traffic = memory_traffic(compiled)
    arguments = {**dict(zip(launch.kernel.arg_names, launch.args, strict=False)), **launch.kwargs}
    itemsizes = {
        name: value.element_size()
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.numel() == problem.rows * problem.width
    }
    found = element_bytes(compiled, traffic, itemsizes)
    return KernelReport(
        name=compiled.name,
        num_warps=compiled.num_warps,
        registers=compiled.registers,
        spill_bytes=compiled.spill_bytes,
        shared=compiled.shared,
        **asdict(found),
    )


def table(results: list[StaticResult]) -> str:
    columns = (
        "target", "operator", "width", "direction", "provider", "loaded B", "stored B", "least B", "bits", "registers",
        "spilled B", "shared B",
    )  # fmt: skip
    return markdown_table(columns, [_row(result) for result in results])


def _row(result: StaticResult) -> tuple[str, ...]:
    head = (result.target, result.operator, str(result.width), result.direction, result.provider)
    least = f"{result.least_loaded}+{result.least_stored}"
    if result.error is not None:
        return (*head, "–", "–", least, result.error[:60], "–", "–", "–")
    low, high = result.bits or (0, 0)
    mark = "*" if any(kernel.all_arguments for kernel in result.kernels) else ""
    return (
        *head,
        f"{result.loaded:.4g}{mark}",
        f"{result.stored:.4g}{mark}",
        least,
        str(low) if low == high else f"{low} to {high}",
        *(str(result.most(name)) for name in ("registers", "spill_bytes", "shared")),
    )


NOTE = (
    "Bytes an element of the (rows, width) tensors; *: with weights, statistics and partial sums, which the code did"
    " not tell apart. least: loaded+stored, each tensor once. bits: narrowest to widest access of a thread."
)
