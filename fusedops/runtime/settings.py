"""Every environment variable that fusedops reads, in one typed place.

The environment is read once, when fusedops is imported. ``fusedops doctor`` prints what was found.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Backend = Literal["auto", "triton", "torch"]
BACKENDS: tuple[Backend, ...] = ("auto", "triton", "torch")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


# The environment variable of each field of Settings.
VARIABLES = {
    "backend": "FUSEDOPS_BACKEND",
    "cache_dir": "FUSEDOPS_CACHE_DIR",
    "interpret": "TRITON_INTERPRET",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for.

    Attributes:
        backend: ``FUSEDOPS_BACKEND``. ``auto`` (default): Triton kernels on a supported GPU or in Triton's
            interpreter, torch's own operators elsewhere. ``triton``: Triton or an error that says why not.
            ``torch``: torch's own operators everywhere.
        cache_dir: ``FUSEDOPS_CACHE_DIR``. The folder for what fusedops stores; default: the user's cache
            folder on this system. ``None`` here means the default (:meth:`cache_path` resolves it).
        interpret: ``TRITON_INTERPRET``. Triton's own variable: kernels run on the CPU, slowly, for debugging
            and tests.
    """

    backend: Backend = "auto"
    cache_dir: Path | None = None
    interpret: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the variables; a value that is not understood raises ValueError naming the variable."""
        env = os.environ if environment is None else environment
        backend = env.get("FUSEDOPS_BACKEND", "").strip().lower() or "auto"
        if backend not in BACKENDS:
            raise ValueError(f"FUSEDOPS_BACKEND must be one of {', '.join(BACKENDS)}; got {backend!r}")
        folder = env.get("FUSEDOPS_CACHE_DIR", "").strip()
        return cls(
            backend=backend,
            cache_dir=Path(folder).expanduser() if folder else None,
            interpret=_flag(env, "TRITON_INTERPRET"),
        )

    def cache_path(self) -> Path:
        """The folder for what fusedops stores (not created by this call)."""
        if self.cache_dir is not None:
            return self.cache_dir
        import platformdirs

        return Path(platformdirs.user_cache_dir("fusedops", appauthor=False))


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ValueError(f"{name} must be 1 or 0; got {value!r}")


SETTINGS = Settings.from_environment()
