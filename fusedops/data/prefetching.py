"""Batches copied to a GPU while it computes on those before them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Generic, TypeVar

import torch

from fusedops.data.nested import map_tensors, tensors_within
from fusedops.runtime.checks import check_count, wrong_type, wrong_value

_Batch = TypeVar("_Batch")


def prefetch(loader: Iterable[_Batch], device: torch.device | str | int, depth: int = 2) -> Prefetcher[_Batch]:
    """Iterate over a loader's batches on a device; the next ``depth`` of them are on their way there already.

    On a CUDA or ROCm device each tensor is put into pinned memory (from which alone a copy runs beside the kernels),
    copied on a stream of its own without the host waiting, and what uses a batch waits on the device for its copy
    alone. Pinned buffers come from torch's allocator, which reuses them. Where the loader pins
    (``DataLoader(pin_memory=True)`` does so in a thread), nothing is pinned again. On the CPU the loader's own batches
    are handed on, unchanged and none ahead; on other devices they are moved there.

    The loader is read in the thread and order of a plain loop, ``depth`` batches ahead: let a DataLoader's workers do
    the loading. An error it raises comes when its place in the order has come. A loop that is left early has taken up
    to ``depth`` further batches from the loader.

    Args:
        loader: an iterable of batches: a tensor, or mappings, lists, tuples and dataclasses of tensors, however nested.
            An object with a method ``to(device, non_blocking=...)`` is moved by it; anything else stays as it is.
        device: where the batches are wanted; ``"cuda"`` means the current device when a loop begins.
        depth: batches under way ahead of the one in use, at least 1. They take the device's memory.

    Returns:
        Prefetcher: iterable anew for each epoch, with the loader's ``len`` where it has one.

    Raises:
        TypeError, ValueError: an argument is none of these; the message names it.

    Examples:
        >>> import torch, fusedops
        >>> batches = [{"input": torch.ones(2), "name": "first"}, {"input": torch.zeros(2), "name": "second"}]
        >>> [batch["name"] for batch in fusedops.data.prefetch(batches, "cpu")]
        ['first', 'second']
    """
    return Prefetcher(loader, device, depth)


class Prefetcher(Generic[_Batch]):
    """What :func:`prefetch` returns: an iterable of a loader's batches on a device, anew for each epoch.

    Args:
        loader: whose batches these are; an attribute too, as the next two.
        device: where they arrive.
        depth: how many are under way ahead of the one in use.

    Raises:
        TypeError, ValueError: as of :func:`prefetch`. ``len`` of it raises TypeError where the loader has no length.

    Examples:
        >>> import fusedops
        >>> batches = fusedops.data.prefetch([1, 2, 3], "cpu")
        >>> len(batches), list(batches)
        (3, [1, 2, 3])
    """

    def __init__(self, loader: Iterable[_Batch], device: torch.device | str | int, depth: int = 2) -> None:
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            wrong_type("prefetch", "loader", "an iterable of batches", loader)
        check_count("prefetch", "depth", depth)
        if depth < 1:
            wrong_value("prefetch", "depth", "at least 1", depth)
        self.loader, self.device, self.depth = loader, _device(device), depth

    def __len__(self) -> int:
        if not isinstance(self.loader, Sized):
            raise TypeError(f"prefetch: the loader has no length ({type(self.loader).__name__})")
        return len(self.loader)

    def __iter__(self) -> Iterator[_Batch]:
        if self.device.type == "cpu":
            return iter(self.loader)
        if self.device.type == "cuda":
            return self._copied_ahead()
        return (map_tensors(batch, lambda leaf: leaf.to(self.device)) for batch in self.loader)

    def __repr__(self) -> str:
        return f"prefetch({self.loader!r}, {str(self.device)!r}, depth={self.depth})"

    def _copied_ahead(self) -> Iterator[_Batch]:
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        device = torch.device("cuda", index)
        stream = torch.cuda.Stream(device)
        batches = iter(self.loader)
        under_way: deque[tuple[_Batch, torch.cuda.Event]] = deque()
        error: BaseException | None = None
        ended = False
        while True:
            while not ended and len(under_way) <= self.depth:
                try:
                    batch = next(batches)
                    under_way.append(_copied(batch, device, stream))
                except StopIteration:
                    ended = True
                except Exception as raised:
                    ended, error = True, raised
            if not under_way:
                if error is not None:
                    raise error
                return
            batch, arrived = under_way.popleft()
            current = torch.cuda.current_stream(device)
            current.wait_event(arrived)
            for tensor in tensors_within(batch):
                if tensor.device == device:
                    tensor.record_stream(current)  # its memory is the copying stream's: not to be reused too early
            yield batch
            del batch  # else two are held while the next one is on its way


def _copied(batch: Any, device: torch.device, stream: torch.cuda.Stream) -> tuple[Any, torch.cuda.Event]:
    """The batch on the device as soon as the event has happened."""

    def pinned_and_sent(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.device.type == "cpu" and leaf.layout is torch.strided and not leaf.is_pinned():
                leaf = leaf.pin_memory()
        elif callable(getattr(leaf, "pin_memory", None)):
            leaf = leaf.pin_memory()
        return leaf.to(device, non_blocking=True)

    with torch.cuda.stream(stream):
        return map_tensors(batch, pinned_and_sent), stream.record_event()


def _device(device: Any) -> torch.device:
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        wrong_type("prefetch", "device", "a torch.device, its name or a GPU's number", device)
    if isinstance(device, int):
        return torch.device("cuda", device)
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"prefetch: device must name a device; got {device!r} ({error})") from None
