"""The attention operators (``torch.ops.fusedops.attention``, ``attention_backward``) and their autograd Function."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.attention import reference
from fusedops.attention.reference import Gradients, compute_dtype, empty_gradients, empty_heads
from fusedops.runtime.backend import can_launch
from fusedops.runtime.library import below_autograd, first_order_only, register

_Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Attention(torch.autograd.Function):
    """Saves the inputs, the output and two numbers a row; never the scores."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None,
        causal: int,
        scale: float,
        allow_tf32: bool,
    ) -> _Outputs:
        with below_autograd():
            out, lse, statistics = attention_op(q, k, v, attn_mask, causal, scale, allow_tf32)
        need_q, need_k, _, need_mask = ctx.needs_input_grad[:4]
        through_scores = need_q or need_k or need_mask
        ctx.save_for_backward(q, k, v, attn_mask, out if through_scores else None, statistics)
        ctx.arguments = (causal, scale, allow_tf32)
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        return out, lse, statistics

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_output: torch.Tensor | None, grad_lse: torch.Tensor | None, _: Any) -> Any:
        if grad_output is None and grad_lse is None:
            return (None,) * 7
        q, k, v, attn_mask, out, statistics = ctx.saved_tensors
        if grad_output is None:
            grad_output = q.new_zeros(()).expand(*q.shape[:3], v.shape[3])
        needs = ctx.needs_input_grad[:4]
        grads = attention_backward_op(
            grad_output, grad_lse, q, k, v, attn_mask, out, statistics, *ctx.arguments, *needs
        )
        return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), None, None, None


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    causal: int,
    scale: float,
    allow_tf32: bool,
) -> _Outputs:
    if can_launch(q):
        from fusedops.attention.kernels_forward import attention_forward

        return attention_forward(q, k, v, attn_mask, causal, scale, allow_tf32)
    out, lse, statistics = reference.attention(q, k, v, attn_mask, causal, scale)
    return empty_heads(q, out.shape).copy_(out), lse, statistics


def _attention_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    causal: int,
    scale: float,
    allow_tf32: bool,
) -> _Outputs:
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
    attn_mask: torch.Tensor | None,
    out: torch.Tensor | None,
    statistics: torch.Tensor,
    causal: int,
    scale: float,
    allow_tf32: bool,
    need_q: bool,
    need_k: bool,
    need_v: bool,
    need_mask: bool,
) -> Gradients:
    needs = (need_q, need_k, need_v, need_mask)
    arguments = (grad_output, grad_lse, q, k, v, attn_mask, out, statistics, causal, scale)
    if can_launch(q):
        from fusedops.attention.kernels_backward import attention_backward

        return attention_backward(*arguments, allow_tf32, needs)
    grads = empty_gradients(q, k, v, attn_mask, needs)
    for grad, need, value in zip(grads, needs, reference.attention_backward(*arguments), strict=True):
        if need and value is not None:
            grad.copy_(value)
    return grads


def _attention_backward_fake(
    grad_output: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    out: torch.Tensor | None,
    statistics: torch.Tensor,
    causal: int,
    scale: float,
    allow_tf32: bool,
    need_q: bool,
    need_k: bool,
    need_v: bool,
    need_mask: bool,
) -> Gradients:
    return empty_gradients(q, k, v, attn_mask, (need_q, need_k, need_v, need_mask))


# causal: 0 no, 1 top left, 2 bottom right. attn_mask has four dimensions.
attention_op = register(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, int causal, float scale, bool allow_tf32)"
    " -> (Tensor out, Tensor lse, Tensor statistics)",
    kernel=_attention,
    fake=_attention_fake,
    function=Attention,
)
# An unwanted gradient comes back as an empty tensor of shape (0,): a library op returns tensors only.
attention_backward_op = register(
    "attention_backward(Tensor grad_output, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? attn_mask,"
    " Tensor? out, Tensor statistics, int causal, float scale, bool allow_tf32,"
    " bool need_q, bool need_k, bool need_v, bool need_mask) -> (Tensor, Tensor, Tensor, Tensor)",
    kernel=_attention_backward,
    fake=_attention_backward_fake,
)
