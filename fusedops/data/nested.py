"""The tensors within a batch, whatever it is made of."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch


def map_tensors(value: Any, function: Callable[[Any], Any]) -> Any:
    """``value`` with ``function(leaf)`` in the place of each tensor and of each other object that has a method ``to``.

    Walks through mappings, lists, tuples, named tuples and dataclasses, of which it makes new ones of the same type;
    anything else is handed on as it is. What occurs twice is asked for once.
    """
    done: dict[int, tuple[Any, Any]] = {}  # with what it was asked for, whose id is another's once it is gone

    def walk(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _mapping(value, {key: walk(item) for key, item in value.items()})
        # Before the containers: one that can move itself knows what is to stay (the sizes in a PackedSequence).
        if isinstance(value, torch.Tensor) or callable(getattr(value, "to", None)):
            if id(value) not in done:
                done[id(value)] = value, function(value)
            return done[id(value)][1]
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return value._make(map(walk, value))
        if type(value) in (list, tuple):
            return type(value)(map(walk, value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            new = copy.copy(value)  # not its constructor, which may check, compute or forbid
            for field in dataclasses.fields(value):
                object.__setattr__(new, field.name, walk(getattr(value, field.name)))
            return new
        return value

    return walk(value)


def _mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict or not isinstance(value, MutableMapping):
        return items
    new = copy.copy(value)  # with its attributes and, of a defaultdict, its factory
    for key, item in items.items():
        new[key] = item
    return new


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a batch, also those among the attributes of objects; each once."""
    seen: dict[int, Any] = {}

    def walk(value: Any) -> Iterator[torch.Tensor]:
        if id(value) in seen or isinstance(value, (str, bytes, int, float, type)):
            return
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            yield value
            return
        if isinstance(value, Mapping):
            inner = list(value.values())
        elif isinstance(value, (list, tuple)):
            inner = list(value)
        elif dataclasses.is_dataclass(value):
            inner = [getattr(value, field.name) for field in dataclasses.fields(value)]
        else:
            inner = list(getattr(value, "__dict__", {}).values()) if hasattr(value, "to") else []
        for item in inner:
            yield from walk(item)

    yield from walk(value)
