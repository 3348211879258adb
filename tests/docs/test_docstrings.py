"""Every public name's docstring: each parameter, what it raises, an example, a source; and the examples run."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import importlib.util
import inspect
import re

import pytest
import torch

import fusedops
from tests.docs.pages import ROOT
from tests.docs.test_pages import PACKAGES

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _public():
    seen = set()
    for module in (fusedops, *(importlib.import_module(f"fusedops.{package}") for package in PACKAGES)):
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.ismodule(value) and id(value) not in seen:
                seen.add(id(value))
                yield pytest.param(value, id=f"{module.__name__}.{name}")


PUBLIC = list(_public())

# Triton reads the source of the functions that it takes, which a doctest has not: pages and tests run these.
WITHOUT_DOCTEST = {"register_activation"}
# Methods from the paper or model that their docstring names.
OPERATORS = {
    "attention",
    "attention_decode",
    "context_parallel_attention",
    "gated_linear",
    "group_norm",
    "layer_norm",
    "rms_norm",
}


def _documentation(value):
    text = inspect.getdoc(value) or ""
    if inspect.isclass(value) and "__init__" in vars(value):
        text += "\n" + (inspect.getdoc(value.__init__) or "")
    return text


def _is_result(value):
    """Whether users read such objects and do not make them."""
    return inspect.isclass(value) and (dataclasses.is_dataclass(value) or hasattr(value, "_fields"))


def _is_error(value):
    return inspect.isclass(value) and issubclass(value, (Exception, Warning))


@pytest.mark.parametrize("value", PUBLIC)
def test_parameters_errors_and_an_example(value):
    text = _documentation(value)
    assert len(text.split()) > 5
    if _is_error(value):
        return
    for parameter in inspect.signature(value).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        others = rf"\bas of :(?:func|class|meth):|\b{parameter.name}\b|others: as "
        assert re.search(others, text), f"says nothing of {parameter.name}"
    if _is_result(value):
        return
    no_error = not inspect.signature(value).parameters
    assert no_error or "Raises:" in text, "does not say what it raises"
    assert ">>>" in text or value.__name__ in WITHOUT_DOCTEST, "has no example"


@pytest.mark.parametrize("value", [each for each in PUBLIC if each.values[0].__name__ in OPERATORS])
def test_a_source(value):
    text = _documentation(value)
    assert re.search(r"\b(?:19|20)\d\d\b|torch\.nn\.functional|arXiv|:func:", text), "names no paper, model or function"


@pytest.mark.parametrize("value", [each for each in PUBLIC if inspect.isclass(each.values[0])])
def test_methods(value):
    for name, member in vars(value).items():
        if name.startswith("_") or not (inspect.isfunction(member) or isinstance(member, (property, classmethod))):
            continue
        assert inspect.getdoc(getattr(value, name)), f"{name} has no docstring"


def test_all_operators_with_a_source_are_there():
    assert {each.values[0].__name__ for each in PUBLIC} >= OPERATORS


# --- examples --------------------------------------------------------------------------------------------------------


def _modules():
    for file in sorted((ROOT / "fusedops").rglob("*.py")):
        # Of libraries that may be missing; a benchmark's kernels.
        if ">>>" in file.read_text() and not {"integrations", "textbook"} & set(file.parts):
            yield ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = list(_modules())
# Those whose examples compile kernels, which a process that interprets them cannot.
COMPILING = [name for name in MODULES if name.startswith("fusedops.inspection")]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("name", COMPILING)
def test_examples_that_compile_run(compiler, name):
    attempted, failures = compiler.call("tests.docs.running:examples", name, FLAGS)
    assert attempted > 0
    assert not failures, failures


@pytest.mark.parametrize("name", sorted({*MODULES} - {*COMPILING}))
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    torch.manual_seed(0)
    with fusedops.backend("torch"):  # what a reader without a GPU has
        found = doctest.testmod(module, optionflags=FLAGS)
    assert found.attempted > 0
    assert found.failed == 0
