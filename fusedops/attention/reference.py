"""The definition of attention in plain torch: what the kernels are compared with, and the path without them."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fusedops.attention.modifiers import functions_of
from fusedops.attention.options import Options
from fusedops.runtime.backend import transformed
from fusedops.runtime.dropout import keep_scale
from fusedops.runtime.precision import autocast_dtype

_dot_product_attention = torch._C._nn.scaled_dot_product_attention  # what torch.nn.functional's is


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _no_autocast(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Products in the compute dtype, not in autocast's."""
    kind = tensor.device.type
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def _shared(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values as each query head reads them: query head h reads head h // group."""
    return x if x.shape[1] in (heads, 0) else x.repeat_interleave(heads // x.shape[1], dim=1)


class _Grid(NamedTuple):
    """Where each score lies: index tensors that broadcast to (batch, heads, seqlen_q, seqlen_k).

    Attributes:
        batch, head, i, j: the indices.
        shift: the diagonal is j = i + shift; a number, or (batch, 1, 1, 1).
        inside: False beyond the ends of packed sequences; None: all are inside.
        keep: 1 / (1 - p) where dropout keeps a weight, else 0; None: no dropout.
    """

    batch: torch.Tensor
    head: torch.Tensor
    i: torch.Tensor
    j: torch.Tensor
    shift: int | torch.Tensor
    inside: torch.Tensor | None
    keep: torch.Tensor | None

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, options: Options, packing: _Packing | None) -> _Grid:
        batch, heads, seqlen_q, _ = q.shape
        seqlen_k = k.shape[2]
        device = q.device
        # By unsqueezing, not by a view: with dynamic sizes torch.compile reasons much less about it.
        b = torch.arange(batch, device=device)[:, None, None, None]
        h = torch.arange(heads, device=device)[None, :, None, None]
        i = torch.arange(seqlen_q, device=device)[None, None, :, None]
        j = torch.arange(seqlen_k, device=device)[None, None, None, :]
        shift: int | torch.Tensor = 0
        inside = keep = None
        if packing is not None:
            lengths_q, lengths_k = (n.view(-1, 1, 1, 1) for n in (packing.q.lengths, packing.k.lengths))
            inside = (i < lengths_q) & (j < lengths_k)
        if options.bottom_right:
            shift = seqlen_k - seqlen_q if packing is None else lengths_k - lengths_q
        if options.seed is not None:
            rows = batch * heads * seqlen_q if packing is None else heads * packing.q.total
            keep = keep_scale(options.seed, rows, seqlen_k, options.dropout_p)
            if packing is None:
                keep = keep.view(batch, heads, seqlen_q, seqlen_k)
            else:
                keep = keep.view(heads, packing.q.total, seqlen_k)[:, packing.q.tokens].transpose(0, 1)
        return cls(b, h, i, j, shift, inside, keep)

    def seen(self, options: Options) -> torch.Tensor | None:
        """True where a query may see a key, by all but an additive mask; None: everywhere."""
        terms = [] if self.inside is None else [self.inside]
        if options.left is not None:
            terms.append(self.j >= self.i + self.shift - options.left)
        if options.right is not None:
            terms.append(self.j <= self.i + self.shift + options.right)
        if options.attn_mask is not None and not options.float_mask:
            terms.append(options.attn_mask)
        if options.mask_mod:
            definition = functions_of(options.mask_mod).definition
            assert definition is not None
            terms.append(definition(self.batch, self.head, self.i, self.j, *options.mask_args).to(torch.bool))
        seen = None
        for term in terms:
            seen = term if seen is None else seen & term
        return seen

    def distance(self) -> torch.Tensor:
        """|j - i - shift|, from the diagonal."""
        return (self.j - self.i - self.shift).abs()


class _Scores(NamedTuple):
    """Scores and what led to them, for a backward: (batch, heads, seqlen_q, seqlen_k).

    Attributes:
        tanh: of scale · q·k / softcap; None without a softcap.
        plain: what score_mod took.
        final: −inf where a query does not see a key.
    """

    tanh: torch.Tensor | None
    plain: torch.Tensor
    final: torch.Tensor


def _modified(plain: torch.Tensor, grid: _Grid, options: Options) -> torch.Tensor:
    if not options.score_mod:
        return plain
    definition = functions_of(options.score_mod).definition
    assert definition is not None
    return definition(plain, grid.batch, grid.head, grid.i, grid.j, *options.score_args)


def _scores(q: torch.Tensor, k: torch.Tensor, grid: _Grid, options: Options) -> _Scores:
    """In the dtype of q and k, whose heads are equal in number."""
    assert options.scale is not None
    s = options.scale * (q @ k.transpose(-1, -2))
    tanh = None
    if options.softcap:
        tanh = torch.tanh(s / options.softcap)
        s = options.softcap * tanh
    final = _modified(s, grid, options)
    if options.float_mask:
        assert options.attn_mask is not None
        final = final + options.attn_mask.to(s.dtype)
    if options.alibi_slopes is not None:
        final = final - options.alibi_slopes.to(s.dtype)[:, :, None, None] * grid.distance()
    seen = grid.seen(options)
    if seen is not None:
        final = final.masked_fill(~seen, float("-inf"))
    return _Scores(tanh, s, final)


class _Side(NamedTuple):
    """Packed sequences of queries, or of keys.

    Attributes:
        total: tokens, those past the last sequence included.
        lengths: (sequences,).
        tokens: (sequences, longest): which token each place of a padded sequence holds; any one past its end.
        past: (sequences, longest): True past its end.
        sequence, place: (total,): the padded place of each token.
        packed: (total, 1): False for a token past the last sequence.
    """

    total: int
    lengths: torch.Tensor
    tokens: torch.Tensor
    past: torch.Tensor
    sequence: torch.Tensor
    place: torch.Tensor
    packed: torch.Tensor

    @classmethod
    def of(cls, starts: torch.Tensor, total: int, longest: int) -> _Side:
        starts = starts.long()
        lengths = starts[1:] - starts[:-1]
        places = torch.arange(longest, device=starts.device)
        past = places >= lengths[:, None]
        tokens = (starts[:-1, None] + places).clamp(max=max(total - 1, 0))
        each = torch.arange(total, device=starts.device)
        sequence = torch.bucketize(each, starts[1:].contiguous(), right=True).clamp(max=max(lengths.numel() - 1, 0))
        place = (each - starts[sequence]).clamp(0, max(longest - 1, 0))
        return cls(total, lengths, tokens, past, sequence, place, (each < starts[-1])[:, None])

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """(1, heads, total, size) as (sequences, heads, longest, size), zeros past the end of each sequence."""
        if self.total == 0:
            return x.new_zeros(self.tokens.shape[0], x.shape[1], self.tokens.shape[1], x.shape[3])
        rows = x[0].transpose(0, 1)[self.tokens]
        return rows.masked_fill(self.past[..., None, None], 0.0).transpose(1, 2)

    def unpad(self, x: torch.Tensor, beyond: float = 0.0) -> torch.Tensor:
        """The way back; tokens past the last sequence get ``beyond``."""
        if 0 in self.tokens.shape:
            return x.new_full((1, x.shape[1], self.total, x.shape[3]), beyond)
        rows = x.transpose(1, 2)[self.sequence, self.place]
        return rows.masked_fill(~self.packed[..., None], beyond).transpose(0, 1)[None]


class _Packing(NamedTuple):
    q: _Side
    k: _Side

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, options: Options, longest: tuple[int, int] | None) -> _Packing | None:
        """None for dense tensors. ``longest``: of queries and keys; None: read from the device."""
        if not options.sequences:
            return None
        if longest is None:
            longest = longest_of(options.sequences[0]), longest_of(options.sequences[1])
            if options.attn_mask is not None:
                rows, columns = options.attn_mask.shape[2:]
                longest = max(longest[0], rows), max(longest[1], columns)
        return cls(
            _Side.of(options.sequences[0], q.shape[2], longest[0]),
            _Side.of(options.sequences[1], k.shape[2], longest[1]),
        )


