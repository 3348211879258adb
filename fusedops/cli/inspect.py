"""``fusedops inspect``: what the compiler makes of the kernels, for any GPU, on a machine that has none."""

from __future__ import annotations

import contextlib
import json as json_module
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fusedops.cli.devices import facts_named
from fusedops.cli.factories import factory_named
from fusedops.cli.output import fail, print_json, stderr
from fusedops.cli.problems import values_of_words
from fusedops.runtime.backend import HAS_TRITON

if TYPE_CHECKING:
    from fusedops.inspection.operators import Call, Captured
    from fusedops.inspection.report import Row
    from fusedops.runtime.device import DeviceFacts

_COMPARE = "textbook, liger or MODULE:FUNCTION"


def inspect(
    op: Annotated[
        str | None, typer.Argument(help="The operator: norm, linear, attention, … Default: all of them.")
    ] = None,
    sizes: Annotated[
        list[str] | None,
        typer.Argument(
            help="Sizes and flags of the call, as in rows=8192 width=4096 kind=rms; what is left out is as usual."
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target", "-t", help="A GPU: H100, sm_90, gfx942, … Repeatable. Default: this machine's, or sm_90."
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", help="Replace fields of the default configuration: KEY=VALUE,… or JSON."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            "--only", help="Only this part of the call: forward, backward, backward_kv, grad_weight and others."
        ),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option("--compare", help=f"Show another's kernels beside: {_COMPARE}. Repeatable."),
    ] = None,
    sass: Annotated[
        bool, typer.Option("--sass", help="Print the hot loop's machine code, with each line's kind.")
    ] = False,
    sass_all: Annotated[bool, typer.Option("--sass-all", help="Print the whole kernel's machine code.")] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Kernels compiled at once; default: one a core.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Compile kernels for any GPU, and show what they occupy and how fast they can be at best. No GPU is needed.

    Registers, spills, shared memory, occupancy, the hot loop's instructions by kind, bytes moved, and an upper bound of
    the share of the peak with what limits it: of the forward's kernels and the backward's, in the default
    configuration. Exit code 1 where a kernel does not compile.

    Example: `fusedops inspect norm rows=8192 width=4096 kind=rms --only forward -t H100` (one kernel on one GPU).
    """
    if not HAS_TRITON:
        raise fail("Triton is not installed: there is no compiler to ask")
    devices = _devices(target)
    calls = _calls(op, sizes or [], config, only)
    functions = {name: _function(name, op) for name in dict.fromkeys(compare or [])}
    _check_compiler(devices[0])
    captured = _captured(calls, devices, functions)
    launches = sum(len(one.launches) for one in captured)
    rows = _compiled(captured, launches, jobs or os.cpu_count() or 1, sass or sass_all, sass_all)
    failed = sum(row.error is not None for row in rows)
    if json:
        print_json({"kernels": [row.to_json() for row in rows], "failed": failed})
    else:
        from fusedops.cli.inspect_text import show

        show(rows)
    if failed:
        raise typer.Exit(1)


def _devices(names: list[str] | None) -> list[DeviceFacts]:
    try:
        if not names:
            try:
                return [facts_named(None)]
            except RuntimeError:  # there is no GPU
                return [facts_named("sm_90")]
        return list(dict.fromkeys(facts_named(name) for name in names))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--target") from None


def _calls(op: str | None, words: list[str], config: str | None, only: str | None) -> list[Call]:
    from fusedops.autotune.operator import operator_named
    from fusedops.inspection.operators import TYPICAL, Call

    if op is None:
        if config is not None:
            raise typer.BadParameter("it is of one operator: name it", param_hint="--config")
        return [Call(name, only=only) for name in TYPICAL]
    try:
        operator_named(op)
        call = Call(op, values_of_words(words), _overrides(config), only)
        call.check_overrides()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return [call]


def _overrides(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    text = text.strip()
    if text.startswith("{"):
        try:
            found = json_module.loads(text)
        except ValueError as error:
            raise ValueError(f"--config is no JSON: {error}") from None
        return dict(found)
    if not text:
        raise ValueError("--config is KEY=VALUE,… or a JSON object; got nothing")
    return values_of_words(text.split(","))


def _function(name: str, op: str | None) -> Callable[..., Any] | None:
    from fusedops.inspection.operators import TYPICAL
    from fusedops.inspection.peers import LIGER, TEXTBOOK, check_liger, tensors_of

    hint = "--compare"
    if name not in (TEXTBOOK, LIGER) and ":" not in name:
        raise typer.BadParameter(f"must be {_COMPARE}; got {name!r}", param_hint=hint)
    if name == TEXTBOOK:
        return None
    if op is None:
        raise typer.BadParameter(f"{name} is compared in one operator: name it", param_hint=hint)
    try:
        if name == LIGER:
            check_liger(op)
            return None
        tensors_of(op, TYPICAL[op])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=hint) from None
    except RuntimeError as error:
        raise fail(str(error)) from None
    try:
        return factory_named(name, hint)
    except ValueError as error:
        raise typer.BadParameter(str(error).removeprefix(f"{hint}: "), param_hint=hint) from None
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise fail(f"--compare: importing {name} raised {type(error).__name__}: {error}") from None


def _check_compiler(facts: DeviceFacts) -> None:
    from fusedops.inspection.offline import capture_launches

    try:
        with capture_launches(facts):
            pass
    except RuntimeError as error:
        raise fail(str(error)) from None


def _captured(
    calls: list[Call], devices: list[DeviceFacts], functions: dict[str, Callable[..., Any] | None]
) -> list[Captured]:
    from fusedops.inspection.operators import NotServedError, captured
    from fusedops.inspection.peers import TEXTBOOK, TEXTBOOKS, compared

    found: list[Captured] = []
    left_out: list[str] = []
    several = len(calls) > 1
    for call in calls:
        for facts in devices:
            try:
                ours = captured(call, facts)
            except NotServedError as error:
                left_out.append(str(error))
                continue
            except ValueError as error:
                if several and call.only is not None:  # an operator that has no such part
                    continue
                raise typer.BadParameter(str(error)) from None
            found += ours
            for name, function in functions.items():
                others = compared(call, name, function, facts, ours)
                if not others and name == TEXTBOOK and not several:
                    told = f"there is no textbook's of this: there is {TEXTBOOKS}"
                    raise typer.BadParameter(told, param_hint="--compare")
                found += others
    if left_out and not found:
        raise fail("; ".join(left_out))
    for message in left_out:
        stderr().print(f"left out: {message}", soft_wrap=True, markup=False)
    if not found:
        raise typer.BadParameter(f"no operator has a part {calls[0].only!r}", param_hint="--only")
    return found


def _compiled(captured: list[Captured], launches: int, jobs: int, code: bool, whole: bool) -> list[Row]:
    """A row a kernel, in the order of the launches; equal ones of a call once."""
    from fusedops.inspection.report import Row, row_of

    pool = ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="fusedops inspect")
    waiting: list[Future[Row] | Row] = []
    for one in captured:
        if one.error is not None:
            waiting.append(Row.failed(one, None, one.error))
        waiting += [pool.submit(row_of, one, launch, code, whole) for launch in one.launches]
    futures = [future for future in waiting if isinstance(future, Future)]
    try:
        with _progress(launches) as advance:
            for _ in as_completed(futures):
                advance()
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        done = sum(future.done() and not future.cancelled() for future in futures)
        stderr().print(f"interrupted: {done} of {launches} kernels were compiled; they stay in Triton's cache")
        raise typer.Exit(130) from None
    pool.shutdown()
    rows = [future.result() if isinstance(future, Future) else future for future in waiting]
    first: dict[object, Row] = {}
    for row in rows:
        first.setdefault(row.identity, row)
    return list(first.values())


@contextlib.contextmanager
def _progress(count: int) -> Iterator[Callable[[], None]]:
    console = stderr()
    if not console.is_terminal or not count:
        yield lambda: None
        return
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("compiling", total=count)
        yield lambda: progress.advance(task)
