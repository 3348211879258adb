"""Registration of fusedops' operators with torch, in the one way that composes with everything.

Each direction of an operator is a library op with a kernel, a fake (shape) function, and an ``Autograd``
implementation: for a forward op, a :class:`torch.autograd.Function`; for a backward op, nothing. So eager mode keeps
autograd's plain path, and torch.compile, torch.export, fake tensors and checkpointing see opaque, described ops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("fusedops", "DEF")  # lives as long as the process

below_autograd = torch._C._AutoDispatchBelowAutograd


def register(
    schema: str,
    *,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    function: type[torch.autograd.Function] | None = None,
) -> Callable[..., Any]:
    """Define ``fusedops::<schema>`` and return the callable op.

    Args:
        schema: the op's schema without the namespace. Arguments are passed by position.
        kernel: computes the result from real tensors (CPU or CUDA).
        fake: computes shapes, strides and dtypes only.
        function: the autograd formula, applied when an input requires a gradient. It reaches ``kernel`` by calling
            the op inside :data:`below_autograd`. None: the op has no derivative (a backward op).
    """
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CPU")
    _LIBRARY.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"fusedops::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.fusedops, name).default
    if function is None:
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    else:
        _LIBRARY.impl(name, _autograd_formula(function, op), "Autograd")
    return op


def _autograd_formula(function: type[torch.autograd.Function], op: Callable[..., Any]) -> Callable[..., Any]:
    def formula(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            return function.apply(*args)
        with below_autograd():
            return op(*args)

    return formula


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a Function's backward: a second derivative raises an error that names the way out.

    Stricter than ``torch.autograd.function.once_differentiable``: that one lets a second derivative through in
    silence (as zero) where grad_output itself requires no gradient, as in a gradient penalty on ``y.sum()``.
    """

    @functools.wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> Any:
        wanted = torch.is_grad_enabled()  # create_graph=True
        with torch.no_grad():
            result = backward(ctx, *grads)
        if not wanted:
            return result
        results = result if isinstance(result, tuple) else (result,)
        tensors = [r for r in results if isinstance(r, torch.Tensor)]
        barred = iter(_NoSecondDerivative.apply(type(ctx).__name__.removesuffix("Backward"), *map(_leaf, tensors)))
        results = tuple(next(barred) if isinstance(r, torch.Tensor) else r for r in results)
        return results if isinstance(result, tuple) else results[0]

    return guarded


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


class _NoSecondDerivative(torch.autograd.Function):
    """Identity whose backward explains that fusedops' kernels have first derivatives only."""

    @staticmethod
    def forward(ctx: Any, name: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.name = name
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError(
            f"fusedops {ctx.name}: the fused kernels have no second derivative. "
            'Compute this part under `with fusedops.backend("torch"):`, which supports it.'
        )
