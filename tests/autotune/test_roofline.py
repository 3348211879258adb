"""The roofline model puts configurations in orders that are known, and never claims more than a data sheet."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusedops.attention.tuning import ATTENTION, AttentionConfig, AttentionProblem
from fusedops.autotune.operator import Work
from fusedops.autotune.roofline import PRODUCTS, estimate, product_of, ranked
from fusedops.norm.tuning import GROUP_NORM, NORM, GroupNormProblem, NormConfig, NormProblem
from fusedops.runtime.device import INTERPRETER, TARGETS, DeviceFacts

H100 = TARGETS["sm_90"]


@dataclass(frozen=True)
class Compiled:
    shared: int | None = 0
    registers: int | None = 64
    spill_bytes: int | None = 0
    issue: float | None = None


# A matrix product of 4096³ in tiles of 128 x 128.
PRODUCT = Work(
    1024, 8, product=2.0 * 4096**3, memory=3.0 * 2 * 4096**2, cached=2.0 * 2 * 4096**3 / 128, shared_memory=64 << 10
)
COPY = Work(4096, 4, memory=float(2 << 30), cached=float(2 << 30))


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_has_a_product(target):
    product = product_of(TARGETS[target])
    assert product.facts == TARGETS[target]
    known = PRODUCTS[TARGETS[target].name]
    assert product.memory_bandwidth == known.memory_bandwidth
    assert product.half == known.half


def test_the_products_are_plausible():
    for name, product in PRODUCTS.items():
        facts = product.facts
        assert facts.name == name
        assert facts.memory > 8 << 30
        assert 1 << 20 < facts.cache < 1 << 30
        assert product.memory_bandwidth < product.cache_bandwidth < 1e14
        assert product.float32 <= product.tf32 <= product.half <= product.fp8, name
        # Two operations a lane and clock, for 64 or 128 lanes, twice as many where they are packed.
        per_clock = product.scalar / (product.clock * facts.multiprocessor_count)
        assert 120 <= per_clock <= 280, (name, per_clock)  # H100's clock is that of its tensor cores, a little less
        assert product.shared_memory >= facts.shared_memory


def test_products_match_their_facts_in_a_driver_s_words():
    a100 = replace(TARGETS["sm_80"], name="NVIDIA A100-SXM4-80GB")
    assert product_of(a100).memory_bandwidth == PRODUCTS["A100"].memory_bandwidth
    h200 = replace(H100, name="NVIDIA H200")
    assert product_of(h200).memory_bandwidth == PRODUCTS["H200"].memory_bandwidth


def test_an_unknown_device_is_its_architecture_s_in_proportion():
    half = product_of(DeviceFacts("nvidia", "sm_90", "Mystery", 66, 232448))
    assert half.memory_bandwidth == pytest.approx(PRODUCTS["H100"].memory_bandwidth / 2)
    assert half.half == pytest.approx(PRODUCTS["H100"].half / 2)
    assert half.clock == PRODUCTS["H100"].clock
    older = product_of(DeviceFacts("nvidia", "sm_103", "Mystery 2", 148, 232448))
    assert older.half == PRODUCTS["B200"].half
    assert product_of(DeviceFacts("amd", "gfx1201", "Card", 96, 65536, 32)).half == PRODUCTS["RX 7900 XTX"].half
    assert product_of(INTERPRETER).facts is INTERPRETER


def test_a_loop_of_more_instructions_takes_longer():
    """A step of the tile 128 x 128 x 64: 512 cycles of the tensor cores."""
    work = PRODUCT._replace(steps=1024 * 4096 / 64, scalar=1e9)
    times = [estimate(work, H100, Compiled(64 << 10, 168, issue=cycles)) for cycles in (256, 512, 1024, 2048)]
    assert times == sorted(times)
    assert times[3] > 1.7 * times[2]
    assert times[3] > 1.9 * estimate(work._replace(steps=0.0), H100, Compiled(64 << 10, 168, issue=2048))
    # The count of the compiled code stands for the guess.
    assert times[1] == estimate(work._replace(scalar=1e15), H100, Compiled(64 << 10, 168, issue=512))


def test_what_spills_loses():
    fine = estimate(PRODUCT, H100, Compiled(64 << 10, 168))
    for spilt in (4, 64, 1024):
        worse = estimate(PRODUCT, H100, Compiled(64 << 10, 168, spilt))
        assert worse > fine
        fine = worse


def test_more_registers_than_a_thread_has_lose():
    assert estimate(PRODUCT._replace(registers=400.0), H100) > estimate(PRODUCT._replace(registers=200.0), H100)


def test_too_few_programs_to_fill_the_device_lose():
    """The same work by fewer programs than there are multiprocessors, or by one more than fills them."""
    for work in (PRODUCT, COPY):
        times = [estimate(work._replace(programs=n), H100) for n in (132, 66, 33, 1)]
        assert times == sorted(times)
        assert times[3] > 20 * times[0]
    even, odd = (estimate(PRODUCT._replace(programs=n, cached=1e8), H100) for n in (132, 133))
    assert odd > 1.9 * even


@pytest.mark.parametrize("target", TARGETS)
def test_what_does_not_fit_is_infinitely_slow(target):
    facts = TARGETS[target]
    assert math.isfinite(estimate(COPY._replace(shared_memory=facts.shared_memory), facts))
    assert estimate(COPY._replace(shared_memory=facts.shared_memory + 1), facts) == math.inf
    assert estimate(COPY, facts, Compiled(shared=facts.shared_memory + 1)) == math.inf
    assert estimate(COPY._replace(num_warps=2048 // facts.warp_size), facts) == math.inf


def test_real_numbers_replace_those_that_were_estimated():
    roomy = PRODUCT._replace(shared_memory=1 << 30)
    assert estimate(roomy, H100) == math.inf
    assert estimate(roomy, H100, Compiled(64 << 10, 128)) == estimate(PRODUCT, H100, Compiled(None, 128))
    few, many = (estimate(PRODUCT._replace(in_flight=2e3), H100, Compiled(None, registers)) for registers in (64, 255))
    assert few < many  # fewer programs a multiprocessor hide less


@pytest.mark.parametrize("target", TARGETS)
def test_a_copy_takes_what_its_bytes_take(target):
    facts = TARGETS[target]
    least = COPY.memory / product_of(facts).memory_bandwidth
    assert least < estimate(COPY, facts) < 1.02 * least + 1e-5


def test_more_launches_lose():
    times = [estimate(COPY._replace(launches=n), H100) for n in (1, 2, 3)]
    assert times[0] < times[1] < times[2]


_amount = st.floats(0, 1e13)
_works = st.builds(
    Work,
    programs=st.integers(1, 10**6), num_warps=st.sampled_from([1, 2, 4, 8, 16]), product=_amount,
    unit=st.sampled_from(["half", "fp8", "tf32", "float32"]), scalar=_amount, special=_amount, memory=_amount,
    cached=_amount, shared_memory=st.integers(0, 1 << 18), launches=st.integers(1, 5), in_flight=st.floats(1, 1e6),
    registers=st.floats(0, 600), operands=_amount, waits=st.floats(0, 1000),
)  # fmt: skip
_COSTS = (
    "product", "scalar", "special", "memory", "cached", "shared_memory", "launches", "registers", "operands", "waits"
)  # fmt: skip


@given(_works, st.sampled_from([*TARGETS]), st.sampled_from(_COSTS), st.integers(1, 1 << 20))
def test_more_work_never_takes_less_time(work, target, name, more):
    """All but programs, whose number divides a device well or badly, and warps, of which more may help or hinder."""
    bigger = work._replace(**{name: getattr(work, name) + more})
    assert estimate(bigger, TARGETS[target]) >= estimate(work, TARGETS[target])


@given(_works, st.sampled_from([*TARGETS]), st.floats(1, 100))
def test_more_bytes_on_their_way_never_take_more_time(work, target, factor):
    assert estimate(work._replace(in_flight=work.in_flight * factor), TARGETS[target]) <= estimate(
        work, TARGETS[target]
    )


def test_a_norm_takes_what_its_bytes_take():
    """Forward: read and write each element once. The model's best is near that for every width that is held."""
    for width in (1024, 4096, 8192):
        problem = NormProblem(width, 2, "forward")
        fitting = [c for c in NORM.space(problem) if NORM.unfit(c, problem, H100) is None]
        best = ranked(NORM, problem, H100, fitting)[0]
        seconds = estimate(NORM.work(best, problem, H100), H100)
        least = 2 * 2 * problem.rows * width / product_of(H100).memory_bandwidth
        assert least < seconds < 1.1 * least + 3e-6
        assert not best.looped


