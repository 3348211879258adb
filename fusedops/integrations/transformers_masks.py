"""The attention masks of transformers' models, as what the kernels can do without them: causality, windows, packing.

transformers hands a function of indices to the mask function of an attention implementation. Where that is one of its
own (causal, sliding window, packed sequences), a :class:`StructuredMask` says so, and holds no more than the padding;
anything else becomes the dense mask that ``sdpa`` gets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function, sdpa_mask

from fusedops.attention.block_mask import BlockMask


class Rule(NamedTuple):
    """Which keys a query sees: from ``left`` before to ``right`` after its own place (None: no limit), and only those
    of its own sequence where the ids of packed sequences, (batch, length), are given."""

    left: int | None = None
    right: int | None = None
    documents: torch.Tensor | None = None


class StructuredMask(torch.Tensor):
    """A bool mask (batch, 1, queries, keys) that is written out only when somebody else than fusedops looks at it.

    The last query stands at the last key. Whatever is done with such a tensor, by transformers or by a model, is done
    with the dense mask; only its shape, dtype and device are known without it.

    Attributes:
        left, right, documents: as in :class:`Rule`.
        padding: (batch, keys) bool, True: there is a token; None: everywhere.
    """

    left: int | None
    right: int | None
    documents: torch.Tensor | None
    padding: torch.Tensor | None
    _blocks: BlockMask | None

    @staticmethod
    def __new__(
        cls, rule: Rule, padding: torch.Tensor | None, size: tuple[int, int, int], device: Any
    ) -> StructuredMask:
        batch, queries, keys = size
        base = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device) if padding is None else padding[:, None, None]
        mask = torch.Tensor._make_subclass(cls, base.expand(batch, 1, queries, keys))
        mask.left, mask.right, mask.documents = rule
        mask.padding = padding
        mask._blocks = None
        return mask

    def blocks(self) -> BlockMask | None:
        """The packed sequences as a block mask, made once for all layers; None where there are none."""
        if self._blocks is None and self.documents is not None:
            self._blocks = BlockMask.from_document_ids(self.documents)
        return self._blocks

    def dense(self) -> torch.Tensor:
        """The mask written out, as ``sdpa`` would get it."""
        with torch._C.DisableTorchFunctionSubclass():
            (batch, _, queries, keys), device = self.shape, self.device
        distance = torch.arange(keys, device=device) - torch.arange(keys - queries, keys, device=device)[:, None]
        seen = torch.ones(batch, 1, queries, keys, dtype=torch.bool, device=device)
        if self.right is not None:
            seen &= distance <= self.right
        if self.left is not None:
            seen &= distance >= -self.left
        if self.documents is not None:
            seen &= self.documents[:, None, :, None] == self.documents[:, None, None, :]
        if self.padding is not None:
            seen &= self.padding[:, None, None]
        return seen

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _known_without():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(lambda x: x.dense() if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


@functools.cache
def _known_without() -> frozenset[Any]:
    tensor = torch.Tensor
    names = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_nested", "is_cuda", "is_meta")
    read = (getattr(tensor, name).__get__ for name in names)
    methods = (tensor.size, tensor.dim, tensor.stride, tensor.is_contiguous, tensor.storage_offset, tensor.numel)
    return frozenset({*read, *methods, tensor.is_floating_point, torch.is_floating_point})


def _code(function: Any) -> Any:
    return getattr(function, "__code__", None)


def _made_by(maker: str, *arguments: Any) -> Any:
    """The code of what one of transformers' makers of mask functions returns; None where there is no such maker."""
    make = getattr(masking_utils, maker, None)
    return None if make is None else _code(make(*arguments))


@functools.cache
def _codes() -> dict[Any, str]:
    """What each of transformers' functions of indices is, by its code: most are made anew for every mask."""
    codes = {
        _code(causal_mask_function): "causal",
        _code(getattr(masking_utils, "bidirectional_mask_function", None)): "bidirectional",
        _made_by("and_masks"): "and",
        _made_by("sliding_window_overlay", 1): "window",
        _made_by("sliding_window_bidirectional_overlay", 1): "both sides",
        _made_by("packed_sequence_mask_function", None): "packed",
        _made_by("remap_positions_for_packed_sequence", None, None): "remapped",
    }
    codes.pop(None, None)
    return codes


def read_rule(function: Callable[..., Any]) -> Rule | None:
    """The rule that a mask function follows; None: another one than those known here."""
    rule, remapped = _read(function)
    # Positions within a sequence count on by one: as long as both are of one sequence, places compare as they do.
    return None if rule is None or (remapped and rule.documents is None) else rule


