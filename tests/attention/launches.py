"""Watching an attention call: what torch allocates and reads beneath it, and which kernels it launches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from fusedops.attention import autograd

_OPERATORS = {
    autograd.attention_op.overload: autograd._attention,
    autograd.attention_backward_op.overload: autograd._attention_backward,
}


class Watch(TorchDispatchMode):
    """Calls ``seen(operator, results)`` after each of torch's operators, those inside of attention's operators too."""

    def __init__(self, seen: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kernel = _OPERATORS.get(function)
        if kernel is not None:
            with self:
                return kernel(*args, **(kwargs or {}))
        results = function(*args, **(kwargs or {}))
        self.seen(function, results)
        return results


@contextlib.contextmanager
def launching(monkeypatch, launch: Callable[..., None]) -> Iterator[None]:
    """``launch(run, kernel, *args, grid, **kwargs)`` in place of the interpreter's ``run(kernel, *args, grid, …)``."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def instead(self, *args, **kwargs):
        return launch(run, self, *args, **kwargs)

    with monkeypatch.context() as patches:
        patches.setattr(InterpretedFunction, "run", instead)
        yield


def nothing(run, kernel, *args, **kwargs) -> None:
    """A launch that does not happen."""


def only(*chosen: int) -> Callable[..., None]:
    """A launch of these programs alone, each of which finds itself in a grid as large as asked for; -1 is the last."""

    def launch(run, kernel, *args, grid, **kwargs) -> None:
        from triton.runtime import interpreter

        builder = interpreter.interpreter_builder
        programs = grid[0]
        set_grid_dim, set_grid_idx = builder.set_grid_dim, builder.set_grid_idx
        builder.set_grid_dim = lambda *sizes: set_grid_dim(programs, 1, 1)
        indices = sorted({index % programs for index in chosen if index < programs})
        builder.set_grid_idx = lambda index, *_: set_grid_idx(indices[index], 0, 0)
        try:
            run(kernel, *args, grid=(len(indices),), **kwargs)
        finally:
            del builder.set_grid_dim, builder.set_grid_idx

    return launch
