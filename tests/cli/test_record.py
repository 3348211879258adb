"""``fusedops record``: a command runs as ever, and what its kernels met is written down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fusedops.autotune.record import read_recorded
from fusedops.cli.app import app

PROGRAM = "import torch, fusedops; fusedops.layer_norm(torch.randn(3, {width}), {width}); print('ran')"


def record(tmp_path, *command: str, code: int = 0):
    path = tmp_path / "met.jsonl"
    result = CliRunner().invoke(app, ["record", "--output", str(path), "--", *command])
    assert result.exit_code == code, result.output
    return result, path


@pytest.mark.interpreter
def test_what_a_command_meets_is_recorded(tmp_path, capfd):
    for width in (40, 48):
        result, path = record(tmp_path, sys.executable, "-c", PROGRAM.format(width=width))
        assert "ran" in capfd.readouterr().out
        assert "1 new problems" in result.output
    found, wrong = read_recorded(path)
    assert ([item.problem.width for item in found], wrong) == ([40, 48], [])


def test_a_command_that_meets_nothing_is_told_what_to_look_at(tmp_path):
    result, path = record(tmp_path, sys.executable, "-c", "pass")
    assert "fusedops doctor says which backend runs" in result.output
    assert not path.exists()


def test_the_commands_exit_code_is_passed_on(tmp_path):
    record(tmp_path, sys.executable, "-c", "raise SystemExit(7)", code=7)
    record(tmp_path, sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)", code=143)


def test_a_file_that_cannot_be_written_is_told_of_before(tmp_path):
    (tmp_path / "file").write_text("")
    arguments = ["record", "--output", str(tmp_path / "file" / "met.jsonl"), "--", sys.executable, "-c", "print('ran')"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "met.jsonl" in result.output.replace("\n", "")


def test_a_command_that_is_none(tmp_path):
    result, _ = record(tmp_path, str(tmp_path / "nothing"), code=1)
    assert "No such file" in result.output


def test_a_folder_is_no_file_to_record_in(tmp_path):
    result = CliRunner().invoke(app, ["record", "--output", str(tmp_path), "--", sys.executable, "-c", "print('ran')"])
    assert result.exit_code == 1
    assert "it is a folder" in result.output


SLOW_TO_END = """
import sys, time
try:
    print("runs", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    print("saved", flush=True)
    sys.exit(3)
"""


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="a terminal's Ctrl-C is sent as POSIX does")
def test_ctrl_c_lets_the_command_end_as_it_does(tmp_path):
    arguments = ["-m", "fusedops", "record", "-o", str(tmp_path / "met.jsonl"), "--", sys.executable, "-c", SLOW_TO_END]
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "runs\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout.read() == "saved\n"
    assert process.wait(60) == 3
