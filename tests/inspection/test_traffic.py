"""What kernels load and store is read from their code: from texts written by hand, and from compiled kernels."""

from __future__ import annotations

import importlib.util
import textwrap
from typing import Any

import pytest

from fusedops.inspection.accesses import Access
from fusedops.inspection.amd import amd_accesses, llir_accesses
from fusedops.inspection.ptx import ptx_accesses
from fusedops.inspection.traffic import Traffic
from tests.harness.compile import CompileWorker

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

TARGETS = ("sm_80", "sm_90", "gfx942", "gfx1100")


def ptx(body: str, parameters: str = "PPPI") -> tuple[Access, ...]:
    """Accesses of a made-up kernel: a letter a parameter, P a pointer and I an int64; their names are p0, p1, …"""
    kinds = {"P": ".u64 .ptr .global .align 1", "I": ".u64"}
    listed = ",\n".join(f"    .param {kinds[kind]} k_param_{n}" for n, kind in enumerate(parameters))
    head = f".version 8.7\n.target sm_90a\n.address_size 64\n.visible .entry k(\n{listed}\n)\n.reqntid 128\n{{\n"
    text = head + ".reg .b64 %rd<9>;\n.loc 1 2 3 // ld.global.b32 %r9, [%rd9];\n" + textwrap.dedent(body) + "\n}\n"
    return ptx_accesses(text, [f"p{n}" for n in range(len(parameters))])


def load(argument: str | None, bits: int, count: int = 1, looped: bool = False) -> Access:
    return Access(argument, "load", bits, count, looped)


def store(argument: str | None, bits: int, count: int = 1, looped: bool = False) -> Access:
    return Access(argument, "store", bits, count, looped)


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("ld.global.b16 %rs1, [%rd1];", [load("p0", 16)]),
        ("ld.global.nc.u8 %rs1, [%rd1+8];", [load("p0", 8)]),
        ("@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];", [load("p0", 128)]),
        ("@!%p1 ld.global.v2.b64 {%rd7, %rd8}, [%rd1+-16];", [load("p0", 128)]),
        ("ld.global.L1::evict_last.L2::cache_hint.v8.f32 {%r1}, [ %rd1 + 0 ], %rd5;", [load("p0", 256)]),
        ("ld.relaxed.gpu.global.b32 %r1, [%rd1];", [load("p0", 32)]),
        ("ld.b64 %rd7, [%rd1];", [load("p0", 64)]),  # a generic address
        ("@%p3 st.global.b32 [ %rd1 + 0 ], { %r9 };", [store("p0", 32)]),
        ("st.global.cs.v2.f16x2 [%rd1], {%r1, %r2};", [store("p0", 64)]),
        ("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r7;", [load("p0", 128)]),
        ("@%p1 cp.async.ca.shared.global.L2::128B [%r1], [%rd1], 4;", [load("p0", 32)]),
        ("atom.global.gpu.acq_rel.add.f32 %r1, [ %rd1 + 0 ], %r2;", [load("p0", 32), store("p0", 32)]),
        ("red.global.add.noftz.bf16x2 [%rd1], %r2;", [load("p0", 32), store("p0", 32)]),
        ("mov.u32 %r1, 0x0; @%p1 ld.global.b32 { %r1 }, [ %rd1 + 0 ];", [load("p0", 32)]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_width_and_kind(instruction, expected):
    assert list(ptx(f"ld.param.b64 %rd1, [k_param_0];\n{instruction}")) == expected


@pytest.mark.parametrize(
    "instruction",
    [
        "ld.param.b64 %rd2, [k_param_1];",
        "ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];",
        "st.shared::cta.b32 [%r5], %r1;",
        "ld.local.b32 %r1, [%rd1];",
        "cp.async.commit_group;",
        "cp.async.bulk.commit_group;",
        "cp.async.wait_group 2;",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r5];",
        "prefetch.global.L2 [%rd1];",
        "// ld.global.b32 %r1, [%rd1];",
        "fence.proxy.async.global;",
    ],
)
def test_what_is_no_access_to_global_memory(instruction):
    assert ptx(f"ld.param.b64 %rd1, [k_param_0];\n{instruction}") == ()


