"""How long a configuration should take on a GPU, from public figures: what ranks candidates where none can be timed.

The model, with its assumptions. It is there to put configurations in order; its seconds are optimistic.

* A multiprocessor holds as many programs at once as its threads, blocks, registers and shared memory allow. Before a
  program is compiled a thread is taken to need 48 registers beside those of ``Work.registers``, in all at least 128
  where there are matrix products and 64 elsewhere. What exceeds 255 (AMD: 512) is spilled.
* Programs cost the same each, and are dealt out evenly. The multiprocessor that gets the most of them is the last to
  finish: where the programs do not divide evenly, the others idle meanwhile.
* Matrix products, other arithmetic and special functions run at their full rates beside one another, if enough
  programs share a multiprocessor: its time is at least that of the busiest unit. Few other operations are
  multiply-adds: they run at half of the published rate, which counts those twice. Operands of products come from shared
  memory at 128 bytes a clock. Where the kernel has been compiled, what its main loop takes to be issued stands for the
  arithmetic that was guessed.
* A program alone waits 600 ns for its first bytes, and 250 ns as often as ``Work.waits`` says; it uses one unit after
  the other. With more than four warps, some use one while others use another. It keeps the units busy only with enough
  warps (4 for matrix and special units, 8 for arithmetic). A multiprocessor's time is also at least that of the waves
  of such programs.
* Memory and the level-2 cache are shared by all and run at their bandwidths, if enough bytes are on their way: Little's
  law, with 600 ns to memory and 250 ns to the cache, and at most 64 bytes a clock into a multiprocessor.
* Loads, stores and arithmetic overlap: the longest of these times counts.
* A register that does not fit is written and read again 16 times a thread, through the cache, while nothing else runs.
* Each launch adds 2 microseconds.

Not in it: bank conflicts, clocks under load, the cache's true hit rate (a family's ``work`` says
what it takes for granted).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from fusedops.autotune.identity import canonical_name
from fusedops.autotune.operator import C, Operator, Problem, Unit, Work
from fusedops.runtime.device import TARGETS, DeviceFacts
from fusedops.runtime.launch import ceil_div

_LAUNCH = 2e-6
_MEMORY_LATENCY = 600e-9
_CACHE_LATENCY = 250e-9
_CACHE_BYTES_A_CLOCK, _SHARED_BYTES_A_CLOCK = 64, 128
_SPILL_ROUNDS = 16
_OTHER_REGISTERS = 48
_MATRIX_WARPS, _SCALAR_WARPS, _SPECIAL_WARPS = 4, 8, 4
# What the system keeps of a block's shared memory (CUDA programming guide, compute capability 8.x and later).
_RESERVED_SHARED = 1024


@dataclass(frozen=True, slots=True)
class Product:
    """A GPU's public figures.

    Attributes:
        facts: what a driver says of it.
        memory_bandwidth: bytes a second of device memory.
        cache_bandwidth: bytes a second of the cache that all multiprocessors share. No data sheet has it.
        half, fp8, tf32, float32: dense floating-point operations a second of matrix products with float32 sums, by what
            computes them. Where there is no such unit: those of what Triton uses instead.
        scalar: float32 operations a second, of what is no matrix product.
        clock: boost clock, 1/s.
        special: exponentials, divisions and the like a clock and multiprocessor.
        registers: 32-bit registers a multiprocessor.
        threads, blocks: that a multiprocessor holds at once.
        shared_memory: bytes a multiprocessor.
    """

    facts: DeviceFacts
    memory_bandwidth: float
    cache_bandwidth: float
    half: float
    fp8: float
    tf32: float
    float32: float
    scalar: float
    clock: float
    threads: int
    blocks: int
    shared_memory: int
    registers: int = 65536
    special: float = 16.0

    def rate(self, unit: Unit) -> float:
        """Floating-point operations a second of a unit."""
        return float(getattr(self, unit))


def _of(target: str, cache: int, memory: int, name: str | None = None, count: int | None = None) -> DeviceFacts:
    """An architecture's facts for one of its products; cache in MiB, memory in GiB."""
    facts = TARGETS[target]
    return replace(
        facts, name=name or facts.name, multiprocessor_count=count or facts.multiprocessor_count,
        cache=cache << 20, memory=memory << 30,
    )  # fmt: skip


