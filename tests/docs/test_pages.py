"""What the pages list is complete: public names, environment variables, messages; and links as the site makes them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections import Counter
from types import SimpleNamespace

import pytest

import fusedops
from fusedops.runtime.settings import VARIABLES
from tests.docs.pages import ROOT

API = {page.stem: page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md"))}
NAMED = re.findall(r"^::: ([\w.]+)$", "\n".join(API.values()), re.MULTILINE)

PACKAGES = ("nn", "data", "distributed", "patching", "autotune", "dynamo", "linear")


def _public():
    """The public names, each where it is documented: what the package itself exports goes by its short name."""
    short = {id(getattr(fusedops, name)): name for name in fusedops.__all__}
    for name in fusedops.__all__:
        if not isinstance(getattr(fusedops, name), type(fusedops)):
            yield f"fusedops.{name}"
    for package in PACKAGES:
        module = importlib.import_module(f"fusedops.{package}")
        for name in module.__all__:
            if id(getattr(module, name)) not in short:
                yield f"fusedops.{package}.{name}"


def test_every_public_name_is_on_one_page_of_the_reference():
    assert [name for name, count in Counter(NAMED).items() if count > 1] == []
    assert set(_public()) - set(NAMED) == set()


@pytest.mark.parametrize("name", NAMED)
def test_the_reference_names_what_there_is(name):
    module, _, attribute = name.rpartition(".")
    library = module.rpartition(".")[2]
    if module.startswith("fusedops.integrations") and library in ("lightning", "transformers", "kernels"):
        pytest.importorskip(library, reason="this page of the reference is about another library, which is not here")
    assert getattr(importlib.import_module(module), attribute).__doc__


def test_the_environment_page_has_every_variable():
    page = (ROOT / "docs" / "environment.md").read_text()
    table, _, _ = page.partition("Others' variables")
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(VARIABLES.values())
    read = set()
    for file in (ROOT / "fusedops").rglob("*.py"):
        read |= set(
            re.findall(r"(?:environ(?:\.get|\.setdefault)?[\[(]|environment\.get\()\"(\w+)\"", file.read_text())
        )
    assert read <= set(re.findall(r"`(\w+)`", page)), "the page does not know what the code reads"


# --- troubleshooting.md ----------------------------------------------------------------------------------------------

TROUBLE = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## From torch and Triton")[0]
MESSAGES = re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\* \*\*(`.*`)\*\*", TROUBLE, re.MULTILINE)))


def _texts():
    """Every text of the sources, with … for what is put in."""
    for file in (ROOT / "fusedops").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[sd]|\{\w*\}", "…", node.value)


@pytest.fixture(scope="module")
def texts():
    return set(_texts())


@pytest.mark.parametrize("message", MESSAGES)
def test_the_messages_are_the_sources(texts, message):
    """Each … stands for anything; what lies between stands in one text of the sources, in this order."""
    pattern = ".*".join(re.escape(part) for part in message.split("…"))
    assert any(re.search(pattern, text, re.DOTALL) for text in texts)


def test_the_page_knows_every_warning_and_error_class():
    classes = set()
    for file in (ROOT / "fusedops").rglob("*.py"):
        classes |= set(re.findall(r"^class ([A-Z]\w*(?:Error|Warning))\(", file.read_text(), re.MULTILINE))
    # Raised to the authors of benchmarks and probes, by functions of inspection and the demo, or never out of a module.
    inner = {"CompilationError", "ToolError", "NotServedError", "NotKnownError", "DemoError", "NewerFormatError"}
    assert {name for name in classes - inner if name not in TROUBLE} == set()


# --- the site's links ------------------------------------------------------------------------------------------------

mkdocs = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "nbconvert", "latex2mathml")),
    reason="the documentation's packages are not installed (pip install '.[docs]')",
)


@mkdocs
@pytest.mark.parametrize(
    ("page", "text", "rewritten"),
    [
        ("index.md", "[a](docs/norm.md#widths) ![b](docs/images/x.png)", "[a](norm.md#widths) ![b](images/x.png)"),
        ("attention.md", "[a](../CONTRIBUTING.md#how) [b](norm.md)", "[a](contributing.md#how) [b](norm.md)"),
        ("api/norm.md", "[a](../norm.md)", "[a](../norm.md)"),
        ("benchmarks.md", "[a](../docs/norm.md)", "[a](norm.md)"),
        ("norm.md", "[the script](../scripts/build_configs.py)", "the script"),
        ("norm.md", "```\n[a](../README.md)\n```\n[a](../README.md)", "```\n[a](../README.md)\n```\n[a](index.md)"),
        ("norm.md", "[a](https://pytorch.org) [b](#widths)", "[a](https://pytorch.org) [b](#widths)"),
    ],
)  # fmt: skip
def test_links(page, text, rewritten):
    from scripts import site

    assert site.rewritten(text, page) == rewritten


@mkdocs
def test_a_link_to_nothing_is_a_warning(caplog):
    from scripts import site

    site.rewritten("[a](../no/such.py)", "norm.md")
    assert "there is no file no/such.py" in caplog.text


@mkdocs
def test_formulas_become_mathml():
    from scripts import site

    page = next(iter(site.NOTEBOOKS))
    text = site._aside("of $x_i$ and\n$$\\frac{1}{2}$$\n```python\nprice = '$5$'\n```\nand `$y$` costs $5\n", page)
    assert text.count("FORMULA") == 2
    assert "price = '$5$'" in text
    assert "`$y$` costs $5" in text
    html = site.on_page_content(text, SimpleNamespace(file=SimpleNamespace(src_uri=page)), None, None)
    assert html.count("<math") == 2
    assert 'display="block"' in html


@mkdocs
def test_a_notebook_is_a_page_with_its_pictures():
    from scripts import site

    page, file = next(iter(site.NOTEBOOKS.items()))
    made = site.notebook(page, ROOT / file)
    pictures = {name: content for name, content in made.items() if name != page}
    assert pictures
    assert all(content.startswith(b"\x89PNG") for content in pictures.values())
    for name in pictures:
        assert f"![]({name.removeprefix('tutorials/')})" in site.rewritten(made[page], page)
