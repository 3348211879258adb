"""Launch configurations of the attention kernels: the problem, the space that may be searched, and the defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from fusedops.autotune.buckets import bucket
from fusedops.autotune.operator import MOST_STAGES, Config, Operator, Unit, Work
from fusedops.runtime.device import DeviceFacts
from fusedops.runtime.launch import ITEMSIZES, ceil_div, next_power_of_2

Pass = Literal["forward", "backward_kv", "backward_q", "backward_mask"]
PASSES: tuple[Pass, ...] = get_args(Pass)

_SMALLEST = 16  # a tile's side: what a matrix instruction takes
_LARGEST = 128

# Queries and keys a block of a block mask: a multiple of every tile.
BLOCK = 128


def head_block(size: int) -> int:
    """A head's size as kernels hold it: a power of two, at least 16."""
    return max(_SMALLEST, next_power_of_2(size))


# Buckets of lengths and of heads end here.
MOST_LENGTH = 1 << 15
MOST_HEADS = 1024

# What a kernel does to scores beside scaling and the bounds of causal and window, as problems name it.
FEATURES = ("softcap", "dropout", "mask", "bool_mask", "alibi", "score_mod", "mask_mod", "sinks", "blocks", "packed")
_MODIFY = frozenset(FEATURES[:7])


class AttentionProblem(NamedTuple):
    """What an attention kernel's configuration depends on. Make it with :meth:`of`.

    Attributes:
        kernel: which of the four kernels.
        d_k, d_v: head sizes of keys and values.
        seqlen_q, seqlen_k: lengths, as buckets up to 32,768. Of packed sequences: of all of them together.
        heads: query heads of the whole batch, as a bucket up to 1,024.
        queries: query heads that share a key head.
        dtype: of q, k and v.
        precision: of float32 products, ``ieee`` or one of TF32's; ``ieee`` for others.
        causal: keys beyond the diagonal are left out.
        window: keys too far before it are.
        features: what else is done, names of :data:`FEATURES` in that order, joined by ``+``.
        described: tensor descriptors can stand for the tensors whose tiles move.
    """

    kernel: Pass
    d_k: int
    d_v: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    queries: int
    dtype: str
    precision: str
    causal: bool
    window: bool
    features: str
    described: bool

    @classmethod
    def of(
        cls,
        kernel: Pass,
        d_k: int,
        d_v: int,
        seqlen_q: int,
        seqlen_k: int,
        *,
        heads: int = 32,
        queries: int = 1,
        dtype: str = "bfloat16",
        precision: str = "ieee",
        causal: bool = False,
        window: bool = False,
        features: str = "",
        described: bool = False,
    ) -> AttentionProblem:
        return cls(
            kernel, d_k, d_v, bucket(seqlen_q, MOST_LENGTH), bucket(seqlen_k, MOST_LENGTH), bucket(heads, MOST_HEADS),
            queries, dtype, precision, causal, window, features, described,
        )  # fmt: skip

    @property
    def block_dk(self) -> int:
        """The head size of keys as kernels hold it: a power of two, at least 16."""
        return head_block(self.d_k)

    @property
    def block_dv(self) -> int:
        return head_block(self.d_v)

    @property
    def rows(self) -> int:
        """Queries, as a power of two from 16 to 128, which stands for all more: what a tile need not exceed."""
        return min(head_block(self.seqlen_q), _LARGEST)

    @property
    def keys(self) -> int:
        return min(head_block(self.seqlen_k), _LARGEST)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of q, k and v."""
        return ITEMSIZES[self.dtype]

    @property
    def modified(self) -> bool:
        """Whether more has to be done to a score, or to its weight, than to scale it."""
        return self.features != "" and not _MODIFY.isdisjoint(self.features.split("+"))


@dataclass(frozen=True, slots=True)
class AttentionConfig(Config):
    """Attributes:
    block_m: queries a tile.
    block_n: keys a tile.
    num_warps: warps a program.
    num_stages: tiles in flight in the software pipeline.
    descriptors: the tiles that move are copied by tensor descriptors.
    persistent: one program a multiprocessor, which takes one tile of queries after another (forward).
    specialize: loads and products in warps of their own (forward).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool = False
    persistent: bool = False
    specialize: bool = False

    def shared_memory(self, problem: AttentionProblem, facts: DeviceFacts) -> int:
        """Bytes of shared memory, at most about: the tiles in flight, those that stay, and a tile of scores or mask.

        AMD's loads go through registers: there only what is in flight between steps stays.
        """
        m = self.block_m * (problem.block_dk + problem.block_dv)
        n = self.block_n * (problem.block_dk + problem.block_dv)
        moving = m if problem.kernel == "backward_kv" else n
        if facts.vendor == "amd":
            tile = max(self.block_m, self.block_n) * max(problem.block_dk, problem.block_dv)
            elements = max((self.num_stages - 1) * moving, tile)
        elif problem.kernel == "forward":
            elements = self.num_stages * n + self.block_m * problem.block_dk
        elif problem.kernel == "backward_mask":
            elements = m + n
        else:
            elements = self.num_stages * moving + (n if problem.kernel == "backward_kv" else m)
        scores = self.block_m * self.block_n * (4 if problem.modified else problem.itemsize)
        return problem.itemsize * elements + scores

    def registers(self, problem: AttentionProblem, warp_size: int) -> float:
        """Registers a thread that the sums and the tiles of scores take alone."""
        scores = self.block_m * self.block_n
        held = {
            "forward": self.block_m * problem.block_dv + scores,
            "backward_kv": self.block_n * (problem.block_dk + problem.block_dv) + 2 * scores,
            "backward_q": self.block_m * problem.block_dk + 2 * scores,
            "backward_mask": 3 * scores,
        }[problem.kernel]
        return held / (self.num_warps * warp_size)


