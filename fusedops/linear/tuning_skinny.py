"""The skinny kernel's configuration: how narrow and how deep its tiles are, and how many steps are on their way."""

from __future__ import annotations

from fusedops.linear.tuning import SKINNY_ROWS, LinearConfig, LinearProblem
from fusedops.runtime.device import DeviceFacts
from fusedops.runtime.launch import ceil_div, next_power_of_2

# Bytes of the weight that a multiprocessor should have on their way, from this capability on. Little's law: its share
# of the memory's bandwidth times the memory's latency, 4.8 TB/s · 0.7 µs / 132 = 25 KB on an H200, 13 KB on an A100,
# 7 KB on an RTX 5090; half as much again and more, for not every program is reading all the time.
_ON_THEIR_WAY = {90: 40 << 10, 80: 32 << 10, 0: 16 << 10}

# (columns, depth in bytes, warps), widest first: 16 KB of the weight a step, 8 KB the last. Compiled for sm_90, an
# instruction of a warp handles 42 bytes of a 16-bit weight in the widest and 23 in the narrowest; an H200's
# multiprocessor reads 21 a clock, and issues four instructions.
_MATRIX = ((64, 256, 4), (32, 512, 4), (16, 512, 2))
_MULTIPLY_ADD = ((32, 512, 4), (16, 1024, 4))  # of one row
_MULTIPLY_ADD_ROWS = ((32, 256, 4), (16, 256, 4))  # of up to 16 rows
# Loads of single elements: each has an address in a register or two.
_UNALIGNED = ((32, 128, 4), (16, 128, 4))


def skinny_config(problem: LinearProblem, facts: DeviceFacts) -> LinearConfig:
    """A configuration of the skinny kernel for a forward product of at most 16 rows; it always fits.

    The widest tile that occupies three quarters of the multiprocessors, which together can read as fast as the memory;
    of the narrowest, several programs a tile where even that does not. As many stages as keep enough bytes on their
    way.
    """
    if facts.vendor == "interpreter":
        return LinearConfig(SKINNY_ROWS, 64, 64, 1, 4, group=1, kernel="skinny")
    matrix = _has_matrix_instructions(problem, facts)
    rows = SKINNY_ROWS if matrix or problem.rows > 1 else 1
    tiles: tuple[tuple[int, int, int], ...]
    if not problem.aligned:
        tiles = _UNALIGNED
    elif matrix:
        tiles = _MATRIX
    else:
        tiles = _MULTIPLY_ADD if rows == 1 else _MULTIPLY_ADD_ROWS
    chosen = tiles[-1]
    for tile in tiles:
        if 4 * ceil_div(problem.cols, tile[0]) >= 3 * facts.multiprocessor_count:
            chosen = tile
            break
    cols, depth_bytes, num_warps = chosen
    depth = min(depth_bytes // problem.itemsize, max(16, next_power_of_2(problem.depth)))
    programs = ceil_div(problem.cols, cols)
    splits = 1
    # At least four steps a program: the first bytes come late, and the sums cost a launch.
    while 4 * programs * splits < 3 * facts.multiprocessor_count and 8 * splits * depth <= problem.depth:
        splits *= 2
    resident = max(1, programs * splits // facts.multiprocessor_count)
    stages = _stages(rows, cols, depth * problem.itemsize, resident, problem, facts)
    return LinearConfig(rows, cols, depth, stages, num_warps, group=1, splits=splits, kernel="skinny")


def _has_matrix_instructions(problem: LinearProblem, facts: DeviceFacts) -> bool:
    """Whether Triton makes a product of this dtype and precision from the device's matrix instructions."""
    if facts.vendor == "amd":
        return problem.itemsize == 2 or facts.arch.startswith("gfx9")
    return facts.capability >= 80 and (problem.itemsize == 2 or problem.tf32)


def _stages(rows: int, cols: int, depth_bytes: int, resident: int, problem: LinearProblem, facts: DeviceFacts) -> int:
    """Steps in flight, one of which is being multiplied."""
    if facts.capability < 80 or not problem.aligned:  # no copies that pass the registers by
        return 2
    wanted = next(size for least, size in _ON_THEIR_WAY.items() if facts.capability // 10 * 10 >= least)
    if facts.shared_memory < 128 << 10:  # devices with GDDR memory
        wanted = _ON_THEIR_WAY[0]
    stages = 3 if 3 * (rows + cols) * depth_bytes <= facts.shared_memory else 2
    while (
        (stages - 1) * cols * depth_bytes * resident < wanted
        and (stages + 1) * (rows + cols) * depth_bytes <= facts.shared_memory
        and stages < 6
    ):
        stages += 1
    return stages
