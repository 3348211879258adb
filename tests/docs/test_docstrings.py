"""Every public name's docstring: parameters, shapes, results, errors, an example, a source; and all examples run.

Public is what the packages export (``__all__``), what the modules of ``fusedops.integrations`` define, and what else
the reference (``docs/api``) shows. So a new name without such a docstring fails here.
"""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import importlib.util
import inspect
import re
import shlex

import pytest
import torch
from typer.main import get_command

import fusedops
from fusedops.cli.app import app
from tests.docs.pages import ROOT
from tests.docs.test_pages import NAMED, PACKAGES

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Examples")

# Triton reads the source of the functions that it takes, which a doctest has not: pages and tests run these.
WITHOUT_DOCTEST = {"fusedops.linear.register_activation"}


def _defined(file):
    """The public functions and classes that a module defines, without importing it or its library."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield f"fusedops.integrations.{file.stem}.{node.name}"


def _public():
    """The names, each once: what the package itself exports goes by its short name."""
    seen = set()
    for module in (fusedops, *(importlib.import_module(f"fusedops.{package}") for package in PACKAGES)):
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.ismodule(value) and id(value) not in seen:
                seen.add(id(value))
                yield f"{module.__name__}.{name}"
    for library in ("kernels", "lightning", "transformers"):
        yield from _defined(ROOT / "fusedops" / "integrations" / f"{library}.py")
    yield from NAMED


PUBLIC = list(dict.fromkeys(_public()))


def _import(module):
    package, _, library = module.rpartition(".")
    if package == "fusedops.integrations":
        library = library.partition("_")[0]
        pytest.importorskip(library, reason="this module is about another library, which is not here")
    return importlib.import_module(module)


def _value(name):
    module, _, attribute = name.rpartition(".")
    return getattr(_import(module), attribute)


def _sections(value):
    """The text of each section, and what stands before, between and behind them under ""."""
    found = {"": ""}
    current = ""
    for line in _text(value).splitlines():
        header = re.fullmatch(r"(\w+):", line)
        if header and header[1] in SECTIONS:
            assert header[1] not in found, f"two sections {header[1]}"
            current = header[1]
            found[current] = ""
            continue
        if line and not line.startswith(" "):
            current = ""
        found[current] += line + "\n"
    return found


def _text(value):
    return inspect.cleandoc(value.__doc__ or "")


def _entries(section):
    """What a section says of each name: ``k, v: (batch, …)`` is of both."""
    entries = {}
    for names, text in re.findall(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*(?:\n {5,}.*)*)", section, re.MULTILINE):
        entries |= dict.fromkeys(names.replace("*", "").split(", "), text)
    return entries


def _parameters(value):
    parameters = inspect.signature(value).parameters.values()
    return {each.name: each for each in parameters if each.name != "self" and not each.name.startswith("_")}


def _is_tensor(parameter):
    return re.fullmatch(r"(torch\.)?Tensor( \| None)?", str(parameter.annotation)) is not None


def _is_error(value):
    return inspect.isclass(value) and issubclass(value, Exception)


def _is_result(value):
    """Whether users read such objects and do not make them."""
    if not inspect.isclass(value) or ">>>" in _text(value):
        return False
    return dataclasses.is_dataclass(value) or hasattr(value, "_fields") or issubclass(value, torch.Tensor)


def _is_layer(value):
    """Whether it is a layer that ``kernels`` puts in place of another: it has that one's constructor."""
    return getattr(value, "can_torch_compile", False)


@pytest.mark.parametrize("name", PUBLIC)
def test_one_sentence_begins_it(name):
    first, _, _ = _text(_value(name)).partition("\n\n")
    assert re.search(r"[.:]$", first), "begins with no sentence"


@pytest.mark.parametrize("name", PUBLIC)
def test_parameters(name):
    value = _value(name)
    if _is_error(value) or _is_layer(value):
        return
    sections, parameters = _sections(value), _parameters(value)
    if _is_result(value):
        assert parameters.keys() <= _entries(sections.get("Attributes", "")).keys() or issubclass(value, torch.Tensor)
        return
    said = _entries(sections.get("Args", ""))
    if dataclasses.is_dataclass(value) and not said:
        said = _entries(sections["Attributes"])
    kinds = {each: parameters[each].kind for each in parameters}
    named = {each for each, kind in kinds.items() if kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)}
    assert named <= said.keys(), f"says nothing of {named - said.keys()}"
    if not (inspect.isclass(value) and "__init__" not in vars(value)):  # another torch's constructor may take less
        assert said.keys() <= parameters.keys(), f"takes no {said.keys() - parameters.keys()}"


