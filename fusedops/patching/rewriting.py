"""Methods of a class rewritten to call fusedops: linear layers with activations, gated ones, and torch's functions.

Three forms are looked for in a method ``f(self, ...)``, in nested calls and over consecutive assignments alike:

* a *chain*, calls of the module's parts one inside the other, ``self.act(self.fc1(x))``,
* a *gate*, ``self.act(self.gate(x)) * self.up(x)``, or with both in one linear layer, ``gate, up =
  self.gate_up(x).chunk(2, dim=-1)`` and ``self.act(gate) * up``,
* a call of one of torch's functions that fusedops has too, such as ``F.scaled_dot_product_attention(...)``.

They are replaced by calls of helpers, which look at the parts each time and compute what was written wherever a part is
not one that may be fused. All else in the method stays.
"""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
from torch import nn

from fusedops.patching import source
from fusedops.patching.activations import Function

# A part of a chain: the attribute of the module that is called ("mlp.fc1"), or a function.
Link = str | Function
_METHODS = ("relu", "sigmoid", "tanh")


@dataclass(frozen=True, slots=True)
class Gate:
    """``activation(gate(x)) * up(x)``. ``up`` is None where ``gate`` holds both, and is cut in two.

    Attributes:
        order: in which the three are called: "gau" is gate, activation, up. Where one layer holds both factors: "ga"
            if the activated one comes first in it, "ag" if second.
    """

    gate: str
    activation: Link
    up: str | None
    order: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one of torch's functions.

    Attributes:
        name: of the function, as fusedops has it.
        condition: the attribute of the module that has to be true, or with "not " before it false, for the call to be
            reached; None: no such condition was found.
    """

    name: str
    condition: str | None


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A method's new function, and what was found in it."""

    function: FunctionType
    chains: tuple[tuple[Link, ...], ...]
    gates: tuple[Gate, ...]
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Helpers:
    """What the rewritten methods call.

    Attributes:
        chain: ``chain(x, (part, ...))`` applies the parts in turn.
        gated: ``gated(x, gate, activation, up, order)`` is ``activation(gate(x)) * up(x)``, see :class:`Gate`.
        halved: ``halved(x, gate, activation, order)`` is that with both layers in ``gate``.
        functions: by torch's function, its name and ours.
    """

    chain: Callable[..., Any]
    gated: Callable[..., Any]
    halved: Callable[..., Any]
    functions: Mapping[Any, tuple[str, Callable[..., Any]]]


