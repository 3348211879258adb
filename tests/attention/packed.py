"""What the tests of packed sequences share: boundaries, and each sequence alone."""

from __future__ import annotations

import itertools

import torch

from tests.attention.problems import double, exact, gradients
from tests.harness.tensors import randn


def ends(lengths, device, dtype=torch.int64):
    """cu_seqlens of sequences of these lengths."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=device)


def of_sequence(tensor, number, lengths=None):
    """The part of a mask (…, seqlen_q, seqlen_k) or of slopes (…, heads) that a sequence has."""
    if tensor is None:
        return None
    if lengths is not None:
        tensor = tensor[(None,) * (4 - tensor.dim())]
        rows, columns = (n if size > 1 else 1 for n, size in zip(lengths, tensor.shape[2:], strict=True))
        tensor = tensor[:, :, :rows, :columns]
    elif tensor.dim() == 1:
        return tensor
    return tensor[number : number + 1] if tensor.shape[0] > 1 else tensor[:1]


def each_alone(function, lengths_q, lengths_k, rules=None):
    """What :func:`varlen` gives, each sequence by a function of tensors (1, heads, length, size)."""

    def packed(q, k, v, mask=None, slopes=None, sinks=None, **options):
        outs, lses, begin_q, begin_k = [], [], 0, 0
        for number, lengths in enumerate(zip(lengths_q, lengths_k, strict=True)):
            end_q, end_k = begin_q + lengths[0], begin_k + lengths[1]
            parts = [t.transpose(0, 1)[None] for t in (q[begin_q:end_q], k[begin_k:end_k], v[begin_k:end_k])]
            begin_q, begin_k = end_q, end_k
            more = {} if rules is None else rules(number)
            out, lse = function(
                *parts, of_sequence(mask, number, lengths), of_sequence(slopes, number), sinks, **options, **more
            )
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
        tail = len(q) - begin_q
        outs.append(q.new_zeros(tail, q.shape[1], v.shape[2]))
        lses.append(torch.full((q.shape[1], tail), float("-inf"), device=q.device))
        used = [t for t in (q, k, v, mask, slopes, sinks) if t is not None and t.requires_grad]
        return torch.cat(outs) + sum(t.flatten()[:0].sum() for t in used), torch.cat(lses, 1)

    return packed


def expected(inputs, grads, function, lengths, **options):
    """((out, lse), gradients) in float64 by the definition, and the same of ``function``: each sequence alone."""
    rules = options.pop("rules", None)
    doubled = [double(t) for t in inputs]
    truth = gradients(each_alone(exact, *lengths, rules), doubled, [g.double() for g in grads], **options)
    return truth, gradients(each_alone(function, *lengths, rules), inputs, grads, **options)


def incoming(inputs):
    q, v = inputs[0], inputs[2]
    return randn(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device), randn(*q.shape[1::-1], device=q.device)
