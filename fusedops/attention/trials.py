"""Attention's tuning problems with inputs of their own, and the problems that a call of the public functions meets.

A problem says that there is a window, a rule, or that there are packed sequences, not which. Trials have: a window of a
quarter of the keys, at most 1,024; sequences, or documents of a block mask, of equal length, at most four; rules of
their own (trial_rules.py); a mask for each head, or where that would be large one for all; the diagonal that ends at
the last query and key where there are more keys than queries, else the one that begins at the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch

from fusedops.attention import reference
from fusedops.attention.block_mask import BlockMask
from fusedops.attention.operands import WORTH_DESCRIBING, Operands
from fusedops.attention.options import Needs, Options
from fusedops.attention.tuning import (
    ATTENTION,
    FEATURES,
    MOST_HEADS,
    AttentionProblem,
    Pass,
    copies_by_descriptors,
    default_config,
    sequences_of,
    too_small,
    window_of,
)
from fusedops.autotune.buckets import bucket
from fusedops.autotune.operator import Operator
from fusedops.autotune.resolve import using
from fusedops.autotune.trial import Numbers, Trial
from fusedops.runtime.device import DeviceFacts, device_facts
from fusedops.runtime.dropout import keep_scale
from fusedops.runtime.launch import dtype_named

# Scores that plain torch computes at once; rows of queries that are compared, at each end; of a mask's gradient.
_AT_ONCE = 1 << 25
_COMPARED, _COMPARED_OF_A_MASK = 1024, 64
# A float mask has one head for each of the queries' up to this many elements.
_MASK_ELEMENTS = 1 << 28
_HEADS = 32  # of one batch, at most, where the queries' number a key head lets it
_SOFTCAP, _DROPOUT = 20.0, 0.1

_NEEDS: dict[Pass, Needs] = {
    "backward_kv": Needs(False, True, True, False, False, False),
    "backward_q": Needs(True, False, False, False, False, False),
    "backward_mask": Needs(False, False, False, True, False, False),
}


class _Part(NamedTuple):
    """A dense member of the batch, or a packed sequence: where it lies, and how long it is."""

    batch: int
    first_query: int
    queries: int
    first_key: int
    keys: int


def _heads_of(problem: AttentionProblem) -> tuple[int, int]:
    """(batch, heads): as many in all as the bucket has, or a little fewer where groups do not divide it."""
    group = problem.queries
    groups = max(1, problem.heads // group)
    if bucket(groups * group, MOST_HEADS) != problem.heads:
        groups = -(-problem.heads // group)
    if bucket(groups * group, MOST_HEADS) != problem.heads:
        raise NotImplementedError(f"no multiple of {group} query heads is in the bucket of {problem.heads}")
    if "packed" in problem.features:
        return 1, groups * group
    each = max((n for n in range(1, groups + 1) if groups % n == 0 and n * group <= _HEADS), default=1)
    return groups // each, each * group


def _lengths_of(problem: AttentionProblem) -> tuple[int, int]:
    """Of queries and keys: the bucket's own, or a little less where only shorter ones than it are not described."""
    lengths = problem.seqlen_q, problem.seqlen_k
    if _describable(problem) and not problem.described and min(lengths) == WORTH_DESCRIBING:
        rows, keys = (n - 16 if n == WORTH_DESCRIBING else n for n in lengths)
        return rows, keys
    return lengths


def _undescribable(tensor: torch.Tensor) -> torch.Tensor:
    """Of the shape, expanded; of one head, its rows two bytes off from where they would be aligned."""
    batch, heads, length, size = tensor.shape
    if batch > 1 or heads > 1:
        return (tensor[:1] if batch > 1 else tensor[:, :1]).expand(tensor.shape)
    wide = torch.empty(batch, length, heads, size + 1, dtype=tensor.dtype, device=tensor.device)
    return wide[..., :size].transpose(1, 2).copy_(tensor)


def _rounded_to_tf32(x: torch.Tensor) -> torch.Tensor:
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


