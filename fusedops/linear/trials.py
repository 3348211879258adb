"""Trials of the plain products, and which of them :func:`fusedops.linear` meets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fusedops.autotune.operator import Operator
from fusedops.autotune.trial import Trial
from fusedops.linear.reference import keeps_output, saves
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
    times_derivative,
    torch_setting,
    wide_dtype,
)
from fusedops.linear.tuning import LINEAR, LinearProblem, Product
from fusedops.runtime.device import DeviceFacts, device_facts
from fusedops.runtime.dropout import keep_scale
from fusedops.runtime.launch import dtype_named

Met = tuple[Operator[Any, Any], Any]
Tensors = Sequence[torch.Tensor]
MaybeTensor = torch.Tensor | None

_DROPOUT_P = 0.1


def trial_of(problem: LinearProblem, device: torch.device, empty: bool = False) -> Trial:
    """The trial of a problem on a device.

    Args:
        problem: a product.
        device: where the tensors belong.
        empty: make tensors of the meta device, whose launches can be compiled for any device.

    Raises:
        NotImplementedError: no tensors can be such a problem, or not on this device.

    Examples:
        >>> import torch
        >>> from fusedops.linear.trials import trial_of
        >>> from fusedops.linear.tuning import LinearProblem
        >>> problem = LinearProblem.of("forward", 64, 32, 48, dtype="float32", descriptors=True)
        >>> [tuple(tensor.shape) for tensor in trial_of(problem, torch.device("cpu"), empty=True).plain()]
        [(64, 32)]
    """
    check_device(problem, device, empty)
    check_torch_serves(problem, device, empty)
    return _TRIALS[problem.product](problem, device, empty)


class _LinearTrial(Trial):
    # Flags of a problem that its product has; all others must be unset.
    flags: frozenset[str]

    def __init__(self, problem: LinearProblem, device: torch.device, empty: bool) -> None:
        for name in {"bias", "keeps", "residual", "dropout", "accumulate", "descriptors"} - self.flags:
            if getattr(problem, name):
                raise NotImplementedError(f"a product {problem.product} has no {name}")
        if problem.pairs > 1 and problem.product != "grad_input":
            raise NotImplementedError(f"a product {problem.product} is of one pair")
        check_bucket(problem.depth if problem.product == "grad_weight" else problem.rows)
        self.problem = problem
        self.dtype, self.out_dtype = dtype_named(problem.dtype), dtype_named(problem.out_dtype)
        self.wide = wide_dtype(self.dtype)
        self.at = None if empty else sampled_rows(problem.rows, problem.cols, device)
        self.tensors: dict[str, Any] = laid_out(device, empty, self._make, self._suits)

    @abstractmethod
    def _make(self, maker: Maker, pad: Pad) -> dict[str, Any]:
        """The inputs, by names of the problem's."""

    @abstractmethod
    def _operands(self, tensors: dict[str, Any]) -> Sequence[MaybeTensor]:
        """The matrices that are multiplied, as the launcher tells them."""

    def _suits(self, tensors: dict[str, Any]) -> bool:
        from fusedops.linear.kernels_common import aligned

        matrices = [matrix for matrix in self._operands(tensors) if matrix is not None]
        of_this_layout = letters(matrices[0], matrices[-1]) == self.problem.layout
        return of_this_layout and all(map(aligned, matrices)) == self.problem.aligned

    def run(self) -> Tensors:
        with torch_setting(self.problem):
            return self._run(**self.tensors)

    @abstractmethod
    def _run(self, **tensors: Any) -> Tensors: ...

    def compared(self, results: Tensors) -> Tensors:
        return [pick(result, self.at) for result in results]


