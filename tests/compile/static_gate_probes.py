"""A kernel and what a careless change may make of it, compiled offline for the static gate's tests.

The tests' compile worker runs :func:`find`: pytest's own process interprets kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops.inspection.offline import compile_launches
from tests.harness.compile import plain_figures


@triton.jit
def product_kernel(X, Y, BIAS, OUT, K, N: tl.constexpr, BLOCK: tl.constexpr, CARELESS: tl.constexpr):
    """N² sums of products; a careless one loads a part of the bias in every step."""
    i = tl.arange(0, N)
    k = tl.arange(0, BLOCK)
    total = tl.zeros((N, N), dtype=tl.float32)
    for first in range(0, K, BLOCK):
        x = tl.load(X + i[:, None] * K + first + k[None, :])
        y = tl.load(Y + (first + k[:, None]) * N + i[None, :])
        total = tl.dot(x, y, total)
        if CARELESS:
            total += tl.load(BIAS + i * K + first)[None, :]
    tl.store(OUT + i[:, None] * N + i[None, :], total.to(OUT.dtype.element_ty))


# Sums on a side of a tile, whether it is careless, and the launch's options.
VARIANTS = {
    "plain": (64, False, {}),
    "careless": (64, True, {}),
    "larger": (128, False, {}),
    "crowded": (128, False, {"maxnreg": 96}),  # fewer than its sums alone take
}


def find(target: str, *names: str) -> dict[str, Any]:
    """Figures of some of the variants."""
    found = {}
    for name in names:
        size, careless, options = VARIANTS[name]
        x, out = torch.empty(size, 512, dtype=torch.float16), torch.empty(size, size, dtype=torch.float16)

        def call(x=x, out=out, size=size, careless=careless, options=options):
            product_kernel[(1,)](x, x.t(), x, out, 512, size, 64, careless, num_warps=4, num_stages=2, **options)

        (compiled,) = compile_launches(target, call)
        found[name] = plain_figures(compiled)
    return found
