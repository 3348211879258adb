"""Launch configurations of the norm kernels: the problem, the space that may be searched, and the defaults."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fusedops.runtime.device import DeviceFacts
from fusedops.runtime.launch import next_power_of_2


@dataclass(frozen=True, slots=True)
class NormProblem:
    """What a norm kernel's configuration depends on. The row count is a run-time value and is not part of it.

    Attributes:
        width: elements a row.
        itemsize: bytes of an element of the widest tensor that is read.
        direction: the forward, or the gradient.
        dropout: random numbers are drawn.
        sums: how many sums over rows the gradient makes: 0, 1 (weight or bias) or 2 (both).
    """

    width: int
    itemsize: int
    direction: Literal["forward", "backward"]
    dropout: bool = False
    sums: int = 0


@dataclass(frozen=True, slots=True)
class NormConfig:
    """Attributes:
    block_m: rows a step of a program (1 where a row is wide).
    block_n: columns a block; at least the width when ``looped`` is False.
    looped: a row is walked in blocks instead of being held in registers.
    num_warps: warps a program.
    programs_per_multiprocessor: programs that share the rows of a backward, each with one partial sum of the
        weight's gradient.
    num_stages: steps of a backward's program whose loads are in flight.
    num_ctas: blocks of threads, on a multiprocessor each, that a program of the backward is made of: a cluster, which
        holds a row that is too wide for one (Hopper and later; Triton's reductions across a cluster came with 3.9).
    """

    block_m: int
    block_n: int
    looped: bool
    num_warps: int
    programs_per_multiprocessor: int = 1
    num_stages: int = 1
    num_ctas: int = 1

    @property
    def compensated(self) -> bool:
        """Whether sums over rows keep what rounding leaves out of them: where registers have room for that."""
        return self.block_m * self.block_n < _HELD_BACKWARD


# A row of up to this many bytes is held by one program of the forward: it is read once.
_HELD_BYTES = 65536
# A backward holds two rows, and a float32 sum a column for each of the gradients of weight and bias: at 16 warps of 128
# registers, all that a multiprocessor has, there is room for this many elements and the arithmetic's intermediates.
_HELD_BACKWARD = 8192
# Wider rows are walked in blocks, of which a program of the backward takes two rows at once.
_LOOP_BLOCK = {"forward": 4096, "backward": 1024}
_LOOP_ROWS = {"forward": 1, "backward": 2}


def norm_space(problem: NormProblem) -> Iterator[NormConfig]:
    """The configurations that may be searched, before they are pruned."""
    backward = problem.direction == "backward"
    whole = max(16, next_power_of_2(problem.width))
    blocks = [(whole, False)] + [(block_n, True) for block_n in (1024, 2048, 4096, 8192) if block_n < whole]
    for (block_n, looped), block_m, num_warps in itertools.product(blocks, (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32)):
        for more in itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 4)) if backward else [(1, 1, 1)]:
            yield NormConfig(block_m, block_n, looped, num_warps, *more)


def held(problem: NormProblem) -> int:
    """The widest row, in elements, that one block of threads holds."""
    if problem.direction == "forward":
        return min(_HELD_BYTES // problem.itemsize, 16384 if problem.dropout else 32768)
    return _HELD_BACKWARD


def prune(config: NormConfig, problem: NormProblem, facts: DeviceFacts) -> str | None:
    """Why the configuration cannot or should not serve the problem on this device; None: it can."""
    if not config.looped and config.block_n < problem.width:
        return "the block is narrower than the row"
    if config.num_warps * facts.warp_size > 1024:
        return "more than 1024 threads a program"
    if config.block_m * config.block_n > held(problem) * config.num_ctas:
        return f"more than {held(problem)} elements held in a multiprocessor's registers"
    if config.num_ctas > 1 and facts.capability < 90:
        return "clusters of blocks begin with sm_90"
    if config.num_ctas > 1 and (config.looped or config.block_m > 1):
        return "a cluster holds one wide row"
    if problem.direction == "forward":
        if config.looped and config.block_m > 1:
            return "a row is walked alone"
        if max(config.num_stages, config.programs_per_multiprocessor, config.num_ctas) > 1:
            return "a forward's programs take one step, alone"
    return None


def default_config(problem: NormProblem, facts: DeviceFacts) -> NormConfig:
    """A configuration that always fits, derived from the width alone. None of its numbers has been timed."""
    direction, backward = problem.direction, problem.direction == "backward"
    block_n = max(16, next_power_of_2(problem.width))
    if block_n > held(problem):
        # The interpreter's cost is an operation's, whatever the block.
        block_n = 8192 if facts.vendor == "interpreter" else _LOOP_BLOCK[direction]
        return NormConfig(_LOOP_ROWS[direction], block_n, True, 8, 4 if backward else 1)
    # Short rows share a program until it has 1024 elements; past that each thread has enough loads in flight.
    block_m = max(1, min(16, 1024 // block_n))
    per_thread = 8 if backward else 16
    num_warps = next_power_of_2(block_m * block_n // (facts.warp_size * per_thread))
    num_warps = min(max(1, num_warps), 16, 1024 // facts.warp_size)
    if not backward:
        return NormConfig(block_m, block_n, False, num_warps)
    # From 8192 elements one program fills a multiprocessor: the next row's loads must be under way meanwhile.
    alone = block_n >= _HELD_BACKWARD
    programs = 4 if num_warps <= 4 else 1 if alone else 2
    num_stages = 2 if alone and problem.itemsize == 2 and not problem.dropout else 1
    return NormConfig(block_m, block_n, False, num_warps, programs, num_stages)


@dataclass(frozen=True, slots=True)
class GroupNormProblem:
    """What a group norm kernel's configuration depends on. The batch is a run-time value and is not part of it.

    Attributes:
        channels: channels a group.
        spatial: positions a channel, rounded up to a power of two.
        channels_last: channels, rather than positions, lie side by side in memory.
        itemsize: bytes of an input element.
        direction: the forward, or the gradient.
    """

    channels: int
    spatial: int
    channels_last: bool
    itemsize: int
    direction: Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class GroupNormConfig:
    """Attributes:
    block_n: members of the batch that a program takes at once (1 where a group has many elements).
    block_c, block_s: channels and positions a tile; at least those of a group when ``looped`` is False.
    looped: a group is walked in tiles instead of being held in registers.
    num_warps: warps a program.
    programs_per_multiprocessor: how many programs a multiprocessor gets before groups stop being divided among
        several; in a backward each holds one partial sum of the parameters' gradients.
    num_stages: steps whose loads are in flight: tiles of the first of a looped group's two walks, or groups of a
        backward that holds them.
    """

    block_n: int
    block_c: int
    block_s: int
    looped: bool
    num_warps: int
    programs_per_multiprocessor: int = 2
    num_stages: int = 1


# A group of up to this many bytes is held by one program of the forward; its backward holds x and dy of this many
# elements. Both count a tile padded to powers of two.
_GROUP_HELD_BYTES = 65536
_GROUP_HELD_BACKWARD = 8192
# Elements a tile of larger groups.
_GROUP_LOOP_TILE = 4096
# Channels a tile where positions lie side by side: their sums stay in registers in the backward.
_GROUP_LOOP_CHANNELS = 64


def group_space(problem: GroupNormProblem) -> Iterator[GroupNormConfig]:
    """The configurations that may be searched, before they are pruned; a tuple of them all would be too long."""
    blocks_c, blocks_s = (
        [1 << i for i in range(next_power_of_2(size).bit_length())] for size in (problem.channels, problem.spatial)
    )
    for values in itertools.product(
        (1, 2, 4, 8, 16, 32), blocks_c, blocks_s, (False, True), (1, 2, 4, 8, 16), (1, 2, 4), (1, 2, 3)
    ):
        yield GroupNormConfig(*values)


def group_held(problem: GroupNormProblem) -> int:
    """The largest group that one program holds, in elements of a tile padded to powers of two."""
    return _GROUP_HELD_BYTES // problem.itemsize if problem.direction == "forward" else _GROUP_HELD_BACKWARD


def prune_group(config: GroupNormConfig, problem: GroupNormProblem, facts: DeviceFacts) -> str | None:
    """Why the configuration cannot or should not serve the problem on this device; None: it can."""
    elements = config.block_n * config.block_c * config.block_s
    if not config.looped and (config.block_c < problem.channels or config.block_s < problem.spatial):
        return "the tile is smaller than the group"
    if config.looped and (config.block_n > 1 or elements < 1024):
        return "a group is walked alone, in tiles of at least 1024 elements"
    if config.num_stages > 1 and not config.looped and problem.direction == "forward":
        return "a forward that holds a group takes one step"
    if config.num_warps * facts.warp_size > 1024:
        return "more than 1024 threads a program"
    if elements > group_held(problem):
        return f"more than {group_held(problem)} elements held in registers"
    return None


def default_group_config(problem: GroupNormProblem, facts: DeviceFacts) -> GroupNormConfig:
    """A configuration that always fits, derived from the size of a group and its layout."""
    block_c, block_s = next_power_of_2(problem.channels), problem.spatial
    looped = block_c * block_s > group_held(problem)
    if looped and problem.channels_last:
        block_c = min(block_c, _GROUP_LOOP_TILE)
        block_s = _GROUP_LOOP_TILE // block_c
    elif looped:
        block_c = min(block_c, max(_GROUP_LOOP_CHANNELS, _GROUP_LOOP_TILE // block_s))
        block_s = _GROUP_LOOP_TILE // block_c
    # Small groups share a program until it has 1024 elements; past that each thread has enough loads in flight.
    elements = block_c * block_s
    block_n = 1 if looped else max(1, min(32, 1024 // elements))
    per_thread = 16 if problem.direction == "forward" else 8
    num_warps = next_power_of_2(block_n * elements // (facts.warp_size * per_thread))
    num_warps = min(max(1, num_warps), 8 if looped else 16, 1024 // facts.warp_size)
    programs = 2 if looped else 4
    # The forward's first walk waits for a sum over the tile in every step, and a backward that holds a large group
    # fills a multiprocessor alone: the next step's loads must be under way meanwhile. 16-bit groups have the room.
    alone = not looped and elements >= 4096 and problem.itemsize == 2
    num_stages = 2 if (looped if problem.direction == "forward" else alone) else 1
    return GroupNormConfig(block_n, block_c, block_s, looped, num_warps, programs, num_stages)
