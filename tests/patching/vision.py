"""timm and torchvision for the tests, also beside builds of torch that torchvision's compiled part was not made for.

PyPI's torchvision is compiled against a CUDA build of torch. Beside a CPU build ``import torchvision`` fails, and with
it whatever imports torchvision where it is installed (timm, transformers). The tests need its Python models alone. So
the Makefile puts both packages into a folder of their own, ``<environment>/vision``, that only these tests look into,
and the operators are declared that torchvision's import asks for. An installation that works is used as it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(sys.prefix) / "vision"

_declared: list[torch.library.Library] = []


def load_torchvision() -> ModuleType:
    """torchvision; the test is skipped where it is not installed."""
    return _load("torchvision")


def load_timm() -> ModuleType:
    """timm; the test is skipped where it is not installed."""
    _load("torchvision")
    return _load("timm")


def _load(name: str) -> ModuleType:
    if importlib.util.find_spec(name) is None:
        if not (FOLDER / name).is_dir():
            pytest.skip(f"{name} is not installed")
        # transformers looks once for what is installed: it has to look before the folder can be seen.
        importlib.import_module("transformers.utils.import_utils").is_torchvision_available()
        sys.path.append(str(FOLDER))
        importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        if _declared or "torchvision::nms" not in str(error):
            raise
    # Only now: where the compiled part loads, it declares the operator itself, and must be the first to do so.
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
    for part in [part for part in sys.modules if part.partition(".")[0] in ("timm", "torchvision")]:
        del sys.modules[part]
    return importlib.import_module(name)
