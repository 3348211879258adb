"""The linear forward by tensor descriptors (NVIDIA's TMA, sm_90 and later): its Triton kernel, and its launcher.

A tensor descriptor is made on the host; with it one thread starts the copy of a whole tile, whose addresses no other
thread computes. What it asks of a matrix is in :func:`descriptors_reason`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.linear.kernels_activations import device_functions
from fusedops.linear.kernels_common import tile_of
from fusedops.linear.kernels_epilogue import finish, halves, quarters
from fusedops.linear.reference import keeps_output
from fusedops.linear.tuning import LinearConfig
from fusedops.runtime.device import device_facts
from fusedops.runtime.dropout import threshold_and_scale
from fusedops.runtime.launch import ceil_div, options
from fusedops.runtime.precision import dot_precision

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4
    TensorDescriptor = None


@triton.jit
def load_tile(MATRIX, first_row, first_col, TRANSPOSED: tl.constexpr):
    """The descriptor's tile from (first_row, first_col); zero outside. TRANSPOSED: of the matrix's transpose."""
    if TRANSPOSED:
        tile = MATRIX.load([first_col, first_row]).T
    else:
        tile = MATRIX.load([first_row, first_col])
    return tile


@triton.jit
def finish_parts(
    z,
    B,
    R,
    SEED,
    Y,
    Z,
    m,
    first_m,
    first_n,
    M,
    N,
    stride_rm,
    stride_rn,
    threshold,
    scale,
    ACTIVATION: tl.constexpr,
    KEEP_OUTPUT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """:func:`finish`, one of PARTS parts of the columns after the other: so few registers and little shared memory."""
    if PARTS == 4:
        parts = quarters(z)
    elif PARTS == 2:
        parts = halves(z)
    else:
        parts = (z,)
    for part in tl.static_range(PARTS):
        finish(
            parts[part], B, R, SEED, Y, Z, m, first_n + part * (z.shape[1] // PARTS), M, N, stride_rm, stride_rn,
            threshold, scale, ACTIVATION, KEEP_OUTPUT, first_m,
        )  # fmt: skip


@triton.jit
def linear_persistent_kernel(
    X,  # descriptor of (M, K), or of (K, M) where X_TRANSPOSED; its block is a tile
    W,  # descriptor of (N, K), or of (K, N) where W_TRANSPOSED
    B,  # (N,) or None
    R,  # (M, N), any strides, or None: the residual
    SEED,  # (1,) int64, or None without dropout
    Y,  # descriptor of (M, N); its block is a part of a tile
    Z,  # as Y, or None: what the backward needs
    M,
    N,
    K,
    stride_rm,
    stride_rn,
    threshold,
    scale,
    ACTIVATION: tl.constexpr,  # a function of kernels_activations.py, or None
    KEEP_OUTPUT: tl.constexpr,  # Z takes the activation's output, else its input
    X_TRANSPOSED: tl.constexpr,
    W_TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,  # in how many parts a tile is finished
    SPECIALIZE: tl.constexpr,  # warps for the copies and for the product alone, where the compiler can
):
    """Y = dropout(a(X Wᵀ + b)) + r: each program owns every num_programs-th BLOCK_M × BLOCK_N tile of Y.

    What a descriptor loads outside its matrix is zero, and what it stores there goes nowhere: no masks.
    """
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), warp_specialize=SPECIALIZE):
        block_m, block_n = tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        first_m = block_m * BLOCK_M
        first_n = block_n * BLOCK_N
        z = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            x = load_tile(X, first_m, k, X_TRANSPOSED)
            w = load_tile(W, first_n, k, W_TRANSPOSED)
            z = tl.dot(x, w.T, z, input_precision=PRECISION)
        m = first_m.to(tl.int64) + tl.arange(0, BLOCK_M)
        finish_parts(
            z, B, R, SEED, Y, Z, m, first_m, first_n.to(tl.int64), M, N, stride_rm, stride_rn, threshold, scale,
            ACTIVATION, KEEP_OUTPUT, PARTS,
        )  # fmt: skip


# Descriptors count in int32, and a tile may reach past the matrix's end.
_LARGEST_SIZE = 2**31 - 2**10
_LARGEST_STRIDE = 2**40  # bytes; a limit of the hardware's, as is the alignment of 16


def _stored(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix or its transpose: whichever has consecutive elements in its rows."""
    return matrix if matrix.stride(1) == 1 else matrix.t()


def descriptors_reason(matrix: torch.Tensor) -> str | None:
    """Why no tensor descriptor can stand for a matrix, or for its transpose; None: one can.

    The conditions are those of ``cuTensorMapEncodeTiled`` (CUDA driver API), and that no two elements share memory.
    """
    (rows, cols), (outer, inner) = matrix.shape, matrix.stride()
    if rows == 0 or cols == 0:
        return "it is empty"
    if inner != 1:
        rows, cols, outer, inner = cols, rows, inner, outer
    if inner != 1:
        return f"no dimension has stride 1: the strides are {tuple(matrix.stride())}"
    apart = outer * matrix.element_size()
    if outer < cols:
        return f"rows of {cols} elements overlap: the strides are {tuple(matrix.stride())}"
    if apart % 16:
        return f"its rows are {apart} bytes apart, not a multiple of 16"
    if matrix.data_ptr() % 16:
        return "its first element is not at a multiple of 16 bytes"
    if max(rows, cols) > _LARGEST_SIZE or apart >= _LARGEST_STRIDE:
        return f"it is too large: {rows} x {cols}, {outer} elements apart"
    return None


