"""Attention of Hugging Face models, through transformers' own registry of attention functions.

Such an attention module asks its config for the name of an attention function and calls what the registry holds under
it. A fused attention module sees its config through :class:`FusedConfig`, which names ours; the config itself, which
the model's masks, its saving and other models read, is never changed.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any, ClassVar

import torch
from torch import nn

from fusedops.attention.functional import scaled_dot_product_attention
from fusedops.patching.classes import Body, Fused

# Our attention functions in transformers' registries, by the implementation that each stands for.
REGISTERED = {"sdpa": "fusedops", "eager": "fusedops_eager"}

# Attention modules whose results were compared with the original's. Their forward may read the config's name of the
# attention function and nothing else from the config.
_KNOWN = {
    "bert": ("BertSelfAttention", "BertCrossAttention"),
    "camembert": ("CamembertSelfAttention", "CamembertCrossAttention"),
    "distilbert": ("DistilBertSelfAttention",),
    "electra": ("ElectraSelfAttention", "ElectraCrossAttention"),
    "gpt2": ("GPT2Attention",),
    "roberta": ("RobertaSelfAttention", "RobertaCrossAttention"),
    "xlm_roberta": ("XLMRobertaSelfAttention", "XLMRobertaCrossAttention"),
}
_CLASSES = frozenset(
    f"transformers.models.{model}.modeling_{model}.{name}" for model, names in _KNOWN.items() for name in names
)


class FusedConfig:
    """A config as a fused attention module sees it: the config itself, but for the name of the attention function."""

    def __init__(self, config: Any, implementation: str) -> None:
        self.__dict__.update(_config=config, _attn_implementation=implementation)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_config":
            raise AttributeError(name)
        return getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)

    def __eq__(self, other: object) -> bool:
        return bool(self._config == (other._config if isinstance(other, FusedConfig) else other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._config)

    def __reduce__(self) -> Any:
        # A copy or pickle outside its module is the config.
        return _itself, (self._config,)


def _itself(config: Any) -> Any:
    return config


class FusedAttention(Fused):
    """It sees its config through FusedConfig."""

    fused_eager: ClassVar[bool]

    @property
    def config(self: Any) -> Any:
        config = self.__dict__["config"]
        implementation = config._attn_implementation
        if implementation == "sdpa":
            return FusedConfig(config, "fusedops")
        if (
            implementation == "eager"
            and self.fused_eager
            and not eager_reasons(self)
            and "forward" not in self.__dict__
        ):
            return FusedConfig(config, "fusedops_eager")
        return config

    @config.setter
    def config(self: Any, value: Any) -> None:
        self.__dict__["config"] = value


def eager_reasons(module: nn.Module) -> list[str]:
    """What keeps an eager attention module from being fused, at present."""
    reasons = []
    # Eager attention returns its weights, which the fused operator never has. Whoever wants them (transformers'
    # output_attentions too) reads them with a hook, or around a forward set on the instance.
    if module._forward_hooks:
        reasons.append("it has forward hooks, which may read its attention weights")
    if module.__dict__.get("reorder_and_upcast_attn"):
        reasons.append("its eager attention computes the scores in float32 (reorder_and_upcast_attn)")
    return reasons


def weights_are_hooked(kind: type[nn.Module]) -> bool:
    """Whether transformers records the attention weights of a class by hooks, when they are asked for."""
    names = {base.__name__ for base in kind.__mro__}
    recorded = set()
    for base in kind.__mro__:
        for model in vars(sys.modules.get(base.__module__, object)).values():
            specs = getattr(model, "_can_record_outputs", None) if isinstance(model, type) else None
            for spec in specs.values() if isinstance(specs, dict) else ():
                for one in spec if isinstance(spec, list) else [spec]:
                    target = getattr(one, "target_class", one)
                    recorded.add(getattr(target, "__name__", target))
    return bool(names & recorded)


def attention_body(original: type[nn.Module]) -> Body | None:
    if not (is_known(original) and reads_registry(original)):
        return None
    return FusedAttention, {"fused_eager": weights_are_hooked(original)}


def is_known(kind: type[nn.Module]) -> bool:
    """One of transformers' attention classes that were tried, or a subclass with the same forward."""
    return any(
        f"{base.__module__}.{base.__qualname__}" in _CLASSES and kind.forward is base.forward
        for base in kind.__mro__
        if issubclass(base, nn.Module)
    )


def reads_registry(kind: type[nn.Module]) -> bool:
    """Whether a class' forward looks its attention function up in transformers' registry."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and {"ALL_ATTENTION_FUNCTIONS", "_attn_implementation"} <= set(code.co_names)


@functools.cache
def register() -> None:
    """Add our attention functions, and their masks, to transformers' registries. Nothing there is replaced."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    AttentionInterface.register(REGISTERED["sdpa"], attend)
    AttentionInterface.register(REGISTERED["eager"], attend_eager)
    AttentionMaskInterface.register(REGISTERED["sdpa"], sdpa_mask)
    AttentionMaskInterface.register(REGISTERED["eager"], eager_mask)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """In place of transformers' ``sdpa``, with its rules.

    Args:
        module: the attention module; ``is_causal`` and ``num_key_value_groups`` are read from it.
        query: (batch, heads, queries, head size).
        key, value: (batch, key heads, keys, head size).
        attention_mask: broadcastable to (batch, heads, queries, keys), True = attend or added to the scores. None:
            causal (query i sees keys up to i) if ``is_causal`` and there is more than one query.

    Returns:
        (batch, queries, heads, head size), contiguous, and None: the weights are never computed.
    """
    if kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **kwargs
        )
    causal = False
    queries = query.shape[2]
    if attention_mask is None and queries > 1:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # Keys past the queries: the room of a static cache, which no query may see.
        if causal and key.shape[2] > queries:
            key, value = key[:, :, :queries], value[:, :, :queries]
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
        # Not getattr: on a module that lacks the name it costs as much as all the rest here.
        enable_gqa=module.__dict__.get("num_key_value_groups", 1) > 1,
    )
    return output.transpose(1, 2).contiguous(), None


def attend_eager(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """In place of a model's eager attention, which knows no causality but its mask's."""
    kwargs["is_causal"] = False
    return attend(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


def transformers_loaded() -> bool:
    return "transformers" in sys.modules
