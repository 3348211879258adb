"""Replacing a matched part of a graph by one call, after everything has been checked that could make a difference."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from fusedops.dynamo.graph import Left, border_between, known, same_sizes, value_of
from fusedops.dynamo.report import LOG, Entry, Report, place_of
from fusedops.runtime.backend import explain


@dataclass(frozen=True)
class Made:
    """An argument that the graph does not have yet: a function of torch's and its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass
class Match:
    """A part of a graph and the call that can stand for it.

    Attributes:
        what: the part, in words.
        function, args, kwargs: a public function of fusedops; arguments are nodes, constants and :class:`Made`.
        outputs: the nodes whose values the call gives: one, or as many as the function returns. The last in the
            graph is where the call will stand.
        inside: the other nodes, which the call makes unnecessary. Nobody else may use them.
        spare: nodes before, such as casts, that the call makes unnecessary as well, but which others may use.
        after: nodes that change a shape alone, done again with the call's result; the last is the output.
    """

    what: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Node, ...]
    inside: Sequence[Node]
    spare: Sequence[Node] = ()
    after: Sequence[Node] = ()
    root: Node = field(init=False)

    def __post_init__(self) -> None:
        self.root = self.outputs[0]


class Rewriter:
    """Rewrites one graph, with the autocast contexts that its nodes stand in."""

    def __init__(self, graph: Graph, report: Report) -> None:
        self.graph = graph
        self.report = report
        self.gone: set[Node] = set()
        self._autocasts = _autocasts(graph)

    def nodes(self) -> Iterator[Node]:
        """The graph's nodes in their order, without those that were erased meanwhile."""
        for node in list(self.graph.nodes):
            if node not in self.gone:
                yield node

    def leave(self, what: str, function: str, node: Node, reason: str) -> None:
        entry = Entry(what, function, place_of(node), reason)
        self.report.left.append(entry)
        LOG.info("left: %s", entry)

    def replace(self, match: Match) -> None:
        """Put the call in the match's place.

        Raises:
            Left: it would, or could, make a difference, or no kernel serves it. The graph is as it was.
        """
        self._check_nodes(match)
        fakes = _Fakes(self._autocasts[match.root])
        args, kwargs = fakes.of(match.args), fakes.of(match.kwargs)
        try:
            with fakes.context():
                explanation = explain(match.function, *args, **kwargs)
                if explanation.backend != "triton":
                    raise Left("; ".join(explanation.reasons))
                results = match.function(*args, **kwargs)
        except (
            TypeError,
            ValueError,
            RuntimeError,
        ) as error:  # arguments that torch's function takes and ours does not
            raise Left(str(error)) from error
        results = results if isinstance(results, tuple) else (results,)
        orders = [] if match.after else [_same_tensor(r, n) for r, n in zip(results, match.outputs, strict=True)]
        with self.graph.inserting_before(match.root):
            self._insert(match, results, orders, fakes)
        entry = Entry(match.what, f"fusedops.{match.function.__name__}", place_of(match.root))
        self.report.replaced.append(entry)
        LOG.info("replaced: %s", entry)

    def _check_nodes(self, match: Match) -> None:
        own = {*match.inside, *match.outputs, *match.after}
        for node in match.inside:
            if not node.users.keys() <= own:
                raise Left(f"{node.name}, which would no longer be computed, is used elsewhere")
        if not own.isdisjoint(_nodes_in((match.args, match.kwargs))):
            raise Left("an argument of the call would be what it computes")
        waiting = {*own, *match.spare} - {match.root}
        first = match.root
        while waiting:
            first = first.prev
            waiting.discard(first)
        border = border_between(first, match.root, own)
        if border is not None:
            raise Left(f"{border.name} stands in between, and may change a tensor or how operations are recorded")
        gone = {*own, *match.spare}
        for node in match.outputs[1:]:
            early = [u for u in node.users if u not in own and u < match.root and not _dies(u, match.spare, gone)]
            if early:
                raise Left(f"{node.name} is used before the call that computes it would stand")

    def _insert(self, match: Match, results: Sequence[Any], orders: list[list[int] | None], fakes: _Fakes) -> None:
        def emit(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Node:
            node = self.graph.call_function(function, args, kwargs)
            node.meta = {key: value for key, value in match.root.meta.items() if key in _KEPT}
            node.meta["example_value"] = value
            self._autocasts[node] = self._autocasts[match.root]
            return node

        def argument(value: Any) -> Any:
            if isinstance(value, Made):
                return emit(value.function, argument(value.args), {}, fakes.of(value))
            return tuple(map(argument, value)) if isinstance(value, tuple) else value

        args = tuple(map(argument, match.args))
        kwargs = {key: argument(value) for key, value in match.kwargs.items()}
        whole = emit(match.function, args, kwargs, tuple(results) if len(results) > 1 else results[0])
        parts = [whole]
        if len(results) > 1:
            parts = [emit(operator.getitem, (whole, i), {}, result) for i, result in enumerate(results)]
        if match.after:
            part = parts[0]
            for shaping in match.after:
                copied = {source: source for source in shaping.all_input_nodes} | {shaping.args[0]: part}
                part = self.graph.node_copy(shaping, copied.__getitem__)
                self._autocasts[part] = self._autocasts[match.root]
            parts = [part]
        for i, order in enumerate(orders):
            if order is not None:
                inverse = sorted(range(len(order)), key=order.__getitem__)
                value = value_of(match.outputs[i])
                part = emit(torch.permute, (parts[i], tuple(order)), {}, None)
                part = emit(torch.clone, (part,), {"memory_format": torch.contiguous_format}, None)
                parts[i] = emit(torch.permute, (part, tuple(inverse)), {}, value)
        for node, part in zip(match.outputs, parts, strict=True):
            node.replace_all_uses_with(part)
        self._erase([*match.outputs, *match.after, *match.inside, *match.spare])

    def _erase(self, nodes: Sequence[Node]) -> None:
        """Erase those that nobody uses."""
        waiting = dict.fromkeys(node for node in nodes if node not in self.gone)
        while unused := [node for node in waiting if not node.users]:
            for node in unused:
                del waiting[node]
                self.gone.add(node)
                self.graph.erase_node(node)


def _nodes_in(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, Made):
        yield from _nodes_in(value.args)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _nodes_in(item)
    elif isinstance(value, dict):
        yield from _nodes_in(tuple(value.values()))


def _dies(user: Node, spare: Sequence[Node], gone: set[Node]) -> bool:
    """Whether a node will be erased with the rest, as nobody else uses it."""
    return user in spare and all(u in gone and (u not in spare or _dies(u, spare, gone)) for u in user.users)


_KEPT = ("stack_trace", "nn_module_stack", "source_fn_stack")


class _Fakes:
    """Arguments as the fake tensors that stand for them, and the modes in which to compute with them."""

    def __init__(self, autocasts: tuple[Any, ...]) -> None:
        self._autocasts = autocasts
        self._mode: Any = None

    def of(self, value: Any) -> Any:
        if isinstance(value, Node):
            fake = value_of(value)
            if fake is None:
                raise Left(f"{value.name} is no plain tensor")
            self._mode = self._mode or getattr(fake, "fake_mode", None)
            return fake
        if isinstance(value, Made):
            args = self.of(value.args)
            with self.context():
                return value.function(*args)
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.of, value))
        if isinstance(value, dict):
            return {key: self.of(item) for key, item in value.items()}
        return value

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._mode is not None:
                stack.enter_context(self._mode)
            for args in self._autocasts:
                stack.enter_context(torch.autocast(*args))
            yield


