"""Trials of the grouped products, and which of them the public functions meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fusedops.autotune.trial import Trial
from fusedops.linear.reference import keeps_output
from fusedops.linear.trials import Met, new_weight, precisions
from fusedops.linear.trials_common import (
    Maker,
    Pad,
    activate,
    check_bucket,
    check_device,
    comparing,
    laid_out,
    letters,
    operand,
    pick,
    sampled_rows,
    sizing,
    wide_dtype,
)
from fusedops.linear.tuning_grouped import GROUPED_LINEAR, GroupedProblem
from fusedops.runtime.device import DeviceFacts
from fusedops.runtime.launch import ceil_div, dtype_named

Tensors = Sequence[torch.Tensor]


def trial_of(problem: GroupedProblem, device: torch.device, empty: bool = False) -> Trial:
    """The trial of a problem on a device; arguments and errors as of :func:`fusedops.linear.trials.trial_of`.

    Groups that are not equal have sizes as of a router that prefers some: most between half and twice the average.
    """
    check_device(problem, device, empty)
    check_bucket(problem.depth if problem.product == "weights" else problem.rows)
    if problem.groups < 1:
        raise NotImplementedError("no groups, nothing to compute")
    return _TRIALS[problem.product](problem, device, empty)


class _GroupedTrial(Trial):
    def __init__(self, problem: GroupedProblem, device: torch.device, empty: bool) -> None:
        self.problem = problem
        self.dtype = dtype_named(problem.dtype)
        self.rows = problem.depth if problem.product == "weights" else problem.rows  # of a group, on average
        self.bounds = [(g * self.rows, (g + 1) * self.rows) for g in range(problem.groups)]
        if not problem.equal:
            self.bounds = _uneven(problem.groups, problem.groups * self.rows)

    def _offsets(self, maker: Maker) -> torch.Tensor | None:
        """Where each group ends; None: all have the same number of rows."""
        if self.problem.equal:
            return None
        if maker.device.type == "meta":
            return maker.empty(self.problem.groups, dtype=torch.int32)
        return torch.tensor([end for _, end in self.bounds], dtype=torch.int32, device=maker.device)

    def _rows_of(self, maker: Maker, cols: int, letter: str, pad: Pad, scale: float = 1.0) -> torch.Tensor:
        """All groups' rows: one matrix, or, of equal groups, one each."""
        G = self.problem.groups
        if self.problem.equal:
            return maker.matrices(G, self.rows, cols, letter, pad, self.dtype, scale)
        return maker.matrix(G * self.rows, cols, letter, pad, self.dtype, scale)

    def _read(self, rows: torch.Tensor) -> torch.Tensor:
        """As the launcher tells it."""
        return rows if self.problem.equal else rows[None]

    def _of_group(self, rows: torch.Tensor, group: int) -> torch.Tensor:
        return rows[group] if self.problem.equal else rows[slice(*self.bounds[group])]

    def _suits_them(self, *read: torch.Tensor) -> bool:
        from fusedops.linear.kernels_common import aligned

        p = self.problem
        return letters(read[0], read[-1]) == p.layout and all(map(aligned, read)) == p.aligned

    def plain(self) -> Tensors:
        return self._composed(self.dtype)

    def exact(self) -> Tensors:
        return self._composed(wide_dtype(self.dtype))

    def _composed(self, dtype: torch.dtype) -> Tensors:
        raise NotImplementedError


