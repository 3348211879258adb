"""The static gate's rules, its tables, its file and its command. Figures have tests of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import static_gate
from benchmarks.static_baseline import Entry, Key, Loop, entries, load, render
from benchmarks.static_gate import compare, failure, report, stale
from fusedops.autotune.versions import triton_version
from tests.harness.static_gate import record, summarise

KEY = Key("attention/forward", "forward_kernel", "sm_90")
ENTRY = Entry(
    tile="M=128 N=64",
    warps=8,
    stages=2,
    registers=168,
    spill_bytes=0,
    shared=98304,
    blocks=2,
    instructions=1200,
    loop=Loop(16, 34, 50, 300, 1),
    loaded=65536,
    stored=32768,
    serialised=False,
)
FLAT = replace(ENTRY, loop=None)


def other(count: int, steps: int | None = 1) -> Loop:
    return Loop(16, 34, 50, count, steps)


def verdicts(before: Entry, after: Entry) -> dict[str, str]:
    return {change.figure: change.verdict for change in compare({KEY: before}, {KEY: after})}


# --- the rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "figure"),
    [
        ({"spill_bytes": 8}, "spill bytes a thread"),
        ({"registers": 255, "blocks": 1}, "blocks a multiprocessor"),
        ({"warps": 4}, "warps a multiprocessor"),
        ({"loop": other(313)}, "main-loop instructions a step"),
        ({"loop": Loop(32, 68, 100, 625, 2)}, "main-loop instructions a step"),
        ({"loop": other(313, None)}, "main-loop instructions"),
        ({"loop": None, "instructions": 1237}, "instructions"),
        ({"loaded": 65537}, "bytes loaded a program"),
        ({"stored": 32769}, "bytes stored a program"),
        ({"loaded": None}, "bytes loaded a program"),
        ({"serialised": True}, "serialised products"),
    ],
)
def test_fails(changed: dict[str, Any], figure: str) -> None:
    found = verdicts(ENTRY, replace(ENTRY, **changed))
    assert [name for name, verdict in found.items() if verdict == "fails"] == [figure]
    worse = failure(compare({KEY: ENTRY}, {KEY: replace(ENTRY, **changed)}))
    assert figure in worse.splitlines()[0]
    assert "--update" in worse


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"registers": 200}, {"registers": "worse"}),
        ({"shared": 98305}, {"shared memory": "worse"}),
        ({"instructions": 1300}, {"instructions": "worse"}),
        ({"loop": other(312)}, {"main-loop instructions a step": "worse", "… of them other": "other"}),
        ({"warps": 4, "blocks": 4}, {"warps": "other"}),
        ({"tile": "M=64 N=64"}, {"tile": "other"}),
        ({"stages": 3}, {"stages": "other"}),
        ({"loop": other(250)}, {"main-loop instructions a step": "better", "… of them other": "other"}),
        ({"blocks": 3}, {"blocks a multiprocessor": "better"}),
        ({"loaded": 1}, {"bytes loaded a program": "better"}),
    ],
)
def test_does_not_fail(changed: dict[str, Any], expected: dict[str, str]) -> None:
    found = compare({KEY: ENTRY}, {KEY: replace(ENTRY, **changed)})
    assert {change.figure: change.verdict for change in found} == expected
    assert not failure(found)
    assert bool(stale(found)) == ("better" in expected.values())


def test_the_same_does_not_differ() -> None:
    assert compare({KEY: ENTRY}, {KEY: ENTRY}) == []


def test_a_loop_that_is_unrolled_further_is_compared_by_the_step() -> None:
    assert verdicts(ENTRY, replace(ENTRY, loop=Loop(32, 68, 100, 590, 2)))["main-loop instructions a step"] == "better"


@pytest.mark.parametrize(("count", "verdict"), [(1236, "worse"), (1237, "fails")])
def test_a_kernel_without_a_loop_is_compared_as_a_whole(count: int, verdict: str) -> None:
    assert verdicts(FLAT, replace(FLAT, instructions=count)) == {"instructions": verdict}


def test_less_spilling_is_better_and_more_of_it_fails() -> None:
    spilling = replace(ENTRY, spill_bytes=16)
    assert verdicts(spilling, replace(spilling, spill_bytes=8)) == {"spill bytes a thread": "better"}
    assert verdicts(spilling, replace(spilling, spill_bytes=17)) == {"spill bytes a thread": "fails"}


def test_bytes_that_become_known_do_not_fail() -> None:
    assert verdicts(replace(ENTRY, loaded=None), ENTRY) == {"bytes loaded a program": "other"}


def test_a_kernel_that_the_baseline_lacks_fails_and_one_that_is_gone() -> None:
    new = Key("attention/forward", "other_kernel", "sm_90")
    found = compare({KEY: ENTRY}, {new: ENTRY})
    assert [(change.key, change.change, change.verdict) for change in found] == [
        (KEY, "gone", "fails"),
        (new, "new", "fails"),
    ]


# --- the tables ------------------------------------------------------------------------------------------------------


def test_the_failure_reads_at_once() -> None:
    after = replace(ENTRY, spill_bytes=8, registers=255, blocks=1, stages=3)
    fine = Key("norm/forward", "norm_kernel", "gfx942")
    changes = compare({KEY: ENTRY, fine: ENTRY}, {KEY: after, fine: replace(ENTRY, registers=100)})
    assert (
        failure(changes)
        == f"""\