# With descriptors, and without them for what they cannot describe; the last two are candidates for Hopper and Blackwell
# alone. Triton may refuse to specialise warps (which depends on its version, the device, the tile and the mask): such a
# candidate fails to compile and is passed over. With Triton 3.9 it does so for sm_100 and not for sm_90.
SPACE = tuple(
    AttentionConfig(block_m, block_n, num_warps, num_stages, descriptors, persistent, specialize)
    for block_m in (16, 32, 64, 128)
    for block_n in (16, 32, 64, 128)
    for num_warps in (2, 4, 8)
    for num_stages in (1, 2, 3, 4)
    for descriptors, persistent, specialize in (
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, True, True),
    )
)


def copies_by_descriptors(facts: DeviceFacts) -> bool:
    """Whether the device copies tiles by tensor descriptors; the interpreter does what they do."""
    return facts.vendor == "interpreter" or facts.capability >= 90


def prune(config: AttentionConfig, problem: AttentionProblem, facts: DeviceFacts) -> str | None:
    """Why the configuration cannot or should not serve the problem on this device; None: it can."""
    if min(config.block_m, config.block_n) < 16:
        return "a side of the tile is shorter than a matrix instruction's"
    if config.num_warps < 1 or not 1 <= config.num_stages <= MOST_STAGES:
        return f"no warp, or not 1 to {MOST_STAGES} stages"
    if config.block_m > problem.rows or config.block_n > problem.keys:
        return "the tile is larger than the problem"
    if problem.kernel == "backward_mask" and config.num_stages > 1:
        return "the kernel has nothing to keep in flight"
    if config.descriptors and not (problem.described and copies_by_descriptors(facts)):
        return "tensor descriptors do not serve these tensors on this device"
    if config.descriptors and problem.kernel == "backward_mask":
        return "the kernel moves no tiles"
    if config.specialize and not config.persistent:
        return "warps are specialised in persistent programs"
    if (config.persistent or config.specialize) and not (problem.kernel == "forward" and 90 <= facts.capability < 120):
        return "neither persistent nor specialised programs are made for this kernel or device"
    if config.shared_memory(problem, facts) > facts.shared_memory:
        return f"more than {facts.shared_memory} bytes of shared memory"
    most = {"nvidia": 200, "amd": 400, "interpreter": math.inf}[facts.vendor]
    if config.registers(problem, facts.warp_size) > most:
        return "sums and scores do not fit in registers"
    return None


C = AttentionConfig
Table = dict[tuple[Pass, int, int], tuple[AttentionConfig, AttentionConfig]]

