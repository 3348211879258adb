"""The bound of the share of the peak, from code written by hand and rates that data sheets have."""

from __future__ import annotations

import pytest

from fusedops.inspection.bound import bound_of
from fusedops.inspection.loops import hot_loop
from fusedops.inspection.offline import Compiled
from fusedops.inspection.sass import parse_amd, parse_sass
from fusedops.runtime.device import TARGETS
from tests.inspection.code import machine_code

PTX = """.entry kernel() {
$L1:
    mma.sync.aligned.m16n8k16.row.col { %r1 }, { %r2 };
    @%p2 bra $L1;
    ret;
}"""


def bound(code, target="sm_90", warps=4, memory_bound=None, **asm):
    facts = TARGETS[target]
    if facts.vendor == "amd":
        instructions, labels = parse_amd(code)
        asm = {"llir": "define void @kernel() {\n  ret void\n}", **asm}
    else:
        instructions, labels = parse_sass(machine_code(code))
        asm = {"ptx": PTX, **asm}
    compiled = Compiled("kernel", target, 32, 0, 0, warps, 1, 3, (), {}, 0.0, asm)
    return bound_of(compiled, facts, instructions, labels, hot_loop(compiled, instructions, labels), memory_bound)


def loop(*lines: str) -> str:
    return "\n".join(["loop:", *lines, "@P0 BRA `(.L_loop)", "EXIT"])


def test_products_alone_reach_the_peak_unless_their_issue_does_not():
    found = bound(loop("HGMMA.64x256x16.F32 R24, R4, gdesc[UR8], R24"))
    # 2 · 64 · 256 · 16 operations, of which a multiprocessor of an H100 makes 4,096 a cycle.
    assert found.cycles["matrix units"] == pytest.approx(128, rel=1e-3)
    assert found.cycles["issue"] == 2.0  # two instructions of four warps, four a cycle
    assert found.cycles["shared memory"] == 64.0  # 256 columns of 32 bytes, once
    assert (found.share, found.unit, found.peak) == (1.0, "matrix units", "matrix units")


def test_a_group_of_four_warps_shares_a_product():
    code = loop("HGMMA.64x256x16.F32 R24, R4, gdesc[UR8], R24")
    one, two = bound(code, warps=4).cycles, bound(code, warps=8).cycles
    assert two["matrix units"] == 2 * one["matrix units"]
    assert two["issue"] == 2 * one["issue"]


def test_a_small_product_waits_for_its_operands_in_shared_memory():
    found = bound(loop("HGMMA.64x16x16.F32 R24, gdesc[UR8], R24, gsb0"))
    assert found.unit == "shared memory"
    assert found.cycles["shared memory"] == (64 + 16) * 32 / 128
    assert found.share == pytest.approx(8 / 20, rel=1e-3)


def test_exponentials_limit():
    found = bound(loop("HMMA.16816.F32 R4, R2, R3, R4", *["MUFU.EX2 R1, R1"] * 4), "sm_80")
    assert found.cycles["matrix units"] == pytest.approx(4 * 4096 / 2048, rel=1e-3)
    assert found.cycles["special functions"] == 4 * 4 * 32 / 16
    assert (found.unit, found.share) == ("special functions", pytest.approx(8 / 32, rel=1e-3))


def test_issue_limits():
    found = bound(loop("HMMA.16816.F32 R4, R2, R3, R4", *["FADD R1, R1, R1"] * 30), "sm_80")
    assert found.unit == "issue"
    assert found.share == pytest.approx(8 / 32, rel=1e-3)


def test_shared_memory_limits():
    found = bound(loop("HMMA.16816.F32 R4, R2, R3, R4", *["LDSM.16.M88.4 R4, [R2]"] * 4), "sm_80")
    assert found.cycles["shared memory"] == 4 * 4 * 512 / 128
    assert found.unit == "shared memory"


@pytest.mark.parametrize(
    ("opcode", "size"),
    [
        ("LDS.128 R4, [R2]", 512), ("LDS.64 R4, [R2]", 256), ("LDS R4, [R2]", 128), ("LDS.U16 R4, [R2]", 64),
        ("STS.U8 [R2], R4", 32), ("LDSM.16.MT88.2 R4, [R2]", 256), ("LDSM.16.M88 R4, [R2]", 128),
        ("STSM.16.M88.4 [R2], R4", 512), ("LDGSTS.E.BYPASS.LTC128B.128 [R2], [R4.64]", 512),
        ("LDG.E.64 R4, desc[UR4][R2.128]", 256), ("LDL.128 R4, [R1]", 512), ("FADD R1, R1, R1", 0),
        ("@P1 LDS.128 R4, [R2]", 0),  # which may be switched off
    ],
)  # fmt: skip
def test_bytes_of_a_warp_through_shared_memory(opcode, size):
    cycles = bound(loop("HMMA.16816.F32 R4, R2, R3, R4", opcode), "sm_80", warps=1).cycles
    assert cycles["shared memory"] == size / 128


