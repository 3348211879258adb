"""The environment variables: what they mean, and what a wrong value says."""

from __future__ import annotations

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
    assert settings == Settings("torch", Path("~/here").expanduser(), True)
    assert settings.cache_path() == Path.home() / "here"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("FUSEDOPS_BACKEND", "cuda", "FUSEDOPS_BACKEND must be one of auto, triton, torch; got 'cuda'"),
        ("TRITON_INTERPRET", "maybe", "TRITON_INTERPRET must be 1 or 0; got 'maybe'"),
    ],
)
def test_a_wrong_value_names_its_variable(name, value, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Settings.from_environment({name: value})
