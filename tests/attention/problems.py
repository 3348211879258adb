"""What the attention tests share: problems, the plain composition, and the definition in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

import fusedops
from fusedops.attention import reference
from tests.harness.errors import check_error
from tests.harness.tensors import randn, randn_like

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

CODES = {False: 0, True: 1, "top_left": 1, "bottom_right": 2}


@dataclass(frozen=True)
class Problem:
    """Shapes and options of one call of ``fusedops.attention``.

    Attributes:
        mask: None, "bool" or "float".
        mask_shape: of the mask; None: (batch, heads, q, k).
        layout: of q, k and v (tests.harness.tensors).
    """

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    q: int = 20
    k: int = 36
    d: int = 16
    dv: int | None = None
    causal: bool | str = False
    mask: str | None = None
    mask_shape: tuple[int, ...] | None = None
    scale: float | None = None
    layout: str = "contiguous"

    def __str__(self) -> str:
        default = Problem()
        shown = [
            f"{n}={getattr(self, n)}" for n in self.__dataclass_fields__ if getattr(self, n) != getattr(default, n)
        ]
        return ",".join(shown).replace(" ", "") or "plain"

    def but(self, **changes: Any) -> Problem:
        return replace(self, **changes)

    @property
    def options(self) -> dict[str, Any]:
        return {"causal": self.causal, "scale": self.scale}

    def inputs(
        self, device: torch.device, dtype: torch.dtype = torch.float32, requires_grad: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(q, k, v, mask); a float mask has the dtype of q, and holds a few −inf."""
        dv = self.d if self.dv is None else self.dv
        make = {"dtype": dtype, "device": device, "layout": self.layout, "requires_grad": requires_grad}
        q = randn(self.batch, self.heads, self.q, self.d, **make)
        k = randn(self.batch, self.kv_heads, self.k, self.d, **make)
        v = randn(self.batch, self.kv_heads, self.k, dv, **make)
        shape = self.mask_shape or (self.batch, self.heads, self.q, self.k)
        mask = None
        if self.mask == "bool":
            mask = torch.rand(shape).to(device) > 0.3
        elif self.mask == "float":
            mask = randn(*shape, dtype=dtype, device=device)
            mask = mask.masked_fill(torch.rand(shape).to(device) < 0.1, float("-inf")).requires_grad_(requires_grad)
        return q, k, v, mask


def fused(q, k, v, mask, **options):
    """(out, lse) of what is tested."""
    return fusedops.attention(q, k, v, attn_mask=mask, return_lse=True, **options)


def exact(q, k, v, mask, causal=False, scale=None):
    """(out, lse) by the definition; its inputs are float64."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return reference.attention(q, k, v, mask, CODES[causal], scale)[:2]


def plain(q, k, v, mask, causal=False, scale=None):
    """(out, lse) by torch's own operators in the dtype of the inputs: what rounding alone costs."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    s = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(s.shape, dtype=torch.bool, device=s.device)
    if causal:
        seen = seen.tril(s.shape[-1] - s.shape[-2] if causal == "bottom_right" else 0)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        s = (s + mask).to(s.dtype)
        seen = seen & (mask != float("-inf"))
    blind = ~seen.any(-1, keepdim=True)
    s = s.masked_fill(~seen, float("-inf")).masked_fill(blind, 0.0)
    p = s.softmax(-1).masked_fill(blind, 0.0)
    lse = s.float().logsumexp(-1).masked_fill(blind[..., 0], float("-inf"))
    return p @ v, lse


def gradients(function, inputs, grads, **options):
    """((out, lse), gradients of the inputs that require one) for given gradients of out and lse (None: not used)."""
    leaves = [t if t is None else t.detach().requires_grad_(t.requires_grad) for t in inputs]
    outputs = function(*leaves, **options)
    used = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    return outputs, torch.autograd.grad([o for o, _ in used], wanted, [g for _, g in used])


def double(tensor):
    """In float64; a bool mask as it is."""
    if tensor is None or tensor.dtype == torch.bool:
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def check(problem: Problem, runner, dtype: torch.dtype, inputs=None, grad_layout: str = "contiguous") -> None:
    """Output, lse and all gradients, those that come through lse too, keep the error rule."""
    inputs = problem.inputs(runner.device, dtype) if inputs is None else inputs
    q, v = inputs[0], inputs[2]
    shape = (*q.shape[:3], v.shape[3])
    do = randn(*shape, dtype=dtype, device=runner.device, layout=grad_layout)
    dlse = randn(*shape[:3], device=runner.device)
    outputs, grads = gradients(fused, inputs, (do, dlse), **problem.options)
    base, base_grads = gradients(plain, inputs, (do, dlse), **problem.options)
    truth, true_grads = gradients(exact, [double(t) for t in inputs], (do.double(), dlse.double()), **problem.options)
    for name, *results in zip(("out", "lse"), outputs, truth, base, strict=True):
        check_error(*results, what=name)
    names = [n for n, t in zip(("q", "k", "v", "attn_mask"), inputs, strict=True) if t is not None and t.requires_grad]
    for name, *results in zip(names, grads, true_grads, base_grads, strict=True):
        check_error(*results, gradient=True, what=f"gradient of {name}")


__all__ = ["DTYPES", "Problem", "check", "double", "exact", "fused", "gradients", "plain", "randn", "randn_like"]
