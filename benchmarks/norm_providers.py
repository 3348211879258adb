"""What ``norm.py`` compares: layer and RMS norm, with and without a residual, and group norm, as others offer them.

A library is imported when it is asked for, and left out with the reason where it is not installed.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import fusedops
from benchmarks import compare
from benchmarks.measure import Run, norm_bytes
from benchmarks.report import OURS

OPERATORS = ("layer_norm", "rms_norm", "add_rms_norm", "add_layer_norm", "group_norm")
DIRECTIONS = ("forward", "backward", "both")
EPS = 1e-5
GROUPS = 32  # of group_norm, as the U-Nets of diffusion models have

# (x, residual or None, weight, bias or None) -> (y,) or (y, residual + x)
Function = Callable[
    [torch.Tensor, "torch.Tensor | None", torch.Tensor, "torch.Tensor | None"], tuple[torch.Tensor, ...]
]


# Operators by provider.
Found = dict[str, dict[str, Function]]


@dataclass(frozen=True, slots=True)
class Problem:
    """One operator at one size.

    Attributes:
        rows, width: of the input; of ``group_norm`` the groups of all images, and the elements a group.
    """

    operator: str
    rows: int
    width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, operator: str, width: int, dtype: torch.dtype, mib: float) -> Problem:
        """With as many rows as an input of so many MiB has; of ``group_norm`` with whole images."""
        rows = math.ceil(mib * 2**20 / (width * dtype.itemsize))
        return cls(operator, -(-rows // GROUPS) * GROUPS if operator == "group_norm" else rows, width, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the input: (rows, width), or (images, channels, positions)."""
        if self.operator != "group_norm":
            return self.rows, self.width
        return self.rows // GROUPS, self.channels, self.rows * self.width // (self.rows // GROUPS * self.channels)

    @property
    def channels(self) -> int:
        """Elements of a weight; of ``group_norm`` up to 8 a group."""
        return GROUPS * math.gcd(8, self.width) if self.operator == "group_norm" else self.width

    @property
    def adds(self) -> bool:
        return self.operator.startswith("add_")

    @property
    def has_bias(self) -> bool:
        return not self.operator.endswith("rms_norm")

    def least_bytes(self, direction: str) -> int:
        """The bytes that must move, by :func:`benchmarks.measure.norm_bytes`."""
        if direction == "both":
            return self.least_bytes("forward") + self.least_bytes("backward")
        parameters = self.channels * (2 if self.has_bias else 1)
        return norm_bytes(
            self.rows * self.width, self.dtype.itemsize, parameters, direction == "backward", residual=self.adds
        )


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors of a problem, and the gradients that arrive at its outputs."""

    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor
    bias: torch.Tensor | None
    gradients: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, problem: Problem, device: torch.device, random: bool = True) -> Inputs:
        """Fresh random numbers; ``random=False``: memory that is not even touched, for compiling alone."""

        def make(*shape: int) -> torch.Tensor:
            draw = torch.randn if random else torch.empty
            return draw(shape, dtype=problem.dtype, device=device)

        full, channels = problem.shape, problem.channels
        return cls(
            x=make(*full),
            residual=make(*full) if problem.adds else None,
            weight=make(channels),
            bias=make(channels) if problem.has_bias else None,
            gradients=tuple(make(*full) for _ in range(2 if problem.adds else 1)),
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        return self.x, self.residual, self.weight, self.bias

    def with_gradients(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors as leaves that require a gradient; their memory is shared."""
        return tuple(None if t is None else t.detach().requires_grad_() for t in self.tensors)


def run_in(direction: str, function: Function, inputs: Inputs) -> Run:
    """What to time: the forward without a graph (as in inference), the backward over a graph that was built before, or
    a forward and a backward (as in training)."""
    if direction == "forward":

        def forward() -> object:
            with torch.no_grad():
                return function(*inputs.tensors)

        return forward
    leaves = inputs.with_gradients()
    wanted = [leaf for leaf in leaves if leaf is not None]
    if direction == "both":
        return lambda: torch.autograd.grad(function(*leaves), wanted, inputs.gradients)
    outputs = function(*leaves)
    return lambda: torch.autograd.grad(outputs, wanted, inputs.gradients, retain_graph=True)