class ForwardTrial(_LinearTrial):
    """Y, and what is kept for the backward."""

    flags = frozenset({"bias", "keeps", "residual", "dropout", "descriptors"})

    def __init__(self, problem: LinearProblem, device: torch.device, empty: bool) -> None:
        super().__init__(problem, device, empty)
        b = self.tensors
        own = saves(problem.activation, b["residual"], b["seed"], self.dtype, self.out_dtype)
        if problem.keeps and not own:
            raise NotImplementedError("the backward of this product needs nothing that only it needs")
        if not empty and problem.descriptors != descriptors(b["x"], b["w"], self.out_dtype, device_facts(device)):
            raise NotImplementedError("the device has tensor descriptors, or it has none")

    def _make(self, maker: Maker, pad: Pad) -> dict[str, Any]:
        p, dtype, out_dtype = self.problem, self.dtype, self.out_dtype
        M, N, K = p.rows, p.cols, p.depth
        seed = None
        if p.dropout:
            seed = maker.seed()
        return {
            "x": maker.matrix(M, K, p.layout[0], pad, dtype),
            "w": maker.matrix(N, K, p.layout[1], pad, dtype, scale=max(K, 1) ** -0.5),
            "bias": maker.normal(N, dtype=dtype) if p.bias else None,
            "residual": maker.normal(M, N, dtype=out_dtype) if p.residual else None,
            "seed": seed,
        }

    def _operands(self, tensors: dict[str, Any]) -> Sequence[MaybeTensor]:
        return tensors["x"], tensors["w"]

    def _suits(self, tensors: dict[str, Any]) -> bool:
        p = self.problem
        fit = descriptors(tensors["x"], tensors["w"], self.out_dtype, None)
        # Matrices that can be read in vectors are not what keeps descriptors from standing for them.
        return super()._suits(tensors) and (fit == p.descriptors or (p.aligned and not p.descriptors))

    def _run(self, **t: Any) -> Tensors:
        from fusedops.linear.kernels_forward import linear_forward

        p = self.problem
        dropout_p = _DROPOUT_P if p.dropout else 0.0
        output, saved = linear_forward(
            t["x"], t["w"], t["bias"], t["residual"], t["seed"], p.activation, dropout_p, self.out_dtype, p.keeps,
            False, p.precision,
        )  # fmt: skip
        return [output, saved] if p.keeps else [output]

    def plain(self) -> Tensors:
        return self._composed(self.dtype)

    def exact(self) -> Tensors:
        return self._composed(self.wide)

    def _composed(self, dtype: torch.dtype) -> Tensors:
        t, p = self.tensors, self.problem
        exact = dtype == self.wide
        with comparing(t["x"]):
            x, w = pick(t["x"], self.at), t["w"]
            if not exact:
                x, w = operand(x, p.precision), operand(w, p.precision)
            z = F.linear(x.to(dtype), w.to(dtype), None if t["bias"] is None else t["bias"].to(dtype))
            y = activate(p.activation, z)
            saved = y if keeps_output(p.activation) else z
            if t["seed"] is not None:
                rows = p.rows if self.at is None else self.at
                y = y * keep_scale(t["seed"], rows, p.cols, _DROPOUT_P).to(dtype)
            if t["residual"] is not None:
                y = y + pick(t["residual"], self.at).to(dtype)
            return [y if exact else y.to(self.out_dtype), saved][: 1 + p.keeps]


