"""Launch configurations of the linear kernels: the problem, the space that may be searched, and the defaults."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from fusedops.autotune.buckets import bucket
from fusedops.autotune.operator import Config, Operator, Work
from fusedops.linear.activations import ACTIVATIONS
from fusedops.linear.work import beyond_cache, cost_of, padded, tile_work, unit_of
from fusedops.runtime.device import TARGETS, DeviceFacts
from fusedops.runtime.launch import ITEMSIZES, ceil_div

# The last bucket of M, which stands for all larger ones.
MOST_ROWS = 1 << 17

Product = Literal["forward", "grad_input", "grad_weight"]
Kernel = Literal["tiled", "skinny", "persistent", "torch"]


class LinearProblem(NamedTuple):
    """One of the three products, result (rows, cols) summed over depth. Make it with :meth:`of`.

    Attributes:
        product: ``forward`` Y = a(X Wᵀ + b): (M, N) over K; ``grad_input`` dX = dZ W: (M, K) over N;
            ``grad_weight`` dW = dZᵀ X: (N, K) over M.
        rows, cols, depth: its sizes; M, which changes from batch to batch, as a bucket up to 131,072.
        dtype, out_dtype: of the operands, and of the result.
        layout: a letter an operand, in the order in which the product is written above: ``r`` where a row's elements
            are neighbours in memory, ``c`` where a column's are.
        activation: what the kernel applies: a in the forward, a′ in the prologue of a gradient's product.
        precision: of float32 products, ``ieee``, ``tf32`` or ``tf32x3``; ``ieee`` for others.
        aligned: the operands can be read in vectors. Else a load is an element, which wants a register or two.
        torch_serves: torch's own product gives the result that is asked for, its dtype and precision.
        bias: the forward adds one; ``grad_weight`` computes its gradient as well.
        keeps: the forward writes down what the backward needs.
        residual, dropout: the forward ends with it.
        accumulate: ``grad_weight`` is added to what is there.
        descriptors: tensor descriptors can stand for the operands and the results, and the device has them.
        pairs: products of two matrices that make up ``grad_input``; their depths count together.
    """

    product: Product
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
    keeps: bool
    residual: bool
    dropout: bool
    accumulate: bool
    descriptors: bool
    pairs: int

    @classmethod
    def of(
        cls,
        product: Product,
        rows: int,
        cols: int,
        depth: int,
        *,
        dtype: str = "bfloat16",
        out_dtype: str | None = None,
        layout: str = "rr",
        activation: str | None = None,
        precision: str = "ieee",
        aligned: bool = True,
        torch_serves: bool = True,
        bias: bool = False,
        keeps: bool = False,
        residual: bool = False,
        dropout: bool = False,
        accumulate: bool = False,
        descriptors: bool = False,
        pairs: int = 1,
    ) -> LinearProblem:
        if product == "grad_weight":
            depth = bucket(depth, MOST_ROWS)
        else:
            rows = bucket(rows, MOST_ROWS)
        precision = precision if dtype == "float32" else "ieee"
        return cls(
            product, rows, cols, depth, dtype, out_dtype or dtype, layout, activation, precision, aligned, torch_serves,
            bias, keeps, residual, dropout, accumulate, descriptors, pairs,
        )  # fmt: skip

    @property
    def itemsize(self) -> int:
        """Bytes of an operand's element."""
        return ITEMSIZES[self.dtype]

    @property
    def extras(self) -> bool:
        """The forward ends with dropout or a residual."""
        return self.residual or self.dropout

    @property
    def derives(self) -> bool:
        """The kernel computes a derivative in its prologue."""
        return self.product != "forward" and self.activation is not None

    @property
    def tf32(self) -> bool:
        return self.precision != "ieee"


