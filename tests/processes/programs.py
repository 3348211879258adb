"""What the tests run in other processes."""

from __future__ import annotations

from typing import Any

import torch

import fusedops


def step(seed: int) -> list[Any]:
    """A step of a small model, as numbers: its loss and the sum of each gradient."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    with fusedops.backend("torch"):
        model = torch.nn.Sequential(fusedops.nn.LayerNormMLP(16, 32), fusedops.nn.RMSNorm(16))
        x = torch.randn(4, 16)
        out = fusedops.attention(*(model(x).view(1, 1, 4, 16) for _ in range(3)), causal=True)
        loss = out.square().sum()
        loss.backward()
    return [float(loss), *(float(p.grad.sum()) for p in model.parameters())]


def send(seed: int, queue: Any) -> None:
    """:func:`step` in a process that was started with a queue."""
    queue.put(step(seed))


def share(tensor: torch.Tensor, queue: Any) -> None:
    """Normalise a tensor of another process."""
    with fusedops.backend("torch"):
        queue.put(fusedops.rms_norm(tensor, tensor.shape[-1]).tolist())  # memory of this process ends with it


class Normalised(torch.utils.data.Dataset):
    """A dataset whose items are made by fusedops, in the loader's workers."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        with fusedops.backend("torch"):
            return fusedops.layer_norm(torch.arange(8.0) * (index + 1), 8)
