"""Triton kernels of group norm's backward, and their launcher. Rows and tiles as in the forward's kernels.

With ``x̂ = (x - mean) rstd`` and ``g = dy weight``: ``dx = rstd (g - x̂ mean(g x̂) - mean(g))``, the means over a row,
``dweight = Σ dy x̂`` and ``dbias = Σ dy`` over batch and positions. All follow from two sums over positions, of
``dy x̂`` and of ``dy``, one for each channel of each member of the batch. A fixed number of programs share the batch;
each keeps one float32 partial sum of the parameters' gradients, and sum_partials_kernel adds them in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.autotune.resolve import resolve
from fusedops.norm.channels import as_channels, empty_like, strides_of
from fusedops.norm.kernels_group import (
    channel_parameter,
    group_problem,
    row_offset,
    share_of_tiles,
    tile_start,
    within_row,
)
from fusedops.norm.kernels_sums import sum_partials
from fusedops.norm.tuning import GROUP_NORM, group_backward_split, parts_of_a_row
from fusedops.runtime.device import device_facts, device_guard
from fusedops.runtime.launch import options


@triton.jit(do_not_specialize=["N"])
def group_norm_backward_kernel(
    DY,  # (N, C, S), strides dy_strides
    X,  # (N, C, S), strides x_strides
    W,  # (C,) or None
    MEAN,  # (N, groups) float32
    RSTD,  # (N, groups) float32
    DX,  # (N, C, S), strides dx_strides; None: not wanted
    DW,  # (programs a group, C) float32 partial sums; None: not wanted
    DB,  # (programs a group, C) float32 partial sums; None: not wanted
    N,
    groups,
    spatial,
    dy_strides,
    x_strides,
    dx_strides,
    CHANNELS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program i owns group i mod groups of every k-th BLOCK_N members of the batch, k the programs a group, and
    partial sum i // groups of that group's channels; a row fits in a tile."""
    group = tl.program_id(0) % groups
    program = tl.program_id(0) // groups
    programs = tl.num_programs(0) // groups
    c = tl.arange(0, BLOCK_C)
    s = tl.arange(0, BLOCK_S)
    channel = group * CHANNELS + c
    c_mask = c < CHANNELS
    row_mask = (c_mask[:, None] & (s < spatial)[None, :])[None, :, :]
    count = spatial * 1.0 * CHANNELS
    dw = tl.zeros((BLOCK_C,), dtype=tl.float32)
    db = tl.zeros((BLOCK_C,), dtype=tl.float32)
    step = programs.to(tl.int64) * BLOCK_N
    for first in tl.range(program.to(tl.int64) * BLOCK_N, N, step, num_stages=STAGES):
        n = first + tl.arange(0, BLOCK_N)
        mask = (n < N)[:, None, None] & row_mask
        at = n[:, None, None] * dy_strides[0] + within_row(channel, s, dy_strides)[None, :, :]
        dy = tl.load(DY + at, mask=mask, other=0.0).to(tl.float32)
        sum_dy = tl.sum(dy, axis=2)
        if DX is not None or DW is not None:
            at = n[:, None, None] * x_strides[0] + within_row(channel, s, x_strides)[None, :, :]
            x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
            mean = tl.load(MEAN + n * groups + group, mask=n < N, other=0.0)[:, None, None]
            rstd = tl.load(RSTD + n * groups + group, mask=n < N, other=0.0)[:, None, None]
            xhat = (x - mean) * rstd  # not 0 in the padding, but dy is
            sum_dyx = tl.sum(dy * xhat, axis=2)
            if DW is not None:
                dw += tl.sum(sum_dyx, axis=0)
        if DB is not None:
            db += tl.sum(sum_dy, axis=0)
        if DX is not None:
            g, sum_gx, sum_g = dy, sum_dyx, sum_dy
            if W is not None:
                w = channel_parameter(W, channel, c_mask)
                g = dy * w[None, :, None]
                sum_gx, sum_g = sum_dyx * w[None, :], sum_dy * w[None, :]
            mean_gx = (tl.sum(sum_gx, axis=1) / count)[:, None, None]
            mean_g = (tl.sum(sum_g, axis=1) / count)[:, None, None]
            dx = (g - xhat * mean_gx - mean_g) * rstd
            at = n[:, None, None] * dx_strides[0] + within_row(channel, s, dx_strides)[None, :, :]
            tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=mask)
    if DW is not None:
        tl.store(DW + program.to(tl.int64) * groups * CHANNELS + channel, dw, mask=c_mask)
    if DB is not None:
        tl.store(DB + program.to(tl.int64) * groups * CHANNELS + channel, db, mask=c_mask)


