"""A kernel of a user's own is known wherever its module was imported, and nowhere takes the place of fusedops'."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

import fusedops
from fusedops.autotune import operator as operator_module
from fusedops.autotune import ranks
from fusedops.autotune.operator import Operator, operator_named, operators
from fusedops.autotune.record import read_recorded, record
from fusedops.autotune.resolve import resolve
from fusedops.autotune.workloads import problems_of
from fusedops.norm.tuning import NORM
from fusedops.runtime.device import TARGETS
from tests.autotune.made_up import DOUBLING, Doubling
from tests.autotune.test_resolve import settings  # noqa: F401 (a fixture)

H100 = TARGETS["sm_90"]


def made(name, monkeypatch):
    """Another operator of this name, for one test."""
    monkeypatch.setattr(operator_module, "_made", [*operator_module._made])
    values = {part.name: getattr(DOUBLING, part.name) for part in fields(Operator) if part.name != "memory"}
    return Operator(**values | {"name": name})


def test_it_is_found_by_name_and_is_none_of_fusedops():
    assert operator_named("doubling") is DOUBLING
    assert "doubling" not in operators()


def test_the_one_that_was_made_last_counts(monkeypatch):
    again = made("doubling", monkeypatch)
    assert operator_named("doubling") is again


def test_fusedops_own_names_stay_its_own(monkeypatch):
    made("norm", monkeypatch)
    assert operator_named("norm") is NORM


def test_what_a_run_met_of_it_can_be_read(tmp_path):
    path = tmp_path / "met.jsonl"
    record(DOUBLING, Doubling(64), H100, path)
    (found,), wrong = read_recorded(path)
    assert found.operator is DOUBLING
    assert found.problem == Doubling(64)
    assert wrong == []


@pytest.mark.interpreter
def test_ranks_search_what_they_missed_of_it(settings, monkeypatch):  # noqa: F811
    asked = []
    monkeypatch.setattr(ranks, "tune", lambda wanted, **options: asked.extend(wanted) or [])
    resolve(DOUBLING, Doubling(64), torch.device("cpu"))
    assert fusedops.autotune.sync() == []
    assert [(item.operator, item.problem) for item in asked] == [(DOUBLING, Doubling(64))]


def test_sizes_of_a_call_name_no_problems_of_it():
    with pytest.raises(ValueError, match="doubling is an operator of yours"):
        problems_of("doubling", H100, n=3)