@dataclass(frozen=True, slots=True)
class LinearConfig(Config):
    """Attributes:
    rows, cols: the tile of the result that a program owns.
    depth: how much of the summed dimension a step takes.
    num_stages: steps in flight.
    num_warps: warps a program.
    group: block rows a patch of neighbouring programs covers.
    prologue: False for a gradient's product with an activation: dZ = dY ∘ a′ is better computed once, by a pass
        of its own, than in the prologue of the product, which repeats it for every block column.
    splits: programs a tile, each of which sums a share of the depth; a second kernel adds the sums, in their order.
    kernel: ``tiled``; of the forward also ``skinny``, for at most 16 rows, and ``persistent``, by tensor descriptors;
        or ``torch``: torch's own product (cuBLAS, hipBLASLt), what comes before and after it in elementwise kernels of
        ours. The other fields mean nothing then.
    specialize: the persistent kernel gives warps to the copies and to the product alone; Triton 3.6 cannot compile it.
    """

    rows: int
    cols: int
    depth: int
    num_stages: int
    num_warps: int
    group: int = 8
    prologue: bool = True
    splits: int = 1
    kernel: Kernel = "tiled"
    specialize: bool = False

    def shared_memory(self, problem: LinearProblem) -> int:
        """Bytes of shared memory, at most about: the steps in flight, or the result on its way out."""
        step = (self.rows + self.cols) * self.depth
        if problem.derives:
            step += self.rows * self.depth
        return problem.itemsize * max(self.num_stages * step, self.rows * self.cols)


# The most rows that the skinny kernel serves: those of a matrix instruction.
SKINNY_ROWS = 16
TORCH = LinearConfig(0, 0, 0, 0, 0, prologue=False, kernel="torch")


def linear_space(problem: LinearProblem) -> Iterator[LinearConfig]:
    """Every configuration that may be searched for a problem; :func:`prune` says which of them serve it."""
    yield TORCH
    if problem.derives:
        # A pass before the product, which is a problem of its own then: this tile is never launched.
        yield LinearConfig(64, 64, 16, 2, 4, prologue=False)
    fields = itertools.product(
        (16, 32, 64, 128, 256),
        (32, 64, 128, 256),
        (16, 32, 64, 128),
        (2, 3, 4, 5),  # stages
        (2, 4, 8),  # warps
        (1, 8),  # group
        (1, 2, 4, 8, 16),  # splits
    )
    for rows, cols, depth, stages, warps, group, splits in fields:
        yield LinearConfig(rows, cols, depth, stages, warps, group, splits=splits)
    if problem.product != "forward":
        return
    if problem.rows <= SKINNY_ROWS:
        yield from _skinny_space(problem)
    if problem.descriptors:
        tiles = itertools.product((64, 128, 256), (32, 64, 128, 256), (16, 32, 64, 128), (2, 3, 4, 5), (4, 8), (1, 8))
        for tile in tiles:
            yield LinearConfig(*tile, kernel="persistent")
            yield LinearConfig(*tile, kernel="persistent", specialize=True)


def _skinny_space(problem: LinearProblem) -> Iterator[LinearConfig]:
    fields = itertools.product(
        (1, SKINNY_ROWS) if problem.rows == 1 else (SKINNY_ROWS,),
        (16, 32, 64, 128),
        (32, 64, 128, 256, 512, 1024),
        (2, 3, 4, 5, 6),  # stages
        (2, 4, 8),  # warps
        (1, 2, 4, 8, 16),  # splits
    )
    for rows, cols, depth, stages, warps, splits in fields:
        yield LinearConfig(rows, cols, depth, stages, warps, group=1, splits=splits, kernel="skinny")


_Tiles = tuple[LinearConfig, ...]
_C = LinearConfig  # (rows, cols, depth, num_stages, num_warps)


@dataclass(frozen=True, slots=True)
class Defaults:
    """Tiles of one architecture, each tuple from large to small; the first that suits the problem is taken.

    Attributes:
        half: 16-bit operands.
        tf32: float32 operands on TF32 tensor cores (empty where there are none).
        full: float32 operands in full precision.
        derive_half, derive_full: gradients' products with a derivative in their prologue, which wants registers.
        budget: what reading dY and the saved tensor and writing dZ costs an element, in instructions that the
            device could issue meanwhile: 128 lanes · 6 bytes / (bytes of device memory a clock a multiprocessor).
        balance: floating-point operations of a 16-bit product that take as long as a byte of device memory.
        launch: bytes of device memory that take as long as the launch of a kernel, 3 µs.
        slower: how many times torch's product our own is assumed to take, before a search has measured it:
            of 16-bit operands, of float32 on TF32 tensor cores, of float32 in full precision.
    """

    half: _Tiles
    tf32: _Tiles
    full: _Tiles
    derive_half: _Tiles
    derive_full: _Tiles
    budget: int
    balance: int
    launch: int
    slower: tuple[float, float, float]


