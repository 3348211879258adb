"""The configurations that ship: complete, honest about where they are from, and each compiles for its architecture."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace

import pytest

from fusedops.autotune import lookup
from fusedops.autotune.bundles import each, merge, read_bundle, write_bundle
from fusedops.autotune.entries import Entry, current_versions
from fusedops.autotune.identity import Identity
from fusedops.autotune.lookup import look_up, shipped_files
from fusedops.autotune.operator import forget, operator_named
from fusedops.autotune.record import distinct
from fusedops.autotune.roofline import PRODUCTS
from fusedops.autotune.workloads import usual
from tests.harness.compile import KINDS, ROOT

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def _script():
    spec = importlib.util.spec_from_file_location("build_configs", ROOT / "scripts" / "build_configs.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SCRIPT = _script()
SHIPPED = {name: read_bundle(SCRIPT.path_of(name)) for name in SCRIPT.SHIPPED}


def _entries() -> dict[str, tuple[str, Entry]]:
    """(product, entry) by a name; those that are the same for another product of the architecture once."""
    found = {}
    for product, bundle in SHIPPED.items():
        for identity, entry in each(bundle):
            config = " ".join(f"{value}" for value in entry.config.values())
            found.setdefault(f"{identity.arch} {entry.op} {entry.key} [{config}]", (product, entry))
    return found


ENTRIES = _entries()


def test_every_file_is_of_a_product():
    assert {path.name for path in shipped_files()} == {SCRIPT.path_of(name).name for name in SHIPPED}


@pytest.mark.parametrize("product", SHIPPED)
def test_every_problem_of_the_usual_models_is_there(product):
    facts = PRODUCTS[product].facts
    ((identity, operators),) = SHIPPED[product]
    assert identity == Identity.of(facts)
    wanted = {(item.operator.name, item.operator.key(item.problem)) for item in distinct(usual(facts))}
    assert wanted <= {(op, key) for op, entries in operators.items() for key in entries}


@pytest.mark.parametrize("product", SHIPPED)
def test_what_nobody_measured_says_so(product):
    for _, entry in each(SHIPPED[product]):
        measured = entry.median is not None
        assert entry.source == ("tuned" if measured else "heuristic")
        assert measured == (entry.default_median is not None) == (entry.versions["driver"] is not None)


@pytest.mark.parametrize("product", SHIPPED)
def test_a_file_is_written_as_the_script_writes_it(product, tmp_path):
    path = SCRIPT.path_of(product)
    write_bundle(tmp_path / "again.json", read_bundle(path))
    assert (tmp_path / "again.json").read_text() == path.read_text()


@pytest.mark.parametrize("product", SHIPPED)
def test_a_shipped_configuration_serves(product, monkeypatch, tmp_path):
    facts = PRODUCTS[product].facts
    monkeypatch.setattr(lookup, "store", lambda: lookup._store(tmp_path))
    forget()
    for _, entry in each(SHIPPED[product]):
        operator = operator_named(entry.op)
        found = look_up(operator, operator.problem_from_json(entry.problem), facts)
        assert (found.source, found.config.to_json()) == ("shipped with fusedops", entry.config)


@pytest.mark.skipif(not _HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name.split()[0] in KINDS else pytest.mark.slow) for name in ENTRIES],
)
def test_an_entry_compiles_for_its_architecture(compiler, name):
    product, entry = ENTRIES[name]
    found = compiler.call("tests.autotune.shipped:compile_entry", product, entry.op, entry.problem, entry.config)
    assert found["error"] is None
    assert found["unfit"] is None
    assert found["shared"] <= found["limit"]
    assert found["spill_bytes"] == 0


def test_a_tuned_entry_survives_a_new_ranking():
    (identity, operators), *_ = SHIPPED["H100"]
    key, entry = next(iter(operators["norm"].items()))
    versions = {**current_versions(operator_named("norm")), "driver": "570.86"}
    tuned = replace(entry, source="tuned", median=1e-5, spread=1e-7, default_median=2e-5, versions=versions)
    before = [(identity, {"norm": {key: tuned}})]
    after = SCRIPT.kept(before, [(identity, {"norm": {key: entry}})])
    assert merge(after) == merge(before)
    # The same ranking, made later: nothing changes.
    later = replace(entry, date="2100-01-01T00:00:00Z", versions=current_versions(operator_named("norm")))
    here = replace(entry, versions=current_versions(operator_named("norm")))
    assert SCRIPT.kept([(identity, {"norm": {key: here}})], [(identity, {"norm": {key: later}})]) == [
        (identity, {"norm": {key: here}})
    ]