# NVIDIA. Bandwidth and rates: the vendor's data sheets (dense, float32 sums), for GeForce the appendices of the Ada and
# RTX Blackwell architecture white papers. Clocks: the boost clock of the white papers; of H100, H200 and B200 the one
# at which the data sheet's tensor rates come out. Threads, blocks, registers, shared memory, 16 special functions a
# clock: CUDA C++ programming guide, tables "technical specifications per compute capability" and "throughput of native
# arithmetic instructions". Cache bandwidth, an estimate everywhere: T4's was measured by Jia et al. 2019, "Dissecting
# the NVIDIA Turing T4 GPU via Microbenchmarking"; A100's is what microbenchmarks reach of the 5,120 bytes a clock that
# its white paper names; the others are scaled from these, or of the order that microbenchmarks in public reach.
#
# AMD. Rates, bandwidth, clocks: the vendor's data sheets (of MI250X one of its two dies, which is a device of its own).
# Registers, threads and LDS: the CDNA 2, CDNA 3 and RDNA 3 ISA guides; transcendental functions run at a quarter rate,
# which is 16 a clock and compute unit. Cache bandwidth: the white papers' peak of the Infinity Cache, which all dies of
# an MI300X share, and of the level-2 cache for MI250X; of MI355X taken to be MI300X's.
PRODUCTS: dict[str, Product] = {
    # Triton makes no use of Turing's tensor cores: products are multiply-adds in float32.
    "T4": Product(
        _of("sm_75", 4, 16), 320e9, 1.27e12, half=8.1e12, fp8=8.1e12, tf32=8.1e12, float32=8.1e12, scalar=8.1e12,
        clock=1.59e9, threads=1024, blocks=16, shared_memory=64 << 10,
    ),
    "A100": Product(
        _of("sm_80", 40, 80), 2.039e12, 5e12, half=312e12, fp8=312e12, tf32=156e12, float32=19.5e12, scalar=19.5e12,
        clock=1.41e9, threads=2048, blocks=32, shared_memory=164 << 10,
    ),
    "A10": Product(
        _of("sm_86", 6, 24), 600e9, 2.5e12, half=125e12, fp8=125e12, tf32=62.5e12, float32=31.2e12, scalar=31.2e12,
        clock=1.695e9, threads=1536, blocks=16, shared_memory=100 << 10,
    ),
    "L40S": Product(
        _of("sm_89", 96, 48), 864e9, 5e12, half=362e12, fp8=733e12, tf32=183e12, float32=91.6e12, scalar=91.6e12,
        clock=2.52e9, threads=1536, blocks=24, shared_memory=100 << 10,
    ),
    "RTX 4090": Product(
        _of("sm_89", 72, 24, "RTX 4090", 128), 1.008e12, 5e12, half=165.2e12, fp8=330.3e12, tf32=82.6e12,
        float32=82.6e12, scalar=82.6e12, clock=2.52e9, threads=1536, blocks=24, shared_memory=100 << 10,
    ),
    "H100": Product(
        _of("sm_90", 50, 80), 3.35e12, 6.5e12, half=989.4e12, fp8=1978.9e12, tf32=494.7e12, float32=66.9e12,
        scalar=66.9e12, clock=1.83e9, threads=2048, blocks=32, shared_memory=228 << 10,
    ),
    "H200": Product(
        _of("sm_90", 50, 141, "H200"), 4.8e12, 6.5e12, half=989.4e12, fp8=1978.9e12, tf32=494.7e12, float32=66.9e12,
        scalar=66.9e12, clock=1.83e9, threads=2048, blocks=32, shared_memory=228 << 10,
    ),
    "B200": Product(
        _of("sm_100", 126, 180), 8e12, 12e12, half=2250e12, fp8=4500e12, tf32=1125e12, float32=75e12, scalar=75e12,
        clock=1.86e9, threads=2048, blocks=32, shared_memory=228 << 10,
    ),
    "RTX 5090": Product(
        _of("sm_120", 96, 32), 1.792e12, 8e12, half=209.5e12, fp8=419e12, tf32=104.8e12, float32=104.8e12,
        scalar=104.8e12, clock=2.407e9, threads=1536, blocks=24, shared_memory=100 << 10,
    ),
    "MI250X": Product(
        _of("gfx90a", 8, 64), 1.638e12, 6.9e12, half=191.5e12, fp8=191.5e12, tf32=47.9e12, float32=47.9e12,
        scalar=23.9e12, clock=1.7e9, threads=2048, blocks=32, shared_memory=64 << 10, registers=131072,
    ),
    "MI300X": Product(
        _of("gfx942", 256, 192), 5.3e12, 17.2e12, half=1307.4e12, fp8=2614.9e12, tf32=653.7e12, float32=163.4e12,
        scalar=163.4e12, clock=2.1e9, threads=2048, blocks=32, shared_memory=64 << 10, registers=131072,
    ),
    # CDNA 4 has no TF32: Triton's products of float32 are float32's.
    "MI355X": Product(
        _of("gfx950", 256, 288), 8e12, 17.2e12, half=2516.6e12, fp8=5033.2e12, tf32=157.3e12, float32=157.3e12,
        scalar=157.3e12, clock=2.4e9, threads=2048, blocks=32, shared_memory=160 << 10, registers=131072,
    ),
    "RX 7900 XTX": Product(
        _of("gfx1100", 96, 24), 960e9, 3.5e12, half=122.8e12, fp8=122.8e12, tf32=61.4e12, float32=61.4e12,
        scalar=61.4e12, clock=2.5e9, threads=1024, blocks=32, shared_memory=64 << 10, registers=98304,
    ),
}  # fmt: skip


