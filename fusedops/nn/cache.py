"""Keys and values of the tokens so far, kept for generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops.attention.cache import LARGEST
from fusedops.attention.functional import attention
from fusedops.attention.functional_decode import MOST_QUERIES, append_kv, attention_decode
from fusedops.runtime.checks import check_count, wrong_type, wrong_value

_PLAIN = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class KVCache:
    """The keys and values of every layer of a model, and how many tokens each sequence of the batch has.

    Contiguous: room for ``max_length`` tokens a sequence. Ring (``window``): room for the tokens that a sliding window
    can still see. Paged (``page_size``): sequences take pages from a common pool as they grow and give them back when
    they end (Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention").
    int8 and float8 caches hold a float32 scale a token and head besides.

    A step of generation calls :meth:`attend` once a layer, then :meth:`advance` once. The lengths live on the device,
    which is not waited for unless the cache seems full; so a step can be captured in a CUDA graph or compiled. There
    the host keeps no count: :meth:`reserve` room beforehand for all tokens that will come, and :meth:`refresh` after
    the replays of a graph.

    It is no module: neither a checkpoint nor ``model.to(dtype)`` should meet it.

    Args:
        num_layers: layers of the model.
        batch_size: sequences.
        num_kv_heads: heads of keys and values.
        max_length: most tokens a sequence may have. With ``window`` there is no limit and this may be None.
        head_dim: size of a head of keys.
        value_dim: size of a head of values; None: ``head_dim``.
        window: tokens before its own that a query sees, or None. Given, the cache is a ring, and every call attends
            within that window.
        page_size: tokens a page, at least 16; None: not paged.
        num_pages: pages in the pool, of each layer; None: enough for ``batch_size`` sequences of ``max_length``.
        dtype: of the cache: a floating dtype, ``torch.int8`` or a float8; None: torch's default dtype.
        device: where it lies; None: torch's default device.

    Attributes:
        seqlens: (batch_size,) int32 on the device: tokens of each sequence.
        block_table: (batch_size, pages of a sequence) int32, the pages of each sequence; None where not paged.
        keys, values: the caches of each layer, as :func:`fusedops.attention_decode` takes them.
        key_scales, value_scales: their scales; None where they have none.

    Raises:
        TypeError, ValueError: an argument is none of these; the message names it.

    Examples:
        >>> import torch, fusedops
        >>> cache = fusedops.nn.KVCache(num_layers=1, batch_size=2, num_kv_heads=2, max_length=32, head_dim=16)
        >>> q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16)
        >>> cache.attend(q, k, v).shape  # a prompt of five tokens
        torch.Size([2, 4, 5, 16])
        >>> cache.advance(5)
        >>> cache.attend(q[:, :, :1], k[:, :, :1], v[:, :, :1]).shape  # one token more
        torch.Size([2, 4, 1, 16])
        >>> cache.advance(1)
        >>> cache.seqlens.tolist()
        [6, 6]
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        num_kv_heads: int,
        max_length: int | None,
        head_dim: int,
        value_dim: int | None = None,
        *,
        window: int | None = None,
        page_size: int | None = None,
        num_pages: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        counts = {"num_layers": num_layers, "batch_size": batch_size, "num_kv_heads": num_kv_heads}
        counts |= {"head_dim": head_dim}
        optional = {"value_dim": value_dim, "page_size": page_size, "num_pages": num_pages}
        optional |= {"max_length": max_length}
        for name, count in (counts | {n: c for n, c in optional.items() if c is not None}).items():
            _check_positive(name, count)
        if window is not None:
            check_count("KVCache", "window", window)
            if page_size is not None:
                wrong_value("KVCache", "page_size", "None where window is given (a ring has no pages)", page_size)
        elif max_length is None:
            wrong_type("KVCache", "max_length", "an int (None with window alone)", max_length)
        if page_size is None and num_pages is not None:
            wrong_value("KVCache", "num_pages", "None where page_size is", num_pages)
        if page_size is not None and page_size < 16:
            wrong_value("KVCache", "page_size", "at least 16", page_size)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in (*_PLAIN, *LARGEST):
            wrong_value("KVCache", "dtype", "a floating dtype, torch.int8, float8_e4m3fn or float8_e5m2", dtype)
        self.window, self.page_size, self.max_length = window, page_size, max_length
        if window is not None:
            # What a step of MOST_QUERIES queries sees, itself included.
            self.max_length, rows, places = None, batch_size, window + MOST_QUERIES
        elif page_size is not None:
            assert max_length is not None
            a_sequence = -(-max_length // page_size)
            rows, places = num_pages or batch_size * a_sequence, page_size
        else:
            assert max_length is not None
            rows, places = batch_size, max_length
        quantized = dtype in LARGEST
        shape = rows, num_kv_heads, places

        def make(size: int | None) -> list[torch.Tensor]:
            if size is None:
                return [torch.zeros(shape, dtype=torch.float32, device=device) for _ in range(num_layers)]
            return [torch.zeros((*shape, size), dtype=dtype, device=device) for _ in range(num_layers)]

        self.keys, self.values = make(head_dim), make(value_dim or head_dim)
        self.key_scales = make(None) if quantized else None
        self.value_scales = make(None) if quantized else None
        self.seqlens = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.block_table: torch.Tensor | None = None
        self._free: list[int] = []
        self._pages: list[list[int]] = [[] for _ in range(batch_size)]
        if page_size is not None:
            self.block_table = torch.zeros((batch_size, a_sequence), dtype=torch.int32, device=device)
            self._free = list(range(rows))[::-1]
        # What the host knows of the lengths without waiting for the device: none is longer, and whether they are these.
        self._at_most = [0] * batch_size
        self._exact = True
        self._unknown = False  # compiled steps have advanced
        self._appended = 0  # tokens that the last call of attend has written past the lengths
        self._room = 0  # tokens for which there is room for certain

    @property
    def batch_size(self) -> int:
        """How many sequences there is room for."""
        return self.seqlens.shape[0]

    @property
    def num_layers(self) -> int:
        """How many layers' keys and values it keeps."""
        return len(self.keys)

    @property
    def free_pages(self) -> int:
        """Pages that no sequence has."""
        return len(self._free)

    def nbytes(self) -> int:
        """Bytes that the caches, their scales and tables take on the device."""
        lists = self.keys, self.values, self.key_scales or [], self.value_scales or []
        tensors = [*(t for tensors in lists for t in tensors), self.seqlens]
        return sum(t.nbytes for t in tensors) + (self.block_table.nbytes if self.block_table is not None else 0)

    # ---- a step -----------------------------------------------------------------------------------------------------

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: int = 0,
        *,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Write the keys and values of new tokens into a layer's cache, and attend to all up to each query's own.

        The lengths stay: :meth:`advance` once all layers have attended. Up to 16 tokens (a step, a speculation) run as
        :func:`fusedops.attention_decode`. A prompt runs as :func:`fusedops.attention` on its own keys where the cache
        is empty, or on the cache where all sequences are known to be equally long and it is contiguous and not
        quantised; else in parts of 16 tokens.

        Args:
            q: (batch, heads, tokens, head_dim); ``heads`` is a multiple of the cache's.
            k: (batch, kv_heads, tokens, head_dim).
            v: (batch, kv_heads, tokens, value_dim).
            layer: whose cache it is.
            alibi_slopes, sinks, softcap, scale: as in :func:`fusedops.attention`.

        Returns:
            (batch, heads, tokens, value_dim), dtype of q.

        Raises:
            TypeError, ValueError: an argument has the wrong type, dtype, shape or device, or the cache has no room for
                the tokens; the message names it.
        """
        if not isinstance(layer, int) or not 0 <= layer < self.num_layers:
            wrong_value("KVCache.attend", "layer", f"from 0 to {self.num_layers - 1}", layer)
        tokens = self._check_new(q, k, v)
        compiling = torch.compiler.is_compiling()
        if not compiling:  # a graph that read the host's count would be compiled again for each
            self.reserve(tokens)
        self._appended = tokens
        options: dict[str, Any] = {"alibi_slopes": alibi_slopes, "sinks": sinks, "softcap": softcap, "scale": scale}
        options["window"] = None if self.window is None else (self.window, 0)
        if tokens <= MOST_QUERIES:
            return self._decode(q, k, v, layer, 0, options)
        if not compiling and not any(self._at_most):
            self._append(k, v, layer)
            return attention(q, k, v, causal=True, **options)
        length = 0 if compiling else self._at_most[0]
        plain = self.window is None and self.page_size is None and self.key_scales is None
        if plain and not compiling and self._exact and all(other == length for other in self._at_most):
            self._append(k, v, layer)
            keys, values = (t[layer][:, :, : length + tokens] for t in (self.keys, self.values))
            return attention(q, keys.to(q.dtype), values.to(q.dtype), causal="bottom_right", **options)
        pieces = zip(*(t.split(MOST_QUERIES, dim=2) for t in (q, k, v)), strict=True)
        parts = [self._decode(a, b, c, layer, i * MOST_QUERIES, options) for i, (a, b, c) in enumerate(pieces)]
        return torch.cat(parts, dim=2)

    def advance(self, count: int | torch.Tensor) -> None:
        """Count the tokens that the last calls of :meth:`attend` have written.

        Args:
            count: how many became part of the sequences: a number, or (batch,) integers where they differ, as for
                prompts padded at their ends, or tokens of a speculation that were accepted. What lies past a
                sequence's new length is never seen, and is written over by what comes next.

        Raises:
            TypeError, ValueError: ``count`` is neither, or more than :meth:`attend` has written.
        """
        if torch.compiler.is_compiling():
            self.seqlens.add_(count.to(self.seqlens.device) if isinstance(count, torch.Tensor) else count)
            self._unknown = True
            return
        if isinstance(count, torch.Tensor):
            if count.shape != self.seqlens.shape or count.dtype not in (torch.int32, torch.int64):
                wrong_value("KVCache.advance", "count", f"an int or ({self.batch_size},) int32 or int64", count)
            if self.window is not None and self._appended > MOST_QUERIES:
                # A ring holds a step's tokens beyond the window, no more: padding has overwritten what is still seen.
                takes = f"one int where more than {MOST_QUERIES} tokens were written to a ring"
                wrong_value("KVCache.advance", "count", takes, count)
            self.seqlens.add_(count.to(self.seqlens.device))
            count, self._exact = self._appended, False
        else:
            check_count("KVCache.advance", "count", count)
            if count > self._appended:
                wrong_value("KVCache.advance", "count", f"at most {self._appended}, what attend has written", count)
            self.seqlens.add_(count)
        self._at_most = [length + count for length in self._at_most]
        self._room -= count
        self._appended = 0

    # ---- sequences that come and go ---------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> None:
        """Make sure that each sequence has room for so many further tokens; with pages, take them from the pool.

        :meth:`attend` does so itself. Call it before a CUDA graph is captured, for all tokens that its replays write.

        Raises:
            ValueError: the cache has no room.
        """
        check_count("KVCache.reserve", "tokens", tokens)
        if self._unknown:
            self.refresh()
        if tokens <= self._room or self.window is not None:
            return
        assert self.max_length is not None
        if max(self._at_most) + tokens > self.max_length:
            self.refresh()
            if (longest := max(self._at_most)) + tokens > self.max_length:
                raise ValueError(
                    f"KVCache: {tokens} further tokens do not fit: a sequence has {longest} of max_length"
                    f" {self.max_length}; reset it, or make a larger cache"
                )
        if self.page_size is not None:
            self._take_pages(tokens, self.page_size)
        self._room = tokens

    def refresh(self) -> None:
        """Wait for the device and read the lengths, after steps of which the host does not know: a graph's replays."""
        if not (self.seqlens.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._at_most, self._exact, self._unknown = self.seqlens.tolist(), True, False
            self._room = 0

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """End sequences: their lengths become 0 and their pages free.

        Args:
            rows: numbers of the sequences; None: all.
        """
        if self._unknown:
            self.refresh()
        rows = list(range(self.batch_size) if rows is None else rows)
        for row in rows:
            if not isinstance(row, int) or not 0 <= row < self.batch_size:
                wrong_value("KVCache.reset", "rows", f"numbers from 0 to {self.batch_size - 1}", rows)
        self.seqlens[rows] = 0
        self._room = 0
        for row in rows:
            self._at_most[row] = 0
            self._free += self._pages[row][::-1]
            self._pages[row] = []

    def reorder(self, indices: torch.Tensor) -> None:
        """Let sequence i go on where sequence ``indices[i]`` is, as a beam search does.

        Args:
            indices: (batch,) integers; a sequence may occur more than once.
        """
        if not isinstance(indices, torch.Tensor) or indices.shape != self.seqlens.shape or indices.is_floating_point():
            wrong_value("KVCache.reorder", "indices", f"({self.batch_size},) integers", indices)
        if self._unknown:
            self.refresh()
        indices = indices.to(self.seqlens.device, torch.int64)
        rows = indices.tolist()
        if not all(0 <= row < self.batch_size for row in rows):
            wrong_value("KVCache.reorder", "indices", f"numbers from 0 to {self.batch_size - 1}", rows)
        lists = [self.keys, self.values, self.key_scales or [], self.value_scales or []]
        if self.page_size is None:
            for tensors in lists:
                for tensor in tensors:
                    tensor.copy_(tensor[indices])
        else:
            self._copy_pages(rows, [t for tensors in lists for t in tensors])
        self.seqlens.copy_(self.seqlens[indices])
        self._at_most = [self._at_most[row] for row in rows]
        self._room = 0

    def _copy_pages(self, rows: list[int], tensors: list[torch.Tensor]) -> None:
        """Give each sequence pages of its own with the contents of another's, all read before any is written."""
        wanted = [len(self._pages[row]) for row in rows]
        if sum(wanted) > len(self._free) + sum(map(len, self._pages)):
            raise ValueError(f"KVCache: the pool of {self.keys[0].shape[0]} pages does not hold {sum(wanted)}")
        source = [page for row in rows for page in self._pages[row]]
        pool = [page for pages in self._pages for page in pages] + self._free[::-1]
        target, self._free = pool[: len(source)], pool[len(source) :][::-1]
        for tensor in tensors:
            tensor[target] = tensor[source]
        taken = iter(target)
        self._pages = [[next(taken) for _ in range(count)] for count in wanted]
        for row in range(self.batch_size):
            self._write_table(row)

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _check_new(self, q: Any, k: Any, v: Any) -> int:
        """The number of new tokens."""
        for name, value in (("q", q), ("k", k), ("v", v)):
            if not isinstance(value, torch.Tensor) or value.dim() != 4:
                wrong_type("KVCache.attend", name, "a tensor (batch, heads, tokens, size)", value)
        keys, values = self.keys[0], self.values[0]
        tokens = q.shape[2]
        for name, value, cache in (("k", k, keys), ("v", v, values)):
            shape = self.batch_size, cache.shape[1], tokens, cache.shape[3]
            if value.shape != shape:
                wrong_value("KVCache.attend", name, f"of shape {shape}", value)
        if q.shape[0] != self.batch_size or q.shape[1] % keys.shape[1] or q.shape[3] != keys.shape[3]:
            shape_text = f"({self.batch_size}, a multiple of {keys.shape[1]}, tokens, {keys.shape[3]})"
            wrong_value("KVCache.attend", "q", f"of shape {shape_text}", q)
        return tokens

    def _decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, begin: int, options: dict[str, Any]
    ) -> torch.Tensor:
        """Of the new tokens from number ``begin`` on."""
        return attention_decode(q, k=k, v=v, **self._cache(layer, begin), **options)

    def _append(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> None:
        begin = 0
        if self.window is not None:
            # Of what a ring has no room for, only the last is ever seen again.
            begin = max(0, k.shape[2] - self.keys[0].shape[2])
        append_kv(k[:, :, begin:], v[:, :, begin:], **self._cache(layer, begin))

    def _cache(self, layer: int, begin: int) -> dict[str, Any]:
        return {
            "k_cache": self.keys[layer],
            "v_cache": self.values[layer],
            "cache_seqlens": self.seqlens + begin if begin else self.seqlens,
            "block_table": self.block_table,
            "ring": self.window is not None,
            "k_scale": None if self.key_scales is None else self.key_scales[layer],
            "v_scale": None if self.value_scales is None else self.value_scales[layer],
        }

    def _take_pages(self, tokens: int, page_size: int) -> None:
        def lacking() -> list[int]:
            lengths = [-(-(length + tokens) // page_size) for length in self._at_most]
            return [max(0, wanted - len(pages)) for wanted, pages in zip(lengths, self._pages, strict=True)]

        wanted = lacking()
        if not any(wanted):
            return
        if sum(wanted) > len(self._free):
            self.refresh()
            wanted = lacking()
            if sum(wanted) > len(self._free):
                raise ValueError(
                    f"KVCache: {tokens} further tokens need {sum(wanted)} pages; {len(self._free)} of"
                    f" {self.keys[0].shape[0]} are free: reset sequences that have ended, or give num_pages"
                )
        for row, count in enumerate(wanted):
            if count:
                self._pages[row] += [self._free.pop() for _ in range(count)]
                self._write_table(row)

    def _write_table(self, row: int) -> None:
        assert self.block_table is not None
        pages = self._pages[row]
        new = torch.tensor(pages, dtype=torch.int32)
        if self.block_table.is_cuda:
            new = new.pin_memory()  # so that the copy waits for nothing
        self.block_table[row, : len(pages)].copy_(new, non_blocking=True)

    def __repr__(self) -> str:
        kind = "ring" if self.window is not None else "contiguous" if self.page_size is None else "paged"
        dtype = str(self.keys[0].dtype).removeprefix("torch.")
        return (
            f"KVCache({kind}, {self.num_layers} layers, {self.batch_size} sequences, max_length={self.max_length},"
            f" {dtype}, {self.nbytes() / 2**20:.1f} MiB on {self.seqlens.device})"
        )


def _check_positive(argument: str, value: Any) -> None:
    check_count("KVCache", argument, value)
    if value < 1:
        wrong_value("KVCache", argument, "at least 1", value)
