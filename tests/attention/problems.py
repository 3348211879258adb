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
        layout: of q, k and v, or of each (tests.harness.tensors).
        wanted: which inputs require a gradient (NAMES); None: all that can.
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
    layout: str | tuple[str, str, str] = "contiguous"
    wanted: tuple[str, ...] | None = None

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
        layouts = (self.layout,) * 3 if isinstance(self.layout, str) else self.layout
        shapes = (self.heads, self.q, self.d), (self.kv_heads, self.k, self.d), (self.kv_heads, self.k, dv)
        q, k, v = (
            randn(self.batch, *shape, dtype=dtype, device=device, layout=layout)
            for shape, layout in zip(shapes, layouts, strict=True)
        )
        shape = self.mask_shape or (self.batch, self.heads, self.q, self.k)
        mask = slopes = sinks = None
        if self.mask == "bool":
            mask = torch.rand(shape).to(device) > 0.3
        elif self.mask == "float":
            mask = randn(*shape, dtype=dtype, device=device)
            mask = mask.masked_fill(torch.rand(shape).to(device) < 0.1, float("-inf"))
        if self.alibi is not None:
            shape = (self.heads,) if self.alibi == "heads" else (self.batch, self.heads)
            slopes = (torch.rand(shape) * 0.2).to(device)
        if self.sinks:
            sinks = randn(self.heads, dtype=dtype, device=device)
        made = (q, k, v, mask, slopes, sinks)
        wanted = NAMES if self.wanted is None else self.wanted
        for name, tensor in zip(NAMES, made, strict=True):
            if requires_grad and name in wanted and tensor is not None and tensor.is_floating_point():
                tensor.requires_grad_()
        return made[:4] if self.alibi is None and not self.sinks else made


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
          dropout_p=0.0, score_mod=None, mask_mod=None):  # fmt: skip
    """(out, lse) by torch's own operators in the dtype of the inputs: what rounding alone costs."""
    batch, heads, seqlen_q, size = q.shape
    seqlen_k = k.shape[2]
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    s = (q @ k.mT) * (size**-0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    b, h, i, j = (torch.arange(size, device=q.device) for size in s.shape)
    b, h, i = b.view(-1, 1, 1, 1), h.view(-1, 1, 1), i[:, None]
    if score_mod is not None:
        s = score_mod.definition(s, b, h, i, j, *score_mod.args).to(s.dtype)
    distance = j - i - (0 if causal in (True, "top_left") else seqlen_k - seqlen_q)
    seen = torch.ones(s.shape, dtype=torch.bool, device=s.device)
    left, right = window or (None, None)
    if causal:
        right = 0
    if left is not None:
        seen = seen & (distance >= -left)
    if right is not None:
        seen = seen & (distance <= right)
    if mask_mod is not None:
        seen = seen & mask_mod.definition(b, h, i, j, *mask_mod.args)
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


def gradients(function, inputs, grads, *, repeat=False, unused_is_zero=False, **options):
    """((out, lse), gradients of the inputs that require one) for given gradients of out and lse (None: not used).

    Args:
        repeat: run the backward twice; the same to the bit must come out.
        unused_is_zero: an input that no output depends on gets zeros. Without it, that is an error.
    """
    leaves = [t if t is None else t.detach().requires_grad_(t.requires_grad) for t in inputs]
    with torch.random.fork_rng():
        if options.get("dropout_p"):
            torch.manual_seed(12)
        outputs = function(*leaves, **options)
    used = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    if not wanted:
        return outputs, ()
    if not used and unused_is_zero:
        return outputs, tuple(torch.zeros_like(t) for t in wanted)
    ends, grads = [o for o, _ in used], [g for _, g in used]
    result = torch.autograd.grad(ends, wanted, grads, retain_graph=repeat, materialize_grads=unused_is_zero)
    if repeat:
        again = torch.autograd.grad(ends, wanted, grads)
        assert all(torch.equal(a, b) for a, b in zip(result, again, strict=True)), "two backwards differ"
    return outputs, result


def double(tensor):
    """In float64; a bool mask as it is."""
    if tensor is None or tensor.dtype == torch.bool:
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def names_of(inputs: Sequence[torch.Tensor | None]) -> list[str]:
    """Of the inputs that require a gradient."""
    return [name for name, t in zip(NAMES, inputs, strict=False) if t is not None and t.requires_grad]


# The errors of a gradient of fewer elements are a matter of luck: also of that of the CPU's, whose instructions decide
# in which order torch adds up.
FEW = 1024
# How many more problems they are compared with.
_MORE = 8


def check(
    problem: Problem,
    runner,
    dtype: torch.dtype,
    inputs=None,
    grad_layout: str = "contiguous",
    through: Sequence[str] = ("out", "lse"),
    thorough: bool = False,
    given: dict[str, Any] | None = None,
    **rules: Any,
) -> None:
    """Output, lse and all gradients, those that come through lse too, keep the error rule.

    Args:
        inputs: instead of the problem's.
        grad_layout: of the gradient of the output.
        through: the outputs that the loss is made of.
        thorough: of the problem's own inputs: run the backward twice, which must give the same to the bit, and compare
            the errors of gradients of few elements with those of more problems.
        given: what the function that is tested gets instead of the rules.
        rules: score_mod and mask_mod, beside the problem's options.
    """
    inputs = problem.inputs(runner.device, dtype) if inputs is None else inputs
    names = names_of(inputs)
    grads_in = _incoming(inputs, through, grad_layout)
    options = problem.options | (rules if given is None else given)
    outputs, grads = gradients(fused, inputs, grads_in, repeat=thorough, **options)
    truth, true_grads, base, base_grads = _expected(problem.options | rules, inputs, grads_in)
    for name, *results in zip(("out", "lse"), outputs, truth, base, strict=True):
        check_error(*results, what=name)
    more = []
    if thorough and any(g.numel() < FEW for g in grads):
        for _ in range(_MORE):
            others = problem.inputs(runner.device, dtype)
            more.append(_expected(problem.options | rules, others, _incoming(others, through, grad_layout)))
    for place, (name, *results) in enumerate(zip(names, grads, true_grads, base_grads, strict=True)):
        samples = [(m[1][place], m[3][place]) for m in more] if results[0].numel() < FEW else []
        check_error(*results, gradient=True, what=f"gradient of {name}", more=samples)


def _incoming(inputs, through, layout):
    """Random gradients of out and lse; None for one that the loss is not made of."""
    q, v = inputs[0], inputs[2]
    do = randn(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device, layout=layout)
    dlse = randn(*q.shape[:3], device=q.device)
    return do if "out" in through else None, dlse if "lse" in through else None


def _expected(options, inputs, grads):
    """(outputs, gradients) by the definition in float64, then by the plain composition."""
    doubled = [g if g is None else g.double() for g in grads]
    truth = gradients(exact, [double(t) for t in inputs], doubled, unused_is_zero=True, **options)
    return *truth, *gradients(plain, inputs, grads, unused_is_zero=True, **options)


__all__ = [
    "DTYPES", "NAMES", "Problem", "check", "double", "exact", "fused", "gradients", "names_of", "plain", "randn",
    "randn_like",
]  # fmt: skip
