"""Launch configurations of the norm kernels: the problem, the space that may be searched, and the defaults."""

from __future__ import annotations

from dataclasses import dataclass

from fusedops.runtime.device import DeviceFacts
from fusedops.runtime.launch import next_power_of_2


@dataclass(frozen=True, slots=True)
class NormProblem:
    """What a norm kernel's configuration depends on. The row count is a run-time value and is not part of it.

    Attributes:
        width: elements a row.
        itemsize: bytes of an input element.
        backward: the gradient kernel rather than the forward.
    """

    width: int
    itemsize: int
    backward: bool


@dataclass(frozen=True, slots=True)
class NormConfig:
    """Attributes:
    block_m: rows a step of a program (1 where a row is wide).
    block_n: columns a block; at least the width when ``looped`` is False.
    looped: a row is walked in blocks instead of being held in registers.
    num_warps: warps a program.
    programs_per_multiprocessor: programs that share the rows of a backward, each with one partial sum of the
        weight's gradient.
    """

    block_m: int
    block_n: int
    looped: bool
    num_warps: int
    programs_per_multiprocessor: int = 1


# Elements of float32 that one program holds at once before it walks a row in blocks. Forward: x alone. Backward:
# x, dy, weight and two sums live together.
_HELD_FORWARD = 16384
_HELD_BACKWARD = 8192
_LOOP_BLOCK = 4096

SPACE = tuple(
    NormConfig(block_m, block_n, looped, num_warps, programs)
    for block_m in (1, 2, 4, 8, 16)
    for block_n in (64, 256, 1024, 2048, 4096, 8192, 16384)
    for looped in (False, True)
    for num_warps in (1, 2, 4, 8, 16)
    for programs in (1, 2, 4)
)


def prune(config: NormConfig, problem: NormProblem, facts: DeviceFacts) -> str | None:
    """Why the configuration cannot or should not serve the problem on this device; None: it can."""
    if not config.looped and config.block_n < problem.width:
        return "the block is narrower than the row"
    if not config.looped and config.block_n >= 2 * max(problem.width, 16):
        return "more than half of the block is padding"
    if config.num_warps * facts.warp_size > 1024:
        return "more than 1024 threads a program"
    held = _HELD_BACKWARD if problem.backward else _HELD_FORWARD
    if config.block_m * config.block_n > held:
        return f"more than {held} elements held in registers"
    return None


def default_config(problem: NormProblem, facts: DeviceFacts) -> NormConfig:
    """A configuration that always fits, derived from the width alone."""
    held = _HELD_BACKWARD if problem.backward else _HELD_FORWARD
    block_n = max(16, next_power_of_2(problem.width))
    looped = block_n > held
    if looped:
        block_n = _LOOP_BLOCK
    # Short rows share a program until it has 1024 elements; past that each thread has enough loads in flight.
    block_m = max(1, min(16, 1024 // block_n))
    per_thread = 8 if problem.backward else 16
    limit = 1024 // facts.warp_size if problem.backward or block_n < held else 512 // facts.warp_size
    num_warps = min(max(1, next_power_of_2(block_m * block_n // (facts.warp_size * per_thread))), limit, 16)
    programs = 4 if num_warps <= 4 else 2 if num_warps <= 8 else 1
    return NormConfig(block_m, block_n, looped, num_warps, programs)
