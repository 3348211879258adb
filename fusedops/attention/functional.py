"""The public functions of the attention family: check the arguments, choose a backend, call the operator."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from fusedops.attention import reference
from fusedops.attention.arguments import (
    Causal,
    Modifiers,
    Window,
    check_attention,
    check_attention_varlen,
    check_block_mask,
    check_document_ids,
    check_drop_in_options,
    check_scaled_dot_product_attention,
    check_sequences,
)
from fusedops.attention.autograd import attention_op, gradient_asked
from fusedops.attention.block_mask import BlockMask
from fusedops.attention.modifiers import MaskMod, ScoreMod, parts_of
from fusedops.attention.nested import check_nested, is_length, nested_like, pack
from fusedops.attention.options import Options
from fusedops.attention.tuning import WIDE, too_small
from fusedops.runtime.backend import BackendError, device_reasons, explainable, might_use_triton, use_triton
from fusedops.runtime.checks import wrong_value
from fusedops.runtime.device import DeviceFacts, device_facts
from fusedops.runtime.dropout import draw_seed
from fusedops.runtime.precision import autocast_dtype, float32_precision
from fusedops.runtime.sharded import sharded

# The kernels hold whole rows of q, k and v.
_MAX_SIZE = 256


def _unsupported(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options | None = None) -> list[str]:
    """Every reason why the attention kernels cannot take these tensors and options."""
    reasons = device_reasons(q.device, (autocast_dtype(q),))
    for what, size in (("queries and keys", q.shape[-1]), ("values", v.shape[-1])):
        if not 1 <= size <= _MAX_SIZE:
            reasons.append(f"head size {size} of {what}: the kernels take 1 to {_MAX_SIZE}")
    if options is not None and (options.score_mod or options.mask_mod):
        reasons += _rule_reasons(q, k, options)
    if not reasons:
        device = q.device
        if torch.compiler.is_compiling():
            small, wide = _device_reasons(device.type, device.index)
        else:
            small, wide = _room(device_facts(device))
        if small is not None:
            reasons.append(small)
        elif wide is not None and autocast_dtype(q) == torch.float32 and min(q.shape[-1], v.shape[-1]) > WIDE:
            reasons.append(wide)
    return reasons


def _rule_reasons(q: torch.Tensor, k: torch.Tensor, options: Options) -> list[str]:
    reasons = []
    for kind, name in (("score_mod", options.score_mod), ("mask_mod", options.mask_mod)):
        if name and not parts_of(name)[0]:
            reasons.append(f"{kind} has no Triton function")
    if options.score_mod and gradient_asked(q, k) and not parts_of(options.score_mod)[1]:
        reasons.append("score_mod has no gradient function, and q or k require a gradient")
    return reasons


def _check_definitions(function: str, options: Options) -> None:
    """Raise where the torch backend lacks a rule's definition."""
    for kind, name in (("score_mod", options.score_mod), ("mask_mod", options.mask_mod)):
        if name and not parts_of(name)[2]:
            raise BackendError(
                f"{function}: the torch backend serves this call and needs the {kind}'s definition, which it has not:"
                f" give {kind}=fusedops.{'ScoreMod' if kind == 'score_mod' else 'MaskMod'}(..., definition=...)."
                f" `fusedops.explain` says why the Triton kernels do not serve it"
            )


def _device_reasons(kind: str, index: int | None) -> tuple[str | None, str | None]:
    """Why the kernels cannot serve any heads on a device, and why not wide ones of float32."""
    return _room(device_facts(torch.device(kind, index or 0)))


@functools.cache
def _room(facts: DeviceFacts) -> tuple[str | None, str | None]:
    return too_small(facts, 16, 16, 2), too_small(facts, _MAX_SIZE, _MAX_SIZE, 4)


