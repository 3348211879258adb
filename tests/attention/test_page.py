"""What docs/attention.md says: its examples run, and its pictures and numbers are what is computed."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path

import pytest
import torch

import fusedops
from benchmarks.norm_memory import kept_storages
from tests.harness.tensors import randn

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "attention.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def _id(code: str) -> str:
    """The first call of ours: what the example is about."""
    return re.search(r"fusedops\.([\w.]+)\(", code)[1]


def _run(code: str, folder: Path) -> None:
    # From a file: Triton reads a function's source.
    file = folder / "example.py"
    file.write_text(code)
    runpy.run_path(str(file))


@pytest.mark.parametrize("code", [code for code in EXAMPLES if "triton" not in code], ids=_id)
def test_the_pages_examples_run(code, tmp_path):
    with fusedops.backend("torch"):  # what a reader without a GPU has
        _run(code, tmp_path)


@pytest.mark.interpreter
@pytest.mark.parametrize("code", [code for code in EXAMPLES if "triton" in code], ids=_id)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_pages_rules_run(code, tmp_path, backend):
    with fusedops.backend(backend):
        _run(code, tmp_path)


def _pictures():
    """(options, rows of 1 and .) of each picture."""
    for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL):
        head, *lines = block.splitlines()
        titles = list(re.finditer(r"\S+(?: \S+)*", head))
        ends = [title.start() for title in titles[1:]] + [None]
        for title, end in zip(titles, ends, strict=True):
            yield title[0], [line[title.start() : end].split() for line in lines]


PICTURES = [pytest.param(*p, id=f"{p[0]} {len(p[1])}x{len(p[1][0])}") for p in _pictures()]


@pytest.mark.parametrize(("options", "rows"), PICTURES)
def test_the_pages_pictures(runner, options, rows):
    seen = torch.tensor([[cell == "1" for cell in row] for row in rows], device=runner.device)
    queries, keys = seen.shape
    q, k = (torch.zeros(1, 1, length, 16, device=runner.device) for length in (queries, keys))
    v = torch.eye(keys, device=runner.device)[None, None]  # so the output is the weights
    weights = fusedops.attention(q, k, v, **eval(f"dict({options})"))[0, 0]
    assert torch.equal(weights > 0, seen)


def test_the_page_has_every_argument():
    for function in (fusedops.attention, fusedops.attention_varlen, fusedops.scaled_dot_product_attention):
        for name in inspect.signature(function).parameters:
            assert re.search(rf"\b{name}\b", PAGE), name


@pytest.mark.parametrize("wanted", ["qkv", "v"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_the_page_tells_what_is_kept(kernel_runner, wanted, dropout_p):
    q, k, v = (randn(2, 4, 24, 16, dtype=torch.float16, device=kernel_runner.device) for _ in range(3))
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        tensor.requires_grad_(name in wanted)
    sizes = kept_storages(lambda: fusedops.attention(q, k, v, dropout_p=dropout_p))
    for tensor in (q, k, v):
        sizes.pop(tensor.untyped_storage()._cdata)
    out = 2 * q.numel() if wanted == "qkv" else 0
    assert sum(sizes.values()) == out + 8 * 2 * 4 * 24 + (8 if dropout_p else 0)
