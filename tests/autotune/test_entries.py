"""What is known of a problem: its JSON, which of two entries stays, and whether its timings still hold."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
import textwrap
from typing import Literal, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fusedops
from fusedops.autotune import versions
from fusedops.autotune.entries import (
    Candidate,
    Entry,
    better,
    current_versions,
    mismatches,
    op_name,
    utc_now,
)
from fusedops.autotune.operator import Config, Operator, Work, operators
from fusedops.autotune.versions import code_of, kernels_hash
from tests.autotune.made_entries import CANDIDATES, entry


def through_json(value):
    return json.loads(json.dumps(value))


def test_json_and_back():
    for candidate in CANDIDATES:
        assert Candidate.from_json(through_json(candidate.to_json())) == candidate
    for made in (entry(), entry(source="heuristic", median=None, spread=None, default_median=None, candidates=())):
        assert Entry.from_json(through_json(made.to_json())) == made


TIMES = st.none() | st.floats(1e-9, 1e3)
FIELDS = st.dictionaries(
    st.text("abc_", min_size=1, max_size=8),
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text("xyz-=", max_size=8),
)


@given(FIELDS, FIELDS, TIMES, st.floats(0, 1), st.text(max_size=3000))
def test_whatever_is_written_is_read(problem, config, median, spread, reason):
    """A reason that a compiler gave becomes plain text; everything else comes back as it was."""
    candidate = Candidate(config, "failed", median, spread, reason)
    made = entry(
        problem=problem, config=config, source="heuristic", median=median, spread=spread, candidates=(candidate,)
    )
    back = Entry.from_json(through_json(made.to_json()))
    assert dataclasses.replace(back, candidates=()) == dataclasses.replace(made, candidates=())
    kept = back.candidates[0].reason
    assert len(kept) == min(len(reason), 2000)
    assert all(k == r if r.isprintable() or r == "\n" else k == " " for k, r in zip(kept, reason, strict=False))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "../norm"}, "op: '../norm'"),
        ({"op": 1}, "op: 1"),
        ({"problem": [1]}, "problem: list"),
        ({"problem": {"width": 1.5}}, "problem.width: 1.5"),
        ({"problem": {"width": [1]}}, "problem.width: list"),
        ({"problem": {"width": 1 << 70}}, "problem.width"),
        ({"problem": {"a\nb": 1}}, "problem: 'a"),
        ({"config": {"block_m": float("nan")}}, "config.block_m: nan"),
        ({"config": {"block_m": "x" * 201}}, "config.block_m"),
        ({"source": "measured"}, "source: 'measured' is none of tuned, heuristic"),
        ({"source": None}, "source: None"),
        ({"median": None}, "median: an entry that was tuned has one"),
        ({"median": 0}, "median: 0 is not positive"),
        ({"median": -1e-5}, "median: -1e-05 is not positive"),
        ({"median": float("inf")}, "median: inf"),
        ({"median": float("nan")}, "median: nan"),
        ({"median": True}, "median: True"),
        ({"median": "1"}, "median: '1'"),
        ({"median": 10**400}, "median"),
        ({"default_median": 0.0}, "default_median"),
        ({"spread": -1e-9}, "spread: -1e-09 is not positive"),
        ({"date": "2025-06-01 12:00:00"}, "date"),
        ({"date": "2025-06-01T12:00:00+02:00"}, "date"),
        ({"date": "2025-02-30T12:00:00Z"}, "date"),
        ({"date": 5}, "date: 5"),
        ({"versions": {}}, "versions"),
        ({"versions": dict.fromkeys(versions.VERSIONS, 3)}, "versions.fusedops: 3"),
        ({"candidates": {}}, "candidates: dict"),
        ({"candidates": [{}]}, r"candidates\[0\].missing: 'config"),
        (
            {"candidates": [{**CANDIDATES[0].to_json(), "median": None}]},
            r"candidates\[0\].median: a candidate that was timed",
        ),
        ({"candidates": [{**CANDIDATES[3].to_json(), "outcome": "won"}]}, r"candidates\[0\].outcome: 'won'"),
        ({"candidates": [{**CANDIDATES[3].to_json(), "reason": "\x1b[2J"}]}, r"candidates\[0\].reason"),
        ({"hook": "os.system"}, "unknown: 'hook'"),
    ],
)
def test_other_json_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Entry.from_json({**entry().to_json(), **changes})


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, {"op": "norm"}], ids=repr)
def test_what_is_no_entry_is_refused(value):
    with pytest.raises(ValueError, match=r"no object|missing"):
        Entry.from_json(value)


def test_the_best_entry():
    heuristic = entry(source="heuristic", median=1e-9, date="2026-01-01T00:00:00Z")
    old, new = entry(date="2025-01-01T00:00:00Z", median=1e-6), entry(date="2025-01-02T00:00:00Z", median=1e-5)
    fast, unmeasured = entry(median=1e-6), entry(source="heuristic", median=None)
    for a, b in [(old, heuristic), (new, old), (fast, entry()), (heuristic, unmeasured)]:
        assert better(a, b) is a
        assert better(b, a) is a
    assert better(entry(date="2025-06-01T12:00:00+00:00", median=1e-6), entry()).median == 1e-6  # the same time


MADE = [
    entry(source=source, date=f"2025-01-0{day}T00:00:00Z", median=median, config={"block_m": size})
    for source, day, median, size in itertools.product(("tuned", "heuristic"), (1, 2), (1e-5, 2e-5), (16, 32))
]


@given(st.permutations(MADE), st.integers(0, len(MADE)))
def test_stores_that_merge_in_any_order_agree(entries, cut):
    def best(some):
        result = some[0]
        for other in some[1:]:
            result = better(result, other)
        return result

    parts = [part for part in (entries[:cut], entries[cut:]) if part]
    assert best([best(part) for part in parts]) == best(MADE)


def test_operators_names():
    for name in ("norm", "fp8_linear", *operators()):
        assert op_name(name) == name
    for name in ("", "Norm", "../x", "a/b", "a.json", "norm\n", "n" * 42, "_x", "8bit", None, 3, "nörm"):
        with pytest.raises(ValueError, match="op: "):
            op_name(name)


def test_now():
    made = entry(date=utc_now())
    assert Entry.from_json(through_json(made.to_json())).date == made.date


# --- versions


@dataclasses.dataclass(frozen=True)
class ToyConfig(Config):
    block: int


class ToyProblem(NamedTuple):
    size: int
    mode: Literal["a", "b"] = "a"


def toy(*sources: str) -> Operator:
    return Operator(
        name="toy",
        problem=ToyProblem,
        config=ToyConfig,
        default=lambda problem, facts: ToyConfig(16),
        space=lambda problem: [ToyConfig(16), ToyConfig(32)],
        prune=lambda config, problem, facts: None,
        work=lambda config, problem, facts: Work(1, 1),
        trials="none",
        sources=sources,
        bucketed=lambda problem: ("size",),
    )


def test_an_entrys_key_is_the_operators():
    operator = toy()
    for problem in (ToyProblem(3), ToyProblem(0, "b")):
        made = entry(op="toy", problem=operator.problem_json(problem))
        assert made.key == operator.key(problem)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of kernel modules, given as {name: text}: returns the hash of its module kernels_a."""
    folder = tmp_path / "toykernels"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop(folder.name, None)

    def hash_of(**modules: str) -> str:
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(text))
        kernels_hash.cache_clear()
        versions._code_and_imports.cache_clear()
        return kernels_hash(("toykernels.kernels_a",))

    yield hash_of
    kernels_hash.cache_clear()
    versions._code_and_imports.cache_clear()
    assert not any(name.startswith("toykernels.kernels") for name in sys.modules)  # read, never imported