def persistent_reason(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype) -> str | None:
    """Why :func:`persistent_forward` cannot serve matrices on their device; None: it can.

    Args:
        x, w: (M, K) and (N, K).
        out_dtype: of the result, which is contiguous, as is what is kept for the backward, in the dtype of x.
    """
    if TensorDescriptor is None:
        return f"Triton {triton.__version__} has no tensor descriptors"
    facts = device_facts(x.device)
    if facts.vendor != "interpreter" and facts.capability < 90:
        return f"{facts.arch} copies no tiles by tensor descriptors"
    for name, matrix in (("input", x), ("weight", w)):
        reason = descriptors_reason(matrix)
        if reason is not None:
            return f"{name}: {reason}"
    row = w.shape[0] * min(out_dtype.itemsize, x.element_size())
    return f"output: its rows are {row} bytes apart, not a multiple of 16" if row % 16 else None


def _parts(config: LinearConfig, warp_size: int) -> int:
    """So many that a thread has at most 32 sums in hand while it finishes them."""
    return min(4, max(1, config.rows * config.cols // (32 * config.num_warps * warp_size)))


def resident_programs(config: LinearConfig, itemsize: int, result_itemsize: int, shared_memory: int) -> int:
    """How many of the kernel's programs a multiprocessor holds: while one finishes a tile, others multiply.

    Args:
        itemsize, result_itemsize: bytes of an element of X and W, and of Y.
        shared_memory: the most that one program may have.
    """
    step = (config.rows + config.cols) * config.depth * itemsize
    stored = config.rows * config.cols // _parts(config, 32) * result_itemsize
    # A program has 1 KiB beside its own (CUDA C++ programming guide, section "compute capability 9.0"), a few barriers
    # among its own, and up to 255 of the 65,536 registers a thread.
    by_memory = (shared_memory + 1024) // (config.num_stages * step + stored + 128 + 1024)
    return max(1, min(by_memory, 65536 // (256 * 32 * config.num_warps)))


def persistent_forward(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    r: torch.Tensor | None,
    seed: torch.Tensor | None,
    y: torch.Tensor | None,
    z: torch.Tensor | None,
    activation: str | None,
    dropout_p: float,
    precision: str,
    config: LinearConfig,
) -> None:
    """Write ``dropout(activation(x wᵀ + b)) + r`` to y, and what the backward needs to z.

    Args:
        x, w: (M, K) and (N, K), of which :func:`persistent_reason` must say nothing.
        b: (N,), contiguous.
        r: (M, N), any strides.
        y, z: (M, N), with contiguous rows, written; None: not wanted.
        config: a tile and its stages and warps; ``splits`` must be 1. The compiler refuses ``specialize`` for some
            configurations (with an error) and some devices (in silence).
    """
    (M, K), N = x.shape, w.shape[0]
    facts = device_facts(x.device)
    parts = _parts(config, facts.warp_size)
    part = [config.rows, config.cols // parts]
    results = [matrix for matrix in (y, z) if matrix is not None]
    itemsize = max(matrix.element_size() for matrix in results)
    resident = resident_programs(config, x.element_size(), itemsize, facts.shared_memory)
    tiles = ceil_div(M, config.rows) * ceil_div(N, config.cols)

    linear_persistent_kernel[(min(tiles, facts.multiprocessor_count * resident),)](
        _descriptor(x, config.rows, config.depth), _descriptor(w, config.cols, config.depth),
        b, r, seed, *(None if matrix is None else TensorDescriptor.from_tensor(matrix, part) for matrix in (y, z)),
        M, N, K, *((0, 0) if r is None else r.stride()),
        *threshold_and_scale(dropout_p),
        ACTIVATION=device_functions(activation)[0], KEEP_OUTPUT=keeps_output(activation),
        X_TRANSPOSED=_stored(x) is not x, W_TRANSPOSED=_stored(w) is not w,
        PRECISION=dot_precision(x, precision),
        BLOCK_M=config.rows, BLOCK_N=config.cols, BLOCK_K=config.depth, GROUP=config.group, PARTS=parts,
        SPECIALIZE=config.specialize, **options(config.num_warps, config.num_stages),
    )  # fmt: skip


def _descriptor(matrix: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
    """A descriptor of a matrix as it is stored, whose block is a tile of so many of the matrix's rows and columns."""
    stored = _stored(matrix)
    return TensorDescriptor.from_tensor(stored, [rows, cols] if stored is matrix else [cols, rows])
