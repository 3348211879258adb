"""The norms: torch.nn's own parameters and initialisation, fusedops' forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops.norm.functional import add_layer_norm, add_rms_norm, group_norm, layer_norm, rms_norm
from fusedops.runtime.checks import check_number, check_probability


class LayerNorm(torch.nn.LayerNorm):
    """:class:`torch.nn.LayerNorm` whose forward is :func:`fusedops.layer_norm`.

    Args:
        normalized_shape: the trailing shape that is normalised; an int stands for one dimension.
        eps: added to the variance.
        elementwise_affine: with a weight, initially ones.
        bias: with a bias too, initially zeros.
        device, dtype: of the parameters.

    Shapes and dtypes as of :func:`fusedops.layer_norm`.

    Raises:
        TypeError, ValueError: the forward's input is none of :func:`fusedops.layer_norm`; the message names it.

    Examples:
        >>> import torch, fusedops
        >>> norm, torchs, x = fusedops.nn.LayerNorm(8), torch.nn.LayerNorm(8), torch.randn(2, 8)
        >>> norm.load_state_dict(torchs.state_dict())
        <All keys matched successfully>
        >>> torch.allclose(norm(x), torchs(x), atol=1e-6)
        True
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``(x - mean) / sqrt(var + eps) * weight + bias``, of the input's shape.

        Args:
            input: (*, *normalized_shape).
        """
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """:class:`torch.nn.RMSNorm` whose forward is :func:`fusedops.rms_norm`.

    Args:
        normalized_shape: the trailing shape that is normalised; an int stands for one dimension.
        eps: added to the mean square; None: the machine epsilon of float32.
        elementwise_affine: with a weight, initially such that the norm multiplies by one.
        device, dtype: of the parameters.
        weight_offset: added to the weight before it multiplies; 1.0 for Gemma's models, whose weights begin as zeros.

    Shapes and dtypes as of :func:`fusedops.rms_norm`.

    Raises:
        TypeError, ValueError: the forward's input is none of :func:`fusedops.rms_norm`; the message names it.

    Examples:
        >>> import torch, fusedops
        >>> norm, gemma = fusedops.nn.RMSNorm(8), fusedops.nn.RMSNorm(8, weight_offset=1.0)
        >>> norm.weight[0].item(), gemma.weight[0].item()  # each multiplies by one
        (1.0, 0.0)
        >>> x = torch.randn(2, 8)
        >>> torch.equal(norm(x), gemma(x))
        True
    """

    weight_offset: float = 0.0

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
    ) -> None:
        check_number(type(self).__name__, "weight_offset", weight_offset)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.weight_offset = weight_offset
        if weight_offset:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x / sqrt(mean(x²) + eps) * (weight + weight_offset)``, of the input's shape.

        Args:
            x: (*, *normalized_shape).
        """
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, weight_offset=self.weight_offset)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return f"{text}, weight_offset={self.weight_offset}" if self.weight_offset else text


class AddLayerNorm(LayerNorm):
    """Dropout, residual sum and layer norm, :func:`fusedops.add_layer_norm`: ``forward(input, residual)``.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as for :class:`torch.nn.LayerNorm`, whose
            state_dict keys these are too.
        dropout: probability that an element of ``input`` is dropped, in training mode only.

    Returns:
        ``(output, residual_out)``; shapes, dtypes and errors as of :func:`fusedops.add_layer_norm`.

    Raises:
        TypeError, ValueError: ``dropout`` is no probability.

    Examples:
        >>> import torch, fusedops
        >>> norm = fusedops.nn.AddLayerNorm(8, dropout=0.1)
        >>> output, stream = norm(torch.randn(2, 8), torch.randn(2, 8))
        >>> output.shape, stream.shape
        (torch.Size([2, 8]), torch.Size([2, 8]))
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        dropout: float = 0.0,
    ) -> None:
        check_probability("AddLayerNorm", "dropout", dropout)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.dropout = dropout

    def forward(  # type: ignore[override]
        self, input: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of the sum, and the sum: ``residual_out = dropout(input) + residual``.

        Args:
            input: (*, *normalized_shape), what the sublayer gave.
            residual: the shape of ``input``, the stream it is added to.

        Returns:
            ``(output, residual_out)``, both of the input's shape.
        """
        dropout_p = self.dropout if self.training else 0.0
        return add_layer_norm(
            input, residual, self.normalized_shape, self.weight, self.bias, self.eps, dropout_p=dropout_p
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dropout={self.dropout}"


class AddRMSNorm(RMSNorm):
    """Dropout, residual sum and RMS norm, :func:`fusedops.add_rms_norm`: ``forward(input, residual)``.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype, weight_offset: as for :class:`RMSNorm`.
        dropout: probability that an element of ``input`` is dropped, in training mode only.

    Returns:
        ``(output, residual_out)``; shapes, dtypes and errors as of :func:`fusedops.add_rms_norm`.

    Raises:
        TypeError, ValueError: ``dropout`` is no probability.

    Examples:
        >>> import torch, fusedops
        >>> norm = fusedops.nn.AddRMSNorm(8)
        >>> output, stream = norm(torch.randn(2, 8), torch.randn(2, 8))
        >>> output.shape, stream.shape
        (torch.Size([2, 8]), torch.Size([2, 8]))
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        check_probability("AddRMSNorm", "dropout", dropout)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, weight_offset=weight_offset)
        self.dropout = dropout

    def forward(  # type: ignore[override]
        self, input: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of the sum, and the sum: ``residual_out = dropout(input) + residual``.

        Args:
            input: (*, *normalized_shape), what the sublayer gave.
            residual: the shape of ``input``, the stream it is added to.

        Returns:
            ``(output, residual_out)``, both of the input's shape.
        """
        return add_rms_norm(
            input,
            residual,
            self.normalized_shape,
            self.weight,
            self.eps,
            weight_offset=self.weight_offset,
            dropout_p=self.dropout if self.training else 0.0,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dropout={self.dropout}"


class GroupNorm(torch.nn.GroupNorm):
    """:class:`torch.nn.GroupNorm` whose forward is :func:`fusedops.group_norm`.

    Args:
        num_groups: into how many groups the channels are divided.
        num_channels: the input's second size.
        eps: added to the variance.
        affine: with a weight, initially ones, and a bias, initially zeros, one element a channel.
        device, dtype: of the parameters.
        bias: False: without the bias, where torch's class takes this argument.

    Shapes and dtypes as of :func:`fusedops.group_norm`.

    Raises:
        TypeError, ValueError: the forward's input is none of :func:`fusedops.group_norm`; the message names it.

    Examples:
        >>> import torch, fusedops
        >>> norm = fusedops.nn.GroupNorm(2, 8)
        >>> images = torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)
        >>> norm(images).is_contiguous(memory_format=torch.channels_last)
        True
        >>> torch.allclose(norm(images), torch.nn.functional.group_norm(images, 2), atol=1e-5)
        True
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``(x - mean) / sqrt(var + eps) * weight + bias`` in each group of channels, of the input's shape.

        Args:
            input: (N, num_channels, *).
        """
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
