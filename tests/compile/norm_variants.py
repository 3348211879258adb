"""How many codes the norms' kernels are compiled to for inputs of several sizes.

The tests' compile worker runs these functions: pytest's own process interprets kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch

from fusedops.inspection.offline import Compiled, compile_launches


def groups() -> dict[str, int]:
    """Group norm's kernels, by name: held, divided and (from 33 members of the batch) looped groups."""
    code = defaultdict(set)
    for size in (16, 96):
        for batch in (1, 2, 7, 16, 48, 1000):
            for kernel in _group_norm(batch, size):
                if kernel.name.startswith("group_norm"):
                    code[kernel.name, size].add(kernel.asm["ptx"])
    return {f"{name}:{size}": len(variants) for (name, size), variants in code.items()}


def _group_norm(batch: int, size: int) -> Iterator[Compiled]:
    from fusedops.norm.kernels_group import group_norm_forward
    from fusedops.norm.kernels_group_backward import group_norm_backward

    x = torch.empty(batch, 64, size, size, dtype=torch.float16)
    weight, statistics = torch.empty(64, dtype=torch.float16), torch.empty(batch, 8)
    needs = (True, True, True)
    yield from compile_launches("sm_90", lambda: group_norm_forward(x, weight, weight, 8, 1e-5, x.dtype))
    yield from compile_launches(
        "sm_90", lambda: group_norm_backward(x, x, weight, statistics, statistics, 8, needs, x.dtype)
    )


def rows() -> dict[str, int]:
    """The norms' kernels on rows of a matrix, and on heads of a packed projection that are read by three strides; held
    and looped."""
    code = defaultdict(set)
    for width in (64, 65536):
        for heads in (False, True):
            for batch, sequence in ((1, 2), (1, 7), (2, 16), (5, 48), (3, 1000)):
                if width > 64 and sequence > 16:
                    continue
                for kernel in _norm(width, heads, batch, sequence):
                    sums = kernel.name.startswith("sum")
                    layout = "sums" if sums else "by_three_strides" if heads else "matrix"
                    code[f"{kernel.name}:{layout}:{width}"].add(kernel.asm["ptx"])
    return {name: len(variants) for name, variants in code.items()}


def _norm(width: int, heads: bool, batch: int, sequence: int) -> Iterator[Compiled]:
    from fusedops.norm.kernels_backward import norm_backward
    from fusedops.norm.kernels_forward import norm_forward

    half = torch.float16
    x = torch.empty(batch, sequence, 3, 4, width, dtype=half)[:, :, 0].transpose(1, 2)
    x = x if heads else x.contiguous()
    weight, statistics = torch.empty(width, dtype=half), torch.empty(x.shape[:-1])

    def forward() -> object:
        return norm_forward(x, None, weight, weight, None, 1, 1e-5, 0.0, "layer", 0.0, half)

    def backward() -> object:
        needs, dtypes = (True, False, True, True), (half,) * 4
        return norm_backward(
            x, None, x, weight, weight, statistics, statistics, None, 1, 1e-5, 0.0, "layer", 0.0, False, needs, dtypes
        )

    yield from compile_launches("sm_90", forward)
    yield from compile_launches("sm_90", backward)