1 kernel is worse than in static_baseline.json, or missing: spill bytes a thread (1), blocks a multiprocessor (1)

kernel          case               target  figure                   before  after  change        verdict
--------------  -----------------  ------  -----------------------  ------  -----  ------------  -------
forward_kernel  attention/forward  sm_90   stages                   2       3
forward_kernel  attention/forward  sm_90   spill bytes a thread     0       8      +8            FAILS
forward_kernel  attention/forward  sm_90   registers                168     255    +87 (+51.8%)  worse
forward_kernel  attention/forward  sm_90   blocks a multiprocessor  2       1      -1 (-50.0%)   FAILS

{static_gate.ADVICE}"""
    )


def test_a_long_table_is_cut_and_says_so() -> None:
    keys = [Key("attention/forward", f"kernel_{number}", "sm_90") for number in range(5)]
    changes = compare(dict.fromkeys(keys, ENTRY), dict.fromkeys(keys, replace(ENTRY, spill_bytes=8)))
    assert "… 2 more" in failure(changes, most=3)
    assert "kernel_3" not in failure(changes, most=3)
    assert "5 kernels are worse" in failure(changes, most=3)


def test_the_report_names_each_kernel_once_by_what_is_worst() -> None:
    keys = [Key("attention/forward", name, "sm_90") for name in ("mixed", "worse", "better", "changed")]
    after = [
        replace(ENTRY, loaded=1, spill_bytes=8),
        replace(ENTRY, registers=200, instructions=1),
        replace(ENTRY, loaded=1),
        replace(ENTRY, stages=3),
    ]
    text = report(compare(dict.fromkeys(keys, ENTRY), dict(zip(keys, after, strict=True))), 7)
    parts = text.split("\n\n")
    assert [part for part in parts if part.startswith("##")] == [
        "## Worse than the gate allows: 1",
        "## Worse, but allowed: 1",
        "## Better: 1",
        "## Changed: 1",
    ]
    for key, part in zip(keys, parts[1::2], strict=True):
        assert {line.split(" ")[0] for line in part.splitlines()[2:]} == {key.kernel}
    assert parts[-1] == "7 kernels compiled; 4 of them differ from the baseline"


class Reporter:
    """As much of pytest's terminal reporter as is asked."""

    def __init__(self, **reports: list[SimpleNamespace]) -> None:
        self._reports = reports
        self.lines: list[str] = []

    def getreports(self, outcome: str) -> list[SimpleNamespace]:
        return self._reports.get(outcome, [])

    def section(self, title: str) -> None:
        self.lines.append(f"== {title}")

    def write_line(self, text: str) -> None:
        self.lines += text.splitlines()