# A device's facts never change: traced code takes the answer as a constant.
_device_reasons._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the operator."""
    if (options.score_mod or options.mask_mod) and sharded(q):
        raise RuntimeError(
            "attention: a rule (score_mod, mask_mod, block_mask, document_ids) reads the places of the whole, which a"
            " device's part of a DTensor has not. Call it on each device's part, with a rule made for that:"
            " q.to_local(), or torch.distributed.tensor.experimental.local_map"
        )
    dtype = autocast_dtype(q)
    if not q.dtype == k.dtype == v.dtype == dtype:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    options = options.completed(q.shape[-1], _seed(q, options), float32_precision(q))
    out, lse, _ = attention_op(q, k, v, *options)
    return out, lse


def _seed(q: torch.Tensor, options: Options) -> torch.Tensor | None:
    return draw_seed(q) if options.dropout_p > 0.0 else None


def _with_block_mask(
    q: torch.Tensor, k: torch.Tensor, options: Options, block_mask: Any, document_ids: Any
) -> tuple[Options, BlockMask]:
    """The options with the rule of the block mask that one of the last two arguments gives, and that block mask."""
    others = {"mask_mod": options.mask_mod or None, "block_mask": block_mask, "document_ids": document_ids}
    given = [name for name, value in others.items() if value is not None]
    if len(given) > 1:
        wrong_value("attention", given[-1], f"None where {given[0]} is given", others[given[-1]])
    if document_ids is not None:
        check_document_ids(q, k, document_ids)
        block_mask = BlockMask.from_document_ids(document_ids)
    else:
        block_mask = check_block_mask(q, k, block_mask)
    rule = block_mask.mask_mod
    return options._replace(mask_mod=rule.name, mask_args=rule.args), block_mask


def _attention_reasons(  # type: ignore[no-untyped-def]
    q, k, v, *, causal=False, window=None, attn_mask=None, alibi_slopes=None, sinks=None, softcap=0.0, scale=None,
    dropout_p=0.0, return_lse=False, score_mod=None, mask_mod=None, block_mask=None, document_ids=None,
):  # fmt: skip
    given = Modifiers(
        causal, window, attn_mask, alibi_slopes, sinks, softcap, scale, dropout_p, score_mod, mask_mod
    )  # fmt: skip
    options = check_attention(q, k, v, given, return_lse)
    if block_mask is not None or document_ids is not None:
        options, _ = _with_block_mask(q, k, options, block_mask, document_ids)
    return q.device, _unsupported(q, k, v, options)


@explainable(_attention_reasons)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = False,
    window: Window | None = None,
    attn_mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    score_mod: ScoreMod | Any = None,
    mask_mod: MaskMod | Any = None,
    block_mask: BlockMask | Any = None,
    document_ids: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Multi-head attention, ``softmax(scores) v`` in each head; the scores are ``scale · q kᵀ`` and what options add.

    Vaswani et al. 2017, "Attention Is All You Need", equation 1, computed tile by tile as in FlashAttention-2 (Dao
    2023): no score is ever stored. Softmax and sums in float32; the backward is deterministic. In this order a score
    is scaled, capped (``softcap``), changed (``score_mod``), added to (``attn_mask``, ``alibi_slopes``) and hidden
    (a bool ``attn_mask``, ``causal``, ``window``, ``mask_mod`` or ``block_mask`` or ``document_ids``: all hold).

    Args:
        q: (batch, heads, seqlen_q, size); float32, float16 or bfloat16 (float64 on the torch backend), any strides.
            The kernels take head sizes from 1 to 256, here and in v.
        k: (batch, kv_heads, seqlen_k, size). ``kv_heads`` divides ``heads``: query head h reads key head
            ``h // (heads // kv_heads)`` (grouped-query attention).
        v: (batch, kv_heads, seqlen_k, size_v).
        causal: which keys a query may see. False: all. True or ``"top_left"``, torch's rule: query i sees keys j ≤ i.
            ``"bottom_right"``, what decoding wants: j ≤ i + seqlen_k - seqlen_q, so that the last query sees all.
        window: (left, right): query i sees keys from ``left`` before to ``right`` after its place on the diagonal, both
            ends included; None on a side: no limit there. The diagonal is ``causal``'s, and then ``right`` counts as 0;
            without it, the bottom-right one. (w - 1, 0) is a causal window of w keys. Blocks outside are never visited.
        attn_mask: broadcastable to (batch, heads, seqlen_q, seqlen_k). bool: True where the query may see the key.
            Floating: added to the scores; its gradient is summed over what was broadcast.
        alibi_slopes: (heads,) or (batch, heads), floating: ``-slope · |distance|`` is added, the distance counted from
            the diagonal (as for ``window``): Press et al. 2022, "Train Short, Test Long". It has a gradient.
        sinks: (heads,), floating: one more logit in the softmax of each row of a head, that belongs to no key (Xiao et
            al. 2024, "Efficient Streaming Language Models with Attention Sinks"). It has a gradient.
        softcap: 0 or None: none. Above 0, a score s becomes ``softcap · tanh(s / softcap)`` (Gemma 2).
        scale: factor of the scores, any real number. None: 1/√size.
        dropout_p: probability that a softmax weight is dropped, drawn from torch's generator; those that stay are
            multiplied by 1 / (1 - dropout_p).
        return_lse: return the logarithm of the softmax's denominator too.
        score_mod: a :class:`fusedops.ScoreMod`, or a Triton function (then it has no gradient).
        mask_mod: a :class:`fusedops.MaskMod`, or a Triton function. Asked at every pair of query and key. At most one
            of this and the next two may be given.
        block_mask: a :class:`fusedops.BlockMask`, or a block mask of torch's FlexAttention (converted on each call):
            blocks that it hides are never visited, and its rule is asked only in blocks seen in part.
        document_ids: (batch, length) or (length,), integers, for packed documents: a query sees the keys of its own
            document alone. Blocks without a common document are never visited. Layers that share documents had better
            share a ``block_mask``, which is made once: :meth:`fusedops.BlockMask.from_document_ids`.

    Returns:
        out: (batch, heads, seqlen_q, size_v), dtype of q (autocast's dtype under autocast, as torch's). A query that
            sees no key gets zeros, and zero gradients.
        lse: with ``return_lse``, (batch, heads, seqlen_q), natural logarithm of Σ exp(scores), a sink's included,
            float32 (float64 for float64 inputs); −inf for a query that sees neither key nor sink. It has a gradient.

    Memory of the kernels beside inputs and results: two float32 numbers a query and head are kept for the backward,
    which takes two or three more while it runs. The gradient of a small ``attn_mask`` takes float32 copies of it, of
    two tiles a multiprocessor in all, while it is summed. Nothing of the size of the scores.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device; the message names it.
        BackendError: the torch backend serves the call and a rule has no ``definition``.

    Examples:
        >>> import torch, fusedops
        >>> q, k, v = torch.randn(1, 8, 5, 64), torch.randn(1, 2, 7, 64), torch.randn(1, 2, 7, 32)
        >>> out, lse = fusedops.attention(q, k, v, causal="bottom_right", return_lse=True)
        >>> out.shape, lse.shape  # query heads 0 to 3 read key head 0
        (torch.Size([1, 8, 5, 32]), torch.Size([1, 8, 5]))
        >>> scores = q[0, 0] @ k[0, 0].T / 8 + torch.full((5, 7), -torch.inf).triu(3)  # the last query sees all keys
        >>> torch.allclose(out[0, 0], scores.softmax(-1) @ v[0, 0], atol=1e-6)
        True
        >>> fusedops.attention(q, k, v, window=(3, 0), softcap=20.0, sinks=torch.zeros(8)).shape
        torch.Size([1, 8, 5, 32])
    """
    given = Modifiers(
        causal, window, attn_mask, alibi_slopes, sinks, softcap, scale, dropout_p, score_mod, mask_mod
    )  # fmt: skip
    options = check_attention(q, k, v, given, return_lse)
    blocks = None
    if block_mask is not None or document_ids is not None:
        options, blocks = _with_block_mask(q, k, options, block_mask, document_ids)
    served = might_use_triton(q.device) and use_triton("attention", _unsupported(q, k, v, options), q.device)
    if not served:
        _check_definitions("attention", options)
    if served or sharded(q):
        if blocks is not None:
            lists = blocks.lists(*options.bounds(q.shape[2], k.shape[2]))
            options = options._replace(blocks=lists)
        out, lse = _run(q, k, v, options)
        return (out, lse) if return_lse else out
    options = options._replace(seed=_seed(q, options))
    if not return_lse and reference.torch_serves(q, k, options):
        return reference.torch_attention(q, k, v, options)
    out, lse = reference.attention_with_lse(q, k, v, options)
    return (out, lse) if return_lse else out


