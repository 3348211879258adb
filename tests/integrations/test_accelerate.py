"""The Accelerate example trains, with the losses that it has without fusedops."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="Hugging Face's accelerate is not installed")

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_training.py"


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("accelerate_training", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_steps_as_without_fusedops(example, capsys):
    size = {"width": 32, "layers": 2, "batch": 4, "length": 16}
    plain = example.train(2, **size, patch=False)
    assert "replaced" not in capsys.readouterr().out
    patched = example.train(2, **size)
    assert "fusedops: 9 replaced, 0 left alone" in capsys.readouterr().out
    # Dropout draws other numbers, as attention's is drawn in the kernel: the losses are near, not the same.
    assert patched == pytest.approx(plain, rel=0.05)
    assert len(patched) == 2


def test_the_data_can_be_learned(example):
    (ids,) = example.build_data(3, 10)[:]
    assert ids.shape == (3, 10)
    assert (ids[:, :5] == ids[:, 5:]).all()
    assert len({tuple(row.tolist()) for row in ids}) == 3
