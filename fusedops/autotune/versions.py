"""What a timing was made with, and what would be used here: found without a driver, and without importing Triton."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch

from fusedops.autotune.operator import Operator
from fusedops.runtime.launch import options

# Keys of Entry.versions.
VERSIONS = ("fusedops", "triton", "torch", "platform", "driver", "kernels", "fp_fusion")


def current_versions(operator: Operator) -> dict[str, str | None]:
    """What an operator's kernels would be compiled from and with in this process; None: there is none, or none is told.

    Keys: ``fusedops``, ``triton`` and ``torch`` (versions), ``platform`` ("cuda 12.8", "rocm 6.4" or "none": what torch
    was built for), ``driver`` (the kernel driver's version, where Linux shows it in a file), ``kernels`` (a hash of the
    source, :func:`kernels_hash`), ``fp_fusion`` ("on" or "off").

    Examples:
        >>> from fusedops.autotune.operator import operator_named
        >>> sorted(current_versions(operator_named("norm")))
        ['driver', 'fp_fusion', 'fusedops', 'kernels', 'platform', 'torch', 'triton']
    """
    return {**_installed(), "kernels": kernels_hash(operator.sources)}


@lru_cache(maxsize=1)
def _installed() -> dict[str, str | None]:
    return {
        "fusedops": _release(),
        "triton": triton_version(),
        "torch": torch.__version__,
        "platform": _platform(),
        "driver": _driver(),
        "fp_fusion": "on" if options(1)["enable_fp_fusion"] else "off",
    }


def triton_version() -> str | None:
    """The version of the Triton that is imported, or that would be; None where there is none.

    Importing it takes long, and its distributions have several names: the module's own text tells.
    """
    if "triton" in sys.modules:
        version = getattr(sys.modules["triton"], "__version__", None)
        return str(version) if version else None
    try:
        source = _source("triton")
    except ModuleNotFoundError:
        return None
    for statement in ast.parse(source or "").body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="__version__")], value=ast.Constant(value=str(version))):
                return version
    return None


def _platform() -> str:
    for name, version in (("cuda", torch.version.cuda), ("rocm", torch.version.hip)):
        if version:
            return f"{name} {minor(version)}"
    return "none"


def _driver() -> str | None:
    module = "nvidia" if torch.version.cuda else "amdgpu" if torch.version.hip else None
    if module is None:
        return None
    try:
        return Path(f"/sys/module/{module}/version").read_text().strip()[:64] or None
    except (OSError, ValueError):
        return None


def minor(version: str | None) -> str | None:
    """Major and minor number of a version.

    Examples:
        >>> minor("3.9.0"), minor("6.4.43482-0f2d60242"), minor(None)
        ('3.9', '6.4', None)
    """
    return None if version is None else ".".join(version.split("+")[0].split(".")[:2])


@lru_cache(maxsize=256)
def kernels_hash(sources: tuple[str, ...]) -> str:
    """A hash of the code of kernel modules and of the kernel modules that they import; computed once a process.

    A kernel module has a part of its name that begins with "kernels", and is followed into where it is of the same
    package. Comments, blank lines and docstrings do not count. The modules are read, not imported.

    Args:
        sources: names of modules.

    Raises:
        ModuleNotFoundError: there is no module of such a name.
    """
    found: dict[str, str] = {}
    waiting = list(sources)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name], imported = _code_and_imports(name)
            waiting += imported
    digest = hashlib.sha256()
    for name, code in sorted(found.items()):
        digest.update(f"{name} {len(code)}\n{code}\n".encode())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=256)
def _code_and_imports(name: str) -> tuple[str, tuple[str, ...]]:
    source = _source(name)
    if source is None:  # shipped as bytecode alone: all that is known of the module is its release
        return f"release {_release()}", ()
    return code_of(source), tuple(_imported_kernels(source, name))


def _release() -> str:
    from fusedops import __version__

    return __version__


class _Loader(Protocol):
    def get_source(self, fullname: str) -> str | None: ...


def _source(name: str) -> str | None:
    """The text of a module, which is not imported for it; the packages around it are."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    loader: _Loader = spec.loader  # type: ignore[assignment]
    try:
        return loader.get_source(name)
    except (AttributeError, ImportError, OSError):
        return None


_NO_CODE = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)


def code_of(source: str) -> str:
    """A module's text without comments, blank lines and docstrings.

    It is made of lines of the text, so that it is the same whichever Python reads it: syntax trees and tokens are not.
    """
    lines = source.split("\n")
    tokens_on: Counter[int] = Counter()
    comments: dict[int, int] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        (row, column), (last, _) = token.start, token.end
        if token.type == tokenize.COMMENT:
            comments[row] = column
        elif token.type not in _NO_CODE:
            tokens_on.update(range(row, last + 1))
    rows = set(tokens_on)
    for first, last in _docstrings(ast.parse(source)):
        alone = all(tokens_on[row] == 1 for row in range(first, last + 1))
        rows -= set(range(first, last + 1)) if alone else set()
    return "\n".join(lines[row - 1][: comments.get(row)].rstrip() for row in sorted(rows))


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """First and last line of each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str())) as text, *_]:
                    yield text.lineno, text.end_lineno or text.lineno


def _imported_kernels(source: str, importer: str) -> Iterator[str]:
    """Names of the kernel modules of its own package that a module imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _holds_kernels(alias.name, importer))
        elif isinstance(node, ast.ImportFrom):
            parent = importer.split(".")[: -node.level] if node.level else []
            module = ".".join([*parent, *filter(None, [node.module])])
            if module.split(".")[0] != importer.split(".")[0]:
                continue
            spec = importlib.util.find_spec(module)
            if spec is None or spec.submodule_search_locations is None:  # no package: what is imported are its members
                names = [module]
            else:
                inside = (f"{module}.{alias.name}" for alias in node.names)
                names = [name for name in inside if _holds_kernels(name, importer) and importlib.util.find_spec(name)]
            yield from (name for name in names if _holds_kernels(name, importer))


def _holds_kernels(module: str, importer: str) -> bool:
    package, *parts = module.split(".")
    return package == importer.split(".")[0] and any(part.startswith("kernels") for part in parts)
