"""Tiny models for the tests of attention: what each has that others have not."""

from __future__ import annotations

import torch
import transformers

from tests.patching.models import attended

VOCABULARY = 50
_BASE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_BASE, "num_key_value_heads": 2, "head_dim": 8}
_HYBRID = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}

# name: (config's name, its arguments)
DECODERS = {
    "llama": ("Llama", _GROUPED),
    "mistral": ("Mistral", {**_GROUPED, "sliding_window": 3}),
    "qwen3": ("Qwen3", _GROUPED),
    "phi3": ("Phi3", _GROUPED),
    "gpt_neox": ("GPTNeoX", _BASE),
    "opt": (
        "OPT",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "vocab_size": VOCABULARY,
            "word_embed_proj_dim": 32,
        },
    ),
    "gemma2": (
        "Gemma2",
        {**_GROUPED, **_HYBRID, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": ("Gemma3Text", {**_GROUPED, **_HYBRID, "query_pre_attn_scalar": 8}),
    "gpt_oss": (
        "GptOss",
        {
            **_GROUPED,
            **_HYBRID,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
# They refuse sdpa: their extras are beyond it.
EAGER_ONLY = ("gemma2", "gpt_oss")


def decoder(name, attn=None, **options):
    """A decoder with weights that make its attention far from even."""
    attn = attn or ("eager" if name in EAGER_ONLY else "sdpa")
    kind, defaults = DECODERS[name]
    config = getattr(transformers, f"{kind}Config")(**{**defaults, **options})
    return _livelier(transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn))


def _livelier(model):
    for parameter in model.parameters():
        centre = 1.0 if parameter.dim() == 1 else 0.0
        parameter.data = centre + 0.2 * torch.randn_like(parameter)
    return model.eval()


def bloom():
    config = transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=VOCABULARY)
    return _livelier(transformers.BloomForCausalLM(config))


def t5(attn="sdpa"):
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return _of(transformers.T5ForConditionalGeneration, config, attn)


def whisper(attn="sdpa"):
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=6,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return _of(transformers.WhisperForConditionalGeneration, config, attn)


_TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_TEXT = {**_TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 2, "pad_token_id": 0}


def _pair(name, attn):
    vision = {**_TOWER, "image_size": 8, "patch_size": 4}
    config = getattr(transformers, f"{name}Config")(text_config=_TEXT, vision_config=vision)
    return _of(getattr(transformers, f"{name}Model"), config, attn)


def clip(attn="sdpa"):
    return _pair("CLIP", attn)


def siglip(attn="sdpa"):
    return _pair("Siglip", attn)


def modernbert(attn="sdpa"):
    config = transformers.ModernBertConfig(
        **{**_BASE, "cls_token_id": 1, "sep_token_id": 2}, local_attention=4, global_attn_every_n_layers=2
    )
    return _of(transformers.ModernBertForMaskedLM, config, attn)


def _of(kind, config, attn):
    return _livelier(kind._from_config(config, attn_implementation=attn))


def _ids(*shape):
    return torch.randint(3, VOCABULARY, shape)


_PADDED = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])


def encoder_inputs(name):
    """What such a model takes: text with padding, and what else it needs."""
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 12), "decoder_input_ids": _ids(2, 5)}
    if name == "t5":
        mask = torch.tensor([[1] * 5, [1] * 3 + [0] * 2])
        return {
            "input_ids": _ids(2, 9),
            "attention_mask": _PADDED,
            "decoder_input_ids": _ids(2, 5),
            "decoder_attention_mask": mask,
        }
    batch = {"input_ids": _ids(2, 9), "attention_mask": _PADDED}
    return batch | ({"pixel_values": torch.randn(2, 3, 8, 8)} if name in ("clip", "siglip") else {})


ENCODERS = {"t5": t5, "whisper": whisper, "clip": clip, "siglip": siglip, "modernbert": modernbert}


def results(model, batch):
    """The model's output, at positions that are no padding, and the gradients of all parameters."""
    model.zero_grad()
    output = model(**batch)
    found = output.logits if "logits" in output else torch.cat([output.text_embeds, output.image_embeds])
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    if "logits" in output and mask is not None and mask.shape == found.shape[:2]:
        found = attended(found, {"attention_mask": mask})
    (found.sin() * torch.linspace(-1, 1, found.numel()).view(found.shape)).sum().backward()
    return found.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_same(plain, other, batch):
    """Both models have the same results and gradients, but for the rounding of float32."""
    (expected, gradients), (actual, found) = results(plain, batch), results(other, batch)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert found.keys() == gradients.keys()
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5 * float(largest), msg=name)
