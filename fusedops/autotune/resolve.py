"""The one place where a kernel's launch configuration is chosen."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from fusedops.runtime.device import DeviceFacts, device_facts

Problem = TypeVar("Problem", bound=Hashable)
Config = TypeVar("Config")

_resolved: dict[tuple[Any, DeviceFacts], Any] = {}


def resolve(problem: Problem, device: torch.device, default_config: Callable[[Problem, DeviceFacts], Config]) -> Config:
    """The configuration for a problem on a device. Never raises and never searches.

    Args:
        problem: a family's frozen problem dataclass, such as :class:`fusedops.norm.tuning.NormProblem`.
        device: where the kernel will run.
        default_config: the family's pure default, such as :func:`fusedops.norm.tuning.default_config`; it answers
            for every device.
    """
    key = (problem, device_facts(device))
    config = _resolved.get(key)
    if config is None:
        config = _resolved[key] = default_config(*key)
    return config
