"""Kernels whose traffic is known, compiled offline.

The tests' compile worker runs :func:`find`: pytest's own process interprets kernels.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
import triton
import triton.language as tl


@triton.jit
def scale_kernel(X, W, Y, n, stride, BLOCK: tl.constexpr):
    """Program i owns row i."""
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(X + row * stride + at, mask=at < n).to(tl.float32)
    tl.store(Y + row * stride + at, x * tl.load(W + at, mask=at < n), mask=at < n)


@triton.jit
def looped_kernel(X, SUMS, n, BLOCK: tl.constexpr):
    """Loads a block a turn and stores one number at the end."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(X + at, mask=at < n, other=0.0)
    tl.store(SUMS + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def chosen_kernel(A, B, Y, n, BLOCK: tl.constexpr):
    """Reads A or B, by a value at run time; the index of what it reads was itself read, from Y."""
    at = tl.arange(0, BLOCK)
    source = A
    if n > 7:
        source = B
    index = tl.load(Y + at)
    tl.store(Y + at, tl.load(source + index))


@triton.jit
def adding_kernel(X, Y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_add(Y + at, tl.load(X + at))


@triton.jit
def product_kernel(A, B, C, depth, BLOCK: tl.constexpr):
    """Its loads are pipelined: some copies to shared memory come before the loop."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, depth, BLOCK):
        a = tl.load(A + i[:, None] * depth + start + i[None, :])
        b = tl.load(B + (start + i[:, None]) * BLOCK + i[None, :])
        total = tl.dot(a, b, total)
    tl.store(C + i[:, None] * BLOCK + i[None, :], total)


def find() -> dict[str, object]:
    from fusedops.inspection import traffic
    from fusedops.inspection.offline import compile_launches

    half, single = torch.ones(1 << 14, dtype=torch.float16), torch.ones(1 << 14)
    misaligned = torch.ones((1 << 14) + 1, dtype=torch.float16)[1:]
    indices = torch.ones(1 << 14, dtype=torch.int32)
    calls = {
        "full": lambda: scale_kernel[(8,)](half, single, half, 2048, 2048, BLOCK=2048),
        "small": lambda: scale_kernel[(8,)](half, single, half, 64, 64, BLOCK=64),
        "misaligned": lambda: scale_kernel[(8,)](misaligned, single, half, 2048, 2048, BLOCK=2048),
        "looped": lambda: looped_kernel[(4,)](single, single, 4096, BLOCK=1024),
        "chosen": lambda: chosen_kernel[(1,)](indices, indices, indices, 8, BLOCK=128),
        "adding": lambda: adding_kernel[(1,)](single, single, BLOCK=1024),
        "product": lambda: product_kernel[(1,)](half, half, single, 256, BLOCK=64, num_stages=3),
    }
    found: dict[str, object] = {
        f"{name} {target}": asdict(traffic.memory_traffic(compiled))
        for target in ("sm_80", "sm_90", "gfx942", "gfx1100")
        for name, call in calls.items()
        for compiled in compile_launches(target, call)
    }
    return found
