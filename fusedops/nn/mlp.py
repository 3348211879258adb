"""Gated layers and two-layer perceptrons: torch.nn's Linears for their parameters, fusedops' forward."""

from __future__ import annotations

import numbers
from typing import Any

import torch
import torch.nn.functional as F

from fusedops.linear.activations import ACTIVATIONS, check_activation
from fusedops.linear.functional import linear
from fusedops.linear.functional_gated import gated_linear
from fusedops.nn.linear import check_bias
from fusedops.nn.parts import reads
from fusedops.runtime.checks import check_bool, check_probability, wrong_type, wrong_value
from fusedops.runtime.sharded import sharded, summed


def _linear(input: torch.Tensor, layer: Any, activation: str | None, dropout_p: float) -> torch.Tensor:
    """``dropout(activation(layer(input)))``: one call where the layer's parameters may be read."""
    if reads(layer, torch.nn.Linear):
        return linear(input, layer.weight, layer.bias, activation, dropout_p=dropout_p)
    output = _activate(layer(input), activation)
    return F.dropout(output, dropout_p) if dropout_p else output


def _activate(z: torch.Tensor, activation: str | None) -> torch.Tensor:
    return z if activation is None else ACTIVATIONS[activation].forward(z)


def _check_sizes(name: str, **sizes: Any) -> None:
    """TypeError or ValueError unless each is an int of at least 0, or None."""
    for argument, size in sizes.items():
        if size is None and argument == "out_features":
            continue
        if not isinstance(size, numbers.Integral) or isinstance(size, bool):
            wrong_type(name, argument, "an int", size)
        if size < 0:
            wrong_value(name, argument, "0 or more", size)