@pytest.mark.parametrize(
    ("body", "argument"),
    [
        ("ld.param.b64 %rd1, [k_param_2];", "p2"),
        ("ld.param.b64 %rd5, [k_param_2]; mad.wide.s32 %rd1, %r1, 4, %rd5;", "p2"),
        # An offset made of another argument, a stride, is no pointer.
        ("ld.param.b64 %rd5, [k_param_1]; ld.param.b64 %rd6, [k_param_3]; add.s64 %rd1, %rd5, %rd6;", "p1"),
        # Either of two, and by the address of a parameter.
        ("ld.param.b64 %rd5, [k_param_2]; ld.param.b64 %rd6, [k_param_0]; selp.b64 %rd1, %rd5, %rd6, %p1;", "p0|p2"),
        ("mov.b32 %r1, k_param_0; selp.b32 %r3, %r1, k_param_1, %p1; ld.param.b64 %rd1, [%r3];", "p0|p1"),
        # What a choice depended on is not behind what was chosen.
        ("ld.param.b64 %rd6, [k_param_2]; setp.eq.s64 %p1, %rd6, 0; selp.b64 %rd1, 8, 0, %p1;", None),
        # Through shared memory, to another thread.
        ("ld.param.b64 %rd5, [k_param_1]; st.shared.b64 [%r1], %rd5; ld.shared.b64 %rd1, [%r2];", "p1"),
        ("mov.b64 %rd1, 0;", None),
    ],
    ids=["itself", "mad", "offset", "selected", "selected address", "compared", "shared memory", "none"],
)
def test_the_argument_behind_an_address(body, argument):
    assert ptx(f"{body}\nst.global.b32 [%rd1+16], %r1;") == (store(argument, 32),)


def test_an_index_that_was_loaded_is_data():
    body = """
    ld.param.b64 %rd1, [k_param_0];
    ld.param.b64 %rd2, [k_param_1];
    ld.global.b64 %rd3, [%rd1];
    add.s64 %rd4, %rd2, %rd3;
    ld.global.b64 %rd5, [%rd4];
    """
    assert ptx(body) == (load("p0", 64), load("p1", 64))


def test_a_loop_is_what_can_come_by_again():
    body = """
    ld.param.b64 %rd1, [k_param_0];
    ld.param.b64 %rd3, [k_param_1];
    ld.global.b32 %r1, [%rd1];
    @%p1 bra $L__BB0_3;
    $L__BB0_1:                       // a loop whose address moves: it is written twice
    mov.b64 %rd2, %rd4;
    ld.global.b32 %r1, [%rd2];
    $L__BB0_2: ld.global.b32 %r2, [%rd2+128];
    @%p2 bra $L__BB0_2;
    add.s64 %rd4, %rd3, 4;
    bra.uni $L__BB0_1;
    $L__BB0_3:
    st.global.b32 [%rd1], %r1;
    ret;
    """
    assert ptx(body) == (load("p0", 32), store("p0", 32), load("p1", 32, count=2, looped=True))


def test_a_block_of_a_loop_may_lie_elsewhere():
    body = """
    ld.param.b64 %rd1, [k_param_0];
    ld.param.b64 %rd2, [k_param_1];
    ld.param.b64 %rd3, [k_param_2];
    $again:
    @%p1 bra $rare;
    $back:
    @%p2 bra $again;
    @%p3 bra $end;
    st.global.b32 [%rd1], %r1;
    bra.uni $end;
    $leave:                          // between the loop's blocks, but no way leads back
    st.global.b32 [%rd2], %r1;
    ret;
    $rare:
    @!%p4 bra $leave;
    ld.global.b32 %r1, [%rd3];
    bra.uni $back;
    $end:
    ret;
    """
    assert ptx(body) == (store("p0", 32), store("p1", 32), load("p2", 32, looped=True))


def test_a_pointer_to_tritons_own_scratch_memory_is_no_argument():
    text = ".visible .entry k(\n.param .u64 .ptr .global .align 1 k_param_0\n)\n{\n%s\n}"
    body = "ld.param.b64 %rd1, [k_param_0];\nld.global.b32 %r1, [%rd1];"
    assert ptx_accesses(text % body, []) == (load(None, 32),)


def test_what_cannot_be_counted_is_an_error():
    bulk = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];"
    with pytest.raises(ValueError, match="tensor descriptors"):
        ptx(bulk)
    with pytest.raises(ValueError, match="not inlined"):
        ptx_accesses(".func  helper(\n.param .b64 x\n)\n{\nret;\n}\n.visible .entry k(\n)\n{\nret;\n}", [])


