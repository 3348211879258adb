"""What fusedops costs where it cannot help: on the torch backend, on the CPU.

    python benchmarks/cpu_overhead.py [--limit 1.03] [--import-limit 1.5] [--output FILE.json]

Times a patched model beside the plain one, in turn, in one run: MiniLM encoding sentences, and a training step of a
small GPT. The medians of paired ratios must not exceed the limit; neither may the time of ``import fusedops`` over that
of ``import torch``. Prints a table and JSON.

Exit codes: 0 right, 1 over a limit, 2 usage.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # works in a checkout that is not installed

import torch  # noqa: E402

import fusedops  # noqa: E402
from benchmarks.measure import Run, Sample, human_seconds, interleave, markdown_table, median_interval, paired_ratio  # noqa: E402
from benchmarks.report import header  # noqa: E402
from fusedops.demo import encoder, gpt  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=1.03, help="Largest ratio patched / plain (default: 1.03).")
    parser.add_argument("--import-limit", type=float, default=1.5, help="Largest ratio of the imports (default: 1.5).")
    parser.add_argument("--repeats", type=int, default=30, help="Pairs a round, of eight at most (default: 30).")
    parser.add_argument("--output", type=Path, help="Also writes the JSON to this file.")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with fusedops.backend("torch"):
        results = [
            result("MiniLM, 12 sentences", minilm(encoder.SENTENCES), options.repeats, options.limit),
            result("GPT training step", gpt_step(), options.repeats, options.limit),
        ]
    results.append(imports(max(3, options.repeats // 8), options.import_limit))
    report = {
        **header({}),
        "threads": torch.get_num_threads(),
        "results": results,
        "ok": all(entry["ok"] for entry in results),
    }
    text = json.dumps(report, indent=1)
    print(table(results), text, sep="\n\n")
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n")
    return 0 if report["ok"] else 1


def minilm(sentences: tuple[str, ...]) -> dict[str, Run]:
    """Inference of the pretrained encoder on one batch."""
    loaded = encoder.Encoder.load(torch.device("cpu"))
    # Two copies: loaded weights lie in a mapped file, where products with them may take another time.
    plain, patched = (encoder.Encoder(copy.deepcopy(loaded.model), loaded.tokenizer) for _ in range(2))
    _patch(patched.model)
    tokens = plain.tokens(sentences)
    return {"plain": lambda: plain.embed(tokens), "patched": lambda: patched.embed(tokens)}


def gpt_step() -> dict[str, Run]:
    """Forward, backward and update of the demo's GPT on one batch."""
    size = gpt.CPU_SIZE
    text, _ = gpt.read_text()
    batch = gpt.draw_batches(text, size, 1, seed=0)[0]

    def stepper(patch: bool) -> Run:
        model = gpt.build(size, seed=0)
        if patch:
            _patch(model)
        optimizer = gpt.optimizer_for(model, size)
        return lambda: gpt.training_step(model, optimizer, batch, half=False)

    return {"plain": stepper(False), "patched": stepper(True)}


def _patch(model: Any) -> None:
    if not fusedops.patch(model).replaced:
        raise RuntimeError("fusedops.patch replaced nothing: the comparison would be of plain with plain")


# After so long the pairs that there are must do: a busy machine would otherwise hold the benchmark for many minutes.
_ENOUGH_SECONDS = 60.0


def result(name: str, runs: dict[str, Run], repeats: int, limit: float, warm_up: int = 3) -> dict[str, Any]:
    """Measure ``repeats`` pairs, and on a noisy machine more, until it is clear on which side of the limit they are."""
    began = time.monotonic()
    plain: list[float] = []
    patched: list[float] = []
    for _ in range(8):
        more = interleave(runs, repeats, 0 if plain else warm_up)
        plain += more["plain"]
        patched += more["patched"]
        low, high = median_interval([b / a for a, b in zip(plain, patched, strict=True)])
        if high <= limit or low > limit or time.monotonic() - began > _ENOUGH_SECONDS:
            break
    return _entry(name, plain, patched, limit)


def imports(repeats: int, limit: float) -> dict[str, Any]:
    """``import fusedops`` over ``import torch``, each in a fresh process, in turn."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}

    def importing(module: str) -> Run:
        command = [sys.executable, "-c", f"import {module}"]
        return lambda: subprocess.run(command, env=environment, check=True)

    runs = {"plain": importing("torch"), "patched": importing("fusedops")}
    return result("import fusedops / import torch", runs, repeats, limit, warm_up=1)


def _entry(name: str, plain: list[float], patched: list[float], limit: float) -> dict[str, Any]:
    ratio = paired_ratio(patched, plain)
    return {
        "name": name,
        "plain": asdict(Sample.of(plain)),
        "patched": asdict(Sample.of(patched)),
        "ratio": asdict(ratio),
        "limit": limit,
        "ok": ratio.median <= limit,
    }


def table(results: list[dict[str, Any]]) -> str:
    rows = [
        (
            entry["name"],
            human_seconds(entry["plain"]["median"]),
            human_seconds(entry["patched"]["median"]),
            f"{entry['ratio']['median']:.3f}",
            f"{entry['ratio']['low']:.3f} to {entry['ratio']['high']:.3f}",
            f"{entry['limit']:g}" + ("" if entry["ok"] else " EXCEEDED"),
        )
        for entry in results
    ]
    return markdown_table(("on the torch backend", "plain", "patched", "ratio", "quartiles", "limit"), rows)


if __name__ == "__main__":
    sys.exit(main())
