"""``linear.py --static``: what the linear kernels' main loops consist of, read from their code. No GPU is needed.

Each kernel is called on CPU tensors while launches are written down instead of run
(:mod:`fusedops.inspection.offline`), compiled for the target, and its machine code is read
(:mod:`fusedops.inspection.sass`). Beside it stands the product of :mod:`fusedops.inspection.textbook`, compiled with
the same tile, warps and stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import fusedops
from benchmarks.compare import OURS
from benchmarks.linear_providers import launching
from benchmarks.measure import markdown_table
from fusedops.inspection.offline import Launch, capture_launches, compile_launch, target_facts
from fusedops.inspection.sass import main_loop, serialised
from fusedops.runtime.launch import options as launch_options

TARGETS = ("sm_80", "sm_90", "sm_100")
TEXTBOOK = "textbook"

Pair = tuple[torch.Tensor, torch.Tensor]

# Sizes for which every architecture takes its largest tile; few rows for what is meant for them.
SIZE, FEW_ROWS = 8192, 16


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel, and the textbook product of the same tile.

    Attributes:
        name: of the Triton function.
        call: launches it, perhaps among others, given the operands' dtype.
        choice: which of fusedops' candidates is taken, as of :func:`benchmarks.linear_providers.launching`.
        tile: names of the compile-time arguments that are (rows, columns, depth) of the result's tile.
        columns: products a column of the tile: 2 where the kernel computes two in one.
        operands: A and B of the textbook product, given the dtype and sizes of the tile; None: there is no such
            product, for the operands are not of that dtype.
        gelu: the textbook product ends with a bias and the GELU too.
        least: the first compute capability that has it.
    """

    name: str
    call: Callable[[torch.dtype], object]
    choice: str = "tiled"
    tile: tuple[str, str, str] = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
    columns: int = 1
    operands: Callable[[torch.dtype], Pair] | None = None
    gelu: bool = False
    least: int = 80


def _empty(dtype: torch.dtype, *shape: int, grad: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=grad)  # not even touched


def _linear(rows: int) -> Callable[[torch.dtype], object]:
    """The forward with a GELU whose input is kept for the backward."""

    def call(dtype: torch.dtype) -> object:
        weight, bias = _empty(dtype, SIZE, SIZE, grad=True), _empty(dtype, SIZE)
        return fusedops.linear(_empty(dtype, rows, SIZE), weight, bias, activation="gelu")

    return call


def _linear_backward(dtype: torch.dtype) -> object:
    x, weight, bias = (_empty(dtype, *shape, grad=True) for shape in ((SIZE, SIZE), (SIZE, SIZE), (SIZE,)))
    output = fusedops.linear(x, weight, bias)
    return torch.autograd.grad(output, (x, weight, bias), _empty(dtype, SIZE, SIZE))


def _gated(dtype: torch.dtype) -> object:
    x, gate, up = (_empty(dtype, SIZE, SIZE, grad=True) for _ in range(3))
    return fusedops.gated_linear(x, gate, up, activation="silu")


def _fp8(dtype: torch.dtype) -> object:
    x, weight = (torch.empty(SIZE, SIZE, dtype=torch.uint8).view(torch.float8_e4m3fn) for _ in range(2))
    return fusedops.fp8_linear(x, weight, torch.ones(SIZE), torch.ones(SIZE), activation="silu", out_dtype=dtype)


