"""Trials of the gated product's forward, and which problems :func:`fusedops.gated_linear` meets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fusedops.autotune.trial import Trial
from fusedops.linear.trials import Asking, Met, new_weight, precisions
from fusedops.linear.trials_common import (
    Maker,
    Pad,
    activate,
    check_bucket,
    check_device,
    check_torch_serves,
    comparing,
    laid_out,
    letters,
    operand,
    pick,
    sampled_rows,
    sizing,
    torch_setting,
    wide_dtype,
)
from fusedops.linear.tuning_gated import GATED_LINEAR, GatedProblem
from fusedops.runtime.device import DeviceFacts
from fusedops.runtime.launch import dtype_named

Tensors = Sequence[torch.Tensor]


def trial_of(problem: GatedProblem, device: torch.device, empty: bool = False) -> Trial:
    """The trial of a problem on a device; arguments and errors as of :func:`fusedops.linear.trials.trial_of`."""
    check_device(problem, device, empty)
    check_torch_serves(problem, device, empty)
    check_bucket(problem.rows)
    return GatedTrial(problem, device, empty)


class GatedTrial(Trial):
    """Y, and the pre-activations [G | U]."""

    def __init__(self, problem: GatedProblem, device: torch.device, empty: bool) -> None:
        self.problem = problem
        self.dtype, self.out_dtype = dtype_named(problem.dtype), dtype_named(problem.out_dtype)
        self.at = None if empty else sampled_rows(problem.rows, 2 * problem.cols, device)
        self.tensors: dict[str, Any] = laid_out(device, empty, self._make, self._suits)

    def _make(self, maker: Maker, pad: Pad) -> dict[str, Any]:
        p, dtype = self.problem, self.dtype
        M, N, K = p.rows, p.cols, p.depth
        scale = max(K, 1) ** -0.5
        sizes = (2 * N,) if p.packed else (N, N)
        weights = [maker.matrix(size, K, p.layout[1], pad, dtype, scale) for size in sizes]
        biases = [maker.normal(size, dtype=dtype) if p.bias else None for size in sizes]
        return {"x": maker.matrix(M, K, p.layout[0], pad, dtype), "weights": weights, "biases": biases}

    def _suits(self, tensors: dict[str, Any]) -> bool:
        from fusedops.linear.kernels_common import aligned

        p, x, (gate, *ups) = self.problem, tensors["x"], tensors["weights"]
        up = ups[0] if ups else gate[p.cols :]
        return letters(x, up) == p.layout and all(map(aligned, (x, gate, up))) == p.aligned

    def run(self) -> Tensors:
        from fusedops.linear.kernels_gated import gated_linear

        t, p = self.tensors, self.problem
        weights, biases = t["weights"], t["biases"]
        up, bias_up = (None, None) if p.packed else (weights[1], biases[1])
        with torch_setting(p):
            output, saved = gated_linear(
                t["x"], weights[0], up, biases[0], bias_up, p.activation, self.out_dtype, False, p.keeps, p.precision
            )
        return [output, saved] if p.keeps else [output]

    def compared(self, results: Tensors) -> Tensors:
        return [pick(result, self.at) for result in results]

    def plain(self) -> Tensors:
        return self._composed(self.dtype)

    def exact(self) -> Tensors:
        return self._composed(wide_dtype(self.dtype))

    def _composed(self, dtype: torch.dtype) -> Tensors:
        t, p = self.tensors, self.problem
        plain = dtype == self.dtype
        with comparing(t["x"]):
            x, weights = pick(t["x"], self.at), t["weights"]
            if plain:
                x, weights = operand(x, p.precision), [operand(w, p.precision) for w in weights]
            z = torch.cat(
                [
                    F.linear(x.to(dtype), w.to(dtype), None if b is None else b.to(dtype))
                    for w, b in zip(weights, t["biases"], strict=True)
                ],
                -1,
            )
            g, u = z.chunk(2, -1)
            y = activate(p.activation, g) * u
            return [y.to(self.out_dtype) if plain else y, z][: 1 + p.keeps]


def problems_of(
    *,
    rows: int,
    in_features: int,
    out_features: int,
    facts: DeviceFacts,
    dtype: str = "bfloat16",
    parameter_dtype: str | None = None,
    out_dtype: str | None = None,
    activation: str | None = "silu",
    bias: bool = False,
    packed: bool = False,
    training: bool = True,
    input_gradient: bool = True,
    recompute: bool = False,
    transposed: bool = False,
    fp32_precision: str | None = None,
    allow_tf32: bool = False,
) -> list[Met]:
    """The problems that a call of :func:`fusedops.gated_linear`, and its backward, ask a configuration for.

    Args:
        out_features: of the result.
        packed: both weights are one matrix.
        others: as of :func:`fusedops.linear.trials.problems_of`.

    Returns:
        (operator, problem), each once, in the order in which they are met.

    Examples:
        >>> from fusedops.linear.trials_gated import problems_of
        >>> from fusedops.runtime.device import TARGETS
        >>> met = problems_of(rows=8000, in_features=4096, out_features=14336, facts=TARGETS["sm_90"])
        >>> [(operator.name, getattr(problem, "product", None)) for operator, problem in met]
        [('gated_linear', None), ('linear', 'grad_input'), ('linear', 'grad_weight')]
    """
    if not rows or not out_features:
        return []
    from fusedops.linear.kernels_common import aligned

    M, N, K = rows, out_features, in_features
    kind, of_parameter = dtype_named(dtype), dtype_named(parameter_dtype or dtype)
    precision, setting = precisions(dtype, facts, fp32_precision, allow_tf32)
    with sizing(facts) as maker:
        x = maker.empty(M, K, dtype=kind)
        weights = [new_weight(maker, size, K, transposed, kind) for size in ((2 * N,) if packed else (N, N))]
        up = weights[0][N:] if packed else weights[1]

        def forward(keeps: bool) -> GatedProblem:
            result = out_dtype or dtype
            return GatedProblem.of(
                M, N, K, dtype=dtype, out_dtype=result, layout=letters(x, up), activation=activation,
                precision=precision, aligned=all(map(aligned, (x, weights[0], up))),
                torch_serves=result == dtype and precision == setting, bias=bias, packed=packed, keeps=keeps,
            )  # fmt: skip

        found: dict[Any, None] = {forward(training and not recompute): None}
        if training:
            if recompute:
                found[forward(True)] = None
            products: dict[Any, None] = {}
            asking = Asking(products, precision, setting, facts)
            dz = maker.empty(M, 2 * N, dtype=kind)
            halves = [dz] if packed else [dz[:, :N], dz[:, -N:]]
            if input_gradient and K:
                operands = [matrix for pair in zip(halves, weights, strict=True) for matrix in pair]
                asking("grad_input", (M, K, 2 * N), operands, None, kind, pairs=len(halves))
            for half in halves if K else ():
                asking("grad_weight", (half.shape[1], K, M), (half, x), None, of_parameter)
            found |= products
    return [(_operator(problem), problem) for problem in found]


def _operator(problem: Any) -> Any:
    from fusedops.linear.tuning import LINEAR

    return GATED_LINEAR if isinstance(problem, GatedProblem) else LINEAR
