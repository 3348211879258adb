"""From a problem to a configuration: sources in their order, nothing raised, nothing searched where it must not be."""

from __future__ import annotations

import json
import logging
import threading
import warnings
from dataclasses import replace

import pytest
import torch

import fusedops
from fusedops.autotune import lookup, modes, resolve
from fusedops.autotune.bundles import write_bundle
from fusedops.autotune.entries import Entry, current_versions
from fusedops.autotune.identity import Identity
from fusedops.autotune.lookup import look_up
from fusedops.autotune.operator import forget
from fusedops.autotune.workloads import problems_of
from fusedops.norm.tuning import NORM, NormConfig, NormProblem
from fusedops.runtime import device as devices
from fusedops.runtime.device import INTERPRETER, TARGETS, pretend
from fusedops.runtime.settings import Settings

CPU = torch.device("cpu")
H100 = replace(TARGETS["sm_90"], memory=80 << 30)
H200 = replace(H100, name="NVIDIA H200", memory=141 << 30)
PROBLEM = NormProblem(4096, 2, "forward", rows=1024)
CONFIG = NormConfig(1, 4096, False, 16)


def entry(problem=PROBLEM, config=CONFIG, source="tuned", date="2026-01-01T00:00:00Z", **changes):
    default = NORM.default(problem, H100)
    measured = source == "tuned"
    made = Entry(
        op="norm",
        problem=NORM.problem_json(problem),
        config=config.to_json(),
        source=source,
        median=1e-5 if measured else None,
        spread=1e-7 if measured else None,
        default=default.to_json(),
        default_median=2e-5 if measured else None,
        date=date,
        versions=current_versions(NORM),
    )
    return replace(made, **changes)


@pytest.fixture
def settings(monkeypatch, tmp_path):
    """Change the settings that the look-up reads; a store of the test's own."""

    def change(**changes):
        made = replace(Settings(cache_dir=tmp_path / "cache"), **changes)
        for module in (lookup, modes, resolve):
            monkeypatch.setattr(module, "SETTINGS", made)
        forget()
        lookup.forget_files()
        return made

    change()
    resolve._told.clear()
    resolve._attempted.clear()
    resolve.take_missed()
    yield change
    monkeypatch.undo()
    forget()
    lookup.forget_files()


@pytest.fixture
def nothing_shipped(monkeypatch):
    monkeypatch.setattr(lookup, "shipped_files", lambda: ())


pytestmark = pytest.mark.usefixtures("nothing_shipped")


def put(*entries, facts=H100):
    assert lookup.store().put(Identity.of(facts), entries)
    forget()


def test_the_default_serves_where_nothing_is_stored(settings):
    found = look_up(NORM, PROBLEM, H100)
    assert (found.config, found.source, found.entry) == (NORM.default(PROBLEM, H100), "default", None)
    assert not found.exact
    assert not found.tuned


def test_the_users_store_serves_its_problem(settings):
    put(entry())
    found = look_up(NORM, PROBLEM, H100)
    assert (found.config, found.source, found.tuned) == (CONFIG, "your store", True)
    with pretend(H100):
        assert resolve.resolve(NORM, PROBLEM, CPU) == CONFIG


def test_other_devices_entries_do_not_serve(settings):
    put(entry())
    assert look_up(NORM, PROBLEM, TARGETS["sm_80"]).source == "default"
    # Of the same architecture, but in the user's own store: a store is a GPU's.
    assert look_up(NORM, PROBLEM, H200).source == "default"


def test_files_are_asked_after_the_store_by_product_then_by_architecture(settings, tmp_path):
    other = NormConfig(2, 4096, False, 8)
    path = tmp_path / "team.json"
    write_bundle(path, [(Identity.of(H100), {"norm": {NORM.key(PROBLEM): entry(config=other)}})])
    settings(config_path=(path,))
    found = look_up(NORM, PROBLEM, H100)
    assert (found.config, found.source, found.tuned) == (other, str(path), True)
    # Drivers differ in what they leave of memory and cache: the product counts.
    assert look_up(NORM, PROBLEM, replace(H100, name="NVIDIA_H100", memory=79 << 30, cache=1)).tuned
    relative = look_up(NORM, PROBLEM, H200)
    assert relative.config == other
    assert "same architecture" in relative.source
    assert not relative.exact
    put(entry())
    assert look_up(NORM, PROBLEM, H100).source == "your store"


def test_a_folder_of_files_may_be_named(settings, tmp_path):
    write_bundle(tmp_path / "a.json", [(Identity.of(H100), {"norm": {NORM.key(PROBLEM): entry()}})])
    settings(config_path=(tmp_path,))
    assert look_up(NORM, PROBLEM, H100).tuned


