"""Train a small language model with Hugging Face Accelerate, on fusedops' operators.

    accelerate launch examples/accelerate_training.py --steps 200

One line differs from a script without fusedops: ``fusedops.patch(model)``, before ``accelerator.prepare``, which then
moves the model, wraps it (DDP, FSDP) and sets up mixed precision as ever. Without a GPU it runs as well, on torch's
operators. In the data the second half of a sequence repeats the first, so that the loss falls below that of
guessing only if attention works.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import fusedops

VOCABULARY = 64


def build_model(width: int = 128, layers: int = 4) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=128,
        n_embd=width,
        n_layer=layers,
        n_head=width // 32,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def build_data(sequences: int, length: int, seed: int = 0) -> TensorDataset:
    """Sequences whose second half repeats the first."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(1, VOCABULARY, (sequences, length // 2), generator=generator)
    return TensorDataset(torch.cat([half, half], dim=1))


def train(
    steps: int, *, width: int = 128, layers: int = 4, batch: int = 16, length: int = 64, patch: bool = True
) -> list[float]:
    """Loss of every step."""
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = build_model(width, layers)
    if patch:
        report = fusedops.patch(model)
        accelerator.print(report)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(build_data(batch * steps, length), batch_size=batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    losses = []
    for step, (ids,) in enumerate(loader):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        if step % 20 == 0:
            accelerator.print(f"step {step:>4}  loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--no-patch", action="store_true", help="train without fusedops, to compare")
    arguments = parser.parse_args()
    train(arguments.steps, patch=not arguments.no_patch)
