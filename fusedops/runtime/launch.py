"""What every launcher shares: launch options in one place, and integer helpers."""

from __future__ import annotations


def options(num_warps: int, num_stages: int | None = None, num_ctas: int = 1) -> dict[str, int | bool]:
    """Keyword options of a Triton launch.

    Fusing a multiply and an add is asked for by name: its default differs between Triton versions, and with it
    the last bit of results.
    """
    named: dict[str, int | bool] = {"num_warps": num_warps, "enable_fp_fusion": True}
    if num_stages is not None:
        named["num_stages"] = num_stages
    if num_ctas > 1:
        named["num_ctas"] = num_ctas
    return named


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least ``n`` (1 for n ≤ 1)."""
    return 1 << max(n - 1, 0).bit_length()
