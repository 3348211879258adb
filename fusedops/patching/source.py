"""A method compiled again from its source, with some of its expressions replaced.

The source is only believed where it compiles to the very code that the class runs. What comes out keeps the method's
globals, defaults, closure, decorators' wrappers, file name and line numbers, so that tracebacks and debuggers show the
lines that were written.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import linecache
import types
from collections.abc import Iterator, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any

_UNUSUAL = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR
_OUTER = "_fusedops_outer"


class _File:
    """The functions defined in a file by their first line, and the names that its top level imports."""

    def __init__(self, tree: ast.Module) -> None:
        self.functions: dict[int, ast.FunctionDef | None] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                # Two on one line: which is meant cannot be told.
                self.functions[line] = None if line in self.functions else node
        self.imports = dict.fromkeys(_imported(tree))


def _imported(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            for alias in child.names:
                yield (alias.asname or alias.name).partition(".")[0]
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.expr)):
            yield from _imported(child)


@functools.lru_cache(maxsize=16)
def _parsed(filename: str, source: str) -> _File | None:
    try:
        return _File(ast.parse(source))
    except (SyntaxError, ValueError):
        return None


def _file(function: FunctionType) -> _File | None:
    filename = function.__code__.co_filename
    source = "".join(linecache.getlines(filename, function.__globals__))
    return _parsed(filename, source) if source else None


def read(function: FunctionType) -> tuple[FunctionType, ast.FunctionDef] | None:
    """The innermost function behind decorators, and its definition; None where its source is not what runs.

    Examples:
        >>> from torch import nn
        >>> function, definition = read(nn.Linear.forward)
        >>> definition.name
        'forward'
    """
    inner = function
    while isinstance(getattr(inner, "__wrapped__", None), FunctionType):
        inner = inner.__wrapped__  # type: ignore[attr-defined]
    code = inner.__code__
    file = _file(inner)
    found = None if file is None or code.co_flags & _UNUSUAL else file.functions.get(code.co_firstlineno)
    if found is None or found.name != code.co_name:
        return None
    definition = copy.deepcopy(found)
    # They have done their work, and are cloned with the function (see _rewrapped).
    definition.decorator_list = []
    made = _compiled(inner, definition, ())
    return (inner, definition) if made is not None and _same_code(made, code) else None


def rebuilt(
    function: FunctionType, inner: FunctionType, definition: ast.FunctionDef, helpers: Mapping[str, Any]
) -> FunctionType | None:
    """``function`` with another definition of the function behind its decorators.

    Args:
        function, inner: what the class holds, and what :func:`read` found behind it.
        definition: the changed definition.
        helpers: names that the definition uses besides the function's own globals, and what they stand for.
    """
    code = _compiled(inner, ast.fix_missing_locations(definition), tuple(helpers))
    if code is None:
        return None
    cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
    cells |= {name: CellType(value) for name, value in helpers.items()}
    if not set(code.co_freevars) <= set(cells):
        return None
    made = FunctionType(
        code,
        inner.__globals__,
        inner.__name__,
        inner.__defaults__,
        tuple(cells[name] for name in code.co_freevars),
    )
    _copy_attributes(inner, made)
    return _rewrapped(function, inner, made)


def _rewrapped(wrapper: FunctionType, inner: FunctionType, made: FunctionType) -> FunctionType | None:
    """The decorators' wrappers around another function: the same code, with that function in their closure."""
    if wrapper is inner:
        return made
    wrapped: FunctionType = wrapper.__wrapped__  # type: ignore[attr-defined]
    content = _rewrapped(wrapped, inner, made)
    closure = wrapper.__closure__ or ()
    holding = [i for i, cell in enumerate(closure) if _holds(cell, wrapped)]
    if content is None or len(holding) != 1:
        return None
    cells = [CellType(content) if i == holding[0] else cell for i, cell in enumerate(closure)]
    clone = FunctionType(wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, tuple(cells))
    _copy_attributes(wrapper, clone)
    clone.__wrapped__ = content  # type: ignore[attr-defined]
    return clone


