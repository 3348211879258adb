"""Which loop is the hot one, and how many steps of Triton's loop one of its turns makes."""

from __future__ import annotations

import pytest

from fusedops.inspection.loops import Counts, hot_loop, parse_llvm, parse_ptx, steps_of
from fusedops.inspection.offline import Compiled
from fusedops.inspection.sass import innermost_loops, parse_sass
from tests.inspection.code import machine_code

PTX = """
.visible .entry kernel(.param .u64 kernel_param_0)
{
    ld.param.b64 %rd1, [kernel_param_0];
    @%p1 bra $L__BB0_3;
$L__BB0_1:
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 }, { %r2 }, { %r3 }, { %r1 };
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r4 }, { %r2 }, { %r3 }, { %r4 };
    @%p2 bra $L__BB0_1;
$L__BB0_3:
    ret;
}
"""
LLVM = """
define amdgpu_kernel void @kernel(ptr addrspace(1) %0) !dbg !6 {
  br i1 %1, label %.lr.ph, label %._crit_edge, !dbg !7

.lr.ph:                                           ; preds = %0
  %5 = tail call <16 x float> @llvm.amdgcn.mfma.f32.32x32x8bf16.1k(<4 x i16> %2, <4 x i16> %3, i32 0)
  br i1 %4, label %.lr.ph, label %._crit_edge, !dbg !8

._crit_edge:                                      ; preds = %.lr.ph, %0
  ret void, !dbg !9
}
"""

COPYING = """
.visible .entry kernel(.param .u64 kernel_param_0)
{
$L__BB0_1:
    @%p3 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.shared.b32 %r5, [ %r6 + 0 ];
    st.global.v4.b32 [ %rd2 + 0 ], { %r1, %r2, %r3, %r4 };
    @%p2 bra $L__BB0_1;
    ret;
}
"""


def compiled(**asm: object) -> Compiled:
    return Compiled("kernel", "sm_80", 32, 0, 0, 4, 1, 3, (), {}, 0.0, asm)


@pytest.mark.parametrize(
    ("parsed", "counts"),
    [(parse_ptx(PTX), (2, 0)), (parse_llvm(LLVM), (1, 0)), (parse_ptx(COPYING), (0, 2))],
    ids=["PTX", "LLVM IR", "PTX that copies"],
)
def test_what_a_step_consists_of_before_it_is_unrolled(parsed, counts):
    (loop,) = innermost_loops(*parsed)
    kinds = [parsed[0][at].kind for at in loop.body]
    assert (kinds.count("matrix"), kinds.count("copy")) == counts


@pytest.mark.parametrize(
    ("ptx", "found", "steps"),
    [
        (PTX, [Counts(2, 4)], [1]),
        (PTX, [Counts(8, 4)], [4]),
        (PTX, [Counts(8, 4), Counts(2, 1)], [4, 1]),  # a loop that a second one follows
        (PTX, [Counts(3, 0)], [None]),  # no multiple
        (PTX, [Counts(0, 2), Counts(2, 0)], [None, 1]),
        (COPYING, [Counts(0, 8)], [4]),
        (COPYING, [Counts(0, 0)], [None]),
    ],
)
def test_steps_of_a_turn(ptx, found, steps):
    assert steps_of(compiled(ptx=ptx), found) == steps


def test_loops_that_differ_are_told_apart_by_their_order():
    two = PTX.replace("    ret;", "$L2:\n    mma.sync.aligned.m16n8k16 { %r1 }, { %r2 };\n    @%p2 bra $L2;\n    ret;")
    assert steps_of(compiled(ptx=two), [Counts(4, 0), Counts(4, 0)]) == [2, 4]
    assert steps_of(compiled(ptx=two), [Counts(4, 0)]) == [None]


LOOPS = """
    first:
    HMMA.16816.F32 R4, R2, R3, R4
    FADD R1, R1, R1
    FADD R1, R1, R1
    @P0 BRA `(.L_first)
    second:
    HMMA.16816.F32 R4, R2, R3, R4
    FADD R1, R1, R1
    @P0 BRA `(.L_second)
    third:
    LDG.E.128 R4, [R2]
    STG.E.128 [R2], R4
    FADD R1, R1, R1
    FADD R1, R1, R1
    FADD R1, R1, R1
    @P0 BRA `(.L_third)
    EXIT
"""


def test_the_hot_loop_has_the_most_matrix_instructions_and_of_these_the_fewest_others():
    instructions, labels = parse_sass(machine_code(LOOPS))
    loop = hot_loop(compiled(ptx=PTX), instructions, labels)
    assert [instructions[at].opcode for at in sorted(loop.body)] == ["HMMA", "FADD", "BRA"]


def test_without_matrix_instructions_it_is_the_longest():
    instructions, labels = parse_sass(machine_code(LOOPS.replace("HMMA.16816.F32", "FFMA")))
    loop = hot_loop(compiled(ptx=COPYING), instructions, labels)
    assert [instructions[at].opcode for at in sorted(loop.body)][:2] == ["LDG", "STG"]
    assert loop.steps == 1


def test_code_without_a_loop_has_none():
    assert hot_loop(compiled(ptx=PTX), *parse_sass(machine_code("FADD R1, R1, R1\nEXIT"))) is None


def test_what_a_turn_may_jump_over_is_not_certain():
    instructions, labels = parse_sass(
        machine_code("""
        loop:
        HMMA.16816.F32 R4, R2, R3, R4
        @P1 BRA `(.L_on)
        MUFU.EX2 R1, R1
        on:
        FADD R1, R1, R1
        @P0 BRA `(.L_loop)
        EXIT
    """)
    )
    (loop,) = innermost_loops(instructions, labels)
    assert [instructions[at].opcode for at in sorted(loop.body - loop.certain)] == ["MUFU"]