def _quantized(bits: int) -> Callable[[torch.dtype], object]:
    def call(dtype: torch.dtype) -> object:
        weight = torch.empty(SIZE, SIZE * bits // 8, dtype=torch.int8 if bits == 8 else torch.uint8)
        scales = torch.empty(SIZE, SIZE // 128, dtype=dtype)
        return fusedops.quantized_linear(_empty(dtype, FEW_ROWS, SIZE), weight, scales, group_size=128)

    return call


def _plain(
    rows: int, transposed_a: bool, transposed_b: bool
) -> Callable[[torch.dtype], tuple[torch.Tensor, torch.Tensor]]:
    def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        a = _empty(dtype, SIZE, rows).t() if transposed_a else _empty(dtype, rows, SIZE)
        b = _empty(dtype, SIZE, SIZE)
        return a, b.t() if transposed_b else b

    return operands


_FORWARD = _plain(SIZE, False, True)  # X Wᵀ

KERNELS: dict[str, Kernel] = {
    "forward": Kernel("linear_forward_kernel", _linear(SIZE), operands=_FORWARD, gelu=True),
    "persistent": Kernel(
        "linear_persistent_kernel", _linear(SIZE), "persistent", operands=_FORWARD, gelu=True, least=90
    ),
    "skinny": Kernel(
        "linear_skinny_kernel", _linear(FEW_ROWS), "skinny", operands=_plain(FEW_ROWS, False, True), gelu=True
    ),
    "grad_input": Kernel(
        "grad_input_kernel",
        _linear_backward,
        tile=("BLOCK_M", "BLOCK_K", "BLOCK_N"),
        operands=_plain(SIZE, False, False),
    ),
    "grad_weight": Kernel(
        "grad_weight_kernel",
        _linear_backward,
        tile=("BLOCK_N", "BLOCK_K", "BLOCK_M"),
        operands=_plain(SIZE, True, False),
    ),
    "gated": Kernel("gated_linear_kernel", _gated, columns=2, operands=_FORWARD),
    "fp8": Kernel("fp8_linear_kernel", _fp8, least=89),
    "int8": Kernel("quantized_linear_kernel", _quantized(8)),
    "int4": Kernel("quantized_linear_kernel", _quantized(4)),
}


@dataclass(frozen=True, slots=True)
class StaticResult:
    """One kernel's code.

    Attributes:
        case: a key of KERNELS.
        source: ``fusedops`` or ``textbook``.
        tile: rows x columns x depth of the result's tile and of a step.
        matrix: the matrix instructions of the main loop, the most frequent first.
        matrix_count, copies, barriers, others: instructions of the main loop, each counted once.
        serialised: the assembler waits for every single asynchronous product (ptxas' warning C7511).
        error: why there is no figure; None: there is.
    """

    target: str
    case: str
    source: str
    kernel: str
    dtype: str
    tile: str | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    matrix: str | None = None
    matrix_count: int | None = None
    copies: int | None = None
    barriers: int | None = None
    others: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    shared: int | None = None
    serialised: bool | None = None
    error: str | None = None

    @property
    def others_per_matrix(self) -> float | None:
        """Instructions that are not matrix, copy or barrier, a matrix instruction."""
        return self.others / self.matrix_count if self.matrix_count and self.others is not None else None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "others_per_matrix": self.others_per_matrix}

    row = as_dict


def inspect(case: str, target: str, dtype: torch.dtype) -> list[StaticResult]:
    """A kernel and the textbook product of its tile, compiled for a target; nothing where the target has none."""
    kernel = KERNELS[case]
    if target_facts(target).capability < kernel.least:
        return []
    names = {"target": target, "case": case, "dtype": str(dtype).removeprefix("torch.")}
    try:
        with fusedops.backend("triton"), capture_launches(target) as launches, launching(kernel.choice):
            kernel.call(dtype)
        ours = next(launch for launch in launches if launch.name == kernel.name)
    except Exception as error:  # a kernel that this version cannot launch is a result; the others are still wanted
        return [StaticResult(**names, source=OURS, kernel=kernel.name, error=_short(error))]
    rows, cols, depth = (int(ours.kwargs[name]) for name in kernel.tile)
    tile = (rows, cols * kernel.columns, depth)
    results = [_read(ours, tile, target, {**names, "source": OURS, "kernel": kernel.name})]
    if kernel.operands is not None:
        from fusedops.inspection.textbook import product as textbook

        a, b = kernel.operands(dtype)
        options = launch_options(ours.kwargs["num_warps"], ours.kwargs["num_stages"])
        with capture_launches(target) as launches:
            textbook.launch(a, b, _empty(dtype, SIZE) if kernel.gelu else None, tile, options)
        found = {**names, "source": TEXTBOOK, "kernel": launches[0].name}
        results.append(_read(launches[0], tile, target, found))
    return results


def _read(launch: Launch, tile: tuple[int, int, int], target: str, names: dict[str, str]) -> StaticResult:
    shape = " x ".join(map(str, tile))
    options = {"tile": shape, "num_warps": launch.kwargs["num_warps"], "num_stages": launch.kwargs["num_stages"]}
    try:
        compiled = compile_launch(launch, target)
        loop = main_loop(compiled)
        matrix = () if loop is None else loop.names("matrix")
        resources = {
            "registers": compiled.registers, "spill_bytes": compiled.spill_bytes, "shared": compiled.shared,
            # To find out, the code is assembled again: where products are asynchronous.
            "serialised": any("GMMA" in name for name in matrix) and serialised(compiled),
        }  # fmt: skip
    except Exception as error:  # one that does not compile is a result too
        return StaticResult(**names, **options, error=_short(error))
    if loop is None:
        return StaticResult(**names, **options, **resources, error="no loop has matrix instructions")
    counts = {
        "matrix": ", ".join(matrix), "matrix_count": loop.count("matrix"), "copies": loop.count("copy"),
        "barriers": loop.count("barrier"), "others": loop.count("other"),
    }  # fmt: skip
    return StaticResult(**names, **options, **resources, **counts)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def table(results: Sequence[StaticResult]) -> str:
    """A row a kernel; where a textbook product stands beside it, its figures follow ours."""
    columns = (
        "target", "kernel", "tile", "warps, stages", "matrix", "copies", "barriers", "others/matrix", "registers",
        "spilled B", "shared B",
    )  # fmt: skip
    groups: dict[tuple[str, str], list[StaticResult]] = {}
    for result in results:
        groups.setdefault((result.target, result.case), []).append(result)
    return markdown_table(columns, [_row(group) for group in groups.values()])


def _row(group: Sequence[StaticResult]) -> tuple[str, ...]:
    ours = group[0]
    launch = "–" if ours.num_warps is None else f"{ours.num_warps}, {ours.num_stages}"
    figures = ("copies", "barriers", "others_per_matrix", "registers", "spill_bytes", "shared")
    return (
        ours.target, ours.case, ours.tile or "–", launch, " / ".join(dict.fromkeys(map(_matrix, group))),
        *(" / ".join(_cell(getattr(result, figure)) for result in group) for figure in figures),
    )  # fmt: skip


def _matrix(result: StaticResult) -> str:
    if result.error is not None:
        return result.error[:60]
    return f"{result.matrix_count} {result.matrix}{' serialised' if result.serialised else ''}"


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


NOTE = (
    "Instructions of the main loop as they stand in the code, each once; others: not matrix, copy or barrier."
    " tile: rows x columns x depth. After the /: a textbook product with the same tile, warps and stages."
)