def _holds(cell: CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # still empty
        return False


def _copy_attributes(source: FunctionType, target: FunctionType) -> None:
    target.__kwdefaults__ = dict(source.__kwdefaults__) if source.__kwdefaults__ else None
    target.__doc__ = source.__doc__
    target.__module__ = source.__module__
    target.__qualname__ = source.__qualname__
    target.__annotations__ = dict(source.__annotations__)
    target.__dict__.update(source.__dict__)


def _compiled(function: FunctionType, definition: ast.FunctionDef, helpers: tuple[str, ...]) -> CodeType | None:
    """The code of a definition, inside a function that has what it reads from enclosing scopes as variables."""
    code = function.__code__
    outer = ast.parse(f"def {_OUTER}():\n    pass")
    (scope,) = (node for node in outer.body if isinstance(node, ast.FunctionDef))
    names = dict.fromkeys((*code.co_freevars, *helpers))
    scope.body = [
        *(ast.Assign(targets=[ast.Name(name, ast.Store())], value=ast.Constant(None)) for name in names),
        definition,
    ]
    # The compiler calls functions of imported names in another way than methods of objects.
    file = _file(function)
    if file is not None and file.imports:
        outer.body.insert(0, ast.Import(names=[ast.alias(name) for name in file.imports if name != "*"]))
    module = ast.fix_missing_locations(outer)
    futures = code.co_flags & _FUTURES
    try:
        compiled = compile(module, code.co_filename, "exec", flags=futures, dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    (enclosing,) = (c for c in compiled.co_consts if isinstance(c, CodeType) and c.co_name == _OUTER)
    found = [c for c in enclosing.co_consts if isinstance(c, CodeType) and c.co_name == definition.name]
    if len(found) != 1:
        return None
    return found[0].replace(co_firstlineno=code.co_firstlineno, **_qualified(code))


def _qualified(code: CodeType) -> dict[str, Any]:
    return {"co_qualname": code.co_qualname} if hasattr(code, "co_qualname") else {}


def _future_flags() -> int:
    import __future__

    flags = 0
    for name in __future__.all_feature_names:
        flags |= getattr(__future__, name).compiler_flag
    return flags


_FUTURES = _future_flags()

_COMPARED = (
    "co_code",
    "co_names",
    "co_varnames",
    "co_cellvars",
    "co_freevars",
    "co_argcount",
    "co_posonlyargcount",
    "co_kwonlyargcount",
    "co_name",
)
# Set for any function inside another one, as ours is while it is compiled.
_NESTED = inspect.CO_NESTED


def _same_code(one: CodeType, other: CodeType) -> bool:
    if any(getattr(one, name) != getattr(other, name) for name in _COMPARED):
        return False
    if (one.co_flags ^ other.co_flags) & ~_NESTED or len(one.co_consts) != len(other.co_consts):
        return False
    for a, b in zip(one.co_consts, other.co_consts, strict=True):
        if type(a) is not type(b):
            return False
        same = _same_code(a, b) if isinstance(a, types.CodeType) else repr(a) == repr(b)
        if not same:
            return False
    return True


def methods_of(kind: type, stop: type) -> dict[str, FunctionType]:
    """The plain methods of a class that instances run: overridden ones are left out, and what ``stop`` defines.

    Args:
        stop: the base class with which to end.
    """
    methods: dict[str, FunctionType] = {}
    seen: set[str] = set()
    for base in kind.__mro__:
        if base is stop:
            break
        for name, value in vars(base).items():
            if name not in seen:
                seen.add(name)
                if isinstance(value, FunctionType) and not name.startswith("__"):
                    methods[name] = value
    return methods


def names_in(function: Any) -> frozenset[str]:
    """Names of globals and attributes in the code of a function, behind its decorators, and of those inside it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    names: set[str] = set()
    waiting = [] if code is None else [code]
    while waiting:
        code = waiting.pop()
        names.update(code.co_names)
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(names)


def resolve(function: FunctionType, node: ast.expr) -> Any:
    """What a name or a dotted name of modules stands for in a function's globals; None where that is not certain.

    Examples:
        >>> import ast, torch
        >>> def f(x):
        ...     return torch.relu(x)
        >>> resolve(f, ast.parse("torch.nn.functional.relu", mode="eval").body) is torch.nn.functional.relu
        True
    """
    if isinstance(node, ast.Name):
        code = function.__code__
        if node.id in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            return None
        return function.__globals__.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = resolve(function, node.value)
        return getattr(owner, node.attr, None) if isinstance(owner, types.ModuleType) else None
    return None