def _fusedops() -> dict[str, Function]:
    return {
        "layer_norm": lambda x, r, w, b: (fusedops.layer_norm(x, w.shape, w, b, EPS),),
        "rms_norm": lambda x, r, w, b: (fusedops.rms_norm(x, w.shape, w, EPS),),
        "add_rms_norm": lambda x, r, w, b: fusedops.add_rms_norm(x, r, w.shape, w, EPS),
        "add_layer_norm": lambda x, r, w, b: fusedops.add_layer_norm(x, r, w.shape, w, b, EPS),
        "group_norm": lambda x, r, w, b: (fusedops.group_norm(x, GROUPS, w, b, EPS),),
    }


def _torch() -> dict[str, Function]:
    def after_adding(norm: Function) -> Function:
        def add_norm(
            x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None
        ) -> tuple[torch.Tensor, ...]:
            added = x + residual
            return *norm(added, None, weight, bias), added

        return add_norm

    def layer_norm(
        x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        return (F.layer_norm(x, weight.shape, weight, bias, EPS),)

    def rms_norm(
        x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        return (F.rms_norm(x, weight.shape, weight, EPS),)

    def group_norm(
        x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        return (F.group_norm(x, GROUPS, weight, bias, EPS),)

    return {
        "layer_norm": layer_norm,
        "rms_norm": rms_norm,
        "add_rms_norm": after_adding(rms_norm),
        "add_layer_norm": after_adding(layer_norm),
        "group_norm": group_norm,
    }


def _torch_compile() -> dict[str, Function]:
    return {operator: compare.compiled(function) for operator, function in _torch().items()}


def _liger() -> dict[str, Function]:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.group_norm import LigerGroupNormFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # Its default overwrites the gradient that arrives, which a second backward would read.
    options = (EPS, 0.0, "llama", False)
    return {
        "layer_norm": lambda x, r, w, b: (LigerLayerNormFunction.apply(x, w, b, EPS),),
        "rms_norm": lambda x, r, w, b: (LigerRMSNormFunction.apply(x, w, *options),),
        "add_rms_norm": lambda x, r, w, b: LigerFusedAddRMSNormFunction.apply(x, r, w, *options),
        "group_norm": lambda x, r, w, b: (LigerGroupNormFunction.apply(x, w, b, x.shape[1], GROUPS, EPS),),
    }


def _flash_attn() -> dict[str, Function]:
    norm = importlib.import_module("flash_attn.ops.triton.layer_norm").layer_norm_fn
    return {
        "layer_norm": lambda x, r, w, b: (norm(x, w, b, eps=EPS),),
        "rms_norm": lambda x, r, w, b: (norm(x, w, None, eps=EPS, is_rms_norm=True),),
        "add_rms_norm": lambda x, r, w, b: norm(x, w, None, residual=r, eps=EPS, prenorm=True, is_rms_norm=True),
        "add_layer_norm": lambda x, r, w, b: norm(x, w, b, residual=r, eps=EPS, prenorm=True),
    }


def _apex() -> dict[str, Function]:
    norms = importlib.import_module("apex.normalization.fused_layer_norm")
    importlib.import_module("fused_layer_norm_cuda")  # absent where Apex was built without its CUDA extensions
    return {
        "layer_norm": lambda x, r, w, b: (norms.fused_layer_norm_affine(x, w, b, tuple(w.shape), EPS),),
        "rms_norm": lambda x, r, w, b: (norms.fused_rms_norm_affine(x, w, tuple(w.shape), EPS),),
    }


def _quack() -> dict[str, Function]:
    norm = importlib.import_module("quack.rmsnorm").rmsnorm
    return {
        "rms_norm": lambda x, r, w, b: (norm(x, w, eps=EPS),),
        "add_rms_norm": lambda x, r, w, b: norm(x, w, residual=r, eps=EPS, prenorm=True),
    }


PROVIDERS: dict[str, Callable[[], dict[str, Function]]] = {
    OURS: _fusedops,
    "torch": _torch,
    "torch.compile": _torch_compile,
    "liger": _liger,
    "flash-attn": _flash_attn,
    "apex": _apex,
    "quack": _quack,
}


# Elements of float64 that the reference holds at once.
_CHUNK = 1 << 22


def distance(problem: Problem, function: Function, inputs: Inputs) -> float:
    """Largest relative distance of a provider's outputs and gradients from float64's. NaN counts as infinite."""
    by_row = (True, True, False, False)
    exact = _torch()[problem.operator]
    at_once = max(1, _CHUNK // (inputs.x[0].numel() or 1))
    return compare.distance(function, exact, inputs.tensors, by_row, inputs.gradients, at_once)