# (kernel, bytes an element, head sizes up to) -> (block_m, block_n, num_warps, num_stages), first for plain
# scores, then for modified ones. Starting points, none of them timed yet; tests/compile compiles them for every target
# served. The 16-bit forwards begin with the tiles of FlashAttention-2 (Dao 2023) and were made smaller, or given more
# warps, where the compiler spilled. float32 products in full precision are not made by tensor cores: their sums take
# registers.
_FULL_PRECISION: Table = {
    ("forward", 4, 64): (C(64, 32, 8, 2), C(64, 32, 8, 2)),
    ("forward", 4, 128): (C(32, 16, 4, 2), C(32, 16, 4, 2)),
    ("forward", 4, 256): (C(32, 16, 8, 1), C(32, 16, 8, 1)),
    ("backward_kv", 4, 64): (C(32, 64, 8, 2), C(32, 32, 8, 2)),
    ("backward_kv", 4, 128): (C(16, 32, 8, 1), C(16, 32, 8, 1)),
    ("backward_kv", 4, 256): (C(16, 16, 8, 1), C(16, 16, 8, 1)),
    ("backward_q", 4, 64): (C(32, 32, 8, 2), C(32, 32, 8, 2)),
    ("backward_q", 4, 128): (C(32, 16, 8, 2), C(32, 16, 8, 2)),
    ("backward_q", 4, 256): (C(16, 16, 8, 2), C(16, 16, 8, 2)),
    ("backward_mask", 4, 64): (C(32, 32, 4, 1), C(32, 32, 4, 1)),
    ("backward_mask", 4, 128): (C(16, 16, 4, 1), C(16, 16, 4, 1)),
    ("backward_mask", 4, 256): (C(16, 16, 8, 1), C(16, 16, 8, 1)),
}

