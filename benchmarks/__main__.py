"""All benchmarks by one entry.

    python -m benchmarks [norm linear attention decode model host] [--quick] [--static | --dry-run] [--output FOLDER]

Each benchmark that is named (default: all) runs in a process of its own, with what it writes in one folder: tables on
standard output, CSV and JSON with the machine, the versions and the commit, and plots in percent of the peak. Libraries
that are installed join by themselves. ``python benchmarks/norm.py --help`` tells the further options of one.

``host`` times the host's work a call, and what fusedops costs on the CPU: it needs no GPU. Without one, ``--static``
reads the compiled kernels of norm, linear and attention, and ``--dry-run`` runs every library once on the CPU.

Exit codes: 0 right, 1 a benchmark failed, found a wrong result, or found no GPU, 2 usage.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.report import RESULTS, ROOT

BENCHMARKS = ("norm", "linear", "attention", "decode", "model", "host")
STATIC = ("norm", "linear", "attention")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"Of {', '.join(BENCHMARKS)}; default: all.")
    parser.add_argument("--quick", action="store_true", help="Fewer sizes, shorter.")
    parser.add_argument("--static", action="store_true", help="Reads the compiled kernels' code; needs no GPU.")
    parser.add_argument("--dry-run", action="store_true", help="Runs everything once on the CPU and times nothing.")
    parser.add_argument("--output", type=Path, help="Folder for the results (default: benchmarks/results).")
    asked = parser.parse_args(arguments)
    if unknown := set(asked.names) - set(BENCHMARKS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    if asked.static and asked.dry_run:
        parser.error("--static or --dry-run, not both")
    names = tuple(dict.fromkeys(asked.names)) or BENCHMARKS
    if asked.static and asked.names and (others := [name for name in names if name not in (*STATIC, "host")]):
        parser.error(f"--static reads {', '.join(STATIC)}; {', '.join(others)} can only be timed on a GPU")
    mode = "static" if asked.static else "dry-run" if asked.dry_run else "timed"
    codes = {name: _run(command_of(name, mode, asked.quick, asked.output)) for name in _possible(names, mode)}
    for name, code in codes.items():
        if code:
            print(f"{name}: exit code {code}", file=sys.stderr)
    if mode == "timed" and not torch.cuda.is_available():
        print(_no_gpu([name for name in names if name != "host"]), file=sys.stderr)
        return 1 if set(names) != {"host"} else int(any(codes.values()))
    return int(any(codes.values()))


def _possible(names: Sequence[str], mode: str) -> list[str]:
    """Those that this machine and the mode have."""
    if mode == "static":
        return [name for name in names if name in (*STATIC, "host")]
    if mode == "timed" and not torch.cuda.is_available():
        return [name for name in names if name == "host"]
    return list(names)


def _no_gpu(names: Sequence[str]) -> str:
    if not names:
        return "no GPU: host was timed, which needs none"
    return (
        f"torch finds no CUDA or ROCm device here: {', '.join(names)} cannot be timed.\n"
        "What can be run instead:\n"
        "  python -m benchmarks --static --quick    reads the compiled kernels' code\n"
        "  python -m benchmarks --dry-run           runs every library once on the CPU, and compares the results\n"
        "  python -m benchmarks host                times the host's work a call\n"
        "  python benchmarks/model.py --device cpu  times small models on the CPU, without fusedops' kernels"
    )


def command_of(name: str, mode: str, quick: bool, output: Path | None, further: Sequence[str] = ()) -> list[list[str]]:
    """The commands that a benchmark consists of.

    Args:
        mode: ``timed``, ``static`` or ``dry-run``.
        further: options of that benchmark.
    """
    if name == "host":
        folder = output or RESULTS
        host, overhead = ["host", "--output", str(folder / "host.json")], ["cpu_overhead"]
        overhead += ["--output", str(folder / "cpu-overhead.json")]
        if quick:
            host += ["--repeats", "100"]
            overhead += ["--repeats", "5"]
        if mode == "dry-run":
            host += ["--operators", "layer_norm", "--repeats", "20"]
        commands = [host] if mode == "dry-run" else [host, overhead]
    else:
        options = ["--quick"] * quick + ([f"--{mode}"] if mode != "timed" else [])
        options += [] if output is None else ["--output", str(output)]
        commands = [[name, *options]]
    return [
        [sys.executable, str(ROOT / "benchmarks" / f"{command[0]}.py"), *command[1:], *further] for command in commands
    ]


def _run(commands: list[list[str]]) -> int:
    """The first exit code that is not 0. A process of its own: a kernel that faults ends its own benchmark alone."""
    codes = []
    for command in commands:
        print(f"\n$ {' '.join(['python', Path(command[1]).relative_to(ROOT).as_posix(), *command[2:]])}", flush=True)
        codes.append(subprocess.run(command, cwd=ROOT).returncode)
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
