"""Launch configurations of the quantised products: the problems, the space that may be searched, the defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from fusedops.autotune.buckets import bucket
from fusedops.autotune.operator import Config, Operator, Work
from fusedops.linear.tuning import MOST_ROWS, tile_unfit
from fusedops.linear.work import cost_of, tile_work, unit_of
from fusedops.runtime.backend import float8_dtypes
from fusedops.runtime.device import TARGETS, DeviceFacts
from fusedops.runtime.launch import ITEMSIZES, ceil_div

RowScales = Literal["no", "input", "weight", "both"]


class Fp8Problem(NamedTuple):
    """A float8 product, result (rows, cols) summed over depth. Make it with :meth:`of`.

    Attributes:
        rows, cols, depth: M, as a bucket up to 131,072; N and K.
        dtype, weight_dtype, out_dtype: of the input, the weight and the result.
        row_scales: the input, or the weight, has a scale a row: ``no``, ``input``, ``weight`` or ``both``.
        activation: what the kernel applies to the result.
        bias: the result gets one.
        aligned: the operands can be read in vectors.
        exact: multiplied as float16, for a float32 result on tensor cores that sum float8 less precisely.
    """

    rows: int
    cols: int
    depth: int
    dtype: str
    weight_dtype: str
    out_dtype: str
    row_scales: RowScales
    activation: str | None
    bias: bool
    aligned: bool
    exact: bool

    @classmethod
    def of(
        cls,
        rows: int,
        cols: int,
        depth: int,
        *,
        dtype: str = "float8_e4m3fn",
        weight_dtype: str | None = None,
        out_dtype: str = "bfloat16",
        row_scales: RowScales = "no",
        activation: str | None = None,
        bias: bool = False,
        aligned: bool = True,
        exact: bool = False,
    ) -> Fp8Problem:
        return cls(
            bucket(rows, MOST_ROWS), cols, depth, dtype, weight_dtype or dtype, out_dtype, row_scales, activation, bias,
            aligned, exact,
        )  # fmt: skip


class QuantizedProblem(NamedTuple):
    """A product with an int8 or int4 weight, result (rows, cols) summed over depth. Make it with :meth:`of`.

    Attributes:
        rows, cols, depth: M, as a bucket up to 131,072; N and K.
        group: how many inputs share a scale; 0: all of a row.
        bits: of a weight.
        dtype, out_dtype: of the input and of the result.
        activation: what the kernel applies to the result.
        bias: the result gets one.
        tf32: float32 inputs are multiplied on TF32 tensor cores.
        aligned: the operands can be read in vectors.
    """

    rows: int
    cols: int
    depth: int
    group: int
    bits: int
    dtype: str
    out_dtype: str
    activation: str | None
    bias: bool
    tf32: bool
    aligned: bool

    @classmethod
    def of(
        cls,
        rows: int,
        cols: int,
        depth: int,
        *,
        group: int,
        bits: int,
        dtype: str = "bfloat16",
        out_dtype: str | None = None,
        activation: str | None = None,
        bias: bool = False,
        precision: str = "ieee",
        aligned: bool = True,
    ) -> QuantizedProblem:
        tf32 = dtype == "float32" and precision != "ieee"
        return cls(
            bucket(rows, MOST_ROWS), cols, depth, group, bits, dtype, out_dtype or dtype, activation, bias, tf32,
            aligned,
        )  # fmt: skip

    @property
    def itemsize(self) -> int:
        """Bytes of an input's element."""
        return ITEMSIZES[self.dtype]

    @property
    def step(self) -> int:
        """The largest power of two, up to 128, that divides what has one scale."""
        size = self.group or self.depth
        return min(size & -size, 128) if size else 128


