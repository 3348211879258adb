"""Run the tutorials and keep their outputs.

    python -m tutorials.build [01_five_minutes …] [--check] [--output FOLDER]

Each ``NN_name.py`` (jupytext's percent format) is executed from its first cell on in a kernel of its own, and written
with its outputs to ``NN_name.ipynb`` beside it. ``--check`` executes nothing and says which notebooks are not of their
source. What differs from run to run without meaning (times of execution, identifiers, the kernel's own version) is left
out, so that a new build of an unchanged tutorial changes no line.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

HERE = Path(__file__).resolve().parent
SECONDS = 300
LARGEST = 400_000  # bytes of a notebook


def sources() -> list[Path]:
    """The tutorials, in their order."""
    return sorted(HERE.glob("[0-9][0-9]_*.py"))


def read(source: Path) -> nbformat.NotebookNode:
    """A tutorial's cells, without outputs."""
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
    return _plain(notebook)


def execute(notebook: nbformat.NotebookNode, folder: Path, seconds: float = SECONDS) -> nbformat.NotebookNode:
    """Run a notebook's cells in a new kernel whose working directory is ``folder``.

    Raises:
        CellExecutionError: a cell raised; the message has its code and traceback.
        RuntimeError: a cell took longer than ``seconds``.
    """
    # One thread: as in the tests, and the numbers do not depend on the machine's cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    resources: dict[str, Any] = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=int(seconds), kernel_name="python3", resources=resources)
    client.execute()
    return _plain(notebook)


def _plain(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without what changes from run to run."""
    notebook.metadata = nbformat.from_dict(
        {
            "jupytext": {"formats": "ipynb,py:percent"},
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    count = 0
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        cell.outputs = _joined(cell.outputs)
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = count
            if "image/png" in output.get("data", {}):  # the picture's text form names an address
                output.data.pop("text/plain", None)
            output.get("metadata", {}).clear()
    return notebook


def _joined(outputs: list[Any]) -> list[Any]:
    """Texts that came in several parts, by chance of time, in one."""
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if output.output_type == "stream" and last is not None and last.get("name") == output.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def stale(source: Path) -> str | None:
    """Why a notebook is not of its source; None: it is."""
    path = source.with_suffix(".ipynb")
    if not path.exists():
        return "there is none"
    kept = nbformat.read(path, as_version=4)
    cells = [(cell.cell_type, cell.source) for cell in kept.cells]
    if cells != [(cell.cell_type, cell.source) for cell in read(source).cells]:
        return "its cells are not those of the source"
    if any(cell.cell_type == "code" and cell.execution_count is None for cell in kept.cells):
        return "it was not run"
    return None


def build(source: Path, output: Path) -> Path:
    """Execute a tutorial and write its notebook.

    Raises:
        CellExecutionError, RuntimeError: as of :func:`execute`; nothing is written.
        ValueError: it is too large to keep.
    """
    notebook = execute(read(source), HERE)
    text = nbformat.writes(notebook) + "\n"
    if len(text) > LARGEST:
        raise ValueError(f"{source.stem}: {len(text):,} bytes with its outputs; at most {LARGEST:,}")
    path = output / f"{source.stem}.ipynb"
    path.write_text(text, encoding="utf-8")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tutorials.build", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="which tutorials, as 01_five_minutes; default: all")
    parser.add_argument("--check", action="store_true", help="execute nothing; say which notebooks are out of date")
    parser.add_argument("--output", type=Path, default=HERE, help="a folder for the notebooks; default: tutorials/")
    asked = parser.parse_args(arguments)
    known = {source.stem: source for source in sources()}
    wrong = [name for name in asked.names if name.removesuffix(".py") not in known]
    if wrong:
        parser.error(f"there is no tutorial {wrong[0]}; there are {', '.join(known)}")
    chosen = [known[name.removesuffix(".py")] for name in asked.names] or list(known.values())
    failed = 0
    for source in chosen:
        if asked.check:
            reason = stale(source)
            print(f"{source.stem}: {reason or 'up to date'}")
            failed += reason is not None
            continue
        started = time.monotonic()
        print(f"{source.stem} … ", end="", flush=True)
        try:
            path = build(source, asked.output)
        except (CellExecutionError, RuntimeError, ValueError) as error:
            print("failed")
            print(error, file=sys.stderr)
            failed += 1
        else:
            print(f"{time.monotonic() - started:.0f} s, {path.stat().st_size / 1024:.0f} KiB")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.platform == "win32":  # zmq needs it
        asyncio.set_event_loop_policy(asyncio.WindowsSelectorEventLoopPolicy())
    sys.exit(main())
