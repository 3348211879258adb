"""The norm launchers' compile cases: each kernel, at each kind of default configuration."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from unittest import mock

import torch

from fusedops.norm.tuning import NormConfig
from fusedops.runtime.backend import HAS_TRITON
from tests.harness.compile import BFLOAT16_TARGETS, Case

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


def _arguments(
    width: int, dtype: torch.dtype, affine: bool, residual: torch.dtype | None, dropout: bool, heads: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, float]:
    x = torch.empty(2, 8, 64, width, dtype=dtype)
    if heads:  # the heads of a packed projection of query, key and value
        x = torch.empty(2, 64, 3, 8, width, dtype=dtype)[:, :, 0].transpose(1, 2)
    return (
        x,
        None if residual is None else torch.empty(x.shape, dtype=residual),
        torch.empty(width, dtype=dtype) if affine else None,
        torch.zeros(1, dtype=torch.int64) if dropout else None,
        0.1 if dropout else 0.0,
    )


def _forward(
    width: int,
    dtype: torch.dtype,
    *,
    kind: str = "layer",
    affine: bool = True,
    residual: torch.dtype | None = None,
    dropout: bool = False,
    heads: bool = False,
) -> Callable[[], object]:
    from fusedops.norm.kernels_forward import norm_forward

    x, r, weight, seed, p = _arguments(width, dtype, affine, residual, dropout, heads)
    bias = weight if kind == "layer" else None
    return lambda: norm_forward(x, r, weight, bias, seed, 1, 1e-5, 0.0, kind, p, dtype)


def _backward(
    width: int,
    dtype: torch.dtype,
    *,
    kind: str = "layer",
    affine: bool = True,
    residual: torch.dtype | None = None,
    dropout: bool = False,
    heads: bool = False,
    recompute: bool = False,
) -> Callable[[], object]:
    from fusedops.norm.kernels_backward import norm_backward

    x, r, weight, seed, p = _arguments(width, dtype, affine, residual, dropout, heads)
    saved = x if residual is None or recompute else r
    statistics = torch.empty(x.shape[:-1])
    needs = (residual is None or dropout or residual != dtype, residual is not None, affine, affine and kind == "layer")
    dtypes = (dtype, residual or dtype, dtype, dtype)
    return lambda: norm_backward(
        x, r, saved, weight, weight, statistics, statistics, seed, 1, 1e-5, 0.0, kind, p, recompute, needs, dtypes
    )


def _cluster(width: int, num_ctas: int, *, kind: str, dropout: bool = False) -> Callable[[], object]:
    """The backward of a row too wide for one multiprocessor, held by a cluster: what a search may find."""
    from fusedops.norm import kernels_backward

    call = _backward(width, _FP16, kind=kind, residual=_FP16, dropout=dropout)
    config = NormConfig(1, width, False, 16, num_ctas=num_ctas)

    def configured() -> object:
        with mock.patch.object(kernels_backward, "resolve", return_value=config):
            return call()

    return configured


def _clusters() -> list[Case]:
    """Triton 3.7 and before cannot compile a reduction across a cluster."""
    if not HAS_TRITON or tuple(map(int, metadata.version("triton").split(".")[:2])) < (3, 9):
        return []
    return [
        Case(
            f"backward_cluster_{kind}_{width}_float16",
            lambda width=width, num_ctas=num_ctas, kind=kind: _cluster(width, num_ctas, kind=kind),
            frozenset({"sm_90", "sm_100"}),
        )
        for kind, width, num_ctas in (("layer", 16384, 2), ("rms", 32768, 4))
    ]


def _cases() -> list[Case]:
    rms, plain = {"kind": "rms"}, {"affine": False}
    forward = [
        ("many_rows_a_program", 64, _FP16, {}),
        ("heads_where_they_lie", 128, _BF16, {**rms, "heads": True}),
        ("heads_of_an_odd_size", 72, _BF16, {**rms, "heads": True}),
        ("width_of_units_of_four", 1004, _FP32, {}),
        ("l2_norm_of_heads", 64, _FP16, {**plain, "kind": "l2", "heads": True}),
        ("one_row", 4096, _BF16, {}),
        ("add_rms_norm", 4096, _BF16, {**rms, "residual": _BF16}),
        ("add_to_a_float32_stream", 8192, _BF16, {"residual": _FP32}),
        ("widest_row_with_dropout", 16384, _FP16, {"residual": _FP16, "dropout": True}),
        ("widest_held_row", 16384, _FP32, {}),
        ("widest_held_row", 32768, _FP16, {"residual": _FP16}),
        ("looped", 65536, _BF16, {}),
        ("looped_with_dropout", 65536, _FP16, {"residual": _FP16, "dropout": True}),
        ("looped_rms_norm_without_weight", 262144, _FP32, {**rms, **plain}),
    ]
    backward = [
        ("many_rows_a_program", 64, _FP16, {}),
        ("heads_where_they_lie", 128, _BF16, {**rms, "heads": True}),
        ("heads_of_an_odd_size", 72, _BF16, {**rms, "heads": True}),
        ("width_of_units_of_four", 1004, _FP32, {}),
        ("l2_norm_of_heads", 64, _FP16, {**plain, "kind": "l2", "heads": True}),
        ("one_row", 1024, _BF16, {}),
        ("add_rms_norm", 4096, _BF16, {**rms, "residual": _BF16}),
        ("widest_held_row", 8192, _FP32, {}),
        ("widest_held_row", 8192, _FP16, {"residual": _FP16, "dropout": True}),
        ("add_to_a_float32_stream", 8192, _BF16, {"residual": _FP32}),
        ("from_the_output", 8192, _FP16, {"recompute": True}),
        ("looped", 16384, _BF16, {}),
        ("looped_with_dropout", 16384, _FP16, {"residual": _FP16, "dropout": True, "recompute": True}),
        ("looped_rms_norm_without_weight", 65536, _FP32, {**rms, **plain}),
    ]
    return [
        Case(
            f"{direction}_{name}_{width}_{str(dtype).removeprefix('torch.')}",
            lambda call=call, width=width, dtype=dtype, options=options: call(width, dtype, **options),
            BFLOAT16_TARGETS if dtype == _BF16 else None,
        )
        for direction, call, table in (("forward", _forward, forward), ("backward", _backward, backward))
        for name, width, dtype, options in table
    ]


CASES = _cases() + _clusters()
