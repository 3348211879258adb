"""Triton kernels of the product with an int8 or int4 weight, and their launcher."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from fusedops.autotune.resolve import resolve
from fusedops.linear.kernels_activations import device_functions
from fusedops.linear.kernels_common import tile_of
from fusedops.linear.kernels_epilogue import epilogue
from fusedops.linear.kernels_fp8 import along_rows
from fusedops.linear.tuning_quantized import QUANTIZED_LINEAR, QuantizedProblem
from fusedops.runtime.device import device_guard
from fusedops.runtime.launch import DTYPE_NAMES, ceil_div, options
from fusedops.runtime.precision import dot_precision


@triton.jit
def split_words(words):
    """(R, C) int32 -> (R, 2C) int16: the lower and the upper half of each word, which stay in one register."""
    pairs = tl.join((words & 0xFFFF).to(tl.int16), (words >> 16).to(tl.int16))
    return pairs.reshape(words.shape[0], 2 * words.shape[1])


@triton.jit
def nibbles(words, PLACE: tl.constexpr, dtype: tl.constexpr):
    """The weights of bits 4 PLACE … 4 PLACE + 3 of each half of the words, in ``dtype``.

    The bits of n below those of a power of two are the float 2^7 + n (2^10 + n in float16); subtracting is exact. In
    pairs, that is two integer instructions and one subtraction for two weights.
    """
    bits = (words >> (4 * PLACE)) & 0x000F000F
    if dtype == tl.bfloat16:
        w = split_words(bits | 0x43004300).to(tl.bfloat16, bitcast=True) - 136.0
    elif dtype == tl.float16:
        w = split_words(bits | 0x64006400).to(tl.float16, bitcast=True) - 1032.0
    else:
        w = split_words(bits).to(dtype) - 8.0
    return w


@triton.jit
def octets(words, PLACE: tl.constexpr, dtype: tl.constexpr):
    """The weights of bits 8 PLACE … 8 PLACE + 7 of each half of the words, in ``dtype``; as :func:`nibbles`.

    bfloat16 has no room for the eighth bit, the sign: of 2^7 + (low bits), 2^7 or 2^8 is subtracted.
    """
    bits = words >> (8 * PLACE)
    if dtype == tl.bfloat16:
        low = split_words((bits & 0x007F007F) | 0x43004300).to(tl.bfloat16, bitcast=True)
        w = low - split_words((bits & 0x00800080) | 0x43004300).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        w = split_words(((bits & 0x00FF00FF) ^ 0x00800080) | 0x64006400).to(tl.float16, bitcast=True) - 1152.0
    else:
        w = split_words((bits & 0x00FF00FF) ^ 0x00800080).to(dtype) - 128.0
    return w


@triton.jit
def product(words, x, BITS: tl.constexpr, PRECISION: tl.constexpr):
    """(N, K · BITS / 32) weights times (M, K) inputs: their (N, M) product over K.

    The weights at one place of all words make one run of K · BITS / 16 weights; the inputs are put in that order, in
    registers.
    """
    M: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    N: tl.constexpr = words.shape[0]
    if BITS == 4:
        first = tl.join(nibbles(words, 0, x.dtype), nibbles(words, 1, x.dtype))
        last = tl.join(nibbles(words, 2, x.dtype), nibbles(words, 3, x.dtype))
        w = tl.join(first, last).permute(0, 3, 2, 1).reshape(N, K)
        x = x.reshape(M, K // 4, 4).permute(0, 2, 1).reshape(M, K)
    else:
        w = tl.join(octets(words, 0, x.dtype), octets(words, 1, x.dtype)).permute(0, 2, 1).reshape(N, K)
        x = x.reshape(M, K // 2, 2).permute(0, 2, 1).reshape(M, K)
    return tl.dot(w, x.trans(), input_precision=PRECISION)


@triton.jit
def quantized_linear_kernel(
    X,  # (M, K), unit stride along K
    W,  # (N, K · BITS / 32) int32, unit stride along its words
    S,  # (N, K / group_size), unit stride along the groups; (N,) where not GROUPED
    B,  # (N,) or None
    Y,  # (M, N), contiguous; PARTIAL: (SPLITS, M, N) float32
    M,
    N,
    K,
    group_size,
    stride_xm,
    stride_wn,  # in units of WIDTH words
    stride_sn,
    ACTIVATION: tl.constexpr,  # a function of kernels_activations.py, or None
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,  # a scale a group of group_size weights, a multiple of BLOCK_K; else one a row
    WIDTH: tl.constexpr,
    EVEN_K: tl.constexpr,  # BLOCK_K divides K
    PARTIAL: tl.constexpr,  # Y holds sums over a part of K; bias and activation come later
    PRECISION: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Y = a(X Wᵀ + b): each program owns one BLOCK_M × BLOCK_N tile of Y, transposed, and one of SPLITS parts of K.

    The weights become floats of X's dtype, which is exact; the scales multiply their products' sums, in float32.
    """
    PACK: tl.constexpr = 32 // BITS
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    split = tl.program_id(0) // tiles
    block_m, block_n = tile_of(tl.program_id(0) % tiles, M, N, BLOCK_M, BLOCK_N, GROUP)
    m = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS)
    first = split * steps * BLOCK_K
    end = tl.minimum(first + steps * BLOCK_K, K)
    k = tl.arange(0, BLOCK_K)
    word = tl.arange(0, BLOCK_K // PACK)
    in_m = (m < M)[:, None]
    in_n = (n < N)[:, None]
    x_at = X + m[:, None] * stride_xm + (first + k)[None, :]
    w_at = W + n[:, None] * stride_wn * WIDTH + (first // PACK + word)[None, :]
    s_at = S + n * stride_sn
    z = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for at in range(first, end, BLOCK_K):
        in_mk = in_m
        in_nk = in_n
        if not EVEN_K:
            in_mk = in_m & (at + k < K)[None, :]
            in_nk = in_n & (at + word * PACK < K)[None, :]
        x = tl.load(x_at, mask=in_mk, other=0.0)
        words = tl.load(w_at, mask=in_nk, other=0)
        sums = product(words, x, BITS, PRECISION)
        if GROUPED:
            sums *= tl.load(s_at + at // group_size, mask=n < N, other=0.0).to(tl.float32)[:, None]
        z += sums
        x_at += BLOCK_K
        w_at += BLOCK_K // PACK
    if not GROUPED:
        z *= tl.load(s_at, mask=n < N, other=0.0).to(tl.float32)[:, None]
    y_at = Y + m[None, :] * N + n[:, None]
    in_mn = (m < M)[None, :] & in_n
    if PARTIAL:
        y_at += split.to(tl.int64) * M * N
    else:
        if B is not None:
            z += tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if ACTIVATION is not None:
            z = ACTIVATION(z)
    tl.store(y_at, z.to(Y.dtype.element_ty), mask=in_mn)


def words_of(weight: torch.Tensor) -> torch.Tensor:
    """The bytes of a weight as (out_features, words) int32; copied, and padded, where rows are not whole words."""
    weight = along_rows(weight).view(torch.uint8)
    rows, size = weight.shape
    if size == 0:
        return weight.new_empty((rows, 0), dtype=torch.int32)
    if size % 4 or weight.stride(0) % 4 or weight.storage_offset() % 4 or weight.data_ptr() % 4:
        whole = weight.new_zeros((rows, ceil_div(size, 4) * 4))
        whole[:, :size] = weight
        weight = whole
    return weight.view(torch.int32)


def quantized_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    group_size: int | None,
    out_dtype: torch.dtype,
    precision: str,
) -> torch.Tensor:
    """Allocate and launch; arguments and result as :func:`fusedops.linear.reference_quantized.quantized_linear`."""
    lead, K = input.shape[:-1], input.shape[-1]
    N = weight.shape[0]
    M = math.prod(lead)
    output = input.new_empty((*lead, N), dtype=out_dtype)
    if M == 0 or N == 0:
        return output
    x, w = along_rows(input.reshape(M, K)), words_of(weight)
    bits = 8 if weight.dtype == torch.int8 else 4
    grouped = group_size is not None and group_size < K
    if K == 0:  # no weight, no scale: the kernel reads one a row
        scales = scales.new_ones(N)
    s = scales[:, None] if scales.ndim == 1 else along_rows(scales)
    b = None if bias is None else bias.contiguous()
    vectors = not (x.data_ptr() % 16 or w.data_ptr() % 16 or x.stride(0) * x.element_size() % 16 or w.stride(0) % 4)
    problem = QuantizedProblem.of(
        M, N, K,
        group=group_size if grouped and group_size else 0,
        bits=bits, dtype=DTYPE_NAMES[x.dtype], out_dtype=DTYPE_NAMES[out_dtype], activation=activation,
        bias=b is not None, precision=precision, aligned=vectors,
    )  # fmt: skip
    config = resolve(QUANTIZED_LINEAR, problem, x.device)
    partial = config.splits > 1
    sums = x.new_empty((config.splits, M, N), dtype=torch.float32) if partial else output
    tiles = ceil_div(M, config.rows) * ceil_div(N, config.cols)
    width = 4 if w.stride(0) % 4 == 0 else 1
    function = device_functions(activation)[0]
    with device_guard(x):
        quantized_linear_kernel[(tiles * config.splits,)](
            x, w, s, None if partial else b, sums, M, N, K, group_size or 0,
            x.stride(0), w.stride(0) // width, s.stride(0),
            ACTIVATION=None if partial else function, BITS=bits, GROUPED=grouped, WIDTH=width,
            EVEN_K=K % config.depth == 0, PARTIAL=partial, PRECISION=dot_precision(x, precision), SPLITS=config.splits,
            BLOCK_M=config.rows, BLOCK_N=config.cols, BLOCK_K=config.depth, GROUP=config.group,
            **options(config.num_warps, config.num_stages),
        )  # fmt: skip
        if partial:
            epilogue(sums, b, None, None, output.view(M, N), None, activation, 0.0, False)
    return output