AMD_TEXT = """
kernel:
\ts_load_dwordx8 s[4:11], s[0:1], 0x8
\tbuffer_load_dwordx4 v[4:7], v4, s[20:23], 0 offen
\tglobal_load_short_d16_hi v4, v[0:1], off
\tglobal_load_b96 v[0:2], v[0:1], off
\tscratch_load_b128 v[0:3], off, s0
\tbuffer_load_dword v3, off, s[0:3], 0 offset:4 ; 4-byte Folded Reload
.LBB0_2:                                ; =>This Inner Loop Header: Depth=1
\tbuffer_load_ushort v4, v4, s[20:23], 0 offen
\tglobal_load_ubyte v4, v[0:1], off
\tglobal_load_d16_u8 v4, v[0:1], off
\tbuffer_load_dwordx3 v[4:6], v4, s[20:23], 0 offen lds
\ts_cbranch_scc1 .LBB0_2
\tglobal_atomic_add_f32 v[0:1], v2, off
\tbuffer_store_d16_hi_b16 v4, v4, s[20:23], 0 offen
\tflat_store_dwordx2 v[0:1], v[2:3]
\tglobal_store_b64 v[0:1], v[2:3], off
\ts_endpgm
"""


def test_amds_instructions_by_width():
    assert amd_accesses(AMD_TEXT) == (
        load(None, 16),
        load(None, 32),
        load(None, 96),
        load(None, 128),
        load(None, 8, count=2, looped=True),
        load(None, 16, looped=True),
        load(None, 96, looped=True),
        store(None, 16),
        store(None, 32),
        store(None, 64, count=2),
    )


LLIR_TEXT = """
define amdgpu_kernel void @kernel(ptr addrspace(1) inreg readonly captures(none) %0, ptr addrspace(1) %1, i32 %2) #0 {
  %4 = tail call ptr addrspace(8) @llvm.amdgcn.make.buffer.rsrc.p8.p1(ptr addrspace(1) %0, i16 0, i64 9, i32 1), !dbg !2
  %5 = getelementptr float, ptr addrspace(1) %1, i32 %2, !dbg !2
  br label %loop, !dbg !2

loop:                                             ; preds = %loop, %3
  %6 = phi ptr addrspace(1) [ %5, %3 ], [ %9, %loop ]
  %7 = tail call <4 x i32> @llvm.amdgcn.raw.ptr.buffer.load.v4i32(ptr addrspace(8) %4, i32 %2, i32 0, i32 0), !dbg !2
  %8 = load <2 x half>, ptr addrspace(1) %6, align 4, !dbg !2
  %9 = getelementptr i8, ptr addrspace(1) %6, i32 64
  store ptr addrspace(1) %9, ptr addrspace(3) @shared, align 8
  %10 = icmp eq ptr addrspace(1) %6, null
  %11 = select i1 %10, i64 8, i64 0
  br i1 %10, label %loop, label %done

done:                                             ; preds = %loop
  %12 = load ptr addrspace(1), ptr addrspace(3) @shared, align 8
  tail call void @llvm.amdgcn.raw.ptr.buffer.store.i16(i16 7, ptr addrspace(8) %4, i32 %2, i32 0, i32 0), !dbg !2
  call void @llvm.amdgcn.global.load.lds(ptr addrspace(1) %1, ptr addrspace(3) @shared, i32 16, i32 0, i32 0)
  store <1 x double> %v, ptr addrspace(1) %12, align 8
  %13 = atomicrmw fadd ptr addrspace(1) %0, float 1.0 syncscope("agent") acq_rel, align 4
  %14 = inttoptr i64 %11 to ptr addrspace(1)
  %15 = load i8, ptr addrspace(1) %14, align 1
  ret void
}
declare <4 x i32> @llvm.amdgcn.raw.ptr.buffer.load.v4i32(ptr addrspace(8) readonly, i32, i32, i32 immarg) #3
"""


def test_llvms_code_tells_the_arguments():
    assert llir_accesses(LLIR_TEXT, ["A", "B", "n"]) == (
        load(None, 8),
        load("A", 32),
        load("A", 128, looped=True),
        store("A", 16),
        store("A", 32),
        load("B", 128),
        load("B", 32, looped=True),
        store("B", 64),
    )


