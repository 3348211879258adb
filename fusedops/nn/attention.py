"""Multi-head attention: torch.nn's parameters and initialisation, fusedops' forward."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from fusedops.attention.functional import attention, attention_varlen
from fusedops.linear.functional import linear
from fusedops.nn.linear import check_bias
from fusedops.nn.nested import Packed, unpack
from fusedops.runtime.checks import (
    check_bool,
    check_probability,
    check_same_device,
    check_tensor,
    wrong_type,
    wrong_value,
)
from fusedops.runtime.precision import autocast_dtype

_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_NAMES = ("query", "key", "value", "key_padding_mask", "attn_mask")
_T = TypeVar("_T")
_S = TypeVar("_S")


class MultiheadAttention(torch.nn.MultiheadAttention):
    """:class:`torch.nn.MultiheadAttention` whose forward is :func:`fusedops.linear` and :func:`fusedops.attention`.

    ``out_proj(concat_h(softmax(q_h k_hᵀ / √size + mask) v_h))`` with q, k and v projected from the inputs (Vaswani et
    al. 2017, "Attention Is All You Need", section 3.2.2). Pass ``need_weights=False``: the weights, which torch returns
    by default, need all scores in memory, and are computed by torch's operators.

    It differs from torch's module where that is at odds with itself:

    * A query that may see no key gets zeros from its heads (the output is ``out_proj``'s bias), zero weights and zero
      gradients, not NaN.
    * ``is_causal`` never changes what a query sees, provided that it is true of ``attn_mask``: with ``add_bias_kv`` or
      ``add_zero_attn`` the added keys are seen by every query.
    * What a nested tensor may be asked for does not depend on whether gradients are wanted.
    * Wrong arguments raise TypeError or ValueError.

    Args:
        embed_dim: size of the queries and of the output.
        num_heads: into how many heads of ``embed_dim // num_heads`` it is divided, without a remainder. (The kernels
            take heads of at most 256.)
        dropout: probability that an attention weight is dropped, in training mode only. Drawn in the kernel.
        bias: whether the projections have biases.
        add_bias_kv: with one more key and value, both learned, that every query sees.
        add_zero_attn: with one more key and value of zeros, that every query sees.
        kdim, vdim: size of the keys and of the values; None: ``embed_dim``.
        batch_first: whether the inputs are (batch, length, size) rather than (length, batch, size).
        device, dtype: of the parameters.

    Shapes and dtypes of inputs, masks and results: :meth:`forward`.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or device; the message names it.

    Examples:
        >>> import torch, fusedops
        >>> module = fusedops.nn.MultiheadAttention(16, 4, batch_first=True)
        >>> x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        >>> module(x, x, x, key_padding_mask=padding, need_weights=False)[0].shape
        torch.Size([2, 5, 16])
        >>> weights = module(x, x, x, key_padding_mask=padding)[1]
        >>> weights[1].sum(-1).round(decimals=3), weights[1, :, 3:].any().item()
        (tensor([1., 1., 1., 1., 1.], grad_fn=<RoundBackward1>), False)
    """

    # Whether the rows of in_proj_weight and in_proj_bias lie head by head, those of q, k and v of each, as
    # fusedops.distributed has them; else all of q come first.
    by_head: bool = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        check_heads(name, embed_dim=embed_dim, num_heads=num_heads)
        check_probability(name, "dropout", dropout)
        check_bias(name, bias)
        for argument, size in (("kdim", kdim), ("vdim", vdim)):
            if size is not None:
                check_size(name, argument, size)
        check_bool(name, "batch_first", batch_first)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Project, attend in each head, and project back.

        L is the number of queries, S that of keys, N the batch. Where inputs are the same object, their projections are
        one product. All three may be nested tensors (batch, any length, size), of either layout, without masks. They
        are not padded, but where weights or added keys are asked for.

        Args:
            query: (L, N, embed_dim); (N, L, embed_dim) with ``batch_first``; (L, embed_dim) without a batch. float32,
                float16 or bfloat16 (float64 on the torch backend), any strides.
            key: (S, N, kdim), likewise.
            value: (S, N, vdim), likewise.
            key_padding_mask: (N, S), or (S,) without a batch. bool: True where a key is *not* seen, the opposite of
                :func:`fusedops.attention`. Floating: added to the scores.
            need_weights: return the attention weights too.
            attn_mask: (L, S) or (N · num_heads, L, S), bool or floating as ``key_padding_mask``; a floating one may
                require a gradient.
            average_attn_weights: average the weights over the heads.
            is_causal: says that ``attn_mask``, which must be given, lets query i see keys j ≤ i and no others. Without
                a ``key_padding_mask`` and weights it is then not read.

        Returns:
            output: shape of ``query``, the dtype of torch's module.
            weights: None without ``need_weights``; else (N, L, S + added keys), or (N, num_heads, L, S + added keys)
                where they are not averaged, without the N where there is no batch. They are what multiplies the values:
                after dropout. Of nested tensors, L and S are the longest lengths, and what is past a sequence's end is
                0.

        Raises:
            TypeError, ValueError: an argument has the wrong type, shape or device; the message names it.
        """
        if any(isinstance(x, torch.Tensor) and x.is_nested for x in (query, key, value)):
            return self._forward_nested(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        batch, keys = check_inputs(
            type(self).__name__, _NAMES, self, query, key, value, key_padding_mask, attn_mask, is_causal
        )
        alone = query.dim() == 2
        if alone:
            query, key, value = _same_objects(lambda x: x.unsqueeze(0), query, key, value)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        length_first = not (self.batch_first or alone)
        q, k, v = (self._heads(x, length_first) for x in self._project(query, key, value))
        k, v, added = self._add_keys(k, v)
        hinted = bool(is_causal) and key_padding_mask is None and not need_weights and not added
        mask = None if hinted else self._mask(attn_mask, key_padding_mask, batch, keys, added)
        dropout_p = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            weights = _attention_weights(q, k, mask, dropout_p)
            out = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out = attention(q, k, v, causal="top_left" if hinted else False, attn_mask=mask, dropout_p=dropout_p)
            assert isinstance(out, torch.Tensor)
        out = out.permute(2, 0, 1, 3) if length_first else out.transpose(1, 2)
        out = linear(out.flatten(-2), self.out_proj.weight, self.out_proj.bias)
        if alone:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out, weights

    def _project(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> _Tensors:
        """q, k and v of ``embed_dim``, with one product for inputs that are one object."""
        if self.by_head:
            return self._project_by_head(query, key, value)
        bias = self.in_proj_bias
        if self._qkv_same_embed_dim:
            weight = self.in_proj_weight
            size = self.embed_dim
            if query is key:
                if key is value:
                    q, k, v = linear(query, weight, bias).chunk(3, -1)
                    return q, k, v
                # Queries and keys with a position, values without: as in DETR.
                (both, last), (bias_both, bias_last) = _split(weight, bias, (2 * size, size))
                q, k = linear(query, both, bias_both).chunk(2, -1)
                return q, k, linear(value, last, bias_last)
            if key is value:
                (first, both), (bias_first, bias_both) = _split(weight, bias, (size, 2 * size))
                k, v = linear(key, both, bias_both).chunk(2, -1)
                return linear(query, first, bias_first), k, v
            weights = weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        q, k, v = (linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        return q, k, v

    def _project_by_head(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> _Tensors:
        """q, k and v in heads, (…, heads, size): views where the inputs are one object."""
        weight, bias, heads = self.in_proj_weight, self.in_proj_bias, (self.num_heads, 3, self.head_dim)
        if self._qkv_same_embed_dim and query is key and key is value:
            q, k, v = linear(query, weight, bias).unflatten(-1, heads).unbind(-2)
            return q, k, v
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self._qkv_same_embed_dim:
            weights = tuple(w.flatten(0, 1) for w in weight.unflatten(0, heads).unbind(1))
        biases = (None, None, None)
        if bias is not None:
            biases = tuple(b.flatten() for b in bias.unflatten(0, heads).unbind(1))
        q, k, v = (
            linear(x, w, b).unflatten(-1, (self.num_heads, self.head_dim))
            for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )
        return q, k, v

    def _heads(self, x: torch.Tensor, length_first: bool) -> torch.Tensor:
        """(batch, length, embed_dim), or length first, as (batch, heads, length, size): a view."""
        if not self.by_head:
            x = x.unflatten(-1, (self.num_heads, self.head_dim))
        return x.permute(1, 2, 0, 3) if length_first else x.transpose(1, 2)

    def _add_keys(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Keys and values, with those that the module adds, and how many these are."""
        batch, heads, _, size = k.shape
        keys, values = [k], [v]
        if self.bias_k is not None and self.bias_v is not None:
            for list_, bias, x in ((keys, self.bias_k, k), (values, self.bias_v, v)):
                list_.append(bias.view(1, heads, 1, size).expand(batch, -1, -1, -1).to(x.dtype))
        if self.add_zero_attn:
            keys.append(k.new_zeros(batch, heads, 1, size))
            values.append(v.new_zeros(batch, heads, 1, size))
        added = len(keys) - 1
        return (torch.cat(keys, 2), torch.cat(values, 2), added) if added else (k, v, 0)

    def _mask(
        self,
        attn_mask: torch.Tensor | None,
        key_padding_mask: torch.Tensor | None,
        batch: int,
        keys: int,
        added: int,
    ) -> torch.Tensor | None:
        """Both masks in one that :func:`fusedops.attention` takes, of no more dimensions than they have together."""
        masks = []
        if attn_mask is not None:
            masks.append(attn_mask.unflatten(0, (batch, self.num_heads)) if attn_mask.dim() == 3 else attn_mask)
        if key_padding_mask is not None:
            masks.append(key_padding_mask.view(batch, 1, 1, keys))
        if added:
            masks = [F.pad(mask, (0, added)) for mask in masks]  # False or 0: every query sees them
        hidden = [mask for mask in masks if mask.dtype == torch.bool]
        biases = [mask for mask in masks if mask.dtype != torch.bool]
        if not hidden:
            return biases[0] + biases[1] if len(biases) == 2 else (biases[0] if biases else None)
        if not biases:
            return (hidden[0] | hidden[1] if len(hidden) == 2 else hidden[0]).logical_not()
        return biases[0].masked_fill(hidden[0], float("-inf"))

    def _forward_nested(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None,
        need_weights: bool,
        attn_mask: torch.Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        name = type(self).__name__
        for argument, x in (("query", query), ("key", key), ("value", value)):
            if not isinstance(x, torch.Tensor) or not x.is_nested:
                wrong_type(name, argument, "nested, as the other inputs are", x)
        for argument, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None:
                wrong_value(name, argument, "None with nested tensors", mask)
        if is_causal:
            wrong_value(name, "is_causal", "False with nested tensors, which take no attn_mask", is_causal)
        of_query = unpack(name, "query", query)
        of_key = of_query if key is query else unpack(name, "key", key)
        of_value = of_key if value is key else (of_query if value is query else unpack(name, "value", value))
        ours = (of_query, of_key, of_value)
        for argument, packed, size in zip(
            ("query", "key", "value"), ours, (self.embed_dim, self.kdim, self.vdim), strict=True
        ):
            if packed.rows.shape[-1] != size or packed.offsets.shape != of_query.offsets.shape:
                shape = (len(of_query.offsets) - 1, "any length", packed.rows.shape[-1])
                raise ValueError(f"{name}: {argument} must be of {size} features and query's batch; got shape {shape}")
        if need_weights or self.bias_k is not None or self.add_zero_attn:
            return self._attend_padded(*ours, need_weights, average_attn_weights)
        q, k, v = (
            x.unflatten(-1, (self.num_heads, self.head_dim)) for x in self._project(*(packed.rows for packed in ours))
        )
        out = attention_varlen(
            q, k, v, of_query.offsets, of_key.offsets, of_query.longest, of_key.longest,
            dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return of_query.nest(linear(out.flatten(-2), self.out_proj.weight, self.out_proj.bias)), None

    def _attend_padded(
        self, query: Packed, key: Packed, value: Packed, need_weights: bool, average_attn_weights: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The way of nested tensors through what knows padding only."""
        unused = query.padding()
        q, k, v = _same_objects(Packed.padded, query, key, value)
        if not self.batch_first:
            q, k, v = _same_objects(lambda x: x.transpose(0, 1), q, k, v)
        out, weights = MultiheadAttention.forward(
            self, q, k, v, key.padding(), need_weights, average_attn_weights=average_attn_weights
        )
        out = out if self.batch_first else out.transpose(0, 1)
        if weights is not None:
            weights = weights.masked_fill(unused[..., None] if average_attn_weights else unused[:, None, :, None], 0.0)
        return query.nest(out[~unused]), weights


def _split(
    weight: torch.Tensor, bias: torch.Tensor | None, sizes: tuple[int, int]
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor | None, torch.Tensor | None]]:
    first, second = weight.split(sizes)
    return (first, second), (None, None) if bias is None else bias.split(sizes)


def _same_objects(function: Callable[[_T], _S], query: _T, key: _T, value: _T) -> tuple[_S, _S, _S]:
    """``function`` of each; results are the same objects where the arguments are."""
    q = function(query)
    k = q if key is query else function(key)
    return q, k, k if value is key else (q if value is query else function(value))


def _attention_weights(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, dropout_p: float) -> torch.Tensor:
    """``dropout(softmax(q kᵀ / √size + mask))`` by torch's operators: (batch, heads, queries, keys).

    A query that sees no key has weights 0. (Its scores are replaced before the softmax, too: the derivative of a
    softmax of nothing is NaN.)
    """
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if mask is None:
        weights = torch.softmax(scores, -1)
    else:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
            blind = ~mask.any(-1, keepdim=True)
        else:
            mask = mask.to(scores.dtype)
            scores = scores + mask
            blind = (mask == float("-inf")).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    return F.dropout(weights, dropout_p) if dropout_p else weights


def check_inputs(
    function: str,
    names: Sequence[str],
    module: torch.nn.MultiheadAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
) -> tuple[int, int]:
    """Raise, naming the argument, or give the sizes of the batch (1 where there is none) and of the keys.

    Args:
        names: of the three inputs and the two masks.
        module: whose sizes and order of dimensions the inputs must have.
    """
    dims = query.dim() if isinstance(query, torch.Tensor) else 0
    tensors, sizes = (query, key, value), (module.embed_dim, module.kdim, module.vdim)
    for argument, x, size in zip(names[:3], tensors, sizes, strict=True):
        check_tensor(function, argument, x)
        if x.dim() not in (2, 3) or x.dim() != dims or x.shape[-1] != size:
            order = "batch, length" if module.batch_first else "length, batch"
            takes = {2: f"(length, {size})", 3: f"({order}, {size})"}
            wrong_value(function, argument, f"of shape {takes.get(dims) or ' or '.join(takes.values())}", x)
        if x is not query:
            check_same_device(function, argument, x, names[0], query)
            if autocast_dtype(x) != autocast_dtype(query):
                wrong_type(function, argument, f"of the dtype of {names[0]} ({query.dtype})", x)
    if value.shape[:-1] != key.shape[:-1]:
        wrong_value(function, names[2], f"of shape {(*key.shape[:-1], module.vdim)}, as {names[1]} has keys", value)
    length, of_batch = (1, 0) if module.batch_first and dims == 3 else (0, 1)
    batch = query.shape[of_batch] if dims == 3 else 1
    if dims == 3 and key.shape[of_batch] != batch:
        wrong_value(function, names[1], f"of a batch of {batch}, as {names[0]} is", key)
    queries, keys = query.shape[length], key.shape[length]
    if key_padding_mask is not None:
        shape = (batch, keys) if dims == 3 else (keys,)
        check_mask(function, names[3], key_padding_mask, names[0], query)
        if key_padding_mask.shape != shape:
            wrong_value(function, names[3], f"of shape {shape}, one for each key", key_padding_mask)
    if attn_mask is not None:
        shapes = ((queries, keys), (batch * module.num_heads, queries, keys))
        check_mask(function, names[4], attn_mask, names[0], query)
        if attn_mask.shape not in shapes:
            wrong_value(function, names[4], f"of shape {shapes[0]} or, by batch and head, {shapes[1]}", attn_mask)
    elif is_causal:
        wrong_value(function, names[4], "the causal mask where is_causal says that it is causal", attn_mask)
    return batch, keys


def check_mask(function: str, argument: str, value: Any, like: str, query: torch.Tensor) -> None:
    """A bool or floating tensor on the device of ``query``, whose name ``like`` is."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.bool:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            wrong_type(function, argument, "a bool or floating-point tensor, or None", value)
        check_tensor(function, argument, value)
    check_same_device(function, argument, value, like, query)


def check_size(function: str, argument: str, value: Any) -> None:
    """An int of at least 1."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        wrong_type(function, argument, "an int", value)
    if value < 1:
        wrong_value(function, argument, "1 or more", value)


def check_heads(function: str, **sizes: Any) -> None:
    """Two ints of at least 1, the second of which divides the first."""
    for argument, value in sizes.items():
        check_size(function, argument, value)
    (name, size), (divisor, heads) = sizes.items()
    if size % heads:
        wrong_value(function, name, f"a multiple of {divisor} ({heads})", size)