def told(before: Entry, after: Entry) -> SimpleNamespace:
    """The report of a test that met a change."""
    properties: list[tuple[str, Any]] = []
    record(lambda name, value: properties.append((name, value)), compare({KEY: before}, {KEY: after}))
    return SimpleNamespace(user_properties=json.loads(json.dumps(properties)))  # it travels between processes


def test_a_run_ends_with_what_its_tests_found() -> None:
    better, worse = told(ENTRY, replace(ENTRY, registers=100)), told(ENTRY, replace(ENTRY, spill_bytes=8))
    reporter = Reporter(passed=[told(ENTRY, ENTRY), better], failed=[worse])
    summarise(reporter)  # type: ignore[arg-type]
    assert [line for line in reporter.lines if line.startswith("1 kernel")] == [
        "1 kernel is worse than in static_baseline.json, or missing: spill bytes a thread (1)",
        "1 kernel is better than in static_baseline.json, which is out of date and lets the gain be lost again",
    ]


def test_a_run_without_changes_ends_with_nothing() -> None:
    reporter = Reporter(passed=[told(ENTRY, ENTRY)])
    summarise(reporter)  # type: ignore[arg-type]
    assert reporter.lines == []


# --- the file --------------------------------------------------------------------------------------------------------

NAMES = [Key("norm/forward", "b_kernel", "sm_90"), Key("norm/forward", "b_kernel", "gfx942"), KEY]


def test_the_file_is_sorted_and_has_a_kernel_a_line(tmp_path: Path) -> None:
    found = {
        key: replace(ENTRY, loaded=None, loop=loop) for key, loop in zip(NAMES, (None, *[ENTRY.loop] * 2), strict=True)
    }
    text = render("3.9.0", found)
    assert [line.split('"')[1] for line in text.splitlines() if "tile" in line] == [str(key) for key in sorted(NAMES)]
    assert text == render("3.9.0", dict(reversed(found.items())))
    path = tmp_path / "baseline.json"
    path.write_text(text)
    assert load(path) == ("3.9.0", found)


@pytest.mark.parametrize("text", ["", "{}", '{"triton": "3.9.0", "kernels": {"a b c": {"loop": null, "lost": 1}}}'])
def test_another_file_is_refused_with_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"write it with .* --update"):
        load(path)


