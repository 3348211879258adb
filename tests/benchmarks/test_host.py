"""``benchmarks/host.py``: what it reports, its verdict, and that it leaves Triton's driver as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import host
from fusedops.inspection.offline import target_facts

ROOT = Path(__file__).resolve().parents[2]

# In a process of its own: in this one Triton's interpreter may be on, which compiles nothing that could be launched.
SCRIPT = """
import contextlib, json
from triton.runtime.driver import driver
from benchmarks import host
from fusedops.inspection.offline import target_facts
from fusedops.runtime.device import pretending

def state():
    return [name for name in ("active", "_active") if vars(driver).get(name) is not None], driver_of(), pretending()

def driver_of():
    return getattr(driver, "_active", None) or vars(driver).get("active")

facts = target_facts("sm_90")
before = state()
entry = host._operator("layer_norm", *host.CALLS["layer_norm"](), facts, repeats=20)
after = state()
inside = None
with contextlib.suppress(KeyError), host.stub_driver(facts):
    inside = state()
    raise KeyError
print(json.dumps({"entry": entry, "kept": after == before, "stubbed": inside[1] is not before[1],
                  "kept_after_an_error": state() == before}))
"""


def test_an_operator_is_timed_apart_from_its_launches_and_the_driver_is_put_back() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["kept"]
    assert found["stubbed"]
    assert found["kept_after_an_error"]
    entry = found["entry"]
    assert entry["name"] == "layer_norm"
    assert entry["kernels"]["forward"] == ["norm_forward_kernel"]
    assert entry["kernels"]["backward"] == ["norm_backward_kernel", "sum_partials_kernel"]
    for direction, launched in (("inference", "forward"), ("forward", "forward"), ("backward", "backward")):
        spent, launches = entry[f"{direction}_us"], entry[f"{launched}_launches_us"]
        assert spent > launches > 0
        assert entry[f"{direction}_above_us"] == pytest.approx(spent - launches, abs=0.02)
        assert entry[f"torch_{direction}_us"] > 0


def test_a_look_up_leaves_nothing_allocated() -> None:
    found = host.look_up(target_facts("sm_90"), repeats=100)
    assert found["median_us"] >= found["least_us"] > 0
    assert found["limit_us"] == host.LIMIT_US
    # Less than a byte a look-up: what is made is dropped.
    assert found["bytes_left_by_1000"] < 1000


def report(least: float) -> tuple[dict[str, Any], dict[str, Any]]:
    times = {f"{who}{what}_us": 1.0 for who in ("", "torch_") for what in ("inference", "forward", "backward")}
    times |= {"forward_launches_us": 0.5, "backward_launches_us": 0.5}
    times |= {f"{what}_above_us": 0.5 for what in ("inference", "forward", "backward")}
    return {"name": "layer_norm", "kernels": {}, **times}, {
        "median_us": 9.0, "least_us": least, "limit_us": host.LIMIT_US, "bytes_left_by_1000": 0
    }  # fmt: skip


@pytest.mark.parametrize(("least", "code"), [(host.LIMIT_US / 2, 0), (host.LIMIT_US * 2, 1)])
def test_the_exit_code_is_the_look_ups(
    least: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[Any] = []
    entry, found = report(least)
    monkeypatch.setattr(host, "_operator", lambda name, *_: asked.append(name) or entry)
    monkeypatch.setattr(host, "look_up", lambda facts, repeats: asked.append((facts, repeats)) or found)
    written = tmp_path / "host.json"
    assert host.main(["--operators", "layer_norm", "--repeats", "10", "--output", str(written)]) == code
    assert asked == ["layer_norm", (target_facts("sm_90"), 500)]
    assert f"{least:.2f} µs, median 9.00 (limit {host.LIMIT_US:g})" in capsys.readouterr().out
    written_report = json.loads(written.read_text())
    assert written_report["look_up"]["least_us"] == least
    assert written_report["ok"] == (code == 0)


@pytest.mark.parametrize("arguments", [["--repeats", "9"], ["--operators", "conv"], ["--target", "sm_1"]])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        host.main(arguments)
    assert ended.value.code == 2
