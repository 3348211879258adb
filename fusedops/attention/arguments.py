"""Checks of the attention functions' arguments. An ordinary call passes on a few attribute reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from fusedops.attention.block_mask import BlockMask
from fusedops.attention.modifiers import MaskMod, ScoreMod
from fusedops.attention.options import Options
from fusedops.attention.reference import longest_of
from fusedops.runtime.checks import (
    check_bool,
    check_number,
    check_probability,
    check_same_device,
    check_tensor,
    wrong_type,
    wrong_value,
)
from fusedops.runtime.precision import autocast_dtype

Causal = bool | Literal["top_left", "bottom_right"]
Window = tuple[int | None, int | None]

_CAUSAL = (False, True, "top_left", "bottom_right")
_Q, _K, _V = "q", "k", "v"
_Tensor, _bool, _strided = torch.Tensor, torch.bool, torch.strided


def check_tensors(function: str, names: tuple[str, str, str], q: Any, k: Any, v: Any) -> None:
    """Three floating-point tensors of one device and, autocast aside, one dtype."""
    check_tensor(function, names[0], q)
    check_tensor(function, names[1], k)
    check_tensor(function, names[2], v)
    if q.dtype == k.dtype == v.dtype and q.device == k.device == v.device:
        return
    for name, tensor in ((names[1], k), (names[2], v)):
        check_same_device(function, name, tensor, names[0], q)
        if autocast_dtype(tensor) != autocast_dtype(q):
            wrong_type(function, name, f"of the dtype of {names[0]} ({q.dtype})", tensor)


def _check_mask(function: str, mask: Any, shape: Sequence[int], like: str, q: torch.Tensor) -> None:
    """A bool or floating tensor that broadcasts to ``shape``, adding no dimension."""
    if not isinstance(mask, _Tensor):
        wrong_type(function, "attn_mask", "a bool or floating-point tensor, or None", mask)
    if not (mask.dtype is _bool or mask.is_floating_point()):
        takes = "a bool tensor (True: the query may see the key) or a floating-point one, which is added to the scores"
        wrong_type(function, "attn_mask", takes, mask)
    if mask.dtype is not _bool:
        check_tensor(function, "attn_mask", mask)
    elif mask.layout is not _strided:
        wrong_type(function, "attn_mask", "a strided tensor", mask)
    check_same_device(function, "attn_mask", mask, like, q)
    sizes = mask.shape
    broadcasts = len(sizes) <= len(shape)
    if broadcasts:
        for dim in range(-len(sizes), 0):
            size = sizes[dim]
            if size != 1 and size != shape[dim]:
                broadcasts = False
    if not broadcasts:
        wrong_value(function, "attn_mask", f"of a shape that broadcasts to {tuple(shape)}", mask)


class Modifiers(NamedTuple):
    """What changes or hides scores, as a user gave it: the keyword arguments that all attention functions share."""

    causal: Causal
    window: Window | None
    attn_mask: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    softcap: float
    scale: float | None
    dropout_p: float
    score_mod: Any
    mask_mod: Any


def _check_causal(function: str, causal: Any, window: Any) -> tuple[bool, int | None, int | None]:
    """(bottom_right, left, right) of :class:`fusedops.attention.options.Options`."""
    if window is None and (causal is False or causal is True):
        return not causal, None, 0 if causal else None
    takes = 'False, True, "top_left" or "bottom_right"'
    if not isinstance(causal, (bool, str)):
        wrong_type(function, "causal", takes, causal)
    if causal not in _CAUSAL:
        wrong_value(function, "causal", takes, causal)
    left = right = None
    if window is not None:
        takes = "a pair (left, right), each None for no limit or an integer from 0 on"
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            wrong_type(function, "window", takes, window)
        for side in window:
            if side is not None and (not isinstance(side, (int, torch.SymInt)) or isinstance(side, bool)):
                wrong_type(function, "window", takes, window)
            if side is not None and side < 0:
                wrong_value(function, "window", takes, window)
        # No pair of positions is further apart, and the operator takes 64 bits.
        left, right = (None if isinstance(side, int) and side >= 1 << 31 else side for side in window)
    # By value: 0 and 1 are neither of torch's booleans, but equal to them.
    return causal not in (True, "top_left"), left, right if causal is False else 0


def check_per_head(function: str, name: str, value: Any, heads: int, batch: int | None, q: torch.Tensor) -> None:
    """A floating tensor of shape (heads,), or (batch, heads) where there is a batch."""
    check_tensor(function, name, value)
    check_same_device(function, name, value, "q", q)
    shape = tuple(value.shape)
    if shape != (heads,) and (batch is None or shape not in ((batch, heads), (1, heads))):
        takes = f"of shape ({heads},)" + ("" if batch is None else f" or ({batch}, {heads})")
        wrong_value(function, name, takes, value)


def _check_rule(function: str, name: str, rule: MaskMod | ScoreMod, q: torch.Tensor) -> None:
    for arg in rule.args:
        if arg.device != q.device:
            wrong_value(function, name, f"a rule whose args are on q's device {q.device}", arg)
        if arg.requires_grad:
            wrong_value(function, name, "a rule whose args require no gradient: they get none", arg)


def check_modifiers(
    function: str, given: Modifiers, q: torch.Tensor, batch: int, lengths: tuple[int | None, int | None]
) -> Options:
    """Raise, naming the argument, or give the options of the call, all but its seed and precision.

    Args:
        batch: or the number of packed sequences.
        lengths: of queries and keys; None: not known, for packed sequences.
    """
    heads = q.shape[1]  # of dense and of packed queries
    bottom_right, left, right = _check_causal(function, given.causal, given.window)
    attn_mask = given.attn_mask
    if attn_mask is not None:
        if None in lengths:
            wrong_value(function, "attn_mask", "None, or given together with max_seqlen_q and max_seqlen_k", attn_mask)
        _check_mask(function, attn_mask, (batch, heads, *lengths), _Q, q)  # type: ignore[arg-type]
        if attn_mask.dim() < 4:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        if attn_mask.dtype == torch.float64 and autocast_dtype(q) != torch.float64:
            attn_mask = attn_mask.float()
    slopes = given.alibi_slopes
    if slopes is not None:
        check_per_head(function, "alibi_slopes", slopes, heads, batch, q)
        slopes = slopes[None] if slopes.dim() == 1 else slopes
    if given.sinks is not None:
        check_per_head(function, "sinks", given.sinks, heads, None, q)
    scale = given.scale
    if scale is not None:
        check_number(function, "scale", scale)
        if not -math.inf < scale < math.inf:  # math.isfinite would end a traced graph
            wrong_value(function, "scale", "None or a finite number", scale)
        scale = float(scale)
    if given.softcap is None:
        given = given._replace(softcap=0.0)
    elif given.softcap:
        check_number(function, "softcap", given.softcap)
        if not 0 < given.softcap < math.inf:
            wrong_value(function, "softcap", "0 (none) or a positive, finite number", given.softcap)
    elif given.softcap != 0 or isinstance(given.softcap, bool):
        check_number(function, "softcap", given.softcap)
    if given.dropout_p:
        check_probability(function, "dropout_p", given.dropout_p)
    elif given.dropout_p != 0:
        check_number(function, "dropout_p", given.dropout_p)
    options = Options(
        attn_mask, slopes, given.sinks, None, (), (), (), (), "", "", bottom_right, left, right,
        float(given.softcap), scale, float(given.dropout_p),
    )  # fmt: skip
    if given.score_mod is not None:
        score_mod = ScoreMod.of(function, given.score_mod)
        _check_rule(function, "score_mod", score_mod, q)
        options = options._replace(score_mod=score_mod.name, score_args=score_mod.args)
    if given.mask_mod is not None:
        mask_mod = MaskMod.of(function, given.mask_mod)
        _check_rule(function, "mask_mod", mask_mod, q)
        options = options._replace(mask_mod=mask_mod.name, mask_args=mask_mod.args)
    return options


def check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Modifiers, return_lse: bool) -> Options:
    """Raise, naming the argument, or give the options of the call, all but its seed and precision."""
    check_tensors("attention", (_Q, _K, _V), q, k, v)
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    if not len(of_q) == len(of_k) == len(of_v) == 4:
        name, tensor = next((name, t) for name, t in ((_Q, q), (_K, k), (_V, v)) if t.dim() != 4)
        wrong_value("attention", name, "of four dimensions (batch, heads, length, head size)", tensor)
    batch, heads, seqlen_q, size = of_q
    _, kv_heads, seqlen_k, _ = of_k
    if of_k[0] != batch or of_k[3] != size:
        wrong_value("attention", _K, f"of shape ({batch}, heads, length, {size}), as q is", k)
    if heads != kv_heads and (heads % kv_heads if kv_heads else True):
        wrong_value("attention", _K, f"of a number of heads that divides q's {heads}", k)
    if of_v[0] != batch or of_v[1] != kv_heads or of_v[2] != seqlen_k:
        wrong_value("attention", _V, f"of shape ({batch}, {kv_heads}, {seqlen_k}, head size), as k is", v)
    check_bool("attention", "return_lse", return_lse)
    return check_modifiers("attention", given, q, batch, (seqlen_q, seqlen_k))


def check_sequences(
    sequences: Sequence[torch.Tensor], tokens: tuple[int, int], longest: tuple[int, int] | None
) -> None:
    """The numbers make sense. Reads them, which is free on a CPU alone."""
    for place, side in enumerate("qk"):
        starts = sequences[place]
        numbers = starts.tolist()
        if numbers[0] != 0 or numbers != sorted(numbers) or numbers[-1] > tokens[place]:
            takes = f"0 and where each sequence ends, ascending, at most the {tokens[place]} tokens of {side}"
            wrong_value("attention_varlen", f"cu_seqlens_{side}", f"{takes} (the lengths' cumulative sum)", numbers)
        if longest is not None and longest_of(starts) > longest[place]:
            takes = f"at least {longest_of(starts)}, the length of the longest sequence"
            wrong_value("attention_varlen", f"max_seqlen_{side}", takes, longest[place])


def check_block_mask(q: torch.Tensor, k: torch.Tensor, block_mask: Any) -> BlockMask:
    """The block mask, made of FlexAttention's where it is one."""
    if type(block_mask).__module__ == "torch.nn.attention.flex_attention":
        block_mask = BlockMask.from_torch(block_mask)
    if not isinstance(block_mask, BlockMask):
        takes = "a fusedops.BlockMask, a BlockMask of torch.nn.attention.flex_attention, or None"
        wrong_type("attention", "block_mask", takes, block_mask)
    batch, heads, seqlen_q, _ = q.shape
    shape, wanted = block_mask.shape, (batch, heads, seqlen_q, k.shape[2])
    if shape[2:] != wanted[2:] or shape[0] not in (1, batch) or shape[1] not in (1, heads):
        wrong_value("attention", "block_mask", f"of shape {wanted}, or 1 for the first two", block_mask)
    if block_mask.device != q.device:
        wrong_value("attention", "block_mask", f"on q's device {q.device}", block_mask)
    _check_rule("attention", "block_mask", block_mask.mask_mod, q)
    return block_mask


