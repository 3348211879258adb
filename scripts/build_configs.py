"""Make the configurations that ship with fusedops: fusedops/configs/*.json, a file a GPU.

    python scripts/build_configs.py [--products H100 …] [--most 4] [--jobs N] [--check]

For each product the problems of GPT-2, BERT, Llama-3-8B and ViT-L in bfloat16 are ranked as ``fusedops autotune
--offline --target PRODUCT`` does, and written with their provenance: nobody measured them, so they say "heuristic". An
entry that was tuned on such a GPU stays. The same compiler and kernels make the same files, byte for byte: an entry
keeps its date while nothing else of it changes. With --check nothing is written, and the exit code is 1 where a file
would change.

Compiling takes long; Triton's cache remembers it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # works in a checkout that is not installed

from fusedops.autotune.bundles import Bundle, merge, read_bundle, write_bundle  # noqa: E402
from fusedops.autotune.entries import Entry, mismatches  # noqa: E402
from fusedops.autotune.identity import Identity  # noqa: E402
from fusedops.autotune.offline import rank  # noqa: E402
from fusedops.autotune.operator import operators  # noqa: E402
from fusedops.autotune.record import distinct  # noqa: E402
from fusedops.autotune.roofline import PRODUCTS  # noqa: E402
from fusedops.autotune.search import Result  # noqa: E402
from fusedops.autotune.workloads import usual  # noqa: E402

FOLDER = ROOT / "fusedops" / "configs"
SHIPPED = ("A100", "H100", "H200", "B200", "L40S", "RTX 4090", "RTX 5090", "MI300X")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", nargs="+", choices=list(PRODUCTS), default=list(SHIPPED), metavar="NAME")
    parser.add_argument("--most", type=int, default=4, help="Candidates a problem (default: 4).")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="Candidates compiled at once.")
    parser.add_argument("--check", action="store_true", help="Write nothing; fail where a file would change.")
    options = parser.parse_args(arguments)
    if min(options.most, options.jobs) < 1:
        parser.error("--most and --jobs must be at least 1")
    changed = []
    for name in options.products:
        path = path_of(name)
        before = read_bundle(path) if path.exists() else []
        after = kept(before, build(name, options.most, options.jobs))
        if after != merge(before):
            changed.append(path)
            if not options.check:
                FOLDER.mkdir(exist_ok=True)
                write_bundle(path, after)
    print(f"{'would change' if options.check else 'changed'}: {', '.join(p.name for p in changed) or 'nothing'}")
    return 1 if options.check and changed else 0


def path_of(product: str) -> Path:
    return FOLDER / f"{product.lower().replace(' ', '_')}.json"


def build(product: str, most: int, jobs: int) -> Bundle:
    """The ranked entries of a product, without the candidates that did not win: they would be most of the file."""
    facts = PRODUCTS[product].facts
    problems = distinct(usual(facts))
    began = time.monotonic()

    def found(result: Result) -> None:
        told = result.refused or (
            "default" if result.entry and result.entry.config == result.entry.default else "other"
        )
        print(f"{time.monotonic() - began:6.0f} s  {product}: {result.op} {result.problem}: {told}", flush=True)

    entries: dict[str, dict[str, Entry]] = {}
    for result in rank(problems, facts, jobs=jobs, most=most, found=found):
        if result.entry is None:
            raise SystemExit(f"{product}: {result.op} {result.problem}: {result.refused}")
        entries.setdefault(result.op, {})[result.entry.key] = replace(result.entry, candidates=())
    return [(Identity.of(facts), entries)]


def kept(before: Bundle, new: Bundle) -> Bundle:
    """The new entries; the earlier one of a problem where it was tuned and holds, or differs in its date alone."""
    known = operators()
    old = {(identity, op): entries for identity, found in before for op, entries in found.items()}
    bundle: Bundle = []
    for identity, found in new:
        made: dict[str, dict[str, Entry]] = {}
        for op, entries in found.items():
            earlier = old.get((identity, op), {})
            made[op] = {
                key: earlier[key] if key in earlier and _stays(earlier[key], entry) else entry
                for key, entry in entries.items()
            }
            made[op] |= {
                key: entry
                for key, entry in earlier.items()
                if key not in entries and entry.source == "tuned" and not mismatches(entry, known[op])
            }
        bundle.append((identity, made))
    return merge(bundle)


def _stays(earlier: Entry, new: Entry) -> bool:
    if earlier.source == "tuned":
        return not mismatches(earlier, operators()[earlier.op])
    # Versions of torch and fusedops do not decide what is compiled; Triton's and the kernels' do.
    same = replace(earlier, date="", versions={}) == replace(new, date="", versions={})
    return same and not mismatches(earlier, operators()[earlier.op])


if __name__ == "__main__":
    sys.exit(main())
