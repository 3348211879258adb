"""The attention operators (``torch.ops.fusedops.attention``, ``attention_backward``) and their autograd Function."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch

from fusedops.attention import reference
from fusedops.attention.options import SCHEMA, Gradients, Needs, Options, empty_gradients, empty_heads
from fusedops.attention.reference import compute_dtype
from fusedops.runtime.backend import can_launch
from fusedops.runtime.library import ATTENTION_HINT, first_order_only, register

_Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Attention(torch.autograd.Function):
    """Saves the inputs, the output and two numbers a row; never the scores."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> _Outputs:
        *options, compute = rest
        out, lse, statistics = compute(q, k, v, *options)
        given = Options(*options)
        # q, k, v, attn_mask, alibi_slopes, sinks: the options begin with the last three.
        needs = Needs(*ctx.needs_input_grad[:6])
        saved = out if any(needs[:2]) or any(needs[3:]) else None  # dv does not need it
        lists = (given.sequences, given.blocks, given.score_args, given.mask_args)
        tensors = (*options[:4], *itertools.chain(*lists))
        ctx.save_for_backward(q, k, v, saved, statistics, *tensors)
        ctx.lengths = tuple(map(len, lists))
        ctx.numbers = options[8:]
        ctx.needs = needs
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        return out, lse, statistics

    @staticmethod
    @partial(first_order_only, hint=ATTENTION_HINT)
    def backward(ctx: Any, grad_output: torch.Tensor | None, grad_lse: torch.Tensor | None, _: Any) -> Any:
        nothing = (None,) * (4 + len(Options._fields))
        if grad_output is None and grad_lse is None:
            return nothing
        q, k, v, out, statistics, *tensors = ctx.saved_tensors
        if grad_output is None:
            grad_output = q.new_zeros(()).expand(*q.shape[:3], v.shape[3])
        lists, at = [], 4
        for length in ctx.lengths:
            lists.append(tensors[at : at + length])
            at += length
        grads = attention_backward_op(
            grad_output, grad_lse, q, k, v, out, statistics, *tensors[:4], *lists, *ctx.numbers, list(ctx.needs)
        )
        return *(grad if need else None for grad, need in zip(grads, ctx.needs, strict=True)), *nothing[6:]


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> _Outputs:
    if can_launch(q):
        from fusedops.attention.kernels_forward import attention_forward

        return attention_forward(q, k, v, Options(*options))
    out, lse, statistics = reference.attention(q, k, v, Options(*options))
    return empty_heads(q, out.shape).copy_(out), lse.contiguous(), statistics.contiguous()


def _attention_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> _Outputs:
    rows = q.shape[:3]
    compute = compute_dtype(q.dtype)
    return (
        empty_heads(q, (*rows, v.shape[3])),
        q.new_empty(rows, dtype=compute),
        q.new_empty((2, *rows), dtype=compute),
    )


def _attention_backward(
    grad_output: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    statistics: torch.Tensor,
    *rest: Any,
) -> Gradients:
    *given, needs = rest
    options = Options(*given)
    if can_launch(q):
        from fusedops.attention.kernels_backward import attention_backward

        return attention_backward(grad_output, grad_lse, q, k, v, out, statistics, options, Needs(*needs))
    grads = empty_gradients(q, k, v, options, needs)
    values = reference.attention_backward(grad_output, grad_lse, q, k, v, options)
    for grad, need, value in zip(grads, needs, values, strict=True):
        if need and value is not None:
            grad.copy_(value)
    return grads


def _attention_backward_fake(
    grad_output: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    statistics: torch.Tensor,
    *rest: Any,
) -> Gradients:
    *options, needs = rest
    return empty_gradients(q, k, v, Options(*options), needs)


def gradient_asked(*tensors: torch.Tensor | None) -> bool:
    """Whether a backward of the operator will be asked for one of these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


# q, k, v: four dimensions (batch, heads, length, size). The options: fusedops.attention.options.Options.
attention_op = register(
    f"attention(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor out, Tensor lse, Tensor statistics)",
    kernel=_attention,
    fake=_attention_fake,
    function=Attention,
)
# An unwanted gradient comes back as an empty tensor of shape (0,): a library op returns tensors only.
attention_backward_op = register(
    "attention_backward(Tensor grad_output, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? out,"
    f" Tensor statistics, {SCHEMA}, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    kernel=_attention_backward,
    fake=_attention_backward_fake,
)
