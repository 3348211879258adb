"""Figures of compiled kernels. The tests' compile worker runs :func:`find`: pytest's own process interprets kernels."""

from __future__ import annotations

from dataclasses import asdict

import torch

import fusedops
from fusedops.inspection.figures import figures
from fusedops.inspection.offline import compile_launches
from fusedops.inspection.operators import TYPICAL, Call, captured
from fusedops.inspection.peers import tensors_of
from fusedops.runtime.device import TARGETS
from tests.harness.compile import all_cases


def find() -> dict[str, object]:
    cases = all_cases()
    found: dict[str, object] = {
        f"product {target}": asdict(figures(compile_launches(target, cases["linear/forward_silu"].make())[0]))
        for target in ("sm_80", "sm_90", "sm_100", "gfx942")
    }
    x = torch.empty(8192, 4096, dtype=torch.bfloat16)
    with fusedops.backend("triton"):
        (norm,) = compile_launches("sm_90", lambda: fusedops.rms_norm(x, 4096))
    found["norm"] = asdict(figures(norm))
    (described,) = compile_launches("sm_90", cases["linear_forward/persistent_large"].make())
    found["descriptors"] = asdict(figures(described))
    return found


def launched() -> dict[str, dict[str, list[str]]]:
    """Names of the kernels of a usual call of each operator, by device and by operator; what failed by its error."""
    return {
        target: {
            op: [one.error or launch.name for one in captured(Call(op), TARGETS[target]) for launch in one.launches]
            for op in TYPICAL
        }
        for target in ("sm_90", "gfx942")
    }


def shapes() -> dict[str, list[list[int]]]:
    """Shapes of the tensors that others' kernels are called with."""
    return {
        op: [list(tensor.shape) for tensor in tensors_of(op, TYPICAL[op])]
        for op in ("norm", "group_norm", "linear", "gated_linear", "attention", "attention_decode")
    }