def _read(function: Any) -> tuple[Rule | None, bool]:
    """(the rule, whether it is one of positions that begin anew in each packed sequence)"""
    code = _code(function)
    kind = _codes().get(code)
    if kind is None:
        return None, False
    held = dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    match kind:
        case "causal":
            return Rule(right=0), False
        case "bidirectional":
            return Rule(), False
        case "window":
            return Rule(left=int(held["sliding_window"]) - 1), False
        case "both sides":
            return Rule(int(held["sliding_window"]), int(held["sliding_window"])), False
        case "packed":
            return Rule(documents=held["packed_sequence_mask"]), False
        case "remapped":
            return _read(held["mask_function"])[0], True
    rules = [_read(part) for part in held["mask_functions"]]
    if any(rule is None for rule, _ in rules):
        return None, False
    given = [rule for rule, _ in rules if rule is not None]
    documents = [rule.documents for rule in given if rule.documents is not None]
    if len(documents) > 1:
        return None, False
    sides = ([getattr(rule, side) for rule in given if getattr(rule, side) is not None] for side in ("left", "right"))
    left, right = (min(side, default=None) for side in sides)
    return Rule(left, right, documents[0] if documents else None), any(remapped for _, remapped in rules)


def fused_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: Any = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask of ``attn_implementation="fusedops"``, with the arguments of transformers' ``sdpa_mask``.

    Args:
        batch_size: sequences.
        q_length, kv_length: queries and keys of each.
        q_offset, kv_offset: places of the first query and of the first key.
        mask_function: ``mask_function(batch, head, query, key) -> bool``, of places; transformers' own are recognised.
        attention_mask: (batch, keys), bool or integers: where there are tokens rather than padding; None: everywhere.
        allow_is_causal_skip: causality alone may be left to the attention function: no mask.
        allow_is_bidirectional_skip: so may a mask that hides nothing.
        device: where the mask belongs.
        **kwargs: handed to ``sdpa_mask``.

    Returns:
        None where every query sees every key, or is to be causal by its module's ``is_causal`` (as ``sdpa``'s masks); a
        :class:`StructuredMask` for padding with causality, windows, and packed sequences; else ``sdpa``'s dense mask:
        other mask functions, queries that stand at an unknown place of a static cache, compiled and traced models.

    Raises:
        Exception: what ``sdpa_mask`` raises, where it makes the mask.

    Examples:
        >>> import torch
        >>> from fusedops.integrations.transformers import fused_mask
        >>> print(fused_mask(2, 4, 4))  # causal: the attention function knows
        None
        >>> mask = fused_mask(2, 4, 4, attention_mask=torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]))
        >>> mask.right, mask.shape  # causal, with padding; written out only when somebody reads it
        (0, torch.Size([2, 1, 4, 4]))
        >>> mask.dense()[1, 0].int()
        tensor([[0, 0, 0, 0],
                [0, 1, 0, 0],
                [0, 1, 1, 0],
                [0, 1, 1, 1]], dtype=torch.int32)
    """
    plain = type(q_offset) is int and type(kv_offset) is int and type(kv_length) is int
    whole = attention_mask is None or (type(attention_mask) is torch.Tensor and attention_mask.dim() == 2)
    rule = None
    if plain and whole and not (torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None):
        rule = read_rule(mask_function)
    aligned = plain and q_offset - kv_offset == kv_length - q_length
    if rule is None or rule == Rule() or not aligned:
        return sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip, device=device, **kwargs,
        )  # fmt: skip
    padding = None
    if attention_mask is not None:
        padding = attention_mask.to(device=device, dtype=torch.bool)
        missing = kv_offset + kv_length - padding.shape[1]
        padding = torch.nn.functional.pad(padding, (0, max(missing, 0)))[:, kv_offset : kv_offset + kv_length]
        if bool(padding.all()):  # waits for the device, as sdpa's mask does
            padding = None
    # What hides nothing is not there: a window as wide as the keys, causality for the last query alone.
    left = None if rule.left is None or rule.left >= kv_length - 1 else rule.left
    right = None if rule.right is None or rule.right >= q_length - 1 else rule.right
    if padding is None and rule.documents is None and left is None:
        by_module = right == 0 and q_length == kv_length
        allowed = allow_is_causal_skip if rule.right == 0 else allow_is_bidirectional_skip
        if allowed and (by_module or right is None):
            return None
    return StructuredMask(Rule(left, right, rule.documents), padding, (batch_size, q_length, kv_length), device)
