"""Launch configurations of the gated product's forward: the problem, the space that may be searched, the defaults.

Its backward is one elementwise pass and plain products, which have configurations of their own (tuning.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from fusedops.autotune.buckets import bucket
from fusedops.autotune.operator import Config, Operator, Work
from fusedops.linear import tuning
from fusedops.linear.work import beyond_cache, cost_of, padded, tile_work, unit_of
from fusedops.runtime.device import DeviceFacts
from fusedops.runtime.launch import ITEMSIZES, ceil_div

Kernel = Literal["tiled", "torch"]


class GatedProblem(NamedTuple):
    """Y = a(X Wgᵀ + bg) ∘ (X Wuᵀ + bu): (rows, cols), both products summed over depth. Make it with :meth:`of`.

    Attributes:
        rows, cols, depth: M, as a bucket up to 131,072; N and K.
        dtype, out_dtype: of the operands, and of Y.
        layout: as of :class:`fusedops.linear.tuning.LinearProblem`, of X and the weights.
        activation: a's name, or None.
        precision: of float32 products: ``ieee``, ``tf32`` or ``tf32x3``; 16-bit ones are ``ieee``.
        aligned: the operands can be read in vectors. Else a load is an element, which wants a register or two.
        torch_serves: torch's own product has the dtype and the precision that are asked for.
        bias: there is at least one.
        packed: both weights are halves of one matrix.
        keeps: the forward writes the pre-activations down.
    """

    rows: int
    cols: int
    depth: int
    dtype: str
    out_dtype: str
    layout: str
    activation: str | None
    precision: str
    aligned: bool
    torch_serves: bool
    bias: bool
    packed: bool
    keeps: bool

    @classmethod
    def of(
        cls,
        rows: int,
        cols: int,
        depth: int,
        *,
        dtype: str = "bfloat16",
        out_dtype: str | None = None,
        layout: str = "rr",
        activation: str | None = "silu",
        precision: str = "ieee",
        aligned: bool = True,
        torch_serves: bool = True,
        bias: bool = False,
        packed: bool = False,
        keeps: bool = False,
    ) -> GatedProblem:
        precision = precision if dtype == "float32" else "ieee"
        return cls(
            bucket(rows, tuning.MOST_ROWS), cols, depth, dtype, out_dtype or dtype, layout, activation, precision,
            aligned, torch_serves, bias, packed, keeps,
        )  # fmt: skip

    @property
    def itemsize(self) -> int:
        """Bytes of an operand's element."""
        return ITEMSIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class GatedConfig(Config):
    """Attributes:
    rows, cols: the tile of Y that a program owns; it keeps twice as many sums.
    depth: how much of the summed dimension a step takes.
    num_stages: steps in flight.
    num_warps: warps a program.
    group: block rows a patch of neighbouring programs covers.
    kernel: ``tiled``: our kernel, both products and the gate in one. ``torch``: torch's own products (cuBLAS,
        hipBLASLt), then an elementwise kernel of ours for the gate. The other fields mean nothing then.
    """

    rows: int
    cols: int
    depth: int
    num_stages: int
    num_warps: int
    group: int = 8
    kernel: Kernel = "tiled"

    def shared_memory(self, problem: GatedProblem) -> int:
        """Bytes of shared memory, at most about: the steps in flight, or a tile of sums on its way out."""
        if self.kernel == "torch":
            return 0
        step = (self.rows + 2 * self.cols) * self.depth
        return max(problem.itemsize * self.num_stages * step, problem.itemsize * self.rows * self.cols)

    def parts(self, warp_size: int) -> int:
        """In how many pieces of columns a tile is finished: its activation wants registers beside the sums."""
        sums = 2 * self.rows * self.cols // (self.num_warps * warp_size)
        return 4 if sums >= 128 else 2 if sums >= 64 else 1


_C = GatedConfig  # (rows, cols, depth, num_stages, num_warps)
TORCH = _C(0, 0, 0, 0, 0, kernel="torch")

SPACE = (
    *(
        GatedConfig(rows, cols, depth, num_stages, num_warps, group)
        for rows in (16, 32, 64, 128, 256)
        for cols in (16, 32, 64, 128)
        for depth in (16, 32, 64, 128)
        for num_stages in (2, 3, 4, 5)
        for num_warps in (2, 4, 8)
        for group in (1, 8)
    ),
    TORCH,
)

_Tiles = tuple[GatedConfig, ...]


