"""Models as a person names them on the command line: ``module:factory``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import PurePath
from typing import Any


def named(name: str, option: str) -> Any:
    """What ``module:attribute`` names; the module is found as ``python -m`` finds it, in the current folder too.

    Args:
        name: the module, a colon, and the attribute, which may have dots.
        option: what the person gave it as, for the message.

    Raises:
        ValueError: there is no such thing.

    Examples:
        >>> named("torch.nn:Identity", "--model").__name__
        'Identity'
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"{option} must be module:factory; got {name!r}{hint(name)}")
    sys.path.insert(0, "")  # as python -m has it
    try:
        value = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{option}: {name}: {error}{hint(name)}") from None
    finally:
        sys.path.remove("")
    return value


def hint(name: str) -> str:
    """What was probably meant by a name that names nothing, to be appended to the error; "" where nobody can tell.

    Examples:
        >>> hint("src/models.py:build"), hint("models.build")
        (' (a module, not a file: src.models:build)', ' (models:build?)')
    """
    module, _, attribute = name.partition(":")
    if module.endswith(".py"):
        dotted = ".".join(PurePath(module.removesuffix(".py")).parts).lstrip("./")
        return f" (a module, not a file: {dotted}:{attribute or 'FACTORY'})"
    if attribute or not name:
        return ""
    package, _, last = name.rpartition(".")
    known = ":" not in name and package.replace(".", "_").isidentifier() and last.isidentifier() and last != "json"
    return f" ({package}:{last}?)" if known else ""


def factory_named(name: str, option: str) -> Callable[[], Any]:
    """The function that ``module:factory`` names; errors as of :func:`named`, and where it cannot be called."""
    value = named(name, option)
    if not callable(value):
        raise ValueError(f"{option}: {name} must be callable; it is a {type(value).__name__}")
    return value
