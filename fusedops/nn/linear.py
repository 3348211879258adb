"""The linear layers: torch.nn's initialisation, fusedops' forward."""

from __future__ import annotations

import math
from typing import Any

import torch

from fusedops.linear.activations import check_activation
from fusedops.linear.functional import linear
from fusedops.norm_linear.functional import layer_norm_linear, rms_norm_linear
from fusedops.runtime.checks import check_bool, check_number, check_probability, wrong_type, wrong_value


class Linear(torch.nn.Linear):
    """:class:`torch.nn.Linear`, with an activation if one is named, whose forward is :func:`fusedops.linear`.

    Args:
        in_features: the input's last size.
        out_features: the output's last size.
        bias: with a bias.
        device, dtype: of the parameters.
        activation: applied to the result: None, or a name that :func:`fusedops.linear` takes. It has no parameters:
            the state_dict is that of torch.nn.Linear.
        dropout: probability that an element of the result is dropped, in training mode only.
        recompute, fuse_wgrad_accumulation: as for :func:`fusedops.linear`.

    Shapes and dtypes as of :func:`fusedops.linear`.

    Raises:
        TypeError, ValueError: an argument is not one that :func:`fusedops.linear` takes.

    Examples:
        >>> import torch, fusedops
        >>> layer = fusedops.nn.Linear(8, 32, activation="gelu")
        >>> x, residual = torch.randn(2, 8), torch.randn(2, 32)
        >>> layer(x, residual).shape, list(layer.state_dict())
        (torch.Size([2, 32]), ['weight', 'bias'])
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
        dropout: float = 0.0,
        recompute: bool = False,
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        check_bias("Linear", bias)
        check_activation("Linear", activation)
        check_probability("Linear", "dropout", dropout)
        check_bool("Linear", "recompute", recompute)
        check_bool("Linear", "fuse_wgrad_accumulation", fuse_wgrad_accumulation)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation
        self.dropout = dropout
        self.recompute = recompute
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation

    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``dropout(activation(input @ weight.T + bias)) + residual``.

        Args:
            input: (..., in_features).
            residual: (..., out_features), or None.

        Returns:
            (..., out_features).
        """
        return linear(
            input, self.weight, self.bias, self.activation, residual=residual,
            dropout_p=self.dropout if self.training else 0.0, recompute=self.recompute,
            fuse_wgrad_accumulation=self.fuse_wgrad_accumulation,
        )  # fmt: skip

    def extra_repr(self) -> str:
        options = {
            name: value
            for name, value in (
                ("activation", self.activation),
                ("dropout", self.dropout),
                ("recompute", self.recompute),
                ("fuse_wgrad_accumulation", self.fuse_wgrad_accumulation),
            )
            if value
        }
        return ", ".join([super().extra_repr(), *(f"{name}={value!r}" for name, value in options.items())])


