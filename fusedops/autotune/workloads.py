"""The problems of models, from their sizes alone: nothing is built or run."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fusedops.autotune.operator import Operator, operator_named
from fusedops.runtime.device import DeviceFacts

Met = tuple[Operator, Any]

# What lists an operator's problems from the sizes of a call: ``module:function``.
_PROBLEMS = {
    "norm": "fusedops.norm.trials:problems_of",
    "group_norm": "fusedops.norm.trials:group_problems_of",
    "linear": "fusedops.linear.trials:problems_of",
    "gated_linear": "fusedops.linear.trials_gated:problems_of",
    "grouped_linear": "fusedops.linear.trials_grouped:problems_of",
    "quantized_linear": "fusedops.linear.trials_quantized:problems_of",
    "fp8_linear": "fusedops.linear.trials_quantized:fp8_problems_of",
    "attention": "fusedops.attention.trials:problems_of",
    "attention_decode": "fusedops.attention.trials_decode:problems_of",
}

# Tokens a sequence where nobody says, at most.
_LENGTH = 2048


def problems_of(op: str, facts: DeviceFacts, **sizes: Any) -> list[Met]:
    """The problems that a call of an operator's function, and its backward, meet on a device.

    Args:
        op: the operator's name: ``norm``, ``linear``, ``attention``, …
        facts: of the device.
        sizes: as of the operator's own list, such as ``rows=8192, width=4096, kind="rms"`` for ``norm``.

    Raises:
        ValueError: there is no such operator, or it takes no such sizes; the message lists what it takes.

    Examples:
        >>> from fusedops.runtime.device import TARGETS
        >>> [problem.direction for _, problem in problems_of("norm", TARGETS["sm_90"], rows=8192, width=4096)]
        ['forward', 'backward']
    """
    operator_named(op)
    if op not in _PROBLEMS:
        raise ValueError(f"{op} is an operator of yours: name its problems themselves")
    module, _, name = _PROBLEMS[op].partition(":")
    function: Callable[..., list[Met]] = getattr(importlib.import_module(module), name)
    taken = {key: value for key, value in inspect.signature(function).parameters.items() if key != "facts"}
    unknown = [str(key) for key in sizes if key not in taken]
    missing = [key for key, value in taken.items() if value.default is value.empty and key not in sizes]
    if unknown or missing:
        parts = [f"does not take {', '.join(unknown)}"] * bool(unknown) + [f"needs {', '.join(missing)}"] * bool(
            missing
        )
        raise ValueError(f"{op} {' and '.join(parts)}; it takes {', '.join(taken)}")
    for key, value in sizes.items():
        _check(f"{op}: {key}", value, taken[key].default)
    try:
        met = list(function(facts=facts, **sizes))
    except Exception as error:  # each trips over another part of what makes no sense, torch with many lines
        told = str(error).partition("\n")[0] if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{op}: {told.partition(chr(10))[0]}") from None
    for operator, problem in met:
        impossible = operator.impossible(problem, facts)
        if impossible is not None:
            raise ValueError(f"{op}: no call has such sizes: {impossible}")
    return met


def _check(name: str, value: object, default: object) -> None:
    """Flags and sizes, which most files' mistakes are in; a function checks its other arguments itself."""
    if isinstance(default, bool) and type(value) is not bool:
        raise ValueError(f"{name} must be yes or no; got {value!r}")
    if default is inspect.Parameter.empty and type(value) is not int:
        raise ValueError(f"{name} must be an integer; got {value!r}")
    if type(value) is int and value < 0:
        raise ValueError(f"{name} must not be negative; got {value}")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What decides a transformer's problems.

    Attributes:
        width: of the residual stream.
        heads, kv_heads, head: query heads, key heads, and their size.
        inner: width between the layers of the MLP.
        activation: of the MLP, by fusedops' name.
        gated: the MLP has a gate.
        norm: kind of its norms.
        bias: its linear layers have biases.
        causal, window: of its attention; None: no window.
        length: tokens a sequence.
        softcap: scores are capped.
        also_full: some layers have no window.
    """

    width: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    activation: str
    gated: bool
    norm: str
    bias: bool
    causal: bool
    window: int | None
    length: int
    softcap: bool = False
    also_full: bool = False

    def __str__(self) -> str:
        """What was understood, in a line."""
        parts = [f"width {self.width}", f"{self.heads} heads of {self.head}"]
        parts += [f"{self.kv_heads} key heads"] if self.kv_heads != self.heads else []
        parts += ["causal" if self.causal else "not causal"]
        parts += [f"window {self.window}"] if self.window is not None else []
        parts += ["full attention too"] if self.also_full else []
        parts += ["softcap"] if self.softcap else []
        parts += [f"{self.norm} norm", f"{'gated ' if self.gated else ''}{self.activation} MLP of {self.inner}"]
        return ", ".join(parts)


# Radford et al. 2019 (GPT-2 small), Devlin et al. 2019 (BERT base), Llama team 2024 (Llama 3 8B), Dosovitskiy et al.
# 2021 (ViT-L/16, 224 pixels: 196 patches and one token).
USUAL: dict[str, Sizes] = {
    "GPT-2": Sizes(768, 12, 12, 64, 3072, "gelu_tanh", False, "layer", True, True, None, 1024),
    "BERT": Sizes(768, 12, 12, 64, 3072, "gelu", False, "layer", True, False, None, 512),
    "Llama-3-8B": Sizes(4096, 32, 8, 128, 14336, "silu", True, "rms", False, True, None, 8192),
    "ViT-L": Sizes(1024, 16, 16, 64, 4096, "gelu", False, "layer", True, False, None, 197),
}


def usual(
    facts: DeviceFacts,
    dtype: str = "bfloat16",
    batch: int = 8,
    length: int | None = None,
    training: bool = True,
    names: tuple[str, ...] = tuple(USUAL),
) -> list[Met]:
    """The problems of the models in :data:`USUAL`; arguments as of :func:`of_sizes`."""
    return [met for name in names for met in of_sizes(USUAL[name], facts, dtype, batch, length, training)]


def of_sizes(
    sizes: Sizes,
    facts: DeviceFacts,
    dtype: str = "bfloat16",
    batch: int = 8,
    length: int | None = None,
    training: bool = True,
) -> list[Met]:
    """The problems that a patched transformer of these sizes meets: norms, MLP, attention.

    Args:
        sizes: of the model.
        facts: of the device.
        dtype: of activations and parameters.
        batch: sequences.
        length: tokens a sequence; None: the model's own, at most 2,048.
        training: with the backward.
    """
    length = length or min(sizes.length, _LENGTH)
    rows = batch * length
    shared: dict[str, Any] = {"facts": facts, "dtype": dtype, "training": training}
    width, inner = sizes.width, sizes.inner
    met = problems_of("norm", rows=rows, width=width, kind=sizes.norm, bias=sizes.norm == "layer", **shared)
    mlp = {"rows": rows, "bias": sizes.bias, **shared}
    if sizes.gated:
        met += problems_of("gated_linear", in_features=width, out_features=inner, activation=sizes.activation, **mlp)
    else:
        met += problems_of("linear", in_features=width, out_features=inner, activation=sizes.activation, **mlp)
    met += problems_of("linear", in_features=inner, out_features=width, **mlp)
    windows = [None if sizes.window is None else (sizes.window - 1, 0)]
    for window in dict.fromkeys([*windows, None] if sizes.also_full else windows):
        met += problems_of(
            "attention", batch=batch, heads=sizes.heads, kv_heads=sizes.kv_heads, seqlen_q=length, seqlen_k=length,
            d=sizes.head, causal=sizes.causal, window=window, softcap=sizes.softcap, **shared,
        )  # fmt: skip
    return met


# Hugging Face's names of activations -> ours.
_ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu", "silu": "silu", "swish": "silu",
    "relu2": "relu_squared",
}  # fmt: skip
_NAMES = {
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads"),
    "inner": ("intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "encoder_ffn_dim"),
    "activation": ("hidden_act", "activation_function", "hidden_activation", "activation"),
    "length": ("max_position_embeddings", "n_positions", "max_sequence_length"),
}
# A model is causal where its type is, or its architecture says so. Llama's descendants have RMS norms and gated MLPs.
_CAUSAL = ("CausalLM", "LMHeadModel", "DoubleHeadsModel")
_LLAMAS = (
    "llama", "mistral", "mixtral", "ministral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3",
    "gemma3_text", "phi3", "gpt_oss", "olmo2", "olmo3", "granite", "smollm3", "deepseek_v2", "deepseek_v3", "glm",
    "glm4",
)  # fmt: skip
_DECODERS = (
    *_LLAMAS, "gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "mpt", "phi", "starcoder2", "cohere",
)  # fmt: skip


def of_config(
    config: object,
    facts: DeviceFacts,
    dtype: str = "bfloat16",
    batch: int = 8,
    length: int | None = None,
    training: bool = True,
) -> list[Met]:
    """The problems of a Hugging Face model, from the contents of its ``config.json``; the rest as of :func:`of_sizes`.

    Raises:
        ValueError: it is no such config, or lacks a field; the message names it.
    """
    return of_sizes(sizes_of_config(config), facts, dtype, batch, length, training)


def sizes_of_config(config: object) -> Sizes:
    """A transformer's sizes, as ``config.json`` names them; errors as of :func:`of_config`."""
    if not isinstance(config, dict):
        raise ValueError(f"a model's config is a JSON object; got {type(config).__name__}")
    whole = config
    for part in ("text_config", "llm_config"):  # of a model of several parts: that which has most to do
        if isinstance(config.get(part), dict):
            config = {**{k: v for k, v in whole.items() if k == "architectures"}, **config[part]}
    width = _number(config, "width")
    heads = _number(config, "heads")
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or width // heads
    llama = config.get("model_type") in _LLAMAS
    activation = _first(config, "activation", default="silu" if llama else "gelu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ValueError(f"the config's activation {activation!r} is none of {', '.join(_ACTIVATIONS)}")
    rms = llama or "rms_norm_eps" in config
    architectures = config.get("architectures") or ()
    if not isinstance(architectures, list | tuple):
        raise ValueError(f"the config's architectures must be a list of names; got {architectures!r}")
    named = any(str(name).endswith(_CAUSAL) for name in architectures)
    causal = named or config.get("model_type") in _DECODERS or bool(config.get("is_decoder"))
    kinds = config.get("layer_types") or ()
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    return Sizes(
        width=width,
        heads=heads,
        kv_heads=_positive(kv_heads, "num_key_value_heads"),
        head=_positive(head, "head_dim"),
        inner=_positive(_first(config, "inner", default=None) or 4 * width, _NAMES["inner"][0]),
        activation=_ACTIVATIONS[activation],
        gated=rms,
        norm="rms" if rms else "layer",
        bias=bool(config.get("mlp_bias", not rms)),
        causal=causal,
        window=None if window is None else _positive(window, "sliding_window"),
        length=_image_length(config) or _positive(_first(config, "length", default=_LENGTH), _NAMES["length"][0]),
        softcap=bool(config.get("attn_logit_softcapping")),
        also_full=window is not None and isinstance(kinds, list) and "full_attention" in kinds,
    )


def _first(config: Mapping[str, Any], field: str, default: Any) -> Any:
    for name in _NAMES[field]:
        if config.get(name) is not None:
            return config[name]
    return default


def _number(config: Mapping[str, Any], field: str) -> int:
    value = _first(config, field, None)
    if value is None:
        raise ValueError(f"the config has none of {', '.join(_NAMES[field])}")
    return _positive(value, _NAMES[field][0])


def _positive(value: object, name: str) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"the config's {name} must be a positive integer; got {value!r}")
    return value


