"""The tutorials: notebooks in step with their sources, outputs kept, and each runs from a new kernel."""

from __future__ import annotations

import re

import nbformat
import pytest

from tutorials import build

NAMES = [
    "01_five_minutes",
    "02_fused_layer_norm",
    "03_matmul_bias_activation",
    "04_fused_attention",
    "05_autotuning",
    "06_train_a_small_gpt",
    "07_long_sequences",
    "08_inference",
    "09_your_own_operator",
]


def test_the_folder_has_these_tutorials_and_each_as_a_pair():
    assert [source.stem for source in build.sources()] == NAMES
    assert sorted(path.stem for path in build.HERE.glob("*.ipynb")) == NAMES
    page = (build.HERE / "README.md").read_text()
    assert re.findall(r"\]\((\d\d_\w+)\.ipynb\)", page) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_notebook_is_its_sources(name):
    assert build.stale(build.HERE / f"{name}.py") is None, f"python -m tutorials.build {name}"


@pytest.mark.parametrize("name", NAMES)
def test_the_notebook_as_it_is_kept(name):
    path = build.HERE / f"{name}.ipynb"
    assert path.stat().st_size < build.LARGEST
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no picture"
    text = "\n".join(output.get("text", "") for output in outputs)
    assert "Warning" not in text
    assert "Traceback" not in text
    assert not re.search(r"(?<![\w.])/(?:home|root|tmp|work|usr)/", text), "a path of the machine"
    first, last = notebook.cells[0].source, notebook.cells[-1].source
    assert first.startswith("# ")
    assert "## What to read next" in last
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", prose):
        assert (build.HERE / target).exists(), f"a link to nothing: {target}"


@pytest.mark.parametrize("name", NAMES)
def test_the_tutorial_runs(name, tmp_path, monkeypatch):
    for variable in ("TRITON_INTERPRET", "FUSEDOPS_CACHE_DIR"):  # of these tests: a reader has none
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(build.HERE.parent))
    notebook = build.execute(build.read(build.HERE / f"{name}.py"), tmp_path)
    kept = nbformat.read(build.HERE / f"{name}.ipynb", as_version=4)
    for cell, before in zip(notebook.cells, kept.cells, strict=True):
        if cell.cell_type == "code":
            now, then = ([_kind(output) for output in each.outputs] for each in (cell, before))
            assert now == then, f"other outputs than those that are kept:\n{cell.source}"


def _kind(output):
    return output.output_type, *sorted(set(output.get("data", {})) - {"text/plain", "text/html"})


# --- the build -------------------------------------------------------------------------------------------------------

SOURCE = """# # A title
#
# text

# %%
print("one")
{code}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "HERE", tmp_path)
    return tmp_path


def write(folder, code=""):
    (folder / "10_mine.py").write_text("# %% [markdown]\n" + SOURCE.format(code=code))


def test_the_build_keeps_outputs_and_is_the_same_twice(folder, capsys):
    write(folder, "print('two')\n1 + 1")
    assert build.main(["--check"]) == 1
    assert build.main([]) == 0
    before = (folder / "10_mine.ipynb").read_bytes()
    (cell,) = [cell for cell in nbformat.reads(before, as_version=4).cells if cell.cell_type == "code"]
    assert cell.outputs[0].text == "one\ntwo\n"
    assert build.main(["10_mine", "--check"]) == 0
    assert build.main([]) == 0
    assert (folder / "10_mine.ipynb").read_bytes() == before
    write(folder, "print('three')")
    assert build.main(["--check"]) == 1
    assert "its cells are not those of the source" in capsys.readouterr().out


def test_a_cell_that_raises_writes_nothing(folder, capsys):
    write(folder, "1 / 0")
    assert build.main([]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert not (folder / "10_mine.ipynb").exists()


def test_an_unknown_tutorial(folder, capsys):
    write(folder)
    with pytest.raises(SystemExit):
        build.main(["11_other"])
    assert "there is no tutorial 11_other; there are 10_mine" in capsys.readouterr().err