@dataclass(frozen=True, slots=True)
class Defaults:
    """Tiles of one architecture, each tuple from large to small; the first that suits the problem is taken.

    Attributes:
        half: 16-bit operands.
        tf32: float32 operands on TF32 tensor cores (empty where there are none).
        full: float32 operands in full precision.
    """

    half: _Tiles
    tf32: _Tiles
    full: _Tiles


# Where rows are few (a small batch, one token) the weights are read once, whatever the tile: thin tiles, deep steps.
_SKINNY = (_C(32, 32, 128, 3, 4), _C(16, 32, 128, 3, 4), _C(16, 16, 128, 3, 4))
_SKINNY_TF32 = (_C(32, 32, 32, 3, 4), _C(16, 32, 64, 3, 4), _C(16, 16, 64, 3, 4))
_SKINNY_FULL = (_C(32, 32, 16, 2, 4), _C(16, 32, 16, 2, 4))
_FULL = (_C(64, 32, 16, 2, 4), *_SKINNY_FULL)
_TF32 = (_C(128, 64, 32, 3, 8), _C(64, 32, 32, 3, 4), *_SKINNY_TF32)
# Three products of two parts of each operand, where those of a tile are in registers.
_TF32X3 = _TF32[1:]
# Loads of single elements: each has an address in a register or two, whatever the device.
_UNALIGNED_HALF = (_C(64, 32, 32, 2, 4), _C(32, 32, 32, 2, 4), _C(16, 32, 32, 2, 4))
_UNALIGNED_TF32 = (_C(64, 32, 16, 2, 4), *_SKINNY_FULL)
_CONSUMER = Defaults(
    half=(_C(128, 64, 32, 3, 8), _C(64, 64, 32, 3, 4), _C(64, 32, 64, 3, 4), *_SKINNY),
    tf32=_TF32,
    full=_FULL,
)

# Where a search starts, and what runs until one was made. Chosen by what the compiler makes of them: the largest usual
# tiles that spill no register with an erf in the gate.
DEFAULTS: dict[str, Defaults] = {
    "sm_75": Defaults(
        # Triton has no tensor-core path for Turing: plain multiply-adds.
        half=(_C(64, 32, 16, 2, 4), _C(32, 32, 16, 2, 4), _C(16, 32, 16, 2, 4)),
        tf32=(),
        full=_FULL,
    ),
    "sm_80": Defaults(
        half=(_C(128, 128, 32, 3, 8), _C(128, 64, 32, 4, 8), _C(64, 64, 32, 4, 4), _C(64, 32, 64, 4, 4), *_SKINNY),
        tf32=_TF32,
        full=_FULL,
    ),
    "sm_86": _CONSUMER,
    "sm_90": Defaults(
        half=(_C(128, 128, 64, 3, 8), _C(128, 64, 64, 4, 8), _C(64, 64, 64, 4, 4), _C(64, 32, 64, 4, 4), *_SKINNY),
        tf32=_TF32,
        full=_FULL,
    ),
    "sm_100": Defaults(
        half=(_C(128, 128, 64, 3, 8), _C(128, 64, 64, 4, 8), _C(64, 64, 64, 4, 4), _C(64, 32, 64, 4, 4), *_SKINNY),
        tf32=_TF32,
        full=_FULL,
    ),
    "gfx942": Defaults(
        half=(_C(128, 64, 64, 2, 8), _C(64, 64, 32, 2, 4), _C(32, 32, 64, 2, 4), _C(16, 32, 64, 2, 4)),
        tf32=(),
        full=_FULL,
    ),
    "gfx1100": Defaults(
        half=(_C(64, 64, 32, 2, 8), _C(64, 32, 32, 2, 4), _C(32, 32, 32, 2, 4), _C(16, 32, 32, 2, 4)),
        tf32=(),
        full=_FULL,
    ),
    # Its cost is an operation's, whatever the block: few large blocks.
    "interpreter": Defaults(half=(_C(64, 64, 64, 1, 4),), tf32=(), full=(_C(64, 64, 64, 1, 4),)),
}


def prune(config: GatedConfig, problem: GatedProblem, facts: DeviceFacts) -> str | None:
    """Why the configuration cannot or should not serve the problem on this device; None: it can."""
    if config.kernel == "torch":
        if config != TORCH:
            return "torch's products have no tile"
        return None if problem.torch_serves else "torch's product has another dtype or precision"
    return tuning.tile_unfit(config, problem, facts, products=2)