def test_the_nearest_size_serves_before_the_default(settings):
    near, far = NormConfig(1, 4096, False, 4), NormConfig(1, 4096, False, 32)
    put(entry(PROBLEM._replace(rows=2048), near), entry(PROBLEM._replace(rows=16384), far))
    found = look_up(NORM, PROBLEM, H100)
    assert (found.config, found.source) == (near, "your store, nearest size")
    assert not found.exact


@pytest.mark.parametrize("change", [{"width": 8192}, {"kind": "rms"}, {"dtype": "float16"}, {"dropout": True}])
def test_a_problem_that_differs_in_more_than_a_bucket_is_not_near(settings, change):
    put(entry(PROBLEM._replace(rows=2048, **change)))
    assert look_up(NORM, PROBLEM, H100).source == "default"


@pytest.mark.parametrize(
    "config",
    [
        CONFIG.to_json() | {"block_n": 64},  # narrower than the row
        CONFIG.to_json() | {"num_warps": 64},
        CONFIG.to_json() | {"num_warps": -4},
        CONFIG.to_json() | {"block_n": 1 << 40},
        CONFIG.to_json() | {"block_m": True},
        CONFIG.to_json() | {"looped": "yes"},
        {"block_m": 1},
        {},
    ],
)
def test_a_configuration_that_cannot_serve_is_passed_over(settings, config):
    put(entry(), replace(entry(), config=config, date="2027-01-01T00:00:00Z"))
    found = look_up(NORM, PROBLEM, H100)
    assert found.config == NORM.default(PROBLEM, H100)
    assert [attempt.reason is None for attempt in found.attempts if attempt.entry is not None] == [False]


def test_a_stale_entry_serves_with_one_notice_unless_strict(settings, caplog):
    old = entry(versions={**current_versions(NORM), "triton": "2.1.0", "kernels": "0" * 16})
    put(old)
    found = look_up(NORM, PROBLEM, H100)
    assert found.config == CONFIG
    assert found.stale
    assert not found.tuned
    settings(strict=True)
    put(old)
    strict = look_up(NORM, PROBLEM, H100)
    assert strict.source == "default"
    assert any("FUSEDOPS_STRICT" in (attempt.reason or "") for attempt in strict.attempts)


def test_a_stale_entry_is_told_of_once(settings, caplog, monkeypatch):
    monkeypatch.setattr(devices, "_facts", {CPU: H100})
    put(entry(versions={**current_versions(NORM), "kernels": "0" * 16}))
    with caplog.at_level(logging.WARNING, "fusedops.autotune"):
        for rows in (1024, 1025):
            resolve.resolve(NORM, PROBLEM._replace(rows=rows), CPU)
    assert len([r for r in caplog.records if "timed with other versions" in r.message]) == 1


def test_the_first_miss_says_what_to_run_and_later_ones_are_logged(settings, caplog, monkeypatch):
    monkeypatch.setattr(devices, "_facts", {CPU: H100})
    with caplog.at_level(logging.INFO, "fusedops.autotune"):
        for rows in (1024, 2048, 1024):
            resolve.resolve(NORM, PROBLEM._replace(rows=rows), CPU)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "fusedops record -- COMMAND" in warnings[0].message
    assert len([record for record in caplog.records if record.levelno == logging.INFO]) == 2


def test_mode_off_uses_defaults_only(settings):
    put(entry())
    with pretend(H100):
        with fusedops.autotune.mode("off"):
            assert resolve.resolve(NORM, PROBLEM, CPU) == NORM.default(PROBLEM, H100)
        assert resolve.resolve(NORM, PROBLEM, CPU) == CONFIG


def test_modes_nest_and_end(settings):
    assert modes.current_mode() == "cached"
    with fusedops.autotune.mode("on"):
        with fusedops.autotune.mode("off"):
            assert modes.current_mode() == "off"
        assert modes.current_mode() == "on"
    assert modes.current_mode() == "cached"
    with pytest.raises(ValueError, match="name must be one of 'cached', 'on', 'off', 'record'; got 'never'"):
        fusedops.autotune.mode("never")


def test_a_mode_holds_in_other_threads(settings):
    seen = []
    with fusedops.autotune.mode("off"):
        thread = threading.Thread(target=lambda: seen.append(modes.current_mode()))
        thread.start()
        thread.join()
    assert seen == ["off"]