class _Gated(torch.nn.Module):
    """Two linear layers of one input, ``gate_proj`` and ``up_proj``, or one of both, ``gate_up_proj``."""

    gate_proj: torch.nn.Module
    up_proj: torch.nn.Module
    gate_up_proj: torch.nn.Module
    # Whether gate_up_proj's rows lie in pairs, one of the gate and one of the other, as fusedops.distributed has them.
    interleaved: bool = False

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        bias: bool,
        activation: str | None,
        packed: bool,
        options: dict[str, Any],
    ) -> None:
        _check_sizes(type(self).__name__, in_features=in_features, hidden_features=hidden_features)
        check_bias(type(self).__name__, bias)
        check_activation(type(self).__name__, activation)
        check_bool(type(self).__name__, "packed", packed)
        super().__init__()
        self.in_features = in_features
        self.activation = activation
        self.packed = packed
        if packed:
            self.gate_up_proj = torch.nn.Linear(in_features, 2 * hidden_features, bias, **options)
        else:
            self.gate_proj = torch.nn.Linear(in_features, hidden_features, bias, **options)
            self.up_proj = torch.nn.Linear(in_features, hidden_features, bias, **options)

    def _gated_linear(self, input: torch.Tensor) -> torch.Tensor:
        if self.packed:
            both: Any = self.gate_up_proj
            if reads(both, torch.nn.Linear):
                if not self.interleaved:
                    return gated_linear(input, both.weight, None, both.bias, None, self.activation)
                weights = both.weight.unflatten(0, (both.out_features // 2, 2)).unbind(1)
                biases = (None, None) if both.bias is None else both.bias.unflatten(0, (-1, 2)).unbind(1)
                return gated_linear(input, *weights, *biases, self.activation)
            z = both(input)
            if isinstance(both, torch.nn.Linear) and z.shape[-1] != both.out_features:
                raise ValueError(
                    f"{type(self).__name__}: gate_up_proj gave {z.shape[-1]} of {both.out_features} features: its rows"
                    " are sharded, though the first half of them is the gate's. Parallelize this module as a whole, by"
                    " fusedops.distributed.tensor_parallel_plan"
                )
            g, u = z.unflatten(-1, (-1, 2)).unbind(-1) if self.interleaved else z.chunk(2, -1)
        else:
            gate: Any = self.gate_proj
            up: Any = self.up_proj
            if reads(gate, torch.nn.Linear) and reads(up, torch.nn.Linear):
                return gated_linear(input, gate.weight, up.weight, gate.bias, up.bias, self.activation)
            g, u = gate(input), up(input)
        return _activate(g, self.activation) * u


class GatedLinear(_Gated):
    """Gated linear unit, :func:`fusedops.gated_linear`: ``activation(gate_proj(input)) * up_proj(input)``.

    Its state_dict is that of two :class:`torch.nn.Linear`, which hold the parameters: ``gate_proj.weight``,
    ``gate_proj.bias``, ``up_proj.weight``, ``up_proj.bias``, as Llama's; packed, of one: ``gate_up_proj.weight``,
    ``gate_up_proj.bias``, as Phi-3's. The forward reads their parameters. Where one of the layers is hooked, wrapped
    or exchanged (LoRA, quantisation), the layers are called instead.

    Args:
        in_features: the input's last size.
        out_features: the output's last size.
        bias: whether the layers have biases.
        activation: of the gate: ``"silu"`` (SwiGLU), ``"gelu"`` or ``"gelu_tanh"`` (GeGLU), ``"relu"`` (ReGLU),
            ``"sigmoid"`` (GLU), None (bilinear), or another name that :func:`fusedops.linear` takes.
        packed: keep both layers in one, the gate's rows first.
        device, dtype: of the parameters, which begin as those of :class:`torch.nn.Linear`.

    Shapes and dtypes as of :func:`fusedops.gated_linear`.

    Raises:
        TypeError, ValueError: ``activation`` is not one that :func:`fusedops.linear` takes.

    Examples:
        >>> import torch, fusedops
        >>> layer = fusedops.nn.GatedLinear(8, 32)
        >>> layer(torch.randn(2, 8)).shape
        torch.Size([2, 32])
        >>> list(layer.state_dict())
        ['gate_proj.weight', 'gate_proj.bias', 'up_proj.weight', 'up_proj.bias']
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str | None = "silu",
        packed: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, activation, packed, {"device": device, "dtype": dtype})
        self.out_features = out_features

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``activation(gate_proj(input)) * up_proj(input)``, (..., out_features).

        Args:
            input: (..., in_features).
        """
        return self._gated_linear(input)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class GatedMLP(_Gated):
    """Gated perceptron, the feed-forward layer of Llama: ``down_proj(activation(gate_proj(input)) * up_proj(input))``.

    Shazeer 2020, "GLU Variants Improve Transformer", equation 6. Its state_dict is that of three
    :class:`torch.nn.Linear`, which hold the parameters: ``gate_proj``, ``up_proj``, ``down_proj`` as Llama's; packed,
    ``gate_up_proj``, ``down_proj`` as Phi-3's. The forward reads their parameters. A layer that is hooked, wrapped or
    exchanged (LoRA, quantisation) is called instead.

    Args:
        in_features: the input's last size.
        hidden_features: the size between.
        out_features: the output's last size; None: the input's.
        bias: whether the layers have biases.
        activation: of the gate, as for :class:`GatedLinear`.
        packed: keep the first two layers in one, the gate's rows first.
        device, dtype: of the parameters, which begin as those of :class:`torch.nn.Linear`.

    Shapes and dtypes as of :func:`fusedops.gated_linear` and, behind it, :func:`fusedops.linear`.

    Raises:
        TypeError, ValueError: ``activation`` is not one that :func:`fusedops.linear` takes.

    Examples:
        >>> import torch, fusedops
        >>> mlp = fusedops.nn.GatedMLP(8, 32)
        >>> mlp(torch.randn(2, 8)).shape
        torch.Size([2, 8])
        >>> list(mlp.state_dict())
        ['gate_proj.weight', 'up_proj.weight', 'down_proj.weight']
    """

    down_proj: torch.nn.Module

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = False,
        activation: str | None = "silu",
        packed: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options = {"device": device, "dtype": dtype}
        _check_sizes(type(self).__name__, out_features=out_features)
        super().__init__(in_features, hidden_features, bias, activation, packed, options)
        self.hidden_features = hidden_features
        self.out_features = in_features if out_features is None else out_features
        self.down_proj = torch.nn.Linear(hidden_features, self.out_features, bias, **options)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``down_proj(activation(gate_proj(input)) * up_proj(input))``, (..., out_features).

        Args:
            input: (..., in_features).
        """
        return _linear(self._gated_linear(input), self.down_proj, None, 0.0)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class MLP(torch.nn.Module):
    """Two-layer perceptron: ``dropout(fc2(dropout(activation(fc1(input)))))``, as timm's ``Mlp``.

    Its state_dict is that of two :class:`torch.nn.Linear`, which hold the parameters: ``fc1.weight``, ``fc1.bias``,
    ``fc2.weight``, ``fc2.bias``. The forward reads their parameters. A layer that is hooked, wrapped or exchanged
    (LoRA, quantisation) is called instead.

    Args:
        in_features: the input's last size.
        hidden_features: the size between the two layers.
        out_features: the output's last size; None: the input's.
        bias: whether the layers have biases.
        activation: between the layers, a name that :func:`fusedops.linear` takes, or None. ``"gelu"`` is the exact one.
        dropout: probability that an element is dropped, after the activation and after the second layer, in training
            mode only.
        device, dtype: of the parameters, which begin as those of :class:`torch.nn.Linear`.

    Shapes and dtypes as of :func:`fusedops.linear`.

    Raises:
        TypeError, ValueError: ``activation`` is not one that :func:`fusedops.linear` takes, or ``dropout`` is no
            probability.

    Examples:
        >>> import torch, fusedops
        >>> mlp = fusedops.nn.MLP(8, 32, dropout=0.1)
        >>> mlp(torch.randn(2, 8)).shape
        torch.Size([2, 8])
        >>> list(mlp.state_dict())
        ['fc1.weight', 'fc1.bias', 'fc2.weight', 'fc2.bias']
    """

    fc1: torch.nn.Module
    fc2: torch.nn.Module

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        activation: str | None = "gelu",
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        _check_sizes(name, in_features=in_features, hidden_features=hidden_features, out_features=out_features)
        check_bias(name, bias)
        check_activation(name, activation)
        check_probability(name, "dropout", dropout)
        super().__init__()
        options = {"device": device, "dtype": dtype}
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.out_features = in_features if out_features is None else out_features
        self.activation = activation
        self.dropout = dropout
        self.fc1 = torch.nn.Linear(in_features, hidden_features, bias, **options)
        self.fc2 = torch.nn.Linear(hidden_features, self.out_features, bias, **options)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``dropout(fc2(dropout(activation(fc1(input)))))``, (..., out_features).

        Args:
            input: (..., in_features).
        """
        dropout_p = self.dropout if self.training else 0.0
        hidden = _linear(input, self.fc1, self.activation, dropout_p)
        if dropout_p and sharded(hidden):
            return F.dropout(summed(_linear(hidden, self.fc2, None, 0.0)), dropout_p)
        return _linear(hidden, self.fc2, None, dropout_p)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, dropout={self.dropout}"