class GradInputTrial(_LinearTrial):
    """dX of one pair (dZ, W), or of two that add up."""

    flags = frozenset()

    def __init__(self, problem: LinearProblem, device: torch.device, empty: bool) -> None:
        if problem.pairs not in (1, 2) or problem.depth % problem.pairs:
            raise NotImplementedError("a product grad_input is of one pair or of two of one depth")
        if problem.pairs > 1 and problem.activation is not None:
            raise NotImplementedError("a product of two pairs has no derivative")
        if problem.out_dtype != problem.dtype:
            raise NotImplementedError("a product grad_input has the dtype of its operands")
        super().__init__(problem, device, empty)

    def _make(self, maker: Maker, pad: Pad) -> dict[str, Any]:
        p, dtype = self.problem, self.dtype
        M, K, N = p.rows, p.cols, p.depth // p.pairs
        if p.pairs > 1 and p.layout[0] == "r":  # halves of one matrix
            both = maker.matrix(M, 2 * N, "r", pad, dtype)
            dys = [both[:, :N], both[:, N:]]
        else:
            dys = [maker.matrix(M, N, p.layout[0], pad, dtype) for _ in range(p.pairs)]
        ws = [maker.matrix(N, K, p.layout[1], pad, dtype, scale=max(p.depth, 1) ** -0.5) for _ in range(p.pairs)]
        return {"dys": dys, "ws": ws, "s": kept(maker, p.activation, M, N, dtype)}

    def _operands(self, tensors: dict[str, Any]) -> Sequence[MaybeTensor]:
        if self.problem.pairs > 1:
            return [matrix for pair in zip(tensors["dys"], tensors["ws"], strict=True) for matrix in pair]
        return [tensors["dys"][0], tensors["s"], tensors["ws"][0]]

    def _run(self, **t: Any) -> Tensors:
        from fusedops.linear.kernels_backward import grad_input_product, linear_backward
        from fusedops.runtime.device import device_guard

        p, dtype = self.problem, self.dtype
        if p.pairs > 1:
            dx = t["dys"][0].new_empty((p.rows, p.cols))
            with device_guard(dx):
                grad_input_product(list(zip(t["dys"], t["ws"], strict=True)), dx, p.precision)
            return [dx]
        return linear_backward(
            t["dys"][0], None, t["ws"][0], t["s"], None, p.activation, 0.0, [True, False, False], dtype, dtype, dtype,
            False, p.precision,
        )[:1]  # fmt: skip

    def plain(self) -> Tensors:
        return self._composed(self.dtype)

    def exact(self) -> Tensors:
        return self._composed(self.wide)

    def _composed(self, dtype: torch.dtype) -> Tensors:
        t, p = self.tensors, self.problem
        with comparing(t["dys"][0]):
            s = None if t["s"] is None else pick(t["s"], self.at)
            dx = None
            for dy, w in zip(t["dys"], t["ws"], strict=True):
                dz = times_derivative(p.activation, pick(dy, self.at).to(dtype), s)
                if dtype == self.dtype:
                    dz, w = operand(dz, p.precision), operand(w, p.precision)
                product = dz @ w.to(dtype)
                dx = product if dx is None else dx + product
            assert dx is not None
            return [dx]