# --- Expressions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Value:
    """A local variable at the beginning of the statements looked at."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class _Other:
    """Any other expression, evaluated once."""

    node: ast.expr


@dataclass(frozen=True, slots=True)
class _Applied:
    """``link(value)``. ``node`` is the expression of what is called; ``turn`` is higher for a later call."""

    link: Link
    value: Any
    node: ast.expr | None = field(default=None, compare=False)
    turn: int = field(default_factory=itertools.count().__next__, compare=False)


@dataclass(frozen=True, slots=True)
class _Half:
    """One of the two halves of the last dimension."""

    value: Any
    first: bool


@dataclass(frozen=True, slots=True)
class _Gated:
    gate: Gate
    value: Any
    nodes: tuple[ast.expr | None, ...] = field(default=(), compare=False)


_Environment = dict[str, Any]


class _Method:
    """The search in one method. ``made`` is filled, and the definition changed, as forms are found."""

    def __init__(self, function: FunctionType, definition: ast.FunctionDef, helpers: Helpers) -> None:
        self.function = function
        self.definition = definition
        self.helpers = helpers
        self.owner = definition.args.args[0].arg if definition.args.args else ""
        self.made: dict[str, Any] = {}
        self.emitted: dict[ast.Call, tuple[Link, ...] | Gate] = {}
        self.calls: list[Call] = []
        # What assignments that were rewritten already stand for.
        self.values: dict[ast.stmt, _Environment] = {}
        self.kept = _kept_names(definition)
        self.loads = Counter(node.id for node in _loads(definition))

    def rewrite(self) -> None:
        self._block(self.definition, self.kept is not None)

    # Statements

    def _block(self, node: ast.AST, merging: bool) -> None:
        # In a try statement, what was assigned before something is raised may be read.
        merging = merging and not isinstance(node, ast.Try)
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                setattr(node, name, self._statements(statements, merging))
        for handler in getattr(node, "handlers", ()):
            self._block(handler, False)

    def _statements(self, statements: list[ast.stmt], merging: bool) -> list[ast.stmt]:
        """The block with the forms in it replaced.

        Args:
            merging: whether an assignment may be taken up by a statement after it.
        """
        done: list[ast.stmt] = []
        waiting: list[ast.stmt] = []
        for statement in statements:
            for start in range(len(waiting) + 1):
                taken = waiting[start:]
                if self._merged(taken, statement):
                    del waiting[start:]
                    break
            if isinstance(statement, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
                self._block(statement, merging)
            if merging and self._definition(statement, self._known(waiting)) is not None:
                waiting.append(statement)
            else:
                done += [*waiting, statement]
                waiting = []
        return done + waiting

    def _known(self, statements: list[ast.stmt]) -> _Environment:
        known: _Environment = {}
        for statement in statements:
            known |= self._definition(statement, known) or {}
        return known

    def _definition(self, statement: ast.stmt, known: _Environment) -> _Environment | None:
        """What a plain assignment defines; None for any other statement."""
        if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
            return None
        target = statement.targets[0]
        elements = target.elts if isinstance(target, ast.Tuple) else [target]
        names = [element.id for element in elements if isinstance(element, ast.Name)]
        if len(set(names)) != len(elements) or self.kept is None or not self.kept.isdisjoint(names):
            return None
        if statement in self.values:
            found = {name: _substituted(value, known) for name, value in self.values[statement].items()}
            return None if None in found.values() else found
        if isinstance(target, ast.Name):
            value = self._read(statement.value, known)
            return None if value is None or isinstance(value, _Value) else {target.id: value}
        whole = self._halves(statement.value, known) if len(names) == 2 else None
        return None if whole is None else {names[0]: _Half(whole, True), names[1]: _Half(whole, False)}

    def _merged(self, taken: list[ast.stmt], statement: ast.stmt) -> bool:
        """Replace a form in ``statement`` that uses up every assignment in ``taken``; these are then to be dropped."""
        known: _Environment = {}
        uses: dict[str, int] = {}
        for assignment in taken:
            found = self._definition(assignment, known)
            if found is None or not _used_once(uses, assignment, found):
                return False
            known |= found
        for holder, name, index in _expressions(statement):
            place = getattr(holder, name) if index is None else getattr(holder, name)[index]
            value = self._read(place, known)
            if value is None or isinstance(value, (_Value, _Half)):
                continue
            if taken:
                # Each value that was assigned is used once, by now or here; what is left under its name nobody reads.
                inside = dict(uses)
                if not _used_once(inside, place, known) or not _comes_first(statement, place):
                    continue
                here = {*_loads(place)}
                if any(n.id in known for n in _loads(statement) if n not in here):
                    continue
                if not all(self._dead(name, [*taken, statement]) for name in known):
                    continue
            new = self._emit(value)
            if new is None:
                continue
            ast.copy_location(new, place)
            if holder is statement and isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                self.values[statement] = {statement.targets[0].id: value}
            if index is None:
                setattr(holder, name, new)
            else:
                getattr(holder, name)[index] = new
            self._merged([], statement)  # there may be more of them in one statement
            return True
        return False

    def _dead(self, name: str, statements: list[ast.stmt]) -> bool:
        """Whether nothing after these statements reads what they have assigned to the name before the last of them."""
        last = statements[-1]
        if isinstance(last, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in last.targets):
            return True
        if isinstance(last, ast.Return):
            return True
        return sum(n.id == name for s in statements for n in _loads(s)) == self.loads[name]

    # Expressions

    def _read(self, node: ast.expr, known: _Environment) -> Any:
        """The expression in the terms above; None where it has another form."""
        if isinstance(node, ast.Name):
            return None if node.id == self.owner else known.get(node.id, _Value(node.id))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return self._product(self._read(node.left, known), self._read(node.right, known))
        if not isinstance(node, ast.Call):
            return None
        method = node.func
        if isinstance(method, ast.Attribute) and not node.args and not node.keywords and method.attr in _METHODS:
            value = self._read(method.value, known)
            function = getattr(torch, method.attr)
            return None if value is None else _Applied(Function(function, {}), value)
        if len(node.args) != 1 or isinstance(node.args[0], ast.Starred):
            return None
        link = self._link(node)
        if link is None:
            return None
        value = self._read(node.args[0], known) or self._other(node.args[0], known)
        return None if value is None else _Applied(link, value, node.func if isinstance(link, str) else None)

    @staticmethod
    def _other(node: ast.expr, known: _Environment) -> _Other | None:
        bound = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
        if any(isinstance(n, bound) for n in ast.walk(node)) or any(n.id in known for n in _loads(node)):
            return None
        return _Other(node)

    def _link(self, node: ast.Call) -> Link | None:
        path = self._attribute(node.func)
        if path is not None:
            return None if node.keywords else path
        function = source.resolve(self.function, node.func)
        if not callable(function) or isinstance(function, type):
            return None
        kwargs = {}
        for keyword in node.keywords:
            if keyword.arg not in ("approximate", "inplace") or not isinstance(keyword.value, ast.Constant):
                return None
            kwargs[keyword.arg] = keyword.value.value
        made = Function(function, kwargs)
        return made if made.name else None

    def _attribute(self, node: ast.expr) -> str | None:
        """``fc1`` of ``self.fc1``, ``mlp.fc1`` of ``self.mlp.fc1``."""
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if names and isinstance(node, ast.Name) and node.id == self.owner:
            return ".".join(reversed(names))
        return None

    def _halves(self, node: ast.expr, known: _Environment) -> Any:
        """What is cut in ``value.chunk(2, dim=-1)`` or ``torch.chunk(value, 2, dim=-1)``; None: something else."""
        if not isinstance(node, ast.Call):
            return None
        if source.resolve(self.function, node.func) is torch.chunk and node.args:
            cut, *rest = node.args
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "chunk":
            cut, rest = node.func.value, node.args
        else:
            return None
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        values = [*rest, *(named.pop(name) for name in ("chunks", "dim")[len(rest) :] if name in named)]
        try:
            usual = not named and [ast.literal_eval(value) for value in values] == [2, -1]
        except ValueError:
            usual = False
        value = self._read(cut, known) if usual else None
        return value if isinstance(value, _Applied) and isinstance(value.link, str) else None

    @staticmethod
    def _product(left: Any, right: Any) -> _Gated | None:
        for activated, other in ((left, right), (right, left)):
            if not isinstance(activated, _Applied):
                continue
            inner = activated.value
            if isinstance(inner, _Half) and isinstance(other, _Half):
                whole = inner.value
                if whole == other.value and inner.first != other.first:
                    gate = Gate(whole.link, activated.link, None, "ga" if inner.first else "ag")
                    return _Gated(gate, whole.value, (whole.node, activated.node))
            elif (
                isinstance(inner, _Applied)
                and isinstance(inner.value, _Value)
                and isinstance(inner.link, str)
                and isinstance(other, _Applied)
                and isinstance(other.link, str)
                and other.value == inner.value
            ):
                turns = sorted([(inner.turn, "g"), (activated.turn, "a"), (other.turn, "u")])
                gate = Gate(inner.link, activated.link, other.link, "".join(letter for _, letter in turns))
                return _Gated(gate, inner.value, (inner.node, activated.node, other.node))
        return None

    # What replaces them

    def _emit(self, value: Any) -> ast.expr | None:
        """The call of a helper for a form; None where it is none."""
        links: list[_Applied] = []
        while isinstance(value, _Applied):
            links.append(value)
            value = value.value
        links.reverse()
        if isinstance(value, (_Value, _Other)) and len(links) > 1:
            start = _input(value)
        elif isinstance(value, _Gated) and isinstance(value.value, (_Value, _Other)):
            start = self._emit_gate(value)
        else:
            return None
        if len(links) > 1:
            parts = ast.Tuple([self._callee(a.link, a.node) for a in links], ast.Load())
            call = self._helper("_fusedops_chain", self.helpers.chain, start, parts)
            self.emitted[call] = tuple(applied.link for applied in links)
            return call
        return ast.Call(self._callee(links[0].link, links[0].node), [start], []) if links else start

    def _emit_gate(self, value: _Gated) -> ast.expr:
        gate = value.gate
        links = [link for link in (gate.gate, gate.activation, gate.up) if link is not None]
        parts = map(self._callee, links, value.nodes)
        name, function = ("gated", self.helpers.gated) if gate.up else ("halved", self.helpers.halved)
        call = self._helper(f"_fusedops_{name}", function, _input(value.value), *parts, ast.Constant(gate.order))
        self.emitted[call] = gate
        return call

    def _helper(self, name: str, function: Any, *args: ast.expr) -> ast.Call:
        self.made[name] = function
        return ast.Call(ast.Name(name, ast.Load()), list(args), [])

    def _callee(self, link: Link, node: ast.expr | None) -> ast.expr:
        if node is not None:
            return node
        name = f"_fusedops_function{len(self.made)}"
        self.made[name] = link
        return ast.Name(name, ast.Load())

    # Calls of torch's functions

    def replace_calls(self) -> None:
        self._calls(self.definition, None)

    def _calls(self, node: ast.AST, condition: str | None) -> None:
        if isinstance(node, (ast.If, ast.IfExp)):
            self._calls(node.test, condition)
            path, negated = self._flag(node.test)
            positive, negative = (None, None) if path is None else (path, f"not {path}")
            if negated:
                positive, negative = negative, positive
            for branch, name in ((node.body, positive), (node.orelse, negative)):
                for part in branch if isinstance(branch, list) else [branch]:
                    self._calls(part, condition if name is None else name)
            return
        if isinstance(node, ast.Call):
            function = source.resolve(self.function, node.func)
            try:
                own = self.helpers.functions.get(function)
            except TypeError:
                own = None
            if own is not None:
                name = f"_fusedops_{own[0]}"
                self.made[name] = own[1]
                self.calls.append(Call(own[0], condition))
                node.func = ast.copy_location(ast.Name(name, ast.Load()), node.func)
        for child in ast.iter_child_nodes(node):
            self._calls(child, condition)

    def _flag(self, test: ast.expr) -> tuple[str | None, bool]:
        negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        return self._attribute(test.operand if isinstance(test, ast.UnaryOp) and negated else test), negated


def _input(value: _Value | _Other) -> ast.expr:
    return value.node if isinstance(value, _Other) else ast.Name(value.name, ast.Load())


def _substituted(value: Any, known: _Environment) -> Any:
    """A value in which variables stand for what they are known to be; None where that cannot be."""
    if isinstance(value, _Value):
        return known.get(value.name, value)
    if isinstance(value, _Other):
        return None if any(n.id in known for n in _loads(value.node)) else value
    inner = _substituted(value.value, known)
    if inner is None or (isinstance(value, _Gated) and not isinstance(inner, (_Value, _Other))):
        return None
    # Made anew, as its turn comes after that of what it is applied to.
    return _Applied(value.link, inner, value.node) if isinstance(value, _Applied) else replace(value, value=inner)


_READS_FRAMES = frozenset({"locals", "vars", "eval", "exec", "dir", "sys", "inspect"})
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.GeneratorExp)


def _kept_names(definition: ast.FunctionDef) -> frozenset[str] | None:
    """Variables whose every assignment has to stay: somebody may read them elsewhere, or delete them.

    None: that holds for all, as the function looks at its own frame.
    """
    names = {argument.arg for argument in definition.args.args[:1]}
    for node in ast.walk(definition):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del):
            names.add(node.id)
        elif isinstance(node, ast.Name) and node.id in _READS_FRAMES:
            return None
        elif isinstance(node, (ast.AugAssign, ast.NamedExpr)) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            names.update(node.names)
        elif isinstance(node, _SCOPES) and node is not definition:
            names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return frozenset(names)


def _used_once(uses: dict[str, int], node: ast.AST, defined: Iterable[str]) -> bool:
    """Count what ``node`` reads of the values in ``uses``, then begin to count those that it defines.

    False where a value that is replaced by another, or any value in the end, was not read exactly once.
    """
    for name in (n.id for n in _loads(node)):
        if name in uses:
            uses[name] += 1
    if isinstance(node, ast.stmt):
        replaced = [uses[name] for name in defined if name in uses]
        uses.update(dict.fromkeys(defined, 0))
        return all(count == 1 for count in replaced)
    return all(count == 1 for count in uses.values())


def _loads(node: ast.AST) -> Iterator[ast.Name]:
    return (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))


# Expressions whose variables are their own, and those that may not be evaluated.
_INNER = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LAZY = (ast.IfExp, ast.BoolOp, *_INNER)


def _expressions(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Where the expressions of a statement lie, the outer before the inner ones; not those of statements inside it."""
    for name, value in ast.iter_fields(node):
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.expr):
                if not isinstance(child, _INNER) and not isinstance(getattr(child, "ctx", None), ast.Store):
                    yield node, name, index
                    yield from _expressions(child)
            elif isinstance(child, ast.keyword):
                yield from _expressions(child)