@triton.jit
def _channel_sums(
    DY, X, c, c_mask, first, last, spatial, dy_strides, x_strides, mean, rstd,
    NEED_DYX: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """(channels,) Σ dy x̂ and Σ dy over blocks ``first`` … ``last`` - 1 of the positions; DY and X point to the row."""
    dyx = tl.zeros((BLOCK_C, BLOCK_S), dtype=tl.float32)
    dys = tl.zeros((BLOCK_C, BLOCK_S), dtype=tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        s = block * BLOCK_S + tl.arange(0, BLOCK_S)
        mask = c_mask[:, None] & (s < spatial)[None, :]
        dy = tl.load(DY + within_row(c, s, dy_strides), mask=mask, other=0.0).to(tl.float32)
        dys += dy
        if NEED_DYX:
            x = tl.load(X + within_row(c, s, x_strides), mask=mask, other=0.0).to(tl.float32)
            dyx += dy * ((x - mean) * rstd)
    return tl.sum(dyx, axis=1), tl.sum(dys, axis=1)


@triton.jit
def _input_gradient(
    DY, X, W, DX, first, last, channel, spatial, dy_strides, x_strides, dx_strides, mean, rstd, mean_gx, mean_g,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Write tiles ``first`` … ``last`` - 1 of dx; DY, X and DX point to the row, whose first channel is ``channel``."""
    for tile in range(first, last):
        c_first, s_first = tile_start(tile, spatial, BLOCK_C, BLOCK_S)
        c, s = c_first + tl.arange(0, BLOCK_C), s_first + tl.arange(0, BLOCK_S)
        mask = (c < CHANNELS)[:, None] & (s < spatial)[None, :]
        g = tl.load(DY + within_row(c, s, dy_strides), mask=mask, other=0.0).to(tl.float32)
        x = tl.load(X + within_row(c, s, x_strides), mask=mask, other=0.0).to(tl.float32)
        if W is not None:
            g = g * channel_parameter(W, channel + c, c < CHANNELS)[:, None]
        dx = (g - (x - mean) * rstd * mean_gx - mean_g) * rstd
        tl.store(DX + within_row(c, s, dx_strides), dx.to(DX.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N"])
def group_norm_backward_looped_kernel(
    DY,
    X,
    W,
    MEAN,
    RSTD,
    DX,
    DW,
    DB,
    N,
    groups,
    spatial,
    dy_strides,
    x_strides,
    dx_strides,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As group_norm_backward_kernel for rows that are walked in tiles of all their channels: once for the sums, once
    for dx."""
    group = tl.program_id(0) % groups
    program = tl.program_id(0) // groups
    c = tl.arange(0, BLOCK_C)
    c_mask = c < CHANNELS
    blocks = tl.cdiv(spatial, BLOCK_S)
    dw = tl.zeros((BLOCK_C,), dtype=tl.float32)
    db = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for n in range(program, N, tl.num_programs(0) // groups):
        row = n * groups + group
        mean = tl.load(MEAN + row)
        rstd = tl.load(RSTD + row)
        dy = DY + row_offset(row, groups, dy_strides, CHANNELS)
        x = X + row_offset(row, groups, x_strides, CHANNELS)
        sum_dyx, sum_dy = _channel_sums(
            dy, x, c, c_mask, 0, blocks, spatial, dy_strides, x_strides, mean, rstd,
            DX is not None or DW is not None, BLOCK_C, BLOCK_S, STAGES,
        )  # fmt: skip
        dw += sum_dyx
        db += sum_dy
        if DX is not None:
            if W is not None:
                w = channel_parameter(W, group * CHANNELS + c, c_mask)
                sum_dyx, sum_dy = sum_dyx * w, sum_dy * w
            count = spatial * 1.0 * CHANNELS
            _input_gradient(
                dy, x, W, DX + row_offset(row, groups, dx_strides, CHANNELS), 0, blocks, group * CHANNELS, spatial,
                dy_strides, x_strides, dx_strides, mean, rstd, tl.sum(sum_dyx) / count, tl.sum(sum_dy) / count,
                CHANNELS, BLOCK_C, BLOCK_S,
            )  # fmt: skip
    at = program.to(tl.int64) * groups * CHANNELS + group * CHANNELS + c
    if DW is not None:
        tl.store(DW + at, dw, mask=c_mask)
    if DB is not None:
        tl.store(DB + at, db, mask=c_mask)


@triton.jit(do_not_specialize=["N", "programs", "parts"])
def group_norm_backward_sums_kernel(
    DY,
    X,
    W,
    MEAN,
    RSTD,
    GX,  # (N, groups, blocks, parts) float32: Σ g x̂ over a block of channels; None: dx is not wanted
    G,  # (N, groups, blocks, parts) float32: Σ g; None: dx is not wanted
    DW,  # (programs·parts, C) float32 partial sums; None: not wanted
    DB,  # (programs·parts, C) float32 partial sums; None: not wanted
    N,
    groups,
    spatial,
    dy_strides,
    x_strides,
    programs,
    parts,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The first walk of rows that several programs share: program (p, part, group, block) owns BLOCK_C channels of a
    group and a share of the positions, of members p, p + programs, … of the batch."""
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    block = tl.program_id(0) % BLOCKS
    group = tl.program_id(0) // BLOCKS % groups
    partial = tl.program_id(0) // BLOCKS // groups
    part = partial % parts
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    c_mask = c < CHANNELS
    first, last = share_of_tiles(part, parts, spatial, BLOCK_C, BLOCK_C, BLOCK_S)
    if W is not None:
        w = channel_parameter(W, group * CHANNELS + c, c_mask)
    dw = tl.zeros((BLOCK_C,), dtype=tl.float32)
    db = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for n in range(partial // parts, N, programs):
        row = n * groups + group
        sum_dyx, sum_dy = _channel_sums(
            DY + row_offset(row, groups, dy_strides, CHANNELS), X + row_offset(row, groups, x_strides, CHANNELS),
            c, c_mask, first, last, spatial, dy_strides, x_strides, tl.load(MEAN + row), tl.load(RSTD + row),
            GX is not None or DW is not None, BLOCK_C, BLOCK_S, STAGES,
        )  # fmt: skip
        dw += sum_dyx
        db += sum_dy
        if GX is not None:
            if W is not None:
                sum_dyx, sum_dy = sum_dyx * w, sum_dy * w
            at = (row.to(tl.int64) * BLOCKS + block) * parts + part
            tl.store(GX + at, tl.sum(sum_dyx))
            tl.store(G + at, tl.sum(sum_dy))
    at = partial.to(tl.int64) * groups * CHANNELS + group * CHANNELS + c
    if DW is not None:
        tl.store(DW + at, dw, mask=c_mask)
    if DB is not None:
        tl.store(DB + at, db, mask=c_mask)


@triton.jit(do_not_specialize=["sums", "parts"])
def group_norm_input_gradient_kernel(
    DY,
    X,
    W,
    MEAN,
    RSTD,
    GX,  # (N, groups, sums) float32, as group_norm_backward_sums_kernel leaves them
    G,  # (N, groups, sums) float32
    DX,
    groups,
    spatial,
    dy_strides,
    x_strides,
    dx_strides,
    sums,
    parts,
    BLOCK_SUMS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The second walk of rows that several programs share: program i owns part i mod parts of dx of row i // parts."""
    row, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    gx = tl.zeros((BLOCK_SUMS,), dtype=tl.float32)
    g = tl.zeros((BLOCK_SUMS,), dtype=tl.float32)
    for start in range(0, sums, BLOCK_SUMS):
        k = start + tl.arange(0, BLOCK_SUMS)
        gx += tl.load(GX + row.to(tl.int64) * sums + k, mask=k < sums, other=0.0)
        g += tl.load(G + row.to(tl.int64) * sums + k, mask=k < sums, other=0.0)
    count = spatial * 1.0 * CHANNELS
    first, last = share_of_tiles(part, parts, spatial, CHANNELS, BLOCK_C, BLOCK_S)
    _input_gradient(
        DY + row_offset(row, groups, dy_strides, CHANNELS), X + row_offset(row, groups, x_strides, CHANNELS), W,
        DX + row_offset(row, groups, dx_strides, CHANNELS), first, last, row % groups * CHANNELS, spatial,
        dy_strides, x_strides, dx_strides, tl.load(MEAN + row), tl.load(RSTD + row), tl.sum(gx) / count,
        tl.sum(g) / count, CHANNELS, BLOCK_C, BLOCK_S,
    )  # fmt: skip


def group_norm_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    num_groups: int,
    needs: tuple[bool, bool, bool],
    bias_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of (input, weight, bias), each in its tensor's dtype; one that is not needed has shape (0,)."""
    need_dx, need_dw, need_db = needs
    device = input.device
    empty = torch.empty(0, dtype=input.dtype, device=device)
    dx = empty_like(input, input.dtype) if need_dx else empty
    dw = torch.empty(input.shape[1] if need_dw else 0, dtype=(input if weight is None else weight).dtype, device=device)
    db = torch.empty(input.shape[1] if need_db else 0, dtype=bias_dtype, device=device)
    if input.numel() == 0:
        return dx, dw.zero_(), db.zero_()
    dy, x = as_channels(grad_output), as_channels(input)
    batch, width, spatial = x.shape
    channels = width // num_groups
    problem = group_problem(x, num_groups, "backward", weight is not None, sums=need_dw + need_db, need_dx=need_dx)
    config = resolve(GROUP_NORM, problem, device)
    facts = device_facts(device)
    dx_view = as_channels(dx) if need_dx else None
    dy_strides, x_strides = strides_of(dy), strides_of(x)
    dx_strides = x_strides if dx_view is None else strides_of(dx_view)
    w = None if weight is None else weight.contiguous()
    programs, parts, blocks = group_backward_split(config, problem, facts, spatial, batch)
    partials = [
        torch.empty((programs * parts, width), dtype=torch.float32, device=device) if need else None
        for need in (need_dw, need_db)
    ]
    tile = {"CHANNELS": channels, "BLOCK_C": config.block_c, "BLOCK_S": config.block_s}
    launch = options(config.num_warps)
    with device_guard(input):
        if blocks == parts == 1:
            kernel = group_norm_backward_looped_kernel if config.looped else group_norm_backward_kernel
            if not config.looped:
                tile["BLOCK_N"] = config.block_n
            kernel[(programs * num_groups,)](
                dy, x, w, mean, rstd, dx_view, *partials, batch, num_groups, spatial,
                dy_strides, x_strides, dx_strides, STAGES=config.num_stages, **tile, **launch,
            )  # fmt: skip
        else:
            shape = (batch, num_groups, blocks * parts)
            sums = [torch.empty(shape, dtype=torch.float32, device=device) if need_dx else None for _ in range(2)]
            group_norm_backward_sums_kernel[(programs * parts * num_groups * blocks,)](
                dy, x, w, mean, rstd, *sums, *partials, batch, num_groups, spatial, dy_strides, x_strides,
                programs, parts, STAGES=config.num_stages, **tile, **launch,
            )  # fmt: skip
            if need_dx:
                rows = batch * num_groups
                parts = parts_of_a_row(rows, channels, spatial, config, facts)
                group_norm_input_gradient_kernel[(rows * parts,)](
                    dy, x, w, mean, rstd, *sums, dx_view, num_groups, spatial, dy_strides, x_strides, dx_strides,
                    shape[2], parts, BLOCK_SUMS=1024, **tile, **launch,
                )  # fmt: skip
        pairs = [(sums, out) for sums, out in zip(partials, (dw, db), strict=True) if sums is not None]
        if pairs:
            sum_partials(pairs)
    return dx, dw, db
