"""Search problems that are named, or those that a model meets, and keep what is found."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fusedops.autotune.entries import AutotuneWarning, mismatches
from fusedops.autotune.identity import Identity
from fusedops.autotune.lookup import seeds, store
from fusedops.autotune.modes import look_up_only, mode
from fusedops.autotune.operator import Operator, forget, operator_named, operators
from fusedops.autotune.protocol import Bench
from fusedops.autotune.record import Recorded, distinct
from fusedops.autotune.resolve import collecting
from fusedops.autotune.search import BUDGET_SPENT, Progress, Result, SearchInterrupted, search, unfinished
from fusedops.autotune.workers import Switching
from fusedops.runtime.backend import might_use_triton
from fusedops.runtime.device import device_facts
from fusedops.runtime.settings import SETTINGS

# Seconds that a problem may take.
KEY_BUDGET_S = 20.0

Named = Recorded | tuple[Operator | str, Any]


def tune(
    problems: Iterable[Named | tuple],
    *,
    budget_s: float | None = None,
    key_budget_s: float = KEY_BUDGET_S,
    device: torch.device | str | None = None,
    progress: Callable[[Progress], None] | None = None,
    jobs: int | None = None,
    again: bool = False,
    found: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Search the best launch configuration of each problem on this machine's GPU, and store it.

    Each candidate is compiled, compared with a float32 reference and timed, on inputs of the tuner's own, in a process
    of its own. What is found is stored after every problem: an interruption loses at most the problem at hand, and
    a second call goes on where the first one stopped.

    Args:
        problems: what to search: a family's problems, such as :class:`fusedops.norm.tuning.NormProblem`; or pairs
            (operator or its name, problem); or what :func:`fusedops.autotune.read_recorded` read.
        budget_s: seconds for all of them; None: no limit. Problems that it does not reach have a result with
            ``refused``.
        key_budget_s: seconds a problem, at most.
        device: the GPU; default: the current one, or the CPU where Triton interprets kernels there.
        progress: called with a :class:`fusedops.autotune.search.Progress` after every step.
        jobs: candidates that are compiled at once; default: as many as there are CPU cores, up to 8.
        again: also problems that a search with these kernels and this Triton has answered before. Without it a search
            that the budget or Ctrl-C cut short is taken up where it stopped.
        found: called with each result when it is there.

    Returns:
        one :class:`fusedops.autotune.search.Result` a distinct problem, in their order: ``entry`` is what was stored,
        None where ``refused`` says why nothing was.

    Raises:
        TypeError, ValueError: an argument is wrong.
        RuntimeError: there is no device that kernels run on.

    Examples:
        >>> import fusedops
        >>> from fusedops.norm.tuning import NormProblem
        >>> wanted = [NormProblem(4096, 2, "forward", rows=8192, kind="rms")]
        >>> results = fusedops.autotune.tune(wanted, budget_s=60)  # doctest: +SKIP
        >>> results[0].entry.median  # seconds, where a GPU was asked  # doctest: +SKIP
        >>> fusedops.autotune.tune([])
        []
    """
    wanted = recorded(problems)
    for name, value in (("budget_s", budget_s), ("key_budget_s", key_budget_s)):
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise ValueError(f"tune: {name} must be a positive number of seconds; got {value!r}")
    if jobs is not None and not (isinstance(jobs, int) and jobs > 0):
        raise ValueError(f"tune: jobs must be a positive integer or None; got {jobs!r}")
    if not wanted:
        return []
    where = tunable_device(device)
    facts = device_facts(where)
    identity = Identity.of(facts)
    end = None if budget_s is None else time.monotonic() + budget_s
    results: list[Result] = []
    bench: Bench | None = None

    def done(result: Result) -> None:
        results.append(result)
        if found is not None:
            found(result)

    with look_up_only(), contextlib.ExitStack() as stack:
        for number, (operator, problem, _) in enumerate(wanted):
            known = store().get(identity, operator.name).get(operator.key(problem))
            current = known is not None and known.source == "tuned" and not mismatches(known, operator)
            if known is not None and current and not again and not unfinished(known):
                done(Result.kept(operator, problem, known))
                continue
            impossible = operator.impossible(problem, facts)
            if impossible is not None:
                done(Result.not_searched(operator, problem, f"no call meets such a problem: {impossible}"))
                continue
            seconds = key_budget_s if end is None else min(key_budget_s, end - time.monotonic())
            if seconds < min(1.0, key_budget_s):
                done(Result.not_searched(operator, problem, BUDGET_SPENT))
                continue
            if bench is None:
                bench = stack.enter_context(contextlib.closing(Switching(where, jobs)))
            report = None if progress is None else _numbered(progress, number, len(wanted))
            try:
                result = search(
                    operator,
                    problem,
                    facts,
                    bench,
                    budget_s=seconds,
                    seeds=seeds(operator, problem, facts),
                    known=known.candidates if known is not None and current else (),
                    progress=report,
                )
            except SearchInterrupted as interrupted:
                keep(identity, [interrupted.result])
                done(interrupted.result)
                raise
            keep(identity, [result])
            done(result)
    return results


