"""Inference whose launches are recorded once and replayed: CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from fusedops.runtime.checks import check_bool, describe, wrong_type, wrong_value

_NAME = "graphed"
_TENSOR = object()  # stands for one among a result's leaves


def graphed(
    module: torch.nn.Module,
    sample_inputs: torch.Tensor | tuple[torch.Tensor, ...] | Mapping[str, torch.Tensor],
    *,
    static_outputs: bool = False,
    num_warmup_iters: int = 3,
) -> torch.nn.Module:
    """A module whose forward is recorded in a CUDA graph and replayed at each call, for inference at low latency.

    Where a step consists of many short kernels, launching them takes longer than they run; a replay launches all of
    them at once. A layer on :func:`torch.cuda.make_graphed_callables`, which warms up, records, copies a call's inputs
    to where the graph reads them, and replays. Nothing waits for the device.

    The graph computes what the module did when it was recorded, on inputs of the same shapes, dtypes and device; it
    reads the module's parameters where they lay, so that weights written in place are seen, and weights that are
    exchanged (``load_state_dict(assign=True)``, ``.to()``) are not: graph the module again. Dropout and other random
    numbers differ from replay to replay. Whatever the module does on the host (printing, branches on values, a cache
    that counts) happened while recording.

    Args:
        module: in ``eval()`` mode. It stays as it is.
        sample_inputs: its inputs: a tensor, a tuple of tensors, or tensors by the names of arguments; all on one GPU.
            Their contents do not matter. They are not written.
        static_outputs: return the graph's own result tensors, which the next call overwrites, rather than copies.
        num_warmup_iters: calls before the recording, in which launch configurations are looked up (and searched, where
            ``FUSEDOPS_AUTOTUNE=on``), kernels compiled and workspaces made.

    Returns:
        A module called as ``module`` is, with the names or the positions of ``sample_inputs``; results without
        gradients. Where the inputs are on the CPU: ``module`` itself.

    Raises:
        TypeError, ValueError: an argument, here or in a call of the result, is none of these; the message names it.

    Examples:
        >>> import torch, fusedops
        >>> model = fusedops.nn.MLP(16, 64).eval()
        >>> x = torch.randn(4, 16)
        >>> fast = fusedops.graphed(model, x)  # on a GPU: model.cuda() and x.cuda()
        >>> fast(x).shape
        torch.Size([4, 16])
    """
    if not isinstance(module, torch.nn.Module):
        wrong_type(_NAME, "module", "a torch.nn.Module", module)
    names, tensors = _inputs(sample_inputs)
    check_bool(_NAME, "static_outputs", static_outputs)
    if not isinstance(num_warmup_iters, int) or num_warmup_iters < 1:
        wrong_value(_NAME, "num_warmup_iters", "an int of at least 1", num_warmup_iters)
    if module.training:
        wrong_value(_NAME, "module", "in eval() mode: the graph is for inference", type(module).__name__)
    device = tensors[0].device
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.device != device:
            wrong_value(_NAME, f"sample_inputs[{name!r}]", f"on the device of the first input ({device})", tensor)
    if device.type == "cpu":
        return module
    if device.type != "cuda":
        wrong_value(_NAME, "sample_inputs", "on a CUDA or ROCm device, or on the CPU", tensors[0])
    return Graphed(module, names, tensors, static_outputs, num_warmup_iters)


def _inputs(given: Any) -> tuple[list[int | str], list[torch.Tensor]]:
    """Names, or positions, and tensors."""
    takes = "a tensor, a tuple of tensors or a mapping of names to tensors"
    if isinstance(given, torch.Tensor):
        given = (given,)
    if isinstance(given, Mapping):
        names, tensors = list(given), list(given.values())
    elif isinstance(given, (tuple, list)):
        names, tensors = list(range(len(given))), list(given)
    else:
        wrong_type(_NAME, "sample_inputs", takes, given)
    if not tensors:
        wrong_value(_NAME, "sample_inputs", f"{takes}, at least one", given)
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            wrong_type(_NAME, f"sample_inputs[{name!r}]", "a tensor", tensor)
    return names, tensors


class Graphed(torch.nn.Module):
    """What :func:`graphed` returns.

    Attributes:
        module: that was recorded.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        names: list[int | str],
        samples: list[torch.Tensor],
        static_outputs: bool,
        num_warmup_iters: int,
    ) -> None:
        super().__init__()
        self.module = module
        self._names, self._static_outputs = names, static_outputs
        self._takes = [(sample.shape, sample.dtype, sample.device) for sample in samples]
        self._structure: Any = None
        by_name = any(isinstance(name, str) for name in names)

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            result = module(**{str(n): t for n, t in zip(names, tensors, strict=True)}) if by_name else module(*tensors)
            leaves, self._structure = torch.utils._pytree.tree_flatten(result)
            # What is no tensor is the same in every call.
            self._constants = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

        # The graph reads its inputs where these lie: the caller's own are not to be written over.
        static = tuple(sample.detach().clone() for sample in samples)
        with torch.no_grad(), _without_autocast_cache():
            self._replay: Any = torch.cuda.make_graphed_callables(run, static, num_warmup_iters=num_warmup_iters)
        self.eval()

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        tensors = self._in_order(inputs, named)
        with torch.no_grad():
            results = iter(self._replay(*tensors))
            if not self._static_outputs:
                results = iter([result.clone() for result in results])
        leaves = [next(results) if constant is _TENSOR else constant for constant in self._constants]
        return torch.utils._pytree.tree_unflatten(leaves, self._structure)

    def _in_order(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> list[torch.Tensor]:
        # Positions stand for names too, as in any call.
        names = dict(enumerate(self._names))
        given: dict[int | str, Any] = {names.get(place, place): value for place, value in enumerate(inputs)}
        given.update(named)
        if set(given) != set(self._names):
            got, takes = (", ".join(map(str, keys)) for keys in (given, self._names))
            raise TypeError(f"graphed module: takes the inputs it was recorded with ({takes}); got {got or 'none'}")
        tensors = []
        for name, (shape, dtype, device) in zip(self._names, self._takes, strict=True):
            tensor = given[name]
            if not isinstance(tensor, torch.Tensor):
                wrong_type("graphed module", f"input {name}", "a tensor", tensor)
            if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
                raise ValueError(
                    f"graphed module: input {name} must be as it was recorded, a {str(dtype).removeprefix('torch.')}"
                    f" tensor of shape {tuple(shape)} on {device}; got {describe(tensor)}. A graph has one set of"
                    " shapes: pad, or make one graph for each"
                )
            if tensor.requires_grad and torch.is_grad_enabled():
                wrong_value("graphed module", f"input {name}", "one that requires no gradient (inference)", tensor)
            tensors.append(tensor)
        return tensors

    def train(self, mode: bool = True) -> Graphed:
        if mode:
            raise RuntimeError("graphed module: the graph is for inference; train the module it was made of")
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "graphed module: it reads its parameters where they lay when it was recorded and cannot be moved or"
            " converted; do so with the module it was made of, and graph that again"
        )


def _without_autocast_cache() -> Any:
    """make_graphed_callables refuses autocast's cache of cast weights, which would be left out of the graph."""
    if not torch.is_autocast_enabled("cuda"):
        return nullcontext()
    return torch.autocast("cuda", dtype=torch.get_autocast_dtype("cuda"), cache_enabled=False)