@pytest.mark.parametrize(
    ("target", "opcode", "cycles"),
    [
        # Operations of a warp (HGMMA: of four), over what a multiprocessor makes in a cycle by its data sheet.
        ("sm_80", "HMMA.16816.F32 R4, R2, R3, R4", 4096 / 2048),
        ("sm_80", "HMMA.1688.F32.TF32 R4, R2, R3, R4", 2048 / 1024),
        ("sm_90", "HMMA.16816.F32.BF16 R4, R2, R3, R4", 4096 / 4096),
        ("sm_90", "QGMMA.64x128x32.F32.E4M3.E4M3 R24, R4, gdesc[UR8], R24", 2 * 64 * 128 * 32 / 4 / 8192),
        ("sm_90", "HGMMA.64x128x8.F32.TF32 R24, R4, gdesc[UR8], R24", 2 * 64 * 128 * 8 / 4 / 2048),
        ("sm_120", "HMMA.16816.F32.BF16 R4, R2, R3, R4", 4096 / 512),
    ],
)
def test_matrix_instructions(target, opcode, cycles):
    assert bound(loop(opcode), target, warps=1).cycles["matrix units"] == pytest.approx(cycles, rel=0.02)


@pytest.mark.parametrize("opcode", ["DMMA.8x8x4 R4, R2, R3, R4", "OMMA.SF.16864 R4, R2", "HMMA.SP R4, R2"])
def test_no_bound_where_the_shape_is_not_known(opcode):
    assert bound(loop(opcode)) is None


# Of a product of 128 x 64, half precision: N / 8 in bits 17 to 22, M / 16 in bits 24 to 28.
TENSOR = """.entry kernel() {
    mov.b32 %r9, DESCRIPTOR;
$L1:
    @%p1 tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1, %rd2, %r9, %p3;
    @%p1 tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd3, %rd4, %r9, %p3;
    @%p2 bra $L1;
    ret;
}""".replace("DESCRIPTOR", str(8 << 24 | 8 << 17 | 0x490))


@pytest.mark.parametrize("steps", [1, 2])
def test_products_in_tensor_memory_tell_their_shape_in_the_ptx(steps):
    found = bound(loop(*["UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR9]"] * 2 * steps), "sm_100", ptx=TENSOR)
    assert found.cycles["matrix units"] == pytest.approx(steps * 2 * 2 * 128 * 64 * 16 / 8192, rel=0.01)


def test_no_bound_where_warps_do_different_work():
    specialised = 'module attributes {"ttg.num-warps" = 4 : i32, "ttg.total-num-warps" = 12 : i32}'
    code = loop("HMMA.16816.F32 R4, R2, R3, R4")
    assert bound(code, warps=12, ttgir=specialised) is None
    assert bound(code, warps=4, ttgir=specialised) is not None


def test_what_a_turn_may_jump_over_does_not_limit():
    skipped = loop(
        "HMMA.16816.F32 R4, R2, R3, R4", "@P1 BRA `(.L_on)", *["FADD R1, R1, R1"] * 100, "on:", "FADD R1, R1, R1"
    )
    assert bound(skipped, "sm_80").cycles["issue"] == 4.0


COPY = loop("LDG.E.128 R4, [R2]", "STG.E.128 [R2], R4", "IADD3 R2, R2, R3, RZ")


def test_a_copy_is_bound_by_memory():
    found = bound(COPY)
    assert (found.share, found.peak, found.unit) == (1.0, "memory bandwidth", "memory bandwidth")
    # 4 warps · 32 threads · 32 bytes; 3.35 TB/s are 13.9 bytes a cycle for each of 132 multiprocessors at 1.83 GHz.
    assert found.cycles["memory bandwidth"] == pytest.approx(4 * 32 * 32 / (3.35e12 / 132 / 1.83e9))


