"""``fusedops autotune``: search launch configurations once, for this GPU or for one that is not here."""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fusedops.cli.devices import facts_named
from fusedops.cli.durations import human, seconds
from fusedops.cli.factories import factory_named
from fusedops.cli.output import fail, print_json, stderr, stdout
from fusedops.cli.problems import short
from fusedops.runtime.backend import HAS_TRITON

if TYPE_CHECKING:
    from fusedops.autotune.record import Recorded
    from fusedops.autotune.search import Progress, Result
    from fusedops.runtime.device import DeviceFacts

_DTYPES = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16", "half": "float16",
    "fp32": "float32", "float32": "float32",
}  # fmt: skip


def autotune(
    op: Annotated[
        list[str] | None, typer.Option("--op", help="Only this operator: norm, linear, attention, … Repeatable.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="A module:factory that returns a model, or a pair (model, inputs). It is patched and run forward and"
            " backward once; what it meets is searched.",
        ),
    ] = None,
    hf: Annotated[
        Path | None,
        typer.Option("--hf", help="A Hugging Face config.json: the problems of such a model. Loads nothing."),
    ] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", help="A file that fusedops record wrote (JSON lines).")
    ] = None,
    shapes: Annotated[
        Path | None, typer.Option("--shapes", help="A YAML or JSON file with a list of operators and sizes.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Of --hf and the usual models: bf16, fp16 or fp32.")] = "bf16",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences a batch, for --hf and the usual models.")] = 8,
    length: Annotated[
        int | None, typer.Option("--length", min=1, help="Tokens a sequence; default: the model's own, at most 2048.")
    ] = None,
    inference: Annotated[bool, typer.Option("--inference", help="Forward passes only.")] = False,
    budget: Annotated[
        str | None, typer.Option("--budget", help="Time for all of it: 90s, 10m, 1h. Default: none.")
    ] = None,
    each: Annotated[
        str | None, typer.Option("--each", help="Time a problem, at most: 20s unless given. Not with --offline.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, help="Candidates that are compiled at once; default: one a core."),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Rank by compiled code and a roofline model; needs --target and no GPU.")
    ] = False,
    target: Annotated[
        str | None, typer.Option("--target", help="The GPU to rank for: H100, RTX 4090, sm_90, and others.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Search what has been searched before, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be searched, and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object when it is done.")] = False,
) -> None:
    """Search the fastest launch configuration of each problem, once for this GPU, and store it.

    Without --model, --hf, --from or --shapes: the problems of GPT-2, BERT, Llama-3-8B and ViT-L.

    What is found is stored after every problem: after Ctrl-C, or at the budget's end, the same command goes on where it
    stopped.

    Example: `fusedops autotune --hf config.json --batch 8 --length 2048 --budget 10m`
    (what such a model meets, in ten minutes at most).
    """
    if not HAS_TRITON:
        raise fail("Triton is not installed: torch's operators serve every call, and there is nothing to tune")
    budget_s = None if budget is None else seconds(budget)
    each_s = seconds(each or "20s")
    if dtype.lower() not in _DTYPES:
        raise typer.BadParameter(f"--dtype must be one of {', '.join(_DTYPES)}; got {dtype!r}")
    if offline and target is None:
        raise typer.BadParameter("--offline ranks for a GPU that is not here: name it, as in --target H100")
    if target is not None and not offline:
        raise typer.BadParameter(
            "--target names a GPU that is not here, which takes --offline; the one here needs none"
        )
    if offline and each is not None:
        raise typer.BadParameter("--each is for searches; a ranking takes as long as its compilations: --budget")
    if sum(source is not None for source in (model, hf, from_, shapes)) > 1:
        raise typer.BadParameter("one of --model, --hf, --from and --shapes, not several")
    try:
        facts = facts_named(target)
    except (ValueError, RuntimeError) as error:
        raise fail(str(error)) from None
    ask = _Asked(facts, _DTYPES[dtype.lower()], batch, length, not inference, offline)
    problems = _problems(ask, op, model, hf, from_, shapes)
    if not problems:
        raise fail("there is nothing to search: no problem was met, or --op leaves none")
    if dry_run:
        _print_plan(problems, facts, offline, json)
        return
    begin = time.monotonic()
    interrupted = False
    results: list[Result] = []
    with _reporter(len(problems), json) as reporter:
        try:
            if offline:
                _offline(problems, ask, budget_s, jobs, again, reporter, results)
            else:
                _search(problems, budget_s, each_s, jobs, again, reporter, results)
        except KeyboardInterrupt:
            interrupted = True
        except RuntimeError as error:
            raise fail(str(error)) from None
    _summary(results, len(problems), facts, time.monotonic() - begin, interrupted, again, json)
    if interrupted:
        raise typer.Exit(130)
    from fusedops.autotune.search import BUDGET_SPENT

    # What the budget did not reach is no failure: the same command goes on there.
    if any(result.entry is None and result.refused != BUDGET_SPENT for result in results):
        raise typer.Exit(1)


