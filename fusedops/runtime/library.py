"""Registration of fusedops' operators with torch, in the one way that composes with everything.

Each direction of an operator is a library op with a kernel, a fake (shape) function, and an ``Autograd``
implementation: for a forward op, a :class:`torch.autograd.Function`; for a backward op, nothing. So eager mode keeps
autograd's plain path, and torch.compile, torch.export, fake tensors and checkpointing see opaque, described ops.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from fusedops.runtime.batching import register_batching
from fusedops.runtime.sharded import prepare

_LIBRARY = torch.library.Library("fusedops", "DEF")  # lives as long as the process

below_autograd = torch._C._AutoDispatchBelowAutograd

_HINT = 'Compute this part under `with fusedops.backend("torch"):`, which supports it.'
# torch's own attention has second derivatives as a composition alone.
ATTENTION_HINT = (
    'Compute this part under `with fusedops.backend("torch"), torch.nn.attention.sdpa_kernel('
    "torch.nn.attention.SDPBackend.MATH):`, which supports it."
)


def register(
    schema: str,
    *,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    function: type[torch.autograd.Function] | None = None,
) -> Callable[..., Any]:
    """Define ``fusedops::<schema>`` and return what calls it; that has the op itself as ``overload``.

    Whoever watches or transforms torch's operators meets the op: torch.compile and export, modes, profilers,
    transforms, subclasses, tensors that only stand for others. In a plain eager call nobody does; then torch's
    dispatcher, which takes more of the host's time than what it calls, is left out, and the result is the same.

    Args:
        schema: the op's schema without the namespace. Arguments are passed by position.
        kernel: computes the result from real tensors (CPU or CUDA).
        fake: computes shapes, strides and dtypes only.
        function: the autograd formula, applied when an input requires a gradient. Its forward gets the op's arguments
            and one more, last: a function of these arguments that computes the result, below autograd. None: the op has
            no derivative (a backward op).
    """
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CPU")
    _LIBRARY.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"fusedops::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.fusedops, name).default
    register_batching(_LIBRARY, name, op)
    tensors_of = _tensors_of(op)
    if function is None:
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
        apply = None
    else:
        _LIBRARY.impl(name, _autograd_formula(function, op), "Autograd")
        # Function.apply without its search for tensors of ended transforms, which are not plain.
        apply = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def call(*args: Any) -> Any:
        # The first question is answered while tracing: so a graph has the op, and nothing of what follows.
        if torch.compiler.is_compiling() or _watched() or not (found := _survey(tensors_of(args))):
            prepare()
            return op(*args)
        if found is _REQUIRES_GRAD and apply is not None and torch.is_grad_enabled():
            return apply(*args, kernel)
        return kernel(*args)

    call.__name__ = call.__qualname__ = name
    call.overload = op  # type: ignore[attr-defined]
    return call


try:
    _dispatch_modes = torch._C._len_torch_dispatch_stack
    _function_modes = torch._C._is_torch_function_mode_enabled
    _transforms = torch._C._are_functorch_transforms_active
    _tracing = torch._C._is_tracing
    _profiling = torch._C._autograd._profiler_enabled
    _keys = torch._C._dispatch_keys
    _PLAIN = frozenset(
        functools.reduce(
            torch._C.DispatchKeySet.add,
            [getattr(torch._C.DispatchKey, key) for key in keys],
            torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, backend)),
        ).raw_repr()
        for backend in ("CPU", "CUDA")
        # Those of an ordinary tensor, and of one that was made in inference mode.
        for keys in ((f"Autograd{backend}", "ADInplaceOrView", f"Autocast{backend}"), (f"Autocast{backend}",))
    )
except AttributeError:  # names that torch does not promise: without one of them every call is the op's

    def _watched() -> bool:
        return True

else:

    def _watched() -> bool:
        """Whether anyone but autograd wants to know of torch's operators in this thread."""
        return bool(
            _dispatch_modes()
            or _function_modes()
            or _transforms()
            or _tracing()
            or _profiling()
            or forward_ad._current_level >= 0
        )


def _tensors_of(op: Any) -> Callable[[tuple[Any, ...]], Iterable[Any]]:
    """Takes a call's arguments that are tensors, None or lists of tensors, by the op's schema."""
    places = [i for i, argument in enumerate(op._schema.arguments) if "Tensor" in str(argument.type)]
    return operator.itemgetter(*places) if len(places) > 1 else lambda args: (args[places[0]],)


_OP, _KERNEL, _REQUIRES_GRAD = 0, 1, 2
_LISTS = (list, tuple)


def _survey(tensors: Iterable[Any]) -> int:
    """_OP where not all are plain tensors, lists of them or None; else whether one requires a gradient.

    A tensor's keys say what it is: one that is batched, negated, functional, nested, … has others.
    """
    found = _KERNEL
    for value in tensors:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if _keys(value).raw_repr() not in _PLAIN:
                return _OP
            if value.requires_grad:
                found = _REQUIRES_GRAD
        elif value is not None and (kind not in _LISTS or (value and not _survey(value))):
            return _OP
    return found


def _autograd_formula(function: type[torch.autograd.Function], op: Callable[..., Any]) -> Callable[..., Any]:
    def compute(*args: Any) -> Any:
        with below_autograd():
            return op(*args)

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
            return function.apply(*args, compute)
        return compute(*args)

    return formula


def _has_tangent(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None


def first_order_only(backward: Callable[..., Any], hint: str = _HINT) -> Callable[..., Any]:
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
            raise RuntimeError(f"fusedops {name}: the fused kernels have no second derivative. {hint}")
        return backward(ctx, *grads)

    return guarded