def test_using_answers_in_its_thread_for_its_problem_alone(settings):
    mine = NormConfig(4, 4096, False, 8)
    before = resolve.resolve(NORM, PROBLEM, CPU)
    others = []
    with resolve.using(NORM, PROBLEM, mine):
        assert resolve.resolve(NORM, PROBLEM, CPU) == mine
        assert resolve.resolve(NORM, PROBLEM._replace(rows=2048), CPU) != mine
        thread = threading.Thread(target=lambda: others.append(resolve.resolve(NORM, PROBLEM, CPU)))
        thread.start()
        thread.join()
        inner = NormConfig(8, 4096, False, 8)
        with resolve.using(NORM, PROBLEM, inner):
            assert resolve.resolve(NORM, PROBLEM, CPU) == inner
        assert resolve.resolve(NORM, PROBLEM, CPU) == mine
    assert others == [before]
    assert resolve.resolve(NORM, PROBLEM, CPU) == before


class SearchedError(Exception):
    pass


@pytest.fixture
def searches(monkeypatch):
    """What would be searched, instead of searching."""
    from fusedops.autotune import tuner

    asked = []

    def tune(problems, **options):
        asked.extend(problem for _, problem in problems)
        raise SearchedError("on purpose")

    monkeypatch.setattr(tuner, "tune", tune)
    return asked


def test_mode_on_searches_the_first_miss_and_goes_on_where_that_fails(settings, searches, caplog):
    with fusedops.autotune.mode("on"), caplog.at_level(logging.WARNING, "fusedops.autotune"):
        assert resolve.resolve(NORM, PROBLEM, CPU) == NORM.default(PROBLEM, INTERPRETER)
    assert searches == [PROBLEM]
    assert "SearchedError: on purpose; what there is serves" in caplog.text


def test_what_could_not_be_searched_is_not_searched_again_by_each_call(settings, searches):
    other = PROBLEM._replace(rows=2048)
    with fusedops.autotune.mode("on"):
        for _ in range(3):
            for problem in (PROBLEM, other):
                assert resolve.resolve(NORM, problem, CPU) == NORM.default(problem, INTERPRETER)
                forget()  # as the end of any other search does
    assert searches == [PROBLEM, other]


def test_a_search_that_has_to_wait_is_looked_up_once(settings, searches, monkeypatch):
    looked_up = []
    monkeypatch.setattr(lookup, "look_up", lambda *args, **options: looked_up.append(args) or look_up(*args, **options))
    torch.use_deterministic_algorithms(True)
    try:
        with fusedops.autotune.mode("on"):
            for _ in range(3):
                assert resolve.resolve(NORM, PROBLEM, CPU) == NORM.default(PROBLEM, INTERPRETER)
            assert len(looked_up) == 1
            forget()  # something was stored
            resolve.resolve(NORM, PROBLEM, CPU)
            assert len(looked_up) == 2
            torch.use_deterministic_algorithms(False)
            resolve.resolve(NORM, PROBLEM, CPU)
    finally:
        torch.use_deterministic_algorithms(False)
    assert searches == [PROBLEM]


def test_what_was_looked_up_before_all_was_forgotten_is_not_remembered(settings, monkeypatch):
    def slow(*args, **options):
        found = look_up(*args, **options)
        forget()  # another thread's search, or mode, ends meanwhile
        return found

    monkeypatch.setattr(lookup, "look_up", slow)
    resolve.resolve(NORM, PROBLEM, CPU)
    assert PROBLEM not in NORM.memory.get(INTERPRETER, {})


@pytest.mark.parametrize("mode", ["cached", "off", "record"])
def test_other_modes_never_search(settings, searches, mode):
    with fusedops.autotune.mode(mode):
        resolve.resolve(NORM, PROBLEM, CPU)
    assert searches == []


def test_nothing_is_searched_while_a_graph_is_captured(settings, searches, monkeypatch):
    monkeypatch.setattr(devices, "_facts", {torch.device("cuda", 0): H100})
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    with fusedops.autotune.mode("on"):
        resolve.resolve(NORM, PROBLEM, torch.device("cuda", 0))
        assert searches == []
        # The capture over, the same problem is searched: the default was not taken for an answer.
        capturing[0] = False
        resolve.resolve(NORM, PROBLEM, torch.device("cuda", 0))
    assert searches == [PROBLEM]


def test_nothing_is_searched_where_results_must_be_deterministic(settings, searches):
    torch.use_deterministic_algorithms(True)
    try:
        with fusedops.autotune.mode("on"):
            resolve.resolve(NORM, PROBLEM, CPU)
    finally:
        torch.use_deterministic_algorithms(False)
    assert searches == []


