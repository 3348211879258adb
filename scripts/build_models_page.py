"""Write docs/models.md: what patching fuses in each model that the tests patch, and how far the results move.

    python scripts/build_models_page.py [--check]

The models are those of tests/patching/zoo.py, tiny and with random weights; nothing is downloaded, and a CPU does. timm
and torchvision have to be installed. With --check nothing is written, and the exit code is 1 where the page lists other
models or other fused parts than it would (the measured differences are not compared: they depend on the machine).
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # works in a checkout that is not installed
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

import fusedops  # noqa: E402
from tests.patching import zoo  # noqa: E402

PAGE = ROOT / "docs" / "models.md"

INTRODUCTION = """\
# Models that `fusedops.patch` knows

What one call of `fusedops.patch(model)` fuses, and how far the outputs move from the unpatched model's. Patching goes
by what the modules are and compute, not by this list: a model that is built of the same parts is fused as well, and
`print(fusedops.plan(model))` says what is in yours. Each model here is small (width 32, one or two layers a part) and
has random weights. The tests also compare gradients, generated tokens and training with the plain model's
(`tests/patching/test_zoo.py`).

* **Fused**: how many parts of the model call each function of fusedops.
* **Difference**: the largest over all outputs, which are of the order of 1. In parentheses the *noise floor*: how far
  the plain model's outputs move when each of its steps rounds a little differently. A difference of that order is
  rounding.
"""

COLUMNS = ("model", "fused", "left alone, and why", "difference in float32", "difference in bfloat16")

END = """\
Computed on a CPU, where fusedops' functions run on torch's operators. This page is written by
`python scripts/build_models_page.py` and compared with the tests' models by `tests/patching/test_zoo.py`: run the
script again when a model, a rule or a pinned version changes.
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="Write nothing; fail where the page would change.")
    options = parser.parse_args(arguments)
    try:
        with fusedops.backend("torch"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            page = build(measure=not options.check)
    except pytest.skip.Exception as missing:
        raise SystemExit(f"every model is needed: {missing}") from None
    changed = not PAGE.exists() or stable_rows(PAGE.read_text()) != stable_rows(page)
    if not options.check:
        PAGE.write_text(page)
    print(f"{'would change' if options.check else 'changed'}: {PAGE.name if changed else 'nothing but digits'}")
    return 1 if options.check and changed else 0


def build(measure: bool = True) -> str:
    parts = [INTRODUCTION]
    package = None
    for name, animal in zoo.ZOO.items():
        if animal.package != package:
            package = animal.package
            title = "torch.nn" if package == "torch" else package
            parts.append(f"\n## {title}\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n")
        differences = [difference(name, dtype) if measure else "" for dtype in (torch.float32, torch.bfloat16)]
        parts.append(f"| {' | '.join((*stable_row(name), *differences))} |\n")
    return "".join([*parts, "\n", END])


def stable_row(name: str) -> tuple[str, str, str]:
    """A model's row, less what depends on the machine."""
    fused, left = zoo.described(fusedops.plan(zoo.build(name)))
    return zoo.ZOO[name].title, fused, left.replace("|", "\\|") or "–"


def difference(name: str, dtype: torch.dtype) -> str:
    check = zoo.measured(name, dtype)
    floor = "not measured" if check.noise_floor is None else f"{check.noise_floor:.1e}"
    return f"{check.max_abs_error:.1e} ({floor})"


def stable_rows(page: str) -> list[tuple[str, ...]]:
    """The rows of a page, less what depends on the machine."""
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| model |")]
    return [tuple(cell.strip() for cell in row.strip("|").split(" | ")[:3]) for row in rows]


if __name__ == "__main__":
    sys.exit(main())
