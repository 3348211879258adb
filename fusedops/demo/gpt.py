"""A small byte-level GPT-2, its text (the installed Python's own sources) and its training loop."""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fusedops.demo import DemoError, require

PACKAGES = ("transformers",)

# Text enough that a short run does not see a byte twice, on average.
_TEXT_BYTES = 1_500_000


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the model and of one training step."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    learning_rate: float


# On the CPU: 0.8 M parameters, seconds for a hundred steps. On a GPU: 25 M, so that the kernels and not the launches
# take the time.
CPU_SIZE = Size(layers=4, width=128, heads=4, context=128, batch=8, learning_rate=2e-3)
GPU_SIZE = Size(layers=8, width=512, heads=8, context=1024, batch=16, learning_rate=6e-4)


def size_for(device: torch.device) -> Size:
    return CPU_SIZE if device.type == "cpu" else GPU_SIZE


def build(size: Size, seed: int) -> Any:
    """A GPT-2 over bytes with weights drawn from ``seed``, float32 on the CPU, without dropout.

    Without dropout, two runs from one seed differ by rounding alone.

    Raises:
        DemoError: transformers is not installed.
    """
    require(PACKAGES)
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256,
        n_positions=size.context,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config).train()


def read_text(limit: int = _TEXT_BYTES) -> tuple[torch.Tensor, int]:
    """The standard library's top-level modules, in order of their names, as bytes; and how many files those are.

    Returns:
        text: (at most ``limit``,) uint8.
        files: how many files were read.

    Raises:
        DemoError: this Python comes without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for path in sorted(folder.glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit:
            break
    if size < 100_000:
        raise DemoError(f"the training text is Python's own sources, and {folder} holds none")
    return torch.frombuffer(bytearray(b"".join(parts)[:limit]), dtype=torch.uint8), len(parts)


def draw_batches(text: torch.Tensor, size: Size, steps: int, seed: int) -> torch.Tensor:
    """Windows of the text: (steps, batch, context + 1) int64. The same seed gives the same windows."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - size.context, (steps, size.batch, 1), generator=generator)
    return text[starts + torch.arange(size.context + 1)].long()


@dataclass(frozen=True, slots=True)
class Run:
    """What a training run left behind.

    Attributes:
        losses: cross entropy of each step, in nats a byte.
        first_gradients: of the first step, by parameter, on the CPU.
        step_seconds: duration of each step (on a GPU by its own clock).
        peak_bytes: most GPU memory in use at a time; None on the CPU.
    """

    losses: list[float]
    first_gradients: dict[str, torch.Tensor]
    step_seconds: list[float]
    peak_bytes: int | None


def training_step(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor, half: bool) -> torch.Tensor:
    """One step: next-byte loss of ``batch`` (batch, context + 1), its gradients, the update. Returns the loss."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=half):
        logits = model(input_ids=batch[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.detach()


def optimizer_for(model: Any, size: Size) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=size.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)


def train(
    model: Any, batches: torch.Tensor, size: Size, half: bool, on_step: Callable[[], object] = lambda: None
) -> Run:
    """Train on ``batches`` (steps, batch, context + 1), on the model's device.

    Args:
        half: run the model under autocast in bfloat16.
        on_step: called after every step.
    """
    device = next(model.parameters()).device
    clock = _Clock(device)
    optimizer = optimizer_for(model, size)
    losses = []
    first_gradients: dict[str, torch.Tensor] = {}
    for step, batch in enumerate(batches):
        # The learning rate rises over the first steps: Adam's estimates are not to be trusted there.
        for group in optimizer.param_groups:
            group["lr"] = size.learning_rate * min(1.0, (step + 1) / 20)
        on_device = batch.to(device)
        clock.start()
        losses.append(training_step(model, optimizer, on_device, half))
        clock.stop()
        if step == 0:
            first_gradients = {name: p.grad.cpu() for name, p in model.named_parameters()}
        on_step()
    return Run(torch.stack(losses).tolist(), first_gradients, clock.seconds(), clock.peak_bytes())


class _Clock:
    """Duration of steps and the peak of memory, by the device's own account."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpu = device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []
        if self._gpu:
            torch.cuda.reset_peak_memory_stats(device)

    def start(self) -> None:
        self._marks.append((self._now(), None))

    def stop(self) -> None:
        self._marks[-1] = (self._marks[-1][0], self._now())

    def seconds(self) -> list[float]:
        if not self._gpu:
            return [end - begin for begin, end in self._marks]
        torch.cuda.synchronize(self._device)
        return [begin.elapsed_time(end) / 1e3 for begin, end in self._marks]

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._device) if self._gpu else None

    def _now(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        with torch.cuda.device(self._device):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return event
