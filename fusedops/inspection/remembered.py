"""What NVIDIA's binary tools said of a kernel, kept between runs: they are asked once of each content.

A file an answer in the folder ``inspection`` of fusedops' cache folder (``FUSEDOPS_CACHE_DIR``), named by the hash of
what was given. A file is written beside its place and renamed: many processes may ask at once, and one that is killed
leaves no half of it. Where nothing can be written, the tools are asked every time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from fusedops.runtime.settings import SETTINGS

_folder: Path | None = None


def use_folder(folder: Path | None) -> None:
    """Keep answers of this process in another folder; None: in the usual one."""
    global _folder
    _folder = folder


def remembered(kind: str, given: bytes, ask: Callable[[], str]) -> str:
    """The answer to a question; asked for where it is not known yet.

    Args:
        kind: names the folder of like questions.
        given: all that the answer depends on.
        ask: answers; what it raises is not kept.
    """
    folder = (_folder or SETTINGS.cache_path() / "inspection") / kind
    path = folder / hashlib.sha256(given).hexdigest()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")
    said = ask()
    unfinished = folder / f"{path.name}.{os.getpid()}.{threading.get_ident()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(said, encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return said