def test_nothing_is_searched_in_a_job_of_several_ranks(settings, searches, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with fusedops.autotune.mode("on"):
        resolve.resolve(NORM, PROBLEM, CPU)
    assert searches == []
    assert resolve.take_missed() == [("norm", PROBLEM)]


def test_nothing_is_searched_inside_a_search_or_for_an_absent_device(settings, searches):
    with fusedops.autotune.mode("on"):
        with modes.look_up_only():
            resolve.resolve(NORM, PROBLEM, CPU)
        with pretend(H100):
            resolve.resolve(NORM, PROBLEM, CPU)
    assert searches == []


def test_a_search_is_found_by_the_next_call(settings, monkeypatch):
    from fusedops.autotune import tuner
    from fusedops.autotune.search import Result

    found = entry(config=NormConfig(2, 4096, False, 8))
    calls = []

    def tune(problems, device):
        calls.append(problems)
        lookup.store().put(Identity.of(INTERPRETER), [found])
        return [Result("norm", "", found)]

    monkeypatch.setattr(tuner, "tune", tune)
    with fusedops.autotune.mode("on"):
        assert [resolve.resolve(NORM, PROBLEM, CPU) for _ in range(3)] == [NormConfig(2, 4096, False, 8)] * 3
    assert len(calls) == 1


def test_threads_search_a_problem_once(settings, monkeypatch):
    from fusedops.autotune import tuner
    from fusedops.autotune.search import Result

    calls, begun = [], threading.Event()

    def tune(problems, device):
        calls.append(problems)
        begun.set()
        threading.Event().wait(0.05)
        lookup.store().put(Identity.of(INTERPRETER), [entry()])
        return [Result("norm", "", entry())]

    monkeypatch.setattr(tuner, "tune", tune)
    with fusedops.autotune.mode("on"):
        threads = [threading.Thread(target=resolve.resolve, args=(NORM, PROBLEM, CPU)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(calls) == 1


def test_a_store_that_breaks_does_not_break_a_call(settings, monkeypatch, caplog):
    def broken(*_):
        raise OSError("the disk is on fire")

    monkeypatch.setattr(lookup, "_sources", broken)
    with caplog.at_level(logging.WARNING, "fusedops.autotune"):
        assert resolve.resolve(NORM, PROBLEM, CPU) == NORM.default(PROBLEM, INTERPRETER)
    assert "the disk is on fire" in caplog.text


def test_a_file_that_cannot_be_read_is_left_out_with_a_warning(settings, tmp_path):
    (tmp_path / "bad.json").write_text("{")
    settings(config_path=(tmp_path / "bad.json", tmp_path / "missing.json"))
    with pytest.warns(UserWarning, match="bad.json") as told:
        look_up(NORM, PROBLEM, H100)
    assert len(told) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        look_up(NORM, PROBLEM, H100)


@pytest.mark.interpreter
def test_record_writes_each_problem_once(settings, tmp_path, kernel_runner):
    path = tmp_path / "met.jsonl"
    settings(record_file=path)
    x = torch.randn(3, 40, device=kernel_runner.device)
    with fusedops.autotune.mode("record"):
        for _ in range(2):
            fusedops.layer_norm(x, 40)
            fusedops.rms_norm(x, 40)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["problem"]["kind"] for line in lines] == ["layer", "rms"]
    found, wrong = fusedops.autotune.read_recorded(path)
    assert wrong == []
    assert [item.problem.width for item in found] == [40, 40]


@pytest.mark.parametrize(("op", "sizes"), [
    ("norm", {"rows": 64, "width": 256}),
    ("group_norm", {"batch": 2, "channels": 64, "spatial": 64, "groups": 8}),
    ("linear", {"rows": 512, "in_features": 256, "out_features": 256}),
    ("gated_linear", {"rows": 512, "in_features": 256, "out_features": 256}),
    ("grouped_linear", {"groups": 2, "rows": 512, "in_features": 256, "out_features": 256}),
    ("quantized_linear", {"rows": 64, "in_features": 256, "out_features": 256, "group_size": 128}),
    ("fp8_linear", {"rows": 64, "in_features": 256, "out_features": 256}),
    ("attention", {"batch": 1, "heads": 2, "seqlen_q": 256, "d": 64}),
])  # fmt: skip
def test_no_stored_configuration_of_nothing_serves(op, sizes):
    """A file may hold any number that a configuration's type allows."""
    for operator, problem in problems_of(op, H100, **sizes):
        fit = next(c for c in operator.space(problem) if operator.unfit(c, problem, H100) is None and by_kernel(c))
        for name, value in fit.to_json().items():
            if type(value) is int and value > 0:
                for impossible in (0, 1 << 16) if name != "group" else (0,):
                    changed = type(fit).from_json({**fit.to_json(), name: impossible})
                    assert operator.unfit(changed, problem, H100) is not None, (problem, changed)


def by_kernel(config):
    return getattr(config, "kernel", "") != "torch"
