"""The Triton kernel of the float8 product, and its launcher."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from fusedops.autotune.resolve import resolve
from fusedops.linear.kernels_activations import device_functions
from fusedops.linear.kernels_common import tile_of
from fusedops.linear.tuning_quantized import FP8_LINEAR, Fp8Problem, RowScales, sums_in_float32
from fusedops.runtime.device import device_facts, device_guard
from fusedops.runtime.launch import DTYPE_NAMES, ceil_div, options


@triton.jit
def fp8_linear_kernel(
    X,  # (M, K) float8, unit stride along K
    W,  # (N, K) float8, unit stride along K
    SX,  # (M,) float32, or (1,)
    SW,  # (N,) float32, or (1,)
    B,  # (N,) or None
    Y,  # (M, N), contiguous
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    ROW_SX: tl.constexpr,  # SX holds a scale a row; else one
    ROW_SW: tl.constexpr,
    ACTIVATION: tl.constexpr,  # a function of kernels_activations.py, or None
    EVEN_K: tl.constexpr,  # BLOCK_K divides K
    IN_FLOAT16: tl.constexpr,  # multiply as float16, which is exact
    PROMOTE: tl.constexpr,  # add each step's sum in float32: the tensor cores sum less precisely
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Y = a((X Wᵀ) ∘ SX ∘ SW + b): each program owns one BLOCK_M × BLOCK_N tile of Y."""
    block_m, block_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    m = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_m = (m < M)[:, None]
    in_n = (n < N)[None, :]
    x_at = X + m[:, None] * stride_xm + k[None, :]
    w_at = W + n[None, :] * stride_wn + k[:, None]
    z = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first_k in range(0, K, BLOCK_K):
        in_mk = in_m
        in_kn = in_n
        if not EVEN_K:
            in_k = first_k + k < K
            in_mk = in_m & in_k[None, :]
            in_kn = in_n & in_k[:, None]
        x = tl.load(x_at, mask=in_mk, other=0.0)
        w = tl.load(w_at, mask=in_kn, other=0.0)
        if IN_FLOAT16:
            z = tl.dot(x.to(tl.float16), w.to(tl.float16), z)
        elif PROMOTE:
            # A limit above 0 keeps the compiler from letting the tensor core add to z.
            z += tl.dot(x, w, max_num_imprecise_acc=BLOCK_K)
        else:
            z = tl.dot(x, w, z, max_num_imprecise_acc=0)
        x_at += BLOCK_K
        w_at += BLOCK_K
    if ROW_SX:
        z *= tl.load(SX + m, mask=m < M, other=0.0)[:, None]
    else:
        z *= tl.load(SX)
    if ROW_SW:
        z *= tl.load(SW + n, mask=n < N, other=0.0)[None, :]
    else:
        z *= tl.load(SW)
    if B is not None:
        z += tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        z = ACTIVATION(z)
    tl.store(Y + m[:, None] * N + n[None, :], z.to(Y.dtype.element_ty), mask=in_m & in_n)


def along_rows(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, copied unless a row's elements are neighbours in memory."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def readable_in_vectors(matrix: torch.Tensor) -> bool:
    """Whether Triton finds 16 bytes aligned at the start of each row, given that rows have unit stride."""
    return not (matrix.data_ptr() % 16 or matrix.stride(0) % 16 or matrix.shape[1] % 16)


_ROW_SCALES: dict[tuple[bool, bool], RowScales] = {
    (False, False): "no",
    (True, False): "input",
    (False, True): "weight",
    (True, True): "both",
}


def fp8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    scale_input: torch.Tensor,
    scale_weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Allocate and launch; arguments and result as :func:`fusedops.linear.reference_quantized.fp8_linear`."""
    N, K = weight.shape
    lead = input.shape[:-1]
    M = math.prod(lead)
    output = input.new_empty((*lead, N), dtype=out_dtype)
    if M == 0 or N == 0:
        return output
    x, w = along_rows(input.reshape(M, K)), along_rows(weight)
    b = None if bias is None else bias.contiguous()
    facts = device_facts(x.device)
    problem = Fp8Problem.of(
        M, N, K,
        dtype=DTYPE_NAMES[x.dtype], weight_dtype=DTYPE_NAMES[w.dtype], out_dtype=DTYPE_NAMES[out_dtype],
        row_scales=_ROW_SCALES[scale_input.numel() > 1, scale_weight.numel() > 1], activation=activation,
        bias=b is not None, aligned=readable_in_vectors(x) and readable_in_vectors(w),
        exact=out_dtype == torch.float32 and not sums_in_float32(facts),
    )  # fmt: skip
    config = resolve(FP8_LINEAR, problem, x.device)
    grid = (ceil_div(M, config.rows) * ceil_div(N, config.cols),)
    with device_guard(x):
        fp8_linear_kernel[grid](
            x, w, *(scale.reshape(-1).contiguous() for scale in (scale_input, scale_weight)), b, output,
            M, N, K, x.stride(0), w.stride(0),
            ROW_SX=scale_input.numel() > 1, ROW_SW=scale_weight.numel() > 1, ACTIVATION=device_functions(activation)[0],
            EVEN_K=K % config.depth == 0, IN_FLOAT16=problem.exact, PROMOTE=not sums_in_float32(facts),
            BLOCK_M=config.rows, BLOCK_N=config.cols, BLOCK_K=config.depth, GROUP=config.group,
            **options(config.num_warps, config.num_stages),
        )  # fmt: skip
    return output
