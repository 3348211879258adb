"""``fusedops plan``: what patching would do to a model, and what it would save."""

from __future__ import annotations

import contextlib
import json as json_module
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from fusedops.cli.factories import hint, named
from fusedops.cli.output import fail, print_json, stderr, stdout

if TYPE_CHECKING:
    from fusedops.patching.memory_estimate import ActivationMemory
    from fusedops.patching.report import PatchReport

_BATCH, _SEQUENCE = 8, 512
# A check computes; it does so on little.
_CHECK = (2, 16)


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:FACTORY]",
            help="A function without required arguments that returns a model, or a pair (model, inputs); or a model.",
        ),
    ] = None,
    hf: Annotated[
        Path | None,
        typer.Option("--hf", help="A Hugging Face config.json, or its folder: such a model, without weights."),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", help="Only at or below modules whose names fit: 'encoder.*'. Repeatable."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", help="Not at or below modules whose names fit. Repeatable.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help=f"Estimate memory for so many sequences; {_BATCH} if unsaid.")
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option("--sequence", min=1, help=f"Estimate memory for so many tokens each; {_SEQUENCE} if unsaid."),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Of the memory estimate: bf16, fp16 or fp32.")] = "bf16",
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Run the model before and after, on the factory's inputs or random ones. Exit code 1 where they"
            " differ by more than rounding explains.",
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show what fusedops.patch would replace in a model, what it would leave alone, and why.

    With --batch or --sequence also how much less a training step keeps for its backward: traced on shapes, so that
    neither a GPU nor memory is needed; exit code 1 where there is no such estimate. Nothing is written or changed.

    Example: `fusedops plan mypackage.models:build_model --batch 8 --sequence 2048` (build_model() returns the model).
    """
    from fusedops.patching.memory_estimate import DTYPES

    if (model is None) == (hf is None):
        raise typer.BadParameter("name a model: either MODULE:FACTORY or --hf")
    if dtype.lower() not in DTYPES:
        raise typer.BadParameter(f"--dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    if hf is not None and check:
        raise typer.BadParameter("--check runs the model, and --hf makes one without weights")
    size = None if batch is None and sequence is None else (batch or _BATCH, sequence or _SEQUENCE)
    # What the model prints is no part of the JSON object.
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        made, inputs = _of_config(hf) if hf is not None else _made(str(model), check or size is not None)
        report = _report(made, inputs, include, exclude, check)
        memory = None if size is None else _memory(report, size, dtype, inputs)
    if json:
        print_json({**report.to_dict(), "memory": None if memory is None else memory.to_dict()})
    else:
        stdout().print(report)
        if memory is not None:
            stdout().print(memory)
    if memory is not None and memory.reason:
        advice = "fusedops.memory_report measures a model in Python, on what it is called with"
        if inputs is None and "inputs=" in memory.reason:
            advice = "for that, name a function that returns a pair (model, inputs)"
        raise fail(f"no estimate of the memory: {memory.reason}; {advice}")
    if report.check is not None and not report.check.explained:
        raise typer.Exit(1)


def _made(name: str, called: bool) -> tuple[torch.nn.Module, Any]:
    """The model, and what to call it with where the factory says so; ``called``: whether that is needed."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        meant = hint(name) or " (for a Hugging Face model: --hf with its config.json)"
        raise typer.BadParameter(f"it must be MODULE:FACTORY; got {name!r}{meant}", param_hint="MODULE:FACTORY")
    try:
        made = named(name, "the model")
    except ValueError as error:
        raise fail(str(error)) from None
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise fail(f"{name}: importing {module} raised {_told(error)}") from None
    if not isinstance(made, torch.nn.Module):
        if not callable(made) or (isinstance(made, type) and not issubclass(made, torch.nn.Module)):
            raise fail(f"{name} must be a model or a function that returns one; it is a {type(made).__name__}")
        try:
            made = made()
        except (Exception, SystemExit) as error:  # whatever the function does
            raise fail(f"{name}() raised {_told(error)}") from None
    found, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(found, torch.nn.Module):
        raise fail(f"{name}() must return a torch.nn.Module, or a pair (model, inputs); got {type(found).__name__}")
    if called and inputs is not None:
        from fusedops.patching.check import Inputs

        try:
            Inputs.read(_as_given(inputs), f"{name}(): the pair's inputs")
        except TypeError as error:
            raise fail(str(error)) from None
    return found, inputs


def _told(error: BaseException) -> str:
    """An error in one line; a library's lists of all that it knows are cut."""
    text = next(iter(str(error).splitlines()), "")
    if len(text) > 200:
        text = text.partition(". ")[0]
    kind = type(error).__name__
    return f"{kind}: {text if len(text) <= 200 else text[:200] + '...'}" if text else kind


def _of_config(path: Path) -> tuple[torch.nn.Module, None]:
    """The model of a config, with parameters that have no data."""
    try:
        import transformers
    except ImportError:
        raise fail("--hf needs Hugging Face's transformers: pip install transformers") from None
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json_module.loads(file.read_text(encoding="utf-8"))
        kind = values["model_type"]
    except OSError as error:
        raise fail(f"{error.filename}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise fail(f"{file}: {error}") from None
    except (KeyError, TypeError):
        raise fail(f"{file}: a model's config is a JSON object with a model_type") from None
    try:
        config = transformers.AutoConfig.for_model(**{"model_type": kind, **values})
        names = values.get("architectures") or [""]
        architecture = getattr(transformers, str(names[0]), None)
        with torch.device("meta"):
            if architecture is None:
                return transformers.AutoModel.from_config(config), None
            return architecture(config), None
    except Exception as error:  # whatever a library says of a wrong config
        raise fail(f"{file}: {_told(error)}") from None


def _report(
    model: torch.nn.Module, inputs: Any, include: list[str] | None, exclude: list[str] | None, check: bool
) -> PatchReport:
    import fusedops

    options: dict[str, Any] = {"include": include or None, "exclude": exclude or None}
    try:
        report = fusedops.plan(model, **options)
    except Exception as error:  # whatever the model's code does where it is tried
        if isinstance(error, ValueError) and (include or exclude):  # a pattern that fits nothing
            raise typer.BadParameter(str(error)) from None
        raise fail(f"the model cannot be examined: {_told(error)}") from None
    if not check:
        return report
    given = _random_inputs(model) if inputs is None else _as_given(inputs)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fusedops.patch: ")  # the report says it
            with fusedops.patched(model, check=given, **options) as report:
                return replace(report, applied=False)
    except (Exception, SystemExit) as error:  # whatever the model does
        raise fail(f"--check: {_told(error)}") from None


def _memory(report: PatchReport, size: tuple[int, int], dtype: str, inputs: Any) -> ActivationMemory:
    try:
        return report.activation_memory(*size, dtype, inputs=_as_given(inputs))
    except (Exception, SystemExit) as error:  # whatever the model does
        raise fail(f"no estimate of the memory: {_told(error)}") from None


def _as_given(inputs: Any) -> Any:
    """Inputs as ``check=`` takes them; a factory may also return a list of arguments."""
    return tuple(inputs) if isinstance(inputs, list) else inputs


def _random_inputs(model: torch.nn.Module) -> Any:
    from fusedops.patching.memory_estimate import NotKnownError, usual_inputs

    try:
        inputs = usual_inputs(model, *_CHECK, torch.float32)
    except NotKnownError as error:
        message = str(error).removesuffix(": give inputs=")
        raise fail(f"--check: {message}: let the factory return a pair (model, inputs)") from None
    words = min((m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding)), default=1)
    generator = torch.Generator().manual_seed(0)
    parameter = next(model.parameters(), torch.empty(0))

    def draw(value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point():
            return torch.randn(value.shape, generator=generator).to(parameter.device, parameter.dtype)
        return torch.randint(0, words, value.shape, generator=generator).to(parameter.device)

    stderr().print("--check: on random inputs", soft_wrap=True)
    return tuple(map(draw, inputs.args)), {name: draw(value) for name, value in inputs.kwargs.items()}
