"""Sequences of unequal lengths packed one after the other, as :func:`fusedops.attention_varlen` takes them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from fusedops.data.nested import map_tensors
from fusedops.runtime.checks import check_bool, check_count, describe, wrong_type, wrong_value

Data = torch.Tensor | dict[str, torch.Tensor]
TooLong = Literal["error", "truncate", "split", "skip"]
_TOO_LONG = ("error", "truncate", "split", "skip")


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Sequences one after the other, without padding between them.

    Attributes:
        data: (tokens, ...), or such tensors by name where the sequences were mappings.
        cu_seqlens: (sequences + 1,) int32: 0, then where each sequence ends.
        max_seqlen: length of the longest sequence.
        position_ids: (tokens,) int64: each token's place in its own sequence, for rotary embeddings; 0 in padding.
        indices: which of the given sequences these are, by number. With ``too_long="split"`` parts share a number.
    """

    data: Data
    cu_seqlens: torch.Tensor
    max_seqlen: int
    position_ids: torch.Tensor
    indices: tuple[int, ...]

    def __len__(self) -> int:
        """Sequences in this batch; those that only pad ``cu_seqlens`` do not count."""
        return len(self.indices)

    def attention_arguments(self) -> dict[str, Any]:
        """The arguments of :func:`fusedops.attention_varlen` (self-attention) after q, k and v."""
        return {
            "cu_seqlens_q": self.cu_seqlens,
            "cu_seqlens_k": self.cu_seqlens,
            "max_seqlen_q": self.max_seqlen,
            "max_seqlen_k": self.max_seqlen,
        }

    def unpack(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Split (tokens, ...), such as a model's output, into the sequences: views, in the order of ``indices``."""
        if not isinstance(tokens, torch.Tensor):
            wrong_type("unpack", "tokens", "a torch.Tensor", tokens)
        ends = self.cu_seqlens.tolist()[: len(self) + 1]
        if tokens.dim() == 0 or tokens.shape[0] != self.position_ids.shape[0]:
            wrong_value("unpack", "tokens", f"of shape ({self.position_ids.shape[0]}, ...)", tokens)
        return [tokens[first:last] for first, last in itertools.pairwise(ends)]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedSequences:
        """The same batch on another device.

        Args:
            device: a torch.device or its name.
            non_blocking: copy without the host waiting, where the batch is in pinned memory.
        """
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedSequences:
        """In pinned memory, from which copies to a GPU run beside its kernels."""
        return self._mapped(lambda tensor: tensor.pin_memory())

    def _mapped(self, function: Any) -> PackedSequences:
        new = copy.copy(self)
        for field in fields(self):
            object.__setattr__(new, field.name, map_tensors(getattr(self, field.name), function))
        return new


def pack_sequences(
    sequences: Iterable[Any],
    max_tokens: int,
    *,
    max_sequences: int | None = None,
    lookahead: int = 0,
    too_long: TooLong = "error",
    pad: bool = False,
    padding_value: float | Mapping[str, float] = 0,
    drop_last: bool = False,
) -> Iterator[PackedSequences]:
    """Batches of at most ``max_tokens`` tokens, for :func:`fusedops.attention_varlen`: no token is padding.

    A batch begins with the sequence that has waited longest and takes more as long as one fits. With ``lookahead`` it
    chooses the longest that fits among that many further ones (best fit decreasing over a window), so that batches are
    fuller and the order is no longer that of the input; no sequence waits for ever. The same input gives the same
    batches. Sequences are read one at a time: an endless stream is as good as a list.

    Args:
        sequences: an iterable of sequences: a tensor (length, ...), a list of numbers, or a mapping of names to such of
            one length (``{"input_ids": ..., "labels": ...}``), all alike. Empty ones are packed too.
        max_tokens: most tokens in a batch.
        max_sequences: most sequences in a batch; None: any number.
        lookahead: sequences that are held back to choose from.
        too_long: what becomes of a sequence of more than ``max_tokens``. ``"error"``; ``"truncate"``: its beginning is
            packed; ``"split"``: its parts are packed as sequences of their own; ``"skip"``: it is left out.
        pad: give every batch ``max_tokens`` tokens and, with ``max_sequences``, that many sequences (empty ones
            follow), so that shapes never change (CUDA graphs, static compilation). Padding lies past the last end,
            where ``attention_varlen`` gives zeros and zero gradients.
        padding_value: what padding tokens are; by name for mappings (``{"labels": -100}``; others 0).
        drop_last: leave out the last batch unless nothing more would have fitted for certain: it has ``max_tokens``
            tokens or ``max_sequences`` sequences.

    Yields:
        PackedSequences: on the sequences' device (the lengths on the CPU for lists).

    Raises:
        TypeError, ValueError: an argument or a sequence is none of these, or too long; the message names it.

    Examples:
        >>> import torch, fusedops
        >>> texts = [{"input_ids": list(range(n)), "labels": list(range(n))} for n in (3, 4, 2)]
        >>> for batch in fusedops.data.pack_sequences(texts, max_tokens=8):
        ...     print(batch.data["input_ids"].tolist(), batch.cu_seqlens.tolist(), batch.indices)
        [0, 1, 2, 0, 1, 2, 3] [0, 3, 7] (0, 1)
        [0, 1] [0, 2] (2,)
        >>> q = k = v = torch.randn(7, 4, 16)
        >>> first = next(fusedops.data.pack_sequences(texts, max_tokens=8))
        >>> fusedops.attention_varlen(q, k, v, **first.attention_arguments(), causal=True).shape
        torch.Size([7, 4, 16])
    """
    name = "pack_sequences"
    if not isinstance(sequences, Iterable) or isinstance(sequences, (str, bytes, Mapping)):
        wrong_type(name, "sequences", "an iterable of sequences", sequences)
    for argument, value in (("max_tokens", max_tokens), ("lookahead", lookahead)):
        check_count(name, argument, value)
    if not 1 <= max_tokens < 2**31:
        wrong_value(name, "max_tokens", "at least 1 and below 2³¹", max_tokens)
    if max_sequences is not None:
        check_count(name, "max_sequences", max_sequences)
        if max_sequences < 1:
            wrong_value(name, "max_sequences", "at least 1", max_sequences)
    if too_long not in _TOO_LONG:
        wrong_value(name, "too_long", f"one of {', '.join(map(repr, _TOO_LONG))}", too_long)
    for argument, value in (("pad", pad), ("drop_last", drop_last)):
        check_bool(name, argument, value)
    # The checks are the call's; a generator's would be those of its first step.
    return _pack(sequences, max_tokens, max_sequences, lookahead, too_long, pad, padding_value, drop_last)


def _pack(
    sequences: Iterable[Any],
    max_tokens: int,
    max_sequences: int | None,
    lookahead: int,
    too_long: TooLong,
    pad: bool,
    padding_value: float | Mapping[str, float],
    drop_last: bool,
) -> Iterator[PackedSequences]:
    parts = _fitting(sequences, max_tokens, too_long)
    waiting: list[_Part] = []

    def fill() -> None:
        while len(waiting) <= lookahead and (part := next(parts, None)) is not None:
            waiting.append(part)

    fill()
    while waiting:
        batch = [waiting.pop(0)]
        room = max_tokens - batch[0].length
        fill()
        while max_sequences is None or len(batch) < max_sequences:
            fitting = [part for part in waiting if part.length <= room]
            if not fitting:
                break
            best = max(fitting, key=lambda part: part.length)  # the oldest of equal ones
            waiting[:] = [part for part in waiting if part is not best]
            batch.append(best)
            room -= best.length
            fill()
        if drop_last and not waiting and room and len(batch) != max_sequences:
            return
        yield _joined(batch, max_tokens if pad else 0, max_sequences if pad else None, padding_value)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A sequence, or what of it is packed."""

    index: int
    length: int
    data: Data


def _fitting(sequences: Iterable[Any], max_tokens: int, too_long: TooLong) -> Iterator[_Part]:
    """The sequences as tensors; each of at most ``max_tokens``."""
    first: _Part | None = None
    for index, sequence in enumerate(sequences):
        data = _data(index, sequence)
        length = _length(index, data)
        part = _Part(index, length, data)
        if first is None:
            first = part
        _check_alike(part, first)
        if length <= max_tokens:
            yield part
        elif too_long == "error":
            raise ValueError(
                f"pack_sequences: sequences[{index}] has {length} tokens, more than max_tokens ({max_tokens});"
                ' give too_long="truncate", "split" or "skip"'
            )
        elif too_long == "truncate":
            yield _Part(index, max_tokens, _cut(data, 0, max_tokens))
        elif too_long == "split":
            for begin in range(0, length, max_tokens):
                end = min(begin + max_tokens, length)
                yield _Part(index, end - begin, _cut(data, begin, end))


def _data(index: int, sequence: Any) -> Data:
    if isinstance(sequence, Mapping):
        if not sequence:
            wrong_value("pack_sequences", f"sequences[{index}]", "a mapping that is not empty", sequence)
        return {name: _tensor(f"sequences[{index}][{name!r}]", value) for name, value in sequence.items()}
    return _tensor(f"sequences[{index}]", sequence)


def _tensor(argument: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        if isinstance(value, (str, bytes)) or not (isinstance(value, Sequence) or hasattr(value, "__array__")):
            wrong_type("pack_sequences", argument, "a tensor (length, ...) or a list of numbers", value)
        try:
            # An empty list has no dtype of its own: tokens, most likely.
            value = torch.as_tensor(value) if len(value) else torch.zeros(0, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"pack_sequences: {argument} must be a tensor (length, ...) or a list of numbers ({error})"
            ) from None
    if value.dim() == 0:
        wrong_value("pack_sequences", argument, "of at least one dimension", value)
    return value


def _length(index: int, data: Data) -> int:
    if isinstance(data, torch.Tensor):
        return data.shape[0]
    lengths = {name: value.shape[0] for name, value in data.items()}
    if len(set(lengths.values())) > 1:
        wrong_value("pack_sequences", f"sequences[{index}]", "tensors of one length", lengths)
    return next(iter(lengths.values()))


def _named(data: Data) -> dict[str, torch.Tensor]:
    return {"": data} if isinstance(data, torch.Tensor) else data


def _check_alike(part: _Part, first: _Part) -> None:
    """That the two can be joined: names, shapes after the length, dtypes, devices."""
    argument = f"sequences[{part.index}]"
    ours, theirs = _named(part.data), _named(first.data)
    if ours.keys() != theirs.keys():
        takes = f"as sequences[{first.index}] is: {_kind(first.data)}"
        raise ValueError(f"pack_sequences: {argument} must be {takes}; got {_kind(part.data)}")
    for name, value in ours.items():
        like = theirs[name]
        both_empty_lists = value.numel() == 0 or like.numel() == 0
        same_dtype = value.dtype == like.dtype or both_empty_lists
        if value.shape[1:] != like.shape[1:] or not same_dtype or value.device != like.device:
            label = f"{argument}[{name!r}]" if name else argument
            wrong_value("pack_sequences", label, f"as that of sequences[{first.index}] is, {describe(like)}", value)


def _kind(data: Data) -> str:
    return "a tensor" if isinstance(data, torch.Tensor) else f"a mapping of {', '.join(map(repr, data))}"


def _cut(data: Data, begin: int, end: int) -> Data:
    return data[begin:end] if isinstance(data, torch.Tensor) else {n: t[begin:end] for n, t in data.items()}


def _joined(
    batch: list[_Part], tokens: int, sequences: int | None, padding_value: float | Mapping[str, float]
) -> PackedSequences:
    """``tokens`` and ``sequences``: what is padded up to."""
    lengths = [part.length for part in batch]
    total = sum(lengths)
    padding = max(0, tokens - total)
    columns: dict[str, torch.Tensor] = {}
    for name in _named(batch[0].data):
        values = [_named(part.data)[name] for part in batch]
        if padding:
            fill = padding_value.get(name, 0) if isinstance(padding_value, Mapping) else padding_value
            values.append(values[0].new_full((padding, *values[0].shape[1:]), fill))
        columns[name] = torch.cat(values)
    data: Data = columns[""] if isinstance(batch[0].data, torch.Tensor) else columns
    device = next(iter(columns.values())).device
    empty = [0] * ((sequences or len(batch)) - len(batch))
    cu_seqlens = torch.tensor([0, *lengths, *empty]).cumsum(0).to(torch.int32)
    positions = torch.cat([*(torch.arange(length) for length in lengths), torch.zeros(padding, dtype=torch.int64)])
    indices = tuple(part.index for part in batch)
    return PackedSequences(data, cu_seqlens.to(device), max(lengths), positions.to(device), indices)
