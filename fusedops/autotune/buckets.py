"""Sizes that change from call to call, made coarse, so that a new length or batch is not a new problem."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=4096)
def bucket(size: int, most: int = 1 << 15) -> int:
    """The least bucket that is at least ``size``: the powers of two up to 256, then two an octave, at most ``most``.

    Args:
        size: rows or a sequence's length; 0 counts as 1.
        most: the last bucket, a power of two, which stands for all larger sizes.

    Examples:
        >>> [bucket(n) for n in (1, 100, 256, 257, 385, 10**6)]
        [1, 128, 256, 384, 512, 32768]
    """
    if size >= most:
        return most
    power = 1 << max(size - 1, 0).bit_length()
    between = power // 4 * 3
    return between if power > 256 and size <= between else power