# Where rows are few (a small batch, one token) the weight is read once, whatever the tile: thin tiles, deep steps.
_SKINNY = (_C(32, 64, 128, 3, 4), _C(32, 32, 128, 3, 4), _C(16, 64, 128, 4, 4), _C(16, 32, 128, 4, 4))
_SKINNY_TF32 = (_C(32, 32, 64, 3, 4), _C(16, 32, 64, 4, 4))
_SKINNY_FULL = (_C(32, 64, 16, 2, 4), _C(16, 64, 16, 2, 4))
_FULL = (_C(64, 64, 16, 3, 4), *_SKINNY_FULL)
_TF32X3 = (_C(64, 64, 32, 3, 4), *_SKINNY_TF32)  # three products, and the parts of both operands in registers
_UNALIGNED_TF32 = (_C(64, 64, 32, 3, 4), *_SKINNY_TF32)
_AMPERE_TF32 = (_C(128, 128, 32, 3, 8), *_UNALIGNED_TF32)
# Loads of single elements: each has an address in a register or two, whatever the device.
_UNALIGNED_HALF = (_C(64, 64, 32, 2, 4), _C(32, 64, 32, 2, 4), _C(16, 64, 32, 2, 4))
_UNALIGNED_DERIVE = (_C(64, 64, 16, 2, 4), _C(32, 64, 16, 2, 4), _C(16, 64, 16, 2, 4))
_DERIVE = (_C(64, 64, 32, 3, 4), _C(32, 64, 32, 3, 4), _C(16, 64, 32, 3, 4))
_CONSUMER = Defaults(
    half=(_C(128, 128, 32, 3, 8), _C(64, 128, 32, 3, 8), _C(64, 64, 32, 3, 4), *_SKINNY),
    tf32=(_C(128, 64, 32, 3, 8), _C(64, 64, 32, 3, 4), *_SKINNY_TF32),
    full=_FULL,
    derive_half=(_C(64, 64, 16, 3, 4), _C(32, 64, 16, 3, 4), _C(16, 64, 16, 3, 4)),
    derive_full=(_C(64, 64, 16, 2, 8), *_SKINNY_FULL),
    budget=170,
    balance=208,
    launch=1_800_000,
    slower=(1.05, 1.1, 1.3),
)

# Where a search starts, and what runs until one was made. Chosen by what the compiler makes of them: the largest usual
# tiles that spill no register in the forward with an erf and in the backward with a bias's gradient.
DEFAULTS: dict[str, Defaults] = {
    "sm_75": Defaults(
        # Triton has no tensor-core path for Turing: plain multiply-adds.
        half=(_C(64, 64, 16, 2, 4), _C(32, 64, 16, 2, 4), _C(16, 64, 16, 2, 4)),
        tf32=(),
        full=_FULL,
        derive_half=(_C(32, 64, 16, 2, 4), _C(16, 64, 16, 2, 4)),
        derive_full=(_C(32, 64, 16, 2, 4), _C(16, 64, 16, 2, 4)),
        budget=140,
        balance=203,
        launch=960_000,
        slower=(8.0, 1.3, 1.3),
    ),
    "sm_80": Defaults(
        half=(_C(128, 256, 32, 3, 8), _C(128, 128, 32, 4, 8), _C(64, 128, 32, 4, 4), _C(64, 64, 64, 4, 4), *_SKINNY),
        tf32=_AMPERE_TF32,
        full=_FULL,
        derive_half=_DERIVE,
        derive_full=_CONSUMER.derive_full,
        budget=60,
        balance=153,
        launch=6_100_000,
        slower=(1.05, 1.1, 1.3),
    ),
    "sm_86": _CONSUMER,
    "sm_90": Defaults(
        half=(_C(128, 256, 64, 3, 8), _C(128, 128, 64, 4, 8), _C(64, 128, 64, 4, 4), _C(64, 64, 64, 4, 4), *_SKINNY),
        tf32=_AMPERE_TF32,
        full=_FULL,
        derive_half=(_C(128, 128, 64, 3, 8), _C(64, 128, 32, 3, 4), _C(64, 64, 32, 3, 4), _C(16, 64, 32, 3, 4)),
        derive_full=_CONSUMER.derive_full,
        budget=55,
        balance=295,
        launch=10_000_000,
        slower=(1.15, 1.3, 1.3),
    ),
    "sm_100": Defaults(
        half=(_C(128, 256, 64, 3, 8), _C(128, 128, 64, 4, 8), _C(64, 128, 64, 4, 4), _C(64, 64, 64, 4, 4), *_SKINNY),
        tf32=_AMPERE_TF32,
        full=_FULL,
        derive_half=_DERIVE,
        derive_full=_CONSUMER.derive_full,
        budget=30,
        balance=281,
        launch=24_000_000,
        slower=(1.25, 1.4, 1.3),
    ),
    "gfx942": Defaults(
        half=(_C(128, 128, 64, 2, 8), _C(64, 64, 64, 2, 4), _C(32, 64, 64, 2, 4), _C(16, 64, 64, 2, 4)),
        tf32=(),
        full=_FULL,
        derive_half=(_C(64, 64, 32, 2, 4), _C(32, 64, 32, 2, 4), _C(16, 64, 32, 2, 4)),
        derive_full=(_C(64, 64, 16, 2, 8), *_SKINNY_FULL),
        budget=90,
        balance=247,
        launch=16_000_000,
        slower=(1.15, 1.3, 1.3),
    ),
    "gfx1100": Defaults(
        half=(_C(128, 64, 32, 2, 8), _C(64, 64, 32, 2, 4), _C(32, 64, 32, 2, 4), _C(16, 64, 32, 2, 4)),
        tf32=(),
        full=_FULL,
        derive_half=_UNALIGNED_DERIVE,
        derive_full=(_C(32, 64, 16, 2, 4), _C(16, 64, 16, 2, 4)),
        budget=190,
        balance=128,
        launch=2_900_000,
        slower=(1.15, 1.3, 1.3),
    ),
    # Its cost is an operation's, whatever the block: few large blocks.
    "interpreter": Defaults(
        half=(_C(64, 64, 64, 1, 4),),
        tf32=(),
        full=(_C(64, 64, 64, 1, 4),),
        derive_half=(_C(64, 64, 64, 1, 4),),
        derive_full=(_C(64, 64, 64, 1, 4),),
        budget=1 << 30,
        balance=1,
        launch=1,
        slower=(0.0, 0.0, 0.0),
    ),
}