class RowsTrial(_GroupedTrial):
    """Each group's rows times its matrix, and what is kept for the backward."""

    def __init__(self, problem: GroupedProblem, device: torch.device, empty: bool) -> None:
        super().__init__(problem, device, empty)
        if problem.keeps and (problem.activation is None or keeps_output(problem.activation)):
            raise NotImplementedError("the backward of this product needs nothing that only it needs")
        total = problem.groups * problem.rows
        self.at = None if empty else sampled_rows(total, problem.cols, device)
        self.tensors: dict[str, Any] = laid_out(device, empty, self._make, self._suits)

    def _make(self, maker: Maker, pad: Pad) -> dict[str, Any]:
        p, dtype = self.problem, self.dtype
        G, N, K = p.groups, p.cols, p.depth
        return {
            "x": self._rows_of(maker, K, p.layout[0], pad),
            "w": maker.matrices(G, N, K, p.layout[1], pad, dtype, scale=max(K, 1) ** -0.5),
            "offsets": self._offsets(maker),
            "bias": maker.normal(G, N, dtype=dtype) if p.bias else None,
        }

    def _suits(self, tensors: dict[str, Any]) -> bool:
        return self._suits_them(self._read(tensors["x"]), tensors["w"])

    def run(self) -> Tensors:
        from fusedops.linear.kernels_grouped import grouped_linear

        t, p = self.tensors, self.problem
        results = grouped_linear(t["x"], t["w"], t["offsets"], t["bias"], p.activation, p.keeps, p.precision)
        return results[: 1 + p.keeps]

    def compared(self, results: Tensors) -> Tensors:
        return [pick(result.flatten(0, -2), self.at) for result in results]

    def _composed(self, dtype: torch.dtype) -> Tensors:
        t, p = self.tensors, self.problem
        ys, zs = [], []
        with comparing(t["x"]):
            for group, (first, end) in enumerate(self.bounds):
                x, w = self._of_group(t["x"], group), t["w"][group]
                if self.at is not None:
                    x = x[self.at[(self.at >= first) & (self.at < end)] - first]
                if dtype == self.dtype:
                    x, w = operand(x, p.precision), operand(w, p.precision)
                b = None if t["bias"] is None else t["bias"][group].to(dtype)
                zs.append(F.linear(x.to(dtype), w.to(dtype), b))
                ys.append(activate(p.activation, zs[-1]))
            return [torch.cat(ys), torch.cat(zs)][: 1 + p.keeps]


class WeightsTrial(_GroupedTrial):
    """Each group's dW, and db."""

    def __init__(self, problem: GroupedProblem, device: torch.device, empty: bool) -> None:
        super().__init__(problem, device, empty)
        if problem.activation is not None or problem.keeps:
            raise NotImplementedError("a product weights has no activation and keeps nothing")
        self.at = None if empty else sampled_rows(problem.rows, problem.groups * problem.cols, device)
        # Where only the bias's gradient is wanted, the launcher says that the other matrix has one column.
        self.alone = False
        try:
            self.tensors: dict[str, Any] = laid_out(device, empty, self._make, self._suits)
        except NotImplementedError:
            if not (problem.bias and problem.cols == 1):
                raise
            self.alone = True
            self.tensors = laid_out(device, empty, self._make, self._suits)

    def _make(self, maker: Maker, pad: Pad) -> dict[str, Any]:
        p = self.problem
        return {
            "dz": self._rows_of(maker, p.rows, p.layout[0], pad, scale=max(self.rows, 1) ** -0.5),
            "x": None if self.alone else self._rows_of(maker, p.cols, p.layout[1], pad),
            "offsets": self._offsets(maker),
        }

    def _suits(self, tensors: dict[str, Any]) -> bool:
        return self._suits_them(*(self._read(t) for t in (tensors["dz"], tensors["x"]) if t is not None))

    def run(self) -> Tensors:
        from fusedops.linear.kernels_grouped import grouped_linear_backward

        t, p, dtype = self.tensors, self.problem, self.dtype
        needs = (False, not self.alone, p.bias)
        _, dw, db = grouped_linear_backward(
            t["dz"], t["x"], None, t["offsets"], None, None, needs, dtype, dtype, False, p.precision
        )
        return self._wanted(dw, db)

    def _wanted(self, dw: torch.Tensor, db: torch.Tensor) -> Tensors:
        return [dw] * (not self.alone) + [db] * self.problem.bias

    def compared(self, results: Tensors) -> Tensors:
        return [result if self.at is None else result[:, self.at] for result in results]

    def _composed(self, dtype: torch.dtype) -> Tensors:
        t, p = self.tensors, self.problem
        dws, dbs = [], []
        with comparing(t["dz"]):
            for group in range(p.groups):
                dz = self._of_group(t["dz"], group)
                dz = dz if self.at is None else dz[:, self.at]
                dbs.append(dz.to(dtype).sum(0))
                if not self.alone:
                    x = self._of_group(t["x"], group)
                    if dtype == self.dtype:
                        dz, x = operand(dz, p.precision), operand(x, p.precision)
                    dws.append(dz.to(dtype).t() @ x.to(dtype))
            return self._wanted(torch.stack(dws or dbs), torch.stack(dbs))


