"""Launch configurations of decoding: the problem, the space that may be searched, and the defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from fusedops.attention.tuning import MOST_HEADS, head_block
from fusedops.autotune.buckets import bucket
from fusedops.autotune.operator import MOST_STAGES, Config, Operator, Work
from fusedops.runtime.device import DeviceFacts
from fusedops.runtime.launch import ITEMSIZES, ceil_div, next_power_of_2

# Buckets of sizes end here.
MOST_SIZE = 1 << 20
# Rows of a tile, at most: registers hold a row of the result for each.
_MOST_ROWS = 64
# Keys that are worth a program of their own: fewer cost more to merge than they save.
_FEWEST_KEYS = 128
MOST_SPLITS = 128


class DecodeProblem(NamedTuple):
    """What decoding's configuration depends on. Make it with :meth:`of`.

    Attributes:
        d_k, d_v: head sizes of keys and values.
        size: tokens of a sequence that a query can see, as a bucket up to 2²⁰: the cache's, or the window's.
        heads: key heads of the whole batch, as a bucket up to 1,024.
        queries: rows that share a key head, a power of two from 16 to 64, which stands for all more.
        dtype: of the queries.
        cache_dtype: of keys and values.
        precision: of float32 products, ``ieee`` or one of TF32's; ``ieee`` for others.
        page: 0 for a cache without pages; else the largest power of two that divides a page, at most 128: what of a
            tile lies together.
    """

    d_k: int
    d_v: int
    size: int
    heads: int
    queries: int
    dtype: str
    cache_dtype: str
    precision: str
    page: int

    @classmethod
    def of(
        cls,
        d_k: int,
        d_v: int,
        size: int,
        *,
        heads: int = 32,
        queries: int = 1,
        dtype: str = "bfloat16",
        cache_dtype: str | None = None,
        precision: str = "ieee",
        page: int = 0,
    ) -> DecodeProblem:
        return cls(
            d_k, d_v, bucket(size, MOST_SIZE), bucket(heads, MOST_HEADS), min(head_block(queries), _MOST_ROWS), dtype,
            cache_dtype or dtype, precision, min(page & -page, 128),
        )  # fmt: skip

    @property
    def block_dk(self) -> int:
        """The head size of keys as kernels hold it: a power of two, at least 16."""
        return head_block(self.d_k)

    @property
    def block_dv(self) -> int:
        return head_block(self.d_v)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the queries."""
        return ITEMSIZES[self.dtype]

    @property
    def cache_itemsize(self) -> int:
        return ITEMSIZES[self.cache_dtype]


@dataclass(frozen=True, slots=True)
class DecodeConfig(Config):
    """Attributes:
    block_m: rows a tile, at most: a problem of fewer takes fewer.
    block_n: keys a tile.
    num_warps: warps a program.
    num_stages: tiles in flight in the software pipeline.
    programs_per_multiprocessor: how many programs the keys are divided among, where there are fewer key heads.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int = 2

    def shared_memory(self, problem: DecodeProblem, facts: DeviceFacts) -> int:
        """Bytes of shared memory, at most about: tiles in flight, one in the queries' dtype, queries and weights."""
        rows = min(self.block_m, problem.queries)
        tile = self.block_n * (problem.block_dk + problem.block_dv)
        stages = self.num_stages if facts.vendor != "amd" else max(self.num_stages - 1, 0)
        converted = self.block_n * max(problem.block_dk, problem.block_dv) * problem.itemsize
        held = rows * (problem.block_dk * problem.itemsize + self.block_n * problem.itemsize)
        return stages * tile * problem.cache_itemsize + converted + held

    def registers(self, problem: DecodeProblem, warp_size: int) -> float:
        """Registers a thread that the sums and the tile of scores take alone."""
        rows = min(self.block_m, problem.queries)
        return rows * (problem.block_dv + self.block_n) / (self.num_warps * warp_size)


SPACE = tuple(
    DecodeConfig(_MOST_ROWS, block_n, num_warps, num_stages, programs)
    for block_n in (16, 32, 64, 128)
    for num_warps in (2, 4, 8)
    for num_stages in (1, 2, 3, 4)
    for programs in (1, 2, 4)
)


def prune(config: DecodeConfig, problem: DecodeProblem, facts: DeviceFacts) -> str | None:
    """Why the configuration cannot or should not serve the problem on this device; None: it can."""
    if min(config.block_m, config.block_n) < 16:
        return "a side of the tile is shorter than a matrix instruction's"
    if config.num_warps < 1 or not 1 <= config.num_stages <= MOST_STAGES:
        return f"no warp, or not 1 to {MOST_STAGES} stages"
    if config.programs_per_multiprocessor < 1:
        return "no program a multiprocessor"
    if config.block_n > max(16, next_power_of_2(problem.size)):
        return "the tile is larger than the problem"
    if config.shared_memory(problem, facts) > facts.shared_memory:
        return f"more than {facts.shared_memory} bytes of shared memory"
    most = {"nvidia": 160, "amd": 300, "interpreter": math.inf}[facts.vendor]
    if config.registers(problem, facts.warp_size) > most:
        return "sums and scores do not fit in registers"
    return None