# Below this many instructions a multiprocessor, a launch of its own costs more than the derivative repeated: 3 µs.
_LAUNCH = 650_000
# What a second operand tile costs the product an element, loads and cache traffic, in the same unit.
_SECOND_OPERAND = 10


def prune(config: LinearConfig, problem: LinearProblem, facts: DeviceFacts) -> str | None:
    """Why the configuration cannot or should not serve the problem on this device; None: it can."""
    if config.kernel == "torch":
        if config != TORCH:
            return "torch's product has no tile"
        return None if problem.torch_serves else "torch's product has another dtype or precision"
    if config.kernel != "tiled" and problem.product != "forward":
        return "a kernel of the forward"
    if config.kernel == "skinny":
        if problem.rows > SKINNY_ROWS:
            return f"more than {SKINNY_ROWS} rows"
        if config.rows != SKINNY_ROWS and (config.rows, problem.rows) != (1, 1):
            return f"a tile of neither one row nor {SKINNY_ROWS}"
    if config.kernel == "persistent":
        if not problem.descriptors:
            return "a matrix that no tensor descriptor can stand for, or a device without them"
        if config.splits > 1:
            return "one program a tile only"
        if problem.rows <= SKINNY_ROWS:
            return "more than half of the tile is padding"
    if config.specialize and not 100 <= facts.capability < 120:
        return "the compiler specialises no warps for this device"
    if not config.prologue and not problem.derives:
        return "nothing to compute before the product"
    least = config.rows if config.kernel == "skinny" else 16
    unfit = tile_unfit(config, problem, facts, least_rows=least)
    if unfit is not None:
        return unfit
    if config.splits > 1 and config.splits * config.depth * 4 > problem.depth:
        return "fewer than four steps a program"
    return None


