"""What ``device_check.py`` times: each operator at sizes of today's models, beside torch's ways of doing the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusedops
from benchmarks.measure import Run, attention_flops, linear_flops, norm_bytes

OURS = "fusedops"
Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Case:
    """One operator, one size, one direction.

    Attributes:
        operator, problem, direction: its name in the table.
        work: floating-point operations, or bytes moved, by ``unit``.
        unit: ``flop`` where arithmetic is the limit, ``byte`` where memory is.
        prepare: makes fresh tensors on a device and returns what to time by name, ``fusedops`` first. Torch's ways that
            this device or size does not have are left out.
    """

    operator: str
    problem: str
    direction: Direction
    work: int
    unit: Literal["flop", "byte"]
    prepare: Callable[[torch.device], dict[str, Run]]

    @property
    def name(self) -> str:
        return f"{self.operator} {self.problem} {self.direction}"


def all_cases(tiny: bool = False) -> list[Case]:
    """The cases, the most telling first: when the time runs out, the last are left out.

    Args:
        tiny: the same cases at sizes that a CPU runs in a moment, for a dry run.
    """
    families = [list(_attention(tiny)), list(_linear(tiny)), list(_norm(tiny))]
    longest = max(len(family) for family in families)
    return [family[i] for i in range(longest) for family in families if i < len(family)]


def _norm(tiny: bool) -> Iterator[Case]:
    shapes = [(16384, 4096), (65536, 1024), (4096, 16384), (1024, 65536)]
    for rows, width in [(8, 48), (3, 129)] if tiny else shapes:
        for operator in ("layer_norm", "rms_norm"):
            for direction in _DIRECTIONS:
                parameters = 2 if operator == "layer_norm" else 1
                moved = norm_bytes(rows, width, 2, parameters, direction == "backward")
                yield Case(
                    operator,
                    f"{rows} x {width}",
                    direction,
                    moved,
                    "byte",
                    _Norm(operator, rows, width, direction),
                )


def _linear(tiny: bool) -> Iterator[Case]:
    shapes = [
        (8192, 4096, 14336, "silu"),
        (16384, 1024, 4096, "gelu_tanh"),
        (8192, 4096, 4096, "relu"),
        (16384, 768, 3072, "gelu"),
    ]
    for rows, inputs, outputs, activation in [(7, 24, 40, "gelu"), (5, 16, 8, "silu")] if tiny else shapes:
        for direction in _DIRECTIONS:
            flops = linear_flops(rows, inputs, outputs, direction == "backward")
            prepare = _Linear(rows, inputs, outputs, activation, direction)
            yield Case("linear", f"{rows} x {inputs} -> {outputs} {activation}", direction, flops, "flop", prepare)


def _attention(tiny: bool) -> Iterator[Case]:
    # batch, query heads, key heads, sequence, head size, causal
    shapes = [
        (2, 16, 16, 8192, 128, True),
        (2, 16, 16, 8192, 128, False),
        (4, 16, 16, 4096, 64, True),
        (4, 16, 16, 4096, 64, False),
        (4, 32, 8, 4096, 128, True),
        (4, 16, 16, 4096, 96, True),
        (2, 8, 8, 4096, 256, True),
        (32, 12, 12, 512, 64, False),
    ]
    for b, hq, hk, s, d, causal in [(1, 2, 2, 17, 16, True), (1, 4, 2, 12, 8, False)] if tiny else shapes:
        for direction in _DIRECTIONS:
            flops = attention_flops(b, hq, s, s, d, causal, direction == "backward")
            heads = f"{hq}" if hq == hk else f"{hq}/{hk}"
            problem = f"{b} x {heads} x {s} x {d}{' causal' if causal else ''}"
            yield Case("attention", problem, direction, flops, "flop", _Attention(b, hq, hk, s, d, causal, direction))


_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def _draw(device: torch.device, *shape: int, scale: float = 1.0, grad: bool = False) -> torch.Tensor:
    return (torch.randn(shape, device=device) * scale).to(torch.bfloat16).requires_grad_(grad)


def _in_direction(
    forward: Callable[[], torch.Tensor], inputs: list[torch.Tensor], direction: Direction, grad: torch.Tensor | None
) -> Run:
    """What to time: the forward, or the backward alone over a graph that was built before."""
    if direction == "forward":
        return forward
    output = forward()
    return lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)


@dataclass(frozen=True, slots=True)
class _Norm:
    operator: str
    rows: int
    width: int
    direction: Direction

    def __call__(self, device: torch.device) -> dict[str, Run]:
        backward = self.direction == "backward"
        x = _draw(device, self.rows, self.width, grad=backward)
        weight, bias = (_draw(device, self.width, grad=backward) for _ in range(2))
        parameters = [weight, bias] if self.operator == "layer_norm" else [weight]
        grad = _draw(device, self.rows, self.width) if backward else None
        ours = getattr(fusedops, self.operator)
        torchs = getattr(F, self.operator)
        shape = (self.width,)
        inputs = [x, *parameters]
        return {
            OURS: _in_direction(lambda: ours(x, shape, *parameters), inputs, self.direction, grad),
            f"F.{self.operator}": _in_direction(lambda: torchs(x, shape, *parameters), inputs, self.direction, grad),
        }


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


@dataclass(frozen=True, slots=True)
class _Linear:
    rows: int
    inputs: int
    outputs: int
    activation: str
    direction: Direction

    def __call__(self, device: torch.device) -> dict[str, Run]:
        backward = self.direction == "backward"
        x = _draw(device, self.rows, self.inputs, grad=backward)
        weight = _draw(device, self.outputs, self.inputs, scale=self.inputs**-0.5, grad=backward)
        bias = _draw(device, self.outputs, grad=backward)
        grad = _draw(device, self.rows, self.outputs) if backward else None
        activate = ACTIVATIONS[self.activation]
        inputs = [x, weight, bias]
        forwards: dict[str, Callable[[], torch.Tensor]] = {
            OURS: lambda: fusedops.linear(x, weight, bias, self.activation),
            "addmm + activation": lambda: activate(F.linear(x, weight, bias)),
        }
        return {name: _in_direction(run, inputs, self.direction, grad) for name, run in forwards.items()}


_SDPA = {
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True, slots=True)
class _Attention:
    batch: int
    query_heads: int
    key_heads: int
    length: int
    width: int
    causal: bool
    direction: Direction

    def __call__(self, device: torch.device) -> dict[str, Run]:
        backward = self.direction == "backward"
        q = _draw(device, self.batch, self.query_heads, self.length, self.width, grad=backward)
        k, v = (_draw(device, self.batch, self.key_heads, self.length, self.width, grad=backward) for _ in range(2))
        grad = _draw(device, self.batch, self.query_heads, self.length, self.width) if backward else None
        gqa = self.query_heads != self.key_heads
        inputs = [q, k, v]

        def ours() -> torch.Tensor:
            return fusedops.attention(q, k, v, causal=self.causal)

        runs: dict[str, Run] = {OURS: _in_direction(ours, inputs, self.direction, grad)}
        choices: dict[str, Any] = _SDPA if device.type == "cuda" else {"SDPA": None}
        for name, choice in choices.items():

            def sdpa(choice: Any = choice) -> torch.Tensor:
                with nullcontext() if choice is None else sdpa_kernel(choice):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=gqa)

            try:
                with warnings.catch_warnings():  # torch warns of each reason why a backend does not take a call
                    warnings.simplefilter("ignore")
                    run = _in_direction(sdpa, inputs, self.direction, grad)
                    run()
            except RuntimeError:
                continue
            runs[name] = run
        return runs