def _varlen_reasons(  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, *, causal=False, window=None,
    attn_mask=None, alibi_slopes=None, sinks=None, softcap=0.0, scale=None, dropout_p=0.0, return_lse=False,
    score_mod=None, mask_mod=None,
):  # fmt: skip
    given = Modifiers(
        causal, window, attn_mask, alibi_slopes, sinks, softcap, scale, dropout_p, score_mod, mask_mod
    )  # fmt: skip
    options = check_attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, given, return_lse
    )  # fmt: skip
    return q.device, _unsupported(q, k, v, options)


@explainable(_varlen_reasons)
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: Causal = False,
    window: Window | None = None,
    attn_mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    score_mod: ScoreMod | Any = None,
    mask_mod: MaskMod | Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`attention` of packed sequences of unequal lengths, without padding.

    Sequence s has queries ``cu_seqlens_q[s]`` to ``cu_seqlens_q[s + 1]`` and keys ``cu_seqlens_k[s]`` to
    ``cu_seqlens_k[s + 1]``; it is attended to as if it were alone. Sequences may be empty, of queries, of keys or both.

    The kernels never wait for the device: they find their sequences themselves, whether or not the longest lengths
    are given. The torch backend pads, for which it reads the longest lengths from the device where they are not given.

    Args:
        q: (tokens_q, heads, size); dtypes, sizes and strides as in :func:`attention`.
        k: (tokens_k, kv_heads, size).
        v: (tokens_k, kv_heads, size_v).
        cu_seqlens_q: (sequences + 1,) int32 or int64, on the device of q: 0, then where each sequence of queries ends.
            Tokens past the last end get zeros, and zero gradients.
        cu_seqlens_k: the same of keys.
        max_seqlen_q: at least the length of the longest sequence of queries. Only an ``attn_mask`` demands it.
        max_seqlen_k: the same of keys.
        attn_mask: broadcastable to (sequences, heads, max_seqlen_q, max_seqlen_k); a sequence has its upper left part.
        alibi_slopes: (heads,) or (sequences, heads).
        score_mod, mask_mod: get the number of the sequence as ``batch``, and places within it as ``i`` and ``j``.
        causal, window, sinks, softcap, scale, dropout_p, return_lse: as in :func:`attention`; diagonals are each
            sequence's own.

    Returns:
        out: (tokens_q, heads, size_v), dtype of q.
        lse: with ``return_lse``, (heads, tokens_q) float32; −inf also past the last sequence.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device; the message names it. The numbers
            in ``cu_seqlens_q`` and ``cu_seqlens_k`` are checked on the CPU alone, since reading them waits for a GPU:
            there, where they are not ascending from 0, the results are meaningless, but nothing outside the tensors is
            read or written.
        BackendError: the torch backend serves the call and a rule has no ``definition``.

    Examples:
        >>> import torch, fusedops
        >>> q = k = v = torch.randn(10, 4, 32)
        >>> ends = torch.tensor([0, 3, 3, 10])  # sequences of 3, 0 and 7 tokens
        >>> out = fusedops.attention_varlen(q, k, v, ends, ends, causal=True)
        >>> last = q[3:].transpose(0, 1)[None]  # the last one alone, (1, heads, tokens, size)
        >>> torch.allclose(out[3:].transpose(0, 1)[None], fusedops.attention(last, last, last, causal=True), atol=1e-6)
        True
    """
    given = Modifiers(
        causal, window, attn_mask, alibi_slopes, sinks, softcap, scale, dropout_p, score_mod, mask_mod
    )  # fmt: skip
    options = check_attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, given, return_lse
    )  # fmt: skip
    longest = None
    if max_seqlen_q is not None and max_seqlen_k is not None:
        longest = max_seqlen_q, max_seqlen_k
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out, lse = _run_packed("attention_varlen", q, k, v, options, longest)
    out = out[0].transpose(0, 1)
    return (out, lse[0]) if return_lse else out


def _run_packed(
    function: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, longest: tuple[int, int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of packed sequences, tensors (1, heads, tokens, size), on either backend."""
    served = might_use_triton(q.device) and use_triton(function, _unsupported(q, k, v, options), q.device)
    if not served:
        _check_definitions(function, options)
    if served or sharded(q):
        return _run(q, k, v, options)
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        check_sequences(options.sequences, (q.shape[2], k.shape[2]), longest)
    options = options._replace(seed=_seed(q, options))
    return reference.attention_with_lse(q, k, v, options, longest)


