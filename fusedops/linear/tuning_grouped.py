"""Launch configurations of the grouped kernels: the problem, the space that may be searched, and the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from fusedops.autotune.buckets import bucket
from fusedops.autotune.operator import Config, Operator, Work
from fusedops.linear.tuning import MOST_ROWS, table_of, tile_unfit
from fusedops.linear.work import cost_of, tile_work, unit_of
from fusedops.runtime.device import DeviceFacts
from fusedops.runtime.launch import ITEMSIZES, ceil_div

Product = Literal["rows", "weights"]

# The last bucket of groups: a batch of matrices may have any number.
MOST_GROUPS = 1024


class GroupedProblem(NamedTuple):
    """One of the two products, a result (rows, cols) a group, summed over depth. Make it with :meth:`of`.

    Attributes:
        product: ``rows``: a group's rows times its matrix, Y_g = a(X_g W_gᵀ + b_g) or dX_g = dZ_g W_g;
            ``weights``: dW_g = dZ_gᵀ X_g, summed over a group's rows.
        groups: how many, as a bucket up to 1,024.
        rows, cols, depth: the sizes. A group's rows (``rows`` of the one product, ``depth`` of the other) are the
            average, as a bucket up to 131,072: how many each has is known on the device only.
        dtype: of the operands.
        layout: as of :class:`fusedops.linear.tuning.LinearProblem`, of a group's two operands.
        activation: what the kernel applies to Y.
        precision: how float32 operands are multiplied: ``ieee``, ``tf32`` or ``tf32x3``.
        equal: all groups have the same number of rows.
        aligned: the operands can be read in vectors. Else a load is an element, which wants a register or two.
        bias: Y gets one, or dW comes with its gradient.
        keeps: Z is written down as well.
    """

    product: Product
    groups: int
    rows: int
    cols: int
    depth: int
    dtype: str
    layout: str
    activation: str | None
    precision: str
    equal: bool
    aligned: bool
    bias: bool
    keeps: bool

    @classmethod
    def of(
        cls,
        product: Product,
        groups: int,
        rows: int,
        cols: int,
        depth: int,
        *,
        dtype: str = "bfloat16",
        layout: str = "rr",
        activation: str | None = None,
        precision: str = "ieee",
        equal: bool = False,
        aligned: bool = True,
        bias: bool = False,
        keeps: bool = False,
    ) -> GroupedProblem:
        if product == "weights":
            depth = bucket(depth, MOST_ROWS)
        else:
            rows = bucket(rows, MOST_ROWS)
        precision = precision if dtype == "float32" else "ieee"
        return cls(
            product, bucket(groups, MOST_GROUPS), rows, cols, depth, dtype, layout, activation, precision, equal,
            aligned, bias, keeps,
        )  # fmt: skip

    @property
    def itemsize(self) -> int:
        """Bytes of an operand's element."""
        return ITEMSIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class GroupedConfig(Config):
    """Attributes:
    rows, cols: the tile of a group's result that a program owns.
    depth: how much of the summed dimension a step takes.
    num_stages: steps in flight.
    num_warps: warps a program.
    group: block rows a patch of neighbouring programs covers.
    """

    rows: int
    cols: int
    depth: int
    num_stages: int
    num_warps: int
    group: int = 8

    def shared_memory(self, problem: GroupedProblem) -> int:
        """Bytes of shared memory, at most about: the steps in flight, or the result on its way out."""
        step = (self.rows + self.cols) * self.depth
        return problem.itemsize * max(self.num_stages * step, self.rows * self.cols)


SPACE = tuple(
    GroupedConfig(rows, cols, depth, num_stages, num_warps, group)
    for rows in (16, 32, 64, 128, 256)
    for cols in (32, 64, 128, 256)
    for depth in (16, 32, 64, 128)
    for num_stages in (2, 3, 4, 5)
    for num_warps in (2, 4, 8)
    for group in (1, 8)
)

_Tiles = tuple[GroupedConfig, ...]
_C = GroupedConfig  # (rows, cols, depth, num_stages, num_warps)

