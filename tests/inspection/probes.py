"""Kernels with one property each, compiled offline.

The tests' compile worker runs :func:`find`: pytest's own process interprets kernels.
"""

from __future__ import annotations

from unittest import mock

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import fusedops


@triton.jit
def simple_kernel(X, Y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at, mask=at < n) * 2, mask=at < n)


@triton.jit
def greedy_kernel(X, Y, N: tl.constexpr):
    """Holds N² sums in one warp."""
    i = tl.arange(0, N)
    total = tl.zeros((N, N), dtype=tl.float32)
    for k in range(64):
        x = tl.load(X + k * N + i)
        total += tl.exp(x[:, None] * k) * x[None, :]
    tl.store(Y + i[:, None] * N + i[None, :], total)


@triton.jit
def product_kernel(X, Y, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(X + i[:, None] * N + i[None, :])
    tl.store(Y + i[:, None] * N + i[None, :], tl.dot(x, tl.trans(x)))


@triton.jit
def wrong_kernel(X, Y, BLOCK: tl.constexpr):
    tl.store(Y + tl.arange(0, BLOCK), tl.load(X + tl.arange(0, 2 * BLOCK)))


@triton.jit
def unusual_kernel(PAIR, Y, stride, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    y = tl.load(PAIR[1] + at * stride)
    if PAIR[0] is not None:
        y += tl.load(PAIR[0] + at)
    tl.store(Y + at, y)


@triton.jit
def described_kernel(X, Y, row):
    Y.store([row, 0], X.load([row, 0]) * 2)


def norm_step() -> None:
    x = torch.ones(4, 256, requires_grad=True)
    fusedops.rms_norm(x, 256).backward(torch.ones(4, 256))


def find() -> dict[str, object]:
    from fusedops.inspection import resources

    # The tools are asked afresh, whatever the worker remembers of them.
    with mock.patch.object(resources, "remembered", lambda kind, given, ask: ask()):
        return _find()


def _find() -> dict[str, object]:
    from fusedops.inspection.offline import CompilationError, capture_launches, compile_launch, compile_launches
    from fusedops.runtime.device import device_facts

    x, y = torch.ones(1 << 14), torch.full((1 << 14,), 7.0)
    calls = {
        "simple": lambda: simple_kernel[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, y, 1000, BLOCK=256),
        "greedy": lambda: greedy_kernel[(1,)](x, y, N=64, num_warps=1, maxnreg=32),
        "product": lambda: product_kernel[(1,)](x.half(), y, N=64),
    }
    found: dict[str, object] = {
        f"{name} {target}": {
            field: getattr(compiled, field) for field in ("name", "registers", "spill_bytes", "shared", "num_warps")
        }
        for target in ("sm_80", "sm_100", "gfx942")
        for name, call in calls.items()
        if not (name == "greedy" and target == "gfx942")
        for compiled in compile_launches(target, call)
    }
    with capture_launches("sm_90") as launches:
        calls["simple"]()
        found["arch"] = device_facts(x.device).arch
    found["grid"] = launches[0].grid
    found["arch_after"] = device_facts(x.device).arch
    found["untouched"] = bool(y.eq(7).all())
    found["again"] = compile_launch(launches[0], "sm_90") == compile_launch(launches[0], "sm_90")
    simple = compile_launch(launches[0], "sm_90")
    found["parameters"], found["constants"] = simple.parameters, dict(simple.constants)
    (unusual,) = compile_launches("sm_80", lambda: unusual_kernel[(1,)]((None, x), y, 1, BLOCK=128))
    found["unusual parameters"], found["unusual constants"] = unusual.parameters, dict(unusual.constants)
    descriptors = [TensorDescriptor.from_tensor(t.view(128, 128), [64, 64]) for t in (x, y)]
    with capture_launches("sm_90") as launches:
        described_kernel[(2,)](*descriptors, 64)
    for target in ("sm_80", "sm_90"):
        described = compile_launch(launches[0], target)
        found[f"described {target}"] = {
            "parameters": described.parameters,
            "tma": "cp.async.bulk.tensor" in described.asm["ptx"],
            "spill_bytes": described.spill_bytes,
        }
    with fusedops.backend("triton"), capture_launches("sm_90") as launches:
        norm_step()
    found["public"] = [launch.name for launch in launches]
    found["public_after"] = fusedops.explain(fusedops.rms_norm, x, x.shape).backend
    for name, call in {
        "wrong": lambda: wrong_kernel[(1,)](x, y, BLOCK=64),
        "assembler": lambda: simple_kernel[(1,)](x, y, 1000, BLOCK=256, ptx_options="--no-such-option"),
    }.items():
        try:
            compile_launches("sm_90", call)
        except CompilationError as error:
            found[name] = str(error)
    try:
        simple_kernel[(1,)](x, y, 1000, BLOCK=256)
    except Exception as error:  # no driver, or a driver that takes no CPU tensor: the real one is asked again
        found["launch_after"] = str(error)
    return found