def test_a_row_that_is_walked_twice_loses_where_it_leaves_the_cache():
    """All multiprocessors' rows of 1 MB between two readings are more than the cache holds."""
    wide = NormProblem(1 << 19, 2, "forward")
    twice = NORM.work(NormConfig(1, 4096, True, 8), wide, H100)
    assert twice.memory > 1.4 * 2 * 2 * wide.rows * wide.width
    held = NORM.work(NormConfig(1, 4096, False, 8), NormProblem(4096, 2, "forward"), H100)
    looped = NORM.work(NormConfig(1, 1024, True, 8), NormProblem(4096, 2, "forward"), H100)
    assert looped.memory == held.memory
    assert looped.cached > held.cached


def test_larger_tiles_read_less_through_the_cache():
    problem = AttentionProblem.of("forward", 128, 128, 8192, 8192, heads=64)
    small, large = (ATTENTION.work(AttentionConfig(m, 64, 8, 2), problem, H100) for m in (16, 128))
    assert large.memory == small.memory
    assert large.cached < small.cached / 4
    assert estimate(large, H100) < estimate(small, H100)


def test_bigger_tiles_win_for_big_products():
    """Each byte that a program reads serves as many rows as its tile has."""
    times = [estimate(PRODUCT._replace(cached=2.0 * 2 * 4096**3 / tile), H100) for tile in (16, 32, 128)]
    assert times[0] > times[1] > times[2]


