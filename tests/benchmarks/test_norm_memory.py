"""What the documentation says about memory is what the benchmark counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import norm_memory

PAGE = Path(__file__).resolve().parents[2] / "docs" / "norm.md"


def test_counts_each_storage_once() -> None:
    x = torch.randn(8, requires_grad=True)

    def call() -> torch.Tensor:
        return x * x.view(2, 4).view(8).detach().requires_grad_() + x.exp()

    # Both factors of the product are one storage; exp keeps its result.
    assert norm_memory.kept_bytes(call) == 2 * 8 * 4
    assert norm_memory.kept_bytes(lambda: x + 1) == 0


@pytest.mark.interpreter
def test_the_pages_table_is_what_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "memory.json"
    assert norm_memory.main(["--output", str(file)]) == 0
    printed = capsys.readouterr().out.split("\n\n")[0]
    assert printed in PAGE.read_text()
    results = json.loads(file.read_text())["results"]
    assert len(results) == len(norm_memory.WAYS) * len(norm_memory.SETTINGS)


@pytest.mark.interpreter
def test_statistics_are_counted_and_the_output_is_not() -> None:
    wide, narrow = (norm_memory.measure(64, out, "cpu") for out in (128, 64))
    assert [r.per_element for r in wide] == [r.per_element for r in narrow]  # no activation: the output is not kept
    # Two float32 statistics a row of 64 elements beside the 2 bytes of an element.
    fused = next(r for r in narrow if r.way == "layer_norm_linear(x)" and r.setting == "bfloat16")
    assert fused.per_element == 2 + 8 / 64
    assert fused.beside_input == 8 / 64


def test_wrong_usage() -> None:
    with pytest.raises(SystemExit) as error:
        norm_memory.main(["--width", "0"])
    assert error.value.code == 2
