"""Draws docs/images/memory.png: what models keep for the backward, unpatched and patched.

    python scripts/readme_picture.py [--output FILE.png]

Two layers of each model at a width of 1,024, random weights, bfloat16, 2 x 512 tokens, by fusedops.memory_report: on a
CPU it counts what a GPU keeps. Needs transformers and matplotlib. Prints the numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import fusedops

ROOT = Path(__file__).resolve().parents[1]
WIDTH, HIDDEN, HEADS, VOCABULARY = 1024, 3584, 8, 2048


def models() -> dict[str, Callable[[], torch.nn.Module]]:
    """Models by name, smallest numbers first where the picture has them."""
    import transformers as hf

    sizes = {
        "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS,
        "vocab_size": VOCABULARY,
    }  # fmt: skip
    grouped = {**sizes, "num_key_value_heads": 2}
    gemma = {**grouped, "head_dim": WIDTH // HEADS, "attn_implementation": "eager"}
    t5 = {
        "d_model": WIDTH, "d_ff": HIDDEN, "d_kv": WIDTH // HEADS, "num_heads": HEADS, "num_layers": 2,
        "vocab_size": VOCABULARY, "feed_forward_proj": "gated-gelu",
    }  # fmt: skip
    return {
        "BERT": lambda: hf.BertModel(hf.BertConfig(**sizes)),
        "ViT": lambda: hf.ViTModel(hf.ViTConfig(**{k: v for k, v in sizes.items() if k != "vocab_size"})),
        "Qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**grouped, head_dim=WIDTH // HEADS)),
        "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**grouped)),
        "T5 encoder": lambda: hf.T5EncoderModel(hf.T5Config(**t5, dropout_rate=0.0)),
        "Gemma 2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**gemma)),
    }


def measured(make: Callable[[], torch.nn.Module]) -> tuple[float, float]:
    """MiB kept, unpatched and patched."""
    torch.manual_seed(0)
    model = make().to(torch.bfloat16).train()
    if model.config.model_type == "vit":
        inputs = {"pixel_values": torch.randn(5, 3, 224, 224, dtype=torch.bfloat16)}  # 5 x 197 tokens
    else:
        inputs = {"input_ids": torch.randint(0, VOCABULARY, (2, 512))}
    report = fusedops.memory_report(model, inputs)
    return report.unpatched / 2**20, (report.patched or 0) / 2**20


def draw(sizes: dict[str, tuple[float, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7.2, 2.9), dpi=130)
    for row, (name, (before, after)) in enumerate(sizes.items()):
        ax.barh(row - 0.2, before, 0.38, color="#BBBBBB", label="unpatched" if row == 0 else None)
        ax.barh(row + 0.2, after, 0.38, color="#0072B2", label="fusedops.patch(model)" if row == 0 else None)
        change = f"−{1 - after / before:.0%}" if after < 0.995 * before else "the same"
        ax.text(max(before, after) + 4, row, f"{name}: {change}", va="center", fontsize=9)
    ax.set(yticks=[], xlabel="kept for the backward, MiB (2 layers of width 1,024, about 1,000 tokens, bfloat16)")
    ax.set_xlim(0, 1.25 * max(before for before, _ in sizes.values()))
    ax.invert_yaxis()
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.legend(frameon=False, loc="upper right")
    fig.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, metadata={"Software": None})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "memory.png")
    path = parser.parse_args(arguments).output
    sizes = {}
    for name, make in models().items():
        sizes[name] = measured(make)
        print(f"{name:11} {sizes[name][0]:6.1f} MiB unpatched, {sizes[name][1]:6.1f} MiB patched", flush=True)
    draw(sizes, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
