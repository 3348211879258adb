"""``fusedops doctor``: what it reports, and when it calls something a problem."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fusedops
from fusedops.cli import doctor
from fusedops.cli.app import app
from fusedops.cli.calls import SampleCall
from fusedops.runtime import settings
from fusedops.runtime.backend import backend_mode
from fusedops.runtime.settings import SETTINGS, VARIABLES

OPERATORS = {"layer_norm", "rms_norm", "group_norm", "linear", "gated_linear", "attention", "attention_varlen"}


def in_process(code: str = "pass", **environment: str) -> tuple[int, dict]:
    """Run ``doctor --json`` in a fresh process, after ``code``; its exit code and its report."""
    program = f"import sys; {code}; sys.argv = ['fusedops', 'doctor', '--json']; from fusedops.cli import main; main()"
    # No GPU: the answers are to be the same on every machine.
    env = {**os.environ, "TRITON_INTERPRET": "0", "FUSEDOPS_BACKEND": "", "CUDA_VISIBLE_DEVICES": "", **environment}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


def test_json_has_the_documented_keys_and_nothing_beside() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert list(found) == ["versions", "devices", "backend", "settings", "cache", "problems"]
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["fusedops"] == fusedops.__version__
    assert set(found["backend"]) == {"mode", "devices"}
    for operators in found["backend"]["devices"].values():
        assert set(operators) == OPERATORS
    assert set(found["cache"]) == {"path", "exists", "writable", "files", "bytes"}
    assert found["problems"] == []
    assert result.exit_code == 0


def test_tables_tell_the_same() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    for text in (torch.__version__, *OPERATORS, *VARIABLES.values(), "No problem found."):
        assert text in result.stdout


@pytest.mark.interpreter
def test_where_kernels_run_each_is_tried_and_right() -> None:
    operators = doctor.examine()["backend"]["devices"]["cpu"]
    assert {name: (entry["backend"], entry["check"]) for name, entry in operators.items()} == dict.fromkeys(
        OPERATORS, ("triton", "right")
    )


def test_on_a_cpu_torch_runs_and_the_reason_is_told() -> None:
    code, found = in_process()
    assert code == 0
    assert [entry["device"] for entry in found["devices"]] == ["cpu"]
    for entry in found["backend"]["devices"]["cpu"].values():
        assert entry["backend"] == "torch"
        assert any("CPU" in reason for reason in entry["reasons"])


def test_the_settings_are_those_in_force(tmp_path: Path) -> None:
    _, found = in_process(FUSEDOPS_CONFIG_PATH=os.pathsep.join(["/a.json", "/b"]), FUSEDOPS_CACHE_DIR=str(tmp_path))
    settings = found["settings"]
    assert settings["FUSEDOPS_CONFIG_PATH"] == {"value": os.pathsep.join(["/a.json", "/b"]), "set": True}
    assert settings["FUSEDOPS_RECORD_FILE"] == {"value": str(tmp_path / "recorded.jsonl"), "set": False}
    assert settings["FUSEDOPS_AUTOTUNE"]["value"] == "cached"


def test_works_without_triton() -> None:
    code, found = in_process("sys.modules['triton'] = None")
    assert code == 0
    assert found["versions"]["triton"] is None
    assert "Triton is not installed" in found["backend"]["devices"]["cpu"]["linear"]["reasons"]


def test_a_broken_triton_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('no compiler inside')")
    code, found = in_process(f"sys.path.insert(0, {str(tmp_path)!r})")
    assert code == 1
    assert any("no compiler inside" in problem for problem in found["problems"])


def test_triton_demanded_in_vain_is_a_problem() -> None:
    code, found = in_process(FUSEDOPS_BACKEND="triton")
    assert code == 1
    assert found["backend"]["mode"] == "triton"
    assert any("FUSEDOPS_BACKEND=triton" in problem and "CPU" in problem for problem in found["problems"])


def _shifted(input: torch.Tensor) -> torch.Tensor:
    """An operator whose kernel is wrong."""
    return input if backend_mode() == "torch" else input + 1e-3


def _crashing(input: torch.Tensor) -> torch.Tensor:
    """An operator whose kernel does not even compile."""
    if backend_mode() == "torch":
        return input
    raise OSError("no C compiler")


def _no_reason(input: torch.Tensor) -> tuple[torch.device, list[str]]:
    return input.device, []


_shifted.__fusedops_reasons__ = _crashing.__fusedops_reasons__ = _no_reason  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("operator", "says"),
    [(_shifted, "off by 1.0e-03"), (_crashing, "OSError: no C compiler")],
    ids=["wrong", "crashing"],
)
def test_a_kernel_that_fails_its_trial_is_a_problem(operator, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "sample_calls", lambda device: [SampleCall(operator, (torch.ones(4),))])
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    (problem,) = json.loads(result.stdout)["problems"]
    assert says in problem
    assert operator.__name__ in problem


def test_every_variable_that_settings_reads_is_reported() -> None:
    read = set(re.findall(r'"((?:FUSEDOPS|TRITON)_[A-Z_]+)"', inspect.getsource(settings.Settings)))
    assert read == set(VARIABLES.values())
    assert set(VARIABLES) == set(SETTINGS.__dataclass_fields__)
    assert set(doctor.examine()["settings"]) == set(VARIABLES.values())


def test_the_cache_folder_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "entry.json").write_text("x" * 1000)
    monkeypatch.setattr(doctor, "SETTINGS", replace(SETTINGS, cache_dir=tmp_path))
    cache = doctor.examine()["cache"]
    assert cache == {"path": str(tmp_path), "exists": True, "writable": True, "files": 1, "bytes": 1000}


def test_a_cache_folder_that_does_not_exist_yet_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "not" / "yet"
    monkeypatch.setattr(doctor, "SETTINGS", replace(SETTINGS, cache_dir=folder))
    found = doctor.examine()
    assert (found["cache"]["exists"], found["cache"]["writable"], found["problems"]) == (False, True, [])
    assert not folder.exists()


def test_a_cache_folder_that_cannot_be_written_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(doctor, "SETTINGS", replace(SETTINGS, cache_dir=tmp_path / "file" / "cache"))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "cannot be written" in " ".join(result.stdout.split())
