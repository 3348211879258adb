"""Loops and their instructions are read from machine code: from texts written by hand, and from compiled products."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from fusedops.inspection.sass import innermost_loops, parse_amd, parse_sass
from tests.harness.compile import CompileWorker
from tests.inspection.code import machine_code

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def sass(text: str) -> list[list[str]]:
    """Opcodes of the innermost loops of a kernel, an instruction or a label (``x:``) a line."""
    instructions, labels = parse_sass(machine_code(text))
    return [[instructions[at].opcode for at in sorted(loop.body)] for loop in innermost_loops(instructions, labels)]


def test_the_innermost_of_two_loops():
    assert sass("""
        S2R R0, SR_CTAID.X
        outer:
        MOV R1, RZ
        inner:
        LDS R2, [R1]
        NOP
        HMMA.16816.F32 R4, R2, R3, R4
        @!P0 BRA `(.L_inner)
        STG.E desc[UR4][R6.64], R4
        @P1 BRA `(.L_outer)
        EXIT
        end:
        BRA `(.L_end)
    """) == [["LDS", "HMMA", "BRA"]]


def test_a_predicated_part_and_a_wait_out_of_line_belong_to_the_loop():
    assert sass("""
        loop:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3
        @!P0 BRA `(.L_wait)
        on:
        BRA.U UP1, `(.L_skip)
        UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR9]
        skip:
        ISETP.NE.AND P2, PT, R1, R2, PT
        @P2 BRA `(.L_loop)
        EXIT
        wait:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3
        @!P0 BRA `(.L_wait)
        BRA `(.L_on)
    """) == [["SYNCS", "BRA", "BRA", "UTCHMMA", "ISETP", "BRA", "SYNCS", "BRA", "BRA"]]


def test_loops_behind_a_table_of_jumps():
    """Specialised warps: each kind begins at a place of its own."""
    assert sass("""
        BRX R2 -0x12bb0 (*"BRANCH_TARGETS .L_load,.L_multiply"*)
        load:
        UTMALDG.2D [UR8], [UR4]
        BRA.U !UP0, `(.L_load)
        EXIT
        multiply:
        UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR9]
        BRA.U !UP0, `(.L_multiply)
        EXIT
    """) == [["UTMALDG", "BRA"], ["UTCHMMA", "BRA"]]


def test_code_without_a_loop_and_no_code():
    assert sass("LDG R0, [R2]\n@P0 BRA `(.L_end)\nSTG [R2], R0\nend:\nEXIT") == []
    assert innermost_loops(*parse_sass("")) == []


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("HMMA.16816.F32.BF16", "matrix"),
        ("HGMMA.64x256x16.F32", "matrix"),
        ("QGMMA.64x64x32.F32", "matrix"),
        ("IMMA.16832.S8.S8", "matrix"),
        ("DMMA.8x8x4", "matrix"),
        ("UTCHMMA", "matrix"),
        ("UTCQMMA.2CTA", "matrix"),
        ("LDGSTS.E.BYPASS.128", "copy"),
        ("LDG.E.128", "copy"),
        ("LDS.128", "copy"),
        ("LDSM.16.M88.4", "copy"),
        ("UTMALDG.2D", "copy"),
        ("UTMASTG.2D", "copy"),
        ("LDTM.x32", "copy"),
        ("BAR.SYNC.DEFER_BLOCKING", "barrier"),
        ("LDGDEPBAR", "barrier"),
        ("WARPGROUP.DEPBAR.LE", "barrier"),
        ("SYNCS.ARRIVE.TRANS64", "barrier"),
        ("UTCBAR", "barrier"),
        ("LDC.64", "other"),
        ("FFMA", "other"),
        ("IADD3", "other"),
        ("BRA", "other"),
        ("MUFU.EX2", "special"),
    ],
)
def test_kinds(opcode, kind):
    instructions, _ = parse_sass(f"        /*0010*/               @!UP0 {opcode} R0, R1 ;")
    assert [instruction.kind for instruction in instructions] == [kind]


def test_amds_assembly():
    instructions, labels = parse_amd(
        """
        .globl kernel
kernel:                                 ; @kernel
; %bb.0:
        s_load_dwordx2 s[0:1], s[4:5], 0x0
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
        buffer_load_dwordx4 v[0:3], v4, s[8:11], 0 offen
        s_waitcnt vmcnt(0)
        s_nop 0
        ds_write_b64 v5, v[0:1]
        s_barrier
        v_mfma_f32_32x32x8_bf16 v[16:31], v[70:71], v[50:51], 0
        s_cbranch_scc1 .LBB0_1
        s_endpgm
        """
    )
    (loop,) = innermost_loops(instructions, labels)
    assert [instructions[at].kind for at in sorted(loop.body)] == [
        "copy",
        "barrier",
        "copy",
        "barrier",
        "matrix",
        "other",
    ]


@pytest.fixture(scope="module")
def probes(compiler: CompileWorker) -> dict[str, Any]:
    return compiler.call("tests.inspection.sass_probes:find")


@needs_triton
@pytest.mark.parametrize(
    ("product", "matrix", "copy"),
    [
        *(
            (f"{product} {target}", matrix, "LDGSTS")
            for product in ("pointers", "grad_input", "grad_weight", "gated", "grouped")
            for target, matrix in (("sm_80", "HMMA"), ("sm_90", "HGMMA"), ("sm_100", "UTCHMMA"))
        ),
        ("pointers gfx942", "v_mfma", "buffer_load"),
        ("descriptors sm_90", "HGMMA", "UTMALDG"),
        ("descriptors sm_100", "UTCHMMA", "UTMALDG"),
        ("few rows sm_80", "HMMA", "LDGSTS"),
        ("few rows sm_90", "HMMA", "LDGSTS"),
    ],
)
def test_main_loops_use_the_devices_instructions(probes, product, matrix, copy):
    """Matrix instructions of the newest kind, copies that pass by the registers, and nothing serialised."""
    found = probes[product]
    (name,) = found["names"]["matrix"]
    assert name.startswith(matrix)
    assert any(name.startswith(copy) for name in found["names"]["copy"])
    assert not found["serialised"]


@needs_triton
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_descriptors_save_instructions(probes, target):
    pointers, descriptors = (probes[f"{name} {target}"] for name in ("pointers", "descriptors"))
    assert descriptors["counts"]["matrix"] == pointers["counts"]["matrix"]
    assert descriptors["overhead"] < 0.9 * pointers["overhead"]


@needs_triton
def test_the_whole_kernel_holds_its_main_loop(probes):
    assert probes["whole"] >= probes["few rows sm_80"]["counts"]["matrix"] > 0


@needs_triton
def test_products_that_do_not_fit_into_registers_are_serialised(probes):
    assert probes["crowded"]
