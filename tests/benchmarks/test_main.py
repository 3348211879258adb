"""``python -m benchmarks``: which benchmarks run, with which options, and what it says where none can."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import __main__ as entry
from benchmarks.__main__ import BENCHMARKS
from tests.harness.compile import ROOT


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that would have run: file names and options; each ends right, linear wrong."""
    found: list[list[str]] = []

    def run(command: list[str], cwd: Path) -> Any:
        assert command[0] == sys.executable
        assert Path(command[1]).is_file()
        found.append([Path(command[1]).stem, *command[2:]])
        return SimpleNamespace(returncode=1 if found[-1][0] == "linear" else 0)

    monkeypatch.setattr(entry.subprocess, "run", run)
    return found


def gpu(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)


def test_all_benchmarks_run_on_a_gpu_and_one_failure_is_the_exit_code(
    ran: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu(monkeypatch, True)
    assert entry.main(["--quick"]) == 1
    assert [command[0] for command in ran] == [*BENCHMARKS, "cpu_overhead"]
    assert all("--quick" in command for command in ran[:5])
    assert "linear: exit code 1" in capsys.readouterr().err
    assert entry.main(["norm", "decode", "norm"]) == 0
    assert ran[7:] == [["norm"], ["decode"]]


def test_without_a_gpu_it_says_what_can_be_run_instead(
    ran: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu(monkeypatch, False)
    assert entry.main([]) == 1
    assert [command[0] for command in ran] == ["host", "cpu_overhead"]
    printed = capsys.readouterr().err
    assert "norm, linear, attention, decode, model cannot be timed" in printed
    for way in ("--static", "--dry-run", "benchmarks host", "--device cpu"):
        assert way in printed


def test_host_needs_no_gpu(ran: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu(monkeypatch, False)
    assert entry.main(["host", "--output", str(tmp_path)]) == 0
    assert [command[:3] for command in ran] == [
        ["host", "--output", str(tmp_path / "host.json")],
        ["cpu_overhead", "--output", str(tmp_path / "cpu-overhead.json")],
    ]


@pytest.mark.parametrize("mode", ["--static", "--dry-run"])
def test_modes_that_need_no_gpu(mode: str, ran: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, False)
    assert entry.main([mode, "--quick", "attention", "norm"]) == 0
    assert ran == [["attention", "--quick", mode], ["norm", "--quick", mode]]
    del ran[:]
    entry.main([mode])
    names = [command[0] for command in ran]
    static = ["norm", "linear", "attention", "host", "cpu_overhead"]
    assert names == (static if mode == "--static" else list(BENCHMARKS))


@pytest.mark.parametrize("arguments", [["conv"], ["--static", "--dry-run"], ["--static", "decode"]], ids=" ".join)
def test_wrong_usage(arguments: list[str], ran: list[list[str]]) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main(arguments)
    assert ended.value.code == 2
    assert not ran


def test_the_options_are_those_that_the_benchmarks_have() -> None:
    from benchmarks import attention, decode, linear, model, norm

    modules = {"norm": norm, "linear": linear, "attention": attention, "decode": decode, "model": model}
    for name, module in modules.items():
        for mode in ("timed", "static", "dry-run"):
            if mode != "static" or name in entry.STATIC:
                (command,) = entry.command_of(name, mode, True, Path("somewhere"))
                asked = module._options(command[2:])
                assert asked.quick
                assert (asked.static, asked.dry_run) == (mode == "static", mode == "dry-run")
                assert asked.output == Path("somewhere")


def test_it_is_an_entry() -> None:
    command = [sys.executable, "-m", "benchmarks", "--static", "decode"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 2
    assert "--static reads norm, linear, attention" in run.stderr
