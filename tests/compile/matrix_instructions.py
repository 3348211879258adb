"""Which matrix instructions compiled kernels consist of.

The tests' compile worker runs :func:`find`: pytest's own process interprets kernels.
"""

from __future__ import annotations

import re

from fusedops.inspection.offline import capture_launches, compile_launch
from tests.harness.compile import all_cases


def find(family: str, asked: list[tuple[str, str]]) -> list[list[str]]:
    """Those of the first kernel that each case of a family launches, compiled for its target."""
    cases = all_cases()
    found = []
    for name, target in asked:
        with capture_launches(target) as launches:
            cases[f"{family}/{name}"].make()()
        asm = compile_launch(launches[0], target).asm
        text = asm.get("ptx") or asm["amdgcn"]
        found.append(sorted(set(re.findall(r"[\w.:]*(?:mma|mfma)[\w.:]*", text))))
    return found