def tile_unfit(
    config: Any,
    problem: Any,
    facts: DeviceFacts,
    products: int = 1,
    least_rows: int = 16,
    free: tuple[int, int] = (16, 64),
) -> str | None:
    """Why a tile does not suit a problem's sizes or the device; None: it does.

    Args:
        config, problem: of one of the family's products: a tile with ``shared_memory(problem)``, and sizes.
        products: how many sums a thread keeps for an element of the tile.
        least_rows: that a tile may have.
        free: rows and columns that a tile may have however few the problem has.
    """
    if config.rows < least_rows or min(config.cols, config.depth) < 16:
        return "a side of the tile is shorter than a matrix instruction's"
    if min(config.num_stages, config.num_warps, config.group, getattr(config, "splits", 1)) < 1:
        return "no warps, stages or programs"
    if config.shared_memory(problem) > facts.shared_memory:
        return f"more than {facts.shared_memory} bytes of shared memory"
    threads = config.num_warps * facts.warp_size
    if threads > 1024:
        return "more than 1024 threads a program"
    if products * config.rows * config.cols > 128 * threads:
        return "more than 128 sums a thread"
    # What is padding costs the interpreter nothing: its cost is an operation's.
    empty = config.rows >= 2 * max(problem.rows, free[0]) or config.cols >= 2 * max(problem.cols, free[1])
    if empty and facts.vendor != "interpreter":
        return "more than half of the tile is padding"
    return None


def table_of(facts: DeviceFacts) -> str:
    """Which entry of a table of defaults is a device's, known or not: its own, or the nearest older relative's."""
    if facts.vendor == "amd":
        return "gfx942" if facts.arch.startswith("gfx9") else "gfx1100"
    if facts.vendor == "interpreter":
        return "interpreter"
    capability = facts.capability
    if capability < 80:
        return "sm_75"
    if capability == 80:
        return "sm_80"
    if 90 <= capability < 120 and facts.shared_memory >= TARGETS["sm_90"].shared_memory:
        return "sm_100" if capability >= 100 else "sm_90"
    return "sm_86"


def default_config(problem: LinearProblem, facts: DeviceFacts) -> LinearConfig:
    """A configuration that always fits: a tile of the table, or torch's product where that is expected to be faster.

    The forward by tensor descriptors is not among the defaults: it has been compiled, not yet timed.
    """
    from fusedops.linear.tuning_skinny import skinny_config  # which builds on this module

    defaults = DEFAULTS[table_of(facts)]
    if problem.torch_serves and not _fusion_pays(problem, defaults):
        return TORCH
    if problem.product == "forward" and problem.rows <= SKINNY_ROWS and facts.vendor != "interpreter":
        return skinny_config(problem, facts)
    return tiled_config(problem, facts)


