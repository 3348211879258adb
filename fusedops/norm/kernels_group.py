"""Triton kernels of group norm's forward, and their launcher.

Tensors are read as (N, C, S) with any strides (:mod:`fusedops.norm.channels`), so that contiguous and channels_last
memory is read where it lies; the compiler lays a tile's threads along the axis of stride 1. A row is one group of one
member of the batch: CHANNELS x S elements. Held: a program has one row, or several short ones, in registers and reads
it once. Looped: it walks the row in tiles, twice. Divided: few large rows are walked by several programs each, which
leave their statistics for a second kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.autotune.resolve import resolve
from fusedops.norm.channels import as_channels, empty_like, strides_of
from fusedops.norm.tuning import GROUP_NORM, MAX_PARTS, Direction, GroupNormProblem, parts_of_a_row
from fusedops.runtime.device import device_facts, device_guard
from fusedops.runtime.launch import ceil_div, options


@triton.jit
def within_row(c, s, strides):
    """Offsets (channels, positions) of channels ``c`` and positions ``s`` from a member of the batch."""
    return c.to(tl.int64)[:, None] * strides[1] + s.to(tl.int64)[None, :] * strides[2]


@triton.jit
def over_row(x):
    """(rows,): the sum over channels and positions."""
    return tl.sum(tl.sum(x, axis=2), axis=1)


@triton.jit
def channel_parameter(P, channel, mask):
    """(channels,): the weight or bias of these channels."""
    return tl.load(P + channel, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def tile_start(tile, spatial, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    """First channel (within the group) and first position of a tile; tiles are counted along the positions."""
    tiles = tl.cdiv(spatial, BLOCK_S)
    return (tile // tiles) * BLOCK_C, (tile % tiles) * BLOCK_S


@triton.jit(do_not_specialize=["N"])
def group_norm_forward_kernel(
    X,  # (N, C, S), strides x_strides
    W,  # (C,) or None
    B,  # (C,) or None
    Y,  # (N, C, S), strides y_strides
    MEAN,  # (N, groups) float32
    RSTD,  # (N, groups) float32
    N,
    groups,
    spatial,
    x_strides,
    y_strides,
    eps,
    CHANNELS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Program i owns group i mod groups of BLOCK_N members of the batch; a row fits in a tile."""
    group = tl.program_id(0) % groups
    n = (tl.program_id(0) // groups).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_C)
    s = tl.arange(0, BLOCK_S)
    channel = group * CHANNELS + c
    mask = (n < N)[:, None, None] & ((c < CHANNELS)[:, None] & (s < spatial)[None, :])[None, :, :]
    at = n[:, None, None] * x_strides[0] + within_row(channel, s, x_strides)[None, :, :]
    x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
    count = spatial * 1.0 * CHANNELS
    mean = over_row(x) / count
    # The padding must be zero again after centring, or it would count as (0 - mean)².
    x = tl.where(mask, x - mean[:, None, None], 0.0)
    if X.dtype.element_ty == tl.float32:
        # What rounding left out of the mean: it counts where the mean is far larger than the deviation.
        x = tl.where(mask, x - (over_row(x) / count)[:, None, None], 0.0)
    rstd = tl.rsqrt(over_row(x * x) / count + eps)
    tl.store(MEAN + n * groups + group, mean, mask=n < N)
    tl.store(RSTD + n * groups + group, rstd, mask=n < N)
    y = x * rstd[:, None, None]
    if W is not None:
        y = y * channel_parameter(W, channel, c < CHANNELS)[None, :, None]
    if B is not None:
        y = y + channel_parameter(B, channel, c < CHANNELS)[None, :, None]
    at = n[:, None, None] * y_strides[0] + within_row(channel, s, y_strides)[None, :, :]
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _statistics(
    X, first, last, spatial, strides,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Mean (a sum of two floats), centred sum of squares and number of elements of tiles ``first`` … ``last`` - 1.

    X points to the row. The tiles are combined by the pairwise update of Chan, Golub, LeVeque 1983 (equation 2.1),
    which stays exact where E[x²] - E[x]² would cancel; rounding the mean to one float in every tile would cost an ulp
    of a mean that may be far larger than the deviation.
    """
    mean = 0.0
    mean_low = 0.0
    square = 0.0
    seen = 0.0
    for tile in tl.range(first, last, num_stages=STAGES):
        c_first, s_first = tile_start(tile, spatial, BLOCK_C, BLOCK_S)
        c, s = c_first + tl.arange(0, BLOCK_C), s_first + tl.arange(0, BLOCK_S)
        mask = (c < CHANNELS)[:, None] & (s < spatial)[None, :]
        x = tl.load(X + within_row(c, s, strides), mask=mask, other=0.0).to(tl.float32)
        count = tl.minimum(CHANNELS - c_first, BLOCK_C) * 1.0 * tl.minimum(spatial - s_first, BLOCK_S)
        tile_mean = tl.sum(x) / count
        centred = tl.where(mask, x - tile_mean, 0.0)
        rest = tl.sum(centred) / count  # what rounding left out of tile_mean
        delta = (tile_mean - mean) + (rest - mean_low)
        change = delta * (count / (seen + count))
        new_mean = mean + change
        mean_low += change - (new_mean - mean)
        mean = new_mean
        square += tl.sum(centred * centred) - rest * rest * count + delta * delta * (seen * count / (seen + count))
        seen += count
    return mean, mean_low, square, seen


@triton.jit
def _normalize(
    X, W, B, Y, first, last, channel, spatial, x_strides, y_strides, mean, mean_low, rstd,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Write tiles ``first`` … ``last`` - 1 of a row that X and Y point to, whose first channel is ``channel``."""
    for tile in range(first, last):
        c_first, s_first = tile_start(tile, spatial, BLOCK_C, BLOCK_S)
        c, s = c_first + tl.arange(0, BLOCK_C), s_first + tl.arange(0, BLOCK_S)
        mask = (c < CHANNELS)[:, None] & (s < spatial)[None, :]
        x = tl.load(X + within_row(c, s, x_strides), mask=mask, other=0.0).to(tl.float32)
        y = ((x - mean) - mean_low) * rstd
        if W is not None:
            y = y * channel_parameter(W, channel + c, c < CHANNELS)[:, None]
        if B is not None:
            y = y + channel_parameter(B, channel + c, c < CHANNELS)[:, None]
        tl.store(Y + within_row(c, s, y_strides), y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def row_offset(row, groups, strides, CHANNELS: tl.constexpr):
    """Where row ``row`` (member · groups + group) begins."""
    return (row // groups).to(tl.int64) * strides[0] + (row % groups * CHANNELS).to(tl.int64) * strides[1]


@triton.jit
def share_of_tiles(part, parts, spatial, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    """First tile of a part of a row, and the one past its last."""
    tiles = tl.cdiv(CHANNELS, BLOCK_C) * tl.cdiv(spatial, BLOCK_S)
    share = tl.cdiv(tiles, parts)
    return part * share, tl.minimum(part * share + share, tiles)


@triton.jit
def group_norm_forward_looped_kernel(
    X,
    W,
    B,
    Y,
    MEAN,
    RSTD,
    groups,
    spatial,
    x_strides,
    y_strides,
    eps,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program i owns row i, walked in tiles: once for the statistics, once for the output."""
    row = tl.program_id(0)
    x = X + row_offset(row, groups, x_strides, CHANNELS)
    y = Y + row_offset(row, groups, y_strides, CHANNELS)
    tiles = tl.cdiv(CHANNELS, BLOCK_C) * tl.cdiv(spatial, BLOCK_S)
    mean, mean_low, square, count = _statistics(x, 0, tiles, spatial, x_strides, CHANNELS, BLOCK_C, BLOCK_S, STAGES)
    rstd = tl.rsqrt(square / count + eps)
    tl.store(MEAN + row, mean)
    tl.store(RSTD + row, rstd)
    _normalize(
        x, W, B, y, 0, tiles, row % groups * CHANNELS, spatial, x_strides, y_strides, mean, mean_low, rstd,
        CHANNELS, BLOCK_C, BLOCK_S,
    )  # fmt: skip


@triton.jit(do_not_specialize=["parts"])
def group_norm_statistics_kernel(
    X,
    PARTIALS,  # (4, rows, parts) float32: mean, its low part, centred sum of squares, number of elements
    groups,
    spatial,
    strides,
    parts,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program i owns part i mod parts of row i // parts: an equal share of the row's tiles."""
    row, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    first, last = share_of_tiles(part, parts, spatial, CHANNELS, BLOCK_C, BLOCK_S)
    x = X + row_offset(row, groups, strides, CHANNELS)
    mean, mean_low, square, count = _statistics(x, first, last, spatial, strides, CHANNELS, BLOCK_C, BLOCK_S, STAGES)
    at = PARTIALS + tl.program_id(0)
    plane = tl.num_programs(0).to(tl.int64)
    tl.store(at, mean)
    tl.store(at + plane, mean_low)
    tl.store(at + 2 * plane, square)
    tl.store(at + 3 * plane, count)


@triton.jit(do_not_specialize=["parts"])
def group_norm_normalize_kernel(
    X,
    W,
    B,
    Y,
    MEAN,
    RSTD,
    PARTIALS,  # (4, rows, parts) float32, as group_norm_statistics_kernel leaves them
    groups,
    spatial,
    x_strides,
    y_strides,
    parts,
    eps,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Program i owns part i mod parts of row i // parts, and adds up the statistics of all the row's parts."""
    row, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    k = tl.arange(0, PARTS)
    at = PARTIALS + row * parts + k
    plane = tl.num_programs(0).to(tl.int64)
    mean = tl.load(PARTIALS + row * parts)
    count = tl.load(at + 3 * plane, mask=k < parts, other=0.0)
    shift = tl.load(at, mask=k < parts, other=0.0) - mean + tl.load(at + plane, mask=k < parts, other=0.0)
    total = tl.sum(count)
    mean_low = tl.sum(count * shift) / total
    square = tl.load(at + 2 * plane, mask=k < parts, other=0.0)
    square += count * (shift - mean_low) * (shift - mean_low)
    rstd = tl.rsqrt(tl.sum(square) / total + eps)
    if part == 0:
        tl.store(MEAN + row, mean + mean_low)
        tl.store(RSTD + row, rstd)
    first, last = share_of_tiles(part, parts, spatial, CHANNELS, BLOCK_C, BLOCK_S)
    x = X + row_offset(row, groups, x_strides, CHANNELS)
    y = Y + row_offset(row, groups, y_strides, CHANNELS)
    _normalize(
        x, W, B, y, first, last, row % groups * CHANNELS, spatial, x_strides, y_strides, mean, mean_low, rstd,
        CHANNELS, BLOCK_C, BLOCK_S,
    )  # fmt: skip


def group_problem(
    x: torch.Tensor,
    num_groups: int,
    direction: Direction,
    weight: bool,
    bias: bool = False,
    sums: int = 0,
    need_dx: bool = True,
) -> GroupNormProblem:
    """The problem of an input (N, C, S); ``weight`` and ``bias``: there is one that is read."""
    channels, spatial = x.shape[1] // num_groups, x.shape[2]
    return GroupNormProblem.of(
        channels, spatial, spatial > 1 and x.stride(1) == 1, x.dtype, direction, x.shape[0], num_groups,
        weight, bias, sums, need_dx,
    )  # fmt: skip


def group_norm_forward(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_groups: int,
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate and launch; arguments and results as :func:`fusedops.norm.reference.group_norm`, the output in the
    input's memory format."""
    device = input.device
    output = empty_like(input, out_dtype)
    mean, rstd = (torch.empty((input.shape[0], num_groups), dtype=torch.float32, device=device) for _ in range(2))
    if input.numel() == 0:
        # No element, but perhaps groups: their statistics are of nothing, and the gradients of nothing need none.
        return output, mean.fill_(float("nan")), rstd.fill_(float("nan"))
    x, y = as_channels(input), as_channels(output)
    w = None if weight is None else weight.contiguous()
    b = None if bias is None else bias.contiguous()
    x_strides, y_strides = strides_of(x), strides_of(y)
    batch, channels, spatial = x.shape
    config = resolve(GROUP_NORM, group_problem(x, num_groups, "forward", weight is not None, bias is not None), device)
    rows = batch * num_groups
    tile = {"CHANNELS": channels // num_groups, "BLOCK_C": config.block_c, "BLOCK_S": config.block_s}
    launch = options(config.num_warps)
    with device_guard(input):
        if not config.looped:
            group_norm_forward_kernel[(ceil_div(batch, config.block_n) * num_groups,)](
                x, w, b, y, mean, rstd, batch, num_groups, spatial, x_strides, y_strides, eps,
                BLOCK_N=config.block_n, **tile, **launch,
            )  # fmt: skip
            return output, mean, rstd
        parts = parts_of_a_row(rows, channels // num_groups, spatial, config, device_facts(device))
        if parts == 1:
            group_norm_forward_looped_kernel[(rows,)](
                x, w, b, y, mean, rstd, num_groups, spatial, x_strides, y_strides, eps,
                STAGES=config.num_stages, **tile, **launch,
            )  # fmt: skip
            return output, mean, rstd
        partials = torch.empty((4, rows, parts), dtype=torch.float32, device=device)
        group_norm_statistics_kernel[(rows * parts,)](
            x, partials, num_groups, spatial, x_strides, parts, STAGES=config.num_stages, **tile, **launch
        )
        group_norm_normalize_kernel[(rows * parts,)](
            x, w, b, y, mean, rstd, partials, num_groups, spatial, x_strides, y_strides, parts, eps,
            PARTS=MAX_PARTS, **tile, **launch,
        )  # fmt: skip
    return output, mean, rstd
