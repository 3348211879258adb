"""What a training framework's callback has patched, and how it tells of it."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

from fusedops.patching import patcher
from fusedops.patching.report import PatchReport


class Patches:
    """Patches models, and puts them back if it is to.

    Args:
        unpatch: whether :meth:`put_back` does so; else what is patched stays.
    """

    def __init__(self, unpatch: bool) -> None:
        self._unpatch = unpatch
        self._held = ExitStack()

    def patch(self, model: Any, **options: Any) -> PatchReport:
        """:func:`fusedops.patch`."""
        if self._unpatch:
            return self._held.enter_context(patcher.patched(model, **options))
        return patcher.patch(model, **options)

    def put_back(self) -> None:
        self._held.close()


def tell(report: PatchReport, log: logging.Logger, verbose: bool) -> None:
    """Log a report, and print it where that is wanted."""
    log.info("%s", report)
    if verbose:
        print(report)