def _same_tensor(result: torch.Tensor, node: Node) -> list[int] | None:
    """Check that a result is like the node's value in all but its numbers.

    Returns:
        None; or, where the strides differ, the dimensions in the order in which the value has them in memory, the
        outermost first: a copy in that order has the value's strides.

    Raises:
        Left: shape, dtype or device differ, or the strides in a way that no copy mends.
    """
    value = value_of(node)
    if value is None:
        raise Left(f"{node.name} is no plain tensor")
    if result.dtype != value.dtype or result.device != value.device or not same_sizes(result.shape, value.shape):
        raise Left(f"the result would be {_words(result)}; it is {_words(value)}")
    if same_sizes(result.stride(), value.stride()) or known(value.numel() == 0):
        return None
    # Where sizes are symbols, those of this call order them; whether that is right is then asked of the symbols.
    order = sorted(range(value.dim()), key=lambda i: (-_hint(value.stride(i)), -_hint(value.shape[i]), i))
    stride: Any = 1
    for i in reversed(order):
        if not known(value.stride(i) == stride):
            raise Left("the result would lie in memory in another way than it does")
        stride = stride * value.shape[i]
    return order


def _hint(size: Any) -> int:
    if type(size) is int:
        return size
    if not size.node.has_hint():  # it depends on a tensor's values
        raise Left("the order in which the result lies in memory is not known")
    return int(size.node.hint)


def _words(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}".replace("torch.", "")


def _autocasts(graph: Graph) -> dict[Node, tuple[Any, ...]]:
    """The arguments of the autocast contexts that are open at each node, the innermost last."""
    found: dict[Node, tuple[Any, ...]] = {}
    stack: list[tuple[Node, Any]] = []
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == "_enter_autocast":
            stack.append((node, node.args))
        elif name == "_exit_autocast":
            stack = [(entered, args) for entered, args in stack if entered is not node.args[0]]
        found[node] = tuple(args for _, args in stack)
    return found
