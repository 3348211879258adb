"""Every environment variable that fusedops reads, in one typed place.

The environment is read once, when fusedops is imported. ``fusedops doctor`` prints what was found.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

Backend = Literal["auto", "triton", "torch"]
BACKENDS: tuple[Backend, ...] = ("auto", "triton", "torch")
Autotune = Literal["cached", "on", "off", "record"]
AUTOTUNE: tuple[Autotune, ...] = ("cached", "on", "off", "record")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


# The environment variable of each field of Settings.
VARIABLES = {
    "backend": "FUSEDOPS_BACKEND",
    "autotune": "FUSEDOPS_AUTOTUNE",
    "cache_dir": "FUSEDOPS_CACHE_DIR",
    "config_path": "FUSEDOPS_CONFIG_PATH",
    "record_file": "FUSEDOPS_RECORD_FILE",
    "strict": "FUSEDOPS_STRICT",
    "interpret": "TRITON_INTERPRET",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for.

    Attributes:
        backend: ``FUSEDOPS_BACKEND``. ``auto`` (default): Triton kernels on a supported GPU or in Triton's
            interpreter, torch's own operators elsewhere. ``triton``: Triton or an error that says why not.
            ``torch``: torch's own operators everywhere.
        autotune: ``FUSEDOPS_AUTOTUNE``. What happens where a launch configuration has not been searched for yet.
            ``cached`` (default): a default serves the call, and one message says what to run. ``on``: search then and
            there, in eager mode. ``off``: defaults only, whatever is stored. ``record``: as ``cached``, and the
            problem is written down, for ``fusedops autotune --from``.
        cache_dir: ``FUSEDOPS_CACHE_DIR``. The folder for what fusedops stores; default: the user's cache
            folder on this system. ``None`` here means the default (:meth:`cache_path` resolves it).
        config_path: ``FUSEDOPS_CONFIG_PATH``. Files that ``fusedops cache export`` wrote, or folders of them, which
            are read after the user's own store; separated as in ``PATH``.
        record_file: ``FUSEDOPS_RECORD_FILE``. Where ``record`` writes; default: ``recorded.jsonl`` in the cache folder.
        strict: ``FUSEDOPS_STRICT``. Ignore stored configurations that another Triton or other kernels were timed with,
            instead of using them until they are searched again.
        interpret: ``TRITON_INTERPRET``. Triton's own variable: kernels run on the CPU, slowly, for debugging
            and tests.
    """

    backend: Backend = "auto"
    autotune: Autotune = "cached"
    cache_dir: Path | None = None
    config_path: tuple[Path, ...] = ()
    record_file: Path | None = None
    strict: bool = False
    interpret: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the variables; a value that is not understood raises ValueError naming the variable."""
        env = os.environ if environment is None else environment
        return cls(
            backend=_one_of(env, "FUSEDOPS_BACKEND", BACKENDS),
            autotune=_one_of(env, "FUSEDOPS_AUTOTUNE", AUTOTUNE),
            cache_dir=_path(env, "FUSEDOPS_CACHE_DIR"),
            config_path=tuple(
                _absolute("FUSEDOPS_CONFIG_PATH", part.strip())
                for part in env.get("FUSEDOPS_CONFIG_PATH", "").split(os.pathsep)
                if part.strip()
            ),
            record_file=_path(env, "FUSEDOPS_RECORD_FILE"),
            strict=_flag(env, "FUSEDOPS_STRICT"),
            interpret=_flag(env, "TRITON_INTERPRET"),
        )

    def cache_path(self) -> Path:
        """The folder for what fusedops stores (not created by this call)."""
        if self.cache_dir is not None:
            return self.cache_dir
        import platformdirs

        return Path(platformdirs.user_cache_dir("fusedops", appauthor=False))

    def record_path(self) -> Path:
        """The file that recorded problems are appended to (not created by this call)."""
        return self.record_file or self.cache_path() / "recorded.jsonl"


_Name = TypeVar("_Name", bound=str)


def _one_of(env: Mapping[str, str], name: str, names: tuple[_Name, ...]) -> _Name:
    """The first of the names where the variable is empty."""
    value = env.get(name, "").strip().lower()
    for known in names:
        if value in (known, ""):
            return known
    raise ValueError(f"{name} must be one of {', '.join(names)}; got {value!r}")


def _path(env: Mapping[str, str], name: str) -> Path | None:
    value = env.get(name, "").strip()
    return _absolute(name, value) if value else None


def _absolute(name: str, value: str) -> Path:
    """Where a process goes later does not matter."""
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError as error:  # ~nobody
        raise ValueError(f"{name}: {value!r}: {error}") from None


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ValueError(f"{name} must be 1 or 0; got {value!r}")


SETTINGS = Settings.from_environment()
