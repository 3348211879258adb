"""Figures of compiled kernels, and what is compiled of each operator."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from fusedops.autotune.operator import operators
from fusedops.inspection.operators import TYPICAL, Call
from fusedops.runtime.device import TARGETS
from tests.harness.compile import CompileWorker

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def found(compiler: CompileWorker):
    return compiler.call("tests.inspection.figures_probes:find")


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_a_product(found, target):
    figures = found[f"product {target}"]
    loop = figures["loop"]
    assert figures["target"] == target
    assert figures["spill_bytes"] == 0
    assert figures["blocks_per_multiprocessor"] > 0
    assert loop["matrix"] > 0
    assert loop["memory"] > 0
    assert loop["steps"] in (1, 2, 4)
    assert sum(loop[kind] for kind in ("matrix", "special", "memory", "other")) < figures["instructions"]
    assert figures["loaded"] > 0
    assert figures["stored"] > 0
    assert max(figures["widths"]) == 128
    bound = figures["bound"]
    assert bound["peak"] == "matrix units"
    assert 0 < bound["share"] <= 1
    assert bound["share"] == pytest.approx(bound["cycles"]["matrix units"] / max(bound["cycles"].values()))


def test_a_products_matrix_cycles_are_those_of_its_tile(found):
    """2 · rows · columns · depth operations a step, by what an H100's multiprocessor makes in a cycle."""
    figures = found["product sm_90"]
    cycles = figures["bound"]["cycles"]["matrix units"] / figures["loop"]["steps"]
    sides = [2**n for n in range(5, 9)]
    tiles = {2 * m * n * k / 4096 for m in sides for n in sides for k in sides}
    assert min(abs(cycles / tile - 1) for tile in tiles) < 1e-3


def test_a_norm_moves_each_byte_once(found):
    figures = found["norm"]
    assert figures["loop"] is None
    assert figures["loaded"] == 2 * 4096  # a row of x; there is no weight
    assert figures["widths"] == [128]
    assert (figures["bound"]["share"], figures["bound"]["peak"]) == (1.0, "memory bandwidth")


def test_what_descriptors_copy_is_not_told(found):
    figures = found["descriptors"]
    assert figures["loaded"] is None
    assert figures["stored"] is None
    assert figures["widths"] == []
    assert figures["bound"]["peak"] == "matrix units"


def test_every_operator_has_a_usual_call():
    assert set(TYPICAL) == set(operators())


def test_every_operator_launches_kernels_of_ours(compiler):
    for launched in compiler.call("tests.inspection.figures_probes:launched").values():
        assert all(launched.values()), launched
        assert all(name.endswith("_kernel") for names in launched.values() for name in names), launched
        assert {"norm_forward_kernel", "norm_backward_kernel"} <= set(launched["norm"])
        assert {"forward_kernel", "backward_kv_kernel", "backward_q_kernel"} <= set(launched["attention"])
        assert {"linear_forward_kernel", "grad_input_kernel", "grad_weight_kernel"} <= set(launched["linear"])
        assert "gated_linear_kernel" in launched["gated_linear"]


def test_others_are_called_with_the_operators_tensors(compiler):
    shapes = compiler.call("tests.inspection.figures_probes:shapes")
    assert shapes["norm"] == [[8192, 4096], [4096]]
    assert shapes["group_norm"] == [[8, 320, 4096], [320], [320]]
    assert shapes["linear"] == [[8192, 4096], [4096, 4096], [4096]]
    assert shapes["gated_linear"] == [[8192, 4096], [14336, 4096], [14336, 4096]]
    assert shapes["attention"] == [[2, 16, 4096, 128]] * 3
    assert shapes["attention_decode"] == [[8, 32, 1, 128], [8, 8, 8192, 128], [8, 8, 8192, 128]]


def test_only_a_part_of_a_call():
    facts = TARGETS["sm_90"]
    assert [problem.direction for _, problem in Call("norm", only="backward").problems(facts)] == ["backward"]
    assert len(Call("attention", {"training": False}).problems(facts)) == 1
    with pytest.raises(ValueError, match="attention has no part 'sideways'; it has forward, backward_kv, backward_q"):
        Call("attention", only="sideways").problems(facts)


@pytest.mark.interpreter
@pytest.mark.parametrize("rms", [True, False], ids=["rms", "layer"])
@pytest.mark.parametrize("parameters", [True, False])
def test_the_textbooks_norm_is_right(rms, parameters):
    from fusedops.inspection.textbook import norm

    x = torch.randn(3, 100)
    weight, bias = (torch.randn(100) if parameters else None for _ in range(2))
    wanted = (
        torch.nn.functional.rms_norm(x, (100,), weight, 1e-5) + (0.0 if bias is None else bias)
        if rms
        else torch.nn.functional.layer_norm(x, (100,), weight, bias, 1e-5)
    )
    torch.testing.assert_close(norm.launch(x, weight, bias, rms, {"num_warps": 4}), wanted)
