"""Launch configurations of the quantised products: the problems, the defaults, and how they are chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusedops.runtime.device import TARGETS, DeviceFacts
from fusedops.runtime.launch import ceil_div, next_power_of_2


@dataclass(frozen=True, slots=True)
class Fp8Problem:
    """A float8 product, result (rows, cols) summed over depth. Make it with :meth:`of`.

    Attributes:
        rows, cols, depth: its sizes, each rounded up to a power of two, so that near problems are one problem.
        aligned: the operands can be read in vectors.
        exact: multiplied as float16, for a float32 result on tensor cores that sum float8 less precisely.
    """

    rows: int
    cols: int
    depth: int
    aligned: bool
    exact: bool

    @classmethod
    def of(cls, rows: int, cols: int, depth: int, *, aligned: bool = True, exact: bool = False) -> Fp8Problem:
        rows, cols, depth = map(next_power_of_2, (rows, cols, depth))
        return cls(rows, cols, depth, aligned, exact)


@dataclass(frozen=True, slots=True)
class QuantizedProblem:
    """A product with an int8 or int4 weight, result (rows, cols) summed over depth. Make it with :meth:`of`.

    Attributes:
        rows, cols, depth: its sizes, each rounded up to a power of two.
        step: the largest power of two, up to 128, that divides what has one scale (a group, or all of the depth).
        bits: of a weight.
        itemsize: bytes of an input's element.
        tf32: float32 inputs are multiplied on TF32 tensor cores.
        aligned: the operands can be read in vectors.
    """

    rows: int
    cols: int
    depth: int
    step: int
    bits: int
    itemsize: int
    tf32: bool
    aligned: bool

    @classmethod
    def of(
        cls,
        rows: int,
        cols: int,
        depth: int,
        *,
        step: int,
        bits: int,
        itemsize: int = 2,
        precision: str = "ieee",
        aligned: bool = True,
    ) -> QuantizedProblem:
        rows, cols, depth = map(next_power_of_2, (rows, cols, depth))
        step = min(step & -step, 128) if step else 128
        return cls(rows, cols, depth, step, bits, itemsize, itemsize == 4 and precision != "ieee", aligned)


@dataclass(frozen=True, slots=True)
class QuantizedConfig:
    """Attributes:
    rows, cols: the tile of the result that a program owns.
    depth: how much of the summed dimension a step takes.
    num_stages: steps in flight.
    num_warps: warps a program.
    splits: programs that share a tile's summed dimension; more than one leaves sums to a second kernel.
    group: block rows a patch of neighbouring programs covers.
    """

    rows: int
    cols: int
    depth: int
    num_stages: int
    num_warps: int
    splits: int = 1
    group: int = 8


_C = QuantizedConfig  # (rows, cols, depth, num_stages, num_warps)
_Tiles = tuple[QuantizedConfig, ...]

# Loads of single elements: each has an address in a register or two, whatever the device.
_UNALIGNED_FP8 = (_C(64, 64, 32, 2, 4),)
_UNALIGNED_HALF = (_C(64, 64, 32, 2, 4), _C(16, 64, 32, 2, 4))
_UNALIGNED_FULL = (_C(32, 64, 16, 2, 4), _C(16, 64, 16, 2, 4))


@dataclass(frozen=True, slots=True)
class Defaults:
    """Tiles of one architecture, each tuple from large to small: the largest that suits the problem is taken.

    Attributes:
        fp8: float8 operands (empty where there are none).
        exact: float8 operands multiplied as float16.
        half: 16-bit inputs and an int8 or int4 weight. The last is for few rows: deep steps, several in flight.
        full: float32 inputs; tf32: on TF32 tensor cores.
        unaligned: 16-bit inputs that are read an element at a time.
    """

    fp8: _Tiles
    exact: _Tiles
    half: _Tiles
    full: _Tiles
    tf32: _Tiles
    unaligned: _Tiles = _UNALIGNED_HALF


_FULL = (_C(32, 64, 32, 2, 4), _C(16, 64, 32, 2, 4))
_TF32 = (_C(64, 64, 32, 3, 4), _C(16, 64, 64, 3, 4))
_ADA = Defaults(
    fp8=(_C(128, 128, 64, 3, 8), _C(64, 64, 128, 3, 4), _C(16, 64, 128, 4, 4), _C(16, 32, 128, 4, 4)),
    exact=(_C(64, 64, 64, 3, 4), _C(16, 64, 128, 3, 4)),
    half=(_C(64, 128, 64, 3, 8), _C(64, 64, 64, 3, 4), _C(16, 64, 128, 4, 4)),
    full=_FULL,
    tf32=_TF32,
)
_HOPPER = Defaults(
    # Four warps multiply 64 rows, however few there are; thin tiles for few rows, so that all multiprocessors read.
    fp8=(_C(128, 128, 128, 4, 8), _C(64, 128, 128, 4, 4), _C(64, 32, 128, 4, 4)),
    exact=(_C(128, 128, 64, 3, 8), _C(64, 64, 128, 3, 4)),
    half=(_C(128, 128, 128, 3, 8), _C(64, 128, 128, 3, 8), _C(16, 128, 128, 4, 4)),
    full=_FULL,
    tf32=_TF32,
)

# Where a search starts, and what runs until one was made. Chosen by what the compiler makes of them: no spilt
# register, weights that are read 16 bytes at a time, and few instructions a weight.
DEFAULTS: dict[str, Defaults] = {
    "sm_75": Defaults(
        fp8=(),
        exact=(),
        half=_UNALIGNED_FULL,
        full=_UNALIGNED_FULL,
        tf32=(),
        unaligned=_UNALIGNED_FULL,
    ),
    "sm_80": _ADA,
    "sm_89": _ADA,
    "sm_90": _HOPPER,
    "sm_100": _HOPPER,
    "gfx942": Defaults(
        fp8=(_C(128, 128, 128, 2, 8), _C(64, 64, 128, 2, 4), _C(16, 64, 128, 2, 4)),
        exact=(),
        half=(_C(64, 128, 64, 2, 8), _C(64, 64, 64, 2, 4), _C(16, 64, 128, 2, 4)),
        full=_FULL,
        tf32=(),
    ),
    "gfx1100": Defaults(
        fp8=(),
        exact=(),
        half=(_C(64, 64, 32, 2, 4), _C(16, 64, 64, 2, 4)),
        full=_UNALIGNED_FULL,
        tf32=(),
    ),
    # Its cost is an operation's, whatever the block: few large blocks.
    "interpreter": Defaults(
        fp8=(_C(64, 64, 64, 1, 4),),
        exact=(_C(64, 64, 64, 1, 4),),
        half=(_C(64, 64, 64, 1, 4),),
        full=(_C(64, 64, 64, 1, 4),),
        tf32=(_C(64, 64, 64, 1, 4),),
    ),
}


def sums_in_float32(facts: DeviceFacts) -> bool:
    """Whether the matrix instructions of float8 sum in full float32.

    Those of sm_89, sm_90 and sm_120 align the products of a sum and keep about 13 bits below its largest (Zhang et al.
    2024, "SageAttention2", section 3.4; DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3.2).
    """
    return not (facts.vendor == "nvidia" and (facts.capability < 100 or facts.capability >= 120))


def defaults_for(facts: DeviceFacts) -> Defaults:
    """The table's entry for a device, known or not: the nearest older relative's."""
    if facts.vendor == "amd":
        return DEFAULTS["gfx942" if facts.arch.startswith("gfx9") else "gfx1100"]
    if facts.vendor == "interpreter":
        return DEFAULTS["interpreter"]
    capability = facts.capability
    if capability < 80:
        return DEFAULTS["sm_75"]
    if 90 <= capability < 120 and facts.shared_memory >= TARGETS["sm_90"].shared_memory:
        return DEFAULTS["sm_100" if capability >= 100 else "sm_90"]
    return DEFAULTS["sm_80" if capability < 89 else "sm_89"]


def default_fp8_config(problem: Fp8Problem, facts: DeviceFacts) -> QuantizedConfig:
    """A configuration that always fits: the largest tile of the table that leaves no multiprocessor idle."""
    defaults = defaults_for(facts)
    tiles = defaults.exact if problem.exact else defaults.fp8
    if not problem.aligned and facts.vendor != "interpreter":
        tiles = _UNALIGNED_FP8
    return _largest(tiles, problem.rows, problem.cols, facts)


def default_quantized_config(problem: QuantizedProblem, facts: DeviceFacts) -> QuantizedConfig:
    """A configuration that always fits; where few rows make few tiles, their summed dimension is split."""
    defaults = defaults_for(facts)
    if problem.itemsize == 4:
        tiles = defaults.tf32 if problem.tf32 and defaults.tf32 else defaults.full
    else:
        tiles = defaults.half
    if not problem.aligned and facts.vendor != "interpreter":
        tiles = _UNALIGNED_FULL if problem.itemsize == 4 else defaults.unaligned
    config = _largest(tiles, problem.rows, problem.cols, facts)
    # A step of the matrix instructions takes 16; a summed dimension that 16 does not divide ends in a mask.
    depth = min(config.depth, problem.step) if problem.step >= 16 else min(config.depth, 32)
    return replace(config, depth=depth, splits=_splits(problem, config, depth, facts))


def _largest(tiles: _Tiles, rows: int, cols: int, facts: DeviceFacts) -> QuantizedConfig:
    fitting = [c for c in tiles if c.rows < 2 * max(rows, 16) and c.cols < 2 * max(cols, 64)] or [tiles[-1]]
    # A tile of fewer than 64 rows only where there are no more rows: it reads the weight once for few.
    fitting = [c for c in fitting if c.rows >= min(rows, 64)] or fitting
    for config in fitting:
        if ceil_div(rows, config.rows) * ceil_div(cols, config.cols) >= facts.multiprocessor_count:
            return config
    return fitting[-1]


def _splits(problem: QuantizedProblem, config: QuantizedConfig, depth: int, facts: DeviceFacts) -> int:
    """As many that two programs a multiprocessor read the weight, each at least four steps of it."""
    if problem.rows > 64:
        return 1
    tiles = ceil_div(problem.rows, config.rows) * ceil_div(problem.cols, config.cols)
    wanted = ceil_div(2 * facts.multiprocessor_count, tiles)
    return max(1, min(wanted, problem.depth // (4 * depth), 32))
