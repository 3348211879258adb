"""What the tests of the families' trials share."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch

from fusedops.autotune.operator import Operator
from fusedops.autotune.resolve import collecting, using
from fusedops.autotune.trial import Trial, make_trial
from fusedops.runtime.device import device_facts


def check_trial(operator: Operator, problem: Any, device: torch.device) -> Trial:
    """It asks for exactly its problem, what it gives is right, and every result that is changed a little is wrong."""
    trial = make_trial(operator, problem, device)
    with collecting() as met:
        results = trial.run()
    assert (operator, problem) in met, [operator.key(found) for _, found in met]
    assert results
    assert trial.wrong(results) is None
    for place in range(len(results)):
        broken = [result.clone() for result in results]
        last = broken[place][(-1,) * broken[place].dim()]
        last += 0.5 * broken[place].abs().max() + 0.1
        assert trial.wrong(broken) is not None, place
        broken[place].fill_(float("nan"))
        assert trial.wrong(broken) is not None, place
    return trial


def check_sample(operator: Operator, problem: Any, device: torch.device, count: int, seed: int = 0) -> None:
    """Some of the configurations that are not pruned give right results."""
    facts = device_facts(device)
    fitting = [config for config in operator.space(problem) if operator.unfit(config, problem, facts) is None]
    trial = make_trial(operator, problem, device)
    for config in random.Random(seed).sample(fitting, min(count, len(fitting))):
        with using(operator, problem, config):
            assert trial.wrong(trial.run()) is None, config


def met_by(call: Any) -> set[tuple[str, Any]]:
    """(operator's name, problem) of everything that is looked up."""
    with collecting() as met:
        call()
    return {(operator.name, problem) for operator, problem in met}


def named(problems: Iterable[tuple[Operator, Any]]) -> set[tuple[str, Any]]:
    return {(operator.name, problem) for operator, problem in problems}


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors among an object's attributes, and in their lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in tensors_of(part)]
    return [tensor for part in vars(value).values() for tensor in tensors_of(part)] if isinstance(value, Trial) else []
