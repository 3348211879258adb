"""The layer of a transformer's encoder: torch.nn's parameters and initialisation, fusedops' forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fusedops.linear.activations import ACTIVATIONS, check_activation, name_of
from fusedops.linear.functional import linear
from fusedops.nn.attention import MultiheadAttention, check_heads, check_inputs, check_size
from fusedops.nn.linear import check_bias
from fusedops.nn.nested import unpack
from fusedops.nn.norm import LayerNorm
from fusedops.nn.parts import reads, unobserved
from fusedops.norm.functional import add_layer_norm
from fusedops.runtime.checks import (
    check_bool,
    check_number,
    check_probability,
    wrong_type,
)
from fusedops.runtime.precision import autocast_dtype

_NAMES = ("src", "src", "src", "src_key_padding_mask", "src_mask")

_Activation = Callable[[torch.Tensor], torch.Tensor]


def activation_name(activation: Any) -> str | None:
    """The name by which :func:`fusedops.linear` takes a function or a module of torch's; None: it must be called."""
    if isinstance(activation, torch.nn.Module) and not unobserved(activation, type(activation)):
        return None
    return name_of(activation)


class TransformerEncoderLayer(torch.nn.TransformerEncoderLayer):
    """:class:`torch.nn.TransformerEncoderLayer` built from fusedops' attention, norms and linear layers.

    Vaswani et al. 2017, "Attention Is All You Need", section 3.1, with the norms after the residual sums, ``x =
    norm1(x + dropout(attention(x)))`` and ``norm2(x + dropout(linear2(dropout(activation(linear1(x))))))``; or
    ``norm_first``, ``x + dropout(attention(norm1(x)))`` and so on (Xiong et al. 2020, "On Layer Normalization in the
    Transformer Architecture", figure 1). Dropout, residual sum and norm are one kernel; so are a linear layer, its
    activation, its dropout and its residual sum. The parameters of the parts are read; a part that is hooked, wrapped
    or exchanged (LoRA, another norm) is called instead.

    It serves in :class:`torch.nn.TransformerEncoder` as torch's layer does. In evaluation mode that makes one nested
    tensor of a padded batch, which this layer computes without the padding. torch's own fast path, which replaces the
    whole layer in evaluation mode, is never taken.

    Args:
        d_model: size of the input and of the output.
        nhead: number of heads, a divisor of ``d_model``.
        dim_feedforward: size between the two linear layers.
        dropout: probability that an element is dropped, in training mode only: of the attention's weights, and after
            attention, activation and second linear layer.
        activation: a name that :func:`fusedops.linear` takes, or a function of a tensor. Functions and modules of
            torch that have such a name (``torch.nn.functional.gelu``, ``torch.nn.SiLU()``) are fused like it; any
            other is called.
        layer_norm_eps: added to the variance in both norms.
        batch_first: whether the input is (batch, length, size) rather than (length, batch, size).
        norm_first: whether the norms come before attention and linear layers.
        bias: whether linear layers, projections and norms have biases.
        device, dtype: of the parameters.

    Shapes and dtypes of input, masks and result: :meth:`forward`.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or device; the message names it.

    Examples:
        >>> import torch, fusedops
        >>> layer = fusedops.nn.TransformerEncoderLayer(16, 4, 32, activation="gelu", batch_first=True)
        >>> encoder = torch.nn.TransformerEncoder(layer, 2)
        >>> encoder(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | _Activation = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        check_heads(name, d_model=d_model, nhead=nhead)
        check_size(name, "dim_feedforward", dim_feedforward)
        check_probability(name, "dropout", dropout)
        if isinstance(activation, str):
            check_activation(name, activation)
            activation = ACTIVATIONS[activation].forward
        elif not callable(activation):
            wrong_type(name, "activation", "the name of one, or a function of a tensor", activation)
        check_number(name, "layer_norm_eps", layer_norm_eps)
        check_bool(name, "batch_first", batch_first)
        check_bool(name, "norm_first", norm_first)
        check_bias(name, bias)
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias,
            device, dtype,
        )  # fmt: skip
        # torch has drawn the parameters; its parts become ours, which have the same.
        for part, kind in ((self.self_attn, MultiheadAttention), (self.norm1, LayerNorm), (self.norm2, LayerNorm)):
            part.__class__ = kind

    def forward(
        self,
        src: torch.Tensor,
        src_mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Attention and the two linear layers, each with its residual sum and norm.

        Args:
            src: (L, N, d_model); (N, L, d_model) with ``batch_first``; (L, d_model) without a batch; or nested.
                float32, float16 or bfloat16 (float64 on the torch backend), any strides.
            src_mask: (L, L) or (N · nhead, L, L), as ``attn_mask`` of :meth:`MultiheadAttention.forward`.
            src_key_padding_mask: (N, L), or (L,) without a batch, as ``key_padding_mask`` there.
            is_causal: as there.

        Returns:
            Shape of ``src``, the dtype of torch's layer.

        Raises:
            TypeError, ValueError: an argument has the wrong type, shape or device; the message names it.
        """
        name = type(self).__name__
        nested = isinstance(src, torch.Tensor) and src.is_nested
        if not nested and isinstance(self.self_attn, torch.nn.MultiheadAttention):
            check_inputs(name, _NAMES, self.self_attn, src, src, src, src_key_padding_mask, src_mask, is_causal)
        if self._blocks_are_own():
            return self._by_blocks(src, src_mask, src_key_padding_mask, is_causal)
        masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask, "is_causal": is_causal}
        if not nested:
            return self._layer(src, lambda x: self.self_attn(x, x, x, need_weights=False, **masks)[0])
        packed = unpack(name, "src", src)

        def attend(rows: torch.Tensor) -> torch.Tensor:
            x = packed.nest(rows)
            return unpack(name, "the attention's output", self.self_attn(x, x, x, need_weights=False, **masks)[0]).rows

        return packed.nest(self._layer(packed.rows, attend))

    def _blocks_are_own(self) -> bool:
        """Whether a subclass brought methods of its own for what torch's layer composes."""
        kind = type(self)
        own = TransformerEncoderLayer
        return kind._sa_block is not own._sa_block or kind._ff_block is not own._ff_block

    def _by_blocks(
        self, x: torch.Tensor, mask: torch.Tensor | None, padding: torch.Tensor | None, is_causal: bool
    ) -> torch.Tensor:
        if self.norm_first:
            x = x + self._sa_block(self.norm1(x), mask, padding, is_causal=is_causal)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(x + self._sa_block(x, mask, padding, is_causal=is_causal))
        return self.norm2(x + self._ff_block(x))

    def _ff_block(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(self._hidden(x), self.linear2, None, self.dropout2)

    def _layer(self, x: torch.Tensor, attend: _Activation) -> torch.Tensor:
        """The layer on (..., d_model)."""
        if self.norm_first:
            y, x = self._add_norm(attend(self.norm1(x)), x, self.dropout1, self.norm2)
            return self._linear(self._hidden(y), self.linear2, None, self.dropout2, residual=x)
        x, _ = self._add_norm(attend(x), x, self.dropout1, self.norm1)
        y = self._linear(self._hidden(x), self.linear2, None, None)
        return self._add_norm(y, x, self.dropout2, self.norm2)[0]

    def _hidden(self, x: torch.Tensor) -> torch.Tensor:
        """``dropout(activation(linear1(x)))``."""
        return self._linear(x, self.linear1, self.activation, self.dropout)

    @staticmethod
    def _linear(
        x: torch.Tensor, layer: Any, activation: Any, dropout: Any, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``residual + dropout(activation(layer(x)))``, as much of it in one call as may be read."""
        name = None if activation is None else activation_name(activation)
        fused = reads(layer, torch.nn.Linear)
        dropout_p = _dropout_p(dropout)
        named = activation is None or name is not None
        if fused and named and dropout_p is not None:
            # torch's sum of a 16-bit product and a float32 stream is float32.
            out_dtype = None if residual is None else torch.promote_types(autocast_dtype(x), residual.dtype)
            return linear(
                x, layer.weight, layer.bias, name, residual=residual, dropout_p=dropout_p, out_dtype=out_dtype
            )
        y = linear(x, layer.weight, layer.bias, name) if fused else layer(x)
        if activation is not None and not (fused and named):
            y = activation(y)
        y = y if dropout is None else dropout(y)
        return y if residual is None else residual + y

    @staticmethod
    def _add_norm(
        x: torch.Tensor, residual: torch.Tensor, dropout: Any, norm: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``norm(y)`` and ``y = residual + dropout(x)``."""
        dropout_p = _dropout_p(dropout)
        if dropout_p is None or not reads(norm, LayerNorm, torch.nn.LayerNorm):
            y = residual + dropout(x)
            return norm(y), y
        out_dtype = None if x.dtype is residual.dtype else torch.promote_types(x.dtype, residual.dtype)
        return add_layer_norm(
            x, residual, norm.normalized_shape, norm.weight, norm.bias, norm.eps, dropout_p=dropout_p,
            out_dtype=out_dtype,
        )  # fmt: skip


def _dropout_p(dropout: Any) -> float | None:
    """The probability by which a Dropout drops now; None: it is something else, or hooked, and must be called."""
    if dropout is None:
        return 0.0
    if not unobserved(dropout, torch.nn.Dropout):
        return None
    return dropout.p if dropout.training else 0.0