class GradWeightTrial(_LinearTrial):
    """dW, or what it is added to, and db."""

    flags = frozenset({"bias", "accumulate"})

    def _make(self, maker: Maker, pad: Pad) -> dict[str, Any]:
        p, dtype = self.problem, self.dtype
        N, K, M = p.rows, p.cols, p.depth
        return {
            "dy": maker.matrix(M, N, p.layout[0], pad, dtype, scale=max(M, 1) ** -0.5),
            "x": maker.matrix(M, K, p.layout[1], pad, dtype),
            "s": kept(maker, p.activation, M, N, dtype),
            "main_grad": maker.normal(N, K, dtype=self.out_dtype) if p.accumulate else None,
        }

    def _operands(self, tensors: dict[str, Any]) -> Sequence[MaybeTensor]:
        return tensors["dy"], tensors["s"], tensors["x"]

    def _run(self, **t: Any) -> Tensors:
        from fusedops.linear.kernels_backward import linear_backward

        p, dtype = self.problem, self.dtype
        total = None if t["main_grad"] is None else t["main_grad"].clone()
        _, dw, db = linear_backward(
            t["dy"], t["x"], None, t["s"], None, p.activation, 0.0, [False, True, p.bias], dtype, self.out_dtype, dtype,
            False, p.precision, total,
        )  # fmt: skip
        return [dw if total is None else total, db][: 1 + p.bias]

    def plain(self) -> Tensors:
        t, p = self.tensors, self.problem
        with comparing(t["dy"]):
            dz = times_derivative(p.activation, self._columns(t["dy"]), self._columns(t["s"]))
            dw = (operand(dz, p.precision).t() @ operand(t["x"], p.precision)).to(self.out_dtype)
            if t["main_grad"] is not None:
                dw = pick(t["main_grad"], self.at) + dw
            return [dw, dz.sum(0)][: 1 + p.bias]

    def exact(self) -> Tensors:
        t, p, wide = self.tensors, self.problem, self.wide
        with comparing(t["dy"]):
            dy, s, x = self._columns(t["dy"]), self._columns(t["s"]), t["x"]
            dw: Any = 0.0 if t["main_grad"] is None else pick(t["main_grad"], self.at).to(wide)
            db: Any = 0.0
            rows = max(1, (1 << 26) // max(1, dy.shape[1] + x.shape[1]))  # at once, in this dtype
            for first in range(0, max(1, p.depth), rows):
                part = slice(first, first + rows)
                dz = times_derivative(p.activation, dy[part].to(wide), None if s is None else s[part])
                dw, db = dw + dz.t() @ x[part].to(wide), db + dz.sum(0)
            return [dw, db][: 1 + p.bias]

    def _columns(self, matrix: Any) -> Any:
        """Those of dY or S that the compared rows of dW come from."""
        return matrix if matrix is None or self.at is None else matrix[:, self.at]


_TRIALS: dict[str, Callable[..., Trial]] = {
    "forward": ForwardTrial,
    "grad_input": GradInputTrial,
    "grad_weight": GradWeightTrial,
}


def kept(maker: Maker, activation: str | None, rows: int, cols: int, dtype: torch.dtype) -> MaybeTensor:
    """What the activation's derivative is a function of: (rows, cols), contiguous; None without an activation."""
    if activation is None:
        return None
    s = maker.normal(rows, cols, dtype=dtype)
    return activate(activation, s) if keeps_output(activation) else s


def descriptors(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype, facts: DeviceFacts | None) -> bool:
    """Whether tensor descriptors can stand for the forward's matrices on a device; None: on one that has them."""
    from fusedops.linear.kernels_persistent import persistent_reason
    from fusedops.runtime.device import INTERPRETER, pretend

    with pretend(facts or INTERPRETER):
        return persistent_reason(x, w, out_dtype) is None


def problems_of(
    *,
    rows: int,
    in_features: int,
    out_features: int,
    facts: DeviceFacts,
    dtype: str = "bfloat16",
    parameter_dtype: str | None = None,
    out_dtype: str | None = None,
    activation: str | None = None,
    bias: bool = True,
    residual: bool = False,
    dropout: bool = False,
    training: bool = True,
    input_gradient: bool = True,
    main_grad: str | None = None,
    recompute: bool = False,
    transposed: bool = False,
    fp32_precision: str | None = None,
    allow_tf32: bool = False,
) -> list[Met]:
    """The problems that a call of :func:`fusedops.linear`, and its backward, ask a configuration for.

    Tensors are taken to be contiguous and to begin at aligned addresses, and the operators' default configurations to
    be in use: they decide where the backward computes a derivative, and with it which products follow.

    Args:
        rows: of the input, all leading dimensions together.
        in_features, out_features: the weight's sizes.
        facts: of the device.
        dtype: of the input.
        parameter_dtype: of weight and bias; None: the input's.
        out_dtype: of the result; None: the input's.
        activation, recompute, fp32_precision: as of :func:`fusedops.linear`.
        bias, residual, dropout: there is one.
        training: a backward follows, for all parameters.
        input_gradient: and for the input.
        main_grad: dtype of the tensor that the weight's gradient is added to, where it is.
        transposed: the weight is a transposed view.
        allow_tf32: torch's setting of float32 products.

    Returns:
        (operator, problem), each once, in the order in which they are met.

    Examples:
        >>> from fusedops.linear.trials import problems_of
        >>> from fusedops.runtime.device import TARGETS
        >>> met = problems_of(rows=8000, in_features=768, out_features=3072, activation="gelu", facts=TARGETS["sm_90"])
        >>> [problem.product for operator, problem in met]
        ['forward', 'grad_input', 'grad_input', 'grad_weight']
    """
    if not rows or not out_features:
        return []
    found: dict[LinearProblem, None] = {}
    kind = dtype_named(dtype)
    result, of_parameter = dtype_named(out_dtype or dtype), dtype_named(parameter_dtype or dtype)
    precision, setting = precisions(dtype, facts, fp32_precision, allow_tf32)
    with sizing(facts) as maker:
        asking = Asking(found, precision, setting, facts)
        x, dy = maker.empty(rows, in_features, dtype=kind), maker.empty(rows, out_features, dtype=result)
        w = new_weight(maker, out_features, in_features, transposed, kind)
        own = saves(activation, dy if residual else None, x if dropout else None, kind, result)
        asking(
            "forward", (rows, out_features, in_features), (x, w), activation, result,
            keeps=own and (training or recompute), residual=residual, dropout=dropout, bias=bias,
            descriptors=descriptors(x, w, result, facts),
        )  # fmt: skip
        if training:
            total = of_parameter if main_grad is None else dtype_named(main_grad)
            s = None if activation is None else maker.empty(rows, out_features, dtype=kind)
            if activation is None and not dropout:
                dy = dy.to(kind)
            _backward(asking, maker, dy, s, w if input_gradient else None, x, activation, total, bias, dropout,
                      main_grad is not None)  # fmt: skip
    return [(LINEAR, problem) for problem in found]


class Asking:
    """Stands for the launchers' look-up of a configuration: writes the problem down and answers the default."""

    def __init__(self, found: dict[LinearProblem, None], precision: str, setting: str, facts: DeviceFacts) -> None:
        self.found, self.precision, self.setting, self.facts = found, precision, setting, facts

    def __call__(
        self,
        product: Product,
        sizes: tuple[int, int, int],
        operands: Sequence[MaybeTensor],
        activation: str | None,
        result: torch.dtype,
        **more: Any,
    ) -> Any:
        from fusedops.linear.kernels_common import aligned

        matrices = [matrix for matrix in operands if matrix is not None]
        dtype = str(matrices[0].dtype).removeprefix("torch.")
        problem = LinearProblem.of(
            product, *sizes, dtype=dtype, out_dtype=str(result).removeprefix("torch."),
            layout=letters(matrices[0], matrices[-1]), activation=activation, precision=self.precision,
            aligned=all(map(aligned, matrices)),
            torch_serves=result == matrices[0].dtype and self.precision == self.setting, **more,
        )  # fmt: skip
        self.found[problem] = None
        return LINEAR.default(problem, self.facts)


def _backward(
    asking: Asking,
    maker: Maker,
    dy: torch.Tensor,
    s: MaybeTensor,
    w: MaybeTensor,
    x: torch.Tensor,
    activation: str | None,
    total: torch.dtype,
    bias: bool,
    dropout: bool,
    accumulate: bool,
) -> None:
    """What :func:`fusedops.linear.kernels_backward.linear_backward` asks for, in its order."""
    M, N, K, kind = *dy.shape, x.shape[1], x.dtype
    if K == 0:
        return

    def ask_input() -> Any:
        return asking("grad_input", (M, K, N), (dy, s, w), activation, kind)

    def ask_weight() -> Any:
        more = {"bias": bias, "accumulate": accumulate}
        return asking("grad_weight", (N, K, M), (dy, s, x), activation, total, **more)

    make_dz = dropout or dy.dtype != kind
    asked_input = asked_weight = False
    if w is not None and not make_dz:
        make_dz = not ask_input().prologue
        asked_input = True
    if not make_dz:
        make_dz = not ask_weight().prologue
        asked_weight = True
    if make_dz:  # and the bias's gradient with it
        dy, s, activation, bias = maker.empty(M, N, dtype=kind), None, None, False
        asked_input = asked_weight = False
    if w is not None and not asked_input:
        ask_input()
    if not asked_weight:
        ask_weight()


def precisions(dtype: str, facts: DeviceFacts, fp32_precision: str | None, allow_tf32: bool) -> tuple[str, str]:
    """(how a product is computed, how torch's setting would have it)."""
    if dtype != "float32":
        return "ieee", "ieee"
    setting = "tf32" if allow_tf32 and facts.vendor != "interpreter" else "ieee"
    return fp32_precision or setting, setting


def new_weight(maker: Maker, rows: int, cols: int, transposed: bool, dtype: torch.dtype) -> torch.Tensor:
    return maker.empty(cols, rows, dtype=dtype).t() if transposed else maker.empty(rows, cols, dtype=dtype)