def longest_of(starts: torch.Tensor) -> int:
    """Length of the longest of packed sequences. Waits for the device."""
    return int((starts[1:] - starts[:-1]).max()) if starts.numel() > 1 else 0


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    longest: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``out = softmax(s) v`` of each head (Vaswani et al. 2017, equation 1), differentiable.

    The scores: ``s = scale · q kᵀ``, capped where a softcap is given, through score_mod, plus the floating attn_mask,
    plus ALiBi's ``-slope · |j - i - shift|`` (Press et al. 2022), and −inf where a query does not see a key.

    Args:
        q: (batch, heads, seqlen_q, d_k).
        k: (batch, kv_heads, seqlen_k, d_k); query head h reads key head h // (heads // kv_heads).
        v: (batch, kv_heads, seqlen_k, d_v).
        options: all else.
        longest: with ``options.sequences``, at least the lengths of the longest ones; None: read from the device.

    Returns:
        out: (batch, heads, seqlen_q, d_v), dtype of q; 0 for a query that sees no key.
        lse: (batch, heads, seqlen_q), log Σ exp(s), a sink's exp included, float32 (float64 for float64 inputs); −inf
            for a query that sees neither key nor sink.
        statistics: (2, batch, heads, seqlen_q), what the backward needs of a row: the maximum of its scores (0 for such
            a query) and Σ exp(s - maximum). The kernels keep them in a unit of their own.
    """
    compute = compute_dtype(q.dtype)
    options = options.completed(q.shape[-1], options.seed, options.precision)
    with _no_autocast(q):
        packing = _Packing.of(q, k, options, longest)
        queries, keys, values = q.to(compute), k.to(compute), v.to(compute)
        if packing is not None:
            queries, keys, values = packing.q.pad(queries), packing.k.pad(keys), packing.k.pad(values)
        heads = q.shape[1]
        grid = _Grid.of(queries, keys, options, packing)
        s = _scores(queries, _shared(keys, heads), grid, options).final
        p, top, total = _softmax(s, options)
        if grid.keep is not None:
            p = p * grid.keep
        empty = total == 0
        divisor = total.masked_fill(empty, 1.0)
        out = (p / divisor) @ _shared(values, heads)
        lse = (divisor.log() + top).masked_fill(empty, float("-inf"))
        rows = [out, lse, top, total.detach()]
        if packing is not None:
            rows = [packing.q.unpad(x, float("-inf") if x is lse else 0.0) for x in rows]
        out, lse, top, total = rows
        if packing is not None and (0 in packing.q.tokens.shape or 0 in packing.k.tokens.shape):
            # Nothing was computed: every tensor still has a gradient, of zeros.
            given = (q, k, v, options.attn_mask, options.alibi_slopes, options.sinks)
            nothing = sum(t[:0].sum() for t in given if t is not None)
            out, lse = out + nothing, lse + nothing
        statistics = torch.stack((top, total)).squeeze(-1)
    return out.to(q.dtype), lse.squeeze(-1), statistics


def _softmax(s: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(exp(s - top), top, Σ exp(s - top)), the sink's part in the maximum and the sum."""
    with torch.no_grad():  # any shift gives the same result; the maximum keeps exp from overflowing
        top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), float("-inf"))
        if options.sinks is not None:
            top = torch.maximum(top, options.sinks.to(s.dtype).view(-1, 1, 1))
        top = top.masked_fill(top == float("-inf"), 0.0)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    if options.sinks is not None:
        total = total + torch.exp(options.sinks.to(s.dtype).view(-1, 1, 1) - top)
    return p, top, total