class _Asked(NamedTuple):
    facts: DeviceFacts
    dtype: str
    batch: int
    length: int | None
    training: bool
    offline: bool


def _problems(
    ask: _Asked, ops: list[str] | None, model: str | None, hf: Path | None, from_: Path | None, shapes: Path | None
) -> list[Recorded]:
    from fusedops.autotune import workloads
    from fusedops.autotune.operator import operator_named
    from fusedops.autotune.record import distinct, read_recorded

    try:
        for name in ops or ():
            operator_named(name)
        sizes: dict[str, Any] = {"dtype": ask.dtype, "batch": ask.batch, "length": ask.length, "training": ask.training}
        if model is not None:
            found = _of_model(model, ask)
        elif hf is not None:
            config = _json(hf / "config.json" if hf.is_dir() else hf)
            stderr().print(escape(f"read as: {workloads.sizes_of_config(config)}"), soft_wrap=True)
            found = distinct(workloads.of_config(config, ask.facts, **sizes))
        elif from_ is not None:
            found, wrong = read_recorded(from_)
            for message in wrong:
                stderr().print(f"left out: {escape(message)}", soft_wrap=True)
        elif shapes is not None:
            found = distinct(workloads.of_shapes(_yaml(shapes), ask.facts))
        else:
            found = distinct(workloads.usual(ask.facts, **sizes))
    except (ValueError, TypeError) as error:
        raise fail(str(error)) from None
    except OSError as error:
        raise fail(f"{error.filename}: {error.strerror}") from None
    possible = []
    for item in found:
        impossible = item.operator.impossible(item.problem, ask.facts)
        if impossible is not None:
            problem = item.operator.key(item.problem)
            stderr().print(escape(f"left out: {item.operator.name} {problem}: {impossible}"), soft_wrap=True)
        elif not ops or item.operator.name in ops:
            possible.append(item)
    return possible


def _of_model(name: str, ask: _Asked) -> list[Recorded]:
    """What a factory's model meets; on CPU tensors whose launches are written down, where the GPU is not here."""
    import torch

    import fusedops
    from fusedops.autotune.tuner import problems_of_model, tunable_device
    from fusedops.inspection.offline import capture_launches
    from fusedops.runtime.backend import backend

    made = factory_named(name, "--model")()
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            f"--model: {name} must return a torch.nn.Module, or a pair (model, inputs); got {type(model).__name__}"
        )
    if inputs is None:
        inputs = getattr(model, "dummy_inputs", None)
        if inputs is None:
            raise ValueError(f"--model: {name} returns a model alone; return a pair (model, inputs)")
    model.train(ask.training)
    fusedops.patch(model)
    if ask.offline:
        with backend("triton"), capture_launches(ask.facts):
            return problems_of_model(model, inputs, training=ask.training)
    from torch.utils._pytree import tree_map

    device = tunable_device()
    inputs = tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, inputs)
    return problems_of_model(model.to(device), inputs, training=ask.training)