class _NormFirst(torch.nn.Module):
    """A module that begins with a norm over the last dimension, and what follows it linear.

    Args:
        size: the input's last size.
        eps, normalization, activation: as for :class:`LayerNormLinear`.
        options: ``device`` and ``dtype`` of the norm's parameters.
    """

    layer_norm_bias: torch.nn.Parameter | None

    def __init__(
        self, size: int, eps: float | None, normalization: str, activation: str | None, options: dict[str, Any]
    ) -> None:
        name = type(self).__name__
        check_activation(name, activation)
        if normalization not in ("LayerNorm", "RMSNorm"):
            wrong_value(name, "normalization", "'LayerNorm' or 'RMSNorm'", normalization)
        if eps is not None or normalization == "LayerNorm":
            check_number(name, "eps", eps)
        super().__init__()
        self.eps = eps
        self.normalization = normalization
        self.activation = activation
        self.layer_norm_weight = torch.nn.Parameter(torch.empty(size, **options))
        self.register_parameter(
            "layer_norm_bias",
            torch.nn.Parameter(torch.empty(size, **options)) if normalization == "LayerNorm" else None,
        )

    def _reset_norm(self) -> None:
        torch.nn.init.ones_(self.layer_norm_weight)
        if self.layer_norm_bias is not None:
            torch.nn.init.zeros_(self.layer_norm_bias)

    def _norm_linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The norm of the input through a linear layer and the activation."""
        if self.normalization == "LayerNorm":
            assert self.eps is not None
            return layer_norm_linear(
                input, self.layer_norm_weight, self.layer_norm_bias, weight, bias, self.activation, self.eps
            )
        return rms_norm_linear(input, self.layer_norm_weight, weight, bias, self.activation, self.eps)


class LayerNormLinear(_NormFirst):
    """A norm and a linear layer, :func:`fusedops.layer_norm_linear` or :func:`fusedops.rms_norm_linear`.

    The normalised tensor is not kept for the backward. Parameters are named as those of Transformer Engine's module
    of this name: ``layer_norm_weight``, ``layer_norm_bias`` (none with RMS norm), ``weight``, ``bias``.

    Args:
        in_features: the input's last size.
        out_features: the output's last size.
        eps: added to the variance or the mean square; 1e-5 with RMS norm too, where :class:`torch.nn.RMSNorm` and
            :func:`fusedops.rms_norm_linear` default to the machine epsilon (None, which RMS norm takes here too).
        bias: whether the linear layer has a bias.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        activation: applied to the result: None, or a name that :func:`fusedops.linear` takes.
        device, dtype: of the parameters, which begin as those of :class:`torch.nn.LayerNorm` and
            :class:`torch.nn.Linear` do.

    Shapes and dtypes as of the functions.

    Raises:
        TypeError, ValueError: ``normalization`` or ``activation`` is not one of those.

    Examples:
        >>> import torch, fusedops
        >>> layer = fusedops.nn.LayerNormLinear(8, 32, normalization="RMSNorm", activation="silu")
        >>> layer(torch.randn(2, 8)).shape
        torch.Size([2, 32])
    """

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float | None = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options = {"device": device, "dtype": dtype}
        super().__init__(in_features, eps, normalization, activation, options)
        self.in_features = in_features
        self.out_features = out_features
        self.weight = torch.nn.Parameter(torch.empty((out_features, in_features), **options))
        self.register_parameter("bias", torch.nn.Parameter(torch.empty(out_features, **options)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The norm's weight to ones and its bias to zeros; the rest as :class:`torch.nn.Linear`."""
        self._reset_norm()
        _reset_linear(self.weight, self.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``activation(norm(input) @ weight.T + bias)``, (..., out_features).

        Args:
            input: (..., in_features).
        """
        return self._norm_linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, eps={self.eps},"
            f" bias={self.bias is not None}, normalization={self.normalization!r}, activation={self.activation!r}"
        )


class LayerNormMLP(_NormFirst):
    """A norm and a two-layer perceptron: ``linear(activation(linear(norm(input))))``, as a transformer block has it.

    The normalised tensor is not kept for the backward. Parameters are named as those of Transformer Engine's module
    of this name: ``layer_norm_weight``, ``layer_norm_bias`` (none with RMS norm), ``fc1_weight``, ``fc1_bias``,
    ``fc2_weight``, ``fc2_bias``.

    Args:
        hidden_size: the input's and the output's last size.
        ffn_hidden_size: the size between the two layers.
        eps: added to the variance or the mean square; 1e-5 with RMS norm too, where :class:`torch.nn.RMSNorm` and
            :func:`fusedops.rms_norm_linear` default to the machine epsilon (None, which RMS norm takes here too).
        bias: whether both linear layers have a bias.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        activation: between the layers, a name that :func:`fusedops.linear` takes, or None. ``"gelu"`` is the exact
            one; Transformer Engine's is ``"gelu_tanh"`` here.
        device, dtype: of the parameters, which begin as those of :class:`torch.nn.LayerNorm` and
            :class:`torch.nn.Linear` do.

    Shapes and dtypes as of :func:`fusedops.layer_norm_linear`.

    Raises:
        TypeError, ValueError: ``normalization`` or ``activation`` is not one of those.

    Examples:
        >>> import torch, fusedops
        >>> mlp = fusedops.nn.LayerNormMLP(8, 32)
        >>> mlp(torch.randn(2, 8)).shape
        torch.Size([2, 8])
    """

    fc1_weight: torch.nn.Parameter
    fc1_bias: torch.nn.Parameter | None
    fc2_weight: torch.nn.Parameter
    fc2_bias: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float | None = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str | None = "gelu",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options = {"device": device, "dtype": dtype}
        super().__init__(hidden_size, eps, normalization, activation, options)
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        for layer, rows, cols in (("fc1", ffn_hidden_size, hidden_size), ("fc2", hidden_size, ffn_hidden_size)):
            self.register_parameter(f"{layer}_weight", torch.nn.Parameter(torch.empty((rows, cols), **options)))
            self.register_parameter(f"{layer}_bias", torch.nn.Parameter(torch.empty(rows, **options)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The norm's weight to ones and its bias to zeros; the rest as :class:`torch.nn.Linear`."""
        self._reset_norm()
        _reset_linear(self.fc1_weight, self.fc1_bias)
        _reset_linear(self.fc2_weight, self.fc2_bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``activation(norm(input) @ fc1_weight.T + fc1_bias) @ fc2_weight.T + fc2_bias``, of the input's shape.

        Args:
            input: (..., hidden_size).
        """
        hidden = self._norm_linear(input, self.fc1_weight, self.fc1_bias)
        return linear(hidden, self.fc2_weight, self.fc2_bias)

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, eps={self.eps},"
            f" bias={self.fc1_bias is not None}, normalization={self.normalization!r}, activation={self.activation!r}"
        )


def check_bias(name: str, bias: Any) -> None:
    """A flag of any type, but no text: ``Linear(8, 8, "gelu")`` would have a bias and no activation."""
    if isinstance(bias, str):
        wrong_type(name, "bias", "a bool (activation is a keyword)", bias)


def _reset_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """As torch.nn.Linear, from the same random numbers: uniform between ±1/√in_features."""
    torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        bound = 1 / math.sqrt(weight.shape[1]) if weight.shape[1] else 0.0
        torch.nn.init.uniform_(bias, -bound, bound)
