"""No default configuration compiles to slower code than ``benchmarks/static_baseline.json`` has it."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from benchmarks.static_baseline import BASELINE, Entry, Key, entries, load, render
from benchmarks.static_gate import ADVICE, TARGETS, compare, failure, work
from fusedops.autotune.versions import triton_version
from tests.harness.compile import KINDS, ROOT
from tests.harness.static_gate import record

TRITON, ENTRIES = load()
BEFORE: dict[tuple[str, str], dict[Key, Entry]] = defaultdict(dict)
for _key, _entry in ENTRIES.items():
    BEFORE[_key.case, _key.target][_key] = _entry

WORK = [
    pytest.param(case, target, id=f"{case}-{target}", marks=() if target in KINDS else pytest.mark.slow)
    for case, target in sorted(work(), key=lambda item: TARGETS.index(item[1]))
]


@pytest.mark.skipif(
    triton_version() != TRITON, reason=f"the baseline was made with Triton {TRITON}; here is {triton_version()}"
)
@pytest.mark.parametrize(("case", "target"), WORK)
def test_no_slower_than_the_baseline(compiler, record_property, case, target):
    changes = compare(BEFORE[case, target], entries(case, target, compiler.figures(case, target)))
    record(record_property, changes)
    worse = failure(changes)
    if worse:
        pytest.fail(worse, pytrace=False)


def test_no_case_of_the_baseline_is_gone():
    """A kernel that is gone from a case is that case's failure."""
    gone = BEFORE.keys() - set(work())
    names = ", ".join(sorted(f"{case} for {target}" for case, target in gone))
    assert not gone, f"no case is named {names}, which {BASELINE.name} holds.\n{ADVICE}"


def test_the_baseline_is_of_the_triton_that_is_installed_where_none_came_with_torch():
    """Else continuous integration would leave the gate out."""
    assert re.findall(r"^TRITON := triton==(\S+);", (ROOT / "Makefile").read_text(), re.MULTILINE) == [TRITON]


def test_the_baseline_is_as_the_command_writes_it():
    """An update then changes only the lines of kernels that changed."""
    assert BASELINE.read_text() == render(TRITON, ENTRIES)