# A group of few rows reads its matrix once, whatever the tile: thin tiles, deep steps.
_SKINNY = (_C(32, 128, 64, 4, 4), _C(16, 128, 64, 4, 4), _C(16, 64, 128, 4, 4))
_SKINNY_CONSUMER = (_C(32, 64, 64, 4, 4), _C(16, 128, 64, 3, 4), _C(16, 64, 64, 4, 4))
_SKINNY_AMD = (_C(32, 64, 64, 2, 4), _C(16, 64, 64, 2, 4))
_SKINNY_FULL = (_C(32, 32, 32, 2, 4), _C(16, 64, 16, 2, 4))
_FULL = (_C(64, 64, 16, 3, 4), *_SKINNY_FULL)
_FULL_WEIGHTS = (_C(64, 64, 16, 3, 8), *_SKINNY_FULL)
_TF32 = (_C(128, 64, 32, 3, 8), _C(64, 64, 32, 3, 4), _C(32, 32, 64, 3, 4), _C(16, 32, 64, 3, 4))
# Three products of the operands' halves: both halves lie in registers.
_TF32X3 = (_C(64, 64, 32, 3, 4), _C(32, 64, 32, 3, 4), _C(16, 64, 32, 3, 4))
# Loads of single elements: each has an address in a register or two, whatever the device.
_UNALIGNED = (_C(64, 64, 32, 2, 8), _C(32, 64, 32, 2, 4), _C(16, 64, 32, 2, 4))
_UNALIGNED_WEIGHTS = (_C(64, 64, 16, 2, 4), _C(32, 64, 16, 2, 4), _C(16, 64, 16, 2, 4))


@dataclass(frozen=True, slots=True)
class Defaults:
    """Tiles of one architecture, each tuple from large to small; the first that suits the problem is taken.

    Attributes:
        half: product ``rows`` of 16-bit operands.
        half_weights: product ``weights`` of 16-bit operands. Its steps end at a group's last row, wherever that is:
            every load has a mask of its own, which wants registers.
        tf32: float32 operands on TF32 tensor cores (empty where there are none).
        full, full_weights: the two products of float32 operands in full precision.
    """

    half: _Tiles
    half_weights: _Tiles
    tf32: _Tiles
    full: _Tiles = _FULL
    full_weights: _Tiles = _FULL_WEIGHTS


_CONSUMER = Defaults(
    half=(_C(128, 128, 32, 3, 8), _C(64, 128, 32, 3, 8), _C(64, 64, 32, 3, 4), *_SKINNY_CONSUMER),
    half_weights=(_C(128, 128, 32, 3, 8), _C(64, 128, 32, 3, 8), _C(64, 64, 32, 3, 4), _C(16, 64, 32, 3, 4)),
    tf32=_TF32,
)
_HOPPER = Defaults(
    half=(_C(128, 256, 64, 3, 8), _C(128, 128, 64, 4, 8), _C(64, 128, 64, 4, 4), _C(64, 64, 64, 4, 4), *_SKINNY),
    half_weights=(
        _C(128, 256, 64, 3, 8), _C(128, 128, 64, 4, 8), _C(128, 128, 32, 4, 8), _C(64, 64, 32, 4, 4),
        _C(16, 64, 32, 4, 4),
    ),
    tf32=_TF32,
)  # fmt: skip

# Where a search starts, and what runs until one was made. Chosen by what the compiler makes of them: the largest usual
# tiles that spill no register.
DEFAULTS: dict[str, Defaults] = {
    "sm_75": Defaults(
        # Triton has no tensor-core path for Turing: plain multiply-adds.
        half=(_C(64, 64, 16, 2, 4), _C(32, 64, 16, 2, 4), _C(16, 64, 16, 2, 4)),
        half_weights=(_C(64, 64, 16, 2, 4), _C(32, 64, 16, 2, 4), _C(16, 64, 16, 2, 4)),
        tf32=(),
    ),
    "sm_80": Defaults(
        half=(_C(128, 256, 32, 3, 8), _C(128, 128, 32, 4, 8), _C(64, 128, 32, 4, 4), _C(64, 64, 64, 4, 4), *_SKINNY),
        half_weights=(_C(128, 128, 32, 4, 8), _C(64, 128, 32, 4, 4), _C(64, 64, 32, 4, 4), _C(16, 64, 32, 4, 4)),
        tf32=_TF32,
    ),
    "sm_86": _CONSUMER,
    "sm_90": _HOPPER,
    "sm_100": _HOPPER,
    "gfx942": Defaults(
        half=(_C(128, 128, 64, 2, 8), _C(64, 64, 64, 2, 4), *_SKINNY_AMD),
        half_weights=(_C(128, 128, 32, 2, 8), _C(64, 64, 32, 2, 4), _C(16, 64, 32, 2, 4)),
        tf32=(),
    ),
    "gfx1100": Defaults(
        half=(_C(128, 64, 32, 2, 8), _C(64, 64, 32, 2, 4), _C(32, 64, 32, 2, 4), _C(16, 64, 32, 2, 4)),
        half_weights=_UNALIGNED_WEIGHTS,
        tf32=(),
    ),
    # Its cost is an operation's, whatever the block: few large blocks.
    "interpreter": Defaults(half=(_C(32, 64, 64, 1, 4),), half_weights=(_C(64, 64, 32, 1, 4),), tf32=()),
}


