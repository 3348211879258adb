"""What ``model.py`` times: models of known shapes with random weights, and the ways to make them faster."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import fusedops
from benchmarks.report import OURS

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and a batch.

    Attributes:
        model: ``gpt2``, ``llama`` or ``bert``.
        inner: of the MLP.
        batch, length: sequences, and tokens of each.
    """

    model: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    batch: int
    length: int

    @property
    def training(self) -> bool:
        """Training steps are timed; of ``bert`` inference."""
        return self.model != "bert"

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def build(self, dtype: torch.dtype, device: torch.device) -> Any:
        """transformers' model with weights that are always the same on a kind of device, without dropout."""
        import transformers

        common: dict[str, Any] = {"vocab_size": self.vocabulary, "attn_implementation": "sdpa"}
        no_tokens = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
        if self.model == "gpt2":
            kind = transformers.GPT2LMHeadModel
            config: Any = transformers.GPT2Config(
                n_positions=self.length, n_embd=self.width, n_layer=self.layers, n_head=self.heads, n_inner=self.inner,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **no_tokens, **common,
            )  # fmt: skip
        else:
            sizes: dict[str, Any] = {
                "hidden_size": self.width, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
                "intermediate_size": self.inner, "max_position_embeddings": self.length,
            }  # fmt: skip
            if self.model == "llama":
                kind = transformers.LlamaForCausalLM
                config = transformers.LlamaConfig(num_key_value_heads=self.kv_heads, **sizes, **no_tokens, **common)
            else:
                kind = transformers.BertModel
                config = transformers.BertConfig(
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes, **common
                )
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(0)
            made = kind(config)
        return made.to(device, dtype).train(self.training)

    def batch_of(self, device: torch.device) -> torch.Tensor:
        """(batch, length) int64: always the same tokens."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.vocabulary, (self.batch, self.length), generator=generator).to(device)


# Radford et al. 2019 (GPT-2 small); Llama 3.2 1B's layers (Llama team 2024) with Llama 2's vocabulary; Devlin et al.
# 2019 (BERT base).
FULL = {
    "gpt2": Shape("gpt2", 12, 768, 12, 12, 3072, 50257, 8, 1024),
    "llama": Shape("llama", 16, 2048, 32, 8, 8192, 32000, 4, 2048),
    "bert": Shape("bert", 12, 768, 12, 12, 3072, 30522, 64, 512),
}
# The same layers, fewer of them.
QUICK = {
    "gpt2": Shape("gpt2", 2, 768, 12, 12, 3072, 50257, 8, 1024),
    "llama": Shape("llama", 2, 2048, 32, 8, 8192, 32000, 4, 2048),
    "bert": Shape("bert", 2, 768, 12, 12, 3072, 30522, 64, 512),
}
# What a CPU runs in moments.
SMALL = {
    "gpt2": Shape("gpt2", 2, 256, 4, 4, 1024, 1024, 4, 128),
    "llama": Shape("llama", 2, 256, 4, 2, 688, 1024, 4, 128),
    "bert": Shape("bert", 2, 256, 4, 4, 1024, 1024, 8, 128),
}
TINY = {
    "gpt2": Shape("gpt2", 2, 32, 2, 2, 64, 64, 2, 12),
    "llama": Shape("llama", 2, 32, 2, 1, 48, 64, 2, 12),
    "bert": Shape("bert", 2, 32, 2, 2, 64, 64, 2, 12),
}


# --- ways to make a model faster -------------------------------------------------------------------------------------

# model -> what is called instead
Variant = Callable[[Any], Any]


class NotOfferedError(Exception):
    """A library is not installed, or has nothing for a model."""


def _compiled(model: Any, backend: str = "inductor") -> Any:
    """torch.compile for the very sizes of the batch; Inductor makes C++ on a CPU, which no one here asks for."""
    on_gpu = next(model.parameters()).is_cuda
    if backend == OURS:
        from fusedops.dynamo import backend as ours  # its name is known only where fusedops is installed

        return torch.compile(model, backend=ours, dynamic=False, options=None if on_gpu else {"inner": "aot_eager"})
    return torch.compile(model, backend=backend if on_gpu else "aot_eager", dynamic=False)


def _liger(model: Any) -> Any:
    try:
        from liger_kernel.transformers import monkey_patch
    except ModuleNotFoundError as error:
        raise NotOfferedError(f"{error.name} is not installed") from None
    kind = model.config.model_type
    if kind not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise NotOfferedError(f"Liger has nothing for {kind}")
    monkey_patch._apply_liger_kernel_to_instance(model=model)
    return model


def _patched(model: Any) -> Any:
    if not fusedops.patch(model).replaced:
        raise RuntimeError("fusedops.patch replaced nothing: the comparison would be of plain with plain")
    return model


# The most telling first: when the time runs out, the last are left out.
VARIANTS: dict[str, Variant] = {
    "plain": lambda model: model,
    OURS: _patched,
    "liger": _liger,
    "torch.compile": _compiled,
    f"{OURS}, compiled": lambda model: _compiled(_patched(model)),
    f"{OURS}, backend": lambda model: _compiled(model, OURS),
}


# --- a step ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stepper:
    """A model that takes a step.

    Attributes:
        called: the model, or what is called instead.
        optimizer: None: inference.
    """

    called: Any
    batch: torch.Tensor
    optimizer: torch.optim.Optimizer | None

    @classmethod
    def of(cls, shape: Shape, variant: Variant, dtype: torch.dtype, device: torch.device) -> Stepper:
        model = shape.build(dtype, device)
        called = variant(model)
        optimizer = None
        if shape.training:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
        return cls(called, shape.batch_of(device), optimizer)

    def __call__(self) -> None:
        """Forward, backward and update; or a forward."""
        if self.optimizer is None:
            with torch.no_grad():
                self.called(input_ids=self.batch)
            return
        self.optimizer.zero_grad(set_to_none=True)
        self.called(input_ids=self.batch, labels=self.batch).loss.backward()
        self.optimizer.step()

    def results(self) -> tuple[torch.Tensor, ...]:
        """What must be right, without an update: the loss and every parameter's gradient; or the hidden states. On the
        CPU, where they take no memory that is measured."""
        if self.optimizer is None:
            with torch.no_grad():
                return (self.called(input_ids=self.batch).last_hidden_state.cpu(),)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.called(input_ids=self.batch, labels=self.batch).loss
        loss.backward()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        found = (loss.detach().cpu(), *(torch.zeros(()) if p.grad is None else p.grad.cpu() for p in parameters))
        self.optimizer.zero_grad(set_to_none=True)
        return found


# A gradient smaller than this share of the largest one is compared with that share: where it is 0 in exact arithmetic,
# as that of a key's bias, what is computed is rounding alone.
_SMALL = 1e-2


def distance(found: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...], device: torch.device) -> float:
    """Largest relative distance ‖found - right‖ / ‖right‖ of a step's results. NaN counts as infinite.

    Args:
        found, right: loss and gradients, or hidden states; in their order.
        device: where to compute it.
    """
    largest = max((float(t.norm()) for t in right[1:]), default=0.0)
    relative = []
    for number, (a, b) in enumerate(zip(found, right, strict=True)):
        a, b = (t.to(device).double() for t in (a, b))
        relative.append(float((a - b).norm()) / max(float(b.norm()), _SMALL * largest if number else 0.0, 1e-30))
    return max(each if each == each else float("inf") for each in relative)
