"""``fusedops inspect``: what it shows of kernels, ours and others', and what it says of wrong requests."""

from __future__ import annotations

import importlib.util
import json

import pytest
from typer.testing import CliRunner

from fusedops.cli import inspect as module
from fusedops.cli.app import app

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

SMALL = ["norm", "rows=64", "width=256", "--only", "forward"]

OTHERS = """
import torch
import triton
import triton.language as tl

@triton.jit
def scale_kernel(X, Y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at) * 2)

@triton.jit
def wrong_kernel(X, Y, BLOCK: tl.constexpr):
    tl.store(Y + tl.arange(0, BLOCK), tl.load(X + tl.arange(0, 2 * BLOCK)))

class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        y = torch.empty_like(x)
        scale_kernel[(x.numel() // 256,)](x, y, BLOCK=256)
        return y

    @staticmethod
    def backward(ctx, grad):
        grad_x = torch.empty_like(grad)
        scale_kernel[(grad.numel() // 128,)](grad, grad_x, BLOCK=128)
        return grad_x, None

def scale(x, weight):
    return Scale.apply(x, weight)

def wrong(x, weight):
    wrong_kernel[(1,)](x, x, BLOCK=64)

def nothing(x, weight):
    return x + 1

def broken(x):
    raise AssertionError

@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def tuned_kernel(X, n, BLOCK: tl.constexpr):
    tl.store(X + tl.arange(0, BLOCK), 0.0)

def tuned(x, weight):
    tuned_kernel[(1,)](x, 3)

value = 3
"""


def run(compiler, *arguments, code=0, probe="run", **more):
    found = compiler.call(f"tests.cli.inspect_probes:{probe}", list(arguments), *more.values())
    assert found["code"] == code, found
    assert "Traceback" not in found["err"] + found["out"]
    return found


