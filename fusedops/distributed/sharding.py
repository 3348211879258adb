"""Sharding rules: how each operator runs on tensors that are spread over devices (DTensor).

A rule lists ways: placements of an operator's inputs on one dimension of a device mesh, for which each device computes
its part of the results alone, and how the results are then placed. DTensor combines the ways of a mesh's dimensions
and takes the combination that moves the fewest bytes: none, for inputs that are placed in a way listed here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo, TupleStrategy
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

REPLICATE = Replicate()


class Way(NamedTuple):
    """Placements on one dimension of a mesh.

    Attributes:
        outputs: of each result.
        inputs: by argument; of an argument that is not named here, :data:`REPLICATE`.
    """

    outputs: Sequence[Any]
    inputs: dict[str, Any]


class Arguments:
    """A call as rules see it: each argument by its name; a tensor by shape, dtype and placements."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


Rule = Callable[[Arguments], Iterable[Way]]


def register_rules() -> None:
    """Give every operator its rule. Called by :func:`fusedops.runtime.sharded.prepare`."""
    import fusedops  # noqa: F401 (defines all operators)
    from fusedops.distributed.rules import FIXED, RULES

    for name, rule in RULES.items():
        op = getattr(torch.ops.fusedops, name).default
        # All arguments from the first on decide, None and flags too; lists of tensors are flattened.
        info = RuntimeSchemaInfo(static_argnum=0, needs_pytree=True)
        strategy = functools.partial(_strategy, rule, FIXED.get(name, ("seed",)))
        DTensor._op_dispatcher.sharding_propagator.register_op_strategy(op, strategy, info)


def _seen(value: Any) -> Any:
    if isinstance(value, OpStrategy):
        return value.strategies[0].output_spec
    if isinstance(value, TupleStrategy):
        return tuple(map(_seen, value.children if hasattr(value, "children") else value.childs))  # torch before 2.9
    return value


def _strategy(rule: Rule, fixed: Sequence[str], call: OpSchema) -> OpStrategy:
    """All ways of a call on its mesh, without those that would move a tensor that must stay as it is."""
    names = [argument.name for argument in call.op._schema.arguments]
    values = {name: _seen(value) for name, value in zip(names, call.args_schema, strict=True)}
    arguments = Arguments(values)
    results = len(call.op._schema.returns)
    tensors = [(name, spec) for name, value in values.items() for spec in _tensors(value)]
    ways = [Way([REPLICATE] * results, {}), *rule(arguments)]
    lists = [[*way.outputs, *(_placement(way, name, spec) for name, spec in tensors)] for way in ways]
    mesh = tensors[0][1].mesh
    if any(spec.mesh != mesh for _, spec in tensors):
        raise RuntimeError(f"fusedops::{_name(call.op)}: its inputs are on several device meshes; it takes one")
    strategy = expand_to_full_mesh_op_strategy(mesh, call, lists, input_index=results)
    stay = [(place, spec) for place, (name, spec) in enumerate(tensors) if name in fixed or _opaque(name, spec)]
    kept = [s for s in strategy.strategies if all(s.input_spec(at).placements == spec.placements for at, spec in stay)]
    if not kept:
        raise RuntimeError(_refusal(call.op, tensors, [tensors[at][0] for at, _ in stay]))
    return OpStrategy(kept)


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [spec for item in value for spec in _tensors(item)]
    return [value] if hasattr(value, "placements") else []


def _placement(way: Way, name: str, spec: Any) -> Any:
    # A tensor that stands for none, of shape (0,), is everywhere.
    return REPLICATE if tuple(spec.shape) == (0,) else way.inputs.get(name, REPLICATE)


def _opaque(name: str, spec: Any) -> bool:
    """What a forward keeps for its backward in an order of its own, shard by shard."""
    return name == "saved" and any(getattr(p, "dim", None) == len(spec.shape) - 1 for p in spec.placements)


def _name(op: Any) -> str:
    return op._schema.name.partition("::")[2]


def _refusal(op: Any, tensors: list[tuple[str, Any]], stay: list[str]) -> str:
    placed = ", ".join(f"{name} {tuple(spec.shape)}: {tuple(spec.placements)}" for name, spec in tensors)
    return (
        f"fusedops::{_name(op)} cannot run on tensors placed so without moving {', '.join(stay)}"
        f" ({placed}). Redistribute the inputs before the call to placements of the table in docs/distributed.md"
    )
