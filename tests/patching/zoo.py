"""The zoo: a tiny model of every family that patching is for, what goes in, and what is to be fused in it.

Every model has random weights, from a fixed seed, and nothing is downloaded. All vectors (norms, biases, sinks, scales)
are random too: a norm whose weight is all ones would hide that nobody reads it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import math
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode

import fusedops
from fusedops.patching import CheckResult
from tests.patching.vision import load_timm, load_torchvision

VOCABULARY = 64
WIDTH = 32
LENGTH = 9
Batch = dict[str, Any]


@dataclass(frozen=True)
class Animal:
    """A model of the zoo.

    Attributes:
        title: its name in the documentation.
        make: the model, with the weights of its library's initialisation.
        batch: fresh inputs, keyword arguments of the model; floating-point ones in float32.
        fused: how many parts are to call each fusedops function, as :func:`functions` names them.
        calls: how often a forward calls them, where that is another number.
        left: what is recognised and left alone: a pattern of the reason, and how often.
        package: where the model comes from.
        generates: whether the model generates tokens.
        static_cache: whether it generates with a static cache too.
    """

    title: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    fused: Mapping[str, int]
    calls: Mapping[str, int] | None = None
    left: Mapping[str, int] = field(default_factory=dict)
    package: str = "transformers"
    generates: bool = False
    static_cache: bool = True


# ---- inputs ---------------------------------------------------------------------------------------------------------


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, length))


def padding(side: str, length: int = LENGTH, short: int = 5) -> torch.Tensor:
    """(2, length): the second row has ``short`` tokens, the rest is padding on that side."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, slice(short, None) if side == "right" else slice(0, length - short)] = 0
    return mask


def _encoder() -> Batch:
    return {"input_ids": tokens(), "attention_mask": padding("right")}


def _decoder() -> Batch:
    return {"input_ids": tokens(), "attention_mask": padding("left"), "use_cache": False}


def _encoder_and_decoder() -> Batch:
    return {**_encoder(), "decoder_input_ids": tokens(6), "use_cache": False}


def _speech() -> Batch:
    return {"input_features": torch.randn(2, 16, 24), "decoder_input_ids": tokens(6), "use_cache": False}


def _image() -> Batch:
    return {"pixel_values": torch.randn(2, 3, 16, 16)}


def _image_alone() -> Batch:
    """For models whose argument has the shortest name."""
    return {"x": torch.randn(2, 3, 16, 16)}


def _image_and_text() -> Batch:
    ids = tokens()
    ids[:, -1] = VOCABULARY - 1  # CLIP reads its text embedding at the end token
    return {**_image(), "input_ids": ids, "attention_mask": torch.ones(2, LENGTH, dtype=torch.long)}


# ---- Hugging Face transformers --------------------------------------------------------------------------------------

_SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_HEADS = {**_GROUPED, "head_dim": 8}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Of all experts each token asks all: otherwise a rounding would decide whom.
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_GPT2 = {
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 48,
    "n_positions": 64,
    "vocab_size": VOCABULARY,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_OPT = {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": WIDTH, "dropout": 0.0}
_BLOOM = {
    "hidden_size": WIDTH,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_DISTILBERT = {
    "dim": WIDTH,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
_T5 = {
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": VOCABULARY,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "eos_token_id": None,
    "decoder_start_token_id": 0,
}
_WHISPER = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 16,
    "max_source_positions": 12,
    "max_target_positions": 32,
    "vocab_size": VOCABULARY,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "decoder_start_token_id": 1,
}
_MODERNBERT = {
    **_SIZES,
    "local_attention": 4,
    "global_attn_every_n_layers": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "eos_token_id": 2,
}
_PICTURE = {"image_size": 16, "patch_size": 4}
_TOWER = {key: _SIZES[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
_TEXT = {
    **_TOWER,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
    "projection_size": WIDTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": VOCABULARY - 1,
}


def _of(kind: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return getattr(transformers, kind)(getattr(transformers, f"{config}Config")(**options))

    return make


def _causal(name: str, **options: Any) -> Callable[[], nn.Module]:
    return _of(f"{name}ForCausalLM", name, **options)


def _masked(name: str, **options: Any) -> Callable[[], nn.Module]:
    return _of(f"{name}ForMaskedLM", name, **options)


def _two_towers(name: str) -> Callable[[], nn.Module]:
    towers = {"text_config": _TEXT, "vision_config": {**_TOWER, **_PICTURE}}
    return _of(f"{name}Model", name, **towers, **({"projection_dim": WIDTH} if name == "CLIP" else {}))


# ---- timm, torchvision, torch ---------------------------------------------------------------------------------------


def _timm(module: str, kind: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return getattr(importlib.import_module(f"{load_timm().__name__}.models.{module}"), kind)(
            num_classes=10, **options
        )

    return make


def _swin() -> nn.Module:
    """With timm's setting for the attention that it calls experimental, which is read when a model is made."""
    layers = load_timm().layers
    before = layers.use_fused_attn(), layers.use_fused_attn(experimental=True)
    sizes = {"img_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (2, 1), "num_heads": (2, 4)}
    sizes["drop_path_rate"] = 0.0
    layers.set_fused_attn(True, experimental=True)
    try:
        return _timm("swin_transformer", "SwinTransformer", **sizes)()
    finally:
        layers.set_fused_attn(*before)


def _vit_of_torchvision() -> nn.Module:
    vit = load_torchvision().models.VisionTransformer
    return vit(16, 4, num_layers=2, num_heads=4, hidden_dim=WIDTH, mlp_dim=48, num_classes=10)


def _encoder_of_torch() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH))


def _decoder_of_torch() -> nn.Module:
    layer = nn.TransformerDecoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerDecoder(layer, 2, nn.LayerNorm(WIDTH))


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 48),
        nn.GELU(),
        nn.LayerNorm(48),
        nn.Linear(48, 48),
        nn.ReLU(),
        nn.Dropout(0.0),
        nn.Linear(48, WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, 10),
    )


def _states(length: int) -> torch.Tensor:
    return torch.randn(2, length, WIDTH)


def _ignored(length: int) -> torch.Tensor:
    """True at padding, as torch.nn has it."""
    return padding("right", length) == 0


def _queries_and_keys() -> Batch:
    keys = _states(LENGTH)
    masks = {"key_padding_mask": _ignored(LENGTH), "need_weights": False}
    return {"query": _states(6), "key": keys, "value": keys, **masks}


def _source() -> Batch:
    return {"src": _states(LENGTH), "src_key_padding_mask": _ignored(LENGTH)}


def _target() -> Batch:
    return {"tgt": _states(6), "tgt_mask": torch.ones(6, 6).triu(1).bool(), "tgt_is_causal": True}


def _target_and_memory() -> Batch:
    return {**_target(), "memory": _states(LENGTH), "memory_key_padding_mask": _ignored(LENGTH)}


def _source_and_target() -> Batch:
    return {"src": _states(LENGTH), **_target()}


# ---- the table ------------------------------------------------------------------------------------------------------

_LAYER_NORMS = {"layer_norm": 5, "linear": 2, "attention": 2}
_RMS_NORMS = {"rms_norm": 5, "gated_linear": 2, "attention": 2}
_WITHOUT_MLP = {"rms_norm": 5, "attention": 2}
_EXPERTS_ARE_LEFT = {"no gated product of grouped experts": 2}
_MASKED = {"layer_norm": 6, "linear": 3, "attention": 2}


def _decoding(title: str, make: Callable[[], nn.Module], fused: Mapping[str, int], **more: Any) -> Animal:
    return Animal(title, make, _decoder, fused, generates=True, **more)


ZOO: dict[str, Animal] = {
    "gpt2": _decoding("GPT-2", _of("GPT2LMHeadModel", "GPT2", **_GPT2), _LAYER_NORMS),
    "gpt-neox": _decoding("GPT-NeoX", _causal("GPTNeoX", **_SIZES), _LAYER_NORMS),
    "opt": _decoding("OPT", _causal("OPT", **_OPT), _LAYER_NORMS),
    "bloom": _decoding(
        "BLOOM (ALiBi)", _causal("Bloom", **_BLOOM, tie_word_embeddings=False), {**_LAYER_NORMS, "layer_norm": 6}
    ),
    "llama": _decoding("Llama", _causal("Llama", **_GROUPED), _RMS_NORMS),
    "mistral": _decoding("Mistral (sliding window)", _causal("Mistral", **_GROUPED, sliding_window=4), _RMS_NORMS),
    "mixtral": _decoding(
        "Mixtral (experts)", _causal("Mixtral", **_GROUPED, **_EXPERTS), _WITHOUT_MLP, left=_EXPERTS_ARE_LEFT
    ),
    "qwen2": _decoding("Qwen2", _causal("Qwen2", **_GROUPED), _RMS_NORMS),
    "qwen3": _decoding("Qwen3 (QK norm)", _causal("Qwen3", **_HEADS), {**_RMS_NORMS, "rms_norm": 9}),
    "gemma": _decoding("Gemma", _causal("Gemma", **_HEADS), _RMS_NORMS),
    "gemma2": _decoding(
        "Gemma 2 (softcap, sliding window)",
        _causal("Gemma2", **_HEADS, **_WINDOWS, query_pre_attn_scalar=8, attn_logit_softcapping=2.0),
        {**_RMS_NORMS, "rms_norm": 9},
    ),
    "gemma3": _decoding(
        "Gemma 3 (QK norm, sliding window)",
        _of("Gemma3ForCausalLM", "Gemma3Text", **_HEADS, **_WINDOWS, query_pre_attn_scalar=8),
        {**_RMS_NORMS, "rms_norm": 13},
    ),
    "phi3": _decoding("Phi-3", _causal("Phi3", **_GROUPED), _RMS_NORMS),
    "gpt-oss": _decoding(
        "GPT-OSS (attention sinks, experts)",
        _causal("GptOss", **_HEADS, **_WINDOWS, **_EXPERTS, rope_parameters=_ROTARY),
        _WITHOUT_MLP,
        left=_EXPERTS_ARE_LEFT,
    ),
    "bert": Animal("BERT", _masked("Bert", **_SIZES, **_NO_DROPOUT), _encoder, _MASKED),
    "roberta": Animal("RoBERTa", _masked("Roberta", **_SIZES, **_NO_DROPOUT), _encoder, _MASKED),
    "distilbert": Animal("DistilBERT", _masked("DistilBert", **_DISTILBERT), _encoder, _MASKED),
    "electra": Animal("ELECTRA", _masked("Electra", **_SIZES, **_NO_DROPOUT, embedding_size=16), _encoder, _MASKED),
    "modernbert": Animal(
        "ModernBERT",
        _masked("ModernBert", **_MODERNBERT),
        _encoder,
        {"layer_norm": 6, "gated_linear": 2, "linear": 1, "attention": 2},
    ),
    "t5": Animal(
        "T5 (relative bias)",
        _of("T5ForConditionalGeneration", "T5", **_T5),
        _encoder_and_decoder,
        {"rms_norm": 12, "linear": 4, "attention": 6},
        generates=True,
    ),
    "t5-gated": Animal(
        "T5 v1.1 (gated)",
        _of("T5ForConditionalGeneration", "T5", **_T5, feed_forward_proj="gated-gelu"),
        _encoder_and_decoder,
        {"rms_norm": 12, "gated_linear": 4, "attention": 6},
        generates=True,
    ),
    "whisper": Animal(
        "Whisper",
        _of("WhisperForConditionalGeneration", "Whisper", **_WHISPER),
        _speech,
        {"layer_norm": 12, "linear": 4, "attention": 6},
        generates=True,
    ),
    "vit": Animal(
        "ViT", _of("ViTForImageClassification", "ViT", **_TOWER, **_PICTURE, **_NO_DROPOUT), _image, _LAYER_NORMS
    ),
    "clip": Animal(
        "CLIP (both towers)",
        _two_towers("CLIP"),
        _image_and_text,
        {"layer_norm": 11, "linear": 4, "attention": 4},
    ),
    "siglip": Animal(
        "SigLIP (both towers)",
        _two_towers("Siglip"),
        _image_and_text,
        {"layer_norm": 11, "linear": 5, "attention": 5},
        # Its head asks nn.MultiheadAttention for the attention weights.
        calls={"layer_norm": 11, "linear": 5, "attention": 4},
    ),
    "timm-vit": Animal(
        "ViT",
        _timm(
            "vision_transformer", "VisionTransformer", img_size=16, patch_size=4, embed_dim=WIDTH, depth=2, num_heads=4
        ),
        _image_alone,
        _LAYER_NORMS,
        package="timm",
    ),
    "timm-swin": Animal(
        "Swin (fused attention switched on)",
        _swin,
        _image_alone,
        {"layer_norm": 9, "linear": 3, "attention": 3},
        package="timm",
    ),
    "timm-convnext": Animal(
        "ConvNeXt (layer norm over channels)",
        _timm("convnext", "ConvNeXt", depths=(1, 1, 1, 1), dims=(8, 16, 16, WIDTH)),
        lambda: {"x": torch.randn(2, 3, 32, 32)},
        {"layer_norm": 9, "linear": 4},
        package="timm",
    ),
    "timm-eva": Animal(
        "EVA-02 (rotary, SwiGLU)",
        _timm(
            "eva",
            "Eva",
            img_size=16,
            patch_size=4,
            embed_dim=WIDTH,
            depth=2,
            num_heads=4,
            qkv_fused=False,
            swiglu_mlp=True,
            scale_mlp=True,
            use_rot_pos_emb=True,
        ),
        _image_alone,
        {"layer_norm": 7, "gated_linear": 2, "attention": 2},
        package="timm",
    ),
    "multihead-attention": Animal(
        "nn.MultiheadAttention",
        lambda: nn.MultiheadAttention(WIDTH, 4, batch_first=True),
        _queries_and_keys,
        {"attention": 1},
        package="torch",
    ),
    "transformer-encoder": Animal(
        "nn.TransformerEncoder",
        _encoder_of_torch,
        _source,
        _LAYER_NORMS,
        # A layer adds and norms in one call.
        calls={**_LAYER_NORMS, "layer_norm": 1, "add_layer_norm": 4},
        package="torch",
    ),
    "transformer-decoder": Animal(
        "nn.TransformerDecoder",
        _decoder_of_torch,
        _target_and_memory,
        {"layer_norm": 7, "linear": 2, "attention": 4},
        package="torch",
    ),
    "transformer": Animal(
        "nn.Transformer",
        lambda: nn.Transformer(WIDTH, 4, 2, 2, 48, dropout=0.0, batch_first=True),
        _source_and_target,
        {"layer_norm": 12, "linear": 4, "attention": 6},
        calls={"layer_norm": 8, "add_layer_norm": 4, "linear": 4, "attention": 6},
        package="torch",
    ),
    "sequential": Animal(
        "nn.Sequential MLP", _mlp, lambda: {"input": _states(LENGTH)}, {"layer_norm": 1, "linear": 3}, package="torch"
    ),
    "torchvision-vit": Animal(
        "VisionTransformer", _vit_of_torchvision, _image_alone, _LAYER_NORMS, package="torchvision"
    ),
}


# ---- what is done with them -----------------------------------------------------------------------------------------


@functools.cache
def _original(name: str) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(zlib.crc32(name.encode()))
        model = ZOO[name].make().eval()
        _randomize(model)
    return model


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of the zoo, in evaluation mode; the same weights every time."""
    return copy.deepcopy(_original(name)).to(dtype)


def _randomize(model: nn.Module) -> None:
    """Weights large enough for attention that is not uniform, and vectors that are neither zeros nor ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            elif parameter.ndim > 1:
                inputs = parameter.shape[-1] if parameter.ndim == 3 else parameter[0].numel()
                parameter.normal_(0, 1.5 / math.sqrt(inputs))
        # Small, so that a model whose output layer is its embedding does not just repeat what it is given.
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.weight.normal_(0, 0.1)


def batch_of(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Batch:
    """Inputs of a model, with padding where it takes any."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        batch = ZOO[name].batch()
    return moved(batch, dtype)


def moved(batch: Batch, to: torch.dtype | torch.device) -> Batch:
    """A batch on another device, or its floating-point tensors in another dtype."""
    return {
        key: value.to(to)
        if isinstance(value, torch.Tensor) and (isinstance(to, torch.device) or value.is_floating_point())
        else value
        for key, value in batch.items()
    }


def without_padding(batch: Batch) -> Batch:
    return {key: value for key, value in batch.items() if "attention_mask" not in key and "padding" not in key}


_RESULTS = ("logits", "logits_per_image", "image_embeds", "text_embeds", "last_hidden_state")


def results(model: nn.Module, batch: Batch) -> torch.Tensor:
    """What a model is asked for, as one matrix: a row a position that is not padding."""
    output = model(**batch)
    if isinstance(output, Mapping):
        found = [output[key] for key in _RESULTS if key in output]
    else:
        found = [output[0] if isinstance(output, tuple) else output]
    mask = batch.get("attention_mask")
    if mask is None and "src_key_padding_mask" in batch:
        mask = ~batch["src_key_padding_mask"]
    rows = []
    for tensor in found:
        if mask is not None and tensor.shape[:2] == mask.shape:
            tensor = tensor[mask.bool()]
        rows.append(tensor.reshape(-1))
    return torch.cat(rows)


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean squared distance from numbers that are always the same."""
    found = results(model, batch)
    wanted = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    return (found - wanted.to(found)).square().mean()


def gradients_of(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss_of(model, batch).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


class Float64(TorchFunctionMode):
    """Models convert to float32 here and there, for accuracy; in this mode they convert to float64 there.

    With it, a model in float64 computes everything in float64: the exact result, for our purposes.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def exact(model: nn.Module) -> nn.Module:
    """The same model in float64, to be run inside ``Float64()``."""
    model = copy.deepcopy(model).double()
    if getattr(model, "config", None) is not None and getattr(model.config, "_experts_implementation", None):
        model.set_experts_implementation("eager")  # torch's grouped product takes no float64
    return model


_ATTENTION = ("attention", "attention_varlen", "scaled_dot_product_attention")


def functions(report: fusedops.PatchReport) -> Counter[str]:
    """How many replacements call each fusedops function; all of the attention family as "attention"."""
    names = [re.match(r"fusedops\.(\w+)", entry.calls)[1] for entry in (*report.replaced, *report.already)]
    return Counter("attention" if name in _ATTENTION else name for name in names)


def described(report: fusedops.PatchReport) -> tuple[str, str]:
    """What is fused and what is left alone and why, as docs/models.md has them."""
    calls = Counter[str]()
    for entry in report.replaced:
        found = re.findall(r'fusedops\.(\w+)(?:\(activation="(\w+)"\))?', entry.calls)
        calls[" and ".join(f"`{name}`" + (f" ({what})" if what else "") for name, what in found)] += 1
    reasons = Counter(f"`{entry.original}`: {entry.reason}" for entry in report.left)
    return tuple(", ".join(f"{n} × {text}" for text, n in sorted(found.items())) for found in (calls, reasons))


def measured(name: str, dtype: torch.dtype) -> CheckResult:
    """How far a patched model's outputs are from the plain model's, and the noise floor."""
    batch = without_padding(batch_of(name, dtype))
    return fusedops.patch(build(name, dtype), check=((), batch)).check


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of fusedops' functions that patched modules make in this thread, however they hold them."""
    counter: Counter[str] = Counter()
    names = {
        inspect.unwrap(getattr(fusedops, name)).__code__: "attention" if name in _ATTENTION else name
        for name in ("layer_norm", "rms_norm", "add_layer_norm", "linear", "gated_linear", *_ATTENTION)
    }

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in names and frame.f_back is not None:
            caller = frame.f_back.f_globals.get("__name__", "")
            # Not those of another function of fusedops, nor of linear as torch has it (nn.MultiheadAttention's).
            plain = names[frame.f_code] == "linear" and frame.f_locals["activation"] is None
            if caller.startswith(("fusedops.patching.", "fusedops.nn.")) and not plain:
                counter[names[frame.f_code]] += 1

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield counter
    finally:
        sys.setprofile(before)