def test_launches_of_one_kernel_are_told_apart() -> None:
    figures = {
        "num_warps": 8,
        "num_stages": 2,
        "registers": 168,
        "spill_bytes": 0,
        "shared": 98304,
        "blocks_per_multiprocessor": 2,
        "instructions": 1200,
        "loop": {"matrix": 16, "special": 34, "memory": 50, "other": 300, "steps": 1},
        "loaded": 65536,
        "stored": 32768,
        "serialised": False,
        "tile": {"BLOCK_N": 64, "BLOCK_M": 128},
    }
    found = entries("norm/forward", "sm_90", [{**figures, "name": name} for name in ("sums", "norm", "sums")])
    assert [key.kernel for key in found] == ["sums", "norm", "sums#2"]
    assert set(found.values()) == {ENTRY}


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The command on a baseline of its own, where kernels compile to given figures."""
    path = tmp_path / "baseline.json"

    def run(found: Mapping[Key, Entry], *arguments: str, errors: Mapping[tuple[str, str], str] | None = None) -> int:
        def compile_all(chosen, jobs):
            return {key: entry for key, entry in found.items() if (key.case, key.target) in chosen}, errors or {}

        monkeypatch.setattr(static_gate, "compile_all", compile_all)
        monkeypatch.setattr(
            static_gate,
            "all_cases",
            lambda: {name: SimpleNamespace(targets=None) for name in ("attention/forward", "norm/forward")},
        )
        monkeypatch.setattr(static_gate, "triton_version", lambda: "3.9.0")
        return static_gate.main([*arguments, "--baseline", str(path)])

    run.path = path  # type: ignore[attr-defined]
    return run


ALL = dict.fromkeys(NAMES, ENTRY)
WORSE = dict.fromkeys(NAMES, replace(ENTRY, spill_bytes=8))


def test_the_command_writes_and_compares(command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(ALL, "--update") == 0
    assert load(command.path) == ("3.9.0", ALL)
    assert command(ALL) == 0
    assert "none of them differ" in capsys.readouterr().out
    assert command(WORSE) == 1
    assert load(command.path) == ("3.9.0", ALL)
    assert "## Worse than the gate allows: 3" in capsys.readouterr().out
    assert command(WORSE, "--update") == 0
    assert "## Worse than the gate allows: 3" in capsys.readouterr().out
    assert load(command.path) == ("3.9.0", WORSE)
    assert command(ALL) == 0
    assert "## Better: 3" in capsys.readouterr().out


def test_an_update_of_some_cases_leaves_the_others(command) -> None:
    command(ALL, "--update")
    command(WORSE, "--update", "--only", "norm", "--targets", "sm_90")
    assert load(command.path)[1] == {**ALL, NAMES[0]: WORSE[NAMES[0]]}


def test_an_update_takes_out_what_is_gone(command) -> None:
    command(ALL, "--update")
    left = {key: entry for key, entry in ALL.items() if key != NAMES[1]}
    assert command(left) == 1
    command(left, "--update", "--only", "norm")
    assert load(command.path)[1] == left


def test_another_triton_is_compared_with_nothing_and_written_as_a_whole(
    command, capsys: pytest.CaptureFixture[str]
) -> None:
    command.path.write_text(render("3.7.1", ALL))
    assert command(WORSE) == 2
    assert "made with Triton 3.7.1, and this is 3.9.0" in capsys.readouterr().err
    assert command(WORSE, "--update", "--only", "norm") == 2
    assert load(command.path) == ("3.7.1", ALL)
    assert command(WORSE, "--update") == 0
    assert load(command.path) == ("3.9.0", WORSE)


def test_a_kernel_that_does_not_compile_is_an_error_and_nothing_is_written(
    command, capsys: pytest.CaptureFixture[str]
) -> None:
    command(ALL, "--update")
    assert command(WORSE, "--update", errors={("norm/forward", "sm_90"): "no registers"}) == 1
    assert "norm/forward for sm_90: no registers" in capsys.readouterr().err
    assert load(command.path) == ("3.9.0", ALL)


def test_a_file_that_cannot_be_read_is_written_as_a_whole(command, capsys: pytest.CaptureFixture[str]) -> None:
    command.path.write_text("<<<<<<< ours")
    for arguments in ([], ["--update", "--only", "norm"]):
        assert command(ALL, *arguments) == 2
        assert "is no baseline" in capsys.readouterr().err
    assert command(ALL, "--update") == 0
    assert load(command.path)[1] == ALL


def test_without_a_file_nothing_is_compared(command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(ALL) == 2
    assert str(command.path) in capsys.readouterr().err


def test_an_unknown_case_is_an_error(command) -> None:
    assert command(ALL, "--only", "nothing") == 2


# --- a real change ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_compiled_changes_are_caught(compiler, target: str) -> None:
    """A kernel, and what changes make of it: a load in every step, a tile that takes twice the room, spilling."""
    names = ["plain", "careless", "larger", *(["crowded"] if target == "sm_90" else [])]  # AMD has no such option
    figures = compiler.call("tests.compile.static_gate_probes:find", target, *names)

    def failing(before: str, after: str) -> set[str]:
        old, new = (entries("probe", target, [figures[name]]) for name in (before, after))
        return {change.figure for change in compare(old, new) if change.verdict == "fails"}

    more = {"main-loop instructions a step"}
    if target == "sm_90":  # AMD's compiler then loads one step less ahead of the loop, which is as many bytes
        more |= {"bytes loaded a program", "blocks a multiprocessor"}
    assert failing("plain", "careless") == more
    assert not failing("careless", "plain")
    assert {"blocks a multiprocessor", "bytes loaded a program", "bytes stored a program"} <= failing("plain", "larger")
    if "crowded" in names:
        assert "spill bytes a thread" in failing("larger", "crowded")
