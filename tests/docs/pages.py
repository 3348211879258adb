"""The pages of the documentation, and the blocks of code in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "tutorials/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\n+$")


class Block(NamedTuple):
    """A fenced block: its language, text, the line that its text begins at, and why it is not run (None: it is)."""

    language: str
    text: str
    line: int
    not_run: str | None


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[Block]:
    """The fenced blocks of these languages."""
    text = page.read_text()
    found = []
    for fence in _FENCE.finditer(text):
        reason = _NOT_RUN.search(text, 0, fence.start())
        if fence[1] in languages:
            line = text.count("\n", 0, fence.start(2)) + 1
            found.append(Block(fence[1], fence[2], line, reason and reason[1]))
    return found


def source(page: Path, found: list[Block]) -> str:
    """The blocks as one program, each line where the page has it: tracebacks and Triton read the page itself."""
    lines: list[str] = []
    for block in found:
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.text.splitlines()
    return "\n".join(lines) + "\n"