def prune(config: GroupedConfig, problem: GroupedProblem, facts: DeviceFacts) -> str | None:
    """Why the configuration cannot or should not serve the problem on this device; None: it can."""
    return tile_unfit(config, problem, facts)


def default_config(problem: GroupedProblem, facts: DeviceFacts) -> GroupedConfig:
    """A configuration that always fits: the largest tile of the table that leaves no multiprocessor idle.

    The last tile of a group whose size is any number is half empty on average. So groups of different sizes get tiles
    of at most half their average.
    """
    tiles = _tiles(problem, DEFAULTS[table_of(facts)], facts)
    ragged = problem.product == "rows" and not problem.equal
    most = max(problem.rows // 2 if ragged else problem.rows, 16)
    fitting = [c for c in tiles if prune(c, problem, facts) is None and c.rows <= most] or [tiles[-1]]
    # A tile of fewer than 64 rows only where there are no more rows: it reads the other operand once for few.
    fitting = [c for c in fitting if c.rows >= min(most, 64)] or fitting
    for config in fitting:
        programs = problem.groups * ceil_div(problem.rows, config.rows) * ceil_div(problem.cols, config.cols)
        if programs >= facts.multiprocessor_count:
            return config
    return fitting[-1]


def _tiles(problem: GroupedProblem, defaults: Defaults, facts: DeviceFacts) -> _Tiles:
    weights = problem.product == "weights"
    if facts.vendor == "interpreter":
        return defaults.half_weights if weights else defaults.half
    if problem.itemsize == 4:
        if problem.precision == "ieee" or not defaults.tf32:
            return defaults.full_weights if weights else defaults.full
        return _TF32X3 if problem.precision == "tf32x3" else defaults.tf32 if problem.aligned else defaults.tf32[1:]
    if not problem.aligned:
        return _UNALIGNED_WEIGHTS if weights else _UNALIGNED
    return defaults.half_weights if weights else defaults.half


def work(config: GroupedConfig, problem: GroupedProblem, facts: DeviceFacts) -> Work:
    """What the problem costs with the configuration. Groups of any size end in the middle of a tile on average."""
    item, G = problem.itemsize, problem.groups
    ragged = problem.product == "rows" and not problem.equal
    made = tile_work(
        config, facts, rows=problem.rows, cols=problem.cols, depth=problem.depth, itemsizes=(item, item),
        unit=unit_of(item, problem.precision != "ieee", facts), groups=G,
        results=float(G) * problem.rows * problem.cols * item * (1 + problem.keeps),
        shared_memory=config.shared_memory(problem),
        block_rows=problem.rows / config.rows + 0.5 if ragged else None,
    )  # fmt: skip
    if problem.precision == "tf32x3":
        made = made._replace(product=3 * made.product)
    if problem.product == "weights":
        return made._replace(scalar=float(G) * problem.rows * problem.depth * problem.bias)
    ordinary, special = cost_of(problem.activation)
    elements = float(G) * problem.rows * problem.cols
    return made._replace(scalar=elements * (ordinary + problem.bias), special=elements * special)


GROUPED_LINEAR = Operator(
    name="grouped_linear",
    problem=GroupedProblem,
    config=GroupedConfig,
    default=default_config,
    space=lambda problem: SPACE,
    prune=prune,
    work=work,
    trials="fusedops.linear.trials_grouped",
    sources=("fusedops.linear.kernels_grouped",),
    bucketed=lambda problem: ("groups", "depth" if problem.product == "weights" else "rows"),
)