def _sdpa_unsupported(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> list[str]:
    reasons = _unsupported(query, key, value)
    if enable_gqa and key.shape[-3] != value.shape[-3]:
        reasons.append("key and value differ in their number of heads")
    return reasons


def _sdpa_reasons(  # type: ignore[no-untyped-def]
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    if getattr(query, "is_nested", False):
        nested = check_nested(query, key, value, attn_mask, enable_gqa)
        if not is_length(nested[0]):
            query, key, value = (x.values() for x in nested)
            return _sdpa_reasons(query, key, value, None, dropout_p, is_causal, scale, enable_gqa)
        check_drop_in_options("scaled_dot_product_attention", dropout_p, is_causal, scale)
        return query.device, _unsupported(*pack(*nested, enable_gqa)[:3])
    check_scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return query.device, _sdpa_unsupported(query, key, value, enable_gqa)


def _four_dimensions(tensor: torch.Tensor, batch: Sequence[int], heads: int) -> torch.Tensor:
    """(…, heads, length, size) as (batch, heads, length, size), its batch dimensions broadcast; a view where it can."""
    if tensor.dim() == 4 and len(batch) == 1 and tensor.shape[0] == batch[0] and tensor.shape[1] == heads:
        return tensor
    length, size = tensor.shape[-2:]
    return tensor.expand(*batch, heads, length, size).reshape(math.prod(batch), heads, length, size)


def _four_dimensional_mask(mask: torch.Tensor, batch: Sequence[int]) -> torch.Tensor:
    """The same for a mask, whose dimensions of size 1 stay so where they can."""
    if mask.dim() < 4:
        return mask[(None,) * (4 - mask.dim())]
    if mask.dim() == 4 and len(batch) == 1:
        return mask
    if math.prod(mask.shape[:-3]) == 1:
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*batch, *mask.shape[-3:]).reshape(math.prod(batch), *mask.shape[-3:])


@explainable(_sdpa_reasons)
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Multi-head attention with the signature of :func:`torch.nn.functional.scaled_dot_product_attention`.

    The same operator as :func:`attention`, in torch's terms: any number of leading dimensions, which broadcast.

    Nested tensors of layout ``torch.jagged`` are taken too, all three or none: (batch, heads, jagged length, size), or
    without the heads, and the result is jagged as query is. They may be noncontiguous, have holes and empty sequences,
    and queries may differ from keys in length. They take no ``attn_mask``, and nothing is padded by the kernels, which
    read them as :func:`attention_varlen` does. Where key and value were made apart, with offsets of their own, the host
    waits for the device to compare those. Where another dimension is jagged, torch's rule holds: all is done as with
    the tensors of their values.

    Args:
        query: (…, heads, seqlen_q, size); float32, float16 or bfloat16 (float64 on the torch backend), any strides.
        key: (…, heads, seqlen_k, size); with ``enable_gqa``, its number of heads divides query's.
        value: (…, heads, seqlen_k, size_v); as key.
        attn_mask: broadcastable to (…, heads, seqlen_q, seqlen_k). bool: True where the query may see the key.
            Floating: added to the scaled scores, with a gradient.
        dropout_p: probability that a softmax weight is dropped; those that stay are multiplied by 1 / (1 - dropout_p).
        is_causal: query i sees keys j ≤ i. Not together with ``attn_mask``.
        scale: factor of the scores, any real number. None: 1/√size.
        enable_gqa: query head h reads key and value head ``h // (heads // kv_heads)``.

    Returns:
        (…, heads, seqlen_q, size_v), dtype of query (autocast's under autocast). A query that sees no key gets zeros.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device; the message names it.

    Examples:
        >>> import torch, fusedops
        >>> q, k, v = (torch.randn(2, 4, 6, 32) for _ in range(3))
        >>> ours = fusedops.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torch.allclose(ours, torchs, atol=1e-6)
        True
    """
    if getattr(query, "is_nested", False):
        return _nested_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    lead = check_scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if (
        might_use_triton(query.device)
        and use_triton("scaled_dot_product_attention", _sdpa_unsupported(query, key, value, enable_gqa), query.device)
    ) or sharded(query):
        batch, heads = tuple(lead[:-1]), lead[-1] if lead else 1
        kv_heads = key.shape[-3] if enable_gqa else heads
        q = _four_dimensions(query, batch, heads)
        k, v = (_four_dimensions(t, batch, kv_heads) for t in (key, value))
        mask = None if attn_mask is None else _four_dimensional_mask(attn_mask, batch)
        if mask is not None and mask.dtype == torch.float64 and autocast_dtype(q) != torch.float64:
            mask = mask.float()
        out = _run(q, k, v, _drop_in_options(query, mask, dropout_p, is_causal, scale))[0]
        return out if len(lead) == 2 else out.reshape(*lead, *out.shape[-2:])
    mask = reference.torch_mask(attn_mask, query)
    return reference.dot_product_attention(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)


def _drop_in_options(
    query: torch.Tensor, mask: torch.Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> Options:
    return Options(
        mask,
        right=0 if is_causal else None,
        scale=None if scale is None else float(scale),
        dropout_p=float(dropout_p),
    )


def _nested_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """:func:`scaled_dot_product_attention` of nested tensors."""
    function = "scaled_dot_product_attention"
    nested = check_nested(query, key, value, attn_mask, enable_gqa)
    ragged = nested[0]._ragged_idx
    if not is_length(nested[0]):
        q, k, v = (x.values() for x in nested)
        out = scaled_dot_product_attention(q, k, v, None, dropout_p, is_causal, scale, enable_gqa)
        return nested_like(out, nested[0], ragged)
    check_drop_in_options(function, dropout_p, is_causal, scale)
    q, k, v, sequences, longest = pack(*nested, enable_gqa)
    options = _drop_in_options(q, None, dropout_p, is_causal, scale)._replace(sequences=sequences)
    out, _ = _run_packed(function, q, k, v, options, longest)
    return nested_like(out[0, 0] if query.dim() == 3 else out[0], nested[0], ragged)