def _json(path: Path) -> Any:
    try:
        return json_module.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None


def _yaml(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None


def _search(
    problems: list[Recorded],
    budget_s: float | None,
    each_s: float,
    jobs: int | None,
    again: bool,
    reporter: _Reporter,
    results: list[Result],
) -> None:
    from fusedops.autotune.tuner import tune

    def found(result: Result) -> None:
        results.append(result)
        reporter.found(result)

    tune(
        problems,
        budget_s=budget_s,
        key_budget_s=each_s,
        jobs=jobs,
        again=again,
        progress=reporter.progress,
        found=found,
    )


def _offline(
    problems: list[Recorded],
    ask: _Asked,
    budget_s: float | None,
    jobs: int | None,
    again: bool,
    reporter: _Reporter,
    results: list[Result],
) -> None:
    from fusedops.autotune.entries import mismatches
    from fusedops.autotune.identity import Identity
    from fusedops.autotune.lookup import store
    from fusedops.autotune.offline import rank
    from fusedops.autotune.search import Result
    from fusedops.autotune.tuner import keep

    identity = Identity.of(ask.facts)
    left = []
    for item in problems:
        known = store().get(identity, item.operator.name).get(item.operator.key(item.problem))
        if known is not None and not mismatches(known, item.operator) and not again:
            results.append(Result.kept(item.operator, item.problem, known))
        else:
            left.append(item)

    def found(result: Result) -> None:
        results.append(result)
        keep(identity, [result])
        reporter.found(result)

    rank(left, ask.facts, budget_s=budget_s, jobs=jobs, progress=reporter.progress, found=found)


def _print_plan(problems: list[Recorded], facts: DeviceFacts, offline: bool, json: bool) -> None:
    from fusedops.autotune.lookup import look_up
    from fusedops.autotune.offline import MOST
    from fusedops.autotune.search import candidates, unfinished

    rows = []
    for operator, problem, _ in problems:
        found = look_up(operator, problem, facts)
        rows.append(
            {
                "op": operator.name,
                "problem": operator.key(problem),
                "served_by": found.source,
                "tuned": found.tuned,
                "finished": found.entry is not None
                and not unfinished(found.entry)
                and (found.tuned or (offline and found.exact and found.source == "your store")),
                "candidates": len(candidates(operator, problem, facts, (), MOST if offline else 32)[0]),
            }
        )
    if json:
        print_json({"device": facts.name, "problems": rows})
        return
    table = Table("operator", "problem", "served now by", "candidates", title=f"On {facts.name}", title_justify="left")
    for row in rows:
        served = escape(str(row["served_by"])) + (" (searched)" if row["tuned"] else "")
        table.add_row(str(row["op"]), escape(short(str(row["problem"]))), served, str(row["candidates"]))
    stdout().print(table)
    todo = sum(not row["finished"] for row in rows)
    what = "ranked" if offline else "searched"
    stdout().print(f"{todo} of {len(rows)} problems would be {what}. Nothing was done.", soft_wrap=True)


class _Reporter:
    """A line for each problem that is done; on a terminal also a table below that follows the one at hand."""

    def __init__(self, count: int, live: Live | None) -> None:
        self._count, self._live = count, live
        self._began = time.monotonic()
        self._done = 0
        self._drawn = 0.0
        self._pruned = ""

    def progress(self, event: Progress) -> None:
        if event.note.startswith("left out"):
            self._pruned = event.note
        # Compiling threads report many times a second.
        if self._live is not None and time.monotonic() - self._drawn > 0.1:
            self._draw(event)

    def found(self, result: Result) -> None:
        self._done += 1
        self._pruned = ""
        console = stderr() if self._live is None else self._live.console
        console.print(f"[{self._done}/{self._count}] {escape(_line(result))}", soft_wrap=True, markup=True)

    def _draw(self, event: Progress) -> None:
        assert self._live is not None
        self._drawn = time.monotonic()
        table = Table("stage", "compiled", "pruned", "timed", "best", "gain", "left", box=None, padding=(0, 2, 0, 0))
        gain = f"{event.default / event.best:.2f}×" if event.best and event.default else "–"
        left = human(event.seconds_left) if event.seconds_left else "–"
        table.add_row(
            event.stage, f"{event.compiled}/{event.total}", str(event.pruned), str(event.timed), human(event.best),
            gain, left,
        )  # fmt: skip
        lines = [
            f"{event.op} {short(event.problem)}",
            self._pruned if event.note in ("", self._pruned) else event.note,
            f"{self._done} of {self._count} done, {human(time.monotonic() - self._began)}",
        ]
        texts = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
        bar = ProgressBar(total=self._count, completed=self._done, width=40)
        self._live.update(Group(texts[0], table, texts[1], bar, texts[2]), refresh=True)


@contextmanager
def _reporter(count: int, json: bool) -> Iterator[_Reporter]:
    console = stderr()
    if json or not console.is_terminal:
        yield _Reporter(count, None)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield _Reporter(count, live)


def _counted(result: Result, *outcomes: str) -> int:
    return sum(candidate.outcome in outcomes for candidate in result.candidates)


def _gain(result: Result) -> str:
    entry = result.entry
    if entry is None:
        return result.refused or "–"
    if entry.config == entry.default:
        return "default"
    if entry.median is None or entry.default_median is None:
        return "by the model"
    return f"{entry.default_median / entry.median:.2f}×"


def _line(result: Result) -> str:
    entry = result.entry
    if entry is None:
        return f"{result.op} {short(result.problem)}: {result.refused}"
    config = " ".join(f"{k}={v}" for k, v in entry.config.items() if v not in (False, "", None))
    told = [] if entry.median is None else [human(entry.median)]
    told.append(_gain(result))
    if not result.seconds:
        told.append("stored before")
    else:
        wrong = _counted(result, "wrong", "failed")
        told += [f"{_counted(result, 'timed', 'estimated')} of {len(result.candidates)} tried"]
        told += [f"{wrong} failed or were wrong"] * bool(wrong)
        told += [human(result.seconds)] + ["not finished"] * (not result.complete)
    return f"{result.op} {short(result.problem)}: {config} ({', '.join(told)})"


def _summary(
    results: list[Result],
    count: int,
    facts: DeviceFacts,
    spent: float,
    interrupted: bool,
    again: bool,
    json: bool,
) -> None:
    from fusedops.autotune.lookup import store
    from fusedops.autotune.search import BUDGET_SPENT

    if json:
        print_json(
            {
                "device": facts.name,
                "seconds": round(spent, 3),
                "interrupted": interrupted,
                "results": [
                    {
                        "op": result.op,
                        "problem": result.problem,
                        "refused": result.refused,
                        "complete": result.complete,
                        "entry": None if result.entry is None else result.entry.to_json(),
                    }
                    for result in results
                ],
            }
        )
        return
    console = stdout()
    found = [result for result in results if result.entry is not None]
    faster = sum(r.entry is not None and r.entry.config != r.entry.default for r in found)
    console.print(
        f"{len(found)} of {count} problems have a configuration, {faster} of them another than the default; "
        f"{human(spent)}. Stored in {store().folder}",
        soft_wrap=True,
    )
    left = count - len(found) + sum(not result.complete for result in found)
    refused = [r for r in results if r.entry is None and r.refused != BUDGET_SPENT]
    if refused and not interrupted:
        console.print(f"{len(refused)} could not be searched; more time a problem may help: --each", soft_wrap=True)
    if interrupted or left > len(refused):
        told = "The same command, without --again, goes on with what is left." if again else None
        console.print(told or "The same command goes on with what is left.", soft_wrap=True)
