"""The documentation site's hooks (``mkdocs.yml``): pages that lie elsewhere, and links that work in both places.

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
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LOG = logging.getLogger("mkdocs.hooks.site")

# Page of the site -> file of the repository.
ELSEWHERE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "benchmarks.md": "benchmarks/README.md",
    "tutorials/index.md": "tutorials/README.md",
    **{f"tutorials/{path.name}": f"tutorials/{path.name}" for path in sorted((ROOT / "tutorials").glob("*.ipynb"))},
}
PAGES = {file: page for page, file in ELSEWHERE.items()}

# A link or picture outside of code: [text](target) or [text](target "title").
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)((?:\s+\"[^\"]*\")?)\)")
_CODE = re.compile(r"^( *)(```+|~~~+).*?^\1\2[ \t]*$|(`+)[^`].*?(?<!`)\3(?!`)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie elsewhere."""
    for page, file in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / file)))
    files.append(File.generated(config, "api/command.md", content=command_page()))
    return files


def command_page() -> str:
    """The command's help texts, as Typer writes them down."""
    command = [sys.executable, "-m", "typer", "fusedops.cli.app", "utils", "docs", "--name", "fusedops"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PluginError(f"typer could not write the command's page:\n{done.stderr}")
    # Its heading is the command's name; what typer says of shells is of every command.
    return re.sub(r"^\* `--(install|show)-completion`.*\n", "", done.stdout, flags=re.MULTILINE)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links into the site's."""
    return rewritten(markdown, page.file.src_uri)


def rewritten(markdown: str, page: str) -> str:
    """A page's text with its links as the site has them.

    Args:
        markdown: as the repository has it, or a cell of a notebook.
        page: the page's place in the site, as ``api/norm.md``.
    """
    here = posixpath.dirname(ELSEWHERE.get(page, f"docs/{page}"))

    def outside_code(text: str) -> str:
        return _LINK.sub(lambda found: _link(found, here, page), text)

    parts, end = [], 0
    for code in _CODE.finditer(markdown):
        # Code within a link's text stays part of the link: only code that begins a part of its own is left out.
        if code[0].lstrip().startswith(("```", "~~~")):
            parts += [outside_code(markdown[end : code.start()]), code[0]]
            end = code.end()
    return "".join([*parts, outside_code(markdown[end:])])


def _link(found: re.Match[str], here: str, page: str) -> str:
    picture, text, target, title = found.groups()
    url = urlsplit(target)
    if url.scheme or url.netloc or not url.path:
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
