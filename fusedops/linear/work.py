"""What the tiled products of the family cost, as far as it can be told before anything is compiled."""

from __future__ import annotations

from typing import Any

from fusedops.autotune.operator import Unit, Work
from fusedops.linear.activations import ACTIVATIONS
from fusedops.runtime.device import DeviceFacts
from fusedops.runtime.launch import ceil_div

# Instructions of the special-function unit an element, those of a(z) and of a′: exponentials, logarithms, reciprocals.
_SPECIAL = {
    "gelu": (1, 2),
    "gelu_tanh": (2, 2),
    "quick_gelu": (2, 2),
    "silu": (2, 2),
    "sigmoid": (2, 0),
    "tanh": (2, 0),
    "elu": (1, 1),
    "mish": (3, 5),
    "softplus": (2, 2),
}
_PLAIN = frozenset(ACTIVATIONS) - _SPECIAL.keys()


def cost_of(activation: str | None, derivative: bool = False) -> tuple[float, float]:
    """(ordinary, special) instructions an element of an activation or its derivative; a(z) takes about as many as a′.

    Of one that somebody registered two are taken to be special.
    """
    if activation is None:
        return 0.0, 0.0
    special = (0, 0) if activation in _PLAIN else _SPECIAL.get(activation, (2, 2))
    return ACTIVATIONS[activation].cost, special[derivative]


def unit_of(itemsize: int, tf32: bool, facts: DeviceFacts) -> Unit:
    """What multiplies in Triton's kernels: it has no tensor-core path for Turing, and TF32 is NVIDIA's."""
    if facts.vendor == "nvidia" and facts.capability < 80:
        return "float32"
    if itemsize == 2:
        return "half"
    return "tf32" if tf32 and facts.vendor == "nvidia" else "float32"


def beyond_cache(size: float, facts: DeviceFacts) -> float:
    """Bytes that one kernel leaves to the next through device memory; none where they stay in the cache."""
    return size if size > facts.cache else 0.0


def padded(config: Any, problem: Any) -> float:
    """Elements of a problem's result, the tiles' padding included."""
    block_rows, block_cols = ceil_div(problem.rows, config.rows), ceil_div(problem.cols, config.cols)
    return float(block_rows * config.rows) * (block_cols * config.cols)


def tile_work(
    config: Any,
    facts: DeviceFacts,
    *,
    rows: float,
    cols: float,
    depth: int,
    itemsizes: tuple[float, float],
    unit: Unit,
    results: float,
    shared_memory: int,
    left: int = 1,
    right: int = 1,
    parts: int = 1,
    splits: int = 1,
    groups: int = 1,
    block_rows: float | None = None,
) -> Work:
    """What the tiled kernels of the family have in common: tiles of products of (rows, depth) and (depth, cols).

    Args:
        config: a tile.
        rows, cols, depth: sizes of a group's product.
        itemsizes: bytes of an element of the left and of the right matrix.
        results: bytes that are read and written once for the result and beside it.
        left, right: left matrices that a step reads, and right ones; each of the right has sums of its own.
        parts: sums over depth / parts each that follow each other in a program.
        splits: programs a tile.
        groups: products of that size.
        block_rows: tiles in a column of them, where that is not ``rows`` divided by the tile's.
    """
    block_rows = ceil_div(int(rows), config.rows) if block_rows is None else block_rows
    tiles = groups * block_rows * ceil_div(int(cols), config.cols)
    # The programs of a tile have equal shares; the longest decides.
    steps = parts * ceil_div(ceil_div(depth // parts, config.depth), splits)
    depths = tiles * splits * steps * config.depth
    threads = config.num_warps * facts.warp_size
    # A derivative is computed from what a step has read.
    derived = 2 * config.rows * config.depth if left > 1 else 0
    step = left * min(config.rows, rows) * itemsizes[0] + right * min(config.cols, cols) * itemsizes[1]
    passed = 2.0 * splits * 4 * groups * rows * cols if splits > 1 else 0.0
    full_step = config.depth * (left * config.rows * itemsizes[0] + right * config.cols * itemsizes[1])
    once = groups * depth * (left * rows * itemsizes[0] + right * cols * itemsizes[1])
    return Work(
        programs=max(1, round(tiles * splits)),
        num_warps=config.num_warps,
        product=2.0 * right * config.rows * config.cols * depths,
        unit=unit,
        memory=once + results + beyond_cache(passed / 2, facts) * 2,
        cached=depths * step + results + passed,
        shared_memory=shared_memory,
        launches=2 if splits > 1 else 1,
        in_flight=float((config.num_stages - 1) * full_step),
        registers=(right * config.rows * config.cols + derived) / threads,
        operands=depths * _read_by_warps(config, right, itemsizes, unit, facts),
        waits=steps * (_BARRIER if config.num_stages > 1 else 1.0),
        steps=float(tiles * splits * steps),
    )


# A step's barrier and its look whether its copies are there, beside the time that a copy takes from the cache: 60 ns.
_BARRIER = 0.25


def _read_by_warps(config: Any, right: int, itemsizes: tuple[float, float], unit: Unit, facts: DeviceFacts) -> float:
    """Bytes that the warps of a tile read from shared memory for each element of depth; 0 without matrix units."""
    if unit == "float32":
        return 0.0
    # Where the left matrix is wider than the right one, this is what it is multiplied as.
    size, cols = max(itemsizes), right * config.cols
    if 90 <= facts.capability < 120 and config.rows >= 64 and config.num_warps >= 4:
        # Four warps together multiply 64 rows with all columns, straight from shared memory.
        return size * (config.rows + config.rows // 64 * cols)
    # Each warp multiplies a block of the tile: its rows are read as often as there are warps side by side.
    warps = config.num_warps
    beside = [1 << i for i in range(warps.bit_length())]
    return size * min(config.rows * n + cols * (warps // n) for n in beside)