def test_products_of_a_problem_that_is_bound_by_memory():
    code = loop("HMMA.16816.F32 R4, R2, R3, R4", "LDGSTS.E.BYPASS.128 [R2], [R4.64]")
    found = bound(code, "sm_80", memory_bound=True)
    assert found.peak == found.unit == "memory bandwidth"
    assert found.cycles["matrix units"] == pytest.approx(8, rel=1e-3)
    assert bound(code, "sm_80").peak == "matrix units"


def test_products_without_matrix_instructions():
    """Turing: 64 multiply-adds a cycle and multiprocessor."""
    found = bound(loop("LDS.128 R4, [R2]", *["FFMA R1, R1, R1, R1"] * 20), "sm_75")
    assert (found.peak, found.unit) == ("float32 units", "float32 units")
    assert found.cycles["float32 units"] == pytest.approx(20 * 4 * 32 / 64, rel=0.01)
    crowded = bound(loop(*["LDS.128 R4, [R2]"] * 18, *["FFMA R1, R1, R1, R1"] * 20), "sm_75")
    assert (crowded.unit, crowded.share) == ("shared memory", pytest.approx(40 / (18 * 16), rel=0.01))


def test_narrow_accesses_between_much_arithmetic_do_not_reach_the_bandwidth():
    found = bound(loop("LDG.E.U16 R4, [R2]", *["FADD R1, R1, R1"] * 30))
    assert found.unit == "issue"
    assert found.share == pytest.approx(4 * 32 * 2 / 13.87 / 32, rel=1e-2)


def test_a_kernel_without_a_loop_is_one_turn():
    found = bound("LDG.E.128 R4, [R2]\nSTG.E.128 [R2], R4\nEXIT")
    assert found.cycles["issue"] == 3.0
    assert found.cycles["memory bandwidth"] == pytest.approx(bound(COPY).cycles["memory bandwidth"])


def test_no_bound_without_accesses_and_where_descriptors_copy():
    assert bound(loop("FADD R1, R1, R1")) is None
    assert bound(loop("UTMALDG.2D [UR8], [UR4]", "STG.E.128 [R2], R4")) is None


def amd(*lines: str) -> str:
    body = "\n".join(f"    {line}" for line in lines)
    return f"kernel:\n.LBB0_1:\n{body}\n    s_cbranch_scc1 .LBB0_1\n    s_endpgm\n"


@pytest.mark.parametrize(
    ("target", "opcode", "cycles"),
    [
        ("gfx942", "v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], 0", 2 * 32 * 32 * 8 / 2048),
        ("gfx942", "v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[4:5], v[6:7], 0", 2 * 16 * 16 * 32 / 4096),
        ("gfx90a", "v_mfma_f32_32x32x8f16 a[0:15], v[16:17], v[18:19], 0", 2 * 32 * 32 * 8 / 1024),
        ("gfx90a", "v_mfma_f32_32x32x8bf16_1k a[0:15], v[16:17], v[18:19], 0", 2 * 32 * 32 * 8 / 1024),
        ("gfx950", "v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], 0", 2 * 16 * 16 * 32 / 4096),
        ("gfx942", "v_mfma_f32_32x32x2_f32 v[0:15], v16, v17, 0", 2 * 32 * 32 * 2 / 256),
        ("gfx1100", "v_wmma_f32_16x16x16_bf16 v[0:7], v[8:15], v[16:23], v[0:7]", 2 * 16 * 16 * 16 / 512),
    ],
)
def test_amds_matrix_instructions(target, opcode, cycles):
    assert bound(amd(opcode), target, warps=1).cycles["matrix units"] == pytest.approx(cycles, rel=0.02)


def test_amds_units():
    found = bound(
        amd(
            "v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], 0", "ds_read_b128 v[0:3], v4", "v_exp_f32 v1, v1",
            "ds_read2_b64 v[0:3], v4", "v_add_f32 v1, v1, v1", "s_waitcnt lgkmcnt(0)",
        ),
        "gfx942",
    )  # fmt: skip
    assert found.cycles["vector units"] == 4 * 64 * 3 / 64  # a wavefront passes in four cycles on one of four SIMDs
    assert found.cycles["special functions"] == 4 * 64 / 16
    assert found.cycles["shared memory"] == 4 * 64 * (16 + 16) / 128


def test_amds_copies():
    found = bound(amd("global_load_dwordx4 v[0:3], v4, s[0:1]", "buffer_store_short v0, v4, s[0:3], 0 offen"), "gfx942")
    assert found.peak == "memory bandwidth"
    assert found.cycles["memory bandwidth"] == pytest.approx(4 * 64 * 18 / (5.3e12 / 256 / 2.1e9), rel=0.2)