C = DecodeConfig
# (bytes an element of the queries, head sizes up to) -> configuration. Starting points, none of them timed yet;
# tests/compile compiles them. The work is to read the cache: tiles of about 16 KB, two or three of them in flight.
# float32 products in full precision are not made by tensor cores: their operands take registers.
_DEFAULTS = {
    (2, 64): C(64, 64, 4, 3),
    (2, 128): C(64, 64, 4, 3),
    (2, 256): C(32, 32, 4, 2),
    (4, 64): C(32, 32, 4, 2),
    (4, 128): C(16, 16, 4, 2),
    (4, 256): C(16, 16, 4, 2),
}
# Matrix operands are held twice in RDNA's registers.
_RDNA = C(16, 16, 8, 1)


def too_small_to_decode(facts: DeviceFacts, d: int, dv: int, itemsize: int) -> str | None:
    """Why no configuration suits heads of these sizes on a device; None: one does."""
    if _is_rdna(facts) and itemsize == 4 and max(d, dv) > 128:
        return f"{facts.arch}: float32 heads of more than 128 do not fit in its registers"
    return None


def _is_rdna(facts: DeviceFacts) -> bool:
    return facts.vendor == "amd" and not facts.arch.startswith("gfx9")


def default_config(problem: DecodeProblem, facts: DeviceFacts) -> DecodeConfig:
    """The table's configuration, made smaller until it suits the problem and fits."""
    size = max(64, problem.block_dk, problem.block_dv)
    config = _DEFAULTS[problem.itemsize, size]
    if facts.vendor == "interpreter":
        return replace(config, block_m=_MOST_ROWS, block_n=32)
    if _is_rdna(facts):
        return _RDNA
    if problem.itemsize == 4 and problem.cache_itemsize == 1:  # each number is converted and held in four bytes
        config = C(16, 16, 8, 1)
    elif problem.queries > 32 and size >= 128:
        config = replace(config, num_warps=8)
        if 100 <= facts.capability < 120:  # with three it spills
            config = replace(config, num_stages=2)
    config = replace(config, block_n=min(config.block_n, max(16, next_power_of_2(problem.size))))
    if facts.vendor == "nvidia" and facts.capability < 80:  # loads wait: nothing passes the registers by
        config = replace(config, num_stages=1, block_n=min(config.block_n, 32))
    while config.shared_memory(problem, facts) > facts.shared_memory and (config.num_stages, config.block_n) > (1, 16):
        if config.num_stages > 1:
            config = replace(config, num_stages=config.num_stages - 1)
        else:
            config = replace(config, block_n=config.block_n // 2)
    return config


def splits_for(config: DecodeConfig, problem: DecodeProblem, tiles: int, facts: DeviceFacts) -> int:
    """Among how many programs the keys of a head are divided: so that all multiprocessors have some to read.

    By the sizes that a problem tells of, so that all calls of one problem add up in the same order.
    """
    wanted = ceil_div(config.programs_per_multiprocessor * facts.multiprocessor_count, problem.heads * tiles)
    return max(1, min(wanted, problem.size // _FEWEST_KEYS, MOST_SPLITS))


def work(config: DecodeConfig, problem: DecodeProblem, facts: DeviceFacts) -> Work:
    """What decoding with a full cache costs: it is read once."""
    rows = min(config.block_m, problem.queries)
    splits = splits_for(config, problem, 1, facts)
    tiles = problem.heads * ceil_div(problem.size, config.block_n)
    tile = config.block_n * (problem.d_k + problem.d_v) * problem.cache_itemsize
    scores = float(tiles * rows * config.block_n)
    parts = 4.0 * problem.heads * problem.queries * (problem.d_v + 1) * splits if splits > 1 else 0.0
    memory = float(tiles * tile) + 2 * parts
    full_precision = problem.itemsize == 4 and problem.precision == "ieee"
    return Work(
        programs=problem.heads * splits,
        num_warps=config.num_warps,
        product=2.0 * scores * (problem.block_dk + problem.block_dv),
        unit="half" if problem.itemsize == 2 else "float32" if full_precision else "tf32",
        scalar=6.0 * scores,
        special=scores,
        memory=memory,
        cached=memory,
        shared_memory=config.shared_memory(problem, facts),
        launches=2 if splits > 1 else 1,
        in_flight=tile * max(config.num_stages - 1, 0.5),
        registers=config.registers(problem, facts.warp_size),
        waits=tiles / (problem.heads * splits) if config.num_stages == 1 else 0.0,
    )


DECODE = Operator(
    name="attention_decode",
    problem=DecodeProblem,
    config=DecodeConfig,
    default=default_config,
    space=lambda problem: SPACE,
    prune=prune,
    work=work,
    trials="fusedops.attention.trials_decode",
    sources=("fusedops.attention.kernels_decode",),
    bucketed=lambda problem: ("size", "heads"),
)
