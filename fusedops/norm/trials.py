"""The norms' tuning problems with inputs of their own, and the problems that a call of the public functions meets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F

from fusedops.autotune.operator import Operator
from fusedops.autotune.trial import Numbers, Trial
from fusedops.norm import reference
from fusedops.norm.channels import as_channels
from fusedops.norm.tuning import GROUP_NORM, NORM, GroupNormProblem, NormProblem
from fusedops.runtime.device import DeviceFacts
from fusedops.runtime.dropout import keep_scale
from fusedops.runtime.launch import dtype_named

# Elements that plain torch computes at once, and of the results that are compared by rows, at each end.
_AT_ONCE = 1 << 24
_COMPARED = 1 << 22
_EPS, _DROPOUT = 1e-5, 0.1

Rows = tuple[int, int]


def _pieces(rows: int, width: int) -> Iterator[Rows]:
    """(first, end) of pieces that cover all rows."""
    step = max(1, _AT_ONCE // width)
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


def _compared(rows: int, width: int) -> list[Rows]:
    """(first, end) of the rows that are compared: all, or the first and the last ones."""
    most = max(1, _COMPARED // width)
    return [(0, rows)] if rows <= 2 * most else [(0, most), (rows - most, rows)]


def _of(rows: Sequence[Rows], tensor: torch.Tensor) -> torch.Tensor:
    """These rows of a tensor whose first dimension has them."""
    return torch.cat([tensor[first:end] for first, end in rows])


class _Rows(Trial):
    """What the trials of both norms share: results of which some have a row for each of the inputs' rows.

    Attributes:
        rows, width: rows, and elements of each.
        by_row: which of the results have rows; the others are sums over them.
    """

    rows: int
    width: int

    @property
    def by_row(self) -> tuple[bool, ...]:
        raise NotImplementedError

    @cached_property
    def _some(self) -> list[Rows]:
        return _compared(self.rows, self.width)

    def compared(self, results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [_of(self._some, t) if rows else t for t, rows in zip(results, self.by_row, strict=True)]

    def plain(self) -> Sequence[torch.Tensor]:
        return self._computed(exact=False)

    def exact(self) -> Sequence[torch.Tensor]:
        return self._computed(exact=True)

    def _computed(self, exact: bool) -> Sequence[torch.Tensor]:
        """Rows of what is compared by rows; sums of all pieces, in the compute dtype until the last is added."""
        pieces = self._some if all(self.by_row) else _pieces(self.rows, self.width)
        found: list[list[torch.Tensor]] = [[] for _ in self.by_row]
        for first, end in pieces:
            results = self.piece(first, end, exact)
            for parts, result, rows in zip(found, results, self.by_row, strict=True):
                if not rows:
                    total = result.double() if exact else result.float()
                    parts[:] = [total if not parts else parts[0] + total]
                    continue
                for low, high in self._some:
                    low, high = max(low, first), min(high, end)
                    if low < high:
                        parts.append(result[low - first : high - first])
        dtypes = [torch.float64 if exact else dtype for dtype in self.dtypes]
        return [torch.cat(parts).to(dtype) for parts, dtype in zip(found, dtypes, strict=True)]

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of the results."""
        raise NotImplementedError

    def piece(self, first: int, end: int, exact: bool) -> Sequence[torch.Tensor]:
        """The results of some rows: by torch's operators in the dtypes of the inputs, or in float64."""
        raise NotImplementedError


def _torch_norm(x: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None, kind: str, eps: float) -> torch.Tensor:
    """torch's own operator, in the dtype of x."""
    w, b = (p if p is None else p.to(x.dtype) for p in (w, b))
    if kind == "l2":
        y = F.normalize(x, 2.0, -1, eps)
        y = y if w is None else y * w
        return y if b is None else y + b
    if kind == "layer":
        return F.layer_norm(x, x.shape[-1:], w, b, eps)
    y = F.rms_norm(x, x.shape[-1:], w, eps)
    return y if b is None else y + b


