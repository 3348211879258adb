"""The file of recorded problems: appended to by many, read with whatever it holds."""

from __future__ import annotations

import json
import threading

import pytest

from fusedops.autotune.record import read_recorded, record
from fusedops.norm.tuning import NORM, NormProblem
from fusedops.runtime.device import TARGETS

H100 = TARGETS["sm_90"]


def test_problems_come_back_as_they_were(tmp_path):
    path = tmp_path / "new folder" / "met.jsonl"
    problems = [NormProblem(width, 2, "backward", sums=2) for width in (64, 128, 64)]
    for problem in problems:
        record(NORM, problem, H100, path)
    found, wrong = read_recorded(path)
    assert [item.problem for item in found] == problems[:2]
    assert {item.operator for item in found} == {NORM}
    assert {item.device for item in found} == {"H100"}
    assert wrong == []
    assert len(path.read_text().splitlines()) == 2


def test_threads_append_whole_lines(tmp_path):
    path = tmp_path / "met.jsonl"

    def work(first):
        for width in range(first, first + 100):
            record(NORM, NormProblem(width, 2, "forward"), H100, path)

    threads = [threading.Thread(target=work, args=(100 * i + 1,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found, wrong = read_recorded(path)
    assert sorted(item.problem.width for item in found) == list(range(1, 401))
    assert wrong == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting"),
        ("[1]", "not a JSON object"),
        ('{"op": "nonsense"}', "op must be one of norm, group_norm, linear"),
        ('{"op": []}', "op must be one of norm, group_norm, linear"),
        ('{"op": "norm", "problem": {"width": "64"}}', "missing"),
        (
            json.dumps({"op": "norm", "problem": NORM.problem_json(NormProblem(64, 2, "forward")) | {"width": "64"}}),
            "NormProblem.width: '64' is not int",
        ),
        ("[" * 100_000, "line 2"),
    ],
)
def test_a_line_that_is_none_is_told_of_and_left_out(tmp_path, line, message):
    path = tmp_path / "met.jsonl"
    record(NORM, NormProblem(8, 2, "forward"), H100, path)
    with path.open("a") as file:
        file.write(line + "\n\n")
    record(NORM, NormProblem(16, 2, "forward"), H100, path)
    found, wrong = read_recorded(path)
    assert [item.problem.width for item in found] == [8, 16]
    (text,) = wrong
    assert f"{path}, line 2: " in text
    assert message in text


def test_a_folder_that_cannot_be_written_is_told_of_once(tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "met.jsonl"

    def record_twice():
        for width in (8, 16):
            record(NORM, NormProblem(width, 2, "forward"), H100, path)

    with pytest.warns(UserWarning, match="fusedops cannot record problems in") as told:
        record_twice()
    assert len(told) == 1
