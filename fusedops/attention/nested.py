"""Jagged nested tensors (``torch.nested``, ``layout=torch.jagged``) as the packed sequences that they are."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

import torch

from fusedops.attention.arguments import check_tensors
from fusedops.runtime.checks import check_bool, wrong_type, wrong_value

_FUNCTION = "scaled_dot_product_attention"
_NAMES = ("query", "key", "value")


class _Jagged(Protocol):
    """What torch's jagged tensor has beside a tensor's attributes."""

    _ragged_idx: int
    _maybe_min_seqlen: int | None
    _maybe_max_seqlen: int | None

    def values(self) -> torch.Tensor: ...
    def offsets(self) -> torch.Tensor: ...
    def lengths(self) -> torch.Tensor | None: ...


class Packed(NamedTuple):
    """The tensors of one call.

    Attributes:
        q, k, v: (1, heads, tokens, size): the sequences one after the other.
        sequences: where each begins and the last one ends, of queries and of keys, as attention's operators take them.
        longest: lengths of the longest sequence of queries and of keys, where the tensors know them.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sequences: tuple[torch.Tensor, torch.Tensor]
    longest: tuple[int, int] | None


def check_nested(query: Any, key: Any, value: Any, attn_mask: Any, enable_gqa: Any) -> tuple[_Jagged, _Jagged, _Jagged]:
    """Raise, naming the argument, unless all three are jagged along the same dimension, a batch of one size."""
    for name, tensor in zip(_NAMES, (query, key, value), strict=True):
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.jagged:
            takes = "a nested tensor of layout torch.jagged, as query, key and value are all nested or none is"
            wrong_type(_FUNCTION, name, takes, _described(tensor))
    if attn_mask is not None:
        wrong_value(_FUNCTION, "attn_mask", "None where query, key and value are nested", attn_mask)
    check_bool(_FUNCTION, "enable_gqa", enable_gqa)
    for name, tensor in zip(_NAMES, (query, key, value), strict=True):
        if tensor.dim() != query.dim() or tensor.dim() < 3:
            wrong_value(_FUNCTION, name, "of three or more dimensions, as many as query's", _described(tensor))
        if tensor._ragged_idx != query._ragged_idx:
            takes = f"jagged along dimension {query._ragged_idx}, as query is"
            wrong_value(_FUNCTION, name, takes, _described(tensor))
        if tensor.shape[0] != query.shape[0]:
            wrong_value(_FUNCTION, name, f"of as many sequences as query, {query.shape[0]}", _described(tensor))
    return query, key, value


def is_length(query: _Jagged) -> bool:
    """Whether the jagged dimension is that of the lengths, the last but one."""
    return query._ragged_idx == cast(torch.Tensor, query).dim() - 2


def pack(query: _Jagged, key: _Jagged, value: _Jagged, enable_gqa: bool) -> Packed:
    """The packed sequences of tensors that :func:`check_nested` and :func:`is_length` accept.

    Keys and values made apart have offsets of their own; those are compared on the host, once for each call.
    """
    tensors = tuple(_heads_first(name, x) for name, x in zip(_NAMES, (query, key, value), strict=True))
    q, k, v = tensors
    check_tensors(_FUNCTION, _NAMES, q, k, v)
    heads, kv_heads = q.shape[0], k.shape[0]
    if not enable_gqa and heads != kv_heads:
        wrong_value(_FUNCTION, "key", f"of query's {heads} heads (enable_gqa=True lets heads be shared)", k)
    if heads != kv_heads and (heads % kv_heads if kv_heads else True):
        wrong_value(_FUNCTION, "key", f"of a number of heads that divides query's {heads}", k)
    if k.shape[2] != q.shape[2]:
        wrong_value(_FUNCTION, "key", f"of query's head size {q.shape[2]}", k)
    if v.shape[:2] != k.shape[:2]:
        wrong_value(_FUNCTION, "value", f"of key's {kv_heads} heads and {k.shape[1]} tokens", v)
    if not _same_sequences(key, value):
        wrong_value(_FUNCTION, "value", "of sequences as long as key's", _described(value))
    longest = query._maybe_max_seqlen, key._maybe_max_seqlen
    if query.lengths() is None and key.lengths() is None:
        starts = query.offsets(), key.offsets()
    else:
        starts, longest = _without_holes(query, key), (None, None)
    known = cast("tuple[int, int]", longest) if None not in longest else None
    return Packed(q[None], k[None], v[None], starts, known)


def nested_like(out: torch.Tensor, query: _Jagged, ragged: int) -> torch.Tensor:
    """A tensor of the sequences of ``query``, jagged along dimension ``ragged``, with other values."""
    return torch.nested.nested_tensor_from_jagged(
        out,
        query.offsets(),
        query.lengths(),
        jagged_dim=ragged,
        min_seqlen=query._maybe_min_seqlen,
        max_seqlen=query._maybe_max_seqlen,
    )


def _heads_first(name: str, tensor: _Jagged) -> torch.Tensor:
    """(heads, tokens, size); one head where the tensor has no dimension for them."""
    values = tensor.values()
    if values.dim() == 2:
        return values[None]
    if values.dim() != 3:
        takes = "of shape (batch, heads, jagged length, size) or (batch, jagged length, size)"
        wrong_value(_FUNCTION, name, takes, _described(tensor))
    return values


def _same_sequences(key: _Jagged, value: _Jagged) -> bool:
    of_key, of_value = (key.offsets(), key.lengths()), (value.offsets(), value.lengths())
    if of_key[0] is of_value[0] and of_key[1] is of_value[1]:
        return True
    if torch.compiler.is_compiling():  # numbers on the device are not known then
        return True
    for one, other in zip(of_key, of_value, strict=True):
        if (one is None) != (other is None) or (one is not None and not torch.equal(one, cast(torch.Tensor, other))):
            return False
    return True


def _without_holes(query: _Jagged, key: _Jagged) -> tuple[torch.Tensor, torch.Tensor]:
    """Boundaries of three sequences for each one: queries in the hole before it, which get no keys; keys in the hole
    before it, which get no queries; and itself. So what lies in holes is in nobody's result, and gets no gradient.
    """
    starts_q, ends_q = _ends(query)
    starts_k, ends_k = _ends(key)
    zero = starts_k.new_zeros(1)
    before = torch.cat((zero, ends_k))[:-1]
    return (
        torch.cat((zero, torch.stack((starts_q, starts_q, ends_q), 1).flatten())),
        torch.cat((zero, torch.stack((before, starts_k, ends_k), 1).flatten())),
    )


def _ends(tensor: _Jagged) -> tuple[torch.Tensor, torch.Tensor]:
    offsets, lengths = tensor.offsets(), tensor.lengths()
    return offsets[:-1], offsets[1:] if lengths is None else offsets[:-1] + lengths


def _described(tensor: Any) -> Any:
    """Something that an error message can show: a strided nested tensor has no shape."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_nested or tensor.layout is torch.jagged:
        return tensor
    return f"a nested tensor of layout {tensor.layout}"
