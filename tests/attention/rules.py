"""Rules for tests, as Triton functions: to be imported where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl

# Score rules.


@triton.jit
def affine(score, batch, head, i, j, args):
    return 3.0 * score + 1.0


@triton.jit
def bent(score, batch, head, i, j, args):
    """Not linear in the score, other for each batch and head: args[0] is a (batch, heads = 2) table."""
    factor = tl.load(args[0] + batch * 2 + head)
    return factor * score * score - 0.01 * tl.abs(j - i).to(tl.float32)


@triton.jit
def bent_gradient(grad, score, batch, head, i, j, args):
    return 2.0 * tl.load(args[0] + batch * 2 + head) * score * grad


@triton.jit
def biased(score, batch, head, i, j, args):
    """A relative bias by distance, args[0], and one of each key, args[1]."""
    return score + tl.load(args[0] + (j - i + 200)) + tl.load(args[1] + j)


@triton.jit
def relative(score, batch, head, i, j, args):
    return score - 0.1 * tl.abs(i - j).to(tl.float32)


@triton.jit
def unchanged(grad, score, batch, head, i, j, args):
    return grad


# Mask rules.


@triton.jit
def lower(batch, head, i, j, args):
    return j <= i


@triton.jit
def dilated(batch, head, i, j, args):
    """Every second key for head 0, every third for head 1, …"""
    return (j - i) % (head + 2) == 0


@triton.jit
def prefix(batch, head, i, j, args):
    """The keys before args[0] of the batch, and those up to the query."""
    return (j < tl.load(args[0] + batch)) | (j <= i)


@triton.jit
def all_but_one(batch, head, i, j, args):
    """Query args[0] sees no key."""
    return (i != tl.load(args[0])) & (j >= 0)


@triton.jit
def shifted(batch, head, i, j, args):
    """The keys up to args[0] of the head after the query."""
    return j <= i + tl.load(args[0] + head)
