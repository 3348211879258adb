"""What the attention tests share: problems, the plain composition, and the definition in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import fusedops
from fusedops.attention import reference
from fusedops.attention.arguments import Modifiers, check_attention
from fusedops.runtime.dropout import draw_seed, keep_scale
from tests.harness.errors import check_error
from tests.harness.tensors import randn, randn_like

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# What may require a gradient, in the order of a call's inputs.
NAMES = ("q", "k", "v", "attn_mask", "alibi_slopes", "sinks")


@dataclass(frozen=True)
class Problem:
    """Shapes and options of one call of ``fusedops.attention``.

    Attributes:
        mask: None, "bool" or "float".
        mask_shape: of the mask; None: (batch, heads, q, k).
        alibi: None, "heads" or "batch": (heads,) or (batch, heads) slopes.
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
    window: tuple[int | None, int | None] | None = None
    mask: str | None = None
    mask_shape: tuple[int, ...] | None = None
    alibi: str | None = None
    sinks: bool = False
    softcap: float = 0.0
    scale: float | None = None
    dropout_p: float = 0.0
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
        """Keyword arguments that are no tensors."""
        names = ("causal", "window", "softcap", "scale", "dropout_p")
        default = Problem()
        return {n: getattr(self, n) for n in names if getattr(self, n) != getattr(default, n)}

    def inputs(
        self, device: torch.device, dtype: torch.dtype = torch.float32, requires_grad: bool = True
    ) -> tuple[Any, ...]:
        """(q, k, v, mask, slopes, sinks); a float mask has the dtype of q, and holds a few −inf.

        The last two are left out where the problem has neither.
        """
        dv = self.d if self.dv is None else self.dv
        make = {"dtype": dtype, "device": device, "layout": self.layout, "requires_grad": requires_grad}
        q = randn(self.batch, self.heads, self.q, self.d, **make)
        k = randn(self.batch, self.kv_heads, self.k, self.d, **make)
        v = randn(self.batch, self.kv_heads, self.k, dv, **make)
        shape = self.mask_shape or (self.batch, self.heads, self.q, self.k)
        mask = slopes = sinks = None
        if self.mask == "bool":
            mask = torch.rand(shape).to(device) > 0.3
        elif self.mask == "float":
            mask = randn(*shape, dtype=dtype, device=device)
            mask = mask.masked_fill(torch.rand(shape).to(device) < 0.1, float("-inf")).requires_grad_(requires_grad)
        if self.alibi is None and not self.sinks:
            return q, k, v, mask
        if self.alibi is not None:
            shape = (self.heads,) if self.alibi == "heads" else (self.batch, self.heads)
            slopes = (torch.rand(shape) * 0.2).to(device).requires_grad_(requires_grad)
        if self.sinks:
            sinks = randn(self.heads, dtype=dtype, device=device, requires_grad=requires_grad)
        return q, k, v, mask, slopes, sinks


def fused(q, k, v, mask=None, slopes=None, sinks=None, **options):
    """(out, lse) of what is tested."""
    given = {"attn_mask": mask, "alibi_slopes": slopes, "sinks": sinks}
    given = {name: value for name, value in given.items() if value is not None}
    return fusedops.attention(q, k, v, **given, return_lse=True, **options)


def exact(q, k, v, mask=None, slopes=None, sinks=None, *, score_mod=None, mask_mod=None, **options):
    """(out, lse) by the definition; its inputs are float64."""
    default = Modifiers(False, None, None, None, None, 0.0, None, 0.0, score_mod, mask_mod)
    given = default._replace(attn_mask=mask, alibi_slopes=slopes, sinks=sinks, **options)
    checked = check_attention(q, k, v, given, True)
    seed = draw_seed(q) if checked.dropout_p else None
    return reference.attention(q, k, v, checked._replace(seed=seed))[:2]


def plain(q, k, v, mask=None, slopes=None, sinks=None, *, causal=False, window=None, softcap=0.0, scale=None,
          dropout_p=0.0):  # fmt: skip
    """(out, lse) by torch's own operators in the dtype of the inputs: what rounding alone costs."""
    batch, heads, seqlen_q, size = q.shape
    seqlen_k = k.shape[2]
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    s = (q @ k.mT) * (size**-0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i, j = torch.arange(seqlen_q, device=q.device)[:, None], torch.arange(seqlen_k, device=q.device)
    distance = j - i - (0 if causal in (True, "top_left") else seqlen_k - seqlen_q)
    seen = torch.ones(s.shape, dtype=torch.bool, device=s.device)
    left, right = window or (None, None)
    if causal:
        right = 0
    if left is not None:
        seen = seen & (distance >= -left)
    if right is not None:
        seen = seen & (distance <= right)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        s = (s + mask).to(s.dtype)
        seen = seen & (mask != float("-inf"))
    if slopes is not None:
        s = (s - slopes.view(-1, heads, 1, 1) * distance.abs()).to(s.dtype)
    s = s.masked_fill(~seen, float("-inf"))
    if sinks is None:
        blind = ~seen.any(-1, keepdim=True)
        s = s.masked_fill(blind, 0.0)
        p = s.softmax(-1).masked_fill(blind, 0.0)
        lse = s.float().logsumexp(-1).masked_fill(blind[..., 0], float("-inf"))
    else:
        s = torch.cat((sinks.to(s.dtype).view(-1, 1, 1).expand(batch, heads, seqlen_q, 1), s), -1)
        p = s.softmax(-1)[..., 1:]
        lse = s.float().logsumexp(-1)
    if dropout_p:
        keep = keep_scale(draw_seed(q), batch * heads * seqlen_q, seqlen_k, dropout_p)
        p = (p * keep.view(p.shape)).to(p.dtype)
    return p @ v, lse


def gradients(function, inputs, grads, **options):
    """((out, lse), gradients of the inputs that require one) for given gradients of out and lse (None: not used)."""
    leaves = [t if t is None else t.detach().requires_grad_(t.requires_grad) for t in inputs]
    torch.manual_seed(12)  # of dropout
    outputs = function(*leaves, **options)
    used = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    return outputs, torch.autograd.grad([o for o, _ in used], wanted, [g for _, g in used]) if wanted else ()


def double(tensor):
    """In float64; a bool mask as it is."""
    if tensor is None or tensor.dtype == torch.bool:
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def names_of(inputs: Sequence[torch.Tensor | None]) -> list[str]:
    """Of the inputs that require a gradient."""
    return [name for name, t in zip(NAMES, inputs, strict=False) if t is not None and t.requires_grad]


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
    for name, *results in zip(names_of(inputs), grads, true_grads, base_grads, strict=True):
        check_error(*results, gradient=True, what=f"gradient of {name}")


__all__ = [
    "DTYPES", "NAMES", "Problem", "check", "double", "exact", "fused", "gradients", "names_of", "plain", "randn",
    "randn_like",
]  # fmt: skip
