"""Small models with random weights, and what the tests do with them."""

from __future__ import annotations

import copy

import torch
import transformers
from torch import nn

VOCABULARY = 40
_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
_SMALL_GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": VOCABULARY,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_DISTILBERT = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}


def bert(attn="sdpa", **options):
    config = transformers.BertConfig(**{**_SMALL, **options}, attn_implementation=attn)
    return transformers.BertForMaskedLM(config).eval()


def gpt2(attn="sdpa", **options):
    config = transformers.GPT2Config(**{**_SMALL_GPT2, **options}, attn_implementation=attn)
    return transformers.GPT2LMHeadModel(config).eval()


def _of(name, defaults=_SMALL, **fixed):
    def build(attn="sdpa"):
        config = getattr(transformers, f"{name}Config")(**defaults, **fixed, attn_implementation=attn)
        model = transformers.AutoModelForCausalLM if fixed else transformers.AutoModelForMaskedLM
        return model.from_config(config).eval()

    return build


_DECODER = {"is_decoder": True, "add_cross_attention": True}

FAMILIES = {
    "bert": bert,
    "bert-decoder": _of("Bert", **_DECODER),
    "roberta": _of("Roberta"),
    "roberta-decoder": _of("Roberta", **_DECODER),
    "xlm_roberta": _of("XLMRoberta"),
    "camembert": _of("Camembert"),
    "electra": _of("Electra"),
    "electra-decoder": _of("Electra", **_DECODER),
    "distilbert": _of("DistilBert", _DISTILBERT),
    "gpt2": gpt2,
    "gpt2-cross": lambda attn="sdpa": gpt2(attn, add_cross_attention=True),
}

PADDINGS = {
    "no mask": None,
    "no padding": torch.ones(2, 7, dtype=torch.long),
    "right": torch.tensor([[1] * 7, [1] * 4 + [0] * 3]),
    "left": torch.tensor([[0] * 3 + [1] * 4, [1] * 7]),
}


def inputs(model, padding="right"):
    """Token ids (2, 7) and a padding mask; encoder states (2, 5, 32) for a model with cross attention."""
    batch = {"input_ids": torch.randint(3, VOCABULARY, (2, 7))}
    if PADDINGS[padding] is not None:
        batch["attention_mask"] = PADDINGS[padding]
    if getattr(model.config, "add_cross_attention", False):
        batch["encoder_hidden_states"] = torch.randn(2, 5, 32)
        batch["encoder_attention_mask"] = torch.tensor([[1] * 5, [1] * 3 + [0] * 2])
    return batch


def logits_and_gradients(model, batch, seed=0):
    """Logits, and the gradient of every parameter of a loss over the positions that are not padding."""
    model.zero_grad()
    torch.manual_seed(seed)
    logits = model(**batch).logits
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits)
    if "attention_mask" in batch:
        weight = weight * batch["attention_mask"].unsqueeze(-1)
    (logits.sigmoid() * weight).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def attended(tensor, batch):
    """The rows of (batch, positions, ...) that are not padding. What stands at padding means nothing."""
    return tensor[batch["attention_mask"].bool()] if "attention_mask" in batch else tensor


def twin(model):
    return copy.deepcopy(model)


def classes(model):
    return {name: type(module) for name, module in model.named_modules()}


class MLP(nn.Module):
    """A user's own block: a chain with dropout, written as one expression."""

    def __init__(self, width=8, hidden=12, activation=nn.SiLU):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.act = activation()
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.drop(self.down(self.act(self.up(x))))


class LoRA(nn.Module):
    """What PEFT puts around a Linear: the base layer, and a product of low rank added to its output."""

    def __init__(self, base_layer, rank=2):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)

    def forward(self, x, *args, **kwargs):
        return self.base_layer(x, *args, **kwargs) + self.lora_B(self.lora_A(x))


def block(activation=nn.GELU, **options):
    return nn.Sequential(nn.Linear(8, 12, **options), activation(), nn.LayerNorm(12), nn.Linear(12, 8))