_TRIALS: dict[str, Callable[..., Trial]] = {"rows": RowsTrial, "weights": WeightsTrial}


def _uneven(groups: int, rows: int) -> list[tuple[int, int]]:
    """(first row, end) of each group, the same in every process."""
    share = torch.randn(groups, generator=torch.Generator().manual_seed(groups)).mul(0.4).softmax(0).double()
    ends = (share.cumsum(0) / share.sum() * rows).round().long().tolist()
    ends[-1] = rows
    return list(zip([0, *ends[:-1]], ends, strict=True))


def problems_of(
    *,
    groups: int,
    rows: int,
    in_features: int,
    out_features: int,
    facts: DeviceFacts,
    dtype: str = "bfloat16",
    activation: str | None = None,
    bias: bool = False,
    equal: bool = False,
    training: bool = True,
    input_gradient: bool = True,
    transposed: bool = False,
    fp32_precision: str | None = None,
    allow_tf32: bool = False,
) -> list[Met]:
    """The problems that a call of :func:`fusedops.grouped_linear`, and its backward, ask a configuration for.

    Args:
        groups: number of matrices.
        rows: of the input: of all groups together, or, with ``equal``, of each.
        equal: :func:`fusedops.batched_linear` instead.
        others: as of :func:`fusedops.linear.trials.problems_of`.

    Returns:
        (operator, problem), each once, in the order in which they are met.

    Examples:
        >>> from fusedops.linear.trials_grouped import problems_of
        >>> from fusedops.runtime.device import TARGETS
        >>> met = problems_of(groups=8, rows=8192, in_features=4096, out_features=14336, facts=TARGETS["sm_90"])
        >>> [(problem.product, problem.cols) for operator, problem in met]
        [('rows', 14336), ('rows', 4096), ('weights', 4096)]
    """
    if not (groups and rows and out_features):
        return []
    from fusedops.linear.kernels_common import aligned

    G, N, K, kind = groups, out_features, in_features, dtype_named(dtype)
    average = rows if equal else ceil_div(rows, G)
    precision, _ = precisions(dtype, facts, fp32_precision, allow_tf32)
    found: dict[GroupedProblem, None] = {}
    with sizing(facts) as maker:

        def ask(product: Any, sizes: tuple[int, int, int], first: Any, last: Any, **more: Any) -> None:
            problem = GroupedProblem.of(
                product, G, *sizes, dtype=dtype, layout=letters(first, last), precision=precision, equal=equal,
                aligned=aligned(first) and aligned(last), **more,
            )  # fmt: skip
            found[problem] = None

        x, dz = (maker.empty(G if equal else 1, rows, size, dtype=kind) for size in (K, N))
        flat = new_weight(maker, N, K, transposed, kind)
        w = torch.empty_strided((G, N, K), (N * K, *flat.stride()), dtype=kind, device=flat.device)
        keeps = training and activation is not None and not keeps_output(activation)
        ask("rows", (average, N, K), x, w, activation=activation, bias=bias, keeps=keeps)
        if training and K:
            if input_gradient:
                ask("rows", (average, K, N), dz, w.transpose(1, 2))
            ask("weights", (N, K, average), dz, x, bias=bias)
    return [(GROUPED_LINEAR, problem) for problem in found]
