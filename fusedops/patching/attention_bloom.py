"""BLOOM's attention, whose forward writes its scores out instead of asking transformers' registry for a function.

Le Scao et al. 2022, "BLOOM: A 176B-Parameter Open-Access Multilingual Language Model"; its ALiBi (Press et al. 2022,
"Train Short, Test Long") comes as one tensor that is added to the scores. The fused forward is tried against the
class' own on small random tensors before any module gets it.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from fusedops.attention.functional import scaled_dot_product_attention
from fusedops.patching.attention import eager_reasons
from fusedops.patching.classes import Body, Fused, original_class
from fusedops.patching.findings import Finding, forward_is_replaced, full_name
from fusedops.patching.undisturbed import undisturbed
from fusedops.runtime.backend import backend

_NAME = "transformers.models.bloom.modeling_bloom.BloomAttention"
# What the forward takes; the first four are what every layer is given.
_ARGUMENTS = (
    "hidden_states", "residual", "alibi", "attention_mask", "layer_past", "use_cache", "output_attentions", "kwargs",
)  # fmt: skip

# For the ALiBi tensor of a forward: (the mask, versions of both, their sum). All layers are given the same two.
_sums: Any = WeakTensorKeyDictionary()


def _bias(alibi: torch.Tensor, mask: torch.Tensor | None, heads: int) -> torch.Tensor:
    """Both as one mask (batch, heads, queries or 1, keys); made once for all layers of a model."""
    added = alibi.view(-1, heads, 1, alibi.shape[-1])
    if mask is None:
        return added
    if torch.compiler.is_compiling() or alibi.is_inference() or mask.is_inference():
        return added + mask
    versions = alibi._version, mask._version
    known = _sums.get(alibi)
    if known is not None and known[0]() is mask and known[1] == versions:
        return known[2]
    total = added + mask
    if not total.requires_grad:
        _sums[alibi] = weakref.ref(mask), versions, total
    return total


class FusedBloomAttention(Fused):
    """Its scores are never stored."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        alibi: torch.Tensor,
        attention_mask: torch.Tensor,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if output_attentions or _reasons(self):
            return super().forward(  # type: ignore[misc]
                hidden_states, residual, alibi, attention_mask, layer_past, use_cache, output_attentions, **kwargs
            )
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        dropout = self.attention_dropout
        context = scaled_dot_product_attention(
            query,
            key,
            value,
            _bias(alibi, attention_mask, self.num_heads),
            dropout_p=dropout.p if dropout.training else 0.0,
            scale=self.inv_norm_factor,
        )
        output = self.dense(context.transpose(1, 2).flatten(2))
        output = nn.functional.dropout(output, self.hidden_dropout, self.training)
        return residual + output, None


def _reasons(module: Any) -> list[str]:
    """What keeps a module from being fused, at present."""
    reasons = eager_reasons(module)
    if module.pretraining_tp > 1 and module.slow_but_exact:
        reasons.append("it computes the product of its dense layer in slices (slow_but_exact)")
    if module.beta != 1.0:
        reasons.append("its beta is not 1")
    dropout = module.attention_dropout
    if type(dropout) is not nn.Dropout or dropout._forward_hooks or dropout._forward_pre_hooks:
        reasons.append("its attention_dropout is hooked or no nn.Dropout")
    return reasons


def _is_bloom(kind: type[nn.Module]) -> Any:
    """transformers' own class, if this is it or a subclass of it."""
    return next((base for base in kind.__mro__ if f"{base.__module__}.{base.__qualname__}" == _NAME), None)


def bloom_body(original: type[nn.Module]) -> Body | None:
    base = _is_bloom(original)
    same = base is not None and all(
        getattr(original, name) is getattr(base, name) for name in ("forward", "_reshape", "_merge_heads")
    )
    return None if not same or _learn(base) else (FusedBloomAttention, {})


@functools.cache
def _learn(base: Any) -> str:
    """Why the class' forward does not compute what the fused one does; "" where it does."""
    try:
        with undisturbed(), backend("torch"):
            return _compare(base)
    except Exception as error:  # whatever another version of the class does
        return f"it could not be tried: {type(error).__name__}: {error}"


def _compare(base: Any) -> str:
    names = tuple(inspect.signature(base.forward).parameters)[1:]
    if names != _ARGUMENTS:
        return f"its forward takes {', '.join(names)}"
    from transformers import BloomConfig, DynamicCache

    config = BloomConfig(hidden_size=16, n_head=2, hidden_dropout=0.0, attention_dropout=0.0)
    torch.manual_seed(0)
    module = base(config, layer_idx=0).float()
    fused = type("Trial", (FusedBloomAttention, base), {})
    x, residual = torch.randn(2, 4, 16, dtype=torch.float32), torch.randn(2, 4, 16, dtype=torch.float32)
    alibi = torch.randn(4, 1, 7, dtype=torch.float32)
    seen = torch.rand(2, 1, 4, 7) > 0.4
    seen[..., 0] = True
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    past = torch.randn(2, 2, 3, 8, dtype=torch.float32)
    for given, cached in ((mask, True), (None, True), (mask[..., 3:], False)):
        results = []
        for kind in (base, fused):
            module.__class__ = kind
            cache = DynamicCache() if cached else None
            if cache is not None:
                cache.update(past, past, 0)
            leaves = [x.clone().requires_grad_(), residual.clone().requires_grad_()]
            of_keys = alibi if cached else alibi[..., 3:].clone()
            out = module(*leaves, alibi=of_keys, attention_mask=given, layer_past=cache)[0]
            parameters = [*leaves, *module.parameters()]
            grads = torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum(), parameters)
            results.append([out, *grads])
        if not all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(*results, strict=True)):
            return "its forward computes something else in this version of transformers"
    return ""


def find_bloom(module: nn.Module) -> Iterator[Finding]:
    kind = original_class(type(module))
    base = _is_bloom(kind)
    if base is None:
        return
    reasons = _reasons(module)
    if kind.forward is not base.forward:
        reasons.append(f"{full_name(kind)} has a forward of its own")
    elif why := _learn(base):
        reasons.append(why)
    if forward_is_replaced(module):
        reasons.append("its forward was replaced on the instance")
    calls = "fusedops.scaled_dot_product_attention (for 'eager')"
    yield Finding("", kind.__name__, calls, ((module, "bloom attention"),), tuple(reasons))