def test_causal_attention_takes_about_half():
    config = AttentionConfig(128, 64, 8, 2)
    for kernel in ("forward", "backward_kv", "backward_q"):
        full, causal, window = (
            ATTENTION.work(config, AttentionProblem.of(kernel, 64, 64, 8192, 8192, heads=64, **rules), H100)
            for rules in ({}, {"causal": True}, {"causal": True, "window": True})
        )
        assert 0.5 < causal.product / full.product < 0.52
        assert 0.12 < window.product / full.product < 0.15  # 1,024 of 8,192 keys, and what tiles have beside
        assert full.product == 2 * 64 * 8192**2 * {"forward": 128, "backward_kv": 256, "backward_q": 192}[kernel]


def test_work_is_positive_for_every_default():
    problems = [
        *((NORM, NormProblem(w, 2, d, sums=2 * (d == "backward"))) for w in (1, 100, 20000) for d in DIRECTIONS),
        *(
            (GROUP_NORM, GroupNormProblem(c, s, last, 2, d, sums=2 * (d == "backward")))
            for c in (1, 10, 2000) for s in (1, 4096) for last in (False, True) for d in DIRECTIONS
        ),
        *(
            (ATTENTION, AttentionProblem.of(k, 80, 64, 1, 3000, heads=28, queries=7, features=features))
            for k in ("forward", "backward_kv", "backward_q", "backward_mask")
            for features in ("", "softcap+mask", "mask_mod+blocks", "packed")
        ),
    ]  # fmt: skip
    for operator, problem in problems:
        for facts in TARGETS.values():
            work = operator.work(operator.default(problem, facts), problem, facts)
            assert work.programs >= 1, (operator.name, problem)
            assert all(number >= 0 for number in work if not isinstance(number, str)), (operator.name, problem, work)
            assert work.cached >= 0.99 * work.memory or operator is NORM or operator is GROUP_NORM
            assert 0 < estimate(work, facts) < 10


DIRECTIONS = ("forward", "backward")
