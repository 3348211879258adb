"""The documentation site's hooks (``mkdocs.yml``): pages that lie elsewhere, notebooks, links that work in both places.

Pages are written for a reader of the repository: links are relative files, and the README, the changelog, the guide for
contributors, the benchmarks' page and the notebooks lie where such files are looked for. The site shows the same files.
Each link is resolved in the repository; one to a page becomes that page's, one to another file (a script, a test) loses
its link and keeps its text, and one to nothing fails the build.
"""

from __future__ import annotations

import logging
import posixpath
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import latex2mathml.converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parents[1]
LOG = logging.getLogger("mkdocs.hooks.site")

# Page of the site -> file of the repository.
ELSEWHERE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "benchmarks.md": "benchmarks/README.md",
    "tutorials/index.md": "tutorials/README.md",
}
NOTEBOOKS = {
    f"tutorials/{path.stem}.md": f"tutorials/{path.name}" for path in sorted((ROOT / "tutorials").glob("*.ipynb"))
}
PAGES = {file: page for page, file in (ELSEWHERE | NOTEBOOKS).items()}

# A link or picture outside of code: [text](target) or [text](target "title").
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)((?:\s+\"[^\"]*\")?)\)")
_CODE = re.compile(r"^( *)(```+|~~~+).*?^\1\2[ \t]*$|^(?: {4}[^\n]*\n|\n(?= {4}))+", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie elsewhere."""
    for page, file in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / file)))
    for page, file in NOTEBOOKS.items():
        for name, content in notebook(page, ROOT / file).items():
            files.append(File.generated(config, name, content=content))
    files.append(File.generated(config, "api/command.md", content=command_page()))
    return files


def notebook(page: str, path: Path) -> dict[str, str | bytes]:
    """A notebook's page in Markdown, and its pictures, by their place in the site."""
    text, resources = MarkdownExporter().from_filename(str(path))
    stem = path.stem
    pictures = {f"tutorials/{stem}_{name}": content for name, content in resources["outputs"].items()}
    for name in resources["outputs"]:
        text = text.replace(f"![png]({name})", f"![]({stem}_{name})")
    heading, _, rest = text.strip().partition("\n")
    return {page: f"{heading}\n\n*This is `tutorials/{path.name}` with its outputs.*\n{rest}", **pictures}


def command_page() -> str:
    """The command's help texts, as Typer writes them down."""
    command = [sys.executable, "-m", "typer", "fusedops.cli.app", "utils", "docs", "--name", "fusedops"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PluginError(f"typer could not write the command's page:\n{done.stderr}")
    # Its heading is the command's name; what typer says of shells is of every command.
    return re.sub(r"^\* `--(install|show)-completion`.*\n", "", done.stdout, flags=re.MULTILINE)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links into the site's, and take formulas aside, which Markdown would read as its own."""
    place = page.file.src_uri
    text = rewritten(markdown, place)
    return _aside(text, place) if place in NOTEBOOKS else text


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put formulas back, as MathML: browsers show it without a script from another host."""
    for mark, formula in _formulas.pop(page.file.src_uri, {}).items():
        html = html.replace(mark, formula)
    return html


_formulas: dict[str, dict[str, str]] = {}
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\w$\\`])\$(?![\s`])([^$\n]+?)(?<!\s)\$(?![\w`])", re.DOTALL)


def _aside(text: str, page: str) -> str:
    kept = _formulas.setdefault(page, {})

    def mark(found: re.Match[str]) -> str:
        name = f"FORMULA{len(kept)}OF"
        display = "block" if found[1] else "inline"
        kept[name] = latex2mathml.converter.convert(" ".join((found[1] or found[2]).split()), display=display)
        return name

    return _outside_code(text, lambda part: _FORMULA.sub(mark, part))


def rewritten(markdown: str, page: str) -> str:
    """A page's text with its links as the site has them.

    Args:
        markdown: as the repository has it, or a cell of a notebook.
        page: the page's place in the site, as ``api/norm.md``.
    """
    here = posixpath.dirname((ELSEWHERE | NOTEBOOKS).get(page, f"docs/{page}"))

    return _outside_code(markdown, lambda text: _LINK.sub(lambda found: _link(found, here, page), text))


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """The text with everything changed but its blocks of code."""
    parts, end = [], 0
    for code in _CODE.finditer(markdown):
        parts += [change(markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(markdown[end:])])


def _link(found: re.Match[str], here: str, page: str) -> str:
    picture, text, target, title = found.groups()
    url = urlsplit(target)
    made = picture and page in NOTEBOOKS and target.startswith(f"{Path(page).stem}_")  # a notebook's own
    if url.scheme or url.netloc or not url.path or made:
        return found[0]
    file = posixpath.normpath(posixpath.join(here, url.path))
    place = PAGES.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else None)
    if place is None:
        if not (ROOT / file).exists():
            LOG.warning("%s: there is no file %s", page, file)
        return text  # a file that is no page: a script, a test
    relative = posixpath.relpath(place, posixpath.dirname(page) or ".")
    anchor = f"#{url.fragment}" if url.fragment else ""
    return f"{picture}[{text}]({relative}{anchor}{title})"


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Fail where a page needs something from another host: the site is read offline too."""
    needs = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=[\"']?(https?:)?//[^\"'\s>]+", re.IGNORECASE)
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        for found in needs.finditer(path.read_text(encoding="utf-8")):
            if 'rel="canonical"' not in found[0]:
                LOG.warning("%s needs %s", path.relative_to(config.site_dir), found[0])
