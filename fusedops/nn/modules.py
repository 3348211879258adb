"""The modules: torch.nn's own parameters and initialisation, fusedops' forward."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.linear.activations import check_activation
from fusedops.linear.functional import linear
from fusedops.norm.functional import group_norm, layer_norm, rms_norm


class LayerNorm(torch.nn.LayerNorm):
    """:class:`torch.nn.LayerNorm` whose forward is :func:`fusedops.layer_norm`.

    Args:
        normalized_shape: the trailing shape that is normalised; an int stands for one dimension.
        eps: added to the variance.
        elementwise_affine: with a weight, initially ones.
        bias: with a bias too, initially zeros.
        device, dtype: of the parameters.

    Shapes, dtypes and errors as of :func:`fusedops.layer_norm`.

    Example:
        >>> import torch, fusedops
        >>> norm = fusedops.nn.LayerNorm(8)
        >>> norm(torch.randn(2, 8)).shape
        torch.Size([2, 8])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """:class:`torch.nn.RMSNorm` whose forward is :func:`fusedops.rms_norm`.

    Args:
        normalized_shape: the trailing shape that is normalised; an int stands for one dimension.
        eps: added to the mean square; None: the machine epsilon of float32.
        elementwise_affine: with a weight, initially ones.
        device, dtype: of the parameters.

    Shapes, dtypes and errors as of :func:`fusedops.rms_norm`.

    Example:
        >>> import torch, fusedops
        >>> norm = fusedops.nn.RMSNorm(8)
        >>> norm(torch.randn(2, 8)).shape
        torch.Size([2, 8])
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


class GroupNorm(torch.nn.GroupNorm):
    """:class:`torch.nn.GroupNorm` whose forward is :func:`fusedops.group_norm`.

    Args:
        num_groups: into how many groups the channels are divided.
        num_channels: the input's second size.
        eps: added to the variance.
        affine: with a weight, initially ones, and a bias, initially zeros, one element a channel.
        device, dtype: of the parameters.

    Shapes, dtypes and errors as of :func:`fusedops.group_norm`.

    Example:
        >>> import torch, fusedops
        >>> norm = fusedops.nn.GroupNorm(2, 8)
        >>> norm(torch.randn(2, 8, 5, 5)).shape
        torch.Size([2, 8, 5, 5])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class Linear(torch.nn.Linear):
    """:class:`torch.nn.Linear`, with an activation if one is named, whose forward is :func:`fusedops.linear`.

    Args:
        in_features: the input's last size.
        out_features: the output's last size.
        bias: with a bias.
        device, dtype: of the parameters.
        activation: applied to the result: None, or a name that :func:`fusedops.linear` takes. It has no parameters:
            the state_dict is that of torch.nn.Linear.

    Shapes and dtypes as of :func:`fusedops.linear`.

    Raises:
        TypeError, ValueError: ``activation`` is not one that :func:`fusedops.linear` takes.

    Example:
        >>> import torch, fusedops
        >>> layer = fusedops.nn.Linear(8, 32, activation="gelu")
        >>> layer(torch.randn(2, 8)).shape
        torch.Size([2, 32])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
    ) -> None:
        check_activation("Linear", activation)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias, self.activation)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return text if self.activation is None else f"{text}, activation={self.activation!r}"
