"""Every block of code in the README and the documentation: Python runs, commands exist with their options."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import fusedops
from fusedops.cli.app import app
from tests.docs.pages import PAGES, ROOT, blocks, name_of, source

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest brings there

# Pages whose Python other tests run, which hold its output to the page's too, or give it what it needs.
OWN_TESTS = {
    "docs/attention.md": "tests/attention/test_page.py",
    "docs/autotuning.md": "tests/autotune/test_page.py",
    "docs/compile.md": "tests/dynamo/test_page.py",
    "docs/composition.md": "tests/composition/test_page.py",
    "docs/context-parallel.md": "tests/distributed/test_context_parallel_page.py",
    "docs/data.md": "tests/data/test_page.py",
    "docs/decoding.md": "tests/composition/test_page.py",
    "docs/patching.md": "tests/patching/test_page.py",
}
# Pages that compile kernels, which a process that interprets them cannot.
COMPILING = {"docs/inspection.md"}

WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
HERE = [page for page in WITH_PYTHON if name_of(page) not in OWN_TESTS.keys() | COMPILING]


def test_a_page_that_is_run_elsewhere_is_run_there():
    assert OWN_TESTS.keys() <= {name_of(page) for page in WITH_PYTHON}
    for page, test in OWN_TESTS.items():
        assert Path(page).name in (ROOT / test).read_text(), test


@pytest.mark.parametrize("page", HERE, ids=name_of)
def test_python_runs(page, tmp_path, monkeypatch, recwarn):
    monkeypatch.chdir(tmp_path)
    found = [block for block in blocks(page, "python") if block.not_run is None]
    names = {"__name__": "__page__"}
    torch.manual_seed(0)
    with fusedops.backend("torch"):  # what a reader without a GPU has
        exec(compile(source(page, found), str(page), "exec"), names)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("page", sorted(COMPILING))
def test_python_that_compiles_runs(compiler, page):
    found = [block for block in blocks(ROOT / page, "python") if block.not_run is None]
    assert compiler.call("tests.docs.running:run", source(ROOT / page, found), str(ROOT / page)) == "done"


def test_what_is_not_run_has_a_reason():
    left = {
        f"{name_of(page)}:{block.line}": block.not_run
        for page in PAGES
        for block in blocks(page, "python")
        if block.not_run is not None
    }
    for place, reason in left.items():
        assert len(reason.split()) > 2, place


# --- commands --------------------------------------------------------------------------------------------------------


def _commands():
    for page in PAGES:
        for block in blocks(page, "bash", "console", "sh"):
            for number, line in enumerate(block.text.splitlines()):
                if block.language == "console" and not line.startswith("$ "):
                    continue  # what it prints
                command = re.sub(r"\s+#.*$", "", line.removeprefix("$ ")).strip()
                if command and not command.startswith("#"):
                    yield pytest.param(command, id=f"{name_of(page)}:{block.line + number}")


TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()


@pytest.mark.parametrize("command", list(_commands()))
def test_commands_exist(command):
    words = shlex.split(command)
    while re.fullmatch(r"\w+=\S*", words[0]):  # variables
        words.pop(0)
    program, *rest = words
    if program == "srun":
        rest = [word for word in rest if not word.startswith(("--gpus", "--nodes"))]
        program, *rest = rest
    if program == "fusedops":
        _check_fusedops(rest)
    elif program == "make":
        assert {word for word in rest if "=" not in word} <= TARGETS
    elif program in ("python", "torchrun") or program.startswith(".venv/bin/"):
        _check_python(rest)
    elif program == "pip":
        for extra in re.findall(r"\[([\w,-]+)\]", " ".join(rest)):
            assert set(extra.split(",")) <= EXTRAS
    elif program in ("bash", "sh"):
        assert (ROOT / rest[0]).exists()
    else:
        assert program in {"export", "git", "cd", "jupyter"}, f"nobody checks {program}"


def _check_fusedops(words):
    command = get_command(app)
    words = " ".join(words).partition(" -- ")[0].split()
    while hasattr(command, "commands"):
        if not words or words[0].startswith("-"):
            break
        command = command.commands[words.pop(0)]
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word.partition("=")[0] for word in words if word.startswith("-")} <= options | {"--help"}


def _check_python(words):
    words = [word for word in words if not word.startswith(("--nproc", "--standalone"))]
    if words[:1] == ["-m"]:
        module = words[1]
        assert importlib.util.find_spec(module) is not None, module
        if not module.startswith("benchmarks"):
            return
        script = ["-m", module]
    elif words and (words[0].startswith(("benchmarks/", "scripts/", "examples/"))):
        assert (ROOT / words[0]).exists(), words[0]
        script = [words[0]]
    else:
        return  # the reader's own program
    given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)} - {"-m"}
    if given:
        assert given <= _options(tuple(script))


_known: dict[tuple[str, ...], set[str]] = {}


def _options(script):
    """Those that the program's --help names."""
    if script not in _known:
        done = subprocess.run(
            [sys.executable, *script, "--help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
        )
        _known[script] = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", done.stdout))
    return _known[script]