class _NormTrial(_Rows):
    """Rows of a matrix, row-major.

    A problem with a wider element than its dtype has a wider residual stream: what is normalised, and its gradient.
    """

    def __init__(self, problem: NormProblem, device: torch.device, empty: bool) -> None:
        self.problem, self.rows, self.width = problem, problem.rows, problem.width
        self.dtype = dtype_named(problem.dtype)
        self.wide = self.dtype if self.dtype.itemsize == problem.itemsize else torch.float32
        self.eps = 1e-12 if problem.kind == "l2" else _EPS
        numbers = Numbers(device, empty)
        self.seed = numbers.seed() if problem.dropout else None
        self.dropout_p = _DROPOUT if problem.dropout else 0.0
        self.weight = numbers.normal(self.width, dtype=self.dtype, mean=1.0, deviation=0.2) if problem.weight else None
        self.bias = numbers.normal(self.width, dtype=self.dtype, deviation=0.2) if problem.bias else None
        self.numbers = numbers

    def _matrix(self, dtype: torch.dtype, mean: float = 0.0) -> torch.Tensor:
        return self.numbers.normal(self.rows, self.width, dtype=dtype, mean=mean)

    def _kept(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """Rows from ``first`` on, with those elements that dropout drops set to zero."""
        if self.seed is None:
            return x
        rows = torch.arange(first, first + x.shape[0], device=x.device)
        return (x * keep_scale(self.seed, rows, self.width, self.dropout_p)).to(x.dtype)


class NormForwardTrial(_NormTrial):
    """output, residual_out where there is a residual, mean for layer norm, rstd."""

    def __init__(self, problem: NormProblem, device: torch.device, empty: bool) -> None:
        super().__init__(problem, device, empty)
        if self.wide != self.dtype and not problem.residual:
            raise NotImplementedError(
                f"norm: without a residual the widest element is the input's; got itemsize {problem.itemsize} and"
                f" dtype {problem.dtype}"
            )
        self.input = self._matrix(self.dtype, mean=0.5)
        self.residual = self._matrix(self.wide) if problem.residual else None
        self.present = (True, problem.residual, problem.kind == "layer", True)

    @property
    def by_row(self) -> tuple[bool, ...]:
        return (True,) * sum(self.present)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        each = (self.dtype, self.wide, torch.float32, torch.float32)
        return tuple(dtype for dtype, here in zip(each, self.present, strict=True) if here)

    def run(self) -> Sequence[torch.Tensor]:
        from fusedops.norm.kernels_forward import norm_forward

        results = norm_forward(
            self.input, self.residual, self.weight, self.bias, self.seed, 1, self.eps, 0.0, self.problem.kind,
            self.dropout_p, self.dtype,
        )  # fmt: skip
        return [result for result, here in zip(results, self.present, strict=True) if here]

    def piece(self, first: int, end: int, exact: bool) -> Sequence[torch.Tensor]:
        x = self.input[first:end]
        r = None if self.residual is None else self.residual[first:end]
        kind = self.problem.kind
        # The stream is rounded before it is normalised.
        x = self._kept(x.double() if exact else x, first)
        summed = x if r is None else (x + (r.double() if exact else r)).to(self.wide)
        if exact:
            arguments = (None, 1, self.eps, 0.0, kind, 0.0, torch.float64)
            y, _, mean, rstd = reference.norm(summed.double(), None, self.weight, self.bias, *arguments)
        else:
            y = _torch_norm(summed, self.weight, self.bias, kind, self.eps).to(self.dtype)
            mean = summed.mean(-1)
            if kind == "l2":
                rstd = summed.norm(dim=-1).clamp_min(self.eps).reciprocal()
            else:
                square = summed.var(-1, unbiased=False) if kind == "layer" else summed.square().mean(-1)
                rstd = torch.rsqrt(square + self.eps)
        return [result for result, here in zip((y, summed, mean, rstd), self.present, strict=True) if here]


def _summed(problem: NormProblem | GroupNormProblem) -> tuple[bool, bool]:
    """Whether the gradients of weight and bias are made: of one sum, the weight's where there is a weight."""
    both, one = problem.sums == 2, problem.sums == 1
    return both or (one and problem.weight), both or (one and not problem.weight)


class NormBackwardTrial(_NormTrial):
    """Gradients of the input, of the residual where the gradient of its stream arrives, of weight and bias as asked.

    Without dropout, input and residual of one dtype share their gradient.
    """

    def __init__(self, problem: NormProblem, device: torch.device, empty: bool) -> None:
        super().__init__(problem, device, empty)
        saved = self.dtype if problem.from_output else self.wide
        sums = _summed(problem)
        shared = problem.residual and not problem.dropout and self.wide == self.dtype
        self.needs = (not shared, problem.residual, *sums)
        self.all_dtypes = (self.dtype, self.wide, self.dtype, self.dtype)
        self.grad_output = self._matrix(self.dtype)
        self.grad_residual = self._matrix(self.wide) if problem.residual else None
        if problem.from_output and problem.itemsize > self.dtype.itemsize and not problem.residual:
            raise NotImplementedError(
                f"norm: the output and its gradient have one dtype; got itemsize {problem.itemsize} and {problem.dtype}"
            )
        self.saved = self._matrix(saved, mean=0.5)
        lead = (self.rows,)
        self.mean = torch.empty(
            lead if problem.kind == "layer" else (0,), dtype=torch.float32, device=self.saved.device
        )
        self.rstd = torch.empty(lead, dtype=torch.float32, device=self.saved.device)
        if not empty:
            self._normalise()

    def _normalise(self) -> None:
        """The statistics of what was drawn, and the output in its place where that is what is saved."""
        for first, end in _pieces(self.rows, self.width):
            x = self.saved[first:end]
            arguments = (None, 1, self.eps, 0.0, self.problem.kind, 0.0, self.dtype)
            y, _, mean, rstd = reference.norm(x, None, self.weight, self.bias, *arguments)
            self.rstd[first:end] = rstd
            if self.problem.kind == "layer":
                self.mean[first:end] = mean
            if self.problem.from_output:
                self.saved[first:end] = y
        if self.problem.from_output:
            self.mean = self.mean.new_empty(0)

    @property
    def by_row(self) -> tuple[bool, ...]:
        return tuple(rows for rows, need in zip((True, True, False, False), self.needs, strict=True) if need)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(dtype for dtype, need in zip(self.all_dtypes, self.needs, strict=True) if need)

    def run(self) -> Sequence[torch.Tensor]:
        from fusedops.norm.kernels_backward import norm_backward

        problem = self.problem
        results = norm_backward(
            self.grad_output, self.grad_residual, self.saved, self.weight, self.bias, self.mean, self.rstd, self.seed,
            1, self.eps, 0.0, problem.kind, self.dropout_p, problem.from_output, self.needs, self.all_dtypes,
        )  # fmt: skip
        return [result for result, need in zip(results, self.needs, strict=True) if need]

    def piece(self, first: int, end: int, exact: bool) -> Sequence[torch.Tensor]:
        dy, saved, rstd = (t[first:end] for t in (self.grad_output, self.saved, self.rstd))
        mean = self.mean[first:end] if self.mean.numel() else self.mean
        dr = None if self.grad_residual is None else self.grad_residual[first:end]
        problem = self.problem
        if exact or problem.from_output:
            dtype = torch.float64 if exact else self.dtype
            dx, _, dw, db = reference.norm_backward(
                dy, None, saved, self.weight, self.bias, mean.to(dtype), rstd.to(dtype), None, 1, self.eps, 0.0,
                problem.kind, 0.0, problem.from_output, (True, False, True, True), (dtype,) * 4,
            )  # fmt: skip
            dx = dx if dr is None else dx + dr.to(dx.dtype if exact else dr.dtype)
        else:
            with torch.enable_grad():
                x = saved.detach().requires_grad_()
                # Their gradients do not depend on them, and a bias, if it had one, takes no part.
                w = torch.ones(self.width, dtype=x.dtype, device=x.device) if self.weight is None else self.weight
                w = w.detach().to(x.dtype).requires_grad_()
                b = torch.zeros_like(w).requires_grad_()
                y = _torch_norm(x, w, b, problem.kind, self.eps)
                dx, dw, db = torch.autograd.grad(y, (x, w, b), dy.to(y.dtype))
            dx = dx if dr is None else dx + dr
        grads = (self._kept(dx, first), dx, dw, db)
        return [grad for grad, need in zip(grads, self.needs, strict=True) if need]


class _GroupTrial(_Rows):
    """(batch, channels, positions), contiguous or with the channels side by side; a row is a member of the batch."""

    def __init__(self, problem: GroupNormProblem, device: torch.device, empty: bool) -> None:
        self.problem, self.dtype = problem, dtype_named(problem.dtype)
        if problem.channels_last and problem.spatial == 1:
            raise NotImplementedError("group_norm: with one position a channel there is one layout only")
        self.channels = problem.channels * problem.groups
        self.rows, self.width = problem.batch, self.channels * problem.spatial
        self.numbers = Numbers(device, empty)
        self.input = self._image(mean=0.5)
        self.weight = self._parameter(1.0) if problem.weight else None
        self.bias = self._parameter(0.0) if problem.bias else None

    def _image(self, mean: float = 0.0) -> torch.Tensor:
        batch, spatial = self.problem.batch, self.problem.spatial
        if self.problem.channels_last:
            return self.numbers.normal(batch, spatial, self.channels, dtype=self.dtype, mean=mean).transpose(1, 2)
        return self.numbers.normal(batch, self.channels, spatial, dtype=self.dtype, mean=mean)

    def _parameter(self, mean: float) -> torch.Tensor:
        return self.numbers.normal(self.channels, dtype=self.dtype, mean=mean, deviation=0.2)


class GroupNormForwardTrial(_GroupTrial):
    """output, mean, rstd."""

    @property
    def by_row(self) -> tuple[bool, ...]:
        return True, True, True

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return self.dtype, torch.float32, torch.float32

    def run(self) -> Sequence[torch.Tensor]:
        from fusedops.norm.kernels_group import group_norm_forward

        return group_norm_forward(self.input, self.weight, self.bias, self.problem.groups, _EPS, self.dtype)

    def piece(self, first: int, end: int, exact: bool) -> Sequence[torch.Tensor]:
        x, groups = self.input[first:end], self.problem.groups
        if exact:
            return reference.group_norm(x.double(), self.weight, self.bias, groups, _EPS, torch.float64)
        rows = x.reshape(x.shape[0], groups, -1)
        rstd = torch.rsqrt(rows.var(-1, unbiased=False) + _EPS)
        weight = torch.ones_like(self.bias) if self.weight is None and self.bias is not None else self.weight
        return F.group_norm(x, groups, weight, self.bias, _EPS), rows.mean(-1), rstd


class GroupNormBackwardTrial(_GroupTrial):
    """Gradients of the input, weight and bias, as asked."""

    def __init__(self, problem: GroupNormProblem, device: torch.device, empty: bool) -> None:
        super().__init__(problem, device, empty)
        self.needs = (problem.input, *_summed(problem))
        self.grad_output = self._image()
        shape = (problem.batch, problem.groups)
        self.mean, self.rstd = (torch.empty(shape, dtype=torch.float32, device=self.input.device) for _ in range(2))
        if not empty:
            for first, end in _pieces(self.rows, self.width):
                x = self.input[first:end]
                found = reference.group_norm(x, None, None, problem.groups, _EPS, self.dtype)
                self.mean[first:end], self.rstd[first:end] = found[1:]

    @property
    def by_row(self) -> tuple[bool, ...]:
        return tuple(rows for rows, need in zip((True, False, False), self.needs, strict=True) if need)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.dtype,) * sum(self.needs)

    def run(self) -> Sequence[torch.Tensor]:
        from fusedops.norm.kernels_group_backward import group_norm_backward

        results = group_norm_backward(
            self.grad_output, self.input, self.weight, self.mean, self.rstd, self.problem.groups, self.needs, self.dtype
        )
        return [result for result, need in zip(results, self.needs, strict=True) if need]

    def piece(self, first: int, end: int, exact: bool) -> Sequence[torch.Tensor]:
        dy, x, mean, rstd = (t[first:end] for t in (self.grad_output, self.input, self.mean, self.rstd))
        groups = self.problem.groups
        grads: tuple[torch.Tensor, ...]
        if exact:
            grads = reference.group_norm_backward(dy, x, self.weight, mean.double(), rstd.double(), groups)
        else:
            with torch.enable_grad():
                x = as_channels(x).detach().requires_grad_()
                w = torch.ones(self.channels, dtype=x.dtype, device=x.device) if self.weight is None else self.weight
                w = w.detach().requires_grad_()
                b = torch.zeros_like(w).requires_grad_()
                grads = torch.autograd.grad(F.group_norm(x, groups, w, b, _EPS), (x, w, b), dy)
        return [grad for grad, need in zip(grads, self.needs, strict=True) if need]