def words(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def test_a_norm_for_two_devices(compiler):
    out = run(compiler, *SMALL, "-t", "A100", "-t", "gfx942")["out"]
    assert "A100 (sm_80)" in out
    assert "MI300X (gfx942)" in out
    assert out.count("norm norm_forward_kernel") == 2
    assert "bytes an element of its largest tensors: 2 loaded, 2 stored" in out
    assert "none spilt" in out
    assert "memory bandwidth's peak" in out


def test_json_tells_all_of_it(compiler):
    found = json.loads(run(compiler, *SMALL, "-t", "sm_90", "--json")["out"])
    (kernel,) = found["kernels"]
    assert found["failed"] == 0
    assert kernel["op"] == "norm"
    assert kernel["kernel"] == kernel["figures"]["name"] == "norm_forward_kernel"
    assert (kernel["target"], kernel["device"]) == ("sm_90", "H100")
    assert kernel["config"]["block_n"] == kernel["tile"]["BLOCK_N"] == 256
    assert kernel["figures"]["registers"] > 0
    assert 0 < kernel["figures"]["occupancy"] <= 1
    assert kernel["figures"]["bound"]["peak"] == "memory bandwidth"
    assert kernel["bytes_an_element"]["loaded"] == 2.0
    assert "code" not in kernel


def test_forward_and_backward_are_shown_and_a_kernel_of_both_once(compiler):
    found = json.loads(run(compiler, "norm", "rows=64", "width=256", "-t", "sm_90", "--json")["out"])
    names = [kernel["kernel"] for kernel in found["kernels"]]
    assert names == ["norm_forward_kernel", "norm_backward_kernel", "sum_partials_kernel"]


@pytest.mark.parametrize("config", ["num_warps=2", "num_warps=2,num_stages=1", '{"num_warps": 2}'])
def test_a_configuration_is_overridden(compiler, config):
    found = json.loads(run(compiler, *SMALL, "-t", "sm_90", "--config", config, "--json")["out"])
    (kernel,) = found["kernels"]
    assert kernel["config"]["num_warps"] == kernel["figures"]["num_warps"] == 2
    assert kernel["notes"] == []


def test_a_configuration_that_the_tuner_refuses_is_compiled_and_said_to_be(compiler):
    found = json.loads(run(compiler, *SMALL, "-t", "sm_90", "-c", "block_n=128", "--json")["out"])
    (kernel,) = found["kernels"]
    assert kernel["tile"]["BLOCK_N"] == 128
    assert kernel["notes"] == ["the tuner would refuse this configuration: the block is narrower than the row"]


def test_the_textbooks_kernel_beside_ours(compiler):
    found = json.loads(run(compiler, *SMALL, "-t", "sm_90", "--compare", "textbook", "--json")["out"])
    ours, textbook = found["kernels"]
    assert (ours["source"], textbook["source"]) == ("fusedops", "textbook")
    assert textbook["kernel"] == "textbook_norm_kernel"
    assert textbook["figures"]["num_warps"] == ours["figures"]["num_warps"]


def test_the_hot_loops_code(compiler):
    """An A100's product: matrix instructions between labels and jumps."""
    sizes = ["linear", "rows=64", "in_features=256", "out_features=64", "--only", "forward", "-c", "kernel=tiled"]
    out = run(compiler, *sizes, "-t", "sm_80", "--sass")["out"]
    assert "matrix   HMMA.16816.F32" in out
    assert ".L_" in out
    assert "EXIT" not in out  # which is no part of a loop
    assert "EXIT" in run(compiler, *sizes, "-t", "sm_80", "--sass-all")["out"]
    found = json.loads(run(compiler, *sizes, "-t", "gfx942", "--sass", "--json")["out"])
    kinds = [kind for kind, _ in found["kernels"][0]["code"]]
    assert kinds.count("matrix") == found["kernels"][0]["figures"]["loop"]["matrix"] > 0


def test_where_torch_serves_our_own_kernel_is_shown(compiler):
    sizes = ["linear", "rows=8192", "in_features=4096", "out_features=4096", "--only", "forward"]
    out = run(compiler, *sizes, "-t", "sm_90")["out"]
    assert "linear_forward_kernel" in out
    assert "torch's own product serves by default" in out


def test_a_users_kernels_beside_ours(compiler, tmp_path):
    arguments = [*SMALL[:-2], "-t", "sm_90", "--compare", "others:scale", "--json"]
    found = compiler.call("tests.cli.inspect_probes:run_in", str(tmp_path), OTHERS, arguments)
    assert found["code"] == 0, found
    theirs = [kernel for kernel in json.loads(found["out"])["kernels"] if kernel["source"] == "others:scale"]
    assert [kernel["tile"] for kernel in theirs] == [{"BLOCK": 256}, {"BLOCK": 128}]  # forward, backward


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("others:wrong", 1, "failed: wrong_kernel for sm_90: "),
        ("others:nothing", 1, "it launches no Triton kernel"),
        ("others:broken", 1, "failed: TypeError: broken() takes 1 positional argument but 2 were given"),
        ("others:tuned", 1, "a kernel under triton.autotune runs on a GPU only"),
        ("others:value", 2, "must be callable; it is a int"),
        ("others:absent", 2, "has no attribute 'absent'"),
        ("absent:one", 2, "No module named 'absent'"),
        ("others", 2, "must be textbook, liger or MODULE:FUNCTION"),
    ],
)
def test_a_users_kernel_that_is_wrong(compiler, tmp_path, name, code, said):
    arguments = [*SMALL, "-t", "sm_90", "--compare", name]
    found = compiler.call("tests.cli.inspect_probes:run_in", str(tmp_path), OTHERS, arguments)
    assert found["code"] == code, found
    assert said in words(found["out"] + found["err"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nrom"], "op must be one of norm, group_norm, linear"),
        (["norm", "depth=3"], "norm does not take depth; it takes rows, width"),
        (["norm", "rows=-1"], "must not be negative"),
        (["norm", "rows="], "sizes are name=value"),
        (["norm", "--only", "backward_kv"], "norm has no part 'backward_kv'; it has forward, backward"),
        (["--only", "sideways"], "no operator has a part 'sideways'"),
        (["norm", "-t", "H1000"], "target must be one of T4, A100"),
        (["norm", "-c", "block=3"], "norm has no block in its configuration; it has block_m, block_n"),
        (["norm", "-c", "num_warps=3"], "num_warps: 3 is no size of a tile and no count"),
        (["norm", "-c", "num_warps=many"], "num_warps: 'many' is not int"),
        (["norm", "-c", ""], "got nothing"),
        (["norm", "-c", "{"], "--config is no JSON"),
        (["-c", "num_warps=4"], "it is of one operator: name it"),
        (["--compare", "liger"], "liger is compared in one operator: name it"),
        (["attention", "--compare", "liger"], "liger is compared in norm and group_norm"),
        (["group_norm", "--compare", "textbook"], "there is no textbook's of this"),
        (["fp8_linear", "--compare", "math:sqrt"], "others' kernels are not called for fp8_linear"),
        (["norm", "--jobs", "0"], "Invalid value for '--jobs'"),
    ],
)
def test_wrong_usage(compiler, arguments, said):
    assert said in words(run(compiler, *arguments, code=2)["err"])


def test_what_torch_serves_is_left_out(compiler):
    """RDNA 3 has no attention kernels of ours with heads of 128."""
    said = run(compiler, "attention", "-t", "gfx1100", code=1)["err"]
    assert "attention: no kernel of fusedops serves such a call on RX 7900 XTX: torch's operators do" in words(said)


def test_without_liger(compiler):
    said = run(compiler, *SMALL, "--compare", "liger", code=1, probe="without_liger")["err"]
    assert "liger-kernel is not installed: pip install liger-kernel" in words(said)


def test_ctrl_c(compiler):
    found = run(compiler, *SMALL, "-t", "sm_90", "--json", code=130, probe="interrupted")
    assert "interrupted" in found["err"]
    assert found["out"] == ""


def test_a_wide_terminal_has_a_table_and_a_narrow_one_lines(compiler):
    wide, narrow = (
        compiler.call("tests.cli.inspect_probes:wide", [*SMALL, "-t", "sm_90"], width) for width in (170, 60)
    )
    assert "┃ kernel" in wide
    assert max(map(len, wide.splitlines())) <= 170
    assert "┃" not in narrow
    assert "norm norm_forward_kernel\n" in narrow


@pytest.mark.interpreter
def test_not_where_kernels_are_interpreted():
    result = CliRunner().invoke(app, ["inspect", *SMALL])
    assert result.exit_code == 1
    assert "TRITON_INTERPRET=1" in result.stderr


def test_not_without_triton(monkeypatch):
    monkeypatch.setattr(module, "HAS_TRITON", False)
    result = CliRunner().invoke(app, ["inspect", *SMALL])
    assert result.exit_code == 1
    assert "Triton is not installed" in result.stderr