def check_document_ids(q: torch.Tensor, k: torch.Tensor, document_ids: Any) -> None:
    """Integers of shape (batch, length) or (length,), for queries and keys of one length."""
    takes = "an integer tensor of shape (batch, length) or (length,)"
    if not isinstance(document_ids, _Tensor) or document_ids.is_floating_point() or document_ids.is_complex():
        wrong_type("attention", "document_ids", takes, document_ids)
    check_same_device("attention", "document_ids", document_ids, _Q, q)
    length = q.shape[2]
    if k.shape[2] != length:
        takes = (
            f"None where queries ({length}) and keys ({k.shape[2]}) differ in length:"
            " block_mask=fusedops.BlockMask.from_document_ids(ids_of_queries, ids_of_keys) takes both"
        )
        wrong_value("attention", "document_ids", takes, document_ids)
    if tuple(document_ids.shape) not in ((length,), (1, length), (q.shape[0], length)):
        wrong_value("attention", "document_ids", f"of shape ({q.shape[0]}, {length}) or ({length},)", document_ids)


def check_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    given: Modifiers,
    return_lse: bool,
) -> Options:
    """The same for packed sequences."""
    function = "attention_varlen"
    check_tensors(function, (_Q, _K, _V), q, k, v)
    for name, tensor in ((_Q, q), (_K, k), (_V, v)):
        if tensor.dim() != 3:
            wrong_value(function, name, "of three dimensions (tokens, heads, head size)", tensor)
    heads, size = q.shape[1:]
    tokens_k, kv_heads, _ = k.shape
    if k.shape[2] != size:
        wrong_value(function, _K, f"of shape (tokens, heads, {size}), as q is", k)
    if heads != kv_heads and (heads % kv_heads if kv_heads else True):
        wrong_value(function, _K, f"of a number of heads that divides q's {heads}", k)
    if v.shape[:2] != (tokens_k, kv_heads):
        wrong_value(function, _V, f"of shape ({tokens_k}, {kv_heads}, head size), as k is", v)
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(starts, _Tensor) or starts.dtype not in (torch.int32, torch.int64):
            wrong_type(function, name, "an int32 or int64 tensor", starts)
        if starts.dim() != 1 or starts.shape[0] < 1:
            wrong_value(function, name, "of one dimension (sequences + 1,)", starts)
        check_same_device(function, name, starts, _Q, q)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        takes = f"of as many sequences as cu_seqlens_q, shape {tuple(cu_seqlens_q.shape)}"
        wrong_value(function, "cu_seqlens_k", takes, cu_seqlens_k)
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if longest is None:
            continue
        if not isinstance(longest, (int, torch.SymInt)) or isinstance(longest, bool):
            wrong_type(function, name, "None or an integer, the length of the longest sequence", longest)
        if longest < 0:
            wrong_value(function, name, "None or a length from 0 on", longest)
    check_bool(function, "return_lse", return_lse)
    options = check_modifiers(function, given, q, cu_seqlens_q.shape[0] - 1, (max_seqlen_q, max_seqlen_k))
    return options._replace(sequences=(cu_seqlens_q, cu_seqlens_k))


