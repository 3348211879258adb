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
from torch.autograd import forward_ad

_LIBRARY = torch.library.Library("fusedops", "DEF")  # lives as long as the process

below_autograd = torch._C._AutoDispatchBelowAutograd

_HINT = 'Compute this part under `with fusedops.backend("torch"):`, which supports it.'


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
        # Below autograd a tangent would be dropped in silence.
        if forward_ad._current_level >= 0 and any(map(_has_tangent, args)):
            raise RuntimeError(
                f"fusedops {function.__name__}: the fused kernels have no forward-mode derivative. {_HINT}"
            )
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            if torch._C._are_functorch_transforms_active():
                raise RuntimeError(
                    f"fusedops {function.__name__}: the fused kernels have no derivative under torch.func's"
                    f" transforms (grad, vjp, vmap of what requires a gradient, …). {_HINT}"
                )
            return function.apply(*args)
        with below_autograd():
            return op(*args)

    return formula


def _has_tangent(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a Function's backward: asking for a second derivative raises an error that names the way out.

    It raises as soon as the gradient's own graph is asked for (``create_graph=True``). Stricter than
    ``torch.autograd.function.once_differentiable``, whose barrier lets a second derivative through in silence, as zero,
    where grad_output requires no gradient (a penalty on the gradient of ``y.sum()``) and where only the graph to
    certain inputs is walked (``torch.autograd.functional.hessian``).
    """

    @functools.wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            name = type(ctx).__name__.removesuffix("Backward")
            raise RuntimeError(f"fusedops {name}: the fused kernels have no second derivative. {_HINT}")
        return backward(ctx, *grads)

    return guarded
