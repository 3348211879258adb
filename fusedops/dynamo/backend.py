"""The backend of torch.compile that puts fusedops' operators into a graph and hands it on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import entry_points
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from fusedops.dynamo.attention import replace_attentions
from fusedops.dynamo.linears import replace_linears
from fusedops.dynamo.norms import replace_norms
from fusedops.dynamo.report import LOG, Entry, Report
from fusedops.dynamo.rewriting import Rewriter

_last: Report | None = None


def backend(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    inner: str | Callable[..., Any] = "inductor",
) -> Callable[..., Any]:
    """Backend of :func:`torch.compile`: :func:`fuse`, then the backend that computes the rest.

    ``torch.compile(model, backend="fusedops")`` finds it by its entry point where fusedops is installed, and elsewhere
    once this module was imported; ``backend=fusedops.dynamo.backend`` always.

    Args:
        graph, example_inputs: from torch.compile.
        mode: of Inductor, such as ``"max-autotune"``: ``torch.compile``'s argument of this name.
        options: of Inductor: ``torch.compile``'s argument of this name. ``{"inner": ...}`` in it gives ``inner``.
        inner: which backend gets the graph: a name or a function. ``mode`` and other options are Inductor's alone.

    Returns:
        The compiled graph.

    Raises:
        ValueError: ``mode`` or options are given for another backend than Inductor.

    Examples:
        >>> import torch, fusedops.dynamo
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        >>> compiled = torch.compile(mlp, backend="fusedops", options={"inner": "eager"})
        >>> compiled(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """
    options = dict(options or {})
    inner = options.pop("inner", inner)
    if inner != "inductor" and (mode or options):
        raise ValueError(f"mode and options are Inductor's: they cannot be given with inner={inner!r}")
    fuse(graph)
    if inner != "inductor":
        from torch._dynamo.backends.registry import lookup_backend

        compiled: Callable[..., Any] = lookup_backend(inner)(graph, list(example_inputs))
        return compiled
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = (list_mode_options(mode) if mode else {}) | {key.replace("-", "_"): v for key, v in options.items()}
    return compile_fx(graph, example_inputs, config_patches=patches)  # type: ignore[return-value]


def fuse(graph: GraphModule) -> Report:
    """Replace, in place, what fusedops computes in a graph of torch's functions by calls of fusedops.

    Only what is provably the same is replaced, and only where the kernels serve the call: on a GPU that they know. The
    rest stays, and the report says why. The graph's nodes must have their fake tensors (``meta["example_value"]``), as
    torch.compile's have.

    Args:
        graph: of calls of torch's functions, as Dynamo hands it to a backend. It is changed.

    Returns:
        What was replaced and what was not; :func:`last_report` gives it again.

    Raises:
        AttributeError: ``graph`` is no :class:`torch.fx.GraphModule`. What is in one never raises: it stays as it is.

    Examples:
        >>> import torch
        >>> from fusedops.dynamo import fuse
        >>> graph = torch.fx.symbolic_trace(torch.nn.functional.relu)  # it has no fake tensors
        >>> print(fuse(graph))
        fusedops: 0 replaced, 0 left
    """
    global _last
    report = Report()
    _fuse(graph, report)
    LOG.info("%s", report)
    _last = report
    return report


def _fuse(graph: GraphModule, report: Report) -> None:
    reason = _unknown_territory(graph)
    if reason:
        report.left.append(Entry("the whole graph", "", "", reason))
        return
    for part in _checkpointed(graph):
        _fuse(part, report)
    before, found = _copied(graph.graph), Report()
    rewriter = Rewriter(graph.graph, found)
    try:
        for replace in (replace_norms, replace_linears, replace_attentions):
            replace(rewriter)
        graph.graph.lint()
    except Exception as error:  # a model must compile whatever its graph looks like
        LOG.warning("a graph is left as it is", exc_info=True)
        graph.graph = before
        found = Report(left=[Entry("the whole graph", "", "", f"{type(error).__name__}: {error}")])
    graph.recompile()
    report.replaced += found.replaced
    report.left += found.left


def _copied(graph: Graph) -> Graph:
    """A copy whose nodes have what Dynamo has attached to them, such as the source of an input."""
    copied = copy.deepcopy(graph)
    for node, twin in zip(graph.nodes, copied.nodes, strict=True):
        for name, value in vars(node).items():
            if name not in vars(twin):
                setattr(twin, name, value)
    return copied


def _checkpointed(graph: GraphModule) -> Iterator[GraphModule]:
    """The graphs that torch.utils.checkpoint computes twice."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.higher_order.tag_activation_checkpoint and node.args[0].op == "get_attr":
            part = graph.get_submodule(node.args[0].target)
            if isinstance(part, GraphModule):
                yield part


def last_report() -> Report | None:
    """What became of the graph that was compiled last.

    Returns:
        The report that :func:`fuse` made of it; None: no graph was compiled.

    Examples:
        >>> import torch
        >>> from fusedops.dynamo import fuse, last_report
        >>> report = fuse(torch.fx.symbolic_trace(torch.nn.functional.relu))
        >>> last_report() is report
        True
    """
    return _last


def _unknown_territory(graph: GraphModule) -> str:
    """Why nothing in a graph may be replaced; "": something may."""
    for node in graph.graph.nodes:
        module = str(getattr(node.target, "__module__", "")) if node.op == "call_function" else ""
        if "functorch" in module:
            return f"{node.name}: the kernels have no derivative under torch.func's transforms"
    return ""


def _register() -> None:
    """Make the name known, where no entry point does: torch refuses a name that is registered twice."""
    from torch._dynamo.backends.registry import _COMPILER_FNS, register_backend

    if "fusedops" not in entry_points(group="torch_dynamo_backends").names and "fusedops" not in _COMPILER_FNS:
        register_backend(backend, name="fusedops")


_register()
