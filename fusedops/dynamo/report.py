"""What the backend replaced in a graph, and what it left and why."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.fx import Node

LOG = logging.getLogger("fusedops.dynamo")


@dataclass(frozen=True, slots=True)
class Entry:
    """One place in a graph.

    Attributes:
        what: what was found there, such as ``"linear, gelu"``.
        function: the public function of fusedops that computes it, or would.
        place: file and line of the model's code; "" where Dynamo does not say.
        reason: why it was left as it is; "" where it was replaced.
    """

    what: str
    function: str
    place: str
    reason: str = ""

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        text = f"{self.what} -> {self.function}" if self.function else self.what
        return f"{text}{place}: {self.reason}" if self.reason else f"{text}{place}"


@dataclass(slots=True)
class Report:
    """What became of one graph. ``str()`` of it is for reading.

    Attributes:
        replaced: an :class:`Entry` for each place that calls fusedops now.
        left: an :class:`Entry` for each that was recognised and left as it is.
    """

    replaced: list[Entry] = field(default_factory=list)
    left: list[Entry] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"fusedops: {len(self.replaced)} replaced, {len(self.left)} left"]
        lines += [f"  + {entry}" for entry in self.replaced]
        lines += [f"  - {entry}" for entry in self.left]
        return "\n".join(lines)


_LINE = re.compile(r'File "(.*)", line (\d+)')


_TORCH = str(Path(torch.__file__).parent)


def place_of(node: Node) -> str:
    """The innermost line outside of torch that a node comes from, as Dynamo recorded it."""
    found = [place for place in _LINE.findall(node.meta.get("stack_trace") or "") if not place[0].startswith(_TORCH)]
    return f"{found[-1][0]}:{found[-1][1]}" if found else ""
