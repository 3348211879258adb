"""What the tests of the shipped configurations let another process compile."""

from __future__ import annotations

from typing import Any

import torch


def compile_entry(product: str, op: str, problem: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """What an entry compiles to on a product, and what the product has."""
    from fusedops.autotune.compiling import compile_config
    from fusedops.autotune.operator import operator_named
    from fusedops.autotune.roofline import PRODUCTS
    from fusedops.autotune.trial import make_trial

    facts = PRODUCTS[product].facts
    operator = operator_named(op)
    made, chosen = operator.problem_from_json(problem), operator.config.from_json(config)
    trial = make_trial(operator, made, torch.device("cpu"), empty=True)
    report = compile_config(operator, made, facts, chosen, trial)
    return {**report.to_json(), "limit": facts.shared_memory, "unfit": operator.unfit(chosen, made, facts)}
