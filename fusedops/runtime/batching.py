"""Library ops under vmap: one call for each element of the batch, whose results are stacked.

The public functions run on torch's operators under ``torch.func.vmap``, which have better rules. This serves who calls
``torch.ops.fusedops.*`` there, and gradients of many directions at once (``autograd.grad(is_grads_batched=True)``,
``autograd.functional.jacobian(vectorize=True)``), whose forward saw no transform. torch's own fallback does the same,
but not for lists of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def register_batching(library: torch.library.Library, name: str, op: Any) -> None:
    """Have both of torch's vmaps, that of torch.func and autograd's older one, call ``op`` for each element."""
    writes = [
        (i, argument.name)
        for i, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def each(args: list[Any]) -> Any:
        """``args``: each tensor with the batch in front, of size 1 where all elements share it."""
        sizes: list[int] = []
        for value in args:
            _of_tensors(lambda t: sizes.append(t.shape[0]), value)
        size = 0 if 0 in sizes else max(sizes)
        if size == 0:
            raise RuntimeError(f"{op}: vmap over a dimension of size 0 is not supported")
        for place, argument in writes:
            if args[place] is not None and args[place].shape[0] != size:
                raise RuntimeError(f"{op}: vmap cannot write a batch to {argument}, which has none")
        results = [op(*_element(args, i)) for i in range(size)]
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results)
        return results[0] and tuple(map(torch.stack, zip(*results, strict=True)))

    library.impl(name, _functorch_rule(op, each), "FuncTorchBatched")
    library.impl(name, _autograd_rule(each), "Batched")


def _functorch_rule(op: Any, each: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    def in_front(value: Any, dim: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [in_front(v, d) for v, d in zip(value, dim, strict=True)]
        if not isinstance(value, torch.Tensor):
            return value
        return value.unsqueeze(0) if dim is None else value.movedim(dim, 0)

    def mapped(_: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        results = each([in_front(value, dim) for value, dim in zip(args, dims, strict=True)])
        return results, tuple(0 for _ in results) if isinstance(results, tuple) else 0

    def rule(*args: Any) -> Any:
        # Importing these takes longer than importing fusedops.
        from torch._functorch.autograd_function import custom_function_call_vmap_helper
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

        return custom_function_call_vmap_helper(retrieve_current_functorch_interpreter(), mapped, op, *args)  # type: ignore[arg-type]

    return rule


def _autograd_rule(each: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    def rule(*args: Any) -> Any:
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()

        results = each([_of_tensors(lambda t: torch._remove_batch_dim(t, level, 1, 0), value) for value in args])
        if isinstance(results, torch.Tensor):
            return torch._add_batch_dim(results, 0, level)
        return results and tuple(torch._add_batch_dim(result, 0, level) for result in results)

    return rule


def _of_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_of_tensors(function, v) for v in value]
    return function(value) if isinstance(value, torch.Tensor) else value


def _element(args: list[Any], i: int) -> list[Any]:
    return [_of_tensors(lambda t: t[i if t.shape[0] > 1 else 0], value) for value in args]
