"""Ring attention: each rank keeps its queries; keys and values travel from rank to rank.

Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context". In step t rank r computes with
the keys of rank r - t, and meanwhile sends them on and receives those of the next step. In the backward dq is summed
where it is, in float32; dk and dv follow their keys from rank to rank, in float32, and from the last one go home. All
that is sent in a step is received in it, so ranks need nothing of each other but the same arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fusedops.attention import reference
from fusedops.attention.options import Options
from fusedops.distributed.context_parallel_parts import Parts, Whole, row_delta, sinks_gradient
from fusedops.distributed.context_parallel_plan import Layout

_KEYS, _GRADIENTS = 1, 2  # tags, for backends that have them: keys and gradients are not mixed up

Transfer = tuple[torch.Tensor, int]


class Ring(NamedTuple):
    """A group of processes as this rank sees it, and how a sequence lies on it."""

    group: Any
    rank: int
    layout: Layout

    def post(self, sends: list[Transfer], receives: list[Transfer], tag: int) -> list[Any]:
        """Begin to exchange contiguous tensors with ranks of the group; :func:`_wait` ends it."""
        operations = []
        for act, listed in ((dist.isend, sends), (dist.irecv, receives)):
            for tensor, rank in listed:
                # As bytes: no backend takes all dtypes.
                peer = dist.get_global_rank(self.group, rank)
                operations.append(dist.P2POp(act, tensor.view(torch.uint8), peer, self.group, tag))
        return dist.batch_isend_irecv(operations) if operations else []


def _wait(works: list[Any]) -> None:
    """On a GPU the stream waits, not the host."""
    for work in works:
        work.wait()


class _Block(NamedTuple):
    """The keys and values that a rank has in a step; None where neither it nor a rank after it needs them."""

    step: int
    source: int
    tensors: tuple[torch.Tensor, torch.Tensor] | None


def _blocks(ring: Ring, k: torch.Tensor, v: torch.Tensor) -> Iterator[_Block]:
    """The blocks of all steps, in each of which the next one is already under way.

    Beside k and v themselves it takes two buffers of their size: one is read and sent, the other receives.
    """
    layout = ring.layout
    held: torch.Tensor | None = None
    spare: torch.Tensor | None = None
    tensors: tuple[torch.Tensor, torch.Tensor] | None = (k, v)
    for step in range(layout.steps() + 1):
        source = (ring.rank - step) % layout.world
        sends: list[Transfer] = []
        receives: list[Transfer] = []
        if step < layout.reach(source):
            if held is None:
                held = torch.cat((k.reshape(-1), v.reshape(-1)))
            sends.append((held, (ring.rank + 1) % layout.world))
        arriving = step < layout.reach((source - 1) % layout.world)
        if arriving:
            spare = k.new_empty(k.numel() + v.numel()) if spare is None else spare
            receives.append((spare, (ring.rank - 1) % layout.world))
        works = ring.post(sends, receives, _KEYS)
        yield _Block(step, source, tensors)
        _wait(works)
        held, spare = spare, held
        tensors = _views(held, k, v) if arriving and held is not None else None


def _views(flat: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two parts of a buffer, in the shapes of k and v."""
    return flat[: k.numel()].view(k.shape), flat[k.numel() :].view(v.shape)


class RingAttention(torch.autograd.Function):
    """Saves what one rank's attention would: its own inputs, output and two numbers a row."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        ring: Ring,
        options: Options,
        kernels: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = Parts(options, kernels)
        whole = Whole(parts, q, v.shape[3])
        for block in _blocks(ring, k, v):
            if block.tensors is not None:
                for call in ring.layout.calls(ring.rank, block.source):
                    whole.add(call.rows, *parts.forward(call, q, *block.tensors))
        if sinks is not None:
            whole.add_sinks(sinks)
        out, lse, statistics = whole.results(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, statistics)
        ctx.ring, ctx.parts = ring, parts
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, grad_lse: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                'fusedops context_parallel_attention: method="ring" has no second derivative. Use'
                ' method="all_to_all" under `with fusedops.backend("torch"):`, which supports it.'
            )
        q, k, v, sinks, out, statistics = ctx.saved_tensors
        ring, parts = ctx.ring, ctx.parts
        if grad is None:
            grad = q.new_zeros(()).expand(out.shape)
        needs = ctx.needs_input_grad[:3]
        dq, dk, dv = _gradients(ring, parts, grad, grad_lse, q, k, v, out, statistics, needs)
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            delta = row_delta(grad, grad_lse, out, statistics[1])
            dsinks = sinks_gradient(parts, sinks, statistics, delta)
        return dq, dk, dv, dsinks, None, None, None


def _gradients(
    ring: Ring,
    parts: Parts,
    grad: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    statistics: torch.Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Those of q, k and v; None for what is not wanted."""
    if not any(needs):
        return None, None, None
    compute, layout, rank = reference.compute_dtype(q.dtype), ring.layout, ring.rank
    dq = torch.zeros_like(q, dtype=compute, memory_format=torch.contiguous_format) if needs[0] else None
    # The gradients that travel: k's, then v's, as far as they are wanted.
    travelling = tuple(t[:, :, :0] if not need else t for t, need in zip((k, v), needs[1:], strict=True))
    size = sum(t.numel() for t in travelling)
    arriving: torch.Tensor | None = None
    home: torch.Tensor | None = None
    sent: torch.Tensor | None = None
    works: list[Any] = []
    for step, source, tensors in _blocks(ring, k, v):
        found: torch.Tensor | None = None
        if tensors is not None:
            found = q.new_zeros(size, dtype=compute)
            dk, dv = _views(found, *travelling)
            for call in layout.calls(rank, source):
                shares = parts.backward(call, grad, grad_lse, q, *tensors, out, statistics, needs)
                for total, share, at in zip((dq, dk, dv), shares, (call.rows, call.columns, call.columns), strict=True):
                    if share is not None and total is not None:
                        total[:, :, at].add_(share)
        _wait(works)
        if arriving is not None and found is not None:
            found = arriving.add_(found)
        if not size:
            continue
        sends: list[Transfer] = []
        receives: list[Transfer] = []
        arriving = None
        if found is not None and step == layout.reach(source):
            if step:
                sends.append((found, source))
            else:
                home = found
        elif found is not None:
            sends.append((found, (rank + 1) % layout.world))
        if step < layout.reach((source - 1) % layout.world):
            arriving = q.new_empty(size, dtype=compute)
            receives.append((arriving, (rank - 1) % layout.world))
        if step and step == layout.reach(rank):
            home = q.new_empty(size, dtype=compute)
            receives.append((home, (rank + step) % layout.world))
        works, sent = ring.post(sends, receives, _GRADIENTS), found
    _wait(works)
    del sent  # until here it had to live
    if home is None:  # neither is wanted
        return (None if dq is None else dq.to(q.dtype)), None, None
    dk, dv = _views(home, *travelling)
    return (
        None if dq is None else dq.to(q.dtype),
        dk.to(k.dtype) if needs[1] else None,
        dv.to(v.dtype) if needs[2] else None,
    )