@pytest.mark.parametrize("name", PUBLIC)
def test_shapes_and_dtypes(name):
    value = _value(name)
    if _is_layer(value):
        return
    if inspect.isclass(value) and issubclass(value, torch.nn.Module):
        assert re.search(r"[Ss]hapes", _text(value)), "does not say where its shapes are written"
        value = value.forward
    elif inspect.isclass(value):
        return
    sections = _sections(value)
    said = _entries(sections.get("Args", ""))
    tensors = [each for each, parameter in _parameters(value).items() if _is_tensor(parameter)]
    for each in tensors:
        assert re.search(r"\([\w…*.(].*\)|shape|\bas (?:for|in|of)\b|the same\b", said[each]), f"no shape of {each}"
    if tensors and inspect.isfunction(_value(name)):
        assert re.search(r"float|dtype|\bint", _text(value)), "says no dtype"


@pytest.mark.parametrize("name", PUBLIC)
def test_results_errors_and_an_example(name):
    value = _value(name)
    if _is_error(value) or _is_result(value) or _is_layer(value):
        return
    sections = _sections(value)
    if inspect.isfunction(value) and inspect.signature(value).return_annotation not in (None, "None"):
        assert {"Returns", "Yields"} & sections.keys(), "does not say what it returns"
    if _parameters(value) and "raises nothing" not in sections[""]:
        assert re.match(r" {4}[A-Z]\w+(, [A-Z]\w+)*: ", sections.get("Raises", "")), "does not say what it raises"
    assert ">>>" in sections.get("Examples", "") or name in WITHOUT_DOCTEST, "has no example"


def _is_operator(name):
    value = _value(name) if name.count(".") == 1 else None
    family = re.match(r"fusedops\.(attention|norm|linear|norm_linear)\.functional", getattr(value, "__module__", ""))
    return inspect.isfunction(value) and family is not None


OPERATORS = [name for name in PUBLIC if _is_operator(name)]


def _sources(value, seen=()):
    """Papers and functions of torch that a description names, itself or by a reference to a function of ours."""
    text = _sections(value)[""]
    found = re.findall(r"\b(?:19|20)\d\d\b|torch\.nn\.functional\.\w+|torch\.\w+mm\b", text)
    for other in set(re.findall(r":func:`(?:fusedops\.)?(\w+)`", text)) - {value.__name__, *seen}:
        found += _sources(getattr(fusedops, other), (*seen, value.__name__)) if hasattr(fusedops, other) else []
    return found


@pytest.mark.parametrize("name", [*OPERATORS, "fusedops.distributed.context_parallel_attention"])
def test_operators_name_their_source(name):
    assert _sources(_value(name)), "names no paper and no function of torch"


def test_there_are_operators():
    assert {"fusedops.attention", "fusedops.rms_norm", "fusedops.linear", "fusedops.layer_norm_linear"} <= {*OPERATORS}


@pytest.mark.parametrize("name", PUBLIC)
def test_methods(name):
    value = _value(name)
    if not inspect.isclass(value) or _is_layer(value):
        return
    for method, member in vars(value).items():
        bare = getattr(member, "__func__", getattr(member, "fget", member))
        if method.startswith("_") or not inspect.isfunction(bare) or _inherited(value, method):
            continue
        assert bare.__doc__, f"{method} has no docstring"
        parameters = list(inspect.signature(bare).parameters)[1:]
        missing = [each for each in parameters if not re.search(rf"\b{each}\b", bare.__doc__)]
        assert not missing, f"{method} says nothing of {missing}"


def _inherited(value, method):
    """Hooks of another library's base class, which documents when they are called."""
    return method != "forward" and any(
        hasattr(base, method) and not base.__module__.startswith("fusedops") for base in value.__mro__[1:]
    )


# --- examples --------------------------------------------------------------------------------------------------------


def _modules():
    for file in sorted((ROOT / "fusedops").rglob("*.py")):
        if ">>>" in file.read_text():
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


# On torch's operators, which a reader without a GPU has; and on the kernels where they serve an example's calls.
@pytest.mark.parametrize("backend", ["torch", pytest.param("kernels", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("name", [name for name in MODULES if name not in COMPILING])
def test_examples_run(name, backend, tmp_path, monkeypatch):
    module = _import(name)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    with fusedops.backend("torch" if backend == "torch" else "auto"):
        found = doctest.testmod(module, optionflags=FLAGS)
    assert found.attempted > 0
    assert found.failed == 0


# --- the command -----------------------------------------------------------------------------------------------------


def _commands(command, name):
    for inner, each in getattr(command, "commands", {}).items():
        yield from _commands(each, f"{name} {inner}")
    if not hasattr(command, "commands"):
        yield pytest.param(command, name, id=name)


@pytest.mark.parametrize(("command", "name"), list(_commands(get_command(app), "fusedops")))
def test_a_commands_help_has_an_example_of_it(command, name):
    example = re.search(rf"^Example: `{name}((?: [^`]+)?)`\s\(.+\)\.$", command.help, re.MULTILINE)
    assert example, "its help has no example"
    arguments, _, _ = example[1].partition(" -- ")
    command.make_context(name, shlex.split(arguments) + ["--", "program"] * (" -- " in example[1]))
