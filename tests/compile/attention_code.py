"""In the compiling process: what attention's forward consists of, beside the textbook's."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.attention_static import inspect


def forward(target: str, size: int, causal: bool) -> list[dict[str, Any]]:
    """Ours, the textbook's for any lengths, and the textbook's for whole tiles; bfloat16."""
    return [result.as_dict() for result in inspect(target, size, causal, torch.bfloat16)]
