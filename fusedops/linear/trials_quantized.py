"""Trials of the quantised products, and which of them the public functions meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fusedops.autotune.trial import Trial
from fusedops.linear import reference_quantized as reference
from fusedops.linear.trials import Met
from fusedops.linear.trials_common import (
    Maker,
    Pad,
    activate,
    check_bucket,
    check_device,
    comparing,
    laid_out,
    operand,
    pick,
    sampled_rows,
    wide_dtype,
)
from fusedops.linear.tuning_quantized import (
    FP8_LINEAR,
    QUANTIZED_LINEAR,
    Fp8Problem,
    QuantizedProblem,
    RowScales,
    sums_in_float32,
)
from fusedops.runtime.backend import float8_dtypes, float8_reasons
from fusedops.runtime.device import DeviceFacts, device_facts
from fusedops.runtime.launch import ITEMSIZES, ceil_div, dtype_named

Tensors = Sequence[torch.Tensor]


def trial_of(problem: QuantizedProblem | Fp8Problem, device: torch.device, empty: bool = False) -> Trial:
    """The trial of a problem on a device; arguments and errors as of :func:`fusedops.linear.trials.trial_of`."""
    check_device(problem, device, empty)
    check_bucket(problem.rows)
    if isinstance(problem, Fp8Problem):
        return Fp8Trial(problem, device, empty)
    return QuantizedTrial(problem, device, empty)


class _InferenceTrial(Trial):
    """Y alone."""

    def __init__(self, problem: Any, device: torch.device, empty: bool) -> None:
        self.dtype, self.out_dtype = dtype_named(problem.dtype), dtype_named(problem.out_dtype)
        self.at = None if empty else sampled_rows(problem.rows, problem.cols, device)

    def compared(self, results: Tensors) -> Tensors:
        return [pick(result, self.at) for result in results]


class QuantizedTrial(_InferenceTrial):
    def __init__(self, problem: QuantizedProblem, device: torch.device, empty: bool) -> None:
        if problem.bits not in (4, 8) or (problem.bits == 4 and problem.depth % 2):
            raise NotImplementedError("a weight has 8 bits, or 4 and an even number of in_features")
        group = problem.group
        if group and (group % 16 or group >= problem.depth or problem.depth % group):
            raise NotImplementedError("a group is a multiple of 16 that divides in_features, or all of a row (0)")
        super().__init__(problem, device, empty)
        self.problem = problem
        self.tensors: dict[str, Any] = laid_out(device, empty, self._make, self._suits)

    def _make(self, maker: Maker, pad: Pad) -> dict[str, Any]:
        p, dtype = self.problem, self.dtype
        M, N, K = p.rows, p.cols, p.depth
        kind, size = (torch.uint8, K // 2) if p.bits == 4 else (torch.int8, K)
        weight = maker.empty(N, size + pad(size, 1), dtype=kind)[:, :size]
        scales = maker.empty(*((N, K // p.group) if p.group else (N,)), dtype=torch.float32)
        if maker.generator is not None:
            values = maker.normal(N, K, dtype=torch.float32, deviation=max(K, 1) ** -0.5)
            numbers, found = reference.quantize_weight(values, p.bits, p.group or None)
            weight.copy_(numbers)
            scales.copy_(found)
        return {
            "x": maker.matrix(M, K, "r", pad, dtype),
            "weight": weight,
            "scales": scales,
            "bias": maker.normal(N, dtype=dtype) if p.bias else None,
        }

    def _suits(self, tensors: dict[str, Any]) -> bool:
        x, weight = tensors["x"], tensors["weight"]
        return vectors(x.stride(0) * x.element_size(), weight.stride(0), weight.shape[1]) == self.problem.aligned

    def run(self) -> Tensors:
        from fusedops.linear.kernels_quantized import quantized_linear

        t, p = self.tensors, self.problem
        y = quantized_linear(
            t["x"], t["weight"], t["scales"], t["bias"], p.activation, p.group or None, self.out_dtype,
            "tf32" if p.tf32 else "ieee",
        )  # fmt: skip
        return [y]

    def plain(self) -> Tensors:
        return self._composed(self.dtype)

    def exact(self) -> Tensors:
        return self._composed(wide_dtype(self.dtype))

    def _composed(self, dtype: torch.dtype) -> Tensors:
        t, p = self.tensors, self.problem
        with comparing(t["x"]):
            x = pick(t["x"], self.at)
            w = reference.dequantize_weight(t["weight"], t["scales"], p.group or None, dtype)
            if dtype == self.dtype and p.tf32:
                x, w = operand(x, "tf32"), operand(w, "tf32")
            y = activate(p.activation, F.linear(x.to(dtype), w, None if t["bias"] is None else t["bias"].to(dtype)))
            return [y.to(self.out_dtype) if dtype == self.dtype else y]


class Fp8Trial(_InferenceTrial):
    def __init__(self, problem: Fp8Problem, device: torch.device, empty: bool) -> None:
        super().__init__(problem, device, empty)
        self.problem = problem
        self.weight_dtype = dtype_named(problem.weight_dtype)
        if problem.row_scales in ("input", "both") and problem.rows == 1:
            raise NotImplementedError("one row has one scale")
        if problem.row_scales in ("weight", "both") and problem.cols == 1:
            raise NotImplementedError("one row of the weight has one scale")
        if not empty:
            reasons = float8_reasons(device, (self.dtype, self.weight_dtype))
            coarse = problem.out_dtype == "float32" and not sums_in_float32(device_facts(device))
            if reasons or problem.exact != coarse:
                raise NotImplementedError("; ".join(reasons) or "the device's float8 sums have another precision")
        self.tensors: dict[str, Any] = laid_out(device, empty, self._make, self._suits)

    def _make(self, maker: Maker, pad: Pad) -> dict[str, Any]:
        p = self.problem
        M, N, K = p.rows, p.cols, p.depth
        x, scale_x = self._quantized(maker, M, K, pad, self.dtype, 1.0, p.row_scales in ("input", "both"))
        scale = max(K, 1) ** -0.5
        w, scale_w = self._quantized(maker, N, K, pad, self.weight_dtype, scale, p.row_scales in ("weight", "both"))
        bias = maker.normal(N, dtype=self.out_dtype) if p.bias else None
        return {"x": x, "w": w, "scale_x": scale_x, "scale_w": scale_w, "bias": bias}

    def _quantized(
        self, maker: Maker, rows: int, cols: int, pad: Pad, dtype: torch.dtype, size: float, per_row: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        quantized = maker.empty(rows, cols + pad(cols, 1), dtype=dtype)[:, :cols]
        scale = maker.empty(rows if per_row else 1, dtype=torch.float32)
        if maker.generator is not None:
            numbers, found = reference.quantize_fp8(
                maker.normal(rows, cols, dtype=torch.float32, deviation=size), dtype, per_row
            )
            quantized.copy_(numbers)
            scale.copy_(found.reshape(-1))
        return quantized, scale

    def _suits(self, tensors: dict[str, Any]) -> bool:
        from fusedops.linear.kernels_fp8 import readable_in_vectors

        both = readable_in_vectors(tensors["x"]) and readable_in_vectors(tensors["w"])
        return both == self.problem.aligned

    def run(self) -> Tensors:
        from fusedops.linear.kernels_fp8 import fp8_linear

        t = self.tensors
        y = fp8_linear(t["x"], t["w"], t["scale_x"], t["scale_w"], t["bias"], self.problem.activation, self.out_dtype)
        return [y]

    def plain(self) -> Tensors:
        return [self._composed(self.out_dtype).to(self.out_dtype)]

    def exact(self) -> Tensors:
        return [self._composed(wide_dtype(self.out_dtype))]

    def _composed(self, dtype: torch.dtype) -> torch.Tensor:
        t = self.tensors
        with comparing(t["scale_x"]):
            x, scale_x = pick(t["x"].to(dtype), self.at), t["scale_x"][:, None]
            if self.at is not None and scale_x.numel() > 1:
                scale_x = scale_x[self.at]
            z = F.linear(x, t["w"].to(dtype)) * scale_x.to(dtype) * t["scale_w"].to(dtype)
            return activate(self.problem.activation, z if t["bias"] is None else z + t["bias"].to(dtype))


def vectors(row_bytes: int, weight_row_bytes: int, weight_bytes: int) -> bool:
    """Whether rows so many bytes apart can be read in vectors; a weight whose rows are no whole words is copied."""
    if weight_bytes % 4 or weight_row_bytes % 4:
        weight_row_bytes = 4 * ceil_div(weight_bytes, 4)
    return not (row_bytes % 16 or weight_row_bytes % 16)


def problems_of(
    *,
    rows: int,
    in_features: int,
    out_features: int,
    facts: DeviceFacts,
    bits: int = 4,
    group_size: int | None = None,
    dtype: str = "bfloat16",
    out_dtype: str | None = None,
    activation: str | None = None,
    bias: bool = False,
    allow_tf32: bool = False,
) -> list[Met]:
    """The problem that a call of :func:`fusedops.quantized_linear` asks a configuration for.

    Args:
        bits: of a weight.
        group_size: as of :func:`fusedops.quantized_linear`.
        others: as of :func:`fusedops.linear.trials.problems_of`.

    Examples:
        >>> from fusedops.linear.trials_quantized import problems_of
        >>> from fusedops.runtime.device import TARGETS
        >>> met = problems_of(rows=1, in_features=4096, out_features=4096, group_size=128, facts=TARGETS["sm_90"])
        >>> [(operator.name, problem.group) for operator, problem in met]
        [('quantized_linear', 128)]
    """
    if not rows or not out_features:
        return []
    size = in_features * bits // 8
    tf32 = dtype == "float32" and allow_tf32 and facts.vendor != "interpreter"
    problem = QuantizedProblem.of(
        rows, out_features, in_features, group=group_size if group_size and group_size < in_features else 0, bits=bits,
        dtype=dtype, out_dtype=out_dtype, activation=activation, bias=bias, precision="tf32" if tf32 else "ieee",
        aligned=vectors(in_features * ITEMSIZES[dtype], size, size),
    )  # fmt: skip
    return [(QUANTIZED_LINEAR, problem)]


def fp8_problems_of(
    *,
    rows: int,
    in_features: int,
    out_features: int,
    facts: DeviceFacts,
    dtype: str | None = None,
    weight_dtype: str | None = None,
    out_dtype: str = "bfloat16",
    row_scales: RowScales = "no",
    activation: str | None = None,
    bias: bool = False,
) -> list[Met]:
    """The problem that a call of :func:`fusedops.fp8_linear` asks a configuration for.

    Args:
        dtype: a float8 dtype, of the input; None: the device's e4m3.
        weight_dtype: of the weight; None: as the input.
        row_scales: which of the two has a scale a row.
        others: as of :func:`fusedops.linear.trials.problems_of`.

    Examples:
        >>> from fusedops.linear.trials_quantized import fp8_problems_of
        >>> from fusedops.runtime.device import TARGETS
        >>> met = fp8_problems_of(rows=100, in_features=4096, out_features=4096, facts=TARGETS["sm_90"])
        >>> [(operator.name, problem.rows) for operator, problem in met]
        [('fp8_linear', 128)]
    """
    known = [str(each).removeprefix("torch.") for each in float8_dtypes(facts)]
    dtype = dtype or (known[0] if known else "")
    if not rows or not out_features or not {dtype, weight_dtype or dtype} <= set(known):
        return []  # there is nothing to compute, or torch's operators compute it
    both: dict[tuple[bool, bool], RowScales] = {
        (False, False): "no",
        (True, False): "input",
        (False, True): "weight",
        (True, True): "both",
    }
    problem = Fp8Problem.of(
        rows, out_features, in_features, dtype=dtype, weight_dtype=weight_dtype, out_dtype=out_dtype,
        row_scales=both[row_scales in ("input", "both") and rows > 1, row_scales in ("weight", "both")
                        and out_features > 1],
        activation=activation, bias=bias, aligned=in_features % 16 == 0,
        exact=out_dtype == "float32" and not sums_in_float32(facts),
    )  # fmt: skip
    return [(FP8_LINEAR, problem)]
