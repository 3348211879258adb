"""Launch configurations of the attention kernels: the problem, the space that may be searched, and the defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from fusedops.runtime.device import DeviceFacts
from fusedops.runtime.launch import next_power_of_2

Pass = Literal["forward", "backward_kv", "backward_q", "backward_mask"]
PASSES: tuple[Pass, ...] = get_args(Pass)

_SMALLEST = 16  # a tile's side: what a matrix instruction takes
_LARGEST = 128

# Queries and keys a block of a block mask: a multiple of every tile.
BLOCK = 128


def _block(size: int) -> int:
    return max(_SMALLEST, next_power_of_2(size))


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """What an attention kernel's configuration depends on. Make it with :meth:`of`.

    Attributes:
        kernel: which of the four kernels.
        block_dk, block_dv: head sizes of keys and values as the kernels hold them: powers of two, at least 16.
        rows, keys: lengths of queries and keys as powers of two from 16 to 128, which stands for all longer ones:
            lengths are run-time values, but a tile need not be larger than what there is.
        itemsize: bytes of an element of q, k and v.
        causal: keys beyond the diagonal are left out.
        modified: more has to be done to a score, or to its weight, than to scale it.
        described: tensor descriptors can stand for the tensors whose tiles move.
    """

    kernel: Pass
    block_dk: int
    block_dv: int
    rows: int
    keys: int
    itemsize: int
    causal: bool
    modified: bool
    described: bool = False

    @classmethod
    def of(
        cls,
        kernel: Pass,
        d_k: int,
        d_v: int,
        seqlen_q: int,
        seqlen_k: int,
        itemsize: int,
        causal: bool,
        modified: bool,
        described: bool = False,
    ) -> AttentionProblem:
        rows, keys = min(_block(seqlen_q), _LARGEST), min(_block(seqlen_k), _LARGEST)
        return cls(kernel, _block(d_k), _block(d_v), rows, keys, itemsize, causal, modified, described)


@dataclass(frozen=True, slots=True)
class AttentionConfig:
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
    if config.registers(problem, facts.warp_size) > (400 if facts.vendor == "amd" else 200):
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
    ("backward_kv", 4, 64): (C(32, 32, 8, 2), C(32, 32, 8, 2)),
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
        ("forward", 2, 64): (C(128, 64, 8, 3), C(64, 64, 4, 2)),
        ("forward", 2, 128): (C(128, 64, 8, 3), C(64, 64, 8, 2)),
        ("forward", 2, 256): (C(64, 32, 8, 2), C(64, 32, 8, 2)),
        ("backward_kv", 2, 64): (C(32, 128, 8, 2), C(32, 64, 4, 2)),
        ("backward_kv", 2, 128): (C(64, 64, 8, 2), C(32, 64, 8, 2)),
        ("backward_kv", 2, 256): (C(32, 32, 8, 1), C(32, 32, 8, 1)),
        ("backward_q", 2, 64): (C(128, 64, 8, 2), C(64, 32, 8, 2)),
        ("backward_q", 2, 128): (C(64, 64, 8, 2), C(64, 64, 8, 2)),
        ("backward_q", 2, 256): (C(32, 32, 4, 1), C(32, 32, 4, 1)),
        ("backward_mask", 2, 64): (C(64, 64, 8, 1), C(64, 64, 8, 1)),
        ("backward_mask", 2, 128): (C(64, 32, 8, 1), C(64, 32, 8, 1)),
        ("backward_mask", 2, 256): (C(32, 16, 8, 1), C(32, 16, 8, 1)),
    },
    "sm_90": {
        **_FULL_PRECISION,
        ("forward", 2, 64): (C(128, 128, 8, 3), C(64, 64, 4, 2)),
        ("forward", 2, 128): (C(128, 64, 8, 3), C(128, 64, 8, 3)),
        ("forward", 2, 256): (C(64, 64, 8, 2), C(64, 64, 8, 2)),
        ("backward_kv", 2, 64): (C(64, 128, 8, 3), C(64, 128, 8, 3)),
        ("backward_kv", 2, 128): (C(64, 64, 8, 2), C(32, 64, 8, 2)),
        ("backward_kv", 2, 256): (C(64, 32, 8, 1), C(64, 32, 8, 1)),
        ("backward_q", 2, 64): (C(128, 64, 8, 3), C(128, 64, 8, 3)),
        ("backward_q", 2, 128): (C(128, 64, 8, 3), C(128, 64, 8, 3)),
        ("backward_q", 2, 256): (C(64, 32, 8, 2), C(32, 32, 4, 1)),
        ("backward_mask", 2, 64): (C(64, 64, 8, 1), C(64, 64, 8, 1)),
        ("backward_mask", 2, 128): (C(64, 32, 8, 1), C(64, 32, 8, 1)),
        ("backward_mask", 2, 256): (C(64, 32, 8, 1), C(64, 32, 8, 1)),
    },
    "sm_100": {
        **_FULL_PRECISION,
        ("forward", 2, 64): (C(64, 64, 4, 2), C(128, 64, 8, 3)),
        ("forward", 2, 128): (C(128, 64, 8, 3), C(128, 64, 8, 3)),
        ("forward", 2, 256): (C(64, 64, 8, 2), C(64, 64, 8, 2)),
        ("backward_kv", 2, 64): (C(64, 128, 8, 2), C(64, 128, 8, 2)),
        ("backward_kv", 2, 128): (C(64, 64, 8, 2), C(64, 64, 8, 2)),
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
    # sm_12x has sm_8x's matrix instructions and shared memory.
    if capability < 90 or capability >= 120:
        return DEFAULTS["sm_80"]
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
