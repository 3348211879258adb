"""torch's operators of ``op_db``, as calls of fusedops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fusedops


def _through_linear(activation: str) -> Callable[..., torch.Tensor]:
    """An elementwise function as the activation behind a product with the identity, which is exact."""

    def call(input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(1) if input.dim() == 0 else input
        identity = torch.eye(rows.shape[-1], dtype=input.dtype, device=input.device)
        return fusedops.linear(rows, identity, None, activation).reshape(input.shape)

    return call


def gelu(input: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    return _through_linear(names.get(approximate, approximate))(input)


def addmm(
    input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """The product's factor goes into its left operand, the sum's into the residual."""
    residual = (beta * input).expand(mat1.shape[0], mat2.shape[1])
    return fusedops.linear(alpha * mat1, mat2.t(), residual=residual)


def addmm_activation(
    input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, use_gelu: bool = False
) -> torch.Tensor:
    """torch's gelu in there is the tanh form."""
    bias = input if input.dim() == 1 else None
    assert bias is not None
    return fusedops.linear(mat1, mat2.t(), bias, "gelu_tanh" if use_gelu else "relu")


def normalize(input: torch.Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> torch.Tensor:
    assert p == 2.0
    return fusedops.l2_norm(input, dim, eps)


def multi_head_attention_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, embed_dim: int, num_heads: int,
    in_proj_weight: torch.Tensor, in_proj_bias: torch.Tensor | None, bias_k: torch.Tensor | None,
    bias_v: torch.Tensor | None, add_zero_attn: bool, dropout_p: float, out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None, training: bool = True, key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True, attn_mask: torch.Tensor | None = None, **options: Any,
) -> Any:  # fmt: skip
    """The module, with the call's weights for its own."""
    module = fusedops.nn.MultiheadAttention(
        embed_dim, num_heads, dropout_p, in_proj_bias is not None, bias_k is not None, add_zero_attn
    ).train(training)
    weights = {"in_proj_weight": in_proj_weight, "out_proj.weight": out_proj_weight}
    if in_proj_bias is not None and out_proj_bias is not None:
        weights |= {"in_proj_bias": in_proj_bias, "out_proj.bias": out_proj_bias}
    if bias_k is not None and bias_v is not None:
        weights |= {"bias_k": bias_k.reshape(1, 1, -1), "bias_v": bias_v.reshape(1, 1, -1)}
    return torch.func.functional_call(
        module, weights, (query, key, value),
        {"key_padding_mask": key_padding_mask, "need_weights": need_weights, "attn_mask": attn_mask},
    )  # fmt: skip


# What op_db calls it -> what it is here.
OURS: dict[str, Callable[..., Any]] = {
    "nn.functional.layer_norm": fusedops.layer_norm,
    "nn.functional.rms_norm": fusedops.rms_norm,
    "nn.functional.group_norm": fusedops.group_norm,
    "nn.functional.normalize": normalize,
    "nn.functional.linear": fusedops.linear,
    "addmm": addmm,
    "nn.functional.scaled_dot_product_attention": fusedops.scaled_dot_product_attention,
    "nn.functional.multi_head_attention_forward": multi_head_attention_forward,
    "nn.functional.gelu": gelu,
    "nn.functional.silu": _through_linear("silu"),
    "nn.functional.relu": _through_linear("relu"),
    "nn.functional.hardswish": _through_linear("hardswish"),
    "nn.functional.mish": _through_linear("mish"),
    "tanh": _through_linear("tanh"),
    "sigmoid": _through_linear("sigmoid"),
}
