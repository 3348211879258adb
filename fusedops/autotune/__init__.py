"""Launch configurations: searched once a GPU, stored, shared, and looked up by every launch.

``import fusedops`` loads the look-up alone; what searches and stores is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fusedops.autotune.modes import mode

if TYPE_CHECKING:
    from fusedops.autotune.ranks import sync
    from fusedops.autotune.record import read_recorded
    from fusedops.autotune.tuner import problems_of_model, tune, tune_model

_LATER = {
    "problems_of_model": "fusedops.autotune.tuner",
    "read_recorded": "fusedops.autotune.record",
    "sync": "fusedops.autotune.ranks",
    "tune": "fusedops.autotune.tuner",
    "tune_model": "fusedops.autotune.tuner",
}

__all__ = ["mode", "problems_of_model", "read_recorded", "sync", "tune", "tune_model"]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