DEFAULTS: dict[str, Table] = {
    # Triton has no tensor-core path for Turing: small tiles, plain multiply-adds.
    "sm_75": {
        (kernel, itemsize, size): (C(rows, columns, 4, 1), C(rows, columns, 4, 1))
        for kernel in PASSES
        for itemsize in (2, 4)
        for size, rows, columns in ((64, 32, 32), (128, 32, 16), (256, 16, 16))
    },
    "sm_80": {
        **_FULL_PRECISION,
        ("forward", 2, 64): (C(128, 32, 4, 3), C(64, 64, 4, 2)),
        ("forward", 2, 128): (C(128, 64, 8, 3), C(64, 64, 8, 2)),
        ("forward", 2, 256): (C(64, 32, 8, 2), C(64, 32, 8, 2)),
        ("backward_kv", 2, 64): (C(32, 128, 8, 2), C(32, 64, 4, 2)),
        ("backward_kv", 2, 128): (C(64, 64, 8, 2), C(32, 64, 8, 2)),
        ("backward_kv", 2, 256): (C(32, 32, 8, 1), C(32, 32, 8, 1)),
        ("backward_q", 2, 64): (C(128, 64, 8, 2), C(64, 32, 8, 2)),
        ("backward_q", 2, 128): (C(128, 32, 8, 2), C(64, 64, 8, 2)),
        ("backward_q", 2, 256): (C(32, 32, 4, 1), C(32, 32, 4, 1)),
        ("backward_mask", 2, 64): (C(64, 64, 8, 1), C(64, 64, 8, 1)),
        ("backward_mask", 2, 128): (C(64, 32, 8, 1), C(64, 32, 8, 1)),
        ("backward_mask", 2, 256): (C(32, 16, 8, 1), C(32, 16, 8, 1)),
    },
    "sm_90": {
        **_FULL_PRECISION,
        ("forward", 2, 64): (C(128, 128, 8, 3), C(64, 64, 4, 2)),
        ("forward", 2, 128): (C(128, 128, 8, 2), C(128, 64, 8, 3)),
        ("forward", 2, 256): (C(64, 64, 8, 2), C(64, 64, 8, 2)),
        ("backward_kv", 2, 64): (C(64, 128, 8, 3), C(64, 128, 8, 3)),
        ("backward_kv", 2, 128): (C(32, 128, 8, 3), C(32, 64, 4, 2)),
        ("backward_kv", 2, 256): (C(64, 32, 8, 1), C(64, 32, 8, 1)),
        ("backward_q", 2, 64): (C(128, 64, 8, 3), C(128, 64, 8, 3)),
        ("backward_q", 2, 128): (C(128, 128, 8, 2), C(128, 64, 8, 3)),
        ("backward_q", 2, 256): (C(64, 32, 8, 2), C(32, 32, 4, 1)),
        ("backward_mask", 2, 64): (C(64, 64, 8, 1), C(64, 64, 8, 1)),
        ("backward_mask", 2, 128): (C(64, 32, 8, 1), C(64, 32, 8, 1)),
        ("backward_mask", 2, 256): (C(64, 32, 8, 1), C(64, 32, 8, 1)),
    },
    "sm_100": {
        **_FULL_PRECISION,
        ("forward", 4, 128): (C(32, 16, 4, 2), C(32, 16, 4, 1)),
        ("forward", 2, 64): (C(128, 64, 8, 2), C(128, 64, 8, 3)),
        ("forward", 2, 128): (C(128, 128, 8, 2), C(128, 64, 8, 3)),
        ("forward", 2, 256): (C(64, 64, 8, 2), C(64, 64, 8, 2)),
        ("backward_kv", 2, 64): (C(64, 128, 8, 2), C(64, 128, 8, 2)),
        ("backward_kv", 2, 128): (C(64, 128, 8, 2), C(64, 128, 8, 2)),
        ("backward_kv", 2, 256): (C(32, 64, 8, 1), C(32, 64, 8, 1)),
        ("backward_q", 2, 64): (C(128, 64, 8, 3), C(128, 64, 8, 3)),
        ("backward_q", 2, 128): (C(128, 64, 8, 2), C(128, 64, 8, 2)),
        ("backward_q", 2, 256): (C(64, 32, 8, 2), C(64, 32, 8, 2)),
        ("backward_mask", 2, 64): (C(64, 64, 4, 1), C(64, 64, 4, 1)),
        ("backward_mask", 2, 128): (C(64, 64, 8, 1), C(64, 64, 8, 1)),
        ("backward_mask", 2, 256): (C(64, 32, 8, 1), C(64, 32, 8, 1)),
    },
    # CDNA's 512 registers a lane carry larger sums in four wavefronts.
    "gfx942": {
        ("forward", 2, 64): (C(128, 64, 4, 2), C(128, 64, 4, 2)),
        ("forward", 2, 128): (C(128, 32, 4, 2), C(128, 32, 4, 2)),
        ("forward", 2, 256): (C(64, 32, 4, 2), C(64, 32, 4, 2)),
        ("forward", 4, 64): (C(64, 32, 4, 1), C(64, 32, 4, 1)),
        ("forward", 4, 128): (C(32, 32, 4, 1), C(32, 32, 4, 1)),
        ("forward", 4, 256): (C(32, 16, 4, 1), C(32, 16, 4, 1)),
        ("backward_kv", 2, 64): (C(64, 64, 4, 1), C(64, 64, 4, 1)),
        ("backward_kv", 2, 128): (C(32, 64, 4, 1), C(32, 64, 4, 1)),
        ("backward_kv", 2, 256): (C(16, 32, 4, 1), C(16, 32, 4, 1)),
        ("backward_kv", 4, 64): (C(32, 32, 4, 1), C(32, 32, 4, 1)),
        ("backward_kv", 4, 128): (C(16, 32, 4, 1), C(16, 32, 4, 1)),
        ("backward_kv", 4, 256): (C(16, 16, 4, 1), C(16, 16, 4, 1)),
        ("backward_q", 2, 64): (C(64, 64, 4, 1), C(64, 64, 4, 1)),
        ("backward_q", 2, 128): (C(64, 32, 4, 1), C(64, 32, 4, 1)),
        ("backward_q", 2, 256): (C(32, 32, 4, 1), C(32, 32, 4, 1)),
        ("backward_q", 4, 64): (C(32, 32, 4, 1), C(32, 32, 4, 1)),
        ("backward_q", 4, 128): (C(16, 16, 4, 1), C(16, 16, 4, 1)),
        ("backward_q", 4, 256): (C(16, 16, 4, 1), C(16, 16, 4, 1)),
        ("backward_mask", 2, 64): (C(64, 64, 4, 1), C(64, 64, 4, 1)),
        ("backward_mask", 2, 128): (C(64, 32, 4, 1), C(64, 32, 4, 1)),
        ("backward_mask", 2, 256): (C(32, 32, 4, 1), C(32, 32, 4, 1)),
        ("backward_mask", 4, 64): (C(32, 32, 4, 1), C(32, 32, 4, 1)),
        ("backward_mask", 4, 128): (C(16, 16, 4, 1), C(16, 16, 4, 1)),
        ("backward_mask", 4, 256): (C(16, 16, 4, 1), C(16, 16, 4, 1)),
    },
    # Its cost is an operation's, whatever the tile: few large tiles, yet more than one in the tests' short sequences.
    "interpreter": {
        (kernel, itemsize, size): (C(64, 64, 4, 1), C(64, 64, 4, 1))
        for kernel in PASSES
        for itemsize in (2, 4)
        for size in (64, 128, 256)
    },
}


