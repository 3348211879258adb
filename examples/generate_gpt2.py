"""Generate text with GPT-2 on fusedops' operators and its key-value cache.

    python examples/generate_gpt2.py --model gpt2 --prompt "The Arctic is" --tokens 50
    python examples/generate_gpt2.py --model gpt2 --speculate 4 --cache int8

The model is Hugging Face's; ``fusedops.patch`` fuses its norms and MLPs, and :func:`step` below is its forward with
``fusedops.nn.KVCache`` in the place of attention. With ``--speculate`` a step proposes tokens that followed the last
two once before and keeps those the model agrees with (prompt lookup): the text stays that of greedy generation up to
rounding. ``--model`` takes a name (downloaded) or a folder; without it a small model with random weights runs, whose
text means nothing.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

import fusedops

CACHES = {
    "contiguous": {},
    "paged": {"page_size": 64},
    "int8": {"dtype": torch.int8},
    "fp8": {"dtype": torch.float8_e4m3fn},
}


def random_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=512, n_positions=256, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


def make_cache(model: GPT2LMHeadModel, batch: int, length: int, kind: str = "contiguous") -> fusedops.nn.KVCache:
    config = model.config
    heads, size = config.n_head, config.n_embd // config.n_head
    options = {"dtype": model.dtype, "device": model.device} | CACHES[kind]
    return fusedops.nn.KVCache(config.n_layer, batch, heads, length, size, **options)


def step(model: GPT2LMHeadModel, ids: torch.Tensor, cache: fusedops.nn.KVCache) -> torch.Tensor:
    """Logits (batch, tokens, vocabulary) of new tokens, ids (batch, tokens), after those in the cache."""
    body = model.transformer
    batch, tokens = ids.shape
    places = cache.seqlens[:, None] + torch.arange(tokens, device=ids.device)
    x = body.wte(ids) + body.wpe(places)
    for layer, block in enumerate(body.h):
        heads = block.attn.num_heads
        q, k, v = (
            part.view(batch, tokens, heads, -1).transpose(1, 2)
            for part in block.attn.c_attn(block.ln_1(x)).split(x.shape[-1], dim=-1)
        )
        attended = cache.attend(q, k, v, layer)
        x = x + block.attn.c_proj(attended.transpose(1, 2).reshape(batch, tokens, -1))
        x = x + block.mlp(block.ln_2(x))
    return model.lm_head(body.ln_f(x))


def proposal(ids: list[int], count: int) -> list[int]:
    """What followed the last two tokens where they last occurred before; at most ``count`` tokens."""
    for at in range(len(ids) - 3, -1, -1):
        if ids[at : at + 2] == ids[-2:]:
            return ids[at + 2 : at + 2 + count]
    return []


@torch.no_grad()
def generate(
    model: GPT2LMHeadModel, prompt: list[int], tokens: int, *, cache: str = "contiguous", speculate: int = 0
) -> tuple[list[int], int]:
    """(the prompt's ids and ``tokens`` greedy ones more, steps that it took)."""
    ids, end = list(prompt), len(prompt) + tokens
    kv_cache = make_cache(model, 1, end + speculate, cache)
    new, steps = ids, 0
    while len(ids) < end:
        # Proposed tokens are fed along with the last known one: each place's logits tell whether the next is right.
        proposed = proposal(ids, min(speculate, end - len(ids) - 1)) if steps else []
        logits = step(model, torch.tensor([new + proposed], device=model.device), kv_cache)
        best = logits[0, len(new) - 1 :].argmax(-1).tolist()
        accepted = 0
        while accepted < len(proposed) and proposed[accepted] == best[accepted]:
            accepted += 1
        kv_cache.advance(len(new) + accepted)  # a rejected token's keys are written over by the next step's
        ids += best[: accepted + 1]
        new, steps = ids[-1:], steps + 1
    return ids, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder of a GPT-2 model (default: random weights)")
    parser.add_argument("--prompt", default="The Arctic is")
    parser.add_argument("--tokens", type=int, default=40, help="tokens to generate")
    parser.add_argument("--cache", choices=CACHES, default="contiguous")
    parser.add_argument(
        "--speculate", type=int, default=0, metavar="N", help="propose up to N tokens a step (at most 15)"
    )
    options = parser.parse_args()
    if not 0 <= options.speculate <= 15:
        parser.error("--speculate takes 0 to 15")
    if options.model:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model, prompt = GPT2LMHeadModel.from_pretrained(options.model).eval(), tokenizer.encode(options.prompt)
    else:
        model, prompt = random_model(), list(options.prompt.encode())
    if torch.cuda.is_available():
        model = model.to("cuda", torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16)
    if len(prompt) + options.tokens + options.speculate > model.config.n_positions:
        parser.error(f"the model has {model.config.n_positions} places; prompt and tokens need more")
    print(fusedops.patch(model))
    started = time.perf_counter()
    ids, steps = generate(model, prompt, options.tokens, cache=options.cache, speculate=options.speculate)
    seconds = time.perf_counter() - started
    print(tokenizer.decode(ids) if options.model else ids[len(prompt) :])
    print(f"{options.tokens} tokens in {steps} steps, {options.tokens / seconds:.0f} tokens/s, the prompt included")


if __name__ == "__main__":
    main()