class AttentionTrial(Trial):
    """Heads as models hold them, (batch, length, heads, size) in memory.

    Where a problem says that tensor descriptors do not stand for tensors that they could stand for, one of these is
    expanded from its first batch or head, which is one reason why, and leaves it as well aligned.
    """

    def __init__(self, problem: AttentionProblem, device: torch.device, empty: bool) -> None:
        self.problem = problem
        self.features = problem.features.split("+") if problem.features else []
        self.dtype = dtype_named(problem.dtype)
        _check(problem, self.features)
        self.batch, self.heads = _heads_of(problem)
        self.key_heads = self.heads // problem.queries
        self.numbers = Numbers(device, empty)
        rows, keys = _lengths_of(problem)
        self.total = rows
        count = sequences_of(rows, keys) if "packed" in self.features else 1
        self.lengths = rows // count, keys // count
        self.parts = [
            _Part(b, s * self.lengths[0], self.lengths[0], s * self.lengths[1], self.lengths[1])
            for b in range(self.batch)
            for s in range(count)
        ]
        sizes = (
            (self.heads, rows, problem.d_k), (self.key_heads, keys, problem.d_k),
            (self.key_heads, keys, problem.d_v), (self.heads, rows, problem.d_v),
        )  # fmt: skip
        self.tensors = [self._drawn(*size) for size in sizes]
        self.options = self._options(count)
        if not empty:
            self._check_device(device)
        self.out, self.statistics = self._results_of_the_forward(empty)

    def _drawn(self, heads: int, length: int, size: int) -> torch.Tensor:
        """(batch, heads, length, size)."""
        return self.numbers.normal(self.batch, length, heads, size, dtype=self.dtype).transpose(1, 2)

    def _options(self, count: int) -> Options:
        problem, has = self.problem, self.features.__contains__
        numbers, (rows, keys) = self.numbers, self.lengths
        options = Options(
            attn_mask=self._mask(),
            alibi_slopes=self._positive(1, self.heads) if has("alibi") else None,
            sinks=numbers.normal(self.heads, dtype=self.dtype) if has("sinks") else None,
            seed=numbers.seed() if has("dropout") else None,
            bottom_right=not problem.causal or keys > rows,
            left=window_of(keys) if problem.window else None,
            right=0 if problem.causal else None,
            softcap=_SOFTCAP if has("softcap") else 0.0,
            scale=problem.d_k**-0.5,
            dropout_p=_DROPOUT if has("dropout") else 0.0,
            precision=problem.precision,
        )
        if has("packed"):
            starts = (torch.arange(count + 1, dtype=torch.int32, device=numbers.device) * n for n in self.lengths)
            options = options._replace(sequences=tuple(starts))
        if has("score_mod"):
            from fusedops.attention.trial_rules import score_mod

            rule = score_mod(self._positive(self.heads))
            options = options._replace(score_mod=rule.name, score_args=rule.args)
        if has("blocks"):
            count = sequences_of(rows, keys)
            documents = [torch.arange(n, device=numbers.device) * count // n for n in (rows, keys)]
            blocks = BlockMask.from_document_ids(*documents)
            lists = blocks.lists(*options.bounds(rows, keys))
            rule_of_blocks = blocks.mask_mod
            return options._replace(blocks=lists, mask_mod=rule_of_blocks.name, mask_args=rule_of_blocks.args)
        if has("mask_mod"):
            from fusedops.attention.trial_rules import mask_mod

            options = options._replace(mask_mod=mask_mod().name)
        return options

    def _positive(self, *shape: int) -> torch.Tensor:
        """Slopes: small, float32."""
        return self.numbers.normal(*shape, dtype=torch.float32, mean=0.02, deviation=0.005)

    def _mask(self) -> torch.Tensor | None:
        rows, keys = self.lengths
        if "mask" in self.features:
            heads = self.heads if self.heads * rows * keys <= _MASK_ELEMENTS else 1
            return self.numbers.normal(1, heads, rows, keys, dtype=self.dtype)
        if "bool_mask" not in self.features:
            return None
        # Nine of ten, the first key, and in every row its place on the diagonal: no row sees nothing.
        mask = self.numbers.normal(1, 1, rows, keys, dtype=torch.float16) < 1.28
        mask[..., 0] = True
        if self.numbers.generator is not None:
            torch.diagonal(mask, keys - rows if keys > rows else 0, 2, 3).fill_(True)
        return mask

    @property
    def _moving(self) -> tuple[int, ...]:
        """Which of q, k, v and the output's gradient are moved by tiles."""
        both: dict[Pass, tuple[int, ...]] = {"forward": (1, 2), "backward_kv": (0, 3), "backward_q": (1, 2)}
        return both.get(self.problem.kernel, ())

    def _inputs(self) -> list[torch.Tensor]:
        """q, k, v, the output's gradient, which tensor descriptors can or cannot stand for, as the problem says."""
        moving = [self.tensors[i] for i in self._moving]
        q, k, v, _ = self.tensors
        if not moving or Operands.of(q, k, v, self.options).describable(*moving) == self.problem.described:
            return self.tensors
        if self.problem.described:
            raise NotImplementedError("the device has no tensor descriptors")
        first = self._moving[0]
        return [_undescribable(t) if i == first else t for i, t in enumerate(self.tensors)]

    def _check_device(self, device: torch.device) -> None:
        """The problem is what the launcher will make of these inputs."""
        self.tensors = self._inputs()
        q, k, v, _ = self.tensors
        operands = Operands.of(q, k, v, self.options)
        found = operands.problem(self.problem.kernel, self.problem.described)
        if found != self.problem:
            raise NotImplementedError(f"inputs on this device make another problem: {ATTENTION.key(found)}")

    def _results_of_the_forward(self, empty: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and what a backward needs of each row."""
        q, k, v, do = self.tensors
        if empty or self.problem.kernel == "forward":
            shape = (2, self.batch, self.heads, self.total)
            return torch.empty_like(do), torch.empty(shape, dtype=torch.float32, device=do.device)
        from fusedops.attention.kernels_forward import attention_forward

        operands = Operands.of(q, k, v, self.options)
        problem = operands.problem("forward", operands.describable(k, v))
        # The default: what a store has for the forward is not what is tried here.
        with using(ATTENTION, problem, default_config(problem, device_facts(q.device))):
            out, _, statistics = attention_forward(q, k, v, self.options)
        return out, statistics

    def run(self) -> Sequence[torch.Tensor]:
        """out and lse; or the gradients of k and v, of q, or of the mask."""
        q, k, v, do = self._inputs()
        kernel = self.problem.kernel
        if kernel == "forward":
            from fusedops.attention.kernels_forward import attention_forward

            return attention_forward(q, k, v, self.options)[:2]
        from fusedops.attention.kernels_backward import attention_backward

        needs = _NEEDS[kernel]
        grads = attention_backward(do, None, q, k, v, self.out, self.statistics, self.options, needs)
        return [grad for grad, need in zip(grads, needs, strict=True) if need]

    # What is compared: the first and the last key head, with all query heads that read them; of these the first and
    # the last rows, or all keys. Of a mask's gradient the first and last rows, of its first and last head.

    @property
    def _corners(self) -> list[tuple[int, int]]:
        """(batch, key head)."""
        return list(dict.fromkeys(((0, 0), (self.batch - 1, self.key_heads - 1))))

    def _rows(self) -> list[tuple[int, int]]:
        """(first, end) of the rows of each sequence that are compared."""
        rows, most = self.lengths[0], _COMPARED_OF_A_MASK if self.problem.kernel == "backward_mask" else _COMPARED
        return [(0, rows)] if rows <= 2 * most else [(0, most), (rows - most, rows)]

    def _group(self, key_head: int) -> range:
        return range(key_head * self.problem.queries, (key_head + 1) * self.problem.queries)

    def compared(self, results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        kernel = self.problem.kernel
        if kernel == "backward_mask":
            mask = results[0][0]
            heads = sorted({0, mask.shape[0] - 1})
            return [torch.cat([mask[heads, first:end] for first, end in self._rows()], 1)]
        if kernel == "backward_kv":
            return [torch.stack([grad[b, g] for b, g in self._corners]) for grad in results]
        found = []
        for result in results:
            parts = [
                result[b, self._group(g)[0] : self._group(g)[-1] + 1, part.first_query + first : part.first_query + end]
                for b, g in self._corners
                for part in self.parts
                if part.batch == b
                for first, end in self._rows()
            ]
            found.append(_finite(torch.cat(parts, 1)))
        return found

    def plain(self) -> Sequence[torch.Tensor]:
        return self._computed(exact=False)

    def exact(self) -> Sequence[torch.Tensor]:
        return self._computed(exact=True)

    def _computed(self, exact: bool) -> Sequence[torch.Tensor]:
        with reference._no_autocast(self.tensors[0]):
            if self.problem.kernel == "backward_mask":
                return [self._mask_gradient(exact)]
            corners = [
                self._corner(part, index, g, exact)
                for b, g in self._corners
                for index, part in enumerate(self.parts)
                if part.batch == b
            ]
        if self.problem.kernel == "backward_kv":
            # Keys of the sequences of a corner follow one another.
            per_corner = len(corners) // len(self._corners)
            grads = []
            for place in (0, 1):
                by_corner = [corners[i : i + per_corner] for i in range(0, len(corners), per_corner)]
                grads.append(torch.stack([torch.cat([parts[place] for parts in corner]) for corner in by_corner]))
            return grads
        return [_finite(torch.cat(parts, 1)) for parts in zip(*corners, strict=True)]

    def _corner(self, part: _Part, index: int, key_head: int, exact: bool) -> tuple[torch.Tensor, ...]:
        """Of one sequence and key head: (out, lse), (dk, dv) or (dq,)."""
        heads, kernel = self._group(key_head), self.problem.kernel
        ranges = [(0, part.queries)] if kernel == "backward_kv" else self._rows()
        found: list[tuple[torch.Tensor, ...]] = []
        for first, end in ranges:
            for low, high in _steps(first, end, len(heads) * part.keys):
                slice_ = _Slice(self, part, index, heads, low, high, exact)
                if kernel == "forward":
                    with torch.no_grad():
                        found.append(tuple(t[0] for t in slice_.forward()))
                else:
                    wanted = (slice_.q,) if kernel == "backward_q" else (slice_.k, slice_.v)
                    grads = tuple(grad[0] for grad in slice_.gradients(wanted))
                    if kernel == "backward_kv":
                        grads = tuple(grad[0] for grad in grads)
                        found = [tuple(a + b for a, b in zip(found[0], grads, strict=True)) if found else grads]
                    else:
                        found.append(grads)
        if kernel == "backward_kv":
            return found[0] if exact else tuple(grad.to(self.dtype) for grad in found[0])
        return tuple(torch.cat(parts, 1) for parts in zip(*found, strict=True))

    def _mask_gradient(self, exact: bool) -> torch.Tensor:
        """(heads compared, rows compared, keys): the sum over what the mask is broadcast to."""
        mask = self.options.attn_mask
        assert mask is not None
        each = mask.shape[1] > 1
        heads = [range(h, h + 1) for h in sorted({0, self.heads - 1})] if each else [range(self.heads)]
        blocks = []
        for chosen in heads:
            rows = []
            for first, end in self._rows():
                total = torch.zeros(end - first, self.lengths[1], dtype=torch.float64, device=mask.device)
                for index, part in enumerate(self.parts):
                    for head in chosen:
                        slice_ = _Slice(self, part, index, range(head, head + 1), first, end, exact)
                        assert slice_.mask is not None
                        (grad,) = slice_.gradients((slice_.mask,))
                        total += grad[0, 0]
                rows.append(total if exact else total.to(self.dtype))
            blocks.append(torch.cat(rows))
        return torch.stack(blocks)


def _steps(first: int, end: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, _AT_ONCE // width)
    return ((low, min(low + step, end)) for low in range(first, end, step))


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Infinities, where a row sees nothing, as numbers that can be compared."""
    return x.nan_to_num(nan=float("nan"), posinf=100.0, neginf=-100.0)


class _Slice:
    """Rows ``first`` … ``end`` of some query heads that share a key head, of one sequence, in plain torch."""

    def __init__(
        self, trial: AttentionTrial, part: _Part, index: int, heads: range, first: int, end: int, exact: bool
    ) -> None:
        dtype = torch.float64 if exact else trial.dtype
        tf32 = not exact and trial.problem.dtype == "float32" and trial.problem.precision == "tf32"
        self.options, group, at = trial.options, heads[0] // trial.problem.queries, slice(heads[0], heads[-1] + 1)

        def leaf(tensor: torch.Tensor, product: bool = True) -> torch.Tensor:
            tensor = _rounded_to_tf32(tensor) if tf32 and product else tensor
            return tensor.detach().to(dtype, copy=True).requires_grad_()

        q, k, v, do = trial.tensors
        rows = slice(part.first_query + first, part.first_query + end)
        keys = slice(part.first_key, part.first_key + part.keys)
        self.q, self.k = leaf(q[part.batch, at, rows][None]), leaf(k[part.batch, group, keys][None, None])
        self.v, self.do = leaf(v[part.batch, group, keys][None, None]), do[part.batch, at, rows][None].to(dtype)
        options, self.mask = trial.options, None
        mask = options.attn_mask
        if mask is not None:
            mask = mask[:, at if mask.shape[1] > 1 else slice(None), first:end]
            self.mask = mask if mask.dtype == torch.bool else leaf(mask, False)
        options = options._replace(
            attn_mask=self.mask,
            alibi_slopes=None if options.alibi_slopes is None else options.alibi_slopes[:, at],
            sinks=None if options.sinks is None else options.sinks[at],
        )
        device = q.device
        head = torch.arange(heads[0], heads[-1] + 1, device=device).view(1, -1, 1, 1)
        i = torch.arange(first, end, device=device).view(1, 1, -1, 1)
        keep = None
        if options.seed is not None:
            row = (part.batch * trial.heads + head) * trial.total + part.first_query + i
            keep = keep_scale(options.seed, row.flatten(), part.keys, options.dropout_p)
            keep = keep.view(1, len(heads), end - first, part.keys)
        self.grid = reference._Grid(
            torch.full((1, 1, 1, 1), index, device=device),
            head,
            i,
            torch.arange(part.keys, device=device).view(1, 1, 1, -1),
            part.keys - part.queries if options.bottom_right else 0,
            None,
            keep,
        )
        self.options = options

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse), (1, heads, rows, size) and (1, heads, rows)."""
        s = reference._scores(self.q, self.k, self.grid, self.options).final.to(self.q.dtype)
        p, top, total = reference._softmax(s, self.options)
        if self.grid.keep is not None:
            p = (p * self.grid.keep).to(p.dtype)
        empty = total == 0
        divisor = total.masked_fill(empty, 1.0)
        lse = (divisor.log() + top).masked_fill(empty, float("-inf"))[..., 0]
        return (p / divisor) @ self.v, lse if lse.dtype == torch.float64 else lse.float()

    def gradients(self, wanted: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(self.forward()[0], wanted, self.do)


def _check(problem: AttentionProblem, features: list[str]) -> None:
    """NotImplementedError where no call has this problem."""
    known = [name for name in FEATURES if name in features]
    if known != features:
        raise NotImplementedError(f"features must be names of {', '.join(FEATURES)} in this order; got {features}")
    if {"mask", "bool_mask"} <= {*features}:
        raise NotImplementedError("a mask is bool or floating")
    if "blocks" in features and ("mask_mod" not in features or "packed" in features):
        raise NotImplementedError("a block mask brings a mask_mod, and is none of packed sequences")
    if problem.kernel == "backward_mask" and "mask" not in features:
        raise NotImplementedError("the gradient of a mask needs a floating mask")
    if problem.precision != "ieee" and problem.dtype != "float32":
        raise NotImplementedError("float32's products alone have a precision")
    if problem.described and not _describable(problem):
        raise NotImplementedError("no tensor descriptors stand for these tensors")


def _describable(problem: AttentionProblem) -> bool:
    """Whether tensor descriptors can stand for contiguous tensors of these sizes, on a device that has them."""
    return (
        problem.kernel != "backward_mask"
        and problem.itemsize == 2
        and "packed" not in problem.features
        and min(problem.seqlen_q, problem.seqlen_k) >= WORTH_DESCRIBING
        and problem.d_k % 8 == problem.d_v % 8 == 0
    )


def trial_of(problem: AttentionProblem, device: torch.device, empty: bool = False) -> AttentionTrial:
    """The trial of a problem.

    Raises:
        NotImplementedError: no inputs, or none on this device, make this problem; the message says why.

    Examples:
        >>> import torch
        >>> problem = AttentionProblem.of("backward_kv", 64, 64, 256, 256, heads=8, queries=4)
        >>> trial = trial_of(problem, torch.device("cpu"), empty=True)
        >>> [tuple(tensor.shape) for tensor in trial.tensors]
        [(1, 8, 256, 64), (1, 2, 256, 64), (1, 2, 256, 64), (1, 8, 256, 64)]
    """
    return AttentionTrial(problem, device, empty)


def problems_of(
    *,
    facts: DeviceFacts,
    batch: int,
    heads: int,
    seqlen_q: int,
    d: int,
    kv_heads: int | None = None,
    seqlen_k: int | None = None,
    dv: int | None = None,
    dtype: str = "bfloat16",
    precision: str = "ieee",
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    softcap: bool = False,
    dropout: bool = False,
    mask: Literal["bool", "float"] | None = None,
    alibi: bool = False,
    sinks: bool = False,
    score_mod: bool = False,
    mask_mod: bool = False,
    blocks: bool = False,
    packed: bool = False,
    training: bool = True,
    mask_gradient: bool = False,
) -> list[tuple[Operator[Any, Any], AttentionProblem]]:
    """What attention and its backward look up, for contiguous tensors.

    Args:
        facts: of the device.
        batch: or how many packed sequences.
        heads, kv_heads: of queries, and of keys and values (None: as many).
        seqlen_q, seqlen_k: lengths (None: of keys as of queries); of each packed sequence, on average.
        d, dv: head sizes of queries and keys, and of values (None: the same).
        dtype, precision: of the tensors, and of float32 products: ``ieee``, ``tf32`` or ``tf32x3``.
        causal: either rule.
        window: (left, right), as for :func:`fusedops.attention`.
        softcap, dropout, alibi, sinks, score_mod, mask_mod: there is one.
        mask: the dtype of attn_mask.
        blocks: there is a block mask, or there are document ids.
        packed: :func:`fusedops.attention_varlen`.
        training: the gradients of queries, keys and values too.
        mask_gradient: in training, that of a float mask.

    Returns:
        (operator, problem), one a kernel; none where the kernels do not serve these heads on the device.

    Examples:
        >>> from fusedops.runtime.device import TARGETS
        >>> found = problems_of(facts=TARGETS["sm_90"], batch=8, heads=32, kv_heads=8, seqlen_q=2048, d=128, causal=True)
        >>> [(problem.kernel, problem.heads, problem.described) for _, problem in found]
        [('forward', 256, True), ('backward_kv', 256, True), ('backward_q', 256, True)]
    """  # noqa: E501
    kv_heads, seqlen_k, dv = kv_heads or heads, seqlen_q if seqlen_k is None else seqlen_k, dv or d
    kind = dtype_named(dtype)
    if too_small(facts, d, dv, kind.itemsize) is not None:
        return []
    if packed:
        batch, seqlen_q, seqlen_k = 1, batch * seqlen_q, batch * seqlen_k
    left, right = window or (None, None)
    right = 0 if causal else right
    most = seqlen_q + seqlen_k  # a limit that no pair of positions passes is none
    present = (
        softcap, dropout, mask == "float", mask == "bool", alibi, score_mod, mask_mod or blocks, sinks, blocks, packed,
    )  # fmt: skip
    kernels: list[Pass] = ["forward"]
    if training:
        kernels += ["backward_kv", "backward_q"]
        if mask == "float" and mask_gradient:
            kernels.append("backward_mask")
    found: list[tuple[Operator[Any, Any], AttentionProblem]] = []
    for kernel in kernels:
        problem = AttentionProblem.of(
            kernel, d, dv, seqlen_q, seqlen_k,
            heads=batch * heads, queries=heads // kv_heads, dtype=dtype,
            precision=precision if kind == torch.float32 and facts.capability >= 80 else "ieee",
            causal=right is not None and right < most,
            window=left is not None and left < most,
            features="+".join(name for name, here in zip(FEATURES, present, strict=True) if here),
        )  # fmt: skip
        described = (
            copies_by_descriptors(facts) and _describable(problem) and min(seqlen_q, seqlen_k) >= WORTH_DESCRIBING
        )
        found.append((ATTENTION, problem._replace(described=described)))
    return found