def check_scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Sequence[int]:
    """Raise, naming the argument, or give the leading shape that all tensors broadcast to: (…, heads)."""
    function = "scaled_dot_product_attention"
    check_tensors(function, ("query", "key", "value"), query, key, value)
    check_bool(function, "enable_gqa", enable_gqa)
    least = 3 if enable_gqa else 2
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < least:
            wrong_value(function, name, f"of at least {least} dimensions", tensor)
    if key.shape[-1] != query.shape[-1]:
        wrong_value(function, "key", f"of query's head size {query.shape[-1]}", key)
    if value.shape[-2] != key.shape[-2]:
        wrong_value(function, "value", f"of key's length {key.shape[-2]}", value)
    lead: Sequence[int] = query.shape[:-2]
    for name, tensor in (("key", key), ("value", value)):
        other: Sequence[int] = tensor.shape[:-2]
        if enable_gqa:
            if lead[-1] != other[-1] and (lead[-1] % other[-1] if other[-1] else True):
                wrong_value(function, name, f"of a number of heads that divides query's {lead[-1]}", tensor)
            other = (*other[:-1], lead[-1])
        if other != lead:
            try:
                lead = torch.broadcast_shapes(lead, other)
            except RuntimeError:
                takes = f"broadcastable to query's leading dimensions {tuple(query.shape[:-2])}"
                if not enable_gqa and tensor.dim() > 2:
                    takes += " (enable_gqa=True lets heads be shared)"
                wrong_value(function, name, takes, tensor)
    if attn_mask is not None:
        if isinstance(attn_mask, _Tensor) and attn_mask.dim() < 2:
            wrong_value(function, "attn_mask", "of at least 2 dimensions", attn_mask)
        _check_mask(function, attn_mask, (*lead, query.shape[-2], key.shape[-2]), "query", query)
        if is_causal:
            wrong_value(function, "attn_mask", "None where is_causal is True", attn_mask)
    check_drop_in_options(function, dropout_p, is_causal, scale)
    return lead


def check_drop_in_options(function: str, dropout_p: float, is_causal: bool, scale: float | None) -> None:
    check_number(function, "dropout_p", dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        wrong_value(function, "dropout_p", "from 0 to 1", dropout_p)
    check_bool(function, "is_causal", is_causal)
    if scale is not None:
        check_number(function, "scale", scale)
