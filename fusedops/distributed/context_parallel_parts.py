"""A part of attention, some queries and some of their keys, and how parts become the whole.

With a row's statistics in each part, its largest score m_b and t_b = Σ exp(s - m_b), and its output o_b, the whole row
has (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax")::

    m = max_b m_b,   t = Σ_b t_b exp(m_b - m),   out = Σ_b o_b t_b exp(m_b - m) / t,   lse = m + log t

and with the statistics of whole rows, the formulas of fusedops.attention.kernels_backward give the part's exact share
of each gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fusedops.attention import reference
from fusedops.attention.autograd import attention_backward_op, attention_op
from fusedops.attention.options import Options
from fusedops.distributed.context_parallel_plan import Call

_LOG2E = 1.4426950408889634

Wanted = tuple[bool, bool, bool]
Grads = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class Parts(NamedTuple):
    """How the parts of a call are computed.

    Attributes:
        options: the operator's, complete but for the bounds.
        kernels: by the kernels; else by torch's operators.
    """

    options: Options
    kernels: bool

    @property
    def unit(self) -> float:
        """Statistics are those of scores times this: the kernels' are in base 2."""
        return _LOG2E if self.kernels else 1.0

    def exp(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp2(x) if self.kernels else torch.exp(x)

    def log(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log2(x) if self.kernels else torch.log(x)

    def _bounded(self, call: Call) -> Options:
        return self.options._replace(left=None if call.low is None else -call.low, right=call.high)

    def forward(
        self, call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(out, top, total) of the call's queries and keys; top is −inf, and total 0, for a query that sees none."""
        q, k, v = q[:, :, call.rows], k[:, :, call.columns], v[:, :, call.columns]
        if self.kernels:
            out, _, statistics = attention_op(q, k, v, *self._bounded(call))
        else:
            compute = reference.compute_dtype(q.dtype)
            out, _, statistics = reference.attention(q.to(compute), k.to(compute), v.to(compute), self._bounded(call))
        top, total = statistics.unbind()
        return out, top.masked_fill(total == 0, float("-inf")), total

    def backward(
        self,
        call: Call,
        grad: torch.Tensor,
        grad_lse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        statistics: torch.Tensor,
        needs: Wanted,
    ) -> Grads:
        """What the call adds to the gradients of its q, k and v; ``out`` and ``statistics`` are those of whole rows."""
        rows, columns = call.rows, call.columns
        q, grad, out, statistics = q[:, :, rows], grad[:, :, rows], out[:, :, rows], statistics[..., rows]
        k, v = k[:, :, columns], v[:, :, columns]
        grad_lse = None if grad_lse is None else grad_lse[:, :, rows]
        if self.kernels:
            wanted = [*needs, False, False, False]
            options = self._bounded(call)
            found = attention_backward_op(grad, grad_lse, q, k, v, out, statistics.contiguous(), *options, wanted)
            dq, dk, dv = (g if need else None for g, need in zip(found[:3], needs, strict=True))
            return dq, dk, dv
        with torch.autocast(q.device.type, enabled=False):
            return self._torch_backward(call, grad, grad_lse, q, k, v, out, statistics, needs)

    def _torch_backward(
        self,
        call: Call,
        grad: torch.Tensor,
        grad_lse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        statistics: torch.Tensor,
        needs: Wanted,
    ) -> Grads:
        compute, heads, kv_heads = statistics.dtype, q.shape[1], k.shape[1]
        scale, softcap = self.options.scale, self.options.softcap
        assert scale is not None
        q, k, v, do = (t.to(compute) for t in (q, k, v, grad))
        if kv_heads != heads:
            k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        s = scale * (q @ k.transpose(-1, -2))
        slope = None
        if softcap:
            tanh = torch.tanh(s / softcap)
            s, slope = softcap * tanh, 1 - tanh * tanh
        top, total = statistics[..., None].unbind()
        p = torch.exp(s - top) / total
        distance = torch.arange(s.shape[3], device=s.device) - torch.arange(s.shape[2], device=s.device)[:, None]
        hidden = total == 0
        if call.low is not None:
            hidden = hidden | (distance < call.low)
        if call.high is not None:
            hidden = hidden | (distance > call.high)
        p = p.masked_fill(hidden, 0.0)
        dq = dk = dv = None
        if needs[2]:
            dv = p.transpose(-1, -2) @ do
        if needs[0] or needs[1]:
            ds = p * (do @ v.transpose(-1, -2) - row_delta(grad, grad_lse, out, total[..., 0])[..., None])
            if slope is not None:
                ds = ds * slope
            dq = scale * (ds @ k) if needs[0] else None
            dk = scale * (ds.transpose(-1, -2) @ q) if needs[1] else None
        if kv_heads != heads:
            dk, dv = (None if x is None else x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
        return dq, dk, dv


class Whole:
    """Rows that grow part by part, in float32 (float64 for float64)."""

    def __init__(self, parts: Parts, q: torch.Tensor, size_v: int) -> None:
        compute = reference.compute_dtype(q.dtype)
        self.parts = parts
        self.acc = q.new_zeros((*q.shape[:3], size_v), dtype=compute)  # Σ_b o_b t_b exp(m_b - m)
        self.top = q.new_full(q.shape[:3], float("-inf"), dtype=compute)
        self.total = q.new_zeros(q.shape[:3], dtype=compute)

    def add(self, rows: slice, out: torch.Tensor | None, top: torch.Tensor, total: torch.Tensor) -> None:
        """Add a part to some rows; ``out`` None: 0, a sink's."""
        acc, old_top, old_total = self.acc[:, :, rows], self.top[:, :, rows], self.total[:, :, rows]
        new_top = torch.maximum(old_top, top)
        base = new_top.masked_fill(new_top == float("-inf"), 0.0)  # inf - inf is NaN
        before, now = self.parts.exp(old_top - base), total * self.parts.exp(top - base)
        acc.mul_(before[..., None])
        if out is not None:
            acc.addcmul_(out.to(acc.dtype), now[..., None])
        old_total.mul_(before).add_(now)
        old_top.copy_(new_top)

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """(heads,): one more logit in each row, that belongs to no key."""
        top = (sinks.to(self.top.dtype) * self.parts.unit)[:, None].expand(self.top.shape)
        self.add(slice(None), None, top, (top != float("-inf")).to(top.dtype))

    def results(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(out, lse, statistics) as the operator's."""
        blind = self.total == 0
        divisor = self.total.masked_fill(blind, 1.0)
        out = (self.acc / divisor[..., None]).to(dtype)
        lse = ((self.top + self.parts.log(divisor)) / self.parts.unit).masked_fill(blind, float("-inf"))
        return out, lse, torch.stack((self.top, self.total))


def row_delta(
    grad: torch.Tensor, grad_lse: torch.Tensor | None, out: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """do · out - dlse of each row, 0 for one that sees nothing."""
    delta = (grad.to(total.dtype) * out.to(total.dtype)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    return delta.masked_fill(total == 0, 0.0)


def sinks_gradient(parts: Parts, sinks: torch.Tensor, statistics: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """-Σ exp(sink - lse) delta over the rows of each head."""
    top, total = statistics.unbind()
    blind = total == 0
    share = parts.exp((sinks.to(top.dtype) * parts.unit)[:, None] - top) / total.masked_fill(blind, 1.0)
    return -(share.masked_fill(blind, 0.0) * delta).sum((0, 2)).to(sinks.dtype)
