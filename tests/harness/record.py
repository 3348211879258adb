"""The record of what was compiled: ``tests/compile/record.jsonl``, a line a kernel, keyed by all that it depends on.

Compiling every kernel for eleven GPUs takes half an hour of a core, so that what has not changed is not compiled again:
the test reads the figures that the last compilation left. The key covers the kernel's source and that of every device
function it calls (comments and docstrings aside), its compile-time arguments, the types, alignment and small values
that its arguments are specialised on, the launch options, the target and Triton's version. Whatever has another key is
compiled by the test itself. ``python -m tests.harness.record`` compiles what is missing and rewrites the file.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

PATH = Path(__file__).resolve().parents[1] / "compile" / "record.jsonl"


def load() -> dict[str, dict[str, Any]]:
    """Key -> the fields of ``fusedops.inspection.offline.Compiled`` that tests read."""
    if not PATH.exists():
        return {}
    entries = (json.loads(line) for line in PATH.read_text().splitlines())
    return {entry.pop("key"): entry for entry in entries}


def key_of(launch: Any, target: str) -> str:
    """The hash of everything that the machine code of a captured launch depends on."""
    import triton

    text = json.dumps(
        [
            triton.__version__,
            target,
            sorted(_sources(launch.kernel)),
            [_specialisation(arg) for arg in launch.args],
            {name: _specialisation(value) for name, value in sorted(launch.kwargs.items())},
        ]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _sources(kernel: Any) -> set[str]:
    """The normalised source of a kernel and of every device function that it reaches, and the globals they read."""
    from triton.runtime.jit import JITFunction

    sources: set[str] = set()
    seen: set[int] = set()
    waiting = [kernel]
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        tree = ast.parse(function.src)
        definition = tree.body[0]
        if isinstance(definition, ast.FunctionDef) and ast.get_docstring(definition) is not None:
            del definition.body[0]
        sources.add(f"{ast.dump(tree)} {getattr(function, 'do_not_specialize', None)}")
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        for name in names & set(function.fn.__globals__):
            value = function.fn.__globals__[name]
            if isinstance(value, JITFunction):
                waiting.append(value)
            elif isinstance(value, (int, float, str)) or type(value).__name__ == "constexpr":
                sources.add(f"{name} = {value!r}")
    return sources


def _specialisation(value: Any) -> Any:
    """What Triton compiles for: finer than its own rule where in doubt, which costs a compilation, not a truth."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.data_ptr() % 16 == 0]
    if isinstance(value, (bool, str)) or value is None:
        return repr(value)
    if isinstance(value, int):
        return ["int", value.bit_length() > 31, value == 1, value % 16 == 0]
    if isinstance(value, float):
        return "float"
    if isinstance(value, (tuple, list)):
        return [_specialisation(item) for item in value]
    return repr(value)


def _combinations() -> Iterator[tuple[str, str]]:
    """Every (case, target)."""
    from fusedops.runtime.device import TARGETS
    from tests.harness.compile import all_cases

    for name, case in all_cases().items():
        for target in TARGETS:
            if case.targets is None or target in case.targets:
                yield name, target


def main() -> None:
    """Compile what the record lacks, with progress, and rewrite it without what no case needs any more."""
    import os

    from rich.progress import Progress

    from tests.harness.compile import CompileWorker

    order = ("sm_90", "sm_80", "gfx942")
    combinations = sorted(_combinations(), key=lambda c: order.index(c[1]) if c[1] in order else len(order))
    workers = [CompileWorker() for _ in range(os.cpu_count() or 1)]
    idle = list(workers)
    found: dict[str, Mapping[str, Any]] = {}
    failed = []

    def compile_one(combination: tuple[str, str]) -> None:
        worker = idle.pop()
        try:
            for entry in worker.compile(*combination):
                found[entry["key"]] = entry
        except AssertionError as error:
            failed.append(f"{'-'.join(combination)}: {error}")
        finally:
            idle.append(worker)
            progress.advance(bar)

    with Progress() as progress, ThreadPoolExecutor(len(workers)) as pool:
        bar = progress.add_task("Compiling", total=len(combinations))
        list(pool.map(compile_one, combinations))
    for worker in workers:
        worker.close()
    lines = [json.dumps({k: v for k, v in found[key].items() if k != "seconds"}) for key in found]
    scratch = PATH.with_suffix(".tmp")
    scratch.write_text("".join(f"{line}\n" for line in sorted(lines, key=_order)))
    scratch.replace(PATH)
    print(f"{len(lines)} kernels in {PATH}")
    if failed:
        raise SystemExit("\n".join(["", *failed]))


def _order(line: str) -> tuple[str, str, str]:
    entry = json.loads(line)
    return entry["name"], entry["target"], entry["key"]


if __name__ == "__main__":
    main()