@dataclass(frozen=True, slots=True)
class QuantizedConfig(Config):
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

    def shared_memory(self, problem: QuantizedProblem | Fp8Problem) -> int:
        """Bytes of shared memory, at most about: the steps in flight, one of which is turned into what is multiplied,
        or the result on its way out."""
        if isinstance(problem, Fp8Problem):
            step = (self.rows + self.cols) * self.depth
        else:
            step = self.depth * (self.rows * problem.itemsize + self.cols * problem.bits // 8)
        return max(self.num_stages * step, self.rows * self.cols * ITEMSIZES[problem.out_dtype])


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
    if not tiles or (not problem.aligned and facts.vendor != "interpreter"):
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
    tiles = max(1, ceil_div(problem.rows, config.rows) * ceil_div(problem.cols, config.cols))
    wanted = ceil_div(2 * facts.multiprocessor_count, tiles)
    return max(1, min(wanted, problem.depth // (4 * depth), 32))


_QUANTIZED_SPACE = tuple(
    QuantizedConfig(rows, cols, depth, num_stages, num_warps, splits, group)
    for rows in (16, 32, 64, 128)
    for cols in (32, 64, 128, 256)
    for depth in (16, 32, 64, 128)
    for num_stages in (2, 3, 4, 5)
    for num_warps in (2, 4, 8)
    for splits in (1, 2, 4, 8, 16)
    for group in (1, 8)
)
_FP8_SPACE = tuple(
    QuantizedConfig(rows, cols, depth, num_stages, num_warps, 1, group)
    for rows in (16, 32, 64, 128, 256)
    for cols in (32, 64, 128, 256)
    for depth in (32, 64, 128, 256)
    for num_stages in (2, 3, 4, 5)
    for num_warps in (2, 4, 8)
    for group in (1, 8)
)


def quantized_space(problem: QuantizedProblem) -> tuple[QuantizedConfig, ...]:
    """Every configuration that may be searched; :func:`prune_quantized` says which of them serve a problem."""
    return _QUANTIZED_SPACE


def prune_quantized(config: QuantizedConfig, problem: QuantizedProblem, facts: DeviceFacts) -> str | None:
    """Why the configuration cannot or should not serve the problem on this device; None: it can."""
    if problem.group % max(config.depth, 1):
        return "a step would span two groups of weights"
    unfit = tile_unfit(config, problem, facts, free=(16, 128))
    if unfit is not None:
        return unfit
    if config.splits > 32:
        return "more than 32 programs a tile"
    if config.splits > 1 and config.splits * config.depth * 4 > problem.depth:
        return "fewer than four steps a program"
    return None


def quantized_work(config: QuantizedConfig, problem: QuantizedProblem, facts: DeviceFacts) -> Work:
    """What the problem costs with the configuration, all its kernels together."""
    rows, cols, depth = problem.rows, problem.cols, problem.depth
    result = float(rows) * cols
    scales = 4.0 * cols * (depth // problem.group if problem.group else 1)
    made = tile_work(
        config, facts, rows=rows, cols=cols, depth=depth, itemsizes=(problem.itemsize, problem.bits / 8),
        unit=unit_of(problem.itemsize, problem.tf32, facts), splits=config.splits,
        results=result * ITEMSIZES[problem.out_dtype] + scales, shared_memory=config.shared_memory(problem),
    )  # fmt: skip
    # A weight is turned into a number in two instructions, once for every block of rows; a group's scale multiplies
    # the sums of each step.
    weights = float(ceil_div(rows, config.rows)) * cols * depth
    scaled = made.product / (2 * config.depth) if problem.group else 0.0
    ordinary, special = cost_of(problem.activation)
    return made._replace(
        scalar=2 * (weights + scaled) + result * (ordinary + problem.bias), special=result * special
    )  # fmt: skip


def fp8_space(problem: Fp8Problem) -> tuple[QuantizedConfig, ...]:
    """Every configuration that may be searched; :func:`prune_fp8` says which of them serve a problem."""
    return _FP8_SPACE


def prune_fp8(config: QuantizedConfig, problem: Fp8Problem, facts: DeviceFacts) -> str | None:
    """Why the configuration cannot or should not serve the problem on this device; None: it can."""
    if not float8_dtypes(facts):
        return "the device multiplies no float8"
    if config.depth < 32:
        return "a side of the tile is shorter than a matrix instruction's"
    if config.splits > 1:
        return "one program a tile only"
    # Four warps multiply 64 rows from Hopper on, however few there are.
    return tile_unfit(config, problem, facts, free=(64, 64))


def fp8_work(config: QuantizedConfig, problem: Fp8Problem, facts: DeviceFacts) -> Work:
    """What the problem costs with the configuration."""
    rows, cols = problem.rows, problem.cols
    result = float(rows) * cols
    made = tile_work(
        config, facts, rows=rows, cols=cols, depth=problem.depth, itemsizes=(1, 1),
        unit="half" if problem.exact else "fp8", results=result * ITEMSIZES[problem.out_dtype],
        shared_memory=config.shared_memory(problem),
    )  # fmt: skip
    # Where tensor cores sum too coarsely, the sums of each step are added in float32.
    added = 0.0 if problem.exact or sums_in_float32(facts) else made.product / (2 * config.depth)
    ordinary, special = cost_of(problem.activation)
    return made._replace(scalar=added + result * (ordinary + 2 + problem.bias), special=result * special)


QUANTIZED_LINEAR = Operator(
    name="quantized_linear",
    problem=QuantizedProblem,
    config=QuantizedConfig,
    default=default_quantized_config,
    space=quantized_space,
    prune=prune_quantized,
    work=quantized_work,
    trials="fusedops.linear.trials_quantized",
    sources=("fusedops.linear.kernels_quantized",),
    bucketed=lambda problem: ("rows",),
)
FP8_LINEAR = Operator(
    name="fp8_linear",
    problem=Fp8Problem,
    config=QuantizedConfig,
    default=default_fp8_config,
    space=fp8_space,
    prune=prune_fp8,
    work=fp8_work,
    trials="fusedops.linear.trials_quantized",
    sources=("fusedops.linear.kernels_fp8",),
    bucketed=lambda problem: ("rows",),
)
