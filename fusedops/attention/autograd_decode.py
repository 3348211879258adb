"""The operators of decoding (``torch.ops.fusedops.attention_decode``, ``append_kv``).

They have no derivative: where a gradient is required they raise, rather than lose it.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from fusedops.attention import reference_decode as reference
from fusedops.attention.cache import LARGEST, READ, WRITTEN, Cache
from fusedops.attention.options import empty_heads
from fusedops.attention.reference import compute_dtype
from fusedops.attention.tuning_decode import too_small_to_decode
from fusedops.runtime.backend import device_reasons, float8_reasons
from fusedops.runtime.device import device_facts
from fusedops.runtime.library import register

_MAX_SIZE = 256


def refuse_gradient(function: str) -> NoReturn:
    raise RuntimeError(
        f"fusedops.{function}: a cache has no gradient, but an argument requires one. Call it under torch.no_grad();"
        " fusedops.attention has gradients."
    )


class AttentionDecode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> NoReturn:
        refuse_gradient("attention_decode")


class AppendKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> NoReturn:
        refuse_gradient("append_kv")


def unsupported(cache: Cache, dtype: torch.dtype) -> list[str]:
    """Every reason why the kernels cannot serve a cache and queries, or new keys, of a dtype."""
    stored = cache.keys.dtype
    plain = (dtype,) if stored in LARGEST else (dtype, stored, cache.values.dtype)
    reasons = device_reasons(cache.keys.device, plain)
    if not reasons and stored in LARGEST and stored != torch.int8:
        reasons += float8_reasons(cache.keys.device, (stored,))
    for what, size in (("keys", cache.keys.shape[3]), ("values", cache.values.shape[3])):
        if not 1 <= size <= _MAX_SIZE:
            reasons.append(f"head size {size} of {what}: the kernels take 1 to {_MAX_SIZE}")
    if not reasons:
        device, sizes = cache.keys.device, (cache.keys.shape[3], cache.values.shape[3])
        # First of the largest heads: where those fit, a size that is traced need not become a constant.
        small = _room(device.type, device.index, _MAX_SIZE, _MAX_SIZE, dtype)
        if small is not None:
            small = _room(device.type, device.index, int(sizes[0]), int(sizes[1]), dtype)
        reasons += [small] if small else []
    return reasons


def _room(kind: str, index: int | None, d: int, dv: int, dtype: torch.dtype) -> str | None:
    return too_small_to_decode(device_facts(torch.device(kind, index or 0)), d, dv, dtype.itemsize)


# A device's facts never change: traced code takes the answer as a constant.
_room._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _append_kv(k: torch.Tensor, v: torch.Tensor, *rest: Any) -> None:
    *cache, kernel = rest
    given = Cache(*cache)
    if not kernel or unsupported(given, k.dtype):
        forward = reference.append_kv
    else:
        from fusedops.attention.kernels_append import append_kv as forward
    forward(k, v, given)
    written = [t for t in (given.keys, given.values, given.key_scales, given.value_scales) if t is not None]
    # What autograd has saved of a cache is no longer what it was.
    torch.autograd.graph.increment_version([t for t in written if not t.is_inference()])


def _append_kv_fake(k: torch.Tensor, v: torch.Tensor, *rest: Any) -> None:
    return None


def _attention_decode(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cache = Cache(*rest[:7])
    added, left, alibi_slopes, sinks, softcap, scale, num_splits, precision, kernel = rest[7:]
    if not kernel or unsupported(cache, q.dtype):
        out, lse = reference.attention_decode(
            q, cache, added, left=left, alibi_slopes=alibi_slopes, sinks=sinks, softcap=softcap, scale=scale
        )
        return empty_heads(q, out.shape).copy_(out), lse.contiguous()
    from fusedops.attention.kernels_decode import attention_decode

    return attention_decode(q, cache, added, left, alibi_slopes, sinks, softcap, scale, num_splits, precision)


def _attention_decode_fake(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows = q.shape[:3]
    return empty_heads(q, (*rows, rest[1].shape[3])), q.new_empty(rows, dtype=compute_dtype(q.dtype))


# The cache: fusedops.attention.cache.Cache. k, v: (batch, kv_heads, tokens, size). kernel: the Triton backend serves
# the call; else the definition does, within the operator too, since what it computes depends on the lengths' values.
append_kv_op = register(
    f"append_kv(Tensor k, Tensor v, {WRITTEN}, bool kernel) -> ()",
    kernel=_append_kv,
    fake=_append_kv_fake,
    function=AppendKV,
)
# added, left, …: as fusedops.attention.reference_decode.attention_decode; alibi_slopes: (batch or 1, heads).
attention_decode_op = register(
    f"attention_decode(Tensor q, {READ}, int added, SymInt? left, Tensor? alibi_slopes, Tensor? sinks, float softcap,"
    " float scale, int? num_splits, str precision, bool kernel) -> (Tensor out, Tensor lse)",
    kernel=_attention_decode,
    fake=_attention_decode_fake,
    function=AttentionDecode,
)