# sm_12x has sm_8x's matrix instructions and shared memory, and an assembler that spills sooner.
DEFAULTS["sm_120"] = {
    **DEFAULTS["sm_80"],
    ("backward_kv", 2, 64): (C(16, 128, 8, 2), C(16, 64, 4, 2)),
}


# Heads beyond this are wide: in float32 their smallest tiles fill Turing's shared memory.
WIDE = 128


def too_small(facts: DeviceFacts, d: int, dv: int, itemsize: int) -> str | None:
    """Why no configuration suits heads of these sizes on a device; None: one does."""
    if facts.vendor == "amd" and not facts.arch.startswith("gfx9"):
        # Matrix operands are held twice in RDNA's registers: the smallest tiles of the backward spill (gfx1100, D 64).
        return f"{facts.arch}: the backward does not fit in its registers"
    if facts.capability == 75 and itemsize == 4 and min(d, dv) > WIDE:
        return f"{facts.arch}: float32 heads of more than {WIDE} do not fit in its shared memory"
    return None


def defaults_for(facts: DeviceFacts) -> Table:
    """The table's entry for a device, known or not: the nearest older relative's."""
    if facts.vendor == "interpreter":
        return DEFAULTS["interpreter"]
    if facts.vendor == "amd":
        return DEFAULTS["gfx942"]
    capability = facts.capability
    if capability < 80:
        return DEFAULTS["sm_75"]
    if capability < 90:
        return DEFAULTS["sm_80"]
    if capability >= 120:
        return DEFAULTS["sm_120"]
    return DEFAULTS["sm_90" if capability < 100 else "sm_100"]


def default_config(problem: AttentionProblem, facts: DeviceFacts) -> AttentionConfig:
    """The table's configuration, made smaller until it suits the problem's lengths and fits in shared memory."""
    size = max(64, problem.block_dk, problem.block_dv)
    config = defaults_for(facts)[problem.kernel, problem.itemsize, size][problem.modified]
    config = replace(config, block_m=min(config.block_m, problem.rows), block_n=min(config.block_n, problem.keys))
    while config.shared_memory(problem, facts) > facts.shared_memory:
        smaller = _smaller(config)
        if smaller == config:
            break
        config = smaller
    # Fewer instructions and registers than by pointers, for every tile of these tables (docs/attention.md).
    described = problem.described and copies_by_descriptors(facts) and facts.vendor != "interpreter"
    return replace(config, descriptors=described and problem.kernel != "backward_mask")