KERNEL = '''\
"""What this is."""
import triton_that_is_absent
from toykernels.kernels_b import double
from toykernels import kernels_c, helpers
from . import kernels_d
from .kernels_e import \\
    triple


@triton_that_is_absent.jit
def kernel(x, n):
    """What it does."""
    text = """# no comment

    and no blank line"""
    y = x + 1
    return double(y), "# none either", text
'''
OTHERS = {f"kernels_{letter}": f"VALUE = {ord(letter)}\n" for letter in "bcde"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    y = x + 1\n", "    y = x + 1  # the next one\n"),
        ("    y = x + 1\n", "    # the next one\n\n    y = x + 1\n\n\n"),
        ("What it does.", "What it does now,\n\n    and more."),
        ("What this is.", "What that is."),
        ("\n\n@", "\n\n\n\n# a kernel\n@"),
        ("\n", "\r\n"),
    ],
    ids=["comment", "lines", "docstring", "module docstring", "around", "line ends"],
)
def test_comments_blank_lines_and_docstrings_do_not_change_the_hash(package, old, new):
    assert old in KERNEL
    assert package(kernels_a=KERNEL, **OTHERS) == package(kernels_a=KERNEL.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x + 1", "x + 2"),
        ("\n    and no blank line", "    and no blank line"),
        ("# none either", "# none"),
        ("    return double", "        \n    if y:\n        return double"),
    ],
    ids=["number", "blank line in a string", "hash sign in a string", "indentation"],
)
def test_a_change_of_code_changes_the_hash(package, old, new):
    assert old in KERNEL
    assert package(kernels_a=KERNEL, **OTHERS) != package(kernels_a=KERNEL.replace(old, new))


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_a_change_of_an_imported_kernel_module_changes_the_hash(package, name):
    before = package(kernels_a=KERNEL, helpers="X = 1\n", **OTHERS)
    assert package(helpers="X = 2\n") == before  # no kernels are in it
    assert package(**{name: "VALUE = 0\n"}) != before


