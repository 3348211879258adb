"""The kernels that a call of an operator launches, its backward's included, captured for a device that is not here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fusedops.autotune.operator import Config, Operator, operator_named
from fusedops.autotune.resolve import using
from fusedops.autotune.roofline import product_of
from fusedops.autotune.trial import make_trial
from fusedops.autotune.workloads import problems_of
from fusedops.inspection.offline import Launch, capture_launches
from fusedops.runtime.backend import backend
from fusedops.runtime.device import DeviceFacts

OURS = "fusedops"

# A usual call of each operator: what is not said of a call is as here. Sizes of GPT-2 XL and Llama 3 8B; a U-Net's.
TYPICAL: dict[str, dict[str, Any]] = {
    "norm": {"rows": 8192, "width": 4096, "kind": "rms"},
    "group_norm": {"batch": 8, "channels": 320, "spatial": 4096},
    "linear": {"rows": 8192, "in_features": 4096, "out_features": 4096, "activation": "gelu"},
    "gated_linear": {"rows": 8192, "in_features": 4096, "out_features": 14336},
    "grouped_linear": {"groups": 8, "rows": 8192, "in_features": 4096, "out_features": 4096},
    "quantized_linear": {"rows": 16, "in_features": 4096, "out_features": 4096},
    "fp8_linear": {"rows": 8192, "in_features": 4096, "out_features": 4096},
    "attention": {"batch": 2, "heads": 16, "seqlen_q": 4096, "d": 128, "causal": True},
    "attention_decode": {"batch": 8, "heads": 32, "kv_heads": 8, "room": 8192, "d": 128},
}


class NotServedError(LookupError):
    """A call launches no kernel of fusedops' on a device."""


@dataclass(frozen=True, slots=True)
class Captured:
    """The launches of one problem, or why there are none.

    Attributes:
        op: the operator's name, as the tuner has it.
        problem: its key, in one line.
        source: who launches: ``fusedops``, ``textbook``, ``liger``, ``module:function``.
        facts: of the device.
        config: of the launch; None: another's kernels choose their own.
        launches: in their order.
        notes: what a reader should know.
        error: why nothing was launched; None: nothing went wrong.
        memory_bound: the problem takes longer to read and write its tensors once than to compute, by the roofline
            model; None: nobody asked it.
    """

    op: str
    problem: str
    source: str
    facts: DeviceFacts
    config: Config | None = None
    launches: tuple[Launch, ...] = ()
    notes: tuple[str, ...] = ()
    error: str | None = None
    memory_bound: bool | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operator.

    Attributes:
        op: the operator's name.
        sizes: as :func:`fusedops.autotune.workloads.problems_of` takes them; what is missing is as in :data:`TYPICAL`.
        overrides: fields of the configuration that replace the default's, of the operator's own problems.
        only: problems of the call whose product, pass or direction is this; None: all.
    """

    op: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    only: str | None = None

    @property
    def all_sizes(self) -> dict[str, Any]:
        return {**TYPICAL[self.op], **self.sizes}

    def problems(self, facts: DeviceFacts) -> list[tuple[Operator, Any]]:
        """The problems that the call and its backward meet on a device.

        Raises:
            ValueError: there is no such operator, it takes no such sizes, or ``only`` leaves nothing.
            NotServedError: torch's operators serve the call on this device.
        """
        operator_named(self.op)
        met = problems_of(self.op, facts, **self.all_sizes)
        if not met:
            raise NotServedError(
                f"{self.op}: no kernel of fusedops serves such a call on {facts.name}: torch's operators do"
            )
        chosen = [(operator, problem) for operator, problem in met if self.only in (None, part_of(problem))]
        if not chosen:
            parts = dict.fromkeys(part_of(problem) for _, problem in met)
            raise ValueError(f"{self.op} has no part {self.only!r}; it has {', '.join(parts)}")
        return chosen

    def check_overrides(self) -> None:
        """ValueError where the operator's configuration has no such field; it names those that there are."""
        operator = operator_named(self.op)
        known = operator.config.__dataclass_fields__
        unknown = [name for name in self.overrides if name not in known]
        if unknown:
            raise ValueError(f"{self.op} has no {', '.join(unknown)} in its configuration; it has {', '.join(known)}")


def part_of(problem: Any) -> str:
    """Which kernel of a call a problem is of: ``forward``, ``backward``, ``backward_kv``, ``grad_input``, …"""
    for name in ("product", "direction", "kernel"):
        if hasattr(problem, name):
            return str(getattr(problem, name))
    return "forward"


def captured(call: Call, facts: DeviceFacts) -> list[Captured]:
    """What each problem of a call launches, in the default configuration or with what overrides it.

    Where the default is torch's own product, nothing of ours would be launched: fusedops' own tile is shown instead.

    Raises:
        ValueError: as of :meth:`Call.problems`; or a value is none of the configuration's.
        NotServedError: as of :meth:`Call.problems`.
        RuntimeError: Triton is missing, or interprets kernels in this process.
    """
    call.check_overrides()
    return [_captured(call, operator, problem, facts) for operator, problem in call.problems(facts)]


def _captured(call: Call, operator: Operator, problem: Any, facts: DeviceFacts) -> Captured:
    config = operator.default(problem, facts)
    notes = []
    overrides = call.overrides if operator.name == call.op else {}
    if getattr(config, "kernel", "") == "torch" and overrides.get("kernel") != "torch":
        # Beside each family's table of defaults stands what chooses its own tile.
        config = importlib.import_module(operator.default.__module__).tiled_config(problem, facts)
        notes.append("torch's own product serves by default; this is fusedops' own kernel")
    if overrides:
        config = operator.config.from_json({**config.to_json(), **overrides})
        refused = operator.unfit(config, problem, facts)
        if refused is not None:
            notes.append(f"the tuner would refuse this configuration: {refused}")
    key = operator.key(problem)
    try:
        bound = _memory_bound(operator, config, problem, facts)
        trial = make_trial(operator, problem, torch.device("cpu"), empty=True)
        with backend("triton"), using(operator, problem, config), capture_launches(facts) as launches:
            trial.run()
    except Exception as error:  # a launcher may raise anything; the other problems are still wanted
        told = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return Captured(operator.name, key, OURS, facts, config, notes=tuple(notes), error=told)
    return Captured(operator.name, key, OURS, facts, config, tuple(launches), tuple(notes), memory_bound=bound)


def _memory_bound(operator: Operator, config: Config, problem: Any, facts: DeviceFacts) -> bool:
    work, product = operator.work(config, problem, facts), product_of(facts)
    return work.memory / product.memory_bandwidth > work.product / product.rate(work.unit)
