"""The options that the comparisons with other libraries share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# What says how to time: options that --static does not take.
_TIMING = ("directions", "seconds", "budget", "dry_run")


def parser(
    description: str | None,
    others: Sequence[str],
    *,
    quick: str,
    directions: Sequence[str] = (),
    targets: Sequence[str] = (),
    default_targets: Sequence[str] = (),
) -> argparse.ArgumentParser:
    """A parser with the shared options.

    Args:
        others: providers that may be asked for beside fusedops.
        quick: what --quick leaves out, in words.
        directions: to choose from; empty: there is one.
        targets: of --static, to choose from; empty: there is no --static.
        default_targets: the ones it takes.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if directions:
        made.add_argument("--directions", nargs="+", choices=directions, help="Default: all.")
    made.add_argument("--dtype", choices=DTYPES, help="Default: bfloat16.")
    made.add_argument("--providers", nargs="+", choices=others, help="Beside fusedops; default: all.")
    made.add_argument("--seconds", type=float, help="For each size and direction (default: 0.4; quick: 0.1).")
    made.add_argument("--budget", type=float, help="Seconds after which no other size is begun (default: none).")
    made.add_argument("--output", type=Path, help="Folder for the results (timed: benchmarks/results).")
    made.add_argument("--json", action="store_true", help="Prints JSON instead of tables.")
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--dry-run", action="store_true", help="Runs everything once on the CPU and times nothing.")
    if targets:
        made.add_argument("--static", action="store_true", help="Reads the compiled kernels' code; needs no GPU.")
        shown = " ".join(default_targets)
        made.add_argument("--targets", nargs="+", choices=targets, help=f"Of --static (default: {shown}).")
        made.set_defaults(default_targets=tuple(default_targets))
    else:
        made.set_defaults(static=False)
    if directions:
        made.set_defaults(all_directions=tuple(directions))
    return made


def parse(
    made: argparse.ArgumentParser,
    arguments: list[str] | None,
    *,
    timing: Sequence[str] = (),
    others: Sequence[str],
    slow: Sequence[str] = (),
) -> argparse.Namespace:
    """Parse, and fill in what --quick and --static decide.

    Args:
        timing: further options that --static does not take.
        others: as of :func:`parser`.
        slow: providers that --quick leaves out, because they compile for long.
    """
    options = made.parse_args(arguments)
    given = [name for name in (*_TIMING, *timing) if getattr(options, name, None)]
    if options.static and given:
        made.error(f"--static takes no {', '.join('--' + name.replace('_', '-') for name in given)}")
    quick = options.quick
    options.dtype = options.dtype or "bfloat16"
    options.providers = options.providers or [name for name in others if not (quick and name in slow)]
    if hasattr(options, "all_directions"):
        options.directions = options.directions or options.all_directions
    if hasattr(options, "default_targets"):
        options.targets = options.targets or (("sm_90",) if quick else options.default_targets)
    if options.seconds is None:
        options.seconds = 0.1 if quick else 0.4
    return options