def test_imports_in_a_circle_end(package):
    package(kernels_a="from toykernels import kernels_b\n", kernels_b="from toykernels.kernels_a import f\n")


def test_a_source_that_does_not_exist_is_an_error():
    with pytest.raises(ModuleNotFoundError, match="kernels_nowhere"):
        kernels_hash(("fusedops.norm.kernels_nowhere",))


def test_code_shares_a_line_with_its_docstring():
    assert code_of('def f(): "text"; return 1\n') == 'def f(): "text"; return 1'
    assert code_of('x = """a\n\n  # b\n"""  # c\n\n') == 'x = """a\n\n  # b\n"""'


def test_versions_here():
    found = current_versions(toy())
    assert tuple(sorted(found)) == tuple(sorted(versions.VERSIONS))
    assert found["fusedops"] == fusedops.__version__
    assert found["torch"] == torch.__version__
    assert found["fp_fusion"] == "on"
    assert found["platform"].split(" ")[0] == (
        "cuda" if torch.version.cuda else "rocm" if torch.version.hip else "none"
    )
    Entry.from_json(through_json(entry(versions=found).to_json()))
    triton = pytest.importorskip("triton", reason="Triton's own version is what is compared")
    assert found["triton"] == triton.__version__


ALONE = """
import importlib.util, json, sys
import torch
from fusedops.autotune import versions
from fusedops.autotune.operator import operators

def found():
    return {name: versions.current_versions(operator) for name, operator in operators().items()}

here = found()
stock = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] == "triton" else stock(name, *rest)
for cached in (versions._installed, versions.kernels_hash, versions._code_and_imports):
    cached.cache_clear()
without = found()
assert not torch.cuda.is_initialized()
loaded = [name for name in sys.modules if name.split(".")[0] == "triton" or "kernels_" in name]
print(json.dumps([here, without, loaded]))
"""


def test_every_operators_versions_are_found_without_importing_triton_or_a_kernel():
    """And are the same but for Triton's where that is not installed."""
    process = subprocess.run([sys.executable, "-c", ALONE], check=True, capture_output=True, text=True, timeout=300)
    here, without, loaded = json.loads(process.stdout)
    assert loaded == []
    assert here == {name: current_versions(operator) for name, operator in operators().items()}
    assert all(len(found["kernels"]) == 16 for found in here.values())
    assert without == {name: {**found, "triton": None} for name, found in here.items()}


def test_what_makes_timings_doubtful():
    operator = toy("fusedops.kernels.dropout")
    now = current_versions(operator)
    assert mismatches(entry(versions=now), operator) == []
    for name in ("fusedops", "torch", "platform", "driver"):
        assert mismatches(entry(versions={**now, name: "0.0.1"}), operator) == []
    assert mismatches(entry(versions={**now, "kernels": "0"}), operator) == ["the kernels' code is another"]
    (reason,) = mismatches(entry(versions={**now, "fp_fusion": "off"}), operator)
    assert reason == "it was found with fp fusion off, and here it is on"


@pytest.mark.parametrize(
    ("then", "here", "differs"),
    [
        ("3.9.0", "3.9.1", False),
        ("3.9.0+git1234", "3.9.0", False),
        ("3.7.1", "3.9.0", True),
        ("3.1.0", "3.10.0", True),
        (None, "3.9.0", True),
        ("3.9.0", None, True),
        (None, None, False),
    ],
)
def test_tritons_major_and_minor_version_count(monkeypatch, then, here, differs):
    monkeypatch.setattr(versions, "triton_version", lambda: here)
    versions._installed.cache_clear()
    try:
        operator = toy()
        reasons = mismatches(entry(versions={**current_versions(operator), "triton": then}), operator)
        assert [reason.startswith("it was found with ") for reason in reasons] == [True] * differs
    finally:
        versions._installed.cache_clear()
