"""The environment variables: what they mean, and what a wrong value says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusedops.runtime.settings import Settings


def test_defaults():
    settings = Settings.from_environment({})
    assert (settings.backend, settings.cache_dir, settings.interpret) == ("auto", None, False)
    assert settings.cache_path().name == "fusedops"


def test_every_variable():
    settings = Settings.from_environment(
        {"FUSEDOPS_BACKEND": " Torch ", "FUSEDOPS_CACHE_DIR": "~/here", "TRITON_INTERPRET": "1"}
    )
    assert settings == Settings("torch", cache_dir=Path("~/here").expanduser(), interpret=True)
    assert settings.cache_path() == Path.home() / "here"
    assert settings.record_path() == Path.home() / "here" / "recorded.jsonl"


def test_the_autotuners_variables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings.from_environment(
        {
            "FUSEDOPS_AUTOTUNE": "Record",
            "FUSEDOPS_CONFIG_PATH": os.pathsep.join(["a.json", "", "~/b"]),
            "FUSEDOPS_RECORD_FILE": "c.jsonl",
            "FUSEDOPS_STRICT": "yes",
        }
    )
    assert (settings.autotune, settings.strict) == ("record", True)
    # Where a process goes later does not matter.
    assert settings.config_path == (tmp_path / "a.json", Path.home() / "b")
    assert settings.record_path() == tmp_path / "c.jsonl"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("FUSEDOPS_BACKEND", "cuda", "FUSEDOPS_BACKEND must be one of auto, triton, torch; got 'cuda'"),
        ("FUSEDOPS_AUTOTUNE", "always", "FUSEDOPS_AUTOTUNE must be one of cached, on, off, record; got 'always'"),
        ("FUSEDOPS_CACHE_DIR", "~no such user/x", "FUSEDOPS_CACHE_DIR: '~no such user/x': .*"),
        ("FUSEDOPS_STRICT", "2", "FUSEDOPS_STRICT must be 1 or 0; got '2'"),
        ("TRITON_INTERPRET", "maybe", "TRITON_INTERPRET must be 1 or 0; got 'maybe'"),
    ],
)
def test_a_wrong_value_names_its_variable(name, value, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Settings.from_environment({name: value})