def _representative(facts: DeviceFacts) -> Product:
    """The product that stands for a device's architecture: that of the nearest older one where it has none."""
    known = {arch: PRODUCTS[target.name] for arch, target in TARGETS.items()}
    if facts.arch in known:
        return known[facts.arch]
    if facts.vendor == "amd":
        return known["gfx942" if facts.arch.startswith("gfx9") else "gfx1100"]
    if facts.vendor == "interpreter":
        return known["sm_80"]
    older = [arch for arch, target in TARGETS.items() if 0 < target.capability <= facts.capability]
    return known[older[-1] if older else "sm_75"]


@lru_cache(maxsize=256)
def product_of(facts: DeviceFacts) -> Product:
    """A device's figures: its product's, or those of its architecture's representative by multiprocessors.

    Part of a device (MIG), and products that nobody entered in :data:`PRODUCTS`, are taken to have bandwidth and rates
    in proportion to their multiprocessors.

    Examples:
        >>> from fusedops.runtime.device import TARGETS
        >>> product_of(TARGETS["sm_90"]).memory_bandwidth
        3350000000000.0
    """
    found = PRODUCTS.get(canonical_name(facts.name))
    if found is None or found.facts.arch != facts.arch:
        found = _representative(facts)
    share = facts.multiprocessor_count / found.facts.multiprocessor_count
    scaled = ("memory_bandwidth", "cache_bandwidth", "half", "fp8", "tf32", "float32", "scalar")
    return replace(
        found,
        facts=facts,
        shared_memory=max(found.shared_memory, facts.shared_memory),
        **{name: getattr(found, name) * share for name in scaled},
    )


class CompiledFacts(Protocol):
    """What a compiler said of a configuration's kernel; None: nothing.

    Attributes:
        shared: bytes of shared memory a program.
        registers: a thread.
        spill_bytes: bytes a thread that do not fit into registers.
        issue: cycles of a multiprocessor that it takes to issue the instructions of one step of the main loop, for all
            warps of a program.
    """

    @property
    def shared(self) -> int | None: ...
    @property
    def registers(self) -> int | None: ...
    @property
    def spill_bytes(self) -> int | None: ...
    @property
    def issue(self) -> float | None: ...


def _registers(work: Work, facts: DeviceFacts, compiled: CompiledFacts | None) -> tuple[int, float]:
    """Registers a thread, as they are handed out, and the bytes a thread that do not fit into them."""
    if compiled is not None and compiled.registers:
        return ceil_div(compiled.registers, 8) * 8, compiled.spill_bytes or 0
    most = 255 if facts.warp_size == 32 else 512
    needed = max(128 if work.product else 64, math.ceil(work.registers) + _OTHER_REGISTERS)
    return ceil_div(min(needed, most), 8) * 8, 4.0 * max(0, needed - most)


