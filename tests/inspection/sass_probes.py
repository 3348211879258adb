"""Products compiled offline and their instructions counted.

The tests' compile worker runs :func:`find`: pytest's own process interprets kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.inspection import sass
from fusedops.inspection.offline import Compiled, compile_launches
from tests.harness.compile import all_cases

_USUAL = ("sm_80", "sm_90", "sm_100")
# Cases, which of their launches, and for which targets.
PRODUCTS = {
    "pointers": ("linear/forward_silu", 0, (*_USUAL, "gfx942")),
    "grad_input": ("linear/backward_bias_large", 0, _USUAL),
    "grad_weight": ("linear/backward_bias_large", 1, _USUAL),
    "gated": ("gated_linear/wide", 0, _USUAL),
    "grouped": ("grouped_linear/forward_large", 0, _USUAL),
    "descriptors": ("linear_forward/persistent_large", 0, ("sm_90", "sm_100")),
    "few rows": ("linear_forward/skinny_wide", 0, ("sm_80", "sm_90")),
}


@triton.jit
def crowded_kernel(X, Y, N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """N² sums in four warps, which is more than there are registers for."""
    i = tl.arange(0, N)
    k = tl.arange(0, BLOCK)
    total = tl.zeros((N, N), dtype=tl.float32)
    for first in range(0, K, BLOCK):
        x = tl.load(X + i[:, None] * K + first + k[None, :])
        y = tl.load(Y + (first + k[:, None]) * N + i[None, :])
        total = tl.dot(x, y, total)
    tl.store(Y + i[:, None] * N + i[None, :], total.to(Y.dtype.element_ty))


def report(compiled: Compiled) -> dict[str, object]:
    loop = sass.main_loop(compiled)
    assert loop is not None
    return {
        "names": {kind: loop.names(kind) for kind in ("matrix", "copy", "barrier")},
        "counts": {kind: loop.count(kind) for kind in ("matrix", "copy", "barrier", "other")},
        "overhead": loop.overhead,
        "serialised": sass.serialised(compiled),
    }


def find() -> dict[str, object]:
    cases = all_cases()
    found: dict[str, object] = {
        f"{name} {target}": report(compile_launches(target, cases[case].make())[launch])
        for name, (case, launch, targets) in PRODUCTS.items()
        for target in targets
    }
    (few,) = compile_launches("sm_80", cases["linear_forward/skinny_wide"].make())
    found["whole"] = sass.whole_kernel(few).count("matrix")
    x, y = torch.empty(256, 4096, dtype=torch.float16), torch.empty(4096, 256, dtype=torch.float16)
    (crowded,) = compile_launches("sm_90", lambda: crowded_kernel[(1,)](x, y, N=256, K=4096, BLOCK=64, num_warps=4))
    found["crowded"] = sass.serialised(crowded)
    return found