def test_amds_arguments_are_named_where_the_code_agrees():
    llir = """define amdgpu_kernel void @kernel(ptr addrspace(1) %0, ptr addrspace(1) %1) {
  %3 = load i32, ptr addrspace(1) %1, align 4
  %4 = load <4 x i32>, ptr addrspace(1) %0, align 16
  ret void
}
"""
    named = (load("A", 128), load("B", 32))
    vector = "global_load_dwordx4 v[0:3], v[0:1], off"
    assert amd_accesses(vector, llir, ["A", "B"]) == named  # the other has become a scalar load
    assert amd_accesses(f"{vector}\nglobal_load_dword v4, v[0:1], off", llir, ["A", "B"]) == named
    halves = "global_load_dwordx2 v[0:1], v[0:1], off\nglobal_load_dwordx2 v[2:3], v[0:1], off"
    assert amd_accesses(halves, llir, ["A", "B"]) == (load(None, 64, count=2),)


def test_bytes_and_widths_by_argument():
    traffic = Traffic(64, (load("X", 128, 2), load("X", 16, 1, looped=True), load("W", 32), store("Y", 64, 3)))
    assert traffic.arguments == ("X", "W", "Y")
    assert traffic.loaded("X") == 64 * (2 * 16 + 2)
    assert traffic.loaded("X", looped=True) == 64 * 2
    assert traffic.loaded("X", looped=False) == 64 * 32
    assert traffic.loaded() == 64 * (2 * 16 + 2 + 4)
    assert traffic.stored("X") == 0
    assert traffic.stored() == traffic.stored("Y") == 64 * 24
    assert traffic.widths("X") == (16, 128)
    assert traffic.widths(kind="load") == (16, 32, 128)
    assert traffic.widths("X", "store") == ()


@pytest.fixture(scope="module")
def probes(compiler: CompileWorker) -> dict[str, Any]:
    return compiler.call("tests.inspection.traffic_probes:find")


def traffic_of(probes: dict[str, Any], name: str, target: str) -> Traffic:
    found = probes[f"{name} {target}"]
    return Traffic(found["threads"], tuple(Access(**access) for access in found["accesses"]))


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
def test_a_full_tile_costs_each_element_once(probes, target):
    traffic = traffic_of(probes, "full", target)
    assert traffic.arguments == ("W", "X", "Y")
    assert traffic.loaded("X") == traffic.stored("Y") == 2048 * 2
    assert traffic.loaded("W") == 2048 * 4
    assert traffic.stored("X") == traffic.loaded("Y") == 0
    assert traffic.widths() == (128,)
    assert traffic.loaded(looped=True) == 0


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
def test_a_tile_smaller_than_the_threads_counts_its_redundant_lanes(probes, target):
    traffic = traffic_of(probes, "small", target)
    assert traffic.loaded() == traffic.threads * (2 + 4)
    assert traffic.stored() == traffic.threads * 2


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
def test_a_misaligned_tensor_is_read_in_narrow_pieces(probes, target):
    traffic = traffic_of(probes, "misaligned", target)
    assert traffic.widths("X") == (16,)
    assert traffic.loaded("X") == 2048 * 2
    assert traffic.widths("W") == traffic.widths("Y") == (128,)


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
def test_a_loop_counts_as_one_turn(probes, target):
    traffic = traffic_of(probes, "looped", target)
    assert traffic.loaded("X", looped=True) == 1024 * 4
    assert traffic.loaded("X", looped=False) == 0
    assert traffic.widths("SUMS", "store") == (32,)
    assert traffic.stored(looped=True) == 0


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
def test_a_pointer_chosen_at_run_time_is_either(probes, target):
    traffic = traffic_of(probes, "chosen", target)
    assert traffic.accesses == (load("A|B", 32), load("Y", 32), store("Y", 32))


@needs_triton
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])  # others may lack it, and loop
def test_an_atomic_loads_and_stores(probes, target):
    traffic = traffic_of(probes, "adding", target)
    assert traffic.loaded("Y") == traffic.stored("Y") == traffic.loaded("X") == 1024 * 4
    assert traffic.stored("X") == 0


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
def test_pipelined_loads_begin_before_the_loop(probes, target):
    traffic = traffic_of(probes, "product", target)
    for operand in ("A", "B"):
        assert traffic.loaded(operand, looped=True) == 64 * 64 * 2
        assert traffic.loaded(operand, looped=False) == 2 * 64 * 64 * 2  # two stages before the loop
    assert traffic.stored("C") == 64 * 64 * 4
    assert traffic.widths(kind="load") == (128,)
