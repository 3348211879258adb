"""Model how context parallel attention scales: bytes and time of one layer's attention, from stated speeds.

    python scripts/context_parallel_model.py [--tokens-per-gpu 8192] [--heads 32] [--kv-heads 8] ...

Arithmetic alone: nothing is measured and no GPU is used. The bytes are those that
fusedops.distributed.context_parallel_attention sends (tests/distributed/test_context_parallel_page.py counts them); the
times follow from the speeds below. docs/context-parallel.md has what this prints without arguments.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Speeds that the model assumes.

    Attributes:
        forward, backward: floating-point operations a second of the attention kernels, in the forward and the backward.
        inside: bytes a second and direction from a GPU to others of its node.
        between: the same to other nodes, for each GPU.
        node: GPUs a node.
    """

    forward: float = 600e12
    backward: float = 500e12
    inside: float = 0.8 * 450e9
    between: float = 0.8 * 50e9
    node: int = 8


@dataclass(frozen=True)
class Attention:
    """One layer's attention on ``ranks`` GPUs; ``length`` is that of a shard."""

    ranks: int
    length: int
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    size_v: int = 128
    batch: int = 1
    bytes_an_element: int = 2
    causal: bool = True

    @property
    def block(self) -> int:
        """Bytes of a rank's keys and values."""
        return self.batch * self.kv_heads * self.length * (self.size + self.size_v) * self.bytes_an_element

    @property
    def block_gradients(self) -> int:
        """Bytes of their gradients, which travel in float32."""
        return self.block // self.bytes_an_element * 4

    def ring_bytes(self) -> tuple[int, int]:
        """What a rank sends in a forward and in a backward where all blocks go all the way round.

        Forward: keys and values to the next rank in all steps but the last. Backward: again, and behind them their
        gradients, which from the last rank go home. (Contiguous causal chunks and windows stop earlier.)
        """
        steps = self.ranks - 1
        if not steps:
            return 0, 0
        return steps * self.block, steps * self.block + self.ranks * self.block_gradients

    def all_to_all_bytes(self) -> tuple[int, int]:
        """The same of the other method: q, k and v there, out back; in the backward their gradients."""
        kv_heads = self.kv_heads if self.kv_heads >= self.ranks else self.ranks
        elements = self.heads * (self.size + self.size_v) + kv_heads * (self.size + self.size_v)
        bytes_held = self.batch * self.length * elements * self.bytes_an_element
        sent = bytes_held // self.ranks * (self.ranks - 1)
        return sent, sent

    def step_operations(self) -> tuple[float, float]:
        """Floating-point operations of a rank in one step of the ring, forward and backward.

        Two products of 2 operations a score and element in the forward, five in the backward. In zig-zag order a causal
        step has half of all scores of a shard's queries and a shard's keys.
        """
        scores = self.batch * self.heads * self.length * self.length * (0.5 if self.causal else 1.0)
        return 2 * scores * (self.size + self.size_v), 2 * scores * (3 * self.size + 2 * self.size_v)


@dataclass(frozen=True)
class Times:
    """Seconds: of computing in all, and of waiting for what the computing does not hide."""

    compute: float
    exposed: float

    @property
    def share(self) -> float:
        return self.exposed / (self.compute + self.exposed)


def ring_link(attention: Attention, machine: Machine) -> float:
    """Bytes a second of the ring's slowest hop, for which all ranks wait."""
    return machine.inside if attention.ranks <= machine.node else machine.between


def ring_step(attention: Attention, machine: Machine) -> tuple[tuple[float, float], tuple[float, float]]:
    """((computing, exchange) of a step of the forward, the same of the backward), seconds."""
    forward, backward = attention.step_operations()
    link = ring_link(attention, machine)
    return (
        (forward / machine.forward, attention.block / link),
        (backward / machine.backward, (attention.block + attention.block_gradients) / link),
    )


def ring_times(attention: Attention, machine: Machine) -> tuple[Times, Times]:
    """Forward and backward: an exchange lasts as long as the computing of its step, or the rest is waited for."""
    ranks = attention.ranks
    (forward, sending), (backward, sending_back) = ring_step(attention, machine)
    home = attention.block_gradients / ring_link(attention, machine) if ranks > 1 else 0.0
    return (
        Times(ranks * forward, (ranks - 1) * max(0.0, sending - forward)),
        Times(ranks * backward, (ranks - 1) * max(0.0, sending_back - backward) + home),
    )


def all_to_all_times(attention: Attention, machine: Machine) -> tuple[Times, Times]:
    """Forward and backward: nothing is hidden; what stays in the node goes beside what leaves it."""
    ranks = attention.ranks
    results = []
    for operations, speed, sent in zip(
        attention.step_operations(), (machine.forward, machine.backward), attention.all_to_all_bytes(), strict=True
    ):
        to_each = sent / (ranks - 1) if ranks > 1 else 0.0
        near = min(ranks, machine.node) - 1
        seconds = max(to_each * near / machine.inside, to_each * (ranks - 1 - near) / machine.between)
        results.append(Times(ranks * operations / speed, seconds))
    return results[0], results[1]


COLUMNS = (
    "GPUs", "sequence", "ring: a step's computing, exchange (ms), forward", "the same, backward",
    "ring: MB sent, forward + backward", "ring: exposed, forward / backward",
    "all-to-all: MB sent, forward + backward", "all-to-all: exposed, forward / backward",
)  # fmt: skip
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)


def table(attentions: list[Attention], machine: Machine) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for attention in attentions:
        steps = [f"{a * 1e3:.2f}, {b * 1e3:.2f}" for a, b in ring_step(attention, machine)]
        cells = [
            str(attention.ranks),
            _tokens(attention.ranks * attention.length),
            *steps,
            _megabytes(attention.ring_bytes()),
            _shares(ring_times(attention, machine)),
        ]
        if attention.heads % attention.ranks == 0:
            cells += [_megabytes(attention.all_to_all_bytes()), _shares(all_to_all_times(attention, machine))]
        else:
            cells += ["–", "–"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _tokens(count: int) -> str:
    return f"{count // 1024}k" if count < 1 << 20 else f"{count / (1 << 20):g}M"


def _megabytes(sent: tuple[int, int]) -> str:
    return " + ".join(f"{count / 1e6:.0f}" for count in sent)


def _shares(times: tuple[Times, Times]) -> str:
    return " / ".join(f"{100 * each.share:.1f} %" for each in times)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens-per-gpu", type=int, default=8192, help="of the first table")
    parser.add_argument("--sequence", type=int, default=1 << 20, help="of the second table")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--not-causal", action="store_true")
    given = parser.parse_args(arguments)
    shape = {"heads": given.heads, "kv_heads": given.kv_heads, "size": given.size, "size_v": given.size}
    causal = not given.not_causal
    machine = Machine()
    print(f"{given.tokens_per_gpu} tokens a GPU:\n")
    print(table([Attention(n, given.tokens_per_gpu, causal=causal, **shape) for n in RANKS], machine))
    print(f"\nA sequence of {_tokens(given.sequence)} tokens:\n")
    print(table([Attention(n, given.sequence // n, causal=causal, **shape) for n in RANKS], machine))


if __name__ == "__main__":
    main()