def _comes_first(statement: ast.stmt, place: ast.expr) -> bool:
    """Whether nothing else is called before this expression, and it is always reached."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr, ast.If)):
        return False

    def first(node: ast.AST) -> ast.AST | None:
        """The expression looked for, or whatever is called before it."""
        if node is place or isinstance(node, _LAZY):
            return node
        for child in ast.iter_child_nodes(node):
            found = first(child)
            if found is not None:
                return found
        return node if isinstance(node, (ast.Call, ast.Await, ast.Yield, ast.YieldFrom)) else None

    start = statement.test if isinstance(statement, ast.If) else statement
    value: ast.AST | None = start.value if isinstance(start, (ast.Assign, ast.AnnAssign)) else start
    return value is not None and first(value) is place


# --- Classes ---------------------------------------------------------------------------------------------------------

# Base classes of whole models, whose many methods compute nothing of this kind.
_INFRASTRUCTURE = ("transformers.modeling_utils", "transformers.generation", "lightning", "pytorch_lightning")


def rewritten_methods(kind: type[nn.Module], helpers: Helpers) -> tuple[dict[str, Rewritten], frozenset[str]]:
    """The methods of a class in which something was found, and the names of those whose source is not at hand."""
    found, unreadable = {}, set()
    for name, function in source.methods_of(kind, nn.Module).items():
        if (getattr(function, "__module__", None) or "").startswith(_INFRASTRUCTURE):
            continue
        readable = source.read(function)
        if readable is None:
            unreadable.add(name)
            continue
        rewritten = _rewritten(function, *readable, helpers)
        if rewritten is not None:
            found[name] = rewritten
    return found, frozenset(unreadable)


def _rewritten(
    function: FunctionType, inner: FunctionType, definition: ast.FunctionDef, helpers: Helpers
) -> Rewritten | None:
    if not definition.args.args:
        return None
    method = _Method(inner, definition, helpers)
    method.replace_calls()
    method.rewrite()
    if not method.made:
        return None
    made = source.rebuilt(function, inner, method.definition, method.made)
    if made is None:
        return None
    kept = [method.emitted[n] for n in ast.walk(method.definition) if isinstance(n, ast.Call) and n in method.emitted]
    chains = tuple(form for form in kept if isinstance(form, tuple))
    gates = tuple(form for form in kept if isinstance(form, Gate))
    return Rewritten(made, chains, gates, tuple(method.calls))
