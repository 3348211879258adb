"""The definition of the gated product in plain torch: what the kernels are compared with, and the path without them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from fusedops.linear.activations import ACTIVATIONS
from fusedops.linear.reference import empty_weight_gradient, no_autocast

Tensors = tuple[torch.Tensor, ...]


def gated_linear(
    input: torch.Tensor,
    weight_gate: torch.Tensor,
    weight_up: torch.Tensor | None,
    bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
    recompute: bool,
    save: bool,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``y = a(g) ∘ u`` with ``g = x Wgᵀ + bg``, ``u = x Wuᵀ + bu``, all in float32, rounded once.

    Args:
        input: (..., in_features), any floating dtype; the operands' dtype. Computed in float32, or float64 for a
            float64 input.
        weight_gate, weight_up: (N, in_features); or weight_gate (2N, in_features), the gate's rows first, and
            weight_up None. Rounded to the input's dtype where they are float32 beside a 16-bit input.
        bias_gate, bias_up: (N,) or None each; or bias_gate (2N,) beside a packed weight.
        activation: a key of :data:`fusedops.linear.activations.ACTIVATIONS`, or None.
        out_dtype: the output's dtype; None: the input's.
        recompute: the backward computes the pre-activations again.
        save: a backward will follow.
        precision: of float32 products. Here torch's own setting decides.

    Returns:
        output: (..., N).
        saved: the pre-activations [g | u], (..., 2N) of the input's dtype, where ``save`` is set and ``recompute`` is
            not; else empty, shape (0,).
    """
    z = _preactivations(input, weight_gate, weight_up, bias_gate, bias_up)
    g, u = z.chunk(2, -1)
    output = (_forward(activation, g) * u).to(out_dtype or input.dtype)
    return output, z.to(input.dtype) if save and not recompute else input.new_empty(0)


def gated_linear_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor | None,
    weight_gate: torch.Tensor | None,
    weight_up: torch.Tensor | None,
    bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None,
    saved: torch.Tensor | None,
    packed: bool,
    activation: str | None,
    needs: list[bool],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype],
    transposed: tuple[bool, bool],
    precision: str,
) -> Tensors:
    """Gradients of :func:`gated_linear`; one that is not needed has shape (0,).

    ``dz = [dy ∘ u ∘ a′(g) | dy ∘ a(g)]``, ``dx = dz [Wg; Wu]``, ``d[Wg; Wu] = dzᵀ x``, ``d[bg; bu] = Σ dz``, the sums
    over all leading dimensions.

    Args:
        grad_output: (..., N), any floating dtype.
        input, weight_gate, weight_up, bias_gate, bias_up: the forward's, None where neither a wanted gradient nor
            the recomputation reads them.
        saved: the forward's pre-activations [g | u]; None: they are computed again.
        packed: the weight was.
        needs: which of the gradients of the five tensors are wanted.
        dtypes: of the gradients of the two weights and the two biases.
        transposed: the weight's gradient is laid out with unit stride along its rows, as the weight is; for each.
    """
    if saved is None:
        assert input is not None
        assert weight_gate is not None
        dtype, z = input.dtype, _preactivations(input, weight_gate, weight_up, bias_gate, bias_up).to(input.dtype)
    else:
        dtype, z = saved.dtype, saved
    compute = _compute_dtype(dtype)
    N = grad_output.shape[-1]
    dx, *others = empty_gradients(grad_output, input, weight_gate, packed, needs, dtypes, transposed, dtype)
    g, u = z.to(compute).chunk(2, -1)
    dy = grad_output.to(compute)
    with no_autocast(grad_output):
        dz = torch.cat((dy * u * _derivative(activation, g), dy * _forward(activation, g)), -1)
        rows = dz.reshape(math.prod(dz.shape[:-1]), 2 * N)
        if needs[0]:
            assert weight_gate is not None
            weights = weight_gate if packed or weight_up is None else torch.cat((weight_gate, weight_up))
            dx.copy_(dz @ weights.to(dtype).to(compute))
        halves = (rows, None) if packed else (rows[:, :N], rows[:, N:])
        for need, half, dw in zip(needs[1:3], halves, others[:2], strict=True):
            if need:
                assert input is not None
                assert half is not None
                dw.copy_(half.t() @ input.reshape(rows.shape[0], input.shape[-1]).to(compute))
        for need, half, db in zip(needs[3:], halves, others[2:], strict=True):
            if need:
                assert half is not None
                db.copy_(half.sum(0))
    return dx, *others


def empty_gradients(
    grad_output: torch.Tensor,
    input: torch.Tensor | None,
    weight: torch.Tensor | None,
    packed: bool,
    needs: list[bool],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype],
    transposed: tuple[bool, bool],
    dtype: torch.dtype,
) -> Tensors:
    """The backward's five results, uninitialised; those that are not needed of shape (0,). ``dtype``: of input's."""
    *lead, N = grad_output.shape
    rows = 2 * N if packed else N
    holder = weight if input is None else input
    K = 0 if holder is None else holder.shape[-1]
    dx = grad_output.new_empty((*lead, K) if needs[0] else (0,), dtype=dtype)
    weights = (
        empty_weight_gradient(grad_output, rows, K, dtypes[i], transposed[i])
        if needs[1 + i]
        else grad_output.new_empty(0, dtype=dtypes[i])
        for i in (0, 1)
    )
    biases = (grad_output.new_empty(rows if needs[3 + i] else 0, dtype=dtypes[2 + i]) for i in (0, 1))
    return dx, *weights, *biases


def torch_gated_linear(
    input: torch.Tensor,
    weight_gate: torch.Tensor,
    weight_up: torch.Tensor | None,
    bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
    mixed: bool,
) -> torch.Tensor:
    """The torch backend: torch's own products and activation. ``mixed``: a parameter's dtype is not the input's."""
    if mixed and not torch.is_autocast_enabled(input.device.type):
        weight_gate = weight_gate.to(input.dtype)
        weight_up, bias_gate, bias_up = (t if t is None else t.to(input.dtype) for t in (weight_up, bias_gate, bias_up))
    if weight_up is None:
        g, u = F.linear(input, weight_gate, bias_gate).chunk(2, -1)
    else:
        g, u = F.linear(input, weight_gate, bias_gate), F.linear(input, weight_up, bias_up)
    output = _forward(activation, g) * u
    return output.to(g.dtype if out_dtype is None else out_dtype)  # autocast may have widened the activation


def _preactivations(
    input: torch.Tensor,
    weight_gate: torch.Tensor,
    weight_up: torch.Tensor | None,
    bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None,
) -> torch.Tensor:
    """[g | u] in the compute dtype."""
    compute = _compute_dtype(input.dtype)
    pairs = [(weight_gate, bias_gate)] if weight_up is None else [(weight_gate, bias_gate), (weight_up, bias_up)]
    with no_autocast(input):
        x = input.to(compute)
        return torch.cat(
            [F.linear(x, w.to(input.dtype).to(compute), None if b is None else b.to(compute)) for w, b in pairs], -1
        )


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _forward(activation: str | None, g: torch.Tensor) -> torch.Tensor:
    return g if activation is None else ACTIVATIONS[activation].forward(g)


def _derivative(activation: str | None, g: torch.Tensor) -> torch.Tensor:
    if activation is None:
        return torch.ones_like(g)
    entry = ACTIVATIONS[activation]
    return entry.derivative(g if entry.derivative_of == "preactivation" else entry.forward(g))