def tiled_config(problem: LinearProblem, facts: DeviceFacts) -> LinearConfig:
    """The largest tile of the table that leaves no multiprocessor idle; for a deep and small result, several programs
    a tile."""
    defaults = DEFAULTS[table_of(facts)]
    tiles = _tiles(problem, defaults, facts)
    fitting = [c for c in tiles if prune(c, problem, facts) is None] or [tiles[-1]]
    # A tile of fewer than 64 rows only where there are no more rows: it reads the other operand once for few.
    fitting = [c for c in fitting if c.rows >= min(problem.rows, 64)] or fitting
    chosen = fitting[-1]
    for config in fitting:
        if _programs(config, problem) >= facts.multiprocessor_count:
            chosen = config
            break
    if problem.derives and not _prologue_pays(problem, chosen, defaults.budget, facts):
        return replace(chosen, prologue=False)
    if problem.derives:
        return chosen
    # Eight steps a program at the least, so that the sums of a program are worth their way through memory.
    splits = min(facts.multiprocessor_count // _programs(chosen, problem), problem.depth // (8 * chosen.depth), 16)
    return replace(chosen, splits=1 << (splits.bit_length() - 1)) if splits > 1 else chosen


def _programs(config: LinearConfig, problem: LinearProblem) -> int:
    return max(1, ceil_div(problem.rows, config.rows) * ceil_div(problem.cols, config.cols))


def _fusion_pays(problem: LinearProblem, defaults: Defaults) -> bool:
    """Whether our product, ``slower`` than torch's by assumption, saves more than that in passes over the result.

    All in bytes of device memory that take as long. A result of few rows is bound by the reading of the weight, where
    neither is faster.
    """
    if problem.rows <= SKINNY_ROWS and problem.product == "forward":
        return True
    # A pass of its own reads the result and writes it; what is written down for the backward need not be written twice.
    saved = 0
    if problem.product == "forward" and (problem.activation is not None or problem.extras):
        passes = 1 if problem.keeps else 2
        saved = passes * problem.itemsize * problem.rows * problem.cols + defaults.launch
    elif problem.derives:
        saved = 3 * problem.itemsize * problem.rows * problem.depth + defaults.launch
    slower, balance = defaults.slower[0], float(defaults.balance)
    if problem.itemsize == 4:
        # TF32 has half the rate of 16 bits; full precision about a sixteenth, without tensor cores.
        slower, balance = (defaults.slower[1], balance / 2) if problem.tf32 else (defaults.slower[2], balance / 16)
    product = 2 * problem.rows * problem.cols * problem.depth / balance
    return (slower - 1) * product <= saved


def _tiles(problem: LinearProblem, defaults: Defaults, facts: DeviceFacts) -> _Tiles:
    if facts.vendor == "interpreter":
        return defaults.half
    if problem.itemsize == 4:
        if problem.derives:
            return defaults.derive_full
        if problem.tf32 and defaults.tf32:
            if problem.precision == "tf32x3":
                return _TF32X3
            return defaults.tf32 if problem.aligned else _UNALIGNED_TF32
        return defaults.full
    if not problem.aligned:
        return _UNALIGNED_DERIVE if problem.derives else _UNALIGNED_HALF
    if problem.derives:
        return defaults.derive_half
    return defaults.half[1:] if problem.extras else defaults.half  # dropout and a residual want registers


def _prologue_pays(problem: LinearProblem, config: LinearConfig, budget: int, facts: DeviceFacts) -> bool:
    """Whether repeating the derivative in every block column costs less than a pass that computes dZ once.

    Both in instructions that the device could have issued: repeated, an element of dZ costs ``Activation.cost`` for
    each block column of the result; a pass costs its memory traffic and a launch.
    """
    assert problem.activation is not None
    repeated = ceil_div(problem.cols, config.cols) * (ACTIVATIONS[problem.activation].cost + _SECOND_OPERAND)
    elements = problem.rows * problem.depth
    return elements * (repeated - budget) <= _LAUNCH * facts.multiprocessor_count


def work(config: LinearConfig, problem: LinearProblem, facts: DeviceFacts) -> Work:
    """What the problem costs with the configuration, all its kernels together."""
    if problem.derives and not config.prologue:
        return _work_after_pass(problem, facts)
    if config.kernel == "torch":
        return _torch_work(problem, facts)
    made = _own_work(config, problem, facts)
    elements = padded(config, problem)
    if problem.product == "forward":
        ordinary, special = cost_of(problem.activation)
        ordinary += problem.bias + problem.residual + 12 * problem.dropout  # a quarter of Philox's ten rounds
        return made._replace(scalar=elements * ordinary, special=elements * special)
    if problem.derives:
        # Every block column repeats it.
        repeated = ceil_div(problem.cols, config.cols) * float(problem.rows) * problem.depth
        ordinary, special = cost_of(problem.activation, True)
        made = made._replace(scalar=repeated * ordinary, special=repeated * special)
    if problem.bias:
        sums = float(problem.rows) * problem.depth
        made = made._replace(scalar=made.scalar + sums, launches=made.launches + (2 if config.splits > 1 else 0))
    return made


def _own_work(config: LinearConfig, problem: LinearProblem, facts: DeviceFacts) -> Work:
    result = float(problem.rows) * problem.cols
    out = ITEMSIZES[problem.out_dtype]
    results = result * (out * (1 + problem.residual + problem.accumulate) + problem.itemsize * problem.keeps)
    multiplies = config.kernel == "skinny" and config.rows == 1
    shared_memory = config.shared_memory(problem)
    made = tile_work(
        config, facts, rows=problem.rows, cols=problem.cols, depth=problem.depth,
        itemsizes=(problem.itemsize, problem.itemsize),
        unit="float32" if multiplies else unit_of(problem.itemsize, problem.tf32, facts),
        results=results, shared_memory=shared_memory, left=2 if problem.derives else 1, parts=problem.pairs,
        splits=config.splits,
    )  # fmt: skip
    if problem.precision == "tf32x3":
        made = made._replace(product=3 * made.product)
    if multiplies:  # a thread has its part of the weight's tile, as float32, and an eighth of that in sums
        a_thread = config.cols * config.depth / (config.num_warps * facts.warp_size)
        made = made._replace(registers=1.125 * a_thread, operands=0.0)
    if config.kernel == "persistent":
        by_memory = (facts.shared_memory + 1024) // (shared_memory + 1024)
        resident = max(1, min(by_memory, 65536 // (256 * 32 * config.num_warps)))
        made = made._replace(programs=min(made.programs, resident * facts.multiprocessor_count))
    return made


def _work_after_pass(problem: LinearProblem, facts: DeviceFacts) -> Work:
    """A pass computes dZ (and its column sums); the product of it is another problem, with a default of its own."""
    product = problem._replace(activation=None, bias=False, layout="r" + problem.layout[1])
    made = work(default_config(product, facts), product, facts)
    return _with_pass(made, problem, float(problem.rows) * problem.depth, 3, True)


def _with_pass(
    made: Work, problem: LinearProblem, elements: float, passed: int, derivative: bool, launches: int = 1
) -> Work:
    """With an elementwise kernel that reads and writes ``passed`` times ``elements``; a bias's sums take two more."""
    ordinary, special = cost_of(problem.activation, derivative)
    size = passed * problem.itemsize * elements
    if problem.product == "grad_weight" and problem.bias:
        launches += 2
    return made._replace(
        scalar=made.scalar + elements * ordinary,
        special=made.special + elements * special,
        memory=made.memory + size,
        cached=made.cached + size,
        launches=made.launches + launches,
    )


def _torch_work(problem: LinearProblem, facts: DeviceFacts) -> Work:
    """torch's product and what comes after it.

    The product is taken to have the best of our table's tiles, with as many programs a tile as suits it, and to take
    ``slower`` times less of whatever ours would be bound by, but device memory.
    """
    from fusedops.autotune.roofline import estimate  # which wants to know all operators

    core = problem._replace(
        activation=None, bias=False, keeps=False, residual=False, dropout=False, accumulate=False,
        out_dtype=problem.dtype,
    )  # fmt: skip
    defaults = DEFAULTS[table_of(facts)]
    slower = defaults.slower[0 if problem.itemsize == 2 else 1 if problem.tf32 else 2]
    made = min(_faster(core, slower or 1.0, defaults, facts), key=lambda work: estimate(work, facts))
    result, item, out = float(problem.rows) * problem.cols, problem.itemsize, ITEMSIZES[problem.out_dtype]
    if problem.product != "forward":
        # Read again where it is added to: what was there, or the first pair's product.
        again = result * out * (problem.accumulate + 2 * (problem.pairs - 1))
        made = made._replace(
            memory=made.memory + beyond_cache(again, facts),
            cached=made.cached + again,
            launches=made.launches + problem.pairs - 1,
        )
        if problem.bias:
            made = _with_pass(made, problem, float(problem.rows) * problem.depth, 1, True)
        return made
    kept_output = problem.keeps and ACTIVATIONS[problem.activation or "relu"].derivative_of == "output"
    ends_with_it = problem.bias and problem.activation in ("relu", "gelu_tanh")
    if not (problem.keeps or problem.extras) and (problem.activation is None or ends_with_it):
        return made
    ordinary, special = cost_of(problem.activation)
    ordinary += problem.residual + 12 * problem.dropout
    written = result * (out * (1 + problem.residual) + item * kept_output)
    return made._replace(
        scalar=result * ordinary,
        special=result * special,
        memory=made.memory + beyond_cache(result * item, facts) + written,
        cached=made.cached + result * item + written,
        launches=made.launches + 1,
    )


def _faster(problem: LinearProblem, times: float, defaults: Defaults, facts: DeviceFacts) -> Iterator[Work]:
    """A product with each of the table's tiles that suit it, so many times as fast as ours."""
    tiles = _tiles(problem, defaults, facts)
    fitting = [tile for tile in tiles if prune(tile, problem, facts) is None] or [tiles[-1]]
    for tile, splits in itertools.product(fitting, (1, 2, 4, 8)):
        split = replace(tile, splits=splits)
        if splits == 1 or prune(split, problem, facts) is None:
            made = _own_work(split, problem, facts)
            yield made._replace(
                product=made.product / times,
                operands=made.operands / times,
                cached=max(made.cached / times, made.memory),
            )


LINEAR = Operator(
    name="linear",
    problem=LinearProblem,
    config=LinearConfig,
    default=default_config,
    space=linear_space,
    prune=prune,
    work=work,
    trials="fusedops.linear.trials",
    sources=(
        "fusedops.linear.kernels_forward",
        "fusedops.linear.kernels_backward",
        "fusedops.linear.kernels_persistent",
        "fusedops.linear.kernels_skinny",
        "fusedops.linear.kernels_preactivation",
    ),
    bucketed=lambda problem: ("depth",) if problem.product == "grad_weight" else ("rows",),
)