def tune_model(
    model: torch.nn.Module,
    inputs: Any,
    *,
    training: bool | None = None,
    budget_s: float | None = None,
    key_budget_s: float = KEY_BUDGET_S,
    progress: Callable[[Progress], None] | None = None,
    jobs: int | None = None,
    again: bool = False,
) -> list[Result]:
    """Run a model once, forward and backward, write down which problems it meets, and search them.

    The model is left as it was: its mode, buffers and gradients, and torch's random generators. Patch it before:
    operators that fusedops does not run are not tuned.

    Args:
        model: on the GPU.
        inputs: a tensor, or a sequence of positional or a mapping of keyword arguments.
        training: run a backward too; None: if the model is in training mode.
        budget_s, key_budget_s, progress, jobs, again: as of :func:`tune`.

    Returns:
        as :func:`tune`; an empty list, with a warning, where the model meets none of fusedops' kernels.

    Raises:
        TypeError, ValueError, RuntimeError: as of :func:`tune`. What the model raises passes through.

    Examples:
        >>> import torch, fusedops
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.GELU())
        >>> report = fusedops.patch(model)
        >>> x = torch.randn(8, 64, device="cuda")  # doctest: +SKIP
        >>> results = fusedops.autotune.tune_model(model.cuda(), x, budget_s=60)  # doctest: +SKIP
    """
    met = problems_of_model(model, inputs, training=training)
    if not met:
        warnings.warn(
            "tune_model: the model met none of fusedops' kernels: fusedops.patch(model) comes before, and"
            " fusedops.explain says where torch's operators serve",
            AutotuneWarning,
            stacklevel=2,
        )
    where = next((t.device for t in tree_leaves((list(model.parameters()), inputs)) if _on_accelerator(t)), None)
    return tune(
        met, budget_s=budget_s, key_budget_s=key_budget_s, device=where, progress=progress, jobs=jobs, again=again
    )


def problems_of_model(model: torch.nn.Module, inputs: Any, *, training: bool | None = None) -> list[Recorded]:
    """The problems that a model's forward, and with ``training`` its backward, meet.

    Nothing is searched. The model is left as it was.

    Args:
        model, inputs, training: as of :func:`tune_model`.

    Returns:
        the problems, each once, for :func:`tune`; none where torch's operators serve, as on a CPU.

    Raises:
        Exception: whatever the model raises.

    Examples:
        >>> import torch, fusedops
        >>> with fusedops.backend("torch"):  # on a GPU, without this: a problem of the forward, one of the backward
        ...     fusedops.autotune.problems_of_model(fusedops.nn.LayerNorm(64), torch.randn(8, 64))
        []
    """
    training = model.training if training is None else training
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = {t.device.index for t in tree_leaves((list(model.parameters()), inputs)) if _on_accelerator(t)}
    # The mode: on a GPU autograd runs the backward in threads of its own, which would search.
    with look_up_only(), mode("cached"), torch.random.fork_rng([index for index in devices if index is not None]):
        try:
            with collecting() as met, torch.inference_mode(False), torch.set_grad_enabled(training):
                outputs = _called(model, inputs)
                if training:
                    _differentiate(model, inputs, outputs)
        finally:
            with torch.no_grad():
                for module, name, buffer, before in buffers:
                    buffer.copy_(before)
                    module._buffers[name] = buffer
    return distinct(met)


def _called(model: torch.nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, torch.Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs)


def _differentiate(model: torch.nn.Module, inputs: Any, outputs: Any) -> None:
    """A backward whose gradients go nowhere."""
    results = [t for t in _tensors(outputs) if t.requires_grad]
    sources: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
    sources += [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
    if results and sources:
        torch.autograd.grad(results, sources, [torch.ones_like(result) for result in results], allow_unused=True)


def _tensors(outputs: Any, deep: int = 4) -> Iterator[torch.Tensor]:
    """Those in a model's outputs, also in dataclasses and other plain objects."""
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):  # of a kind that torch does not know
            yield from _tensors(list(leaf.values()), deep - 1) if deep else ()
        elif not isinstance(leaf, torch.nn.Module | type) and hasattr(leaf, "__dict__"):
            yield from _tensors(list(vars(leaf).values()), deep - 1) if deep else ()


def _on_accelerator(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def tunable_device(device: torch.device | str | None = None) -> torch.device:
    """The device to search on.

    Raises:
        ValueError: ``device`` is none that kernels run on.
        RuntimeError: there is none; the message says what can be done.
    """
    if device is None:
        if SETTINGS.interpret:
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise RuntimeError(
                "tune: torch finds no GPU here. On one without: fusedops autotune --offline --target H100 ranks the"
                " configurations by what the compiler makes of them"
            )
        return torch.device("cuda", torch.cuda.current_device())
    where = torch.device(device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    if not might_use_triton(where):
        raise ValueError(f"tune: device must be one that kernels run on; got {str(where)!r}")
    return where


def recorded(problems: Iterable[Named | tuple]) -> list[Recorded]:
    """What :func:`tune` takes, each distinct problem once.

    Raises:
        TypeError, ValueError: one is no problem.
    """
    kinds = {operator.problem: operator for operator in operators().values()}
    found = []
    for item in problems:
        if type(item) in kinds:
            operator, problem = kinds[type(item)], item
        elif isinstance(item, tuple) and len(item) in (2, 3) and isinstance(item[0], Operator | str):
            operator = operator_named(item[0]) if isinstance(item[0], str) else item[0]
            problem = item[1]
        else:
            raise TypeError(
                "tune: problems must hold a family's problems, such as NormProblem, or pairs (operator, problem);"
                f" got {type(item).__name__}"
            )
        if not isinstance(problem, operator.problem):
            raise TypeError(
                f"tune: a problem of {operator.name} is a {operator.problem.__name__}; got {type(problem).__name__}"
            )
        found.append((operator, problem))
    return distinct(found)


def keep(identity: Identity, results: Iterable[Result]) -> bool:
    """Store what was found, and let the next calls use it; False: in this process's memory only."""
    entries = [result.entry for result in results if result.entry is not None]
    stored = store().put(identity, entries) if entries else True
    forget()
    return stored


def _numbered(progress: Callable[[Progress], None], number: int, of: int) -> Callable[[Progress], None]:
    def report(event: Progress) -> None:
        progress(replace(event, number=number, of=of))

    return report