@overload
def trial_of(problem: NormProblem, device: torch.device, empty: bool = False) -> _NormTrial: ...
@overload
def trial_of(problem: GroupNormProblem, device: torch.device, empty: bool = False) -> _GroupTrial: ...
def trial_of(problem: Any, device: torch.device, empty: bool = False) -> Trial:
    """The trial of a norm's or group norm's problem.

    Raises:
        NotImplementedError: no inputs have these sizes and dtypes; the message says why.

    Examples:
        >>> import torch
        >>> trial = trial_of(NormProblem(64, 4, "backward", sums=2, rows=4, dtype="float32"), torch.device("cpu"))
        >>> [tuple(t.shape) for t in trial.exact()]
        [(4, 64), (64,), (64,)]
    """
    forward = problem.direction == "forward"
    if isinstance(problem, NormProblem):
        return (NormForwardTrial if forward else NormBackwardTrial)(problem, device, empty)
    return (GroupNormForwardTrial if forward else GroupNormBackwardTrial)(problem, device, empty)


Problems = list[tuple[Operator[Any, Any], Any]]


def problems_of(
    *,
    rows: int,
    width: int,
    dtype: str = "bfloat16",
    kind: Literal["layer", "rms", "l2"] = "layer",
    weight: bool | None = None,
    bias: bool | None = None,
    residual: bool = False,
    residual_dtype: str | None = None,
    dropout: bool = False,
    recompute: bool = False,
    training: bool = True,
    facts: DeviceFacts | None = None,
) -> Problems:
    """What layer_norm, rms_norm, l2_norm and the norms with a residual look up.

    Args:
        rows: all leading dimensions' product.
        width: elements that are normalised together.
        dtype: of the input, and of the output and its gradient.
        weight, bias: None: what the norm has (l2: neither, rms: a weight, layer: both). In training they are trained.
        residual: add_layer_norm or add_rms_norm, whose sum is used further: its gradient arrives.
        residual_dtype: None: ``dtype``.
        dropout: of the input, before the residual is added.
        recompute: the backward begins with the output.
        training: the gradient too.
        facts: of the device, which makes no difference here.

    Returns:
        (operator, problem), one a kernel; a gradient's problem supposes that the input wants one.

    Examples:
        >>> [operator.key(problem) for operator, problem in problems_of(rows=4096, width=1024, training=False)]
        ['width=1024 itemsize=2 direction=forward dropout=no sums=0 rows=4096 kind=layer dtype=bfloat16 weight=yes bias=yes residual=no from_output=no']
    """  # noqa: E501
    weight = kind != "l2" if weight is None else weight
    bias = kind == "layer" if bias is None else bias
    own, stream = dtype_named(dtype), dtype_named(residual_dtype or dtype)
    itemsize = torch.promote_types(own, stream).itemsize if residual else own.itemsize
    forward = NormProblem.of(width, itemsize, "forward", dropout, 0, rows, kind, own, weight, bias, residual)
    found: Problems = [(NORM, forward)]
    if training:
        bias_read = bias and recompute
        backward = NormProblem.of(
            width, itemsize, "backward", dropout, weight + bias, rows, kind, own, weight, bias_read, residual, recompute
        )
        found.append((NORM, backward))
    return found


def group_problems_of(
    *,
    batch: int,
    channels: int,
    spatial: int,
    groups: int = 32,
    dtype: str = "bfloat16",
    channels_last: bool = False,
    weight: bool = True,
    bias: bool = True,
    training: bool = True,
    facts: DeviceFacts | None = None,
) -> Problems:
    """What group_norm looks up.

    Args:
        batch, channels: of the input, (batch, channels, *).
        spatial: the trailing dimensions' product.
        groups: that the channels are divided into.
        dtype: of the input.
        channels_last: of the input's memory format.
        weight, bias: there is one; in training it is trained.
        training: the gradient too, the input's included.
        facts: of the device, which makes no difference here.

    Examples:
        >>> [problem.sums for _, problem in group_problems_of(batch=8, channels=320, spatial=4096)]
        [0, 2]
    """
    kind, last = dtype_named(dtype), channels_last and spatial > 1
    sizes = (channels // groups, spatial, last, kind)
    found: Problems = [(GROUP_NORM, GroupNormProblem.of(*sizes, "forward", batch, groups, weight, bias))]
    if training:
        backward = GroupNormProblem.of(*sizes, "backward", batch, groups, weight, False, weight + bias, True)
        found.append((GROUP_NORM, backward))
    return found