def _image_length(config: Mapping[str, Any]) -> int | None:
    """Patches of an image, and one token."""
    size, patch = config.get("image_size"), config.get("patch_size")
    if type(size) is int and type(patch) is int and 0 < patch <= size:
        return (size // patch) ** 2 + 1
    return None


def of_shapes(value: object, facts: DeviceFacts) -> list[Met]:
    """The problems of a list of calls, as a ``--shapes`` file has them: ``[{op: norm, rows: 8192, width: 4096}, …]``.

    Raises:
        ValueError: it is no such list; the message says which item, and what is taken.
    """
    return list(_of_shapes(value, facts))


def _of_shapes(value: object, facts: DeviceFacts) -> Iterator[Met]:
    if not isinstance(value, list):
        raise ValueError(f"the shapes are a list of calls, each with op and sizes; got {type(value).__name__}")
    for number, item in enumerate(value, 1):
        if not isinstance(item, dict) or not isinstance(item.get("op"), str):
            raise ValueError(f"shape {number} must be a mapping with op and sizes; got {item!r}")
        sizes = {key: tuple(part) if isinstance(part, list) else part for key, part in item.items() if key != "op"}
        try:
            yield from problems_of(item["op"], facts, **sizes)
        except (ValueError, TypeError) as error:  # a key that is no string is a TypeError
            raise ValueError(f"shape {number}: {error}") from None
