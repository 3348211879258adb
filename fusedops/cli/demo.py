"""``fusedops demo``: two real models, plain and patched, side by side."""

from __future__ import annotations

import copy
import enum
import gc
import os
import statistics
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import fusedops
from fusedops.cli.calls import sample_calls
from fusedops.cli.demo_text import Show
from fusedops.cli.output import fail, print_json, stderr
from fusedops.demo import DemoError, encoder, gpt, plot, require
from fusedops.demo.rounding import Rounding, compare

# So many steps are also run in higher precision, to tell rounding from faults. A fault shows at once; later, training
# itself makes any difference grow.
_REFERENCE_STEPS = 10


class Part(str, enum.Enum):
    """The demo's parts."""

    ENCODER = "encoder"
    GPT = "gpt"


def _parse_device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise typer.BadParameter(f"{text!r} is no device; try cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"the demo runs on cpu and cuda devices, not on {device.type!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise typer.BadParameter(f"torch finds {count} CUDA or ROCm devices here, so {text!r} is not one of them")
    return device


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def demo(
    steps: Annotated[int, typer.Option(min=2, help="Training steps of the GPT.")] = 120,
    output: Annotated[Path, typer.Option(help="Where to write the picture of the loss curves.")] = Path("demo.png"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the GPT's weights and batches.")] = 0,
    device: Annotated[
        torch.device | None,
        typer.Option(
            parser=_parse_device,
            metavar="DEVICE",
            help="Device to run on: cpu, cuda or cuda:N. The default is a GPU where torch finds one.",
        ),
    ] = None,
    only: Annotated[Part | None, typer.Option(help="Run one of the two parts alone.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Run two real models, plain and patched, and compare.

    A pretrained sentence encoder ranks sentences by similarity; a small GPT trains on the sources of Python's standard
    library. Both run before and after `fusedops.patch(model)`. The exit code is 1 when results differ by more than
    rounding explains.

    Example: `fusedops demo --only gpt --steps 40` (the training alone, and a shorter one).
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights are on the disk: nothing is to be asked for elsewhere
    device = _parse_device(_default_device()) if device is None else device
    show = Show(quiet=json)
    result: dict[str, Any] = {"device": str(device), "backend": _backend(device)}
    show.backend(result)
    try:
        _require(only)
        if only is not Part.GPT:
            result["encoder"] = run_encoder(device)
            show.encoder(result["encoder"])
        if only is not Part.ENCODER:
            result["gpt"] = run_gpt(device, steps, seed, output, result["backend"]["name"])
            show.gpt(result["gpt"])
    except DemoError as error:
        raise fail(str(error)) from error
    result["ok"] = all(result[part]["ok"] for part in ("encoder", "gpt") if part in result)
    show.verdict(result["ok"])
    if json:
        print_json(result)
    if not result["ok"]:
        raise typer.Exit(1)


def _require(only: Part | None) -> None:
    """Name everything that is missing before anything runs."""
    packages = dict.fromkeys((*encoder.PACKAGES, *gpt.PACKAGES, *plot.PACKAGES))
    if only is Part.ENCODER:
        packages = dict.fromkeys(encoder.PACKAGES)
    elif only is Part.GPT:
        packages = dict.fromkeys((*gpt.PACKAGES, *plot.PACKAGES))
    require(packages)


def _backend(device: torch.device) -> dict[str, Any]:
    explanations = [call.explain() for call in sample_calls(device)]
    names = {explanation.backend for explanation in explanations}
    reasons = list(dict.fromkeys(reason for explanation in explanations for reason in explanation.reasons))
    return {"name": "triton" if names == {"triton"} else "torch", "reasons": reasons}


def run_encoder(device: torch.device) -> dict[str, Any]:
    """Encode real sentences with MiniLM before and after patching; everything that was found, as JSON values."""
    with _progress() as progress:
        bar = progress.add_task("Sentence encoder: loading MiniLM", total=4)
        model = encoder.Encoder.load(device)
        tokens = model.tokens((*encoder.SENTENCES, encoder.QUERY))
        progress.update(bar, advance=1, description="Sentence encoder: plain")
        plain = model.embed(tokens)
        progress.update(bar, advance=1, description="Sentence encoder: float64")
        exact = encoder.Encoder(copy.deepcopy(model.model).double(), model.tokenizer).embed(tokens)
        progress.update(bar, advance=1, description="Sentence encoder: patched")
        report = fusedops.patch(model.model)
        patched = model.embed(tokens)
        progress.update(bar, advance=1, description="Sentence encoder")
    rounding = compare(patched, plain, exact)
    before, after = encoder.ranking(plain), encoder.ranking(patched)
    same_order = [index for index, _ in before] == [index for index, _ in after]
    return {
        "model": "all-MiniLM-L6-v2",
        "parameters": sum(p.numel() for p in model.model.parameters()),
        "sentences": len(encoder.SENTENCES) + 1,
        "query": encoder.QUERY,
        "report": report.to_dict(),
        "report_text": str(report),
        "rounding": rounding.to_dict(),
        "reference": "float64",
        "ranking": [
            {"sentence": encoder.SENTENCES[index], "plain": score, "patched": dict(after)[index]}
            for index, score in before
        ],
        "same_order": same_order,
        "ok": bool(report.replaced) and rounding.explained and same_order,
    }


def run_gpt(device: torch.device, steps: int, seed: int, output: Path, backend: str) -> dict[str, Any]:
    """Train a small GPT plain and patched from one seed, and its first steps in higher precision."""
    size = gpt.size_for(device)
    half = device.type == "cuda"
    precision, reference = ("bfloat16 autocast", "float32") if half else ("float32", "float64")
    text, files = gpt.read_text()
    batches = gpt.draw_batches(text, size, steps, seed)
    first = batches[:_REFERENCE_STEPS]
    with _progress() as progress:
        bars = {
            name: progress.add_task(f"GPT, {name}", total=len(part), start=False)
            for name, part in (("plain", batches), ("patched", batches), (reference, first))
        }

        def train(name: str, part: torch.Tensor) -> tuple[gpt.Run, Any, int]:
            model = gpt.build(size, seed).to(device)
            parameters = sum(p.numel() for p in model.parameters())
            report = fusedops.patch(model) if name == "patched" else None
            if name == "float64":
                model.double()
            progress.start_task(bars[name])
            in_half = half and name != reference
            run = gpt.train(model, part, size, in_half, lambda: progress.advance(bars[name]))
            del model
            gc.collect()  # modules hold cycles, and the next run's peak of memory is to be its own
            return run, report, parameters

        plain, _, parameters = train("plain", batches)
        patched, report, _ = train("patched", batches)
        exact, _, _ = train(reference, first)
    plot.draw_losses(output, plain.losses, patched.losses, exact.losses, reference, backend)
    judged = len(first)
    losses = compare(
        torch.tensor(patched.losses[:judged]),
        torch.tensor(plain.losses[:judged]),
        torch.tensor(exact.losses, dtype=torch.float64),
    )
    worst, gradient = worst_gradient(patched.first_gradients, plain.first_gradients, exact.first_gradients)
    apart = [abs(a - b) for a, b in zip(patched.losses, plain.losses, strict=True)]
    return {
        "parameters": parameters,
        "text_bytes": len(text),
        "text_files": files,
        "steps": steps,
        "precision": precision,
        "reference": reference,
        "reference_steps": judged,
        "report": report.to_dict(),
        "report_text": str(report),
        "losses": {"plain": plain.losses, "patched": patched.losses, "reference": exact.losses},
        "largest_difference": max(apart),
        "rounding": losses.to_dict(),
        "gradient_rounding": {"parameter": worst, **gradient.to_dict()},
        "step_seconds": {"plain": _typical(plain), "patched": _typical(patched)},
        "peak_bytes": {"plain": plain.peak_bytes, "patched": patched.peak_bytes},
        "picture": str(output),
        "ok": bool(report.replaced) and losses.explained and gradient.explained,
    }


def worst_gradient(
    patched: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]
) -> tuple[str, Rounding]:
    """The parameter whose patched gradient comes closest to its limit, or is farthest beyond it."""
    found = {name: compare(patched[name], plain[name], exact[name]) for name in plain}
    worst = max(found, key=lambda name: found[name].share)
    return worst, found[worst]


def _typical(run: gpt.Run) -> float:
    """Median of the second half: kernels are compiled, and memory is allocated, before."""
    return statistics.median(run.step_seconds[len(run.step_seconds) // 2 :])


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:<34}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        console=stderr(),
    )