def attention_backward(
    grad_output: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of :func:`attention` with respect to q, k, v, a floating attn_mask, alibi_slopes and sinks.

    In the compute dtype; None where there is no such tensor. The formulas are in kernels_backward.
    """
    compute = compute_dtype(q.dtype)
    heads, kv_heads = q.shape[1], k.shape[1]
    if grad_output is None:
        grad_output = q.new_zeros(*q.shape[:3], v.shape[3])
    with _no_autocast(q):
        packing = _Packing.of(q, k, options, None)
        queries, keys, values, do = (t.to(compute) for t in (q, k, v, grad_output))
        dlse = None if grad_lse is None else grad_lse.to(compute)[..., None]
        if packing is not None:
            queries, do = packing.q.pad(queries), packing.q.pad(do)
            keys, values = packing.k.pad(keys), packing.k.pad(values)
            dlse = None if dlse is None else packing.q.pad(dlse)
        grid = _Grid.of(queries, keys, options, packing)
        keys, values = _shared(keys, heads), _shared(values, heads)
        tanh, plain, final = _scores(queries, keys, grid, options)
        p, top, total = _softmax(final, options)
        empty = total == 0
        total = total.masked_fill(empty, 1.0)
        p = p / total
        weights = p if grid.keep is None else p * grid.keep
        dp = do @ values.transpose(-1, -2)
        if grid.keep is not None:
            dp = dp * grid.keep
        delta = (do * (weights @ values)).sum(-1, keepdim=True)
        if dlse is not None:
            delta = (delta - dlse).masked_fill(empty, 0.0)
        ds = p * (dp - delta)
        dmask = dslopes = dsinks = None
        if options.float_mask:
            assert options.attn_mask is not None
            dmask = ds.sum_to_size(options.attn_mask.shape)
        if options.alibi_slopes is not None:
            dslopes = -(ds * grid.distance()).sum((2, 3)).sum_to_size(options.alibi_slopes.shape)
        if options.sinks is not None:
            share = torch.exp(options.sinks.to(compute).view(-1, 1, 1) - top) / total
            dsinks = -(share * delta).sum((0, 2, 3))
        if options.score_mod:
            with torch.enable_grad():
                leaf = plain.detach().requires_grad_()
                (ds,) = torch.autograd.grad(_modified(leaf, grid, options), leaf, ds)
            ds = ds.masked_fill(final == float("-inf"), 0.0)
        if tanh is not None:
            ds = ds * (1 - tanh * tanh)
        assert options.scale is not None
        dq = options.scale * (ds @ keys)
        dk = options.scale * (ds.transpose(-1, -2) @ queries)
        dv = weights.transpose(-1, -2) @ do
        if kv_heads != heads:
            dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
        if packing is not None:
            dq, dk, dv = packing.q.unpad(dq), packing.k.unpad(dk), packing.k.unpad(dv)
    return dq, dk, dv, dmask, dslopes, dsinks


def torch_mask(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """The mask in a dtype that torch's operator takes."""
    if mask is None or mask.dtype in (torch.bool, torch.float32, q.dtype):
        return mask
    return mask.float()


def attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, longest: tuple[int, int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The torch backend where torch's own operator does not serve: lse, ALiBi, sinks, softcap, dropout, rules, …"""
    dtype = autocast_dtype(q)
    out, lse, _ = attention(q.to(dtype), k.to(dtype), v.to(dtype), options, longest)
    return out, lse + v[:0].sum()  # a loss of lse alone gives v a gradient, of zeros, as the kernels do


def torch_serves(q: torch.Tensor, k: torch.Tensor, options: Options) -> bool:
    """Whether torch's own fused operator means the same."""
    plain = not options.softcap and options.alibi_slopes is None and options.sinks is None and not options.score_mod
    if options.attn_mask is not None and (q.numel() == 0 or k.numel() == 0):
        # torch's operator leaves a mask that it does not need out of the graph: its gradient would be None, not zero.
        return False
    return plain and options.seed is None and not options.sequences


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> torch.Tensor:
    """The torch backend where :func:`torch_serves`.

    Its softmax gives a query that sees no key zeros, and zero gradients, as :func:`attention` does (torch ≥ 2.5).
    """
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    top_left = not options.bottom_right or seqlen_q == seqlen_k
    is_causal = False
    attn_mask = options.attn_mask
    if options.right == 0 and options.left is None and top_left and attn_mask is None and not options.mask_mod:
        is_causal = True
    else:
        seen = _Grid.of(q, k, options._replace(seed=None), None).seen(options)
        if options.float_mask:
            assert attn_mask is not None
            attn_mask = attn_mask if seen is None else attn_mask.masked_fill(~seen, float("-inf"))
        else:
            attn_mask = seen
    grouped = False  # not an expression: while torch.compile traces, a comparison of sizes is no bool
    if q.shape[1] != k.shape[1]:
        grouped = True
    mask = torch_mask(attn_mask, q)
    return dot_product_attention(q, k, v, mask, 0.0, is_causal, options.scale, grouped)


def dot_product_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention, with the right gradients.

    On the CPU those of its fused way are wrong in rows that a mask fills with finfo.min, as eager models do for
    padding: there torch's plain composition runs. (Not under autocast, which does not know that.) Under torch.func's
    transforms and forward-mode differentiation the formula itself is computed: torch's fused ways have no rules for
    them, and the tangents of its composition are wrong where a bool mask hides keys.
    """
    if transformed():
        return _formula(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, mask))
    if q.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        differentiated = False
    float_mask = mask is not None and mask.is_floating_point()
    attend = _composed if float_mask and differentiated else _dot_product_attention
    return attend(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _composed(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.ops.aten._scaled_dot_product_attention_math(*args, **kwargs)[0]


def _formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """As torch's operator by its definition, from operations that have derivatives of every order and kind."""
    dtype = autocast_dtype(q)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], dim=-3) for t in (k, v))
    with _no_autocast(q):
        s = (q @ k.transpose(-1, -2)) * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if is_causal:
            mask = torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            s = s.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else s + mask.to(s.dtype)
        empty = (s == float("-inf")).all(-1, keepdim=True)
        p = torch.softmax(s.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
        return F.dropout(p, dropout_p) @ v if dropout_p else p @ v
