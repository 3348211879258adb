"""Kernels of others beside fusedops' own: textbooks', Liger-Kernel's, a user's."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fusedops.inspection.offline import Launch, capture_launches
from fusedops.inspection.operators import Call, Captured
from fusedops.runtime.device import DeviceFacts
from fusedops.runtime.launch import dtype_named
from fusedops.runtime.launch import options as launch_options

TEXTBOOK, LIGER = "textbook", "liger"

Function = Callable[..., Any]


def tensors_of(op: str, sizes: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors of a call, in the order of the public function's arguments; on the meta device.

    norm: input (rows, width), weight, bias (width,), those that the norm has. group_norm: input (batch, channels,
    spatial), weight, bias (channels,). linear: input (rows, in), weight (out, in), bias (out,) where there is one.
    gated_linear: input, weight_gate, weight_up. attention: q (batch, heads, seqlen_q, d), k, v (batch, kv_heads,
    seqlen_k, d). attention_decode: q (batch, heads, length, d), keys and values (batch, kv_heads, room, d).

    Where the call trains, all of them require a gradient.

    Raises:
        ValueError: others' kernels are not called for this operator.
    """
    get = sizes.get
    dtype = dtype_named(str(get("dtype") or "bfloat16"))
    shapes: list[tuple[int, ...]]
    if op == "norm":
        rows, width, kind = sizes["rows"], sizes["width"], get("kind", "layer")
        weight = kind != "l2" if get("weight") is None else get("weight")
        bias = kind == "layer" if get("bias") is None else get("bias")
        shapes = [(rows, width), *[(width,)] * (bool(weight) + bool(bias))]
    elif op == "group_norm":
        batch, channels, spatial = sizes["batch"], sizes["channels"], sizes["spatial"]
        shapes = [(batch, channels, spatial), *[(channels,)] * (get("weight", True) + get("bias", True))]
    elif op == "linear":
        rows, inner, outer = sizes["rows"], sizes["in_features"], sizes["out_features"]
        shapes = [(rows, inner), (outer, inner), *[(outer,)] * bool(get("bias", True))]
    elif op == "gated_linear":
        rows, inner, outer = sizes["rows"], sizes["in_features"], sizes["out_features"]
        shapes = [(rows, inner), (outer, inner), (outer, inner)]
    elif op in ("attention", "attention_decode"):
        batch, heads, d = sizes["batch"], sizes["heads"], sizes["d"]
        kv_heads, dv = get("kv_heads") or heads, get("dv") or d
        if op == "attention":
            length = sizes["seqlen_q"]
            keys = get("seqlen_k") or length
        else:
            length, keys = get("length", 1), sizes["room"]
        shapes = [(batch, heads, length, d), (batch, kv_heads, keys, d), (batch, kv_heads, keys, dv)]
    else:
        raise ValueError(f"others' kernels are not called for {op}: its tensors are fusedops' own formats")
    trains = bool(get("training", op != "attention_decode")) and op != "attention_decode"
    return [torch.empty(shape, dtype=dtype, device="meta", requires_grad=trains) for shape in shapes]


def compared(
    call: Call, source: str, function: Function | None, facts: DeviceFacts, ours: list[Captured]
) -> list[Captured]:
    """What another's kernels launch for a call.

    Args:
        source: ``textbook``, ``liger``, or the name of ``function``.
        function: a user's, called with the tensors of :func:`tensors_of`; what it returns is differentiated where the
            call trains.
        ours: what fusedops launches for the same call; a textbook's kernel takes its tile, warps and stages. Where
            there is no textbook's, the list lacks it.
    """
    if source == TEXTBOOK:
        found_ones = (_textbook(one) for one in ours)
        return [one for one in found_ones if one is not None]
    try:
        chosen = _liger(call) if function is None else function
        tensors = tensors_of(call.op, call.all_sizes)
        launches, backward = _launched(chosen, tensors, facts)
    except Exception as error:  # another's code may raise anything
        return [Captured(call.op, _line(call), source, facts, error=_told(error))]
    found = []
    for part, chosen_ones in (("forward", launches), ("backward", backward)):
        if chosen_ones and call.only in (None, part):
            found.append(Captured(call.op, f"{part} {_line(call)}", source, facts, launches=tuple(chosen_ones)))
    if not found:
        why = "it launches no Triton kernel" if not launches else f"it launches none in its {call.only}"
        return [Captured(call.op, _line(call), source, facts, error=why)]
    return found


def _launched(function: Function, tensors: list[torch.Tensor], facts: DeviceFacts) -> tuple[list[Launch], list[Launch]]:
    """The launches of a call and of its backward."""
    with _rocm(facts), capture_launches(facts) as launches:
        made = function(*tensors)
        count = len(launches)
        outputs = [one for one in _flat(made) if isinstance(one, torch.Tensor) and one.requires_grad]
        if outputs:
            gradients = [torch.empty_like(one) for one in outputs]
            torch.autograd.grad(outputs, [t for t in tensors if t.requires_grad], gradients, allow_unused=True)
    return launches[:count], launches[count:]


def _flat(made: Any) -> Iterator[Any]:
    if isinstance(made, tuple | list):
        for one in made:
            yield from _flat(one)
    else:
        yield made


@contextlib.contextmanager
def _rocm(facts: DeviceFacts) -> Iterator[None]:
    """For a library that asks torch which vendor's GPUs it was built for, to choose its warps."""
    before = torch.version.hip
    if facts.vendor == "amd":
        torch.version.hip = before or "pretended"
    try:
        yield
    finally:
        torch.version.hip = before