def _smaller(config: AttentionConfig) -> AttentionConfig:
    """A step towards less shared memory: fewer stages, then a smaller tile; the same where there is none."""
    if config.num_stages > 1:
        return replace(config, num_stages=config.num_stages - 1)
    if config.block_m > 16 and config.block_m >= config.block_n:
        return replace(config, block_m=config.block_m // 2)
    return replace(config, block_n=max(16, config.block_n // 2))


# What a problem does not tell, as the tuner's trials have it: how many keys before its own place a query sees within a
# window, and how many packed sequences, or documents of a block mask, there are: 1, 2 or 4, of 128 or more.
def window_of(seqlen_k: int) -> int:
    return max(1, min(1024, seqlen_k // 4))


def sequences_of(seqlen_q: int, seqlen_k: int) -> int:
    most = min(seqlen_q, seqlen_k) // BLOCK
    return 4 if most >= 4 else 2 if most >= 2 else 1


def _visited(config: AttentionConfig, problem: AttentionProblem) -> float:
    """Scores that all tiles together have, of one head: those that are seen, and what a tile at an edge has beside."""
    rows, keys, count = problem.seqlen_q, problem.seqlen_k, 1
    features = problem.features.split("+")
    if "packed" in features or "blocks" in features:
        count = sequences_of(rows, keys)
        rows, keys = ceil_div(rows, count), ceil_div(keys, count)
    # The diagonal ends at the last query and key where there are more keys, else it begins at the first ones.
    area, edges, least = float(rows * keys), 0, min(rows, keys)
    if problem.causal:
        area, edges = area - least * (least - 1) / 2, 1
    if problem.window:
        window, edges = window_of(keys), edges + 1
        hidden = max(0, keys - 1 - window)  # from the last query
        area = min(area, rows * (window + 1.0)) if problem.causal else area - min(hidden, rows) * hidden / 2
    padded_rows = ceil_div(rows, config.block_m) * config.block_m
    padded_keys = ceil_div(keys, config.block_n) * config.block_n
    area *= padded_rows * padded_keys / (rows * keys)
    # A line through tiles cuts least / block_m + least / block_n of them in two.
    area += edges * least * (config.block_m + config.block_n) / 2
    return count * min(area, float(padded_rows * padded_keys))


def _operands(config: AttentionConfig, problem: AttentionProblem, facts: DeviceFacts) -> float:
    """Bytes that the products of one tile of scores read from shared memory.

    A warp, or on Hopper and Blackwell a group of four, reads all columns' operand for each of its rows; the rows' own
    is read again for each warp along the columns, unless it stays in registers.
    """
    m, n, d_k, d_v = config.block_m, config.block_n, problem.block_dk, problem.block_dv
    grouped = 90 <= facts.capability < 120 and config.num_warps >= 4

    def read(rows: int, columns: int, depth: int, held: bool) -> float:
        if grouped and rows >= 64:
            across, along = rows // (64 if facts.capability < 100 else min(rows, 128)), 1
        else:
            across = min(config.num_warps, rows // _SMALLEST)
            along = max(1, config.num_warps // across)
        return depth * problem.itemsize * (across * columns + (0 if held else along * rows))

    scores = [(m, n, d_k), (m, n, d_v)]
    if problem.kernel == "forward":
        return read(*scores[0], not grouped) + read(m, d_v, n, True)
    if problem.kernel == "backward_kv":
        return sum(read(*s, False) for s in scores) + read(n, d_v, m, True) + read(n, d_k, m, True)
    if problem.kernel == "backward_q":
        return sum(read(*s, not grouped) for s in scores) + read(m, d_k, n, True)
    return sum(read(*s, False) for s in scores)


_UNITS: dict[str, Unit] = {"ieee": "float32", "tf32": "tf32", "tf32x3": "tf32"}
# Operations of a score: the softmax's and its gradient's, each further term, and dropout's ten rounds of Philox; and
# those of a row's maximum and sum over a tile, which four threads share.
_SCORE_OPERATIONS = {"forward": 6.0, "backward_kv": 8.0, "backward_q": 7.0, "backward_mask": 7.0}
_TERM_OPERATIONS, _DROPOUT_OPERATIONS, _ROW_OPERATIONS = 4.0, 30.0, 48.0


def work(config: AttentionConfig, problem: AttentionProblem, facts: DeviceFacts) -> Work:
    """What attention costs. Tiles that the causal rule or the window hides are not visited; keys and values (queries
    and their gradients) that the programs of a head read again come from the cache. A mask's gradient has all heads."""
    d_k, d_v, itemsize = problem.block_dk, problem.block_dv, problem.itemsize
    both = (problem.d_k + problem.d_v) * itemsize
    heads, rows, keys = problem.heads, problem.seqlen_q, problem.seqlen_k
    key_heads = ceil_div(heads, problem.queries)
    scores = heads * _visited(config, problem)
    features = problem.features.split("+") if problem.features else []
    row_tiles, key_tiles = heads * ceil_div(rows, config.block_m), key_heads * ceil_div(keys, config.block_n)
    products = {
        "forward": d_k + d_v,
        "backward_kv": 2 * (d_k + d_v),
        "backward_q": 2 * d_k + d_v,
        "backward_mask": d_k + d_v,
    }[problem.kernel]
    queries, statistics = heads * rows * both, 12.0 * heads * rows
    keys_once = key_heads * keys * both
    tile = config.block_n * both
    if problem.kernel == "forward":
        programs, memory = row_tiles, 2.0 * queries + keys_once
        cached = memory - keys_once + scores / config.block_m * both
        if config.persistent:
            programs = min(programs, facts.multiprocessor_count)
    elif problem.kernel == "backward_kv":
        programs, memory, tile = key_tiles, queries + 2.0 * keys_once, config.block_m * both
        cached = memory - queries + scores / config.block_n * both
    elif problem.kernel == "backward_q":
        programs, memory = row_tiles, 2.0 * queries + keys_once
        cached = memory - keys_once + scores / config.block_m * both
    else:
        programs = heads * ceil_div(rows, config.block_m) * ceil_div(keys, config.block_n)
        memory = queries + keys_once + heads * rows * keys * float(itemsize)
        cached = memory + scores * both * (1 / config.block_m + 1 / config.block_n)
        tile += config.block_m * both
    if "mask" in features or "bool_mask" in features:
        width = itemsize if "mask" in features else 1
        memory += rows * keys * width
        cached += scores * width
    unit = _UNITS[problem.precision] if itemsize == 4 else "half"
    operations = _SCORE_OPERATIONS[problem.kernel] + _TERM_OPERATIONS * len(features)
    special = 1.0 + 2 * ("softcap" in features)
    if problem.kernel == "forward":  # what a tile of keys changes in a row: its sums, and their weight
        operations += (d_v + _ROW_OPERATIONS) / config.block_n
        special += 1 / config.block_n
    tiles = scores / (config.block_m * config.block_n)
    passes = 3.0 if problem.precision == "tf32x3" and itemsize == 4 else 1.0
    if 90 <= facts.capability < 120 and (config.num_warps < 4 or config.block_m < 64):
        passes *= 2  # too small for a warp group's instruction: the older one has half of its rate
    return Work(
        programs=programs,
        num_warps=config.num_warps,
        product=2.0 * scores * products * passes,
        unit=unit,
        scalar=scores * (operations + _DROPOUT_OPERATIONS * ("dropout" in features)),
        special=scores * special,
        memory=memory + statistics,
        cached=cached + statistics,
        shared_memory=config.shared_memory(problem, facts),
        # With one stage a tile is waited for as soon as it is asked for: half of the time nothing is on its way.
        in_flight=tile * max(config.num_stages - 1, 0.5),
        registers=config.registers(problem, facts.warp_size),
        operands=tiles * _operands(config, problem, facts),
        waits=tiles / programs if config.num_stages == 1 else 0.0,
        steps=0.0 if problem.kernel == "backward_mask" else tiles,
    )


@lru_cache(maxsize=256)
def serves_queries(config: AttentionConfig, problem: AttentionProblem, facts: DeviceFacts) -> bool:
    """Whether a configuration of backward_kv can serve ``problem``, backward_q's, in one launch with its own.

    A configuration that was searched for keys alone may need more than there is for queries.
    """
    return ATTENTION.unfit(replace(config, descriptors=False), problem, facts) is None


ATTENTION = Operator(
    name="attention",
    problem=AttentionProblem,
    config=AttentionConfig,
    default=default_config,
    space=lambda problem: SPACE,
    prune=prune,
    work=work,
    trials="fusedops.attention.trials",
    sources=(
        "fusedops.attention.kernels_forward",
        "fusedops.attention.kernels_backward",
        "fusedops.attention.kernels_backward_kv",
        "fusedops.attention.kernels_backward_q",
        "fusedops.attention.kernels_backward_mask",
        "fusedops.attention.kernels_backward_joint",
    ),
    bucketed=lambda problem: ("seqlen_q", "seqlen_k", "heads"),
)
