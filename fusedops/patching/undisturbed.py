"""The surroundings in which patching tries out what somebody's code computes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Neither what the caller has set up changes an experiment, nor the experiment the caller's random numbers."""
    elsewhere = torch.get_default_device().type != "cpu"
    with (
        torch.device("cpu") if elsewhere else contextlib.nullcontext(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
