"""Launch configurations of the norm kernels: the problem, the space that may be searched, and the defaults."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from fusedops.autotune.buckets import bucket
from fusedops.autotune.operator import MOST_STAGES, Config, Operator, Work
from fusedops.runtime.device import DeviceFacts
from fusedops.runtime.launch import DTYPE_NAMES, ITEMSIZES, ceil_div, next_power_of_2

Direction = Literal["forward", "backward"]

# Buckets of rows end here: as many as any device has programs for at once, several times over.
MOST_ROWS = 16384
MOST_BATCH = 1024


class NormProblem(NamedTuple):
    """What a norm kernel's configuration depends on.

    Attributes:
        width: elements a row.
        itemsize: bytes of an element of the widest tensor that is read.
        direction: the forward, or the gradient.
        dropout: random numbers are drawn.
        sums: how many sums over rows the gradient makes: 0, 1 (weight or bias) or 2 (both).
        rows: how many, as a bucket up to 16,384: as many as any device has programs for at once.
        kind: which norm.
        dtype: of the input.
        weight, bias: are read. The bias of a gradient is read where it begins with the output.
        residual: the forward adds one, or the gradient begins with one's.
        from_output: the gradient begins with the output, not with what was normalised.
    """

    width: int
    itemsize: int
    direction: Direction
    dropout: bool = False
    sums: int = 0
    rows: int = MOST_ROWS
    kind: Literal["layer", "rms", "l2"] = "layer"
    dtype: str = "bfloat16"
    weight: bool = True
    bias: bool = False
    residual: bool = False
    from_output: bool = False

    @classmethod
    def of(
        cls,
        width: int,
        itemsize: int,
        direction: Direction,
        dropout: bool,
        sums: int,
        rows: int,
        kind: Any,
        dtype: torch.dtype,
        *rest: bool,
    ) -> NormProblem:
        return cls(width, itemsize, direction, dropout, sums, bucket(rows, MOST_ROWS), kind, DTYPE_NAMES[dtype], *rest)


@dataclass(frozen=True, slots=True)
class NormConfig(Config):
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
# A thread has 255 registers. A forward holds one number an element, a backward at least four.
_MOST_A_THREAD = {"forward": 128, "backward": 64}
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


# Blocks of a portable cluster (CUDA C++ programming guide), and blocks that a multiprocessor holds.
_MOST_CTAS, _MOST_PROGRAMS = 8, 32


def prune(config: NormConfig, problem: NormProblem, facts: DeviceFacts) -> str | None:
    """Why the configuration cannot or should not serve the problem on this device; None: it can."""
    if min(config.block_m, config.block_n, config.num_warps) < 1:
        return "a block or a program of nothing"
    if not 1 <= config.num_ctas <= _MOST_CTAS:
        return f"a cluster of not 1 to {_MOST_CTAS} blocks"
    if not (1 <= config.num_stages <= MOST_STAGES and 1 <= config.programs_per_multiprocessor <= _MOST_PROGRAMS):
        return f"not 1 to {MOST_STAGES} stages, or not 1 to {_MOST_PROGRAMS} programs a multiprocessor"
    if not config.looped and config.block_n < problem.width:
        return "the block is narrower than the row"
    if config.num_warps * facts.warp_size > 1024:
        return "more than 1024 threads a program"
    elements = config.block_m * config.block_n
    # The interpreter has no registers.
    if elements > held(problem) * config.num_ctas and facts.vendor != "interpreter":
        return f"more than {held(problem)} elements held in a multiprocessor's registers"
    most = _MOST_A_THREAD[problem.direction]
    if elements > most * config.num_warps * facts.warp_size * config.num_ctas and facts.vendor != "interpreter":
        return f"more than {most} elements held in a thread's registers"
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
    if facts.capability >= 100 and problem.from_output:
        num_warps = min(num_warps, 8)  # with 16 the assembler for sm_100 spills
    if not backward:
        return NormConfig(block_m, block_n, False, num_warps)
    # From 8192 elements one program fills a multiprocessor: the next row's loads must be under way meanwhile.
    alone = block_n >= _HELD_BACKWARD
    programs = 4 if num_warps <= 4 else 1 if alone else 2
    num_stages = 2 if alone and problem.itemsize == 2 and not problem.dropout else 1
    return NormConfig(block_m, block_n, False, num_warps, programs, num_stages)


class GroupNormProblem(NamedTuple):
    """What a group norm kernel's configuration depends on.

    Attributes:
        channels: channels a group.
        spatial: positions a channel, rounded up to a power of two.
        channels_last: channels, rather than positions, lie side by side in memory.
        itemsize: bytes of an input element.
        direction: the forward, or the gradient.
        batch: its members, as a bucket up to 1,024.
        groups: groups a member.
        dtype: of the input.
        weight, bias: are read.
        sums: how many sums over rows the gradient makes: 0, 1 (weight or bias) or 2 (both).
        input: the gradient computes the input's.
    """

    channels: int
    spatial: int
    channels_last: bool
    itemsize: int
    direction: Direction
    batch: int = 32
    groups: int = 32
    dtype: str = "bfloat16"
    weight: bool = True
    bias: bool = False
    sums: int = 0
    input: bool = True

    @classmethod
    def of(
        cls,
        channels: int,
        spatial: int,
        channels_last: bool,
        dtype: torch.dtype,
        direction: Direction,
        batch: int,
        groups: int,
        *rest: Any,
    ) -> GroupNormProblem:
        return cls(
            channels, next_power_of_2(spatial), channels_last, dtype.itemsize, direction, bucket(batch, MOST_BATCH),
            groups, DTYPE_NAMES[dtype], *rest,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupNormConfig(Config):
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
    if min(elements, config.num_warps) < 1:
        return "a block or a program of nothing"
    if not (1 <= config.num_stages <= MOST_STAGES and 1 <= config.programs_per_multiprocessor <= _MOST_PROGRAMS):
        return f"not 1 to {MOST_STAGES} stages, or not 1 to {_MOST_PROGRAMS} programs a multiprocessor"
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
    most = _MOST_A_THREAD[problem.direction]
    if elements > most * config.num_warps * facts.warp_size and facts.vendor != "interpreter":
        return f"more than {most} elements held in a thread's registers"
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
    # The assembler for sm_120 spills a looped backward's registers with 8 warps.
    most = 8 if looped and facts.capability < 120 else 16
    num_warps = min(max(1, num_warps), most, 1024 // facts.warp_size)
    programs = 2 if looped else 4
    # The forward's first walk waits for a sum over the tile in every step, and a backward that holds a large group
    # fills a multiprocessor alone: the next step's loads must be under way meanwhile. 16-bit groups have the room.
    alone = not looped and elements >= 4096 and problem.itemsize == 2
    num_stages = 2 if (looped if problem.direction == "forward" else alone) else 1
    return GroupNormConfig(block_n, block_c, block_s, looped, num_warps, programs, num_stages)


# Programs that may share a group; the statistics of all of them are read at once.
MAX_PARTS = 1024


def parts_of_a_row(rows: int, channels: int, spatial: int, config: GroupNormConfig, facts: DeviceFacts) -> int:
    """Among how many programs each of ``rows`` rows is divided, so that every multiprocessor has work; ≥ 1."""
    tiles = ceil_div(channels, config.block_c) * ceil_div(spatial, config.block_s)
    parts = ceil_div(facts.multiprocessor_count * config.programs_per_multiprocessor, rows)
    share = ceil_div(tiles, min(parts, tiles, MAX_PARTS))
    return ceil_div(tiles, share)


def group_backward_split(
    config: GroupNormConfig, problem: GroupNormProblem, facts: DeviceFacts, spatial: int, batch: int
) -> tuple[int, int, int]:
    """How a backward's sums are divided: (programs that share the batch, parts of a row, blocks of channels).

    ``spatial`` and ``batch`` are the sizes themselves.
    """
    blocks = ceil_div(problem.channels, config.block_c)
    steps = ceil_div(batch, config.block_n)
    # How many partial sums there are depends on the device, and on the batch only while it is small.
    programs = facts.multiprocessor_count * config.programs_per_multiprocessor // (problem.groups * blocks)
    programs = max(programs, 1)
    parts = 1
    if config.looped and programs > batch:
        tiles = ceil_div(spatial, config.block_s)
        parts = ceil_div(tiles, ceil_div(tiles, min(tiles, ceil_div(programs, batch))))
    return min(programs, steps) if problem.sums else steps, parts, blocks


# Operations an element of each norm, of a sum over rows and of dropout's ten rounds of Philox, roughly.
_OPERATIONS = {"layer": 8.0, "rms": 4.0, "l2": 4.0}
_BACKWARD_OPERATIONS, _SUM_OPERATIONS, _DROPOUT_OPERATIONS = 8.0, 4.0, 30.0


def _from_memory_again(read: float, between: float, facts: DeviceFacts) -> float:
    """How much of what is read a second time has left the cache, if ``between`` bytes pass between the two readings.

    Half of the cache is taken to be there for it.
    """
    return 0.0 if between <= facts.cache / 2 else read


def work(config: NormConfig, problem: NormProblem, facts: DeviceFacts) -> Work:
    """What a norm costs. Output and parameters are taken to have the dtype of the input, or of the output's gradient;
    a backward to compute the gradient of the input."""
    itemsize, widest = ITEMSIZES[problem.dtype], problem.itemsize
    rows, width = problem.rows, problem.width
    elements = rows * width
    blocks = ceil_div(width, config.block_n)
    steps = ceil_div(rows, config.block_m)
    padded = steps * config.block_m * blocks * config.block_n
    parameters = (problem.weight + problem.bias) * width * itemsize
    operations = _OPERATIONS[problem.kind] + _DROPOUT_OPERATIONS * problem.dropout
    tile = config.block_m * min(config.block_n, width)
    a_thread = config.block_m * config.block_n / (config.num_warps * facts.warp_size * config.num_ctas)
    written = widest if problem.residual else itemsize
    if problem.direction == "forward":
        read = itemsize + widest * problem.residual
        moved = float(elements * (read + itemsize + widest * problem.residual))
        again = elements * written if config.looped else 0
        # Between the two walks all rows that are under way pass: eight programs a multiprocessor, say.
        between = 8 * facts.multiprocessor_count * width * written
        return Work(
            programs=steps,
            num_warps=config.num_warps,
            scalar=operations * padded * (1.5 if config.looped else 1.0),
            special=2.0 * rows,
            memory=moved + parameters + _from_memory_again(again, between, facts),
            cached=moved + again + steps * parameters,
            in_flight=tile * read,
            registers=1.5 * a_thread,
            waits=2.0 * blocks - 1 if config.looped else 0.0,
        )
    saved = itemsize if problem.from_output else widest
    means = elements * (itemsize + saved)  # what the first walk reads
    read = itemsize + saved + widest * problem.residual
    moved = float(elements * (read + written))
    summed = problem.sums * (2 if config.compensated else 1)
    operations += _BACKWARD_OPERATIONS + _SUM_OPERATIONS * summed
    # As kernels_backward.norm_backward splits the rows.
    count = steps
    if problem.sums:
        programs = facts.multiprocessor_count * config.programs_per_multiprocessor // config.num_ctas
        count = max(1, min(programs // blocks, steps))
    partials = 4.0 * count * width * problem.sums
    launches, registers, special = 1 + (problem.sums > 0), (3 + summed) * a_thread, 2.0 * rows
    if config.looped:
        # The second walk goes backwards: what the first one has read last is still in the cache.
        again = max(0.0, means - facts.cache / 2)
        return Work(
            programs=count * blocks,
            num_warps=config.num_warps,
            scalar=1.5 * operations * padded,
            memory=moved + again + 2 * partials + parameters,
            cached=moved + means + 2 * partials + (steps + count) * parameters,
            in_flight=tile * read,
            launches=launches + 1,
            waits=steps / count,
            registers=registers,
            special=special,
        )
    in_flight = tile * read * config.num_stages // config.num_ctas
    return Work(
        programs=count * config.num_ctas,
        num_warps=config.num_warps,
        scalar=operations * padded,
        memory=moved + 2 * partials + parameters,
        cached=moved + 2 * partials + count * parameters,
        shared_memory=in_flight if config.num_stages > 1 and facts.vendor == "nvidia" else 0,
        launches=launches,
        in_flight=in_flight,
        waits=steps / count - 1 if config.num_stages == 1 else 0.0,
        registers=registers,
        special=special,
    )


def _run_length(config: GroupNormConfig, problem: GroupNormProblem) -> int:
    """Elements of a tile that lie side by side in memory."""
    if problem.channels_last:
        return min(config.block_c, problem.channels)
    # Channels follow one another where a tile has all positions.
    whole = config.block_s >= problem.spatial
    return min(config.block_s, problem.spatial) * (min(config.block_c, problem.channels) if whole else 1)


_SECTOR = 32  # bytes: memory is read in no smaller pieces


def group_work(config: GroupNormConfig, problem: GroupNormProblem, facts: DeviceFacts) -> Work:
    """What group norm costs. Output and parameters are taken to have the dtype of the input."""
    channels, spatial, itemsize = problem.channels, problem.spatial, problem.itemsize
    rows = problem.batch * problem.groups
    row = channels * spatial
    elements = rows * row
    tiles = ceil_div(channels, config.block_c) * ceil_div(spatial, config.block_s)
    steps = ceil_div(problem.batch, config.block_n)
    tile = config.block_n * config.block_c * config.block_s
    padded = steps * problem.groups * tiles * tile
    parameters = (problem.weight + problem.bias) * channels * problem.groups * itemsize
    sectors = max(1.0, _SECTOR / (_run_length(config, problem) * itemsize))
    operations = _OPERATIONS["layer"]
    backward = problem.direction == "backward"
    if backward:
        operations += _BACKWARD_OPERATIONS
        programs, parts, blocks = group_backward_split(config, problem, facts, problem.spatial, problem.batch)
        divided = blocks * parts > 1
        count = programs * parts * problem.groups * blocks
        read, written = 2 * elements * itemsize, elements * itemsize * problem.input
        # A second walk only makes the input's gradient.
        again = read if (config.looped or divided) and problem.input else 0
        launches = 1 + (divided and problem.input) + (problem.sums > 0)
        partials = 8.0 * programs * parts * channels * problem.groups * problem.sums
    else:
        parts = parts_of_a_row(rows, channels, spatial, config, facts) if config.looped else 1
        divided, count = parts > 1, (rows * parts if config.looped else steps * problem.groups)
        read = written = elements * itemsize
        again = read if config.looped else 0
        launches, partials = 1 + divided, 0.0
    # From one walk to the next everything passes if several programs share a row, else the rows that are under way.
    under_way = min(rows, facts.multiprocessor_count * config.programs_per_multiprocessor)
    between = read if divided else under_way * read // rows
    # Tiles that a program walks, of which the first walk's may be asked for ahead.
    walked = padded / tile * (2 if again else 1) / count - 1
    in_flight = min(tile, config.block_n * row) * itemsize * (2 if backward else 1) * config.num_stages
    return Work(
        programs=count,
        num_warps=config.num_warps,
        scalar=operations * padded * (1.5 if again else 1.0),
        special=2.0 * rows,
        memory=read + written + partials + parameters + _from_memory_again(again, between, facts),
        cached=sectors * (read + written + again) + partials + max(1, count // problem.groups) * parameters,
        shared_memory=in_flight if config.num_stages > 1 and facts.vendor == "nvidia" else 0,
        launches=launches,
        in_flight=in_flight,
        registers=(3.0 if backward else 1.5) * tile / (config.num_warps * facts.warp_size),
        waits=walked if config.num_stages == 1 else walked / 2,
    )


NORM = Operator(
    name="norm",
    problem=NormProblem,
    config=NormConfig,
    default=default_config,
    space=norm_space,
    prune=prune,
    work=work,
    trials="fusedops.norm.trials",
    sources=("fusedops.norm.kernels_forward", "fusedops.norm.kernels_backward"),
    bucketed=lambda problem: ("rows",),
)
GROUP_NORM = Operator(
    name="group_norm",
    problem=GroupNormProblem,
    config=GroupNormConfig,
    default=default_group_config,
    space=group_space,
    prune=prune_group,
    work=group_work,
    trials="fusedops.norm.trials",
    sources=("fusedops.norm.kernels_group", "fusedops.norm.kernels_group_backward"),
    bucketed=lambda problem: ("spatial", "batch"),
)
