"""``benchmarks/cpu_overhead.py``: its verdict and its table. Continuous integration runs the measurement itself."""

from __future__ import annotations

import time

import pytest

from benchmarks import cpu_overhead


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_a_slower_patched_model_is_over_the_limit() -> None:
    runs = {"plain": lambda: spin(0.001), "patched": lambda: spin(0.002)}
    entry = cpu_overhead.result("case", runs, repeats=5, limit=1.03)
    assert entry["ratio"]["median"] > 1.5
    assert not entry["ok"]
    assert "EXCEEDED" in cpu_overhead.table([entry])
    assert cpu_overhead.result("case", runs, repeats=5, limit=20.0)["ok"]


def test_the_exit_code_is_the_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("minilm", "gpt_step"):
        monkeypatch.setattr(cpu_overhead, name, lambda *args: {"plain": lambda: None, "patched": lambda: spin(0.001)})
    monkeypatch.setattr(cpu_overhead, "imports", lambda repeats, limit: cpu_overhead._entry("i", [1.0], [1.0], limit))
    assert cpu_overhead.main(["--repeats", "2"]) == 1
    assert cpu_overhead.main(["--repeats", "2", "--limit", "1e9"]) == 0
    assert '"ok": true' in capsys.readouterr().out


def test_wrong_usage_exits_with_2() -> None:
    with pytest.raises(SystemExit) as ended:
        cpu_overhead.main(["--repeats", "0"])
    assert ended.value.code == 2