def default_config(problem: GatedProblem, facts: DeviceFacts) -> GatedConfig:
    """A configuration that always fits: a tile of the table, or torch's products where they should be faster."""
    if problem.torch_serves and not _fusion_pays(problem, tuning.DEFAULTS[tuning.table_of(facts)]):
        return TORCH
    return tiled_config(problem, facts)


def tiled_config(problem: GatedProblem, facts: DeviceFacts) -> GatedConfig:
    """The largest tile of the table that leaves no multiprocessor idle."""
    tiles = _tiles(problem, DEFAULTS[tuning.table_of(facts)], facts)
    fitting = [c for c in tiles if prune(c, problem, facts) is None] or [tiles[-1]]
    # A tile of fewer than 64 rows only where there are no more rows: it reads the weights once for few.
    fitting = [c for c in fitting if c.rows >= min(problem.rows, 64)] or fitting
    for config in fitting:
        if ceil_div(problem.rows, config.rows) * ceil_div(problem.cols, config.cols) >= facts.multiprocessor_count:
            return config
    return fitting[-1]


def _fusion_pays(problem: GatedProblem, defaults: tuning.Defaults) -> bool:
    """Whether our product, ``slower`` than torch's by assumption, saves more than that in passes over the results.

    All in bytes of device memory that take as long, as in tuning.py. Few rows are bound by the reading of the weights.
    """
    if problem.rows <= 16:
        return True
    # A pass of its own reads the two pre-activations, which are written anyway where the backward is to find them.
    passes = 2 if problem.keeps else 4
    saved = passes * problem.itemsize * problem.rows * problem.cols + defaults.launch
    slower, balance = defaults.slower[0], float(defaults.balance)
    if problem.itemsize == 4:
        full = problem.precision == "ieee"
        slower, balance = (defaults.slower[2], balance / 16) if full else (defaults.slower[1], balance / 2)
    product = 2 * problem.rows * 2 * problem.cols * problem.depth / balance
    return (slower - 1) * product <= saved


def _tiles(problem: GatedProblem, defaults: Defaults, facts: DeviceFacts) -> _Tiles:
    if facts.vendor == "interpreter":
        return defaults.half
    if problem.itemsize == 4:
        if problem.precision != "ieee" and defaults.tf32:
            if not problem.aligned:
                return _UNALIGNED_TF32
            return _TF32X3 if problem.precision == "tf32x3" else defaults.tf32
        return defaults.full
    return defaults.half if problem.aligned else _UNALIGNED_HALF


def work(config: GatedConfig, problem: GatedProblem, facts: DeviceFacts) -> Work:
    """What the problem costs with the configuration, all its kernels together."""
    result, item, out = float(problem.rows) * problem.cols, problem.itemsize, ITEMSIZES[problem.out_dtype]
    ordinary, special = cost_of(problem.activation)
    if config.kernel == "torch":
        # One product of twice as many columns, or two; then a pass that reads them.
        product = tuning.LinearProblem.of(
            "forward", problem.rows, 2 * problem.cols, problem.depth, dtype=problem.dtype, layout=problem.layout,
            precision=problem.precision, aligned=problem.aligned,
        )  # fmt: skip
        made = tuning.work(tuning.TORCH, product, facts)
        return made._replace(
            scalar=result * (ordinary + 1),
            special=result * special,
            memory=made.memory + beyond_cache(2 * result * item, facts) + result * out,
            cached=made.cached + 2 * result * item + result * out,
            launches=made.launches + (1 if problem.packed else 2),
        )
    made = tile_work(
        config, facts, rows=problem.rows, cols=problem.cols, depth=problem.depth, itemsizes=(item, item),
        unit=unit_of(item, problem.precision != "ieee", facts), right=2, shared_memory=config.shared_memory(problem),
        results=result * (out + 2 * item * problem.keeps),
    )  # fmt: skip
    if problem.precision == "tf32x3":
        made = made._replace(product=3 * made.product)
    elements = padded(config, problem)
    return made._replace(scalar=elements * (ordinary + 1 + 2 * problem.bias), special=elements * special)


GATED_LINEAR = Operator(
    name="gated_linear",
    problem=GatedProblem,
    config=GatedConfig,
    default=default_config,
    space=lambda problem: SPACE,
    prune=prune,
    work=work,
    trials="fusedops.linear.trials_gated",
    sources=("fusedops.linear.kernels_gated",),
    bucketed=lambda problem: ("rows",),
)
