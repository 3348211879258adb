"""What context parallel attention checks: each rank's arguments, and that the ranks agree about them."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fusedops.attention.arguments import Modifiers, check_modifiers, check_tensors
from fusedops.attention.autograd import gradient_asked
from fusedops.attention.options import Options
from fusedops.distributed.context_parallel_plan import ORDERS
from fusedops.runtime.checks import check_bool, wrong_type, wrong_value
from fusedops.runtime.precision import autocast_dtype

FUNCTION = "context_parallel_attention"
METHODS = ("ring", "all_to_all")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# What the ranks of a group have agreed about before.
_agreed: weakref.WeakKeyDictionary[Any, set[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def check_group(function: str, group: Any) -> Any:
    """The process group; None where there is but one process, in it or at all.

    Raises:
        TypeError, ValueError: it is no group, or this process is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        if group is not None:
            wrong_value(function, "group", "None before torch.distributed.init_process_group", group)
        return None
    if group is None:
        group = dist.group.WORLD
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            takes = 'a process group, or a DeviceMesh of one dimension: mesh["context"] of a larger one'
            wrong_value(function, "group", takes, group)
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        wrong_value(function, "group", "a group that this process is in", group)
    if not isinstance(group, dist.ProcessGroup):
        wrong_type(function, "group", "a process group, a DeviceMesh of one dimension or None", group)
    return None if dist.get_world_size(group) == 1 else group


def check_order(function: str, order: Any) -> None:
    if order not in ORDERS:
        (wrong_value if isinstance(order, str) else wrong_type)(
            function, "order", " or ".join(f'"{o}"' for o in ORDERS), order
        )


def check_call(q: Any, k: Any, v: Any, group: Any, order: Any, method: Any, return_lse: Any) -> tuple[Any, int]:
    """(process group or None, ranks): what one rank can know before it has heard of the others."""
    check_tensors(FUNCTION, ("q", "k", "v"), q, k, v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if hasattr(tensor, "to_local"):
            wrong_type(FUNCTION, name, f"this rank's own tensor: {name}.to_local()", type(tensor).__name__)
        if tensor.dim() != 4:
            wrong_value(FUNCTION, name, "of four dimensions (batch, heads, length of the shard, head size)", tensor)
    batch, heads, length, size = q.shape
    kv_heads = k.shape[1]
    if k.shape[0] != batch or k.shape[2] != length or k.shape[3] != size:
        wrong_value(FUNCTION, "k", f"of shape ({batch}, heads, {length}, {size}), as q is", k)
    if heads != kv_heads and (heads % kv_heads if kv_heads else True):
        wrong_value(FUNCTION, "k", f"of a number of heads that divides q's {heads}", k)
    if v.shape[:3] != k.shape[:3]:
        wrong_value(FUNCTION, "v", f"of shape ({batch}, {kv_heads}, {length}, head size), as k is", v)
    check_order(FUNCTION, order)
    if method not in METHODS:
        (wrong_value if isinstance(method, str) else wrong_type)(
            FUNCTION, "method", " or ".join(f'"{m}"' for m in METHODS), method
        )
    check_bool(FUNCTION, "return_lse", return_lse)
    group = check_group(FUNCTION, group)
    return group, 1 if group is None else dist.get_world_size(group)


def check_options(q: torch.Tensor, given: Modifiers, document_ids: Any, world: int, method: str) -> Options:
    """The options, all but seed and precision."""
    whole = world * q.shape[2]
    if method == "ring":
        asked = {
            "attn_mask": given.attn_mask,
            "alibi_slopes": given.alibi_slopes,
            "dropout_p": given.dropout_p or None,
            "document_ids": document_ids,
        }
        for name, value in asked.items():
            if value is not None:
                takes = 'not given to method="ring"; method="all_to_all" takes it'
                wrong_value(FUNCTION, name, takes, value)
    return check_modifiers(FUNCTION, given, q, q.shape[0], (whole, whole))


def check_shard(q: torch.Tensor, k: torch.Tensor, world: int, order: str, method: str) -> None:
    """What the ranks, which agree, have to keep."""
    heads, length = q.shape[1:3]
    kv_heads = k.shape[1]
    if order == "zigzag" and length % 2:
        takes = f'of an even length for order="zigzag", two chunks of the {2 * world} that the sequence is cut into'
        wrong_value(FUNCTION, "q", takes, q)
    if method == "all_to_all":
        if heads % world:
            takes = f'of a number of heads that the {world} ranks divide for method="all_to_all"'
            wrong_value(FUNCTION, "q", takes, q)
        if kv_heads and kv_heads % world and world % kv_heads:
            takes = (
                f'of a number of heads that divides the {world} ranks, or is divided by them, for method="all_to_all"'
            )
            wrong_value(FUNCTION, "k", takes, k)


_NAMES = (
    "q's number of dimensions", "q's batch", "q's heads", "k's heads", "q's length (the shard's)", "q's head size",
    "v's head size", "q's dtype", "method", "order", "causal or window", "causal or window", "softcap", "scale",
    "q's requires_grad", "k's requires_grad", "v's requires_grad", "return_lse", "sinks",
)  # fmt: skip


def check_agreement(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Any,
    order: str,
    method: str,
    options: Options,
    return_lse: bool,
) -> None:
    """Raise on every rank unless all have called with the same; else some would wait for ever.

    Asked, with one small collective that the host waits for, the first time that a group sees such a call; every time
    with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.
    """
    numbers = (
        4, q.shape[0], q.shape[1], k.shape[1], q.shape[2], q.shape[3], v.shape[3], _DTYPES.index(autocast_dtype(q)),
        METHODS.index(method), ORDERS.index(order), -1 if options.left is None else options.left,
        -1 if options.right is None else options.right, _bits(options.softcap), _bits(options.scale),
        gradient_asked(q), gradient_asked(k), gradient_asked(v), return_lse, options.sinks is not None,
    )  # fmt: skip
    known = _agreed.setdefault(group, set())
    detailed = dist.get_debug_level() is dist.DebugLevel.DETAIL  # type: ignore[attr-defined]
    if numbers in known and not detailed:
        return
    mine = torch.tensor(numbers, dtype=torch.int64, device=q.device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    columns: Sequence[Sequence[int]] = torch.stack(every, 1).tolist()
    for name, column in zip(_NAMES, columns, strict=True):
        if len(set(column)) > 1:
            raise ValueError(
                f"{FUNCTION}: {name} must be the same on all ranks; got, rank by rank, {_shown(name, column)}"
            )
    known.add(numbers)


def _bits(number: float | None) -> int:
    return -1 if number is None else struct.unpack("<q", struct.pack("<d", number))[0]


def _shown(name: str, column: Sequence[int]) -> str:
    tables = {"method": METHODS, "order": ORDERS, "q's dtype": _DTYPES}
    values: list[Any] = list(column)
    if name in tables:
        values = [str(tables[name][value]).removeprefix("torch.") for value in column]
    elif name in ("softcap", "scale"):
        values = [None if value == -1 else struct.unpack("<d", struct.pack("<q", value))[0] for value in column]
    elif name.startswith("causal"):
        values = [None if value == -1 else value for value in column]
    elif name.endswith(("requires_grad", "return_lse", "sinks")):
        values = [bool(value) for value in column]
    return ", ".join(map(str, values))