def _resident(work: Work, product: Product, registers: int, compiled: CompiledFacts | None) -> int:
    """Programs that a multiprocessor holds at once; 0: not one fits."""
    facts = product.facts
    threads = work.num_warps * facts.warp_size
    shared = work.shared_memory if compiled is None or compiled.shared is None else compiled.shared
    if threads > min(1024, product.threads) or shared > facts.shared_memory:
        return 0
    by_registers = product.registers // (threads * registers)
    if compiled is None:  # the compiler keeps a program of many threads within what there is
        by_registers = max(1, by_registers)
    if shared and facts.capability >= 80:
        shared += _RESERVED_SHARED
    # At least one, since it is within the limit of a program.
    by_shared = max(1, product.shared_memory // shared) if shared else product.blocks
    return min(product.blocks, product.threads // threads, by_registers, by_shared)


def estimate(work: Work, facts: DeviceFacts, compiled: CompiledFacts | None = None) -> float:
    """Seconds that work should take on a device, by the model above; infinite where not one program fits.

    Args:
        work: what an operator's ``work`` says of a problem and a configuration.
        facts: of the device.
        compiled: what the compiler said of the kernel that takes longest, where it has been compiled.

    Examples:
        >>> from fusedops.runtime.device import TARGETS
        >>> copy = Work(programs=4096, num_warps=4, memory=2 * 2**30, cached=2 * 2**30)
        >>> round(1e6 * estimate(copy, TARGETS["sm_90"]))
        643
    """
    product = product_of(facts)
    registers, spilled = _registers(work, facts, compiled)
    resident = _resident(work, product, registers, compiled)
    if resident == 0:
        return math.inf
    count, programs = facts.multiprocessor_count, max(1, work.programs)
    busiest = ceil_div(programs, count)
    waves = ceil_div(busiest, resident)

    # Seconds that a program takes of each unit, and the warps that it takes to keep it busy.
    operands = work.operands / (programs * _SHARED_BYTES_A_CLOCK * product.clock)
    scalar = work.scalar * count / (programs * product.scalar / 2)
    if compiled is not None and compiled.issue and work.steps:
        scalar = work.steps * compiled.issue / (programs * product.clock)
    units = (
        (max(work.product * count / (programs * product.rate(work.unit)), operands), _MATRIX_WARPS),
        (scalar, _SCALAR_WARPS),
        (work.special / (programs * product.special * product.clock), _SPECIAL_WARPS),
    )
    together = busiest * max(seconds for seconds, _ in units)
    turns = [seconds / min(1.0, work.num_warps / warps) for seconds, warps in units]
    beside = min(1.0, 4 / work.num_warps)
    waiting = _MEMORY_LATENCY + work.waits * _CACHE_LATENCY
    alone = waves * (waiting + max(turns) + beside * (sum(turns) - max(turns)))

    active = min(programs, resident * count)
    under_way = active * work.in_flight if work.in_flight else math.inf
    into = min(programs, count) * _CACHE_BYTES_A_CLOCK * product.clock
    cache_bandwidth = min(product.cache_bandwidth, into, under_way / _CACHE_LATENCY)
    memory = work.memory / min(product.memory_bandwidth, into, under_way / _MEMORY_LATENCY)
    cached = max(work.cached, work.memory) / cache_bandwidth

    threads = programs * work.num_warps * facts.warp_size
    spills = 2 * _SPILL_ROUNDS * spilled * threads / product.cache_bandwidth
    return max(together, alone, memory, cached) + spills + work.launches * _LAUNCH


def ranked(operator: Operator[Problem, C], problem: Problem, facts: DeviceFacts, configs: Iterable[C]) -> list[C]:
    """Configurations, the one that should be fastest first; equals by fewer warps, then fewer stages.

    Examples:
        >>> from fusedops.norm.tuning import NORM, NormProblem
        >>> from fusedops.runtime.device import TARGETS
        >>> problem, facts = NormProblem(4096, 2, "forward"), TARGETS["sm_90"]
        >>> fitting = [config for config in NORM.space(problem) if NORM.unfit(config, problem, facts) is None]
        >>> ranked(NORM, problem, facts, fitting)[0].looped
        False
    """

    def cost(config: C) -> tuple[float, int, int]:
        seconds = estimate(operator.work(config, problem, facts), facts)
        return seconds, getattr(config, "num_warps", 0), getattr(config, "num_stages", 0)

    return sorted(configs, key=cost)