def _line(call: Call) -> str:
    return " ".join(f"{name}={value}" for name, value in call.all_sizes.items())


def _told(error: Exception) -> str:
    if "active drivers" in str(error):
        return "a kernel under triton.autotune runs on a GPU only: launch its .fn, with one configuration"
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


# --- Liger-Kernel ----------------------------------------------------------------------------------------------------


def check_liger(op: str) -> None:
    """Raise what keeps Liger-Kernel from being compared with.

    Raises:
        ValueError: it has no such operator.
        RuntimeError: it is not installed.
    """
    if op not in ("norm", "group_norm"):
        raise ValueError(f"liger is compared in norm and group_norm; it has no kernel of its own for {op}")
    try:
        importlib.import_module("liger_kernel")
    except ImportError:
        raise RuntimeError("liger-kernel is not installed: pip install liger-kernel") from None


def _liger(call: Call) -> Function:
    check_liger(call.op)
    sizes = call.all_sizes
    if call.op == "group_norm":
        norm = importlib.import_module("liger_kernel.ops.group_norm").LigerGroupNormFunction
        groups = sizes.get("groups", 32)
        return lambda x, weight, bias: norm.apply(x, weight, bias, x.shape[1], groups, 1e-5)
    kind = sizes.get("kind", "layer")
    if kind == "layer":
        norm = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
        return lambda x, weight, bias: norm.apply(x, weight, bias, 1e-5)
    if kind == "rms":
        norm = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
        return lambda x, weight: norm.apply(x, weight, 1e-5, 0.0, "llama", False)
    raise ValueError(f"liger has no {kind} norm")


# --- textbook --------------------------------------------------------------------------------------------------------


# What there is one of.
TEXTBOOKS = "attention's forward, the norms' forward and linear's products"


def _textbook(ours: Captured) -> Captured | None:
    """The textbook's kernel of the same problem, tile, warps and stages; None: there is none."""
    problem = dict(word.partition("=")[::2] for word in ours.problem.split(" "))
    if ours.config is None or not ours.launches or not _has_textbook(ours, problem):
        return None
    make = functools.partial(Captured, ours.op, ours.problem, TEXTBOOK, ours.facts)
    try:
        with capture_launches(ours.facts) as launches:
            notes = _launch_textbook(ours, problem)
    except ValueError as error:
        return make(error=str(error))
    return make(launches=tuple(launches), notes=notes, memory_bound=ours.memory_bound)


def _has_textbook(ours: Captured, problem: Mapping[str, str]) -> bool:
    if ours.op == "norm":
        return problem["direction"] == "forward" and problem["kind"] in ("layer", "rms")
    if ours.op == "attention":
        return problem["kernel"] == "forward"
    return ours.op == "linear" and any(launch.name != "grad_preactivation_kernel" for launch in ours.launches)


def _launch_textbook(ours: Captured, problem: Mapping[str, str]) -> tuple[str, ...]:
    config: Any = ours.config
    dtype = dtype_named(problem["dtype"])
    options = launch_options(config.num_warps, config.num_stages)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if ours.op == "norm":
        from fusedops.inspection.textbook import norm

        width = int(problem["width"])
        weight, bias = (empty(width) if problem[name] == "yes" else None for name in ("weight", "bias"))
        norm.launch(empty(int(problem["rows"]), width), weight, bias, problem["kind"] == "rms", options)
        return ("no residual, dropout or statistics to be kept",)
    if ours.op == "attention":
        from fusedops.inspection.textbook import attention

        d, dv = int(problem["d_k"]), int(problem["d_v"])
        if d != dv or d & (d - 1):
            raise ValueError("the textbook's attention takes a head size that is a power of two")
        heads, keys = int(problem["heads"]), int(problem["heads"]) // int(problem["queries"])
        length = int(problem["seqlen_q"])
        if length != int(problem["seqlen_k"]):
            raise ValueError("the textbook's attention takes as many queries as keys")
        q, k, v = (empty(1, count, length, d) for count in (heads, keys, keys))
        causal = problem["causal"] == "yes"
        attention.launch(q, k, v, causal, (config.block_m, config.block_n), options)
        return ()
    from fusedops.inspection.textbook import product

    rows, cols, depth = (int(problem[name]) for name in ("rows", "cols", "depth"))
    # The operands as the problem's layout has them; the textbook's B is (depth, cols).
    layout = problem["layout"]
    first, second = layout[0], layout[1]
    if problem["product"] == "forward":
        a, b = _matrix(empty, rows, depth, first), _matrix(empty, cols, depth, second).t()
    elif problem["product"] == "grad_input":
        a, b = _matrix(empty, rows, depth, first), _matrix(empty, depth, cols, second)
    else:
        a, b = _matrix(empty, depth, rows, first).t(), _matrix(empty, depth, cols, second)
    gelu = problem["product"] == "forward" and problem["activation"] != "none"
    product.launch(a, b, empty(cols) if gelu else None, (config.rows, config.cols, config.depth), options)
    return ("it ends with a bias and the GELU",) if gelu else ("the bare product",)


def _matrix(empty: Callable[..., torch.Tensor], rows: int, cols: int, letter: str) -> torch.Tensor:
    return empty(rows, cols) if letter == "r" else empty(cols, rows).t()
